"""Storage folders for tests: small ones, and what may lie in any of them."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted_tmpfs(folder: Path, options: str) -> Iterator[Path]:
    """A file system of its own at ``folder``; skips the test where mounting is not allowed."""
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("mounting a tmpfs is not allowed here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def remount(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], check=True)


def names_in(folder: Path) -> set[str]:
    """Every file below ``folder``, hidden ones too."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def assert_only_whole_files(folder: Path, expected: set[str]) -> None:
    """The files are ``expected``, each with its lock; nothing half-written beside them.

    Removals are made by writer threads: they may take a moment.
    """
    wanted = expected | {f"{name}.lock" for name in expected}
    deadline = time.monotonic() + 10
    while names_in(folder) != wanted and time.monotonic() < deadline:
        time.sleep(0.005)
    assert names_in(folder) == wanted


def assert_no_half_files(folder: Path) -> set[str]:
    """Every file is whole and has its lock, and no lock is alone; returns the files."""
    deadline = time.monotonic() + 10
    while (odd := _odd_names(names_in(folder))) and time.monotonic() < deadline:
        time.sleep(0.005)
    assert not odd
    return {name for name in names_in(folder) if not name.endswith(".lock")}


def _odd_names(names: set[str]) -> set[str]:
    whole = {name for name in names if re.fullmatch(r"[^.].*\.safetensors", name)}
    return names ^ (whole | {f"{name}.lock" for name in whole})
