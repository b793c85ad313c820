"""``vllm completion``: a script with which a shell completes commands and flags."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence

_FILES = ("input", "config", "chat_template")
_FOLDERS = ("model_tag", "model", "output", "directory", "destination")


def completion(arguments: Sequence[str]) -> int:
    """Run ``vllm completion SHELL``; returns the exit status."""
    from vllm.entrypoints.cli.parsers import build_completion_parser

    parser = build_completion_parser()
    shell = parser.parse_args(arguments).shell
    try:
        shtab = importlib.import_module("shtab")
    except ImportError:
        parser.exit(1, "vllm completion: it needs the package shtab: pip install shtab\n")
    from vllm.entrypoints.cli.help import with_nested
    from vllm.entrypoints.cli.main import COMMANDS
    from vllm.entrypoints.cli.parsers import command_parsers

    whole = argparse.ArgumentParser(prog="vllm", allow_abbrev=False)
    whole.add_argument("-v", "--version", action="store_true", help="show the version")
    commands = whole.add_subparsers()
    commands.add_parser("help", help=COMMANDS["help"]).add_argument(
        "command", choices=list(COMMANDS)
    )
    for name, parser in command_parsers().items():
        commands.add_parser(name, help=COMMANDS[name], parents=[parser], add_help=False)
    for _, parser in with_nested("vllm", whole):
        for action in parser._actions:
            kind = "FILE" if action.dest in _FILES else "DIRECTORY"
            if action.dest in (*_FILES, *_FOLDERS):
                action.complete = vars(shtab)[kind]  # type: ignore[attr-defined]
    print(shtab.complete(whole, shell))
    return 0
