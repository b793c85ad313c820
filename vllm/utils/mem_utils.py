"""Memory that this process may use, with the limits of its control group; sizes as text."""

from __future__ import annotations

import ctypes
import math
import re
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

GIB_BYTES = 1 << 30

_UNIT_BYTES = {
    "": 1,
    **{unit: 1000 ** (i + 1) for i, unit in enumerate("kmgt")},
    **{unit: 1024 ** (i + 1) for i, unit in enumerate("KMGT")},
    **{f"{unit}b": 1000 ** (i + 1) for i, unit in enumerate("kmgt")},
    **{f"{unit}ib": 1024 ** (i + 1) for i, unit in enumerate("kmgt")},
}


SIZE_ADVICE = "use a number of bytes, or for instance 512M or 4GiB"


def parse_size(text: str) -> int:
    """A number with a unit: ``512M`` and ``4GiB`` are binary, ``4GB`` and ``4g`` decimal.

    Raises ValueError for anything else.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match:
        number, unit = match.groups()
        # One letter: its case tells binary from decimal. Two or three: B or iB does.
        factor = _UNIT_BYTES.get(unit if len(unit) == 1 else unit.lower())
        if factor is not None and (unit or "." not in number):
            return int(float(number) * factor) if "." in number else int(number) * factor
    raise ValueError(f"{text!r} is not a size; {SIZE_ADVICE}")


def format_bytes(num_bytes: int) -> str:
    """``num_bytes`` with three significant digits and a binary unit, as in ``1.50 GiB``."""
    size, units = float(num_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(size) >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{int(size)} B" if units[0] == "B" else f"{size:.2f} {units[0]}"


class CgroupFolders(NamedTuple):
    """Folders of this process's control group, from its own up to the root."""

    unified: list[Path]
    """Version 2."""
    memory: list[Path]
    """Version 1, memory controller."""
    cpu: list[Path]
    """Version 1, CPU controller."""


def _ancestors(mount: Path, relative: str) -> list[Path]:
    folder = mount / relative.strip("/")
    folders = [folder, *folder.parents]
    return [f for f in folders[: folders.index(mount) + 1] if f.is_dir()]


def cgroup_folders(
    membership: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")
) -> CgroupFolders:
    """Folders with the limits of this process; empty lists if the system has none.

    A container may see the path of its host in ``membership`` but only its own folder
    at ``mount``, so folders that do not exist are left out; the mount itself always counts.
    """
    found = CgroupFolders([], [], [])
    for line in read_text(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        names = controllers.split(",")
        if controllers == "":
            unified = mount / "unified"
            found.unified.extend(_ancestors(unified if unified.is_dir() else mount, path))
        if "memory" in names:
            found.memory.extend(_ancestors(mount / "memory", path))
        if "cpu" in names:
            found.cpu.extend(_ancestors(mount / "cpu", path))
    return found


def read_text(path: Path) -> str:
    """The content of a file of the system; empty if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def read_number(path: Path) -> int | None:
    """The whole number in ``path``; None if there is none ("max", no such file)."""
    text = read_text(path)
    return int(text) if text.isdecimal() else None


def _read_stat(path: Path, key: str) -> int:
    """The value of ``key`` in a file of "key value" lines; 0 if it has none."""
    pairs = (line.split() for line in read_text(path).splitlines())
    return next((int(value) for name, value in pairs if name == key), 0)


def _memory_levels(folders: CgroupFolders) -> Iterator[tuple[int, int]]:
    """(limit, bytes in use that cannot be reclaimed) of every group with a limit."""
    files = [
        (folders.unified, "memory.max", "memory.current", "inactive_file"),
        (folders.memory, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ]
    for levels, limit_name, usage_name, reclaimable in files:
        for folder in levels:
            limit = read_number(folder / limit_name)
            used = read_number(folder / usage_name)
            if limit is not None and used is not None:
                yield limit, max(0, used - _read_stat(folder / "memory.stat", reclaimable))


def total_memory_bytes(folders: CgroupFolders | None = None) -> int:
    """Memory of the machine, or the smallest limit of the control group or of the process."""
    levels = _memory_levels(cgroup_folders() if folders is None else folders)
    of_process, _ = address_space_bytes()
    return int(min([psutil.virtual_memory().total, of_process, *(limit for limit, _ in levels)]))


def available_memory_bytes(folders: CgroupFolders | None = None) -> int:
    """Memory that can still be taken without swapping, within every limit."""
    levels = _memory_levels(cgroup_folders() if folders is None else folders)
    free = [max(0, limit - used) for limit, used in levels]
    _, of_process = address_space_bytes()
    return int(min([psutil.virtual_memory().available, of_process, *free]))


def return_freed_memory() -> None:
    """Give the system the freed memory that the C library keeps, in many pieces, for later use."""
    with suppress(AttributeError, OSError):  # a C library without it
        ctypes.CDLL(None).malloc_trim(0)


def address_space_bytes() -> tuple[float, float]:
    """(limit, unused part of it) of this process's address space (``ulimit -v``), or infinite."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return math.inf, math.inf
    return limit, max(0, limit - psutil.Process().memory_info().vms)
