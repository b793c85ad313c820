"""``vllm extract``: make a dataset of hidden states with one command."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from vllm.exceptions import EXIT_STATUS
from vllm.utils.interrupts import terminated_as_interrupted

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.entrypoints.extract.options import ExtractOptions
    from vllm.utils.argparse_utils import FlexibleArgumentParser

_MOST_USED = {
    "--input FILE ...": "files or folders of prompts: JSONL, JSON, Parquet, Arrow, text",
    "--layers IDS": 'layers such as "2,12,last", ":" (all) or "eagle3"; 0 is the embedding',
    "--output FOLDER": "folder of the dataset; the same command resumes it",
    "--positions WHICH": "tokens whose rows are kept: all, last, every:K or mask",
    "--pooling HOW": "one row for each sample: mean or last",
    "--format FORMAT": "sharded, files, or the layout of another program, such as speculators",
    "--storage-dtype TYPE": "dtype of the stored rows: auto, float32, bfloat16, float16, fp8",
    "--keep-columns NAME ...": "columns of the input, such as labels, to store with the samples",
    "--max-length N": "most tokens in a sample; --on-long says what happens to longer ones",
    "--max-samples N": "most records to read",
    "--dry-run": "print the plan, with the disk and memory that it needs, and stop",
    "--verify N": "compute N samples again with transformers and compare",
}
_EXAMPLE = "vllm extract Qwen/Qwen3.5-0.8B --input data.jsonl --layers 2,12,21,last --output out"

_NOT_OF_USE = frozenset({
    "speculative_config", "kv_transfer_config", "served_model_name", "generation_config",
    "override_generation_config", "max_logprobs", "skip_tokenizer_init", "disable_log_stats",
    "enable_prompt_embeds", "kv_offloading_size", "kv_offloading_backend", "enable_lora",
    "max_lora_rank", "max_loras",
})  # fmt: skip
"""Options of the engine that do not apply to a dataset."""


_TERMINATED = 128 + signal.SIGTERM


class ExtractArguments(NamedTuple):
    """The checked options of a command line."""

    engine: EngineArgs
    options: ExtractOptions


def extract(argv: Sequence[str]) -> int:
    """Run ``vllm extract``; returns the exit status: 1 if the job ended early or a check
    failed, 2 for a mistake in the arguments, 130 after Ctrl-C, 143 after SIGTERM."""
    if argv and not any(one.startswith(("-h", "--help")) for one in argv) and argv[0][:1] != "-":
        print(f"vllm extract: loading {argv[0]}", file=sys.stderr, flush=True)
    arguments = parse_extract_arguments(argv)
    from vllm.entrypoints.extract.job import run_job
    from vllm.entrypoints.extract.worker import why_ended

    with terminated_as_interrupted() as was_terminated:
        try:
            return run_job(arguments.options, arguments.engine)
        except (ValueError, OSError, RuntimeError, EOFError, KeyboardInterrupt) as error:
            failure = why_ended(KeyboardInterrupt() if was_terminated() else error)
            print(f"vllm extract: {failure}", file=sys.stderr)
            return _TERMINATED if was_terminated() else EXIT_STATUS[failure.kind]


def parse_extract_arguments(argv: Sequence[str]) -> ExtractArguments:
    """Parse and check the arguments; a mistake ends the program with a message and status 2."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.entrypoints.cli.serve_arguments import parse_flags
    from vllm.entrypoints.extract.options import ExtractOptions
    from vllm.utils.options import given_options

    parser = make_extract_parser()
    try:
        args = parse_flags(parser, argv)
        if args.merge:
            args.model = args.model or "-"  # --merge does not use it
        options = ExtractOptions(**given_options(ExtractOptions, args))
        return ExtractArguments(EngineArgs.from_cli_args(args), options)
    except ValueError as error:
        parser.error(str(error))


def make_extract_parser() -> FlexibleArgumentParser:
    """Make the parser with every flag of the job and of the engine."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.entrypoints.cli.serve_arguments import command_parser
    from vllm.entrypoints.extract.options import ExtractOptions
    from vllm.utils.options import add_flags, options_of

    parser = command_parser(
        "vllm extract MODEL --input FILE --layers IDS --output FOLDER [flags]",
        "Make a dataset of hidden states. Run the same command again to resume it.",
    )
    parser.most_used, parser.example = _MOST_USED, _EXAMPLE
    add_flags(parser, options_of(ExtractOptions))
    EngineArgs.add_cli_args(parser, _NOT_OF_USE)
    return parser
