"""Kernels for CPUs with AMX, built with an emulation of its tile instructions.

They run on CPUs that multiply pairs of bfloat16. Only what knows tiles is compiled; everything else
is taken from the library for ``avx512_bf16``, whose objects the library for ``amx_bf16`` has too.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from vllm.ops.native import NativeKernelsUnavailable, NativeLibrary, library_path, load_library
from vllm.ops.operation import Operation, use_sources
from vllm.ops.sources import find_source

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".cache" / "emulated_tiles"
HEADER = ROOT / "tests" / "kernels" / "emulated_tiles.h"

NAME = "emulated_tiles"


class EmulatedTiles(NativeLibrary):
    """The operators for AMX on a CPU without it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(NAME, folder)
        self.isa = "amx_bf16"
        self.multiplies_pairs = True
        self._file = ctypes.CDLL(str(library_path(NAME, folder)))
        self._others = load_library("avx512_bf16")

    @property
    def num_products(self) -> int:
        """Number of products of tiles since the library was loaded."""
        return ctypes.c_int64.in_dll(self._file, "num_emulated_products").value

    def find(self, operation: Operation[Any]) -> Callable[..., None] | None:
        return super().find(operation) or self._others.find(operation)


def _run(*command: str | Path) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout[-4000:]


@functools.cache
def emulated_tiles() -> EmulatedTiles:
    """Load the library; CMake builds of it what changed since the last time."""
    if shutil.which("cmake") is None:
        raise NativeKernelsUnavailable("there is no cmake")
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other processes of the test run wait for the build
        build = FOLDER / "build"
        _run(
            "cmake", "-S", ROOT, "-B", build, f"-DKERNELS_OUTPUT_DIRECTORY={FOLDER}",
            f"-DTORCH_DIRECTORY={Path(torch.__file__).parent}", f"-DEMULATED_TILES={HEADER}",
        )  # fmt: skip
        _run("cmake", "--build", build, "--parallel", "2", "--target", f"_cpu_{NAME}")
    return EmulatedTiles(FOLDER)


@contextmanager
def with_emulated_tiles() -> Iterator[EmulatedTiles]:
    """Engines that are made here in this process compute with the library."""
    library = emulated_tiles()
    use_sources(lambda device_type: library)
    try:
        yield library
    finally:
        use_sources(find_source)
