"""A command-line parser that suggests the nearest flag for a wrong one."""

from __future__ import annotations

import argparse
import itertools
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from vllm.utils.text import brief, did_you_mean, parse_json


class FlexibleArgumentParser(argparse.ArgumentParser):
    """Accepts ``--max_model_len`` for ``--max-model-len``, and suggests flags for wrong ones.

    A flag that takes a JSON object also takes its entries one by one, as in
    ``--kv-transfer-config.kv_role kv_producer``; a value that is not valid JSON is text. Such
    entries are added to the object that is given as JSON or in ``namespace``, and override it.
    An argument like a negative number (``-1,-2``) is a value, as in Python 3.14 and later.
    A flag that takes several values is an error when it is given twice with other ones: argparse
    would forget the first. Of a flag with one value the last one counts, and a line says so.
    """

    most_used: Mapping[str, str] = {}
    """Flag with its value, as help writes it -> one line about it. Help shows these first."""
    example = ""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._negative_number_matcher = re.compile(r"-\.?\d")

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        arguments = sys.argv[1:] if args is None else args
        tokens, objects = self._take_dotted([_with_dashes(arg) for arg in arguments])
        self._check_repeated(tokens)
        parsed, rest = super().parse_known_args(tokens, namespace)
        for name, entries in objects.items():
            setattr(parsed, name, _merged(getattr(parsed, name) or {}, entries))
        return parsed, rest

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        parsed, rest = self.parse_known_args(args, namespace)
        if rest:
            nearest = did_you_mean(rest[0].partition("=")[0], self._option_string_actions)
            self.error(f"unrecognized arguments: {' '.join(rest)}{nearest}")
        return parsed

    def option(self, flag: str) -> argparse.Action | None:
        """The option that a flag such as ``--max-model-len`` sets; None if there is none."""
        return self._option_string_actions.get(flag)

    @property
    def flags(self) -> list[str]:
        return list(self._option_string_actions)

    @property
    def groups(self) -> list[argparse._ArgumentGroup]:
        """Groups of flags, in the order they were added; argparse's own are left out."""
        return [group for group in self._action_groups[2:] if group._group_actions]

    def _check_repeated(self, tokens: Sequence[str]) -> None:
        """End the program if a flag of several values is given twice with other ones; say it if
        a flag of one value is."""
        given: dict[str, list[list[str]]] = {}
        values: list[str] = []
        for token in itertools.takewhile("--".__ne__, tokens):
            flag, equals, value = token.partition("=")
            option = self.option(flag)
            if option is not None and value == "--":  # argparse would leave it out
                self.error(f"argument {flag}: -- cannot be a value on the command line")
            if option is None:
                values.append(token)
            else:
                values = [value] if equals else [flag] if option.nargs == 0 else []
                given.setdefault(option.dest, []).append(values)
        for name, occasions in given.items():
            option = next(one for one in self._actions if one.dest == name)
            if option.nargs not in ("+", "*"):
                occasions = [one[:1] for one in occasions]  # what follows is of no flag
            if name == argparse.SUPPRESS or all(one == occasions[0] for one in occasions):
                continue
            shown = " and then ".join(" ".join(one) for one in occasions)
            repeated = f"{option.option_strings[0]} is given more than once ({brief(shown)})"
            if option.nargs in ("+", "*"):
                self.error(f"{repeated}; name all values once")
            self._print_message(f"{self.prog}: {repeated}: the last one counts\n", sys.stderr)

    def _take_dotted(self, tokens: list[str]) -> tuple[list[str], dict[str, dict[str, Any]]]:
        """``tokens`` without the dotted flags, and the entries of these: option -> entries."""
        kept: list[str] = []
        objects: dict[str, dict[str, Any]] = {}
        remaining = iter(tokens)
        for token in remaining:
            flag, equals, value = token.partition("=")
            base, dot, path = flag.partition(".")
            option = self.option(base) if dot and base.startswith("--") else None
            if option is None or option.type is not json_object:
                kept.append(token)
                continue
            text = value if equals else next(remaining, None)
            if text is None or not all(path.split(".")):
                self.error(f"argument {flag}: expected --option.key[.key...]=value")
            entries = objects.setdefault(option.dest, {})
            objects[option.dest] = _merged(entries, _nested(path.split("."), _json_or_text(text)))
        return kept, objects


def _with_dashes(arg: str) -> str:
    """``arg`` with dashes in the flag and underscores in keys after a dot; the value stays."""
    if not arg.startswith("--"):
        return arg
    flag, equals, value = arg.partition("=")
    base, dot, path = flag.partition(".")
    return base.replace("_", "-") + dot + path.replace("-", "_") + equals + value


def _nested(path: Sequence[str], value: Any) -> dict[str, Any]:
    """``{"a": {"b": value}}`` for the path a, b."""
    for key in reversed(path):
        value = {key: value}
    assert isinstance(value, dict)
    return value


def _merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Merge both; two objects under one key are merged too, else the new value wins."""
    result = dict(old)
    for key, value in new.items():
        before = result.get(key)
        both_objects = isinstance(before, Mapping) and isinstance(value, Mapping)
        result[key] = _merged(before, value) if both_objects else value  # type: ignore[arg-type]
    return result


def _json_or_text(text: str) -> Any:
    try:
        return parse_json(text)
    except ValueError:
        return text


def json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object into a dict; ArgumentTypeError for anything else."""
    try:
        value = parse_json(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{brief(text)} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{brief(text)} is not a JSON object")
    return value
