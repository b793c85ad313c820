"""CPU cores that this process may use."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Iterator
from pathlib import Path

from vllm.utils.mem_utils import CgroupFolders, cgroup_folders, read_number, read_text


def _quotas(folders: CgroupFolders) -> Iterator[float]:
    """Number of CPUs that each control group lets its processes use."""
    for folder in folders.unified:
        quota, _, period = read_text(folder / "cpu.max").partition(" ")
        if quota.isdecimal() and period.isdecimal():
            yield int(quota) / int(period)
    for folder in folders.cpu:
        quota_us = read_number(folder / "cpu.cfs_quota_us")
        period_us = read_number(folder / "cpu.cfs_period_us")
        if quota_us and period_us:
            yield quota_us / period_us


def _affinity() -> set[int]:
    """Logical CPUs this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def _num_cores(cpus: set[int], topology: Path) -> int:
    """Number of physical cores among ``cpus``; every CPU counts if the system does not tell."""
    siblings = "topology/thread_siblings_list"
    return len({read_text(topology / f"cpu{cpu}" / siblings) or str(cpu) for cpu in cpus})


def usable_core_count(
    folders: CgroupFolders | None = None, topology: Path = Path("/sys/devices/system/cpu")
) -> int:
    """Number of physical cores in this process's CPU affinity, at most its group's CPU quota.

    Hyper-threads of one core count once: they share the vector units.
    """
    groups = cgroup_folders() if folders is None else folders
    cores = _num_cores(_affinity(), topology)
    return max(1, min([cores, *(math.floor(quota) for quota in _quotas(groups))]))


def cpu_name() -> str:
    """The model of the CPU as the system names it."""
    lines = read_text(Path("/proc/cpuinfo")).splitlines()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
