"""The operators of ``csrc/cpu``: one library per instruction set, loaded into torch."""

from __future__ import annotations

import ctypes
import functools
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from vllm.ops.operation import Operation, Source

FOLDER = Path(__file__).parent

BASELINE = "baseline"
"""A CPU without any of the other instruction sets: plain torch computes."""

_WHOLE = "avx512_vnni"
_PAIRS = "avx512_bf16"
_TILES = "amx_bf16"

_X86_FLAGS = {
    "avx2": {"avx2", "fma", "f16c"},
    "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"},
    _WHOLE: {"avx512_vnni"},
    _PAIRS: {"avx512_bf16"},
    _TILES: {"amx_tile", "amx_bf16"},
}
"""Flags of /proc/cpuinfo that an instruction set needs, besides those of the ones before it. No
later one needs the flags for whole numbers."""


class NativeKernelsUnavailable(Exception):
    """The native kernels cannot be used; the message says why."""


def isas_of_this_cpu() -> tuple[str, ...]:
    """Names of the instruction sets that this CPU has, the lowest first."""
    machine = platform.machine().lower()
    if machine in ("aarch64", "arm64"):
        return (BASELINE, "neon")
    if machine not in ("x86_64", "amd64"):
        return (BASELINE,)
    flags = _cpu_flags()
    found = [BASELINE]
    for isa, needed in _X86_FLAGS.items():
        if isa == _WHOLE and not needed <= flags:
            continue  # no other set needs it
        if not needed <= flags or (isa == _TILES and not _may_use_tiles()):
            break
        found.append(isa)
    return tuple(found)


@functools.cache
def _may_use_tiles() -> bool:
    """Ask the system for the tile registers, and return whether this process may use them."""
    if sys.platform != "linux":
        return False
    # arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA): docs.kernel.org/arch/x86/xstate.html
    return bool(ctypes.CDLL(None).syscall(158, 0x1023, 18) == 0)


@functools.cache
def _cpu_flags() -> frozenset[str]:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                return frozenset(line.split(":", 1)[1].split())
    except OSError:
        pass
    # Not Linux: torch's own detection, which has other names for some flags.
    names = {"fma3": "fma", "avx512_f": "avx512f", "avx512_bw": "avx512bw"}
    names |= {"avx512_dq": "avx512dq", "avx512_vl": "avx512vl"}
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return frozenset(names.get(name, name) for name, has in capabilities.items() if has is True)


def load_library(isa: str | None = None, folder: Path = FOLDER) -> NativeLibrary:
    """The operators for ``isa``, or for the best instruction set that this CPU and build have.

    Raises :class:`NativeKernelsUnavailable` if there is no library that works, and ValueError
    if ``isa`` is not one that this CPU has.
    """
    available = isas_of_this_cpu()
    if isa == BASELINE:
        raise NativeKernelsUnavailable("VLLM_CPU_ISA=baseline asks for none of them")
    built = [name for name in available if library_path(name, folder).exists()]
    if isa is not None and isa not in available:
        raise ValueError(f"VLLM_CPU_ISA={isa!r}: this CPU has {', '.join(available)}")
    if isa is None and len(available) == 1:
        raise NativeKernelsUnavailable(f"there are none for this CPU ({platform.machine()})")
    if not built or (isa is not None and isa not in built):
        raise NativeKernelsUnavailable(
            f"{library_path(isa or available[-1], folder).name} was not built (was there a C++ "
            "compiler when vllm was installed?)"
        )
    return _open_library(isa or built[-1], folder)


def library_path(isa: str, folder: Path = FOLDER) -> Path:
    return folder / f"_cpu_{isa}.so"


@functools.cache
def _open_library(isa: str, folder: Path) -> NativeLibrary:
    return NativeLibrary(isa, folder)


class NativeLibrary(Source):
    """The operators for one instruction set."""

    reads_panels = True
    keeps_pending = True

    def __init__(self, isa: str, folder: Path = FOLDER) -> None:
        self.isa = isa
        self.name = f"native_cpu ({isa})"
        self.multiplies_pairs = isa in (_PAIRS, _TILES)
        self._namespace = f"vllm_{isa}"
        self._schemas = torch.library.Library(self._namespace, "DEF")  # type: ignore[no-untyped-call]
        self._operators: dict[str, Callable[..., None]] = {}
        path = library_path(isa, folder)
        try:
            torch.ops.load_library(path)  # type: ignore[no-untyped-call]
        except OSError as error:
            reason = error.__cause__ or error
            raise NativeKernelsUnavailable(f"{path.name} cannot be loaded: {reason}") from error

    def find(self, operation: Operation[Any]) -> Callable[..., None] | None:
        """The operator of that name, if the library has one."""
        name = operation.name
        if name not in self._operators:
            if not torch._C._dispatch_has_kernel(f"{self._namespace}::{name}"):
                return None
            self._schemas.define(operation.schema())  # type: ignore[no-untyped-call]
            overload = getattr(getattr(torch.ops, self._namespace), name).default
            # The function that the overload's own __call__ calls: one Python frame less per call.
            self._operators[name] = getattr(overload, "_op", overload)
        operator = self._operators[name]
        return _with_flat_structs(operator, operation.struct_positions())


def _with_flat_structs(
    operator: Callable[..., None], positions: Sequence[int]
) -> Callable[..., None]:
    """Wrap ``operator``, which takes tensors one by one, for structs at these positions."""
    if not positions:
        return operator
    from_behind = positions[::-1]

    def call(*args: Any) -> None:
        flat = list(args)
        for position in from_behind:
            flat[position : position + 1] = args[position].flat
        operator(*flat)

    return call
