"""Names the entry of a config.json at which a model cannot be built."""

from __future__ import annotations

import linecache
import re
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

_RAISED_BY_ENTRIES = (
    TypeError, AttributeError, LookupError, ArithmeticError, AssertionError, RuntimeError,
)  # fmt: skip
"""Errors of code that reads an entry which is null, missing, of another type or out of bounds."""
_COMMON_WORDS = ("architectures", "dtype", "model_type", "name", "type")


@contextmanager
def failures_named(config: Any) -> Iterator[None]:
    """Turn errors inside into one ValueError with the architecture, the entry and its value.

    config: the checkpoint's. A ValueError stays as it is, and so does a lack of memory.
    """
    try:
        yield
    except _RAISED_BY_ENTRIES as error:
        if "memory" in f"{type(error).__name__} {error}".lower():
            raise
        reason = str(error).partition("\nException raised from")[0]  # torch adds its C++ stack
        raise ValueError(
            f"architectures={config.architectures} of model_type={config.model_type!r} cannot be "
            f"made from config.json: {type(error).__name__}: {reason}{_entries_read(config, error)}"
        ) from error


def _entries_read(config: Any, error: BaseException) -> str:
    """Name the entries that the code which failed had read, those that are null first."""
    from transformers import PretrainedConfig

    if isinstance(error, AttributeError) and isinstance(error.obj, PretrainedConfig):
        return f" (not there: {error.name})"
    entries = dict(flat_entries(config.to_dict()))
    nulls = {name: value for name, value in entries.items() if value is None}
    frames = traceback.extract_tb(error.__traceback__)[::-1]
    looks = [(nulls, _lines_left(frame)) for frame in frames]
    if "None" in str(error):  # it may have been read earlier, by code near that which failed
        looks += [(nulls, linecache.getlines(frame.filename)) for frame in frames]
    looks += [(entries, _lines_left(frame)) for frame in frames]
    for some, lines in looks:
        words = set(re.findall(r"[A-Za-z_]\w+", "".join(lines))).difference(_COMMON_WORDS)
        names = sorted(name for name in some if name.rpartition(".")[2] in words)
        if names:
            shown = ", ".join(f"{name}={entries[name]!r}" for name in names)
            return f" (read there: {shown})"
    return ""


def _lines_left(frame: traceback.FrameSummary) -> list[str]:
    """Return the lines that ran when a frame was left."""
    first = frame.lineno or 1
    return linecache.getlines(frame.filename)[first - 1 : frame.end_lineno or first]


def flat_entries(content: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield all entries with the names of those around them before their own."""
    for name, value in content.items():
        yield f"{path}{name}", value
        if isinstance(value, Mapping):
            yield from flat_entries(value, f"{path}{name}.")
