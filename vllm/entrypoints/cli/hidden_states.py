"""``vllm hidden-states``: inspect, verify and convert datasets of hidden states."""

from __future__ import annotations

import argparse
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from vllm.hidden_states.exporters import format_names
from vllm.utils.argparse_utils import FlexibleArgumentParser

if TYPE_CHECKING:
    from vllm.hidden_states.dataset import HiddenStatesDataset
    from vllm.hidden_states.inspection import Table
    from vllm.hidden_states.plots import Draw
    from vllm.hidden_states.row_statistics import RowStatistics

_OF_AGAINST = {"samples": 16, "seed": 0, "revision": None, "trust_remote_code": False}
"""Options of ``verify --against``, and their defaults."""
_DTYPES = ("float32", "bfloat16", "float16", "fp8")


def build_hidden_states_parser() -> argparse.ArgumentParser:
    """Build the parser of ``vllm hidden-states`` without loading torch."""
    about = "Inspect, verify and convert datasets of hidden states."
    parser = FlexibleArgumentParser(prog="vllm hidden-states", description=about)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    inspect = actions.add_parser("inspect", help="print a summary, and plot the rows")
    inspect.add_argument("directory", metavar="DIR")
    inspect.add_argument("--png", "--output", metavar="PLOTS",
        help="folder for plots (default without --html: DIR-plots, next to DIR)")  # fmt: skip
    inspect.add_argument("--html", metavar="FILE", help="write a report with all plots in one file")
    inspect.add_argument("--no-plots", action="store_true", help="print only the summary")
    inspect.add_argument("--against", metavar="DIR2",
        help="also print and plot the differences from the rows of another dataset")  # fmt: skip
    inspect.add_argument("--label", metavar="COLUMN",
        help="column that colours the principal components")  # fmt: skip
    inspect.add_argument("--tokenizer", metavar="MODEL",
        help="tokenizer for the report's tokens (default: the dataset's model, if it is on this "
        "machine; otherwise tokens are ids)")  # fmt: skip
    inspect.add_argument("--samples", type=int, default=64,
        help="number of samples to look at, drawn by --seed (default: %(default)s)")  # fmt: skip
    inspect.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    inspect.set_defaults(run=_inspect)

    about = (
        "Print a line for each problem; the exit status is 1 if there are any. With --against: "
        "compute samples again with transformers instead, and print the worst errors; the exit "
        "status is 1 if one is beyond its limit."
    )
    verify = actions.add_parser("verify", help="check every checksum and shape", description=about)
    verify.add_argument("directory", metavar="DIR")
    verify.add_argument("--against", nargs=2, metavar=("transformers", "MODEL"),
        help="compare rows with those of this checkpoint in transformers")  # fmt: skip
    verify.add_argument("--samples", type=int,
        help="number of samples to compute again (default: %(default)s)")  # fmt: skip
    verify.add_argument("--seed", type=int,
        help="draws the samples (default: %(default)s)")  # fmt: skip
    verify.add_argument("--revision", help="of MODEL on the hub")
    verify.add_argument("--trust-remote-code", action="store_true", help="run code of MODEL")
    verify.set_defaults(run=_verify, **_OF_AGAINST)

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
    except BrokenPipeError:  # nobody reads any more, which is no failure
        raise
    except (ValueError, OSError) as error:
        parser.exit(2, f"vllm hidden-states {args.action}: {error}\n")
    return status


