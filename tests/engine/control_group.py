"""A control group with a limit of its own, for processes that tests start."""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from vllm.utils.mem_utils import cgroup_folders

_JOIN = 'echo $$ > "$0/cgroup.procs" && exec "$@"'


@contextmanager
def control_group(limit_bytes: int) -> Iterator[Path]:
    """Its folder, below the group of this process; skips the test where none can be made."""
    folders = cgroup_folders()
    parents = folders.memory or folders.unified
    if not parents:
        pytest.skip("there are no control groups for memory here")
    folder = parents[0] / f"test-{uuid.uuid4().hex[:12]}"
    limit = folder / ("memory.limit_in_bytes" if folders.memory else "memory.max")
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        try:
            limit.write_text(str(limit_bytes))
        except OSError as error:
            pytest.skip(f"memory cannot be limited here: {error}")
        yield folder
    finally:
        for _ in range(50):  # its last process may be gone only for its parent
            try:
                folder.rmdir()
                break
            except OSError:
                time.sleep(0.1)


def inside(folder: Path, arguments: Sequence[str]) -> list[str]:
    """The command that runs this Python with ``arguments`` in the group."""
    return ["sh", "-c", _JOIN, str(folder), sys.executable, *arguments]


def num_killed(folder: Path) -> int:
    """Processes of the group that the kernel ended for want of memory."""
    for name in ("memory.oom_control", "memory.events"):
        if (folder / name).exists():
            counts = dict(line.split() for line in (folder / name).read_text().splitlines())
            return int(counts["oom_kill"])
    raise FileNotFoundError(folder)
