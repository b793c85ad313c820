"""Calls of operations: when their contracts are checked."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch

from vllm.ops.layout import SequenceLayout, StatePlan
from vllm.ops.norms import rms_norm
from vllm.ops.operation import contracts_held
from vllm.ops.recurrent import causal_conv1d


def broken_call() -> None:
    """Its out is not dense."""
    x = torch.ones(2, 4)
    rms_norm(x, None, 0.0, 0.0, torch.empty(2, 8)[:, ::2])


def test_contracts_that_held_are_not_checked_on_this_thread() -> None:
    with pytest.raises(AssertionError):
        broken_call()
    outcomes: list[str] = []

    def call_elsewhere() -> None:
        try:
            broken_call()
        except AssertionError:
            outcomes.append("checked")

    with contracts_held():
        with contracts_held():
            broken_call()
        broken_call()
        thread = threading.Thread(target=call_elsewhere)
        thread.start()
        thread.join()
    assert outcomes == ["checked"]
    with pytest.raises(ValueError, match="inside"), contracts_held():
        raise ValueError("inside")
    with pytest.raises(AssertionError):
        broken_call()


def test_structs_of_tensors_are_checked_whatever_a_contract_names() -> None:
    x, weight = torch.ones(1, 2), torch.ones(2, 2)
    starts = torch.tensor([0, 1])  # int64
    layout = SequenceLayout(starts, torch.ones(1, dtype=torch.int32), 1, 1)
    no_snapshots = torch.zeros(0, dtype=torch.int32)
    blocks, first = torch.zeros(1, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    known = torch.zeros(1, dtype=torch.bool)
    states = StatePlan(blocks, known, first, no_snapshots, no_snapshots)
    with pytest.raises(AssertionError):
        causal_conv1d(x, weight, None, False, layout, states, torch.ones(1, 1, 2), x.clone())
    sound = replace(layout, query_start=starts.int())
    causal_conv1d(x, weight, None, False, sound, states, torch.ones(1, 1, 2), x.clone())
