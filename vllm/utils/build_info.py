"""The commit that the installed code was made from."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path

from vllm.version import API_VERSION, PRODUCT, VERSION

_PACKAGE = Path(__file__).resolve().parents[1]


@functools.cache
def commit() -> str:
    """The abbreviated commit, with "-dirty" if files were changed since; "unknown" without one.

    A wheel carries it in `commit.txt`, which setup.py writes; a source tree is asked with git.
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
    """One line for people: product, own version, level of the API, commit."""
    return f"{PRODUCT} {VERSION} (vLLM API {API_VERSION}, commit {commit()})"
