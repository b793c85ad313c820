"""The ``vllm`` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from vllm.version import __version__


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command line; importing it loads no torch."""
    parser = argparse.ArgumentParser(
        prog="vllm",
        description="Extract hidden states from causal language models, exactly and fast.",
        epilog="In Python: from vllm import LLM, SamplingParams",
    )
    parser.add_argument("-v", "--version", action="version", version=__version__)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: this process's); returns the exit status."""
    parser = build_parser()
    parser.parse_args(argv)
    parser.print_help()
    return 0


if __name__ == "__main__":
    sys.exit(main())
