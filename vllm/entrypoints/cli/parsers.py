"""The parsers of all commands, for what looks at every flag: ``--help=NAME`` and completion."""

from __future__ import annotations

import argparse


def command_parsers() -> dict[str, argparse.ArgumentParser]:
    """Return command -> its parser, without loading torch."""
    from vllm.entrypoints.cli.bench import build_bench_parser
    from vllm.entrypoints.cli.collect_env import build_collect_env_parser
    from vllm.entrypoints.cli.extract import make_extract_parser
    from vllm.entrypoints.cli.hidden_states import build_hidden_states_parser
    from vllm.entrypoints.cli.models import build_models_parser
    from vllm.entrypoints.cli.serve_arguments import make_serve_parser

    return {
        "serve": make_serve_parser(),
        "extract": make_extract_parser(),
        "bench": build_bench_parser(),
        "hidden-states": build_hidden_states_parser(),
        "models": build_models_parser(),
        "collect-env": build_collect_env_parser(),
        "completion": build_completion_parser(),
    }


def build_completion_parser() -> argparse.ArgumentParser:
    """Build the parser of ``vllm completion``."""
    parser = argparse.ArgumentParser(
        prog="vllm completion",
        description="Print a script that completes commands and flags in a shell. It needs the "
        'package shtab. In bash: eval "$(vllm completion bash)"',
    )
    parser.add_argument("shell", choices=("bash", "zsh", "tcsh"))
    return parser
