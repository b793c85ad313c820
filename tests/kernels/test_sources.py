"""The sources that a device's operations come from."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from kernel_calls import ISA_NAMES
from triton_device import HAS_TRITON

from vllm.ops import native, sources
from vllm.ops.attention import paged_attention
from vllm.ops.backends import get_paged_attention
from vllm.ops.native import BASELINE, NativeKernelsUnavailable, NativeLibrary
from vllm.ops.operation import use_sources
from vllm.ops.sources import find_source

ALL_FLAGS = (
    "avx2 fma f16c avx512f avx512bw avx512dq avx512vl avx512_vnni avx512_bf16 amx_tile amx_bf16 "
    "amx_int8"
)


@pytest.fixture(autouse=True)
def _fresh_choice(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("VLLM_KERNELS", raising=False)
    monkeypatch.delenv("VLLM_CPU_ISA", raising=False)
    find_source.cache_clear()
    yield
    find_source.cache_clear()
    use_sources(find_source)


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(isa: str | None) -> None:
        raise NativeKernelsUnavailable("_cpu_avx2.so was not built")

    monkeypatch.setattr(native, "load_library", unavailable)


@pytest.mark.usefixtures("no_library")
def test_plain_takes_the_place_of_a_missing_library_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, logger="vllm"):
        first = find_source("cpu")
        assert find_source("cpu") is first
    assert first.name == "plain"
    assert len(caplog.records) == 1
    assert "_cpu_avx2.so was not built" in caplog.text
    assert "slower" in caplog.text
    assert "may depend on the batch" in caplog.text


@pytest.mark.usefixtures("no_library")
def test_forced_native_kernels_that_are_missing_are_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_KERNELS", "native")
    with pytest.raises(RuntimeError, match=r"VLLM_KERNELS=native: _cpu_avx2\.so was not built"):
        find_source("cpu")


def test_environment_chooses(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("VLLM_KERNELS", "plain")
    assert find_source("cpu").name == "plain"
    assert find_source("cuda").name == "plain"
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert caplog.text.count("last bits may depend on the batch") == 2
    find_source.cache_clear()
    monkeypatch.setenv("VLLM_KERNELS", "native")
    with pytest.raises(RuntimeError, match="only for the CPU"):
        find_source("cuda")


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
def test_cuda_gets_triton_and_the_attention_backend_asked_for() -> None:
    source = find_source("cuda")
    assert source.name == "triton"
    assert source.find(paged_attention) is paged_attention.overrides["cuda"]
    assert get_paged_attention("cuda", "TRITON_ATTN") is paged_attention
    flashinfer = get_paged_attention("cuda", "FLASHINFER")
    assert flashinfer == get_paged_attention("cuda", "FLASHINFER") != paged_attention
    assert get_paged_attention("cpu", "CPU_ATTN") is paged_attention


def test_missing_triton_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with caplog.at_level(logging.WARNING, logger="vllm"):
        assert find_source("cuda").name == "plain"
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
        assert find_source("cuda").name == "plain"
    assert "RuntimeError: Failed to find C compiler" in caplog.text


def test_instruction_set_is_the_one_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    available = [isa for isa in native.isas_of_this_cpu() if isa in ISA_NAMES]
    if not available or not native.library_path(available[0]).exists():
        pytest.skip("the native kernels are not built")
    monkeypatch.setenv("VLLM_CPU_ISA", available[0])
    source = find_source("cpu")
    assert isinstance(source, NativeLibrary)
    assert source.isa == available[0]
    find_source.cache_clear()
    monkeypatch.setenv("VLLM_CPU_ISA", BASELINE)
    with caplog.at_level(logging.WARNING, logger="vllm"):
        assert find_source("cpu").name == "plain"
    assert "VLLM_CPU_ISA=baseline asks for none" in caplog.text
    find_source.cache_clear()
    monkeypatch.setenv("VLLM_CPU_ISA", "mmx")
    with pytest.raises(ValueError, match=r"VLLM_CPU_ISA='mmx': .*baseline"):
        find_source("cpu")


@pytest.mark.parametrize(
    ("machine", "flags", "expected"),
    [
        ("x86_64", "sse2 avx2 fma f16c avx512_bf16", (BASELINE, "avx2")),
        ("x86_64", "avx2 fma", (BASELINE,)),
        ("AMD64", "avx2 fma f16c avx512f avx512bw avx512dq avx512vl", (BASELINE, "avx2", "avx512")),
        (
            "x86_64",
            ALL_FLAGS,
            (BASELINE, "avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx_bf16"),
        ),
        (
            "x86_64",
            ALL_FLAGS.replace("avx512_vnni", ""),
            (BASELINE, "avx2", "avx512", "avx512_bf16", "amx_bf16"),
        ),
        ("aarch64", "", (BASELINE, "neon")),
        ("riscv64", "", (BASELINE,)),
    ],
)
def test_instruction_sets_are_those_of_the_cpu(
    machine: str, flags: str, expected: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native.platform, "machine", lambda: machine)
    monkeypatch.setattr(native, "_cpu_flags", lambda: frozenset(flags.split()))
    monkeypatch.setattr(native, "_may_use_tiles", lambda: True)
    assert native.isas_of_this_cpu() == expected
    monkeypatch.setattr(native, "_may_use_tiles", lambda: False)
    assert native.isas_of_this_cpu() == tuple(isa for isa in expected if isa != "amx_bf16")
    if expected == (BASELINE,):
        with pytest.raises(NativeKernelsUnavailable, match="there are none for this CPU"):
            native.load_library()


def test_sources_are_looked_for_through_the_module() -> None:
    assert sources.native is native
