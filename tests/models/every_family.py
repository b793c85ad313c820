"""Every causal model of transformers on this engine's pool, family by family.

    python -m tests.models.every_family [MODEL_TYPE ...]     # all without; prints a table

Each family's tiny checkpoint is served with ``model_impl="transformers"``, or with what
``--model-impl`` says: rows at all boundaries
against plain transformers through hooks, alone, batched with others, in chunks of odd sizes, behind
a prefix hit; greedy tokens; bfloat16 loosely. It ends with status 1 when a family is wrong, or when
none could be built.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.engine.harness import engine, greedy, random_prompts
from tests.models import zoo
from tests.models.oracle import relative_error
from vllm.config.model_facts import num_decoder_layers

LENGTHS = (61, 9, 34)
SHARED = 48
"""Tokens of the first prompt that another one starts with."""
MOST_ERROR = 1e-4
NEW_TOKENS = 5
MOST_BFLOAT16_ERROR = 0.3
"""Limit for the middle row, as a share of the rms. If chance decides more, as changes of the
embeddings by a unit in the last place show, transformers' own error is the measure."""
NUM_NUDGES = 5
MOST_TIMES_TRANSFORMERS = 1.5
_REFUSALS = ("cannot be served", "config.json: ")


@dataclass
class Report:
    """Result of one family. outcome: whole, refused, wrong or not built."""

    model_type: str
    outcome: str = "whole"
    reason: str = ""
    way: str = ""
    errors: dict[str, float] = field(default_factory=dict)
    same_bits: bool | None = None
    seconds: float = 0.0


def streams_of(model: Any, token_ids: list[int]) -> list[torch.Tensor]:
    """Plain transformers: what enters each decoder layer, and what leaves the last, by hooks."""
    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList)]
    wanted = num_decoder_layers(model.config.get_text_config(decoder=True))
    named = {name for m in model.modules() for name in getattr(m, "_no_split_modules", None) or ()}
    sized = [m for m in lists if len(m) == wanted]
    layers = next((m for m in sized if type(m[0]).__name__ in named), sized[0])
    return streams_between(layers, model, token_ids)


