"""Checked dataclasses: pydantic checks the fields, and errors are ones that a user can act on."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import field, fields
from typing import Annotated, Any, TypeVar, dataclass_transform

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    WrapValidator,
)
from pydantic.dataclasses import dataclass as pydantic_dataclass

from vllm.utils.mem_utils import SIZE_ADVICE, parse_size
from vllm.utils.options import options_of
from vllm.utils.text import brief, parse_json, unknown_key_message

T = TypeVar("T")


def _check_unless_none(value: object, check: Callable[[object], object]) -> object:
    return None if value is None else check(value)


UNSET: Any = None
"""Default of a field that may be left out and has a value once its object exists."""
Fillable = WrapValidator(_check_unless_none)
"""``Annotated[int, ..., Fillable] = UNSET``: None may be given; the object then sets the value.

It must come after the constraints of the type, which are then not applied to None.
"""


def is_unset(value: object) -> bool:
    """Return whether a fillable field still waits for its value."""
    return value is None


class Advice(ValueError):
    """Says what would work instead of a field's value; the message adds the name and the value."""


def _size_from_text(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return parse_size(value)
    except ValueError:
        raise Advice(SIZE_ADVICE) from None


SizeBytes = Annotated[int, BeforeValidator(_size_from_text)]
"""A number of bytes, also as text: "4GiB", "512M"."""


def _path_as_text(value: object) -> object:
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    return os.path.expanduser(path) if isinstance(path, str) else path


def require(holds: Callable[[Any], object], advice: str) -> AfterValidator:
    """Field validator: an error with ``advice`` unless ``holds`` is true of the value."""
    return AfterValidator(_checker(holds, advice))


def require_at_first(holds: Callable[[Any], object], advice: str) -> BeforeValidator:
    """The same before the type is checked, for unions of types."""
    return BeforeValidator(_checker(holds, advice))


def _checker(holds: Callable[[Any], object], advice: str) -> Callable[[object], object]:
    def check(value: object) -> object:
        if not holds(value):
            raise Advice(advice)
        return value

    return check


def at_least(smallest: int) -> AfterValidator:
    """Field validator: no number below ``smallest``."""
    return require(lambda value: value >= smallest, f"use at least {smallest}")


def at_most(largest: int) -> AfterValidator:
    """Field validator: no number above ``largest``."""
    return require(lambda value: value <= largest, f"use at most {largest}")


FolderPath = Annotated[str, BeforeValidator(_path_as_text), require(bool, "name a folder")]
"""The path of a folder, as text or as a path object. A ~ becomes the home folder."""
ABOVE_0 = require(lambda value: value > 0, "use a number above 0")
FINITE = require(math.isfinite, "use a finite number")


def refuse_unless(holds: object, owner: object, name: str, advice: str) -> None:
    """Raise ValueError about ``name``, a field of ``owner``, unless ``holds``."""
    if not holds:
        raise ValueError(f"{name}={getattr(owner, name)!r} is not valid; {advice}")


def from_mapping(cls: type) -> BeforeValidator:
    """Field validator: a mapping, or its JSON, becomes an object of the class.

    Errors of that class then name the key and the option that are wrong.
    """

    def make(value: object, info: ValidationInfo) -> object:
        name, original = info.field_name, value
        if isinstance(value, str):
            try:
                value = parse_json(value)
            except ValueError as error:
                raise ValueError(f"{name}={brief(original)} is not valid JSON: {error}") from None
        if isinstance(value, Mapping):
            return cls(**value)
        if value is None or isinstance(value, cls):
            return value
        raise ValueError(
            f"{name}={original!r} is not valid; give a dict, its JSON, or a {cls.__name__}"
        )

    return BeforeValidator(make)


@dataclass_transform(kw_only_default=True, field_specifiers=(field, Field))
def config(option: str = "", *, frozen: bool = False) -> Callable[[type[T]], type[T]]:
    """Class decorator: a keyword-only dataclass whose fields pydantic checks.

    ``option``: for messages, the option through which a user gives the object as a dict. Every
    error is a plain ValueError that names the option, the value and what would work.
    """

    def decorate(cls: type[T]) -> type[T]:
        settings = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
        checked: Any = pydantic_dataclass(cls, config=settings, kw_only=True, frozen=frozen)
        checking_init = checked.__init__

        @functools.wraps(checking_init)
        def init(self: T, **kwargs: Any) -> None:
            try:
                checking_init(self, **kwargs)
            except ValidationError as error:
                raise ValueError(_explain(checked, option, error)) from None

        checked.__init__ = init
        return checked  # type: ignore[no-any-return]

    return decorate


def _explain(cls: type, option: str, error: ValidationError) -> str:
    """One sentence for each error."""
    messages, names = [], {one.field.name: one.name for one in options_of(cls)}
    for detail in error.errors(include_url=False):
        kind, cause = detail["type"], detail.get("ctx", {}).get("error")
        name = ".".join(names.get(str(part), str(part)) for part in detail["loc"])
        full_name = f"{option}.{name}" if option and name else name or option
        if kind == "unexpected_keyword_argument":
            known = [f.name for f in fields(cls) if f.init]
            message = unknown_key_message(option or cls.__name__, name, known)
        elif isinstance(cause, Advice):
            message = f"{full_name}={brief(detail['input'])} is not valid; {cause}"
        elif kind == "value_error" and cause is not None:
            message = str(cause)
        elif kind in ("missing", "missing_keyword_only_argument"):
            message = f"{full_name} is missing; it has no default"
        else:
            expected = detail["msg"].replace("Input should be", "it should be")
            message = f"{full_name}={brief(detail['input'])} is not valid: {expected}"
        if message not in messages:
            messages.append(message)
    return "; ".join(messages)
