"""The kernels that the tests of this folder run on: plain ones, and native ones by SIMD path."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch
import triton_device  # before any Triton kernel
from kernel_calls import (
    ISA_NAMES,
    Kernels,
    NativeKernelsUnavailable,
    native_kernels,
    plain_kernels,
)

from tests.emulated_tiles import NAME, emulated_tiles

ISAS = [
    *[pytest.param(isa, marks=pytest.mark.isa(isa)) for isa in ISA_NAMES],
    pytest.param(NAME, marks=[pytest.mark.isa("avx512_bf16"), pytest.mark.exhaustive]),
]


@pytest.hookimpl(tryfirst=True)  # before the choice by -m
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave to the night what the library for whole numbers has in common with that for AVX-512.

    They are linked of the same objects, except for the one of this operation (CMakeLists.txt).
    """
    for item in items:
        is_for_whole_numbers = any(m.args == ("avx512_vnni",) for m in item.iter_markers("isa"))
        if is_for_whole_numbers and "packed_linear" not in item.nodeid:
            item.add_marker(pytest.mark.exhaustive)


@functools.cache
def _native(isa: str) -> Kernels | str:
    """The native kernels with one instruction set, or why there are none."""
    try:
        return Kernels(emulated_tiles()) if isa == NAME else native_kernels(isa)
    except (NativeKernelsUnavailable, ValueError) as error:
        return str(error)


def _kernels(name: str) -> Kernels:
    """Skips where they are not built. Those of another CPU are not collected."""
    if name == "plain":
        return plain_kernels()
    loaded = _native(name)
    if isinstance(loaded, str):
        pytest.skip(loaded)
    return loaded


@pytest.fixture(params=["plain", *ISAS])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """Each implementation."""
    return _kernels(request.param)


@pytest.fixture(params=ISAS)
def native(request: pytest.FixtureRequest) -> Kernels:
    """The native kernels with each instruction set."""
    return _kernels(request.param)


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16], ids=["f32", "bf16", "f16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    chosen: torch.dtype = request.param
    return chosen


@pytest.fixture(autouse=True)
def _seed_and_threads() -> Iterator[None]:
    """Same random numbers for every test; one thread unless the test asks for more."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def card_or_interpreter() -> Iterator[None]:
    """Tensors are made where Triton kernels run."""
    torch.set_default_device(triton_device.DEVICE)
    yield
    torch.set_default_device(None)
