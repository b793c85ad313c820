"""What is said when a job ends early."""

from __future__ import annotations

import errno

_FULL = (errno.ENOSPC, errno.EDQUOT)


def describe_error(error: Exception) -> str:
    """The message for the user, with what to do."""
    if isinstance(error, OSError) and error.errno in _FULL:
        return (
            f"the disk is full ({error}). What is finished is kept: free some space, and run the "
            "same command again"
        )
    return str(error) or type(error).__name__


__all__ = ["describe_error"]
