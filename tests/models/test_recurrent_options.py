"""Configs of recurrent families that cannot be served: the error names the field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.models.checkpoints import make_checkpoint
from tests.models.harness import make_config
from vllm.model_executor.model_loader import get_model

CASES = [
    ("lfm2", {"conv_L_cache": 9}, "conv_L_cache=9 is not supported; supported: 2 to 8"),
    ("lfm2", {"layer_types": ["conv"] * 4 + ["hybrid"]}, r"layer_types\[4\]='hybrid' is not"),
    ("lfm2", {"layer_types": ["conv"] * 4}, r"number of `layer_types` \(4\)"),
    ("mamba", {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported; supported: 'silu'"),
    ("mamba", {"conv_kernel": 1}, "conv_kernel=1 is not supported"),
    ("jamba", {"mamba_d_conv": 16}, "mamba_d_conv=16 is not supported"),
    ("olmo_hybrid", {"linear_num_key_heads": 3}, "linear_num_key_heads=3 does not divide"),
    ("recurrent_gemma", {"conv1d_width": 9}, "conv1d_width=9 is not supported"),
    (
        "recurrent_gemma",
        {"hidden_activation": "tan"},
        r"\bhidden_activation='tan' is not supported",
    ),
    ("recurrent_gemma", {"lru_width": 71}, "num_attention_heads=6 does not divide lru_width=71"),
    ("zamba", {"n_mamba_heads": 5}, "should be divisible by `n_mamba_heads`"),
    ("zamba", {"n_mamba_heads": -3}, "n_mamba_heads=-3 has to be a whole number above 0"),
    ("zamba", {"hidden_mamba_act": "gelu"}, "hidden_mamba_act='gelu' is not supported"),
    ("zamba", {"attention_hidden_size": 72}, "attention_hidden_size=72 is not supported"),
    ("zamba2", {"hybrid_layer_ids": [4, 3, 1]}, r"=\[4, 3, 1\] is not supported.*\[1, 3, 4\]"),
    ("xlstm", {"num_heads": 4}, r"num_heads=4 does not divide hidden_size \* qk_dim_factor = 54"),
    ("xlstm", {"v_dim_factor": 1.0, "num_heads": 27}, "num_heads=27 does not divide .* v_dim"),
    ("xlstm", {"inference_state_dtype": "bfloat16"}, "inference_state_dtype='bfloat16' is not"),
    ("xlstm", {"gate_soft_cap": 0.0}, "gate_soft_cap=0.0 has to be above 0"),
    ("xlstm", {"embedding_dim": 64}, "embedding_dim=64 is not supported; supported: 72"),
    ("xlstm", {"norm_reduction_force_float32": False}, "norm_reduction_force_float32=False"),
    ("xlstm", {"add_out_norm": False}, "add_out_norm=False is not supported"),
    ("xlstm", {"mode": "predict"}, "mode"),
    ("xlstm", {"step_kernel": "triton"}, "step_kernel"),
    ("nemotron_h", {"mlp_hidden_act": "tan"}, r"\bmlp_hidden_act='tan' is not supported"),
    ("gpt2", {"activation_function": "tan"}, r"\bactivation_function='tan' is not supported"),
    ("falcon", {"activation": "tan"}, r"\bactivation='tan' is not supported"),
    ("gemma2", {"hidden_activation": "tan"}, r"\bhidden_activation='tan' is not supported"),
    ("gemma4", {"hidden_activation": "tan"}, r"\bhidden_activation='tan' is not supported"),
    ("nemotron_h", {"num_attention_heads": 5}, r"num_key_value_heads, num_attention_heads"),
    ("nemotron_h", {"n_group": 4}, "n_group=4 does not divide the 6 experts"),
    ("deepseek_v3", {"n_group": 0}, "n_group=0 does not divide the 6 experts"),
    ("deepseek_v3", {"topk_group": 9}, "topk_group=9 has to be 1 to n_group=3"),
    ("deepseek_v3", {"num_experts_per_tok": 5}, "num_experts_per_tok=5: .* but there are 4"),
    ("longcat_flash", {"moe_topk": 0}, "moe_topk=0: .* 0 experts a token, but there are 9"),
    ("deepseek_v3", {"n_routed_experts": -1}, "n_routed_experts=-1 has to be .* at least 0"),
    ("deepseek_v3", {"v_head_dim": -3}, "v_head_dim=-3 has to be a whole number above 0"),
    ("rwkv", {"attention_hidden_size": -1}, "attention_hidden_size=-1 has to be a whole number"),
    ("longcat_flash", {"kv_lora_rank": 0}, "kv_lora_rank=0 has to be a whole number above 0"),
    ("minicpm3", {"kv_lora_rank": 0}, "kv_lora_rank=0 has to be a whole number above 0"),
    ("glm4_moe_lite", {"num_hidden_layers": 9}, r"mlp_layer_types\[4\]=None is not supported"),
    ("glm4_moe_lite", {"mlp_layer_types": ["moe"] * 4}, r"mlp_layer_types\[0\]='moe' is not"),
    ("deepseek_v32", {"index_topk": 0}, "index_topk=0 has to be a whole number above 0"),
    ("kimi_linear", {"linear_num_heads": -1}, "linear_num_heads=-1 has to be a whole number"),
    ("qwen3_next", {"linear_num_key_heads": 0}, "linear_num_key_heads=0 has to be a whole number"),
    ("mamba", {"state_size": -1}, "state_size=-1 has to be a whole number above 0"),
    ("mamba", {"time_step_rank": 0}, "time_step_rank=0 has to be a whole number above 0"),
    ("jamba", {"mamba_d_state": 0}, "mamba_d_state=0 has to be a whole number above 0"),
    ("zamba2", {"num_mem_blocks": 0}, "num_mem_blocks=0 has to be a whole number above 0"),
    ("recurrent_gemma", {"attention_window_size": -5}, "-5 has to be above 0.*attention_window"),
    ("minimax", {"sliding_window": -5}, "-5 has to be above 0, or None .*: sliding_window"),
    ("mamba2", {"time_step_limit": [1.0]}, r"limits \[1.0\] of the time step .*to be two"),
    ("falcon_h1", {"ssm_multipliers": [1.0]}, r"ssm_multipliers=\[1.0\] has to be 5 numbers"),
    ("falcon_h1", {"mlp_multipliers": [1.0]}, r"mlp_multipliers=\[1.0\] has to be 2 numbers"),
    ("jamba", {"hidden_act": "tan"}, "hidden_act='tan' is not supported"),
]


@pytest.mark.parametrize(("family", "overrides", "message"), CASES)
def test_the_field_is_named(
    family: str, overrides: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = make_checkpoint(tmp_path, family, tokenizer=False)
    options = {"load_format": "dummy", "model_impl": "vllm", "hf_overrides": overrides}
    with pytest.raises(ValueError, match=message):
        get_model(vllm_config=make_config(folder, **options))
