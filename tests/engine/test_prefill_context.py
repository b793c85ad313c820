"""Ranks with the same weights that share tokens (prefill_context_parallel_size): the values of one
process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine import rank_functions
from tests.engine.harness import core_of, engine, extraction_config, greedy, rows_of
from tests.engine.test_context_parallel import check_values, max_blocks
from tests.engine.test_ranks import (
    OPTIONS,
    PROMPTS,
    SAMPLED,
    check_hit_inside_a_block,
    check_that_a_step_fails_alone,
    results,
    same_bits,
    sharing,
    tokens,
)
from tests.grids import at_night
from vllm import LLM

Checkpoint = Callable[..., Path]
PAIR: dict[str, Any] = {
    "tensor_parallel_size": 1,
    "enable_sequence_parallel": False,
    "prefill_context_parallel_size": 2,
}
ALL_HOOKS = [
    "blocks.2.hook_attn_out",
    "blocks.1.hook_mlp_out",
    "blocks.1.attn.hook_z",
    "blocks.1.hook_resid_mid",
    "blocks.3.hook_resid_pre",
]


@pytest.fixture(scope="module")
def pair(checkpoint: Checkpoint) -> Iterator[LLM]:
    """Two ranks; their pools, and rows behind the last token, are NaN."""
    with sharing(checkpoint("llama"), **PAIR) as llm:
        yield llm


def test_values_are_those_of_one_process(pair: LLM, checkpoint: Checkpoint) -> None:
    found = results(pair, ALL_HOOKS)
    single = [{"prompt_token_ids": [5]}]
    with engine(checkpoint("llama"), **OPTIONS) as alone:
        check_values(found, results(alone, ALL_HOOKS))
        assert tokens(pair, SAMPLED) == tokens(alone, SAMPLED)
        one, other = (list(llm.extract(single, layers=[0, 4, "norm"])) for llm in (pair, alone))
        check_values(one, other)
        specs = [
            core_of(llm).kv_cache_config.kv_cache_groups[0].kv_cache_spec for llm in (pair, alone)
        ]
    assert [spec.tokens_per_block for spec in specs] == [32, 16]
    assert pair.collective_rpc(rank_functions.context_group) == [(0, 2, 2.0), (1, 2, 2.0)]


def test_what_ranks_cannot_share_is_refused_by_name(checkpoint: Checkpoint) -> None:
    folder, pair = str(checkpoint("llama")), {"prefill_context_parallel_size": 2}
    stores = {"kv_transfer_config": {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}}
    refused: list[tuple[dict[str, Any], str]] = [
        ({"enable_expert_parallel": True}, "enable_expert_parallel: ranks with other tokens"),
        ({"enable_sequence_parallel": True}, "enable_sequence_parallel: the ranks share"),
        ({"expert_trace": True}, "expert_trace=True: the first rank has expert"),
        (stores, "OffloadingConnector', which stores caches, is not supported"),
        ({"distributed_executor_backend": "uni"}, "'uni' has one rank, but 2 .*prefill_context"),
    ]
    for options, message in refused:
        with pytest.raises(ValueError, match=message):
            LLM(folder, **OPTIONS, **pair, **options)


WIDE = {"num_attention_heads": 4, "num_key_value_heads": 1}
TWO, STAGES = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}
SIZES = [
    at_night("llama", {}, {}),
    at_night("llama", {}, {"prefill_context_parallel_size": 3}),
    at_night("llama", {}, {"cp_kv_cache_interleave_size": 16, "kv_cache_layout": "HND"}),
    at_night("llama", {}, TWO),
    at_night("llama", {}, STAGES),
    at_night("llama", WIDE, {**TWO, "decode_context_parallel_size": 2}),
    at_night("deepseek_v3", {}, {**TWO, "decode_context_parallel_size": 2}),
    at_night("deepseek_v3", {}, {"cp_kv_cache_interleave_size": 2}),
    at_night("gpt_oss", {}, {}),
    at_night("gemma3", {}, TWO),
    at_night("qwen3_5", {}, {}),
    at_night("qwen3_5", {}, {**TWO, **STAGES}),
    at_night("qwen3_moe", {}, {}),
    at_night("qwen3_moe", {}, TWO),
    at_night("falcon_h1", {}, {}),
    at_night("rwkv", {}, {}),
]
"""(family, its config, options besides those of a pair)"""


@pytest.mark.parametrize(("family", "config", "options"), SIZES)
def test_chunks_and_a_tiny_pool_change_no_bit(
    family: str, config: dict[str, int], options: dict[str, Any], checkpoint: Checkpoint
) -> None:
    folder, layers = checkpoint(family, **config), [0, 1, 2, "norm"]
    asked = [*PROMPTS, {"prompt_token_ids": PROMPTS[0]["prompt_token_ids"][:50] + [7] * 60}]
    with engine(folder, **OPTIONS) as llm:
        whole = list(llm.extract(asked, layers=layers, top_logprobs=3))
        expected = [o.outputs[0].token_ids for o in llm.generate(asked, greedy(7), use_tqdm=False)]
        needed = max_blocks(llm)
    found = []
    for more in ({}, {"max_num_batched_tokens": 16, "num_gpu_blocks_override": needed + 4}):
        with sharing(folder, **{**PAIR, **options, **more}) as llm:
            found.append(list(llm.extract(asked, layers=layers, top_logprobs=3)))
            outputs = llm.generate(asked, greedy(7), use_tqdm=False)
            assert [output.outputs[0].token_ids for output in outputs] == expected
            (alone,) = llm.extract(asked[-1:], layers=layers)
            assert torch.equal(alone.hidden_states, found[-1][-1].hidden_states)
    # Tensor parallelism sums in another order, too.
    check_values(found[0], whole, 1e-4 if "tensor_parallel_size" in options else 1e-5)
    assert same_bits(*found)


@pytest.mark.parametrize("options", [at_night(TWO), at_night(STAGES)])
def test_hooks_and_steering(options: dict[str, Any], checkpoint: Checkpoint) -> None:
    with sharing(checkpoint("llama"), **{**PAIR, **options}) as llm:
        found, found_tokens = results(llm, ALL_HOOKS), tokens(llm, SAMPLED)
    with engine(checkpoint("llama"), **OPTIONS) as llm:
        check_values(found, results(llm, ALL_HOOKS))
        assert found_tokens == tokens(llm, SAMPLED)


@pytest.mark.exhaustive
def test_bfloat16_is_as_near_to_float32_as_one_process(checkpoint: Checkpoint) -> None:
    folder, half = checkpoint("llama"), {"dtype": "bfloat16"}
    with engine(folder, **OPTIONS) as llm:
        exact = results(llm, ALL_HOOKS)
    with engine(folder, **{**OPTIONS, **half}) as llm:
        one = results(llm, ALL_HOOKS)
    with sharing(folder, **PAIR, **half) as llm:
        several = results(llm, ALL_HOOKS)
    for ours, whole, right in zip(several, one, exact, strict=True):
        away, whole_away = (
            float((found.hidden_states.float() - right.hidden_states).square().mean().sqrt())
            for found in (ours, whole)
        )
        assert away < 1.2 * whole_away


@pytest.mark.exhaustive
def test_files_and_prefix_hits(pair: LLM, checkpoint: Checkpoint, tmp_path: Path) -> None:
    config = extraction_config([0, 2, 4, "norm"], tmp_path / "rows")
    with sharing(checkpoint("llama"), **PAIR, **config) as llm:
        for _ in range(2):  # the second time with prefix hits
            outputs = llm.generate(PROMPTS, greedy(1), use_tqdm=False)
            for output, sample in zip(outputs, results(pair), strict=False):
                assert torch.equal(rows_of(output), sample.hidden_states)
        assert outputs[0].num_cached_tokens


@pytest.mark.exhaustive
def test_a_prefix_hit_ends_inside_a_block(pair: LLM) -> None:
    check_hit_inside_a_block(pair)


@pytest.mark.exhaustive
@pytest.mark.parametrize("failing_rank", [0, 1])
def test_a_step_that_fails_on_one_rank_fails_alone(pair: LLM, failing_rank: int) -> None:
    check_that_a_step_fails_alone(pair, failing_rank)


@pytest.mark.exhaustive
def test_models_whose_layers_read_all_tokens_are_refused(checkpoint: Checkpoint) -> None:
    pair = {"prefill_context_parallel_size": 2}
    for family, options, message in (
        ("gemma4", {}, "Gemma4ForCausalLM .*its layers read more than the stream; leave it out"),
        ("longcat_flash", {}, "LongcatFlashDecoderLayer is no Decoder"),
        ("llama", {"model_impl": "transformers"}, "it has no layers of this engine"),
    ):
        with pytest.raises(ValueError, match=f"prefill_context_parallel_size=2: .*{message}"):
            LLM(str(checkpoint(family)), **OPTIONS, **pair, **options)
