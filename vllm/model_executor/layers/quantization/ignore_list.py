"""Modules that a ``quantization_config`` lists as not quantised."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from fnmatch import translate
from typing import Any

from vllm.model_executor.layers.quantization.storage_format import (
    FormatOf,
    StorageFormat,
    expression,
    names_of,
    section,
)

_LISTS = ("modules_to_not_convert", "ignored_layers", "exclude_modules", "ignore", "exclude")
_REGULAR, _IN_DYNAMIC, _NOT_IN_DYNAMIC = "re:", "+:", "-:"


class IgnoreList:
    """The entries of all such lists in a config, and of GPTQModel's ``dynamic``.

    An entry is a name, or whole parts of a name between dots (``lm_head``, ``layers.0``), or a
    pattern with ``*``, or ``re:`` and a regular expression that matches the beginning.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._parts: dict[str, str] = {}
        self._patterns: list[tuple[re.Pattern[str], str | None]] = []
        for key in _LISTS:
            for entry in names_of(config, key):
                self._add(entry, key)
        for pattern in section(config, "dynamic"):  # the first one that matches decides
            is_listed = pattern.startswith(_NOT_IN_DYNAMIC)
            text = pattern.removeprefix(_NOT_IN_DYNAMIC if is_listed else _IN_DYNAMIC)
            shown = f"dynamic: {pattern!r}" if is_listed else None
            self._patterns.append((expression(text, "dynamic"), shown))

    def _add(self, entry: str, key: str) -> None:
        shown = f"{key}: {entry!r}"
        if entry.startswith(_REGULAR):
            self._patterns.append((expression(entry.removeprefix(_REGULAR), key), shown))
        elif "*" in entry:
            for pattern in (entry, f"{entry}.*"):
                self._patterns.append((re.compile(translate(pattern)), shown))
        else:
            self._parts[entry.strip(".")] = shown

    def find(self, module: str) -> str | None:
        """Return the entry that lists the module, as text."""
        parts = module.split(".")
        for start in range(len(parts)):
            for end in range(len(parts), start, -1):
                shown = self._parts.get(".".join(parts[start:end]))
                if shown is not None:
                    return shown
        return next((shown for pattern, shown in self._patterns if pattern.match(module)), None)


def without_ignored(format_of: FormatOf, ignored: IgnoreList) -> FormatOf:
    """Make ``format_of`` return None for listed modules. ValueError: a listed module is quantised
    nevertheless."""

    def checked(module: str, names: Collection[str]) -> StorageFormat | None:
        stored = format_of(module, names)
        shown = None if stored is None else ignored.find(module)
        if stored is None or shown is None:
            return stored
        for name in stored.names(module):
            if name in names and name != stored.weight_name(module):
                raise ValueError(
                    f"weight {name!r} ({stored.name}) is in the checkpoint, but its "
                    f"quantization_config says that the module is not quantised ({shown}); take "
                    "the entry out, or store the module as a float weight"
                )
        return None

    return checked
