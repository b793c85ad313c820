"""Compile the CUDA kernels where there is no card: nothing is launched.

The interpreter runs what the compiler may refuse, so this is run by itself, without it.

    compile_kernels.py all       every form of ``launched_forms``, with what it takes
    compile_kernels.py few       those of one model's steps, every kernel among them
    compile_kernels.py alike     forms of a recurrent layer and of an attention, which have to agree
    compile_kernels.py reordered  forms that would not agree with those
    compile_kernels.py tiles     attention and scans in all forms: what takes shared memory
    compile_kernels.py faults    forms that cost what nobody should pay: what limits are tried on
    compile_kernels.py forms     every form, not compiled
    compile_kernels.py sizes     the forms that batches of many sizes bring about, not compiled
    compile_kernels.py warm      those that an engine launches at its start, not compiled
    compile_kernels.py load      those of requests of many kinds, not compiled

A second argument is the compute capability, 90 (Hopper) without it. A third, as 0/4, takes every
fourth form only: four processes, 0/4 to 3/4, compile all of them.

Prints a line of JSON for each form: the release of Triton; the kernel, its constants and the types
of its arguments; its instructions, bytes of shared memory, registers of a thread, bytes of a thread
that do not fit into registers, how many instructions of innermost loops write and read such bytes,
how many wait for the whole program; how many compute, by their names, in all of it and in each such
loop that does; what the compiler lost or overwrote (``compiled_faults``); how many programs a
multiprocessor holds at once, and how many instructions read from global memory, 16 bytes of a
thread at once or fewer.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import triton
from compiled_faults import lost_values, overwritten_operands
from launched_forms import (
    launch_alike,
    launch_all,
    launch_faults,
    launch_many_sizes,
    launch_one_model,
    launch_reordered,
    launch_tiles,
    launch_warm_up,
    launch_workloads,
)
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from vllm.ops.cuda import cards


class _NoDriver:
    """Names the target, and no device that could be launched on."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def _constants_and_types(compilation: dict[str, Any]) -> str:
    parts = []

    def add(name: str, kind: Any, path: tuple[int, ...]) -> None:
        """Parts of a tuple have its name, the first one, its tensor, alone."""
        if isinstance(kind, tuple | list):
            for place, part in enumerate(kind):
                add(f"{name}.{place}" if place else name, part, (*path, place))
        elif path in compilation["constants"]:
            parts.append(f"{name}={compilation['constants'][path]}")
        else:
            parts.append(f"{name}:{kind}")

    for place, (name, kind) in enumerate(compilation["signature"].items()):
        add(name, kind, (place,))
    attributes = compilation["configs"][0].items()
    aligned = sorted(".".join(map(str, path)) for path, found in attributes if found)
    warps, stages = compilation["num_warps"], compilation["num_stages"]
    return f"{' '.join(parts)} aligned={aligned} warps={warps} stages={stages}"


