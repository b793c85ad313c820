"""The libraries for a CPU of another kind: a cross compiler builds them, an emulator runs some."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from vllm.ops.operation import KERNEL_DTYPES

ROOT = Path(__file__).parents[2]
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
TORCH = Path(torch.__file__).parent

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"there is no {COMPILER}"),
]


def _run(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def test_the_library_for_aarch64_compiles(tmp_path: Path) -> None:
    if shutil.which("cmake") is None:
        pytest.skip("there is no cmake")
    system = ("-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64")
    _run(
        "cmake", "-S", ROOT, "-B", tmp_path / "build", f"-DCMAKE_CXX_COMPILER={COMPILER}", *system,
        f"-DTORCH_DIRECTORY={TORCH}", f"-DKERNELS_OUTPUT_DIRECTORY={tmp_path}",
    )  # fmt: skip
    warnings = _run("cmake", "--build", tmp_path / "build", "--parallel", "2")
    assert "warning" not in warnings
    (library,) = tmp_path.glob("_cpu_*.so")
    assert library.name == "_cpu_neon.so"
    content = library.read_bytes()
    assert content[:4] == b"\x7fELF"
    assert int.from_bytes(content[18:20], "little") == 183  # AArch64
    assert b"libtorch_cpu.so" in content
    assert b"packed_linear" in content


@pytest.mark.skipif(shutil.which(EMULATOR) is None, reason=f"there is no {EMULATOR}")
def test_products_on_an_emulated_aarch64(tmp_path: Path) -> None:
    program = tmp_path / "products"
    unresolved = ("-static", "-ffunction-sections", "-Wl,--gc-sections",
                  "-Wl,--unresolved-symbols=ignore-all")  # fmt: skip
    _run(
        COMPILER, "-std=gnu++20", "-O1", "-ffp-contract=off", "-Wno-psabi", "-pthread",
        "-I", ROOT / "csrc" / "cpu",
        Path(__file__).parent / "products_without_torch.cpp", ROOT / "csrc" / "cpu" / "team.cpp",
        *unresolved, "-o", program,
    )  # fmt: skip
    printed = _run(EMULATOR, program)
    assert printed.count(": right\n") == 4 * 3 * len(KERNEL_DTYPES)
