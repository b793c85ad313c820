"""Every model family against transformers: each layer's stream, and the logits."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.models.families import FAMILIES, SLICE
from tests.models.harness import ListSink, SingleRequest, make_config
from tests.models.oracle import reference_run, relative_error
from vllm.forward_context import ForwardContext, set_forward_context

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
YARN |= {"rope_theta": 10000.0}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-relu": ("llama", {"hidden_act": "relu"}),
    "llama-relu2": ("llama", {"hidden_act": "relu2"}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-no-head-dim": ("llama", {"head_dim": None, "num_key_value_heads": 6}),
    "llama-linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0}},
    ),
    "llama-dynamic": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 10000.0}},
    ),
    "llama-part": (  # whole heads are rotated, as there
        "llama",
        {"rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.5}},
    ),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "llama-yarn-mscale": (
        "llama",
        {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3, "beta_fast": 16}},
    ),
    "llama-yarn-factor": (
        "llama",
        {"rope_parameters": {**YARN, "attention_factor": 1.1, "truncate": False}},
    ),
    "llama3": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "mistral": ("mistral", {}),
    "mistral-no-window": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2-layer-types": (
        "qwen2",
        {
            "layer_types": [
                "sliding_attention",
                "full_attention",
                "full_attention",
                "sliding_attention",
            ]
        },
    ),
    "qwen2-window-off": ("qwen2", {"use_sliding_window": False}),
    "qwen3": ("qwen3", {}),
    "qwen3-bias": ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
    "qwen3_5": ("qwen3_5", {}),
    "qwen3_5-interval": (
        "qwen3_5",
        {"layer_types": None, "full_attention_interval": 2, "linear_num_value_heads": 2},
    ),
    "qwen3_5-yarn": (
        "qwen3_5",
        {"rope_parameters": {**YARN, "partial_rotary_factor": 0.25}, "attention_bias": True},
    ),
    "qwen3_5_vl": ("qwen3_5_vl", {}),
    "qwen3_5_vl-tied": ("qwen3_5_vl", {"tie_word_embeddings": True}),
}

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5],
    "long_factor": [4.0, 5.0, 6.0, 7.0, 8.0, 9.0],
}
ALPHA = {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 50.0, "factor": 1.0}

CASES |= {
    "phi3-long": (
        "phi3",
        {
            "rope_parameters": {**LONGROPE, "original_max_position_embeddings": 64},
            "original_max_position_embeddings": 64,
        },
    ),
    "phi3-short": (
        "phi3",
        {
            "rope_parameters": {**LONGROPE, "original_max_position_embeddings": 128},
            "original_max_position_embeddings": 128,
        },
    ),
    "phi-tied": ("phi", {"tie_word_embeddings": True, "qk_layernorm": False}),
    "hunyuan-alpha": ("hunyuan", {"rope_parameters": ALPHA}),
    "qwen3_moe-sparse-step": ("qwen3_moe", {"decoder_sparse_step": 2, "norm_topk_prob": False}),
    "glm4_moe-plain": (
        "glm4_moe",
        {"n_group": 1, "topk_group": 1, "use_qk_norm": False, "attention_bias": True},
    ),
    "gemma2-uncapped": (
        "gemma2",
        {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "olmo3-yarn": (
        "olmo3",
        {"rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_theta": 700.0}}},
    ),
    "olmo3-yarn-truncate": (  # transformers truncates all the same
        "olmo3",
        {
            "rope_parameters": {
                "full_attention": {**YARN, "original_max_position_embeddings": 16}
                | {"rope_theta": 500.0, "truncate": False},
                "sliding_attention": {"rope_theta": 700.0},
            }
        },
    ),
    "cohere-no-norm": ("cohere", {"use_qk_norm": False}),
    "falcon-all-heads": ("falcon", {"multi_query": False}),
    "falcon-in-turn": ("falcon", {"parallel_attn": False}),
    "falcon-11b": ("falcon_40b", {"num_ln_in_parallel_attn": 1}),
    "olmo_hybrid-no-rope": (
        "olmo_hybrid",
        {"rope_parameters": None, "linear_allow_neg_eigval": False, "attention_bias": True},
    ),
    "gemma4-own-caches": (
        "gemma4",
        {"num_kv_shared_layers": 0, "use_double_wide_mlp": False, "attention_bias": True},
    ),
    "llama4-every-layer": (
        "llama4",
        {"interleave_moe_layer_step": 1, "use_qk_norm": False, "num_experts_per_tok": 2},
    ),
    "llama4-no-tuning": (
        "llama4",
        {"attn_temperature_tuning": False, "attention_bias": True, "attention_chunk_size": 16},
    ),
    "exaone4-no-window": (
        "exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 4},
    ),
    "stablelm-parallel": ("stablelm", {"use_parallel_residual": True, "qk_layernorm": False}),
    "phi-no-norm": ("phi", {"qk_layernorm": False}),
    "kimi_linear-low-rank": ("kimi_linear", {"q_lora_rank": 28, "attention_bias": True}),
    "bailing_hybrid-free-gate": ("bailing_hybrid", {"kda_safe_gate": False}),
    "gpt2-plain": (
        "gpt2",
        {"scale_attn_by_inverse_layer_idx": False, "n_inner": None},
    ),
}
CASES |= {
    "deepseek_v2-lite": (
        "deepseek_v2",
        {"q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "topk_group": 1},
    ),
    "deepseek_v2-bias": ("deepseek_v2", {"attention_bias": True, "rope_parameters": None}),
    "deepseek_v3-halves": ("deepseek_v3", {"rope_interleave": False, "norm_topk_prob": False}),
    "deepseek_v3-plain-query": (
        "deepseek_v3",
        {"q_lora_rank": None, "n_group": 1, "topk_group": 1},
    ),
    "glm4_moe_lite-bias": ("glm4_moe_lite", {"attention_bias": True, "mlp_layer_types": None}),
    "minicpm3-tied": ("minicpm3", {"q_lora_rank": None, "tie_word_embeddings": True}),
    "mamba-plain": (
        "mamba",
        {"residual_in_fp32": False, "use_bias": False, "use_conv_bias": False},
    ),
    "mamba2-plain": (
        "mamba2",
        {
            "residual_in_fp32": False,
            "use_bias": False,
            "use_conv_bias": False,
            "tie_word_embeddings": True,
            "time_step_limit": [0.0, float("inf")],
        },
    ),
    "nemotron_h-plain": (
        "nemotron_h",
        {
            "moe_latent_size": None,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "mlp_bias": True,
            "use_bias": True,
            "use_conv_bias": False,
        },
    ),
    "bamba-biases": (
        "bamba",
        {
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "mlp_bias": True,
            "attn_layer_indices": None,
        },
    ),
    "granite_moe_hybrid-dense": (
        "granite_moe_hybrid",
        {"num_local_experts": 0, "position_embedding_type": "rope"},
    ),
    "falcon_h1-no-norm": ("falcon_h1", {"mamba_rms_norm": False, "mamba_proj_bias": True}),
    "falcon_h1-norm-first": ("falcon_h1", {"mamba_norm_before_gate": True}),
    "falcon_h1-biases": ("falcon_h1", {"attention_bias": True, "projectors_bias": True}),
    "zamba-untied": (
        "zamba",
        {
            "tie_word_embeddings": False,
            "n_mamba_heads": 1,
            "mamba_proj_bias": False,
            "mamba_conv_bias": False,
            "layers_block_type": None,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
        },
    ),
    "rwkv-plain": (
        "rwkv",
        {"rescale_every": 0, "attention_hidden_size": None, "tie_word_embeddings": True},
    ),
    "xlstm-plain": ("xlstm", {"use_bias": False, "tie_word_embeddings": True}),
    "xlstm-recurrent": ("xlstm", {"chunk_size": 128, "num_heads": 1, "gate_soft_cap": 15.0}),
    "zamba2-untied": ("zamba2", {"tie_word_embeddings": False}),
    "zamba2-one-block": (
        "zamba2",
        {
            "num_mem_blocks": 1,
            "use_mem_rope": False,
            "use_shared_attention_adapter": False,
            "add_bias_linear": True,
            "mamba_ngroups": 1,
        },
    ),
}
CASES |= {family: (family, {}) for family in FAMILIES if family not in CASES}

NUM_TOKENS = 101


def prompt(num_tokens: int = NUM_TOKENS, seed: int = 7) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(VOCAB_SIZE, (num_tokens,), generator=generator).tolist()
    return ids


@pytest.mark.parametrize("case", CASES)
def test_streams_and_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    family, overrides = CASES[case]
    folder = make_checkpoint(tmp_path, family, tokenizer=False, **overrides)
    expected = reference_run(folder, prompt())
    for chunks in ([], [1, 37, 16, 2]):
        request = SingleRequest(make_config(folder, max_model_len=NUM_TOKENS), NUM_TOKENS)
        sink = ListSink(frozenset(range(request.num_layers + 1)))
        logits = request.run_chunks(prompt(), chunks, sink)
        errors = [relative_error(sink.rows(i), s) for i, s in enumerate(expected.streams)]
        assert len(errors) == request.num_layers + 1
        assert max(errors) <= 1e-4, errors
        assert relative_error(logits, expected.logits) <= 1e-4


def test_layers_differ(tmp_path: Path) -> None:
    """The comparisons above mean something only where every layer changes the stream."""
    for family in FAMILIES:
        folder = make_checkpoint(tmp_path / family, family, tokenizer=False)
        streams = reference_run(folder, prompt()).streams
        steps = [relative_error(b, a) for a, b in pairwise(streams)]
        assert min(steps) > 0.5, steps


_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts")


def every_expert(family: str) -> dict[str, int]:
    """All experts, and all earlier tokens, for every token: another choice, by a rounding, is an
    error of any size. transformers' xLSTM fails in bfloat16 unless it goes token by token."""
    config = FAMILIES[family].config
    counts = [config[name] for name in _NUM_EXPERTS if name in config]
    groups = {"topk_group": config["n_group"]} if "n_group" in config else {}
    tokens = {"index_topk": NUM_TOKENS} if "index_topk" in config else {}
    chunks = {"chunk_size": NUM_TOKENS + 1} if family == "xlstm" else {}
    return {name: counts[0] for name in _TOP_K if name in config} | groups | tokens | chunks


