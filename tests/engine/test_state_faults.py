"""Faults that recurrent models have had elsewhere: with one put in, rows are no longer right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.engine.harness import engine, extraction_config, greedy, random_prompts, rows_of
from tests.models.oracle import reference_run, relative_error
from vllm.model_executor.layers.mamba import (
    causal_conv,
    gdn,
    kda,
    lightning,
    mamba1,
    mamba2,
    mlstm,
    rg_lru,
    token_shift,
)
from vllm.model_executor.models import rwkv
from vllm.ops.layout import StatePlan

LAYERS = [0, 2, 4]
CHUNK = 32
FIRST, OTHER = (p["prompt_token_ids"] for p in random_prompts(5, [100, 40]))
SHARED = 80
SECOND = FIRST[:SHARED] + OTHER

Change = Callable[[list[Any]], None]


def in_each_call(
    monkeypatch: pytest.MonkeyPatch, module: Any, operation: str, before: Change, after: Change
) -> None:
    """Change the arguments of a layer's operation before it runs, or what it wrote after that."""
    original = getattr(module, operation)

    def call(*args: Any) -> None:
        changed = list(args)
        before(changed)
        original(*changed)
        after(changed)

    monkeypatch.setattr(module, operation, call)


def nothing(args: list[Any]) -> None:
    pass


def replace_plan(args: list[Any], change: Callable[[StatePlan], StatePlan]) -> None:
    index = next(i for i, value in enumerate(args) if isinstance(value, StatePlan))
    args[index] = change(args[index])


def forget(args: list[Any]) -> None:
    """Every step begins as a request does."""
    replace_plan(args, lambda plan: replace(plan, has_state=torch.zeros_like(plan.has_state)))


def keep_too_early(args: list[Any]) -> None:
    """Snapshots are those of the token before."""
    replace_plan(args, lambda plan: replace(plan, snapshot_tokens=plan.snapshot_tokens - 1))


def round_states(args: list[Any]) -> None:
    """States lie in the pool in 16 bits."""
    state = next(arg for arg in reversed(args[:-1]) if isinstance(arg, torch.Tensor))
    state.copy_(state.bfloat16())


class Fault(NamedTuple):
    """In a family's layer: the module that calls the operation, what is changed."""

    family: str
    module: Any
    operation: str
    before: Change = nothing
    after: Change = nothing


CONVOLUTION = ("nemotron_h", causal_conv, "causal_conv1d")
SCAN = ("nemotron_h", mamba2, "state_space_scan")
FAULTS = {
    "convolution forgotten between chunks": Fault(*CONVOLUTION, forget),
    "state forgotten between chunks": Fault(*SCAN, forget),
    "states kept for prefixes are shifted": Fault(*SCAN, keep_too_early),
    "convolutions kept for prefixes are shifted": Fault(*CONVOLUTION, keep_too_early),
    "states of 16 bits": Fault(*SCAN, after=round_states),
    "tokens shifted over none": Fault("rwkv", token_shift, "causal_conv1d", forget),
    "tokens kept for prefixes are shifted": Fault(
        "rwkv", token_shift, "causal_conv1d", keep_too_early
    ),
    "mean forgotten between chunks": Fault("rwkv", rwkv, "wkv", forget),
    "means of 16 bits": Fault("rwkv", rwkv, "wkv", after=round_states),
    "memory forgotten between chunks": Fault("xlstm", mlstm, "mlstm", forget),
    "memories kept for prefixes are shifted": Fault("xlstm", mlstm, "mlstm", keep_too_early),
    "stabilisers of 16 bits": Fault("xlstm", mlstm, "mlstm", after=round_states),
    "states of heads forgotten between chunks": Fault("zamba", mamba1, "selective_scan", forget),
    "inputs forgotten between chunks": Fault("lfm2", causal_conv, "causal_conv1d", forget),
    "inputs kept for prefixes are shifted": Fault(
        "lfm2", causal_conv, "causal_conv1d", keep_too_early
    ),
    "delta rule forgotten between chunks": Fault("qwen3_5", gdn, "gated_delta_rule", forget),
    "delta rules kept for prefixes are shifted": Fault(
        "qwen3_5", gdn, "gated_delta_rule", keep_too_early
    ),
    "decays by channel forgotten between chunks": Fault(
        "kimi_linear", kda, "channel_delta_rule", forget
    ),
    "decays by channel kept for prefixes are shifted": Fault(
        "kimi_linear", kda, "channel_delta_rule", keep_too_early
    ),
    "decays by channel of 16 bits": Fault(
        "kimi_linear", kda, "channel_delta_rule", after=round_states
    ),
    "linear attention forgotten between chunks": Fault(
        "minimax", lightning, "state_space_scan", forget
    ),
    "linear attention of 16 bits": Fault(
        "minimax", lightning, "state_space_scan", after=round_states
    ),
    "recurrence forgotten between chunks": Fault(
        "recurrent_gemma", rg_lru, "gated_linear_recurrence", forget
    ),
    "recurrences kept for prefixes are shifted": Fault(
        "recurrent_gemma", rg_lru, "gated_linear_recurrence", keep_too_early
    ),
}


def rows_are_right(folder: Path, files: Path) -> tuple[bool, bool]:
    """Rows of a prompt in chunks, and of another one behind a hit, against transformers."""
    right = []
    options = {"max_num_batched_tokens": CHUNK, "mamba_block_size": 16}
    with engine(folder, **options, **extraction_config(LAYERS, files)) as llm:
        for ids, num_cached in ((FIRST, 0), (SECOND, SHARED)):
            (output,) = llm.generate([{"prompt_token_ids": ids}], greedy(1), use_tqdm=False)
            assert output.num_cached_tokens == num_cached
            streams = reference_run(folder, ids).streams
            expected = torch.stack([streams[i] for i in LAYERS], dim=1)
            right.append(relative_error(rows_of(output), expected) <= 1e-4)
    return right[0], right[1]


@pytest.mark.parametrize("family", sorted({fault.family for fault in FAULTS.values()}))
def test_rows_are_right_in_chunks_and_behind_a_hit(
    family: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    assert rows_are_right(checkpoint(family), tmp_path) == (True, True)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_shows(
    fault: str, checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, *change = FAULTS[fault]
    folder = checkpoint(family)
    in_each_call(monkeypatch, *change)
    in_chunks, behind_a_hit = rows_are_right(folder, tmp_path)
    assert in_chunks == ("prefixes" in fault) and not behind_a_hit
