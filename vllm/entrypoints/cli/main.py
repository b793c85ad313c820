"""The ``vllm`` command."""

from __future__ import annotations

import argparse
import io
import os
import select
import sys
from collections.abc import Sequence
from importlib import import_module
from itertools import chain, starmap

from vllm import envs
from vllm.exceptions import EXIT_STATUS, FailureKind
from vllm.utils.gc_utils import collect_less_often
from vllm.utils.text import did_you_mean
from vllm.version import PRODUCT

COMMANDS = {
    "serve": "Serve a model over HTTP (OpenAI's API, extraction of hidden states).",
    "extract": "Make a dataset of hidden states from files of prompts.",
    "bench": "Measure the engine on this machine.",
    "hidden-states": "Inspect, verify and convert datasets of hidden states.",
    "models": "List the families that run, or tell whether and how a checkpoint would run.",
    "collect-env": "Print versions, kernels and limits for a report of a fault.",
    "completion": "Print a script that completes commands and flags in a shell.",
    "help": "Show this text, or the help of a command.",
}
"""Command -> its help; a function of that name, in a module of that name, runs its arguments.
Only ``help`` is here."""
_SIGPIPE_STATUS = 141
"""Exit status that a shell reports of a process ended by SIGPIPE."""
_COMMAND_LINES = "\n".join(f"  {name:14}{about}" for name, about in COMMANDS.items())


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of options before a command, without loading torch."""
    parser = argparse.ArgumentParser(
        prog="vllm",
        usage="vllm [--version] [--help[=NAME]] COMMAND ...",
        description=f"{PRODUCT}: extracts exact hidden states from causal language models, fast.\n"
        "It has the API of the vLLM project, but is not that project.\n\n"
        f"Commands:\n{_COMMAND_LINES}",
        epilog="vllm COMMAND --help shows the flags of a command; vllm --help=NAME explains one "
        "flag or one\ngroup, of any command. In Python: from vllm import LLM, SamplingParams",
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
        help="show this text, or with NAME that flag or group, of any command",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: that of this process); returns the exit status."""
    if argv is None:
        argv = sys.argv[1:]
        collect_less_often()
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115  None: closed by the shell
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files may be any bytes
    try:
        try:
            return _run(list(argv))
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        if not _has_lost_its_reader():
            raise
        return _SIGPIPE_STATUS
    except KeyboardInterrupt:
        print("vllm: interrupted", file=sys.stderr)
        return EXIT_STATUS[FailureKind.ABORTED]
    except OSError as error:  # of a full disk behind the output, for instance
        print(f"vllm: {error}", file=sys.stderr)
        if sys.stdout is sys.__stdout__:
            _drop_output()
        return 1


def _has_lost_its_reader() -> bool:
    """Return whether nothing reads what this process prints any more, as behind ``| head``."""
    watch = select.poll()
    watch.register(sys.stdout.fileno(), 0)  # errors are always reported
    if not watch.poll(0):
        return False
    _drop_output()
    return True


def _drop_output() -> None:
    """Send what is still to be printed nowhere, so that the flush at exit does not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(arguments: list[str]) -> int:
    if arguments and not arguments[0].startswith("-"):
        return _run_command(arguments[0], arguments[1:])
    parser = build_parser()
    options = parser.parse_args(arguments)
    if options.version:
        from vllm.utils.build_info import version_line

        print(version_line())
        return 0
    if options.help:
        _explain(options.help)
    else:
        parser.print_help()
    return 0


def _explain(name: str, command: Sequence[str] = ()) -> None:
    """Print help for a flag or a group, from every command that has it, or from ``command``: its
    name, and perhaps that of a command below it."""
    from vllm.entrypoints.cli.help import explain_in_all, with_nested
    from vllm.entrypoints.cli.parsers import command_parsers

    parsers = command_parsers()
    if command:
        below = dict(with_nested(command[0], parsers[command[0]]))
        path = " ".join(command) if " ".join(command) in below else command[0]
        parsers = {path: below[path]}
    text = explain_in_all(parsers, name)
    if text is None:
        nested = chain.from_iterable(starmap(with_nested, parsers.items()))
        flags = [flag for _, parser in nested for flag in parser._option_string_actions]
        asked = parsers[path] if command else build_parser()
        asked.error(f"there is no flag or group {name!r}{did_you_mean(name, flags)}")
    print(text)


def _run_command(name: str, arguments: Sequence[str]) -> int:
    if name == "help":
        return main([*arguments, "--help"])
    if name not in COMMANDS:
        hint = did_you_mean(name, COMMANDS) or f"; the commands are {', '.join(COMMANDS)}"
        build_parser().error(f"there is no command {name!r}{hint}")
    try:  # what every other module reads when it is imported
        _ = envs.VLLM_LOGGING_LEVEL, envs.VLLM_LOG_FORMAT
    except ValueError as error:
        print(f"vllm {name}: {error}", file=sys.stderr)
        return EXIT_STATUS[FailureKind.BAD_REQUEST]
    for argument in arguments:
        if argument.startswith("--help="):
            _explain(argument.removeprefix("--help="), [name, *arguments[:1]])
            sys.exit(0)  # as argparse does after a help text
    function = name.replace("-", "_")
    module = import_module(f"vllm.entrypoints.cli.{function}")
    status: int = vars(module)[function](arguments)
    return status


if __name__ == "__main__":
    status = main()
    # CPython notes an interrupt of exec(), as in an import of dataclasses, also one that is caught;
    # behind ``python -m`` it then ends by SIGINT. Another exec() takes the note back.
    exec("")
    sys.exit(status)