def _inspect(args: argparse.Namespace) -> int:
    from vllm.hidden_states import inspection
    from vllm.hidden_states.dataset import HiddenStatesDataset
    from vllm.hidden_states.row_statistics import compare_rows, measure_rows

    if args.samples < 1:
        raise ValueError(f"--samples {args.samples}: use at least 1")
    if args.no_plots and (args.png or args.html):
        raise ValueError("--no-plots: not together with --png or --html")
    if args.label is not None and args.no_plots:
        raise ValueError(f"--label {args.label}: not together with --no-plots; it colours a plot")
    if args.tokenizer is not None and args.html is None:
        raise ValueError(f"--tokenizer {args.tokenizer}: it needs --html; only reports have tokens")
    dataset = HiddenStatesDataset(args.directory, allow_incomplete=True)
    print(inspection.describe(dataset))
    labels = None if args.label is None else _labels(dataset, args.label)
    statistics = measure_rows(dataset, args.samples, args.seed)
    names = inspection.layer_names(dataset, statistics)
    heading = f"Layers, {len(statistics.norms):,} rows of {statistics.num_samples} samples"
    tables = {heading: inspection.layer_table(statistics, names)}
    differences = None
    if args.against is not None:
        other = HiddenStatesDataset(args.against, allow_incomplete=True)
        differences = compare_rows(dataset, other, args.samples, args.seed)
        heading = f"Against {args.against}, {differences.num_rows:,} rows"
        tables[heading] = inspection.difference_table(differences, names)
    for heading, table in tables.items():
        print(f"\n{heading}\n{inspection.format_table(table)}")
    if statistics.num_not_finite:
        print(f"{statistics.num_not_finite:,} rows are not finite; they are left out")
    if args.no_plots:
        return 0
    from vllm.hidden_states.plots import make_plots

    lengths = [dataset.num_tokens(number) for number in range(len(dataset))]
    of_points = [labels[number] for number in statistics.point_samples] if labels else []
    plots = make_plots(statistics, names, lengths, of_points, differences)
    try:
        _write_plots(args, dataset, plots)
        if args.html is not None:
            _write_report(args, dataset, tables, plots, statistics, names)
    except ImportError as error:
        for option in ("png", "html"):
            if getattr(args, option) is not None:
                raise ValueError(
                    f"--{option}: it needs matplotlib: pip install matplotlib"
                ) from error
        print(f"{'plots':20}left out; they need matplotlib: pip install matplotlib ({error})")
    return 0


def _labels(dataset: HiddenStatesDataset, column: str) -> list[object]:
    try:
        return dataset[column]
    except KeyError as error:
        raise ValueError(f"--label {column}: {error.args[0]}") from None


def _write_plots(
    args: argparse.Namespace, dataset: HiddenStatesDataset, plots: Mapping[str, Draw]
) -> None:
    from vllm.hidden_states.plots import write_plots

    folder = args.png or (None if args.html else f"{os.path.abspath(args.directory)}-plots")
    for path in write_plots(plots, folder) if folder else ():
        print(f"{'plot':20}{path}")


def _write_report(
    args: argparse.Namespace,
    dataset: HiddenStatesDataset,
    tables: Mapping[str, Table],
    plots: Mapping[str, Draw],
    statistics: RowStatistics,
    names: Sequence[str],
) -> None:
    from vllm.hidden_states.html_report import write_report
    from vllm.hidden_states.inspection import summarize

    ids = [place for place, name in enumerate(names) if name != "norm"] or [0]
    write_report(
        *(args.html, summarize(dataset), tables, plots, statistics.tokens),
        layer=(ids[-1], names[ids[-1]] if names else ""),
        text_of=_token_texts(args.tokenizer, dataset),
    )
    print(f"{'report':20}{args.html}")


def _token_texts(tokenizer: str | None, dataset: HiddenStatesDataset) -> Callable[[int], str]:
    """Return a function that gives a token's text; its id if there is no tokenizer."""
    from vllm.transformers_utils.token_texts import TokenTexts
    from vllm.transformers_utils.tokenizer import get_tokenizer

    name, revision, is_own = tokenizer or "", None, tokenizer is None
    if is_own and (settings := dataset.settings) is not None:
        name, revision = settings.model, settings.revision or None
    try:
        found = get_tokenizer(name, revision=revision, local_files_only=is_own)
    except (OSError, ValueError, KeyError, ImportError) as error:
        if tokenizer is not None:
            raise ValueError(f"--tokenizer {tokenizer}: {error}") from error
        return lambda token_id: f"{token_id} "
    return TokenTexts(found).text


def _verify(args: argparse.Namespace) -> int:
    if args.against is not None:
        return _verify_against(args)
    for name, default in _OF_AGAINST.items():
        if getattr(args, name) != default:
            raise ValueError(f"--{name.replace('_', '-')}: it needs --against transformers MODEL")
    from vllm.hidden_states.verify import verify_dataset

    count = 0
    for problem in verify_dataset(args.directory):
        print(problem, flush=True)
        count += 1
    print(f"{args.directory}: {count or 'no'} problem{'' if count == 1 else 's'}")
    return 1 if count else 0


def _verify_against(args: argparse.Namespace) -> int:
    from pathlib import Path

    from vllm.entrypoints.extract.recompute import verify_against

    reference, model = args.against
    if reference != "transformers":
        raise ValueError(f"--against {reference}: use --against transformers MODEL")
    if args.samples < 1:
        raise ValueError(f"--samples {args.samples}: use at least 1")
    return verify_against(
        *(Path(args.directory), args.samples, args.seed),
        model=model,
        revision=args.revision,
        trust_remote_code=args.trust_remote_code,
    )


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