@pytest.mark.parametrize("family", SLICE)
def test_bfloat16_is_as_near_to_float32_as_transformers(family: str, tmp_path: Path) -> None:
    options = every_expert(family)
    folder = make_checkpoint(tmp_path, family, dtype=torch.bfloat16, tokenizer=False, **options)
    exact = reference_run(folder, prompt())
    theirs = reference_run(folder, prompt(), torch.bfloat16)
    request = SingleRequest(make_config(folder), NUM_TOKENS)
    assert request.config.model_config.dtype == torch.bfloat16
    sink = ListSink(frozenset(range(request.num_layers + 1)))
    request.run_chunks(prompt(), [], sink)
    for layer_id, stream in enumerate(exact.streams):
        our_error = (sink.rows(layer_id).float() - stream).norm(dim=-1)
        their_error = (theirs.streams[layer_id].float() - stream).norm(dim=-1)
        assert our_error.median() <= 1.25 * their_error.median()
        assert our_error.quantile(0.9) <= 1.5 * their_error.quantile(0.9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", SLICE)
def test_chunks_change_no_bit(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, family, dtype=dtype, tokenizer=False)
    results = []
    for chunks in ([], [64], [1, 37, 16, 2], [33] + [1] * 20):
        request = SingleRequest(make_config(folder), NUM_TOKENS)
        sink = ListSink(frozenset(range(request.num_layers + 1)))
        logits = request.run_chunks(prompt(), chunks, sink)
        results.append([*(sink.rows(i) for i in range(request.num_layers + 1)), logits])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_stopping_at_a_layer_runs_none_above_it(family: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, family, tokenizer=False)
    expected = reference_run(folder, prompt()).streams
    request = SingleRequest(make_config(folder), NUM_TOKENS)
    ran: list[int] = []
    for index, layer in enumerate(request.model.model.layers):
        layer.register_forward_hook(lambda *_, index=index: ran.append(index))
    sink = ListSink(frozenset({0, 2}))
    request.run(prompt(), sink, num_layers_to_run=2)
    assert ran == [0, 1]
    assert sorted(sink.streams) == [0, 2]
    for layer_id in (0, 2):
        assert relative_error(sink.rows(layer_id), expected[layer_id]) <= 1e-4


def test_last_layer_is_captured_before_the_norm_that_is_left_out(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama", tokenizer=False)
    expected = reference_run(folder, prompt()).streams[-1]
    request = SingleRequest(make_config(folder), NUM_TOKENS)
    sink = ListSink(frozenset({request.num_layers}))
    request.run(prompt(), sink, num_layers_to_run=request.num_layers)
    assert relative_error(sink.rows(request.num_layers), expected) <= 1e-4


def test_given_embeddings_are_used_and_left_as_they_are(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama", tokenizer=False)
    request = SingleRequest(make_config(folder), 8)
    plain = request.run(prompt(8))
    request.num_computed = 0
    embeddings = request.model.embed_input_ids(torch.tensor(prompt(8)))
    before = embeddings.clone()
    metadata = request._metadata(0, 8)
    with torch.inference_mode(), set_forward_context(ForwardContext(metadata)):
        output = request.model(None, torch.arange(8), inputs_embeds=embeddings)
    assert torch.equal(output, plain)
    assert torch.equal(embeddings, before)
