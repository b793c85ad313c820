"""Which kernels a device gets."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from triton_device import HAS_TRITON

from vllm.kernels import get_kernels, get_paged_attention, native_cpu
from vllm.kernels.native_cpu import ISA_NAMES, NativeCpuKernels, NativeKernelsUnavailable


@pytest.fixture(autouse=True)
def _fresh_choice(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("VLLM_KERNELS", raising=False)
    monkeypatch.delenv("VLLM_CPU_ISA", raising=False)
    get_kernels.cache_clear()
    yield
    get_kernels.cache_clear()


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(path: Path) -> None:
        raise NativeKernelsUnavailable(f"{path.name} was not built")

    monkeypatch.setattr(native_cpu, "_open_library", unavailable)


@pytest.mark.usefixtures("no_library")
def test_plain_takes_the_place_of_a_missing_library_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, logger="vllm"):
        first = get_kernels("cpu")
        assert get_kernels("cpu") is first
    assert first.name == "plain"
    assert len(caplog.records) == 1
    assert "_cpu_kernels.so was not built" in caplog.text
    assert "slower" in caplog.text


@pytest.mark.usefixtures("no_library")
def test_forced_native_kernels_that_are_missing_are_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_KERNELS", "native")
    with pytest.raises(RuntimeError, match=r"VLLM_KERNELS=native: _cpu_kernels\.so was not built"):
        get_kernels("cpu")


def test_environment_chooses(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("VLLM_KERNELS", "plain")
    assert get_kernels("cpu").name == "plain"
    assert get_kernels("cuda").name == "plain"
    assert not caplog.records
    get_kernels.cache_clear()
    monkeypatch.setenv("VLLM_KERNELS", "native")
    with pytest.raises(RuntimeError, match="for the CPU only"):
        get_kernels("cuda")


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
def test_cuda_gets_triton_and_the_attention_backend_asked_for() -> None:
    kernels = get_kernels("cuda")
    assert kernels.name == "cuda"
    assert get_paged_attention("cuda", "TRITON_ATTN") == kernels.paged_attention
    flashinfer = get_paged_attention("cuda", "FLASHINFER")
    assert flashinfer == get_paged_attention("cuda", "FLASHINFER") != kernels.paged_attention
    assert get_paged_attention("cpu", "CPU_ATTN") == get_kernels("cpu").paged_attention


def test_missing_triton_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with caplog.at_level(logging.WARNING, logger="vllm"):
        assert get_kernels("cuda").name == "plain"
    assert "Triton is not installed" in caplog.text


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
def test_triton_that_cannot_launch_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import triton

    def build(self: object) -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(type(triton.runtime.driver), "active", property(build))
    with caplog.at_level(logging.WARNING, logger="vllm"):
        assert get_kernels("cuda").name == "plain"
    assert "RuntimeError: Failed to find C compiler" in caplog.text


def test_instruction_set_is_the_one_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        NativeCpuKernels.load()
    except NativeKernelsUnavailable as error:
        pytest.skip(str(error))
    monkeypatch.setenv("VLLM_CPU_ISA", ISA_NAMES[0])
    kernels = get_kernels("cpu")
    assert isinstance(kernels, NativeCpuKernels)
    assert kernels.isa == ISA_NAMES[0]
    get_kernels.cache_clear()
    monkeypatch.setenv("VLLM_CPU_ISA", "mmx")
    with pytest.raises(ValueError, match=r"VLLM_CPU_ISA='mmx': .*baseline"):
        get_kernels("cpu")
