"""Experts spread over two ranks, also when one has more than the other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine import rank_functions
from tests.engine.harness import core_of, engine
from tests.engine.test_ranks import OPTIONS, PROMPTS, SAMPLED, same_bits, tokens
from tests.grids import at_night
from tests.models.oracle import relative_error
from vllm import LLM
from vllm.hidden_states import HiddenStatesSample

Checkpoint = Callable[..., Path]
SPREAD: dict[str, Any] = {"tensor_parallel_size": 2, "enable_expert_parallel": True}


def traced(llm: LLM) -> list[HiddenStatesSample]:
    return list(llm.extract(PROMPTS, layers=[0, 2, 4, "norm"], hooks=["blocks.2.hook_mlp_out"]))


WHOLE_GROUPS = {"hidden_size": 256, "head_dim": 128, "moe_intermediate_size": 128}


@pytest.mark.parametrize(
    ("sizes", "options", "stages"),
    [({}, {}, 1), at_night(WHOLE_GROUPS, {"quantization": "int8"}, 1), at_night({}, {}, 2)],
)
def test_each_rank_has_whole_experts(
    sizes: dict[str, int], options: dict[str, Any], stages: int, checkpoint: Checkpoint
) -> None:
    """Seven experts: three and four. The second layer has none."""
    folder = checkpoint("qwen3_moe", num_experts=7, intermediate_size=256, **sizes)
    options = {**OPTIONS, **options, "expert_trace": True}
    with engine(folder, **options) as llm:
        expected, expected_tokens = traced(llm), tokens(llm, SAMPLED)
        (whole,) = llm.collective_rpc(rank_functions.parameter_bytes)
    with engine(folder, **options, **SPREAD, pipeline_parallel_size=stages) as llm:
        llm.collective_rpc(rank_functions.poison)
        found = traced(llm)
        shares = llm.collective_rpc(rank_functions.parameter_bytes)
        # Keys and values have to be computed in two parts, so the last bits differ.
        for ours, one in zip(found, expected, strict=True):
            assert relative_error(ours.hidden_states, one.hidden_states) < 1e-5
            assert torch.equal(ours.tensors["expert_ids"], one.tensors["expert_ids"])
            for name, values in one.activations.items():
                assert relative_error(ours.activations[name], values) < 1e-5
        assert tokens(llm, SAMPLED) == expected_tokens
        assert core_of(llm).executor.worker.model_runner.requests == {}
    assert max(shares) < 0.75 * whole or stages > 1 or options.keys() > OPTIONS.keys()


@pytest.mark.exhaustive
def test_chunks_change_no_bit(checkpoint: Checkpoint) -> None:
    folder = checkpoint("qwen3_moe", num_experts=7, intermediate_size=256)
    found = []
    for options in ({}, {"max_num_batched_tokens": 16}):
        with engine(folder, **OPTIONS, **SPREAD, **options) as llm:
            found.append(traced(llm))
    assert same_bits(*found)


def test_one_rank_has_all_experts(checkpoint: Checkpoint) -> None:
    folder = checkpoint("qwen3_moe", num_experts=7, intermediate_size=256)
    with engine(folder, **OPTIONS, enable_expert_parallel=True) as llm:
        assert len(traced(llm)) == len(PROMPTS)


@pytest.mark.exhaustive
def test_fewer_experts_than_ranks_are_refused(checkpoint: Checkpoint) -> None:
    folder = checkpoint("qwen3_moe", num_experts=1, num_experts_per_tok=1)
    with pytest.raises(ValueError, match=r"the 1 experts of .*tensor_parallel_size=2 ranks"):
        LLM(str(folder), **OPTIONS, **SPREAD)
