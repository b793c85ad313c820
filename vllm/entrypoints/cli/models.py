"""``vllm models``: list the families that run, and report on one checkpoint."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

_WIDTH = 100
_MOST_USED = {
    "--json": "print JSON",
    "--hooks": "list the places inside layers whose values can be extracted",
    "--markdown": "print the table of docs/supported_models.md",
    "--max-model-len N": "longest request, for the sizes in the report",
    "--trust-remote-code": "run Python code that comes with the checkpoint",
}


def build_models_parser() -> FlexibleArgumentParser:
    """Build the parser of ``vllm models``, with the engine's flags, which decide what would run."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.entrypoints.cli.serve_arguments import command_parser

    parser = command_parser(
        "vllm models [MODEL] [--json | --markdown] [flags]",
        "List the families that run; with a checkpoint, tell whether and how it would run, without "
        "reading its weights. If an engine would refuse it, print the reason and exit with 1.",
    )
    parser.most_used, parser.example = _MOST_USED, "vllm models Qwen/Qwen3.5-0.8B"
    output = parser.add_argument_group("Output", "The form of the output.")
    form = output.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="Print JSON instead of text.")
    form.add_argument(
        "--markdown", action="store_true", help="Print the table of docs/supported_models.md."
    )
    output.add_argument(
        "--hooks",
        action="store_true",
        help="List the hook points of MODEL: names, forms, and paths of modules.",
    )
    EngineArgs.add_cli_args(parser)
    return parser


def models(argv: Sequence[str]) -> int:
    """Run ``vllm models``; returns the exit status, 1 for a checkpoint that would be refused."""
    from vllm.entrypoints.cli.serve_arguments import parse_flags

    parser = build_models_parser()
    try:
        args = parse_flags(parser, argv)
    except ValueError as error:
        parser.error(str(error))
    if args.model is None:
        if args.hooks:
            parser.error("--hooks lists the hook points of a checkpoint: name one")
        _list_families(args)
        return 0
    if args.markdown:
        parser.error(f"--markdown lists families: leave out {args.model!r}")
    return _report(args)


def _list_families(args: argparse.Namespace) -> None:
    import transformers

    from vllm.model_report.families import (
        markdown_table,
        native_families,
        transformers_architectures,
    )

    native = native_families(with_plugins=not args.markdown)
    others = transformers_architectures()
    if args.markdown:
        print(markdown_table(native), end="")
        return
    if args.json:
        others_of = {"version": transformers.__version__, "architectures": others}
        families = [family._asdict() for family in native]
        print(json.dumps({"native": families, "transformers": others_of}, indent=2))
        return
    print("Classes of this engine:\n")
    width = max(len(family.architecture) for family in native) + 2
    for family in native:
        print(f"  {family.architecture:{width}}{family.models}")
    print(
        f"\nModules of transformers {transformers.__version__}, which run if they pass a check "
        "when they are loaded:\n"
    )
    indent = "  "
    print(textwrap.fill(", ".join(others), _WIDTH, initial_indent=indent, subsequent_indent=indent))


def _report(args: argparse.Namespace) -> int:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_report.checkpoint_report import report_checkpoint
    from vllm.model_report.hooks import hooks_as_json, hooks_as_text, list_hooks

    _be_quiet()
    try:
        config = EngineArgs.from_cli_args(args).create_engine_config()
        if args.hooks:
            points = list_hooks(config)
            print(hooks_as_json(points) if args.json else hooks_as_text(points))
            return 0
        report = report_checkpoint(config)
    except ValueError as error:
        if args.json:
            print(json.dumps({"model": args.model, "refused": str(error)}, indent=2))
        print(f"vllm models: {args.model} would be refused: {error}", file=sys.stderr)
        return 1
    print(report.to_json() if args.json else report.to_text())
    return 0


def _be_quiet() -> None:
    """Silence the logs of an engine, which would repeat the report."""
    from transformers.utils import logging as transformers_logging

    logging.getLogger("vllm").setLevel(logging.WARNING)
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
