"""Options: the fields of checked dataclasses, and the flags that derive from them.

A field is the one place of an option: its annotation holds the type and the checks, its
default is the default, and the docstring under it is the help.
"""

from __future__ import annotations

import argparse
import ast
import functools
import inspect
import itertools
import textwrap
import types
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from vllm.utils.argparse_utils import json_object
from vllm.utils.mem_utils import parse_size


class Group(NamedTuple):
    """Flags that help shows together."""

    title: str
    about: str


@dataclass(frozen=True)
class Option:
    """Settings of an option in the annotation of its field: ``Annotated[int, Option(...)]``."""

    name: str = ""
    """Keyword and flag, if their name is not that of the field."""
    short_flag: str = ""
    metavar: str = ""
    """Name of the value in the help."""
    group: Group | None = None
    """Group that begins with this field; the following fields belong to it too."""
    supported: tuple[Any, ...] = ()
    """Values that an engine can serve today, if the field can hold more."""
    is_derived: bool = False
    """True if the field follows from others and is not an option."""
    has_effect: bool = True
    """False for an option of vLLM on which nothing depends here: the log names it when it is
    given."""


DERIVED = Option(is_derived=True)
WITHOUT_EFFECT = Option(has_effect=False)


@dataclass(frozen=True)
class FieldOption:
    """An option as its field declares it."""

    owner: type
    field: Field[Any]
    hint: Any
    """Type of the field, without the rest of its annotation."""
    declared: Option
    group: Group

    @property
    def name(self) -> str:
        """Keyword in Python and, with dashes, flag on the command line."""
        return self.declared.name or self.field.name

    @property
    def help(self) -> str:
        return field_docs(self.owner)[self.field.name]

    def default(self) -> Any:
        """The field's default; None if it has none."""
        if self.field.default_factory is not MISSING:
            return self.field.default_factory()
        return None if self.field.default is MISSING else self.field.default


def options_of(cls: type, group: Group | None = None) -> list[FieldOption]:
    """The options that are fields of ``cls``, in their order.

    ``group``: the group of all fields before the first that begins one.
    """
    group = group or Group(cls.__name__, (cls.__doc__ or "").strip().splitlines()[0])
    plain, annotated = get_type_hints(cls), get_type_hints(cls, include_extras=True)
    options = []
    for field in fields(cls):
        declared = _declared(annotated[field.name])
        group = declared.group or group
        if field.init and not declared.is_derived:
            options.append(FieldOption(cls, field, plain[field.name], declared, group))
    return options


def add_flags(parser: argparse.ArgumentParser, options: Iterable[FieldOption]) -> None:
    """Add the flags of ``options`` to ``parser``, each to its group."""
    groups: dict[str, argparse._ArgumentGroup] = {}
    for option in options:
        title, about = option.group
        if title not in groups:
            groups[title] = parser.add_argument_group(title, about)
        keywords = flag_keywords(option.hint)
        if option.declared.metavar:
            keywords["metavar"] = option.declared.metavar
        groups[title].add_argument(
            f"--{option.name.replace('_', '-')}",
            *filter(None, [option.declared.short_flag]),
            default=option.default(),
            help=option.help.replace("%", "%%"),
            dest=option.name,
            **keywords,
        )


def given_options(cls: type, args: argparse.Namespace) -> dict[str, Any]:
    """The fields of ``cls`` for which ``args`` has a value; ``args`` may hold others."""
    values = vars(args)
    return {f.name: values[f.name] for f in fields(cls) if f.name in values}


@functools.cache
def field_docs(cls: type) -> dict[str, str]:
    """The docstring under each annotated field of ``cls`` and its bases, on one line."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if is_dataclass(base):
            docs |= _own_field_docs(base)
    return docs


def _own_field_docs(cls: type) -> dict[str, str]:
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef), f"{cls} is not a class"
    docs = {}
    for pair in itertools.pairwise(tree.body):
        match pair:
            case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                docs[name] = " ".join(text.split())
    return docs


def _declared(annotation: Any) -> Option:
    extras = get_args(annotation)[1:] if get_origin(annotation) is Annotated else ()
    return next((extra for extra in extras if isinstance(extra, Option)), Option())


def whole_number(text: str) -> int:
    """Parse a whole number, also a negative one or one such as ``32k`` or ``4GiB``."""
    parsers: tuple[Callable[[str], int], ...] = (int, parse_size)
    for parse in parsers:
        with suppress(ValueError):
            return parse(text)
    raise argparse.ArgumentTypeError(
        f"{text!r} is not a whole number; use one such as 1000 or 32k (bytes also as 4GiB)"
    )


def flag_keywords(hint: Any) -> dict[str, Any]:
    """Keywords of ``add_argument`` for a field annotated ``hint``.

    bool: ``--flag`` and ``--no-flag``; Literal: choices; dict or dataclass: JSON; list or
    tuple: several values. For a union, the first of these that it holds is taken.
    """
    members = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    kinds = {get_origin(member) or member for member in members}
    if bool in kinds and str not in kinds:
        return {"action": argparse.BooleanOptionalAction}
    if dict in kinds or any(is_dataclass(kind) for kind in kinds):
        return {"type": json_object, "metavar": "JSON"}
    if kinds & {list, tuple}:
        return {"nargs": "+"}
    if Literal in kinds:
        literal = next(member for member in members if get_origin(member) is Literal)
        return {"choices": list(get_args(literal))}
    for kind, parse in ((int, whole_number), (float, float)):
        if kind in kinds:
            return {"type": parse, "metavar": "N"}
    return {"type": str}
