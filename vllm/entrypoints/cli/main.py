"""The ``vllm`` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from vllm.utils.text import did_you_mean
from vllm.version import PRODUCT

COMMANDS = {
    "serve": "Serve a model over HTTP (OpenAI's API, extraction of hidden states).",
    "extract": "Make a dataset of hidden states from files of prompts.",
    "bench": "Measure the engine on this machine.",
    "hidden-states": "Look at datasets of hidden states, check them, convert them.",
    "models": "List the families that run, or say what would run of one checkpoint.",
}
"""What each does; a function of that name, in a module of that name, runs its arguments."""
_COMMAND_LINES = "\n".join(f"  {name:13} {about}" for name, about in COMMANDS.items())


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
    parser.add_argument("-v", "--version", action="store_true")
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
    options = parser.parse_args(arguments)
    if options.version:
        from vllm.utils.build_info import version_line

        print(version_line())
        return 0
    if asked := options.help:
        return _run_command("serve", [f"--help={asked}"])
    parser.print_help()
    return 0


def _run_command(name: str, arguments: Sequence[str]) -> int:
    if name not in COMMANDS:
        build_parser().error(f"there is no command {name!r}{did_you_mean(name, COMMANDS)}")
    function = name.replace("-", "_")
    module = import_module(f"vllm.entrypoints.cli.{function}")
    status: int = vars(module)[function](arguments)
    return status


if __name__ == "__main__":
    sys.exit(main())