def streams_between(
    layers: Iterable[torch.nn.Module], model: Any, token_ids: list[int]
) -> list[torch.Tensor]:
    """Streams into each of the layers, and out of the last, [tokens, hidden], by hooks.

    A layer that a text skips leaves the stream as it is.
    """
    layers = list(layers)
    entering: dict[Any, torch.Tensor] = {}
    leaving = torch.empty(0)

    def before(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert layer not in entering, "a layer runs twice"
        entering[layer] = (args[0] if args else kwargs["hidden_states"]).clone()

    def after(_: Any, args: tuple[Any, ...], output: Any) -> None:
        nonlocal leaving
        leaving = (output if torch.is_tensor(output) else output[0]).clone()

    handles = [each.register_forward_pre_hook(before, with_kwargs=True) for each in layers]
    handles += [each.register_forward_hook(after) for each in layers]
    with torch.no_grad():
        model(input_ids=torch.tensor([token_ids]), use_cache=False)
    for handle in handles:
        handle.remove()
    streams = [leaving]
    for layer in reversed(layers):
        streams.append(entering.get(layer, streams[-1]))
    return [_rows_of_streams(stream, len(token_ids)) for stream in reversed(streams)]


def _rows_of_streams(stream: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """[tokens, n] of [1, tokens, n], [1, tokens, streams, n] or [streams, 1, tokens, n]."""
    if stream.dim() == 4 and len(stream) > 1:
        stream = stream.transpose(0, 2)[:, 0]
    return stream.reshape(num_tokens, -1)


def greedy_tokens(model: Any, prompt: list[int], count: int) -> list[int]:
    """Without a cache."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
            ids.append(int(logits.argmax()))
    return ids[len(prompt) :]


def check_family(
    model_type: str,
    folder: Path,
    *,
    bfloat16: bool = True,
    model_impl: str = "transformers",
    make: Callable[[Path, str], Any] = zoo.make_checkpoint,
) -> Report:
    """Build it, serve it, compare it."""
    report, start = Report(model_type), time.perf_counter()
    try:
        model = make(folder, model_type)
    except Exception as error:
        report.outcome, report.reason = "not built", _first_line(error)
        return report
    try:
        _serve(report, model, folder, bfloat16=bfloat16, model_impl=model_impl)
    except Exception as error:
        report.outcome = "refused" if any(r in str(error) for r in _REFUSALS) else "wrong"
        report.reason = _first_line(error)
        if report.outcome == "wrong":
            traceback.print_exc()
    report.seconds = time.perf_counter() - start
    return report


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"


def _serve(report: Report, model: Any, folder: Path, *, bfloat16: bool, model_impl: str) -> None:
    prompts = [p["prompt_token_ids"] for p in random_prompts(3, LENGTHS)]
    longer = prompts[0][:SHARED] + random_prompts(4, [15])[0]["prompt_token_ids"]
    arguments: dict[str, Any] = {
        "model_impl": model_impl,
        "skip_tokenizer_init": True,
        "max_model_len": 128,
        "kv_cache_memory_bytes": 2**25,
    }
    with engine(folder, **arguments, max_num_batched_tokens=256) as llm:
        report.way = _way_of(llm)
        expected = [streams_of(model, prompt) for prompt in prompts]
        layers = list(range(len(expected[0])))
        alone = [_rows(llm, [prompt], layers)[0] for prompt in prompts[:1]]
        report.errors["alone"] = _worst(alone, expected[:1])
        batched = _rows(llm, prompts, layers)
        report.errors["batched"] = _worst(batched, expected)
        _ = llm.generate([_ids(prompts[0])], greedy())
        hit = _rows(llm, [longer], layers, positions=[SHARED + 2, len(longer) - 1])
        found = [stream[[SHARED + 2, -1]] for stream in streams_of(model, longer)]
        report.errors["prefix"] = _worst(hit, [found])
        made = [
            list(o.outputs[0].token_ids)
            for o in llm.generate(list(map(_ids, prompts)), greedy(NEW_TOKENS))
        ]
        wanted = [greedy_tokens(model, prompt, NEW_TOKENS) for prompt in prompts]
        assert made == wanted, f"greedy tokens {made}, wanted {wanted}"
    with engine(folder, **arguments, max_num_batched_tokens=13, max_num_seqs=3) as llm:
        chunked = _rows(llm, prompts, layers)
        report.errors["chunked"] = _worst(chunked, expected)
        deepest = _rows(llm, prompts[:1], [2, 0])[0]
        report.errors["stopped"] = _worst([deepest], [[expected[0][2], expected[0][0]]])
    report.same_bits = all(
        torch.equal(rows, chunk) for rows, chunk in zip(batched, chunked, strict=True)
    ) and torch.equal(alone[0], batched[0])
    for name, error in report.errors.items():
        assert error <= MOST_ERROR, f"{name}: rows are {error:.1e} of their rms away"
    if bfloat16:
        report.errors["bfloat16"] = _bfloat16_error(folder, prompts, expected, arguments)
        if not report.errors["bfloat16"] < MOST_BFLOAT16_ERROR:
            _compare_nudged(report, model, folder, prompts, arguments)


def _bfloat16_error(
    folder: Path,
    prompts: list[list[int]],
    expected: list[list[torch.Tensor]],
    arguments: dict[str, Any],
) -> float:
    with engine(folder, **arguments, dtype="bfloat16", max_num_batched_tokens=48) as llm:
        rows = _rows(llm, prompts, list(range(len(expected[0]))))
    return middle_row_error([list(own.unbind(1)) for own in rows], expected)


def middle_row_error(found: list[list[torch.Tensor]], expected: list[list[torch.Tensor]]) -> float:
    """Middle row's error in the worst layer of the worst prompt, as a share of the layer's rms.

    A rounding may choose another expert for a few rows. A non-finite row makes the error infinite.
    """
    worst = 0.0
    for own, streams in zip(found, expected, strict=True):
        for rows, stream in zip(own, streams, strict=True):
            if not rows.isfinite().all():
                return math.inf
            distance = (rows.float() - stream).square().mean(-1).sqrt()
            worst = max(worst, float(distance.median() / stream.square().mean().sqrt()))
    return worst


def _compare_nudged(
    report: Report, model: Any, folder: Path, prompts: list[list[int]], arguments: dict[str, Any]
) -> None:
    """Errors of both in bfloat16, over embeddings that differ in their last place."""
    ours, theirs = [], []
    embeddings = model.get_input_embeddings().weight
    drawn = embeddings.detach().clone()
    for seed in range(NUM_NUDGES):
        nudged = folder / f"nudged {seed}"
        embeddings.data.copy_(nudge(drawn, seed))
        model.save_pretrained(nudged)
        expected = [streams_of(model, prompt) for prompt in prompts]
        rounded = type(model).from_pretrained(
            nudged, dtype=torch.bfloat16, attn_implementation="eager"
        )
        found = [streams_of(rounded.eval(), prompt) for prompt in prompts]
        theirs.append(middle_row_error(found, expected))
        ours.append(_bfloat16_error(nudged, prompts, expected, arguments))
    report.errors["nudged"] = statistics.median(ours)
    report.errors["transformers nudged"] = statistics.median(theirs)
    most = MOST_TIMES_TRANSFORMERS * statistics.median(theirs)
    assert statistics.median(ours) <= most, (
        f"bfloat16: the middle row is {report.errors['bfloat16']:.2g} of the rms away; of nudged "
        f"embeddings {_listed(ours)}, in transformers {_listed(theirs)}"
    )


def nudge(weight: torch.Tensor, seed: int) -> torch.Tensor:
    """Every number rounded to bfloat16, and then the next one up or down."""
    generator = torch.Generator().manual_seed(seed)
    towards = torch.randint(2, weight.shape, generator=generator).bfloat16().sub_(0.5) * math.inf
    return torch.nextafter(weight.bfloat16(), towards).to(weight.dtype)


def _listed(errors: list[float]) -> str:
    return ", ".join(f"{error:.2g}" for error in sorted(errors))


def _way_of(llm: Any) -> str:
    runner = llm.llm_engine.engine_core.executor.worker.model_runner
    if not hasattr(runner.model, "way"):
        return "own class"
    if "as one sequence" in runner.model.way:
        return "packed"
    return "no cache" if "nothing is cached" in runner.model.way else "one by one"


def _ids(prompt: list[int]) -> dict[str, Any]:
    return {"prompt_token_ids": prompt}


def _rows(
    llm: Any, prompts: list[list[int]], layers: list[int], positions: Any = "all"
) -> list[torch.Tensor]:
    samples = llm.extract(list(map(_ids, prompts)), layers=layers, positions=positions)
    return [sample.hidden_states for sample in samples]


def _worst(rows: list[torch.Tensor], expected: list[list[torch.Tensor]]) -> float:
    return max(
        relative_error(column, stream)
        for got, streams in zip(rows, expected, strict=True)
        for column, stream in zip(got.unbind(1), streams, strict=True)
    )


def table(reports: list[Report]) -> str:
    """One line a family, then the sums."""
    lines = []
    for r in reports:
        errors = " ".join(f"{name} {error:.0e}" for name, error in r.errors.items())
        bits = {None: "", True: "same bits", False: "bits differ"}[r.same_bits]
        shown = f"{errors} | {bits}" if r.outcome == "whole" else r.reason[:600]
        lines.append(f"{r.model_type:24} {r.outcome:9} {r.way:10} {r.seconds:5.1f} s  {shown}")
    outcomes = [r.outcome for r in reports]
    sums = ", ".join(f"{outcomes.count(o)} {o}" for o in ("whole", "refused", "wrong", "not built"))
    return "\n".join([*lines, f"{len(reports)} families: {sums}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model_types", nargs="*", help="keys of the mapping; all without")
    parser.add_argument("--part", default="0/1", help="K/N: every N-th family, from the K-th on")
    parser.add_argument("--model-impl", default="transformers", help="as the engine's option")
    arguments = parser.parse_args()
    part, parts = map(int, arguments.part.split("/"))
    reports = []
    for model_type in (arguments.model_types or zoo.model_types())[part::parts]:
        with tempfile.TemporaryDirectory() as folder:
            report = check_family(model_type, Path(folder), model_impl=arguments.model_impl)
            reports.append(report)
        print(table(reports[-1:]).splitlines()[0], flush=True)
    print(table(reports))
    outcomes = {report.outcome for report in reports}
    sys.exit("wrong" in outcomes or outcomes == {"not built"})


if __name__ == "__main__":
    main()
