"""Command-line flags derived from annotated dataclass fields."""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import sys
import textwrap
import types
from collections.abc import Sequence
from typing import Any, Literal, NoReturn, Union, get_args, get_origin

from vllm.utils.mem_utils import parse_size
from vllm.utils.text import did_you_mean


class FlexibleArgumentParser(argparse.ArgumentParser):
    """Takes ``--max_model_len`` for ``--max-model-len``, and says what a wrong flag may mean."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        given = sys.argv[1:] if args is None else args
        return super().parse_known_args([_with_dashes(arg) for arg in given], namespace)

    def error(self, message: str) -> NoReturn:
        marker = "unrecognized arguments: "
        if marker in message:
            flag = message.split(marker, 1)[1].split()[0].split("=")[0]
            message += did_you_mean(flag, self._option_string_actions)
        super().error(message)


def _with_dashes(arg: str) -> str:
    """``arg`` with the underscores of its flag, not of its value, as dashes."""
    if not arg.startswith("--"):
        return arg
    flag, equals, value = arg.partition("=")
    return flag.replace("_", "-") + equals + value


def field_docs(cls: type) -> dict[str, str]:
    """The docstring under each annotated field of ``cls``, on one line."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef), f"{cls} is not a class"
    docs = {}
    for statement, following in zip(tree.body, tree.body[1:]):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
            and isinstance(following.value.value, str)
        ):
            docs[statement.target.id] = " ".join(following.value.value.split())
    return docs


def json_object(text: str) -> dict[str, Any]:
    """A JSON object as a dict; ArgumentTypeError for anything else."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value


def whole_number(text: str) -> int:
    """A whole number, also as ``32k`` or ``4GiB``; negative ones too."""
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def flag_keywords(hint: Any) -> dict[str, Any]:
    """Keywords of ``add_argument`` for a field annotated ``hint``.

    bool: ``--flag`` and ``--no-flag``; Literal: choices; dict: JSON; list: several values.
    Of a union the first of these that it holds is taken.
    """
    members = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    kinds = {get_origin(member) or member for member in members}
    if bool in kinds and str not in kinds:
        return {"action": argparse.BooleanOptionalAction}
    if dict in kinds:
        return {"type": json_object, "metavar": "JSON"}
    if list in kinds:
        return {"nargs": "+"}
    if Literal in kinds:
        literal = next(member for member in members if get_origin(member) is Literal)
        return {"choices": list(get_args(literal))}
    for kind, parse in ((int, whole_number), (float, float)):
        if kind in kinds:
            return {"type": parse, "metavar": "N"}
    return {"type": str}
