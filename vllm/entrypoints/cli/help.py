"""``--help`` by groups, and ``--help=NAME`` for one flag or one group."""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, starmap
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
    """Return the most used flags with a line about each, and the names of the others by group."""
    width = min(shutil.get_terminal_size().columns, 100)
    lines = [parser.format_usage().strip(), "", *textwrap.wrap(parser.description or "", width)]
    lines += ["", "Example:", *textwrap.indent(parser.example, "  ").splitlines()]
    lines += ["", "Most used flags:"]
    column = max(map(len, parser.most_used)) + 4
    for flag, about in parser.most_used.items():
        start = f"  {flag:{column - 2}}"
        lines += textwrap.wrap(about, width, initial_indent=start, subsequent_indent=" " * column)
    shown = {flag.split()[0] for flag in parser.most_used}
    lines += ["", "The other flags, by group:"]
    for group in parser.groups:
        names = [action.option_strings[0] for action in _flags_of(group)]
        rest = " ".join(name for name in names if name not in shown)
        if not rest:
            continue
        lines.append(f"{group.title}: {group.description}")
        lines += textwrap.wrap(
            rest, width, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False
        )
    lines.append("")
    lines += textwrap.wrap(parser.epilog or "", width)
    return "\n".join(lines)


def explain_in_all(parsers: Mapping[str, argparse.ArgumentParser], name: str) -> str | None:
    """Return help for one flag or one group, from every command that has it.

    ``parsers`` has the parser of each command. A name that fits exactly in one command is not
    looked for as a part of names in others. None: no command has it.
    """
    for is_exact in (True, False):
        commands: dict[str, list[str]] = {}
        for command, parser in chain.from_iterable(starmap(with_nested, parsers.items())):
            if text := explain(parser, name, is_exact=is_exact):
                commands.setdefault(text, []).append(command)
        if commands:
            parts = (f"vllm {', vllm '.join(names)}:\n{text}" for text, names in commands.items())
            return "\n".join(parts)
    return None


def with_nested(
    name: str, parser: argparse.ArgumentParser
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield a command's name and parser, and those of the commands below it."""
    yield name, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for nested, below in action.choices.items():
                yield from with_nested(f"{name} {nested}", below)


def explain(parser: argparse.ArgumentParser, name: str, *, is_exact: bool = False) -> str | None:
    """Return help for one flag, one group, or (``all``) everything; None: the name is unknown.

    A part of a name finds every flag that contains it, unless the name ``is_exact``.
    """
    query = name.strip("-").replace("_", "-").lower()
    groups = [group for group in parser._action_groups if _flags_of(group)]
    for group in groups:
        if query == (group.title or "").lower():
            return _section(group, _flags_of(group))
    exact = parser._option_string_actions.get(f"--{query}")

    def is_meant(flag: argparse.Action) -> bool:
        if exact is not None or is_exact:
            return flag is exact
        return query == EVERYTHING or query in flag.option_strings[0]

    found = [(group, list(filter(is_meant, _flags_of(group)))) for group in groups]
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
        is_empty = (
            action.default in (None, argparse.SUPPRESS, "", {}, []) or action.default is False
        )
        if is_empty or "%(default)s" in text:
            return text
        return f"{text} (default: %(default)s)"
