"""CPU cores that this process may use."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

from vllm.utils.mem_utils import CgroupFolders, cgroup_folders


def _quotas(folders: CgroupFolders) -> Iterator[float]:
    """CPUs that each control group lets its processes use."""
    for folder in folders.unified:
        try:
            quota, period = (folder / "cpu.max").read_text().split()
        except (OSError, ValueError):
            continue
        if quota != "max":
            yield int(quota) / int(period)
    for folder in folders.cpu:
        try:
            quota_us = int((folder / "cpu.cfs_quota_us").read_text())
            period_us = int((folder / "cpu.cfs_period_us").read_text())
        except (OSError, ValueError):
            continue
        if quota_us > 0:
            yield quota_us / period_us


def _affinity() -> set[int]:
    """Logical CPUs this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def _num_cores(cpus: set[int], topology: Path) -> int:
    """Physical cores among ``cpus``; every CPU is one where the system does not say."""
    cores = set()
    for cpu in cpus:
        try:
            siblings = (topology / f"cpu{cpu}/topology/thread_siblings_list").read_text().strip()
        except OSError:
            siblings = str(cpu)
        cores.add(siblings)
    return len(cores)


def usable_core_count(
    folders: CgroupFolders | None = None, topology: Path = Path("/sys/devices/system/cpu")
) -> int:
    """Physical cores of this process's CPU affinity, at most its control group's CPU quota.

    Hyper-threads of one core count once: they share the vector units.
    """
    groups = cgroup_folders() if folders is None else folders
    cores = _num_cores(_affinity(), topology)
    return max(1, min([cores, *(math.floor(quota) for quota in _quotas(groups))]))
