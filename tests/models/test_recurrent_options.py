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
    ("zamba", {"n_mamba_heads": -3}, "n_mamba_heads=-3 does not divide mamba_expand"),
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
