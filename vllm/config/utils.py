"""How configuration objects are made: checked dataclasses with errors a user can act on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import field, fields
from typing import Any, TypeVar, dataclass_transform

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError, WrapValidator
from pydantic.dataclasses import dataclass as pydantic_dataclass

from vllm.utils.text import unknown_key_message

T = TypeVar("T")


def _check_unless_none(value: object, check: Callable[[object], object]) -> object:
    return None if value is None else check(value)


UNSET: Any = None
"""Default of a field that may be left out and has a value once its object exists."""
Fillable = WrapValidator(_check_unless_none)
"""``Annotated[int, ..., Fillable] = UNSET``: None may be given, the object fills in the value.

It stands after the constraints of the type, which are then not asked about None.
"""


def is_unset(value: object) -> bool:
    """Whether a fillable field still waits for its value."""
    return value is None


def from_mapping(cls: type) -> BeforeValidator:
    """Field validator: a mapping becomes an object of the class, other values stay.

    Its own errors then say which key of which option is wrong.
    """

    def make(value: object) -> object:
        return cls(**value) if isinstance(value, Mapping) else value

    return BeforeValidator(make)


@dataclass_transform(kw_only_default=True, field_specifiers=(field, Field))
def config(option: str = "") -> Callable[[type[T]], type[T]]:
    """Class decorator: a keyword-only dataclass whose fields pydantic checks.

    ``option``: name under which a user gives the object as a dict, for the messages. Every
    error is a plain ValueError that names the option, the value and what would work.
    """

    def decorate(cls: type[T]) -> type[T]:
        settings = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
        checked: Any = pydantic_dataclass(cls, config=settings, kw_only=True)
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
    """One sentence for each thing that is wrong."""
    messages = []
    for detail in error.errors(include_url=False):
        kind, cause = detail["type"], detail.get("ctx", {}).get("error")
        name = ".".join(str(part) for part in detail["loc"])
        full_name = f"{option}.{name}" if option and name else name or option
        if kind == "unexpected_keyword_argument":
            known = [f.name for f in fields(cls) if f.init]
            message = unknown_key_message(option or cls.__name__, name, known)
        elif kind == "value_error" and cause is not None:
            message = str(cause)
        elif kind in ("missing", "missing_keyword_only_argument"):
            message = f"{full_name} is missing; it has no default"
        else:
            expected = detail["msg"].replace("Input should be", "it should be")
            message = f"{full_name}={detail['input']!r} is not valid: {expected}"
        if message not in messages:
            messages.append(message)
    return "; ".join(messages)
