"""Ranks that share tokens between branches (enable_sequence_parallel): the bits of plain ranks.

``test_ranks`` has the case that runs by day.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.harness import engine, extraction_config, greedy, random_prompts, rows_of
from tests.engine.test_ranks import (
    HOOKS,
    OPTIONS,
    PROMPTS,
    SAMPLED,
    SHARED,
    results,
    same_bits,
    sharing,
    tokens,
)
from tests.grids import at_night
from vllm import LLM

Checkpoint = Callable[..., Path]
FOUR = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16}
STAGES = {"pipeline_parallel_size": 2}
ALL_HOOKS = [*HOOKS, "blocks.1.hook_resid_mid", "blocks.2.hook_resid_pre", "blocks.3.mlp.hook_out"]
ROUTED = ["blocks.0.hook_attn_out", "blocks.2.hook_mlp_out", "blocks.2.mlp.hook_router_logits"]
NORMED = ["blocks.0.attn.hook_out", "blocks.1.hook_attn_out", "blocks.1.hook_mlp_out"]


@pytest.mark.parametrize(
    ("family", "config", "options", "hooks"),
    [
        at_night("llama", {}, {}, ALL_HOOKS),
        at_night("llama", FOUR, {"tensor_parallel_size": 4}, ALL_HOOKS),
        at_night("llama", {}, STAGES, ALL_HOOKS),
        at_night("llama", {}, {"max_num_batched_tokens": 17, "num_gpu_blocks_override": 13}, HOOKS),
        at_night("llama", {}, {"dtype": "bfloat16"}, ALL_HOOKS),
        at_night("llama", {"num_key_value_heads": 1}, {"decode_context_parallel_size": 2}, HOOKS),
        at_night("gemma3", {}, STAGES, NORMED),
        at_night(
            "openai_gpt", {"n_embd": 72}, {}, ["blocks.0.hook_resid_mid", "blocks.1.attn.hook_z"]
        ),
        at_night(
            "cohere", {"hidden_size": 72}, {}, ["blocks.0.hook_attn_out", "blocks.1.hook_mlp_out"]
        ),
        at_night("kimi_linear", {"linear_num_heads": 4}, {}, []),
        at_night("xlstm", {"num_heads": 6}, {}, []),
        at_night("nemotron_h", {"n_groups": 2}, {}, []),
        at_night("qwen3_moe", {}, {"enable_expert_parallel": True}, ROUTED),
        at_night("qwen3_moe", {}, STAGES, ROUTED),
    ],
)
def test_bits_are_those_of_ranks_that_share_no_tokens(
    family: str,
    config: dict[str, Any],
    options: dict[str, Any],
    hooks: list[str],
    checkpoint: Checkpoint,
) -> None:
    """Rows, hook points, steering, log-probabilities and tokens; also one token in a step."""
    folder = checkpoint(family, **config)
    layers: list[int | str] = [0, 1, 2, 4, "last" if family == "openai_gpt" else "norm"]
    single = [{"prompt_token_ids": [5]}]
    with sharing(folder, **options) as llm:
        found, found_tokens = results(llm, hooks, layers), tokens(llm, SAMPLED)
        (one,) = llm.extract(single, layers=layers)
    plain = {**options, "tensor_parallel_size": options.get("tensor_parallel_size", 2)}
    with engine(folder, **{**OPTIONS, **plain}) as llm:
        assert same_bits(found, results(llm, hooks, layers))
        assert found_tokens == tokens(llm, SAMPLED)
        assert same_bits([one], list(llm.extract(single, layers=layers)))
    assert all(bool(sample.hidden_states.isfinite().all()) for sample in found)


@pytest.mark.exhaustive
def test_files_and_prefix_hits(checkpoint: Checkpoint, tmp_path: Path) -> None:
    files = extraction_config([0, 2, 4, "norm"], tmp_path)
    shared = random_prompts(3, [48])[0]["prompt_token_ids"]
    prompts: list[Any] = [{"prompt_token_ids": [*shared, 7]}, {"prompt_token_ids": [*shared, 8, 9]}]
    found = []
    for start in (sharing, engine):
        options = {**OPTIONS, **SHARED, "enable_sequence_parallel": start is sharing}
        with start(checkpoint("qwen3_5"), **options, **files) as llm:
            outputs = [llm.generate(one, greedy(3), use_tqdm=False)[0] for one in prompts]
            found.append([rows_of(output) for output in outputs])
            assert outputs[1].num_cached_tokens
    assert all(map(torch.equal, *found))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("gemma4", {}, "Gemma4ForCausalLM .*its layers read more than the stream; leave it out"),
        ("longcat_flash", {}, "LongcatFlashForCausalLM .*LongcatFlashDecoderLayer is no Decoder"),
        ("llama", {"model_impl": "transformers"}, "it has no layers of this engine"),
    ],
)
def test_models_whose_layers_read_all_tokens_are_refused(
    family: str, options: dict[str, Any], message: str, checkpoint: Checkpoint
) -> None:
    with pytest.raises(ValueError, match=re.compile(f"enable_sequence_parallel=True: .*{message}")):
        LLM(str(checkpoint(family)), **OPTIONS, **SHARED, **options)
    with engine(checkpoint(family), **OPTIONS, enable_sequence_parallel=True, **options) as llm:
        assert len(list(llm.extract(PROMPTS, layers=[1]))) == len(PROMPTS)  # one rank has them all
