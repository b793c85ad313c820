"""``--help`` by groups, and ``--help=NAME`` for one flag or one group."""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Sequence
from typing import Any

from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.text import did_you_mean

EVERYTHING = "all"


class HelpAction(argparse.Action):
    """Prints help and ends the program."""

    def __init__(self, option_strings: Sequence[str], dest: str, **keywords: Any) -> None:
        super().__init__(option_strings, dest=argparse.SUPPRESS, nargs="?", **keywords)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        assert isinstance(parser, FlexibleArgumentParser)
        if not isinstance(values, str):
            print(overview(parser))
        elif (text := explain(parser, values)) is not None:
            print(text)
        else:
            known = [group.title or "" for group in parser.groups] + parser.flags
            parser.error(f"there is no flag or group {values!r}{did_you_mean(values, known)}")
        parser.exit()


def overview(parser: FlexibleArgumentParser) -> str:
    """Return the groups, each with the names of its flags."""
    width = min(shutil.get_terminal_size().columns, 100)
    lines = [parser.format_usage().strip(), "", parser.description or "", ""]
    for group in parser.groups:
        lines.append(f"{group.title}: {group.description}")
        names = " ".join(action.option_strings[0] for action in _flags_of(group))
        lines += textwrap.wrap(
            names, width, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False
        )
        lines.append("")
    lines += textwrap.wrap(parser.epilog or "", width)
    return "\n".join(lines)


def explain(parser: FlexibleArgumentParser, name: str) -> str | None:
    """Return help for one flag, one group, or (``all``) everything; None: the name is unknown.

    A part of a name finds every flag that contains it.
    """
    query = name.strip("-").replace("_", "-").lower()
    for group in parser.groups:
        if query == (group.title or "").lower():
            return _section(group, _flags_of(group))
    exact = parser.option(f"--{query}")

    def is_meant(flag: argparse.Action) -> bool:
        if exact is not None:
            return flag is exact
        return query == EVERYTHING or query in flag.option_strings[0]

    found = [(group, list(filter(is_meant, _flags_of(group)))) for group in parser.groups]
    return "\n".join(_section(group, flags) for group, flags in found if flags) or None


def _flags_of(group: argparse._ArgumentGroup) -> list[argparse.Action]:
    return [action for action in group._group_actions if action.option_strings]


def _section(group: argparse._ArgumentGroup, actions: Sequence[argparse.Action]) -> str:
    width = min(shutil.get_terminal_size().columns, 100)
    formatter = HelpFormatter(prog="", max_help_position=6, width=width)
    formatter.start_section(group.title)
    formatter.add_text(group.description)
    formatter.add_arguments(actions)
    formatter.end_section()
    return formatter.format_help()


class HelpFormatter(argparse.HelpFormatter):
    """Adds defaults to help texts, except empty ones and False."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        if action.default in (None, argparse.SUPPRESS, "", {}, []) or action.default is False:
            return text
        return f"{text} (default: %(default)s)"
