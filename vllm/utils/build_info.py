"""The commit from which the installed code was built."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path

from vllm.version import API_VERSION, PRODUCT, VERSION

_PACKAGE = Path(__file__).resolve().parents[1]


@functools.cache
def commit() -> str:
    """The abbreviated commit, with "-dirty" if files changed since; "unknown" if there is none.

    A wheel has it in `commit.txt`, which setup.py writes; in a source tree, git reports it.
    """
    written = _PACKAGE / "commit.txt"
    if written.is_file():
        return written.read_text(encoding="utf-8").strip()
    if not (_PACKAGE.parent / ".git").exists():
        return "unknown"
    command = ["git", "-C", str(_PACKAGE.parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(
            [*command, "--exclude=*"], capture_output=True, text=True, timeout=5, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()


def version_line() -> str:
    """Product, its own version, the level of the API and the commit, on one line for people."""
    return f"{PRODUCT} {VERSION} (vLLM API {API_VERSION}, commit {commit()})"
