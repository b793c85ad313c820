"""An override of an operation's body computes what the body does."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernel_calls import Kernels, NativeKernelsUnavailable, native_kernels, triton_kernels
from operation_cases import Case, every_case, every_operation
from triton_device import DEVICE, HAS_TRITON

from vllm.ops.operation import Operation, TensorStruct

OPERATIONS, CASES = every_operation(), every_case()
SLOW_IN_TRITON = ("paged_attention", "state_space_scan")
"""Operations whose cases take its interpreter long; by day others run them on fewer."""
_DIMENSIONS_OF_PANELS = {"linear": 4, "expert_linear": 5}


def overridden(make: Callable[[], Kernels]) -> list[str]:
    """Operations that these kernels have; where they are not built, a test of each is skipped."""
    try:
        source = make().source
    except NativeKernelsUnavailable:
        return sorted(OPERATIONS)
    return sorted(name for name, found in OPERATIONS.items() if source.find(found) is not None)


def _copied(value: Any) -> Any:
    """With memory of its own, the strides kept."""
    if isinstance(value, torch.Tensor):
        copy = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
        return copy.copy_(value)
    return [_copied(x) for x in value] if isinstance(value, list) else value


def _run(operation: Operation[Any], kernels: Kernels | None, case: Case) -> dict[str, Any]:
    """The arguments by name, after a call of the body (None) or of an override."""
    args = [value if isinstance(value, TensorStruct) else _copied(value) for value in case.args]
    operation.run(operation.body if kernels is None else kernels.implementation(operation), *args)
    names = inspect.signature(operation.body).parameters
    return dict(zip(names, args, strict=True))


def _compare(operation: Operation[Any], kernels: Kernels, case: Case) -> None:
    expected, found = (_run(operation, k, case) for k in (None, kernels))
    for name in case.compared:
        ours, plain = found[name], expected[name]
        if not plain.is_floating_point():
            assert torch.equal(ours, plain), name
            continue
        largest = plain.abs().nan_to_num(0.0, 0.0).max() if plain.numel() else 0.0
        unit = torch.finfo(plain.dtype).eps if case.tolerance else 0.0
        torch.testing.assert_close(
            ours, plain, rtol=unit, atol=case.tolerance * float(largest), equal_nan=True, msg=name
        )


def test_every_operation_has_cases() -> None:
    assert CASES.keys() == OPERATIONS.keys()


@pytest.mark.parametrize("name", overridden(native_kernels))
def test_native(name: str, native: Kernels, dtype: torch.dtype) -> None:
    for case in CASES[name](dtype):
        _compare(OPERATIONS[name], native, case)


@pytest.mark.skipif(DEVICE != "cpu", reason="the interpreter compares on the CPU")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.exhaustive) if name in SLOW_IN_TRITON else name
        for name in (overridden(triton_kernels) if HAS_TRITON else [])
    ],
)
def test_triton(name: str) -> None:
    kernels = triton_kernels()
    for case in CASES[name](torch.float32):
        if any(
            isinstance(x, torch.Tensor) and x.dim() == _DIMENSIONS_OF_PANELS.get(name)
            for x in case.args
        ):
            continue  # panels are the CPU's
        _compare(OPERATIONS[name], kernels, case)
