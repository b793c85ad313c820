"""How long a hook of a connector may take."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from vllm.utils.time_limit import time_limit


def hook_limit(connector: object, hook: str, seconds: float | None) -> AbstractContextManager[None]:
    """TimeoutError that names the hook when it takes longer than that; None: no limit."""
    if seconds is None:
        return nullcontext()
    return time_limit(seconds, f"{type(connector).__name__}.{hook} (kv_timeout_seconds)")
