"""The native libraries: building them, loading them, what they check."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kernel_calls import native_kernels

from vllm.ops.native import (
    FOLDER,
    NativeKernelsUnavailable,
    isas_of_this_cpu,
    library_path,
    load_library,
)

ROOT = Path(__file__).parents[2]

needs_library = pytest.mark.skipif(
    not any(FOLDER.glob("_cpu_*.so")), reason="the native kernels are not built"
)


def test_a_library_that_is_missing_or_broken_is_unavailable(tmp_path: Path) -> None:
    isas = isas_of_this_cpu()
    if len(isas) == 1:
        pytest.skip("there are none for this CPU")
    with pytest.raises(NativeKernelsUnavailable, match="was not built"):
        load_library(folder=tmp_path)
    library_path(isas[1], tmp_path).write_bytes(b"not a library")
    script = f"""if True:
        from pathlib import Path
        from vllm.ops.native import NativeKernelsUnavailable, load_library
        try:
            load_library(folder=Path({str(tmp_path)!r}))
        except NativeKernelsUnavailable as error:
            print(error)
    """
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "cannot be loaded" in done.stdout


def test_one_file_alone_parses_torchs_headers() -> None:
    files = (ROOT / "csrc").rglob("*.*")
    assert [file.name for file in files if "<torch/" in file.read_text()] == ["tensor.cpp"]


@needs_library
@pytest.mark.skipif(shutil.which("nm") is None, reason="nm is not here")
def test_of_torch_the_libraries_need_its_stable_c_functions_alone() -> None:
    """A library built with one release of torch loads with later ones: it needs no C++ of torch."""
    for library in FOLDER.glob("_cpu_*.so"):
        command = ["nm", "--dynamic", "--undefined-only", "--format=posix", str(library)]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        names = [line.split()[0] for line in lines.splitlines()]
        assert any(name.startswith("aoti_torch_") for name in names), library
        foreign = [name for name in names if re.match(r"_Z[A-Z]*N?K?(2at|3c10|5torch)", name)]
        assert not foreign, f"{library.name}: {foreign}"


@needs_library
def test_kernels_have_few_instances() -> None:
    """A megabyte of code takes the compiler half a minute: templates are for what costs speed."""
    sizes = {path.name: path.stat().st_size for path in FOLDER.glob("_cpu_*.so")}
    assert all(size < 1.25e6 for size in sizes.values()), sizes


@needs_library
def test_instruction_sets() -> None:
    available = isas_of_this_cpu()
    assert load_library().isa == available[-1]
    for isa in available[1:]:
        assert load_library(isa).isa == isa
    with pytest.raises(ValueError, match=r"VLLM_CPU_ISA='sse9'.*baseline"):
        load_library("sse9")


@needs_library
def test_threads_share_the_work_and_survive_a_fork() -> None:
    """In a process of its own, whose child has the library's memory and none of its threads."""
    script = """if True:
        import os, torch
        import numpy as np
        from vllm.ops.norms import rms_norm
        torch.set_num_threads(3)
        x = torch.randn(2000, 512)

        def check():
            out = torch.empty_like(x)
            rms_norm(x, None, 0.0, 0.0, out)
            # torch's own threads do not survive a fork: numpy looks.
            np.testing.assert_allclose(np.square(out.numpy()).mean(1), 1.0, rtol=1e-4)

        before = len(os.listdir("/proc/self/task"))
        check()
        print(len(os.listdir("/proc/self/task")) - before)
        child = os.fork()
        if child == 0:
            check()
            print("child", flush=True)
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    command = [sys.executable, "-c", script]
    variables = {name: value for name, value in os.environ.items() if name != "VLLM_CPU_ISA"}
    done = subprocess.run(
        command, cwd=ROOT, env=variables, capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.split() in (["2", "child", "0"], ["child", "2", "0"]), done.stdout


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="another C library")
def test_large_blocks_of_memory_are_used_again() -> None:
    """In a process of its own: the allocator decides by all that happened before."""
    script = """if True:
        import resource, torch
        from vllm.platforms import get_platform

        get_platform("cpu").prepare_process()
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
    kernels = native_kernels()
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
    (tmp_path / "vllm" / "ops").mkdir(parents=True)
    for name in ("__init__.py", "version.py"):
        shutil.copy(ROOT / "vllm" / name, tmp_path / "vllm" / name)
    (tmp_path / "vllm" / "ops" / "_cpu_avx2.so").touch()  # of an earlier build, of other sources
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
    assert not list(tmp_path.rglob("_cpu_*"))
