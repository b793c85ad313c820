"""Faults that recurrent models have had elsewhere: with one put in, rows are no longer right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.harness import engine, extraction_config, greedy, random_prompts, rows_of
from tests.models.oracle import reference_run, relative_error
from vllm.model_executor.layers.mamba import mamba2
from vllm.ops.layout import StatePlan

LAYERS = [0, 3, 6]
CHUNK = 32
FIRST, OTHER = (p["prompt_token_ids"] for p in random_prompts(5, [100, 40]))
SHARED = 80
SECOND = FIRST[:SHARED] + OTHER

Change = Callable[[list[Any]], None]


def in_each_call(
    monkeypatch: pytest.MonkeyPatch, operation: str, before: Change, after: Change
) -> None:
    """Change the arguments of a layer's operation before it runs, or what it wrote after that."""
    original = getattr(mamba2, operation)

    def call(*args: Any) -> None:
        changed = list(args)
        before(changed)
        original(*changed)
        after(changed)

    monkeypatch.setattr(mamba2, operation, call)


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
    args[-2].copy_(args[-2].bfloat16())


FAULTS: dict[str, tuple[str, Change, Change]] = {
    "convolution forgotten between chunks": ("causal_conv1d", forget, nothing),
    "state forgotten between chunks": ("state_space_scan", forget, nothing),
    "states kept for prefixes are shifted": ("state_space_scan", keep_too_early, nothing),
    "convolutions kept for prefixes are shifted": ("causal_conv1d", keep_too_early, nothing),
    "states of 16 bits": ("state_space_scan", nothing, round_states),
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


def test_rows_are_right_in_chunks_and_behind_a_hit(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    assert rows_are_right(checkpoint("nemotron_h"), tmp_path) == (True, True)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_shows(
    fault: str, checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint("nemotron_h")
    in_each_call(monkeypatch, *FAULTS[fault])
    in_chunks, behind_a_hit = rows_are_right(folder, tmp_path)
    assert in_chunks == ("prefixes" in fault) and not behind_a_hit
