"""The native library: building it, loading it, choosing its instruction set."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vllm.kernels import native_cpu
from vllm.kernels.native_cpu import ISA_NAMES, NativeCpuKernels, NativeKernelsUnavailable

ROOT = Path(__file__).parents[2]

needs_library = pytest.mark.skipif(
    not native_cpu.LIBRARY_PATH.exists(), reason="the native kernels are not built"
)


def test_a_library_that_is_missing_or_broken_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(NativeKernelsUnavailable, match="was not built"):
        NativeCpuKernels.load(path=tmp_path / "none.so")
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"not a library")
    with pytest.raises(NativeKernelsUnavailable, match="cannot be loaded"):
        NativeCpuKernels.load(path=broken)


@needs_library
def test_a_library_of_another_version_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_cpu, "ABI_VERSION", native_cpu.ABI_VERSION + 1)
    with pytest.raises(NativeKernelsUnavailable, match="another version"):
        NativeCpuKernels.load()


@needs_library
def test_instruction_sets() -> None:
    best = NativeCpuKernels.load()
    assert best.isa in ISA_NAMES
    for isa in ISA_NAMES[: ISA_NAMES.index(best.isa) + 1]:
        assert NativeCpuKernels.load(isa).isa == isa
    with pytest.raises(ValueError, match=r"VLLM_CPU_ISA='sse9'.*baseline"):
        NativeCpuKernels.load("sse9")


@needs_library
def test_torch_and_the_kernels_share_one_openmp_runtime() -> None:
    code = """
import torch
from pathlib import Path
from vllm.kernels.native_cpu import NativeCpuKernels
torch.set_num_threads(2)
kernels = NativeCpuKernels.load()
x = torch.randn(2000, 512)
torch.testing.assert_close(kernels.rms_norm(x, None, 0.0).square().mean(1), torch.ones(2000))
print(kernels.has_threads)
maps = Path("/proc/self/maps").read_text().split()
print(len({f for f in maps if any(n in f for n in ("libgomp", "libomp", "libiomp"))}))
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == ["True", "1"]


@needs_library
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="another C library")
def test_large_blocks_of_memory_are_used_again() -> None:
    """In a process of its own: the allocator decides by all that happened before."""
    script = """if True:
        import resource, torch
        from vllm.kernels.native_cpu import NativeCpuKernels

        NativeCpuKernels.load()
        num_bytes = 48 * 2**20
        for _ in range(12):  # until neighbours that were freed have joined
            torch.ones(num_bytes, dtype=torch.int8)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(num_bytes, dtype=torch.int8)
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        assert faults < num_bytes // resource.getpagesize() // 10, faults
    """
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)


@needs_library
def test_indices_outside_of_the_pool_are_errors() -> None:
    kernels = NativeCpuKernels.load()
    rows = torch.zeros(3, 4, 2, 8)
    hidden = torch.ones(2, 8)
    outside = torch.tensor([1, 12])
    with pytest.raises(RuntimeError, match="capture_rows: a slot"):
        kernels.capture_rows(rows, outside, 0, hidden, None)
    with pytest.raises(RuntimeError, match="capture_rows: a slot"):
        kernels.capture_rows(rows, outside[:1], 2, hidden[:1], None)
    with pytest.raises(RuntimeError, match="gather_rows: a slot"):
        kernels.gather_rows(rows, torch.tensor([-1]), torch.empty(1, 2, 8))
    with pytest.raises(RuntimeError, match="write_kv: a slot"):
        kernels.write_kv(hidden[:, None], hidden[:, None], torch.zeros(1, 3, 4, 1, 16), outside)
    heads = torch.ones(2, 1, 8)
    with pytest.raises(RuntimeError, match=r"rotary_embedding: .* position"):
        kernels.rotary_embedding(outside, heads, heads, torch.zeros(12, 8), False)


@pytest.mark.parametrize("compiler", ["/nonexistent/c++", shutil.which("false") or "/bin/false"])
def test_the_package_builds_without_a_working_compiler(tmp_path: Path, compiler: str) -> None:
    pytest.importorskip("setuptools", "77")
    if not (ROOT / "setup.py").exists() or shutil.which("cmake") is None:
        pytest.skip("needs the source tree and cmake")
    for name in ("setup.py", "pyproject.toml", "CMakeLists.txt", "README.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    (tmp_path / "vllm" / "kernels").mkdir(parents=True)
    for name in ("__init__.py", "version.py"):
        shutil.copy(ROOT / "vllm" / name, tmp_path / "vllm" / name)
    result = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--inplace"],
        cwd=tmp_path,
        env={**os.environ, "CXX": compiler},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "the native CPU kernels are not built, the slow path will be used" in result.stdout
    assert not list(tmp_path.rglob("_cpu_kernels*"))
