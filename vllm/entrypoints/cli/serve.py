"""``vllm serve``: imports little until it has started the engine core's process."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs


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
        if arguments.server.headless:
            core.end()
            return _run_node(arguments.engine)
        from vllm.entrypoints.openai.server import run_server

        return run_server(arguments.engine, arguments.server, core)
    finally:
        core.end()


def _run_node(engine: AsyncEngineArgs) -> int:
    """Run the ranks of this machine for the engine on another; returns the exit status."""
    from vllm.v1.engine.node_process import run_node

    try:
        return run_node(engine.create_engine_config())
    except ValueError as error:
        print(f"vllm serve: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
