"""The ``vllm`` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

from vllm.utils.text import did_you_mean
from vllm.version import PRODUCT, __version__


class Command(NamedTuple):
    """A command: what it does, and the function that runs its arguments."""

    about: str
    module: str
    function: str


COMMANDS = {
    "serve": Command(
        "Serve a model over HTTP (OpenAI's API, extraction of hidden states).",
        "vllm.entrypoints.cli.serve",
        "serve",
    ),
    "extract": Command(
        "Make a dataset of hidden states from files of prompts.",
        "vllm.entrypoints.cli.extract",
        "extract",
    ),
    "bench": Command("Measure the engine on this machine.", "vllm.entrypoints.cli.bench", "bench"),
    "hidden-states": Command(
        "Look at datasets of hidden states, check them, convert them.",
        "vllm.entrypoints.cli.hidden_states",
        "hidden_states",
    ),
    "models": Command(
        "List the families that run, or say what would run of one checkpoint.",
        "vllm.entrypoints.cli.models",
        "models",
    ),
}
_COMMAND_LINES = "\n".join(f"  {name:13} {command.about}" for name, command in COMMANDS.items())


def build_parser() -> argparse.ArgumentParser:
    """The parser of what precedes a command; importing it loads no torch."""
    parser = argparse.ArgumentParser(
        prog="vllm",
        usage="vllm [--version] [--help[=NAME]] COMMAND ...",
        description=f"{PRODUCT}: hidden states of causal language models, exactly and fast.\n"
        "Not the vLLM project, whose API it has.\n\n"
        f"Commands:\n{_COMMAND_LINES}",
        epilog="vllm serve --help lists the flags by groups; vllm serve --help=NAME explains one "
        "flag or\none group. In Python: from vllm import LLM, SamplingParams",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument("-v", "--version", action="version", version=f"{PRODUCT} {__version__}")
    parser.add_argument(
        "-h",
        "--help",
        nargs="?",
        const="",
        metavar="NAME",
        help="this text; with a name, that flag or group of vllm serve",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: this process's); returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and not arguments[0].startswith("-"):
        return _run_command(arguments[0], arguments[1:])
    parser = build_parser()
    asked = parser.parse_args(arguments).help
    if asked:
        return _run_command("serve", [f"--help={asked}"])
    parser.print_help()
    return 0


def _run_command(name: str, arguments: Sequence[str]) -> int:
    if name not in COMMANDS:
        build_parser().error(f"there is no command {name!r}{did_you_mean(name, COMMANDS)}")
    command = COMMANDS[name]
    status: int = getattr(import_module(command.module), command.function)(arguments)
    return status


if __name__ == "__main__":
    sys.exit(main())