class Multiprocessor(NamedTuple):
    """Resources that programs share. Source: CUDA C++ Programming Guide, compute capabilities."""

    shared: int
    """Bytes, of which each program takes 1 KiB more than it asks for."""
    warps: int
    programs: int
    registers: int = 65_536

    def programs_at_once(self, warps: int, registers: int, shared: int) -> int:
        """Number of programs of so many warps, registers per thread, and bytes that fit at once.

        A warp gets registers in units of 256.
        """
        of_a_warp = -(-registers * 32 // 256) * 256
        return min(
            self.programs,
            self.warps // warps,
            self.registers // (of_a_warp * warps),
            self.shared // (shared + 1024),
        )


MULTIPROCESSORS = {
    80: Multiprocessor(164 * 1024, 64, 32),
    89: Multiprocessor(100 * 1024, 48, 24),
    90: Multiprocessor(228 * 1024, 64, 32),
    100: Multiprocessor(228 * 1024, 64, 32),
    120: Multiprocessor(100 * 1024, 48, 24),
}
"""By compute capability."""
ARITHMETIC = ("FADD", "FMUL", "FFMA", "MUFU", "HMMA", "HGMMA")


def _resources(compiled: Any, capability: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(compiled.asm["cubin"])
        usage = _list(cubin, "--dump-resource-usage")
        found = {name: int(value) for name, value in re.findall(r"(REG|STACK):(\d+)", usage)}
        code = _list(cubin, "-sass")
        loops = _innermost_loops(code)
        counts = [Counter(name.split(".")[0] for name in loop) for loop in loops]
        in_loops = sum(counts, Counter())
    shared, warps = compiled.metadata.shared, compiled.metadata.num_warps
    multiprocessor = MULTIPROCESSORS[capability]
    return {
        "instructions": len(_lines(code)),
        "shared": shared,
        "registers": found["REG"],
        "spilled": found["STACK"],
        "spills_in_loops": in_loops["STL"],
        "reloads_in_loops": in_loops["LDL"],
        "barriers_in_loops": in_loops["BAR"],
        "arithmetic": _arithmetic(_names(code)),
        "arithmetic_of_loops": sorted(filter(None, map(_arithmetic, counts)), key=str),
        "lost_values": lost_values(compiled.asm["ttir"], compiled.asm["ttgir"]),
        "overwritten_operands": overwritten_operands(compiled.asm["ptx"]),
        "programs_at_once": multiprocessor.programs_at_once(warps, found["REG"], shared),
        **_count_loads(code),
    }


def _list(cubin: Path, option: str) -> str:
    command = [knobs.nvidia.cuobjdump.path, option, str(cubin)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _lines(code: str) -> list[tuple[int, str]]:
    """(address, instruction), without what fills the last line up."""
    lines = [
        (int(place, 16), text) for place, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", code)
    ]
    assert lines, "the listing has another form"
    return [line for line in lines if line[1].strip() != "NOP"]


def _name(text: str) -> str:
    """Name of an instruction, with the parts after its dots: LDG.E.128."""
    return re.sub(r"^@\S+\s+", "", text).split()[0]


def _names(code: str) -> Counter[str]:
    """Number of times that each instruction occurs, by the first part of its name."""
    return Counter(_name(text).split(".")[0] for _, text in _lines(code))


def _arithmetic(names: Counter[str]) -> dict[str, int]:
    return {name: names[name] for name in ARITHMETIC if names[name]}


def _count_loads(code: str) -> dict[str, int]:
    """Instructions that read from global memory: 16 bytes of a thread at once, or fewer."""
    loads = [_name(text).split(".") for _, text in _lines(code)]
    loads = [parts for parts in loads if parts[0] in ("LDG", "LDGSTS")]
    wide = sum("128" in parts for parts in loads)
    return {"wide_loads": wide, "narrow_loads": len(loads) - wide}


def _innermost_loops(code: str) -> list[list[str]]:
    """Names of the instructions between a jump backwards and its target, of each such loop."""
    lines = _lines(code)
    loops = set()
    for place, text in lines:
        jump = re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", text)
        if jump and int(jump[1], 16) < place:
            loops.add((int(jump[1], 16), place))
    return [
        [_name(text) for place, text in lines if first <= place <= last]
        for first, last in loops
        if not any((a, b) != (first, last) and first <= a and b <= last for a, b in loops)
    ]


class _Recorder:
    """Takes the place of launching."""

    def __init__(self, capability: int, *, compiles: bool, part: int, parts: int) -> None:
        self._capability, self._compiles = capability, compiles
        self._part, self._parts = part, parts
        self._seen: set[tuple[str, str]] = set()
        self._new: dict[str, Any] | None = None
        self._run = JITFunction.run
        triton.runtime.driver.set_active(_NoDriver(capability))
        knobs.runtime.jit_cache_hook = self._before_compiling
        recorder = self

        def run(self: Any, *args: Any, **options: Any) -> None:
            recorder.launch(self, *args, **options)

        JITFunction.run = run

    def _before_compiling(self, *, key: str, fn: Any, compile: dict[str, Any], **_: object) -> bool:
        """Triton asks whether to leave out a form that it has not compiled yet."""
        if (fn.name, key) in self._seen:
            return True
        takes = len(self._seen) % self._parts == self._part
        self._seen.add((fn.name, key))
        if takes:
            form = _constants_and_types(compile)
            self._new = {"triton": triton.__version__, "kernel": fn.name, "form": form}
        return not (takes and self._compiles)

    def launch(self, kernel: Any, *args: Any, **options: Any) -> None:
        compiled = self._run(kernel, *args, **{**options, "warmup": True})
        if self._new is not None:
            resources = _resources(compiled, self._capability) if self._compiles else {}
            print(json.dumps(self._new | resources), flush=True)
            self._new = None


LAUNCHES = {
    "all": launch_all,
    "few": launch_one_model,
    "alike": launch_alike,
    "reordered": launch_reordered,
    "tiles": launch_tiles,
    "faults": launch_faults,
    "forms": launch_all,
    "sizes": launch_many_sizes,
    "warm": launch_warm_up,
    "load": launch_workloads,
}

if __name__ == "__main__":
    what, capability, share = [*sys.argv[1:], *("90", "0/1")[len(sys.argv) - 2 :]]
    part, parts = map(int, share.split("/"))
    cards._capability = lambda: divmod(int(capability), 10)
    compiles = what in ("all", "few", "alike", "reordered", "tiles", "faults")
    _Recorder(int(capability), compiles=compiles, part=part, parts=parts)
    LAUNCHES[what]()
