"""``vllm hidden-states``: inspect, verify and convert datasets of hidden states."""

from __future__ import annotations

import argparse
import math
import os
from collections import Counter
from collections.abc import Sequence

from vllm.hidden_states.exporters import format_names

_DTYPES = ("float32", "bfloat16", "float16", "fp8")


def build_hidden_states_parser() -> argparse.ArgumentParser:
    """Build the parser of ``vllm hidden-states`` without loading torch."""
    about = "Inspect, verify and convert datasets of hidden states."
    parser = argparse.ArgumentParser(prog="vllm hidden-states", description=about)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    inspect = actions.add_parser("inspect", help="print a summary, and plot the rows")
    inspect.add_argument("directory", metavar="DIR")
    inspect.add_argument("--output", metavar="PLOTS",
        help="folder for the PNG files (default: DIR-plots, next to the dataset)")  # fmt: skip
    inspect.add_argument("--no-plots", action="store_true", help="print only the summary")
    inspect.add_argument("--samples", type=int, default=64,
        help="number of samples to plot, evenly spaced (default: %(default)s)")  # fmt: skip
    inspect.set_defaults(run=_inspect)

    about = "Print a line for each problem; the exit status is 1 if there are any."
    verify = actions.add_parser("verify", help="check every checksum and shape", description=about)
    verify.add_argument("directory", metavar="DIR")
    verify.set_defaults(run=_verify)

    about = "Run the command again to resume it."
    convert = actions.add_parser(
        "convert", help="write a dataset in another format", description=about
    )
    convert.add_argument("directory", metavar="SRC")
    convert.add_argument("destination", metavar="DST")
    names = ", ".join(format_names())
    convert.add_argument("--to", "--format", dest="format", required=True, metavar="NAME",
        choices=format_names(), help=f"the format: {names}")  # fmt: skip
    convert.add_argument("--dtype", choices=_DTYPES,
        help="round to this (default: as stored, or the nearest that the format has)")  # fmt: skip
    convert.add_argument("--shard-size", type=float, default=1.0, metavar="GIB",
        help="size of the shards, in GiB (default: %(default)s)")  # fmt: skip
    convert.add_argument("--no-check-disk", action="store_true",
        help="start even if the disk has too little room")  # fmt: skip
    convert.set_defaults(run=_convert)
    about = "Print the names for sets of layers, with their ids and the conventions they follow."
    layers = actions.add_parser("layers", help="print names for layers", description=about)
    layers.add_argument("num_layers", type=int, metavar="N", help="number of the model's layers")
    layers.set_defaults(run=_layers)
    return parser


def hidden_states(arguments: Sequence[str]) -> int:
    """Run ``vllm hidden-states ARGUMENTS``; returns the exit status."""
    parser = build_hidden_states_parser()
    args = parser.parse_args(arguments)
    try:
        status: int = args.run(args)
    except (ValueError, OSError) as error:
        parser.exit(2, f"vllm hidden-states {args.action}: {error}\n")
    return status


def _inspect(args: argparse.Namespace) -> int:
    from vllm.hidden_states.dataset import HiddenStatesDataset
    from vllm.hidden_states.inspection import describe, write_plots

    if args.samples < 1:
        raise ValueError(f"--samples {args.samples}: use at least 1")
    dataset = HiddenStatesDataset(args.directory, allow_incomplete=True)
    print(describe(dataset))
    if args.no_plots:
        return 0
    folder = args.output or f"{os.path.abspath(args.directory)}-plots"
    try:
        for path in write_plots(dataset, folder, args.samples):
            print(f"{'plot':20}{path}")
    except ImportError as error:
        print(f"{'plots':20}left out; they need matplotlib: pip install matplotlib ({error})")
    return 0


def _verify(args: argparse.Namespace) -> int:
    from vllm.hidden_states.verify import verify_dataset

    count = 0
    for problem in verify_dataset(args.directory):
        print(problem, flush=True)
        count += 1
    print(f"{args.directory}: {count or 'no'} problem{'' if count == 1 else 's'}")
    return 1 if count else 0


def _convert(args: argparse.Namespace) -> int:
    from vllm.hidden_states.convert import convert_dataset
    from vllm.hidden_states.manifest import read_skipped
    from vllm.hidden_states.metadata import INDEX_FILE
    from vllm.utils.mem_utils import format_bytes

    if not 0 < args.shard_size < math.inf:
        raise ValueError(f"--shard-size {args.shard_size}: use a finite number above 0")
    shard_bytes = int(args.shard_size * 2**30)
    t = convert_dataset(
        *(args.directory, args.destination, args.format, args.dtype, shard_bytes),
        check_disk=not args.no_check_disk,
    )
    print(f"{args.destination}: {t.samples} samples, {t.rows} rows, {format_bytes(t.bytes)}")
    if t.skipped:
        index = os.path.join(args.destination, INDEX_FILE)
        print(f"{t.skipped} samples and records are left out; {index} lists them")
        reasons = Counter(one.reason for one in read_skipped(args.destination))
        for reason, count in reasons.most_common():
            print(f"  {count}: {reason}")
    return 0


def _layers(args: argparse.Namespace) -> int:
    from vllm.hidden_states.layer_ids import PRESETS, preset_layer_ids

    if args.num_layers < 1:
        raise ValueError(f"N {args.num_layers}: use at least 1")
    for name, ids in preset_layer_ids(args.num_layers).items():
        text = "the model has too few layers" if ids is None else ", ".join(map(str, ids))
        print(f"{name:20}{text}\n{'':20}{PRESETS[name].convention}")
    return 0
