"""Words for error messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """``" (did you mean 'x'?)"`` for the candidate nearest to ``name``, ``""`` if none is near.

    Dashes and underscores, and upper and lower case, count as the same.
    """

    def plain(text: str) -> str:
        return text.lower().replace("-", "_").strip("_")

    by_plain = {plain(candidate): candidate for candidate in candidates}
    nearest = difflib.get_close_matches(plain(name), by_plain, n=1, cutoff=0.6)
    return f" (did you mean {by_plain[nearest[0]]!r}?)" if nearest else ""


def unknown_key_message(owner: str, key: str, known: Iterable[str]) -> str:
    """Message for a key that ``owner`` does not have: the nearest one, or else all of them."""
    names = sorted(known)
    hint = did_you_mean(key, names) or f"; known keys: {', '.join(names)}"
    return f"{owner}: unknown key {key!r}{hint}"
