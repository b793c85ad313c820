"""``vllm serve``: imports little until it has started the engine core's process."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def serve(argv: Sequence[str]) -> int:
    """Run ``vllm serve``; returns the exit status."""
    if any(argument.startswith(("-h", "--help")) for argument in argv):
        from vllm.entrypoints.cli.serve_arguments import parse_serve_arguments

        parse_serve_arguments(argv)  # prints and ends
    from vllm.v1.engine.core_client import CoreHandle

    try:
        core = CoreHandle()  # loads its modules while this process loads its own
    except ValueError as error:
        print(f"vllm serve: error: {error}", file=sys.stderr)
        return 1
    try:
        from vllm.entrypoints.cli.serve_arguments import parse_serve_arguments

        arguments = parse_serve_arguments(argv)
        from vllm.entrypoints.openai.server import run_server

        return run_server(arguments.engine, arguments.server, core)
    finally:
        core.end()
