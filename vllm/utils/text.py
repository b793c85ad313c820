"""Texts of error messages, and safe file names."""

from __future__ import annotations

import difflib
import hashlib
import json
import operator
import re
import reprlib
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")
_HASHED_ENDING = re.compile(r"-[0-9a-f]{16}$")
_MAX_NAME_LENGTH = 160
_MAX_MESSAGE_LENGTH = 4000
_BRIEF = reprlib.Repr()
_BRIEF.maxstring = _BRIEF.maxother = _BRIEF.maxlong = 200
_BRIEF.maxlist = _BRIEF.maxtuple = _BRIEF.maxset = _BRIEF.maxdict = 10


def brief(value: object) -> str:
    """Return ``repr(value)``; long texts and lists in it are cut, however large they are."""
    return _BRIEF.repr(value)


def message_of(error: BaseException) -> str:
    """Return the message of an exception of any class: text that can be encoded, and is not long.

    A class of another package may have a ``__str__`` that raises.
    """
    try:
        message = str(error)
    except Exception:
        message = "(its message cannot be read)"
    if len(message) > _MAX_MESSAGE_LENGTH:
        message = f"{message[:_MAX_MESSAGE_LENGTH]}..."
    return message.encode(errors="backslashreplace").decode()


def error_text(error: BaseException) -> str:
    """Return class and message of an exception of any class; see :func:`message_of`."""
    return f"{type(error).__name__}: {message_of(error)}"


def check_truth_values(**options: object) -> None:
    """Raise ValueError for an option that is neither True nor False, such as the text "no"."""
    for name, value in options.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name}={brief(value)}: has to be true or false")


def whole_number(name: str, value: Any, least: int | None = None) -> int:
    """Return a whole number, which may be one of numpy or torch.

    ValueError names the option: it is something else, or less than ``least``.
    """
    number = None
    if not isinstance(value, bool):
        with suppress(TypeError):
            number = operator.index(value)
    if number is None or (least is not None and number < least):
        bound = "" if least is None else f" of at least {least}"
        raise ValueError(f"{name}={brief(value)}: has to be a whole number{bound}")
    return number


def parse_json(text: str | bytes) -> Any:
    """Parse JSON. ValueError: it is not JSON, or is nested more deeply than Python reads."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def check_text(name: str, text: str) -> None:
    """Raise ValueError unless ``text`` can be encoded: a lone surrogate cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} is not valid text: {error}") from None


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
    """Message about a key that ``owner`` does not have: the nearest key, or else all keys."""
    names = sorted(known)
    hint = did_you_mean(key, names) or f"; known keys: {', '.join(names)}"
    return f"{owner}: unknown key {key!r}{hint}"


def one_of(values: Iterable[object]) -> str:
    """Return values that are a choice, for a message: ``1, 2 or 4``."""
    *others, last = map(str, values)
    return f"{', '.join(others)} or {last}" if others else last


def safe_name(request_id: str) -> str:
    """A file name for any request id: different ids have different names.

    Ids of ordinary characters are kept. In others the unsafe characters are replaced and a
    hash is added. Ids that look as if they had such a hash get one, too.
    """
    name = _UNSAFE.sub("_", request_id)
    if name.startswith("."):
        name = "_" + name.lstrip(".")
    name = name[:_MAX_NAME_LENGTH]
    if name == request_id and name and not _HASHED_ENDING.search(name):
        return name
    digest = hashlib.blake2b(request_id.encode("utf-8", "surrogatepass"), digest_size=8)
    return f"{name}-{digest.hexdigest()}"
