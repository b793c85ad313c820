"""Calls of operations: when their contracts are checked."""

from __future__ import annotations

import threading

import pytest
import torch

from vllm.ops.norms import rms_norm
from vllm.ops.operation import contracts_held


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
