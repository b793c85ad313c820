"""Every family with a class of its own in every kind of run, against plain transformers.

    python -m tests.models.kinds_of_run [FAMILY ...]     # all without; prints a table

A family's checkpoint of ``families.py`` is run in float32: rows at all boundaries have to be those
of transformers, and every other kind of run has to give the same bits. It ends with status 1 when
one does not.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from functools import cached_property
from io import StringIO
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file

from tests.engine.harness import (
    core_of,
    engine,
    extraction_config,
    failing_allocations,
    greedy,
    random_prompts,
    rows_of,
)
from tests.entrypoints.live_server import live_server
from tests.models.checkpoints import make_checkpoint
from tests.models.families import FAMILIES
from tests.models.oracle import Reference, reference_run, relative_error
from vllm import LLM
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.extract.job import run_job
from vllm.entrypoints.extract.options import ExtractOptions
from vllm.hidden_states.dataset import HiddenStatesDataset
from vllm.v1.core.kv_cache_utils import blocks_per_request

LENGTHS = (61, 9, 34)
SHARED = 48
"""Tokens of the first prompt that another one starts with."""
NEW_TOKENS = 6
MOST_ERROR = 1e-4
OPTIONS: dict[str, Any] = {"max_model_len": 96, "kv_cache_memory_bytes": 2**25}


class Family:
    """One family: its checkpoint, what transformers makes of it, and what was seen of it."""

    model_impl = "auto"
    more_options: ClassVar[dict[str, Any]] = {}
    """Further options of all engines."""

    def __init__(self, name: str, folder: Path, **overrides: Any) -> None:
        self.name = name
        self.checkpoint = make_checkpoint(folder / "checkpoint", name, **overrides)
        self.folder = folder
        prompts = [p["prompt_token_ids"] for p in random_prompts(3, LENGTHS)]
        tail = random_prompts(4, [15])[0]["prompt_token_ids"]
        self.prompts: list[list[int]] = [*prompts, prompts[0][:SHARED] + tail]
        self.layers: list[int] = list(range(len(self.expected[0].streams)))

    @cached_property
    def expected(self) -> list[Reference]:
        return [reference_run(self.checkpoint, prompt) for prompt in self.prompts]

    @cached_property
    def rows(self) -> list[torch.Tensor]:
        """[tokens, layers, hidden] of each prompt: all of them in one engine, at once."""
        with self.engine() as llm:
            return self.extracted(llm, self.layers)

    @property
    def options(self) -> dict[str, Any]:
        return {**OPTIONS, "model_impl": self.model_impl, **self.more_options}

    def engine(self, **options: Any) -> Any:
        return engine(self.checkpoint, **{"max_num_batched_tokens": 256, **self.options, **options})

    def files(self, name: str) -> dict[str, Any]:
        return extraction_config(self.layers, self.folder / name)

    def asked(self, *which: int) -> list[Any]:
        return [{"prompt_token_ids": self.prompts[i]} for i in which or range(len(self.prompts))]

    def extracted(self, llm: LLM, layers: list[int]) -> list[torch.Tensor]:
        return [sample.hidden_states for sample in llm.extract(self.asked(), layers=layers)]

    def check_bits(self, rows: list[torch.Tensor]) -> None:
        """Rows of all prompts are those that were seen first."""
        assert len(rows) == len(self.rows)
        for ours, first in zip(rows, self.rows, strict=True):
            assert torch.equal(ours, first), _apart(ours, first)


def _apart(rows: torch.Tensor, others: torch.Tensor) -> str:
    if rows.shape != others.shape:
        return f"shape {tuple(rows.shape)}, not {tuple(others.shape)}"
    return f"other bits, {relative_error(rows, others):.0e} apart"


def boundaries(family: Family) -> None:
    for rows, expected in zip(family.rows, family.expected, strict=True):
        errors = [relative_error(rows[:, i], s) for i, s in enumerate(expected.streams)]
        assert max(errors) <= MOST_ERROR, f"{max(errors):.0e} of the rms away"


def order(family: Family) -> None:
    shuffled = [family.layers[-1], 0, *family.layers[1:-1]]
    with family.engine() as llm:
        for ours, rows in zip(family.extracted(llm, shuffled), family.rows, strict=True):
            assert torch.equal(ours, rows[:, shuffled]), _apart(ours, rows[:, shuffled])


def layer_0(family: Family) -> None:
    with family.engine() as llm:
        for ours, rows in zip(family.extracted(llm, [0]), family.rows, strict=True):
            assert torch.equal(ours, rows[:, :1]), _apart(ours, rows[:, :1])


def duplicates(family: Family) -> None:
    twice = [2, 0, 2]
    with family.engine(**extraction_config(twice, family.folder / "twice")) as llm:
        outputs = llm.generate(family.asked(), greedy(), use_tqdm=False)
    for output, rows in zip(outputs, family.rows, strict=True):
        assert torch.equal(rows_of(output), rows[:, twice]), _apart(rows_of(output), rows[:, twice])


def in_process(family: Family) -> None:
    with family.engine(enable_prefix_caching=False) as llm:
        for i, rows in enumerate(family.rows):
            (sample,) = llm.extract(family.asked(i), layers=family.layers)
            assert torch.equal(sample.hidden_states, rows), _apart(sample.hidden_states, rows)


def chunking(family: Family) -> None:
    with family.engine(max_num_batched_tokens=13, max_num_seqs=3) as llm:
        family.check_bits(family.extracted(llm, family.layers))


def prefix(family: Family) -> None:
    with family.engine(**family.files("prefix")) as llm:
        llm.generate(family.asked(0), greedy(), use_tqdm=False)
        (hit,) = llm.generate(family.asked(3), greedy(), use_tqdm=False)
    assert hit.num_cached_tokens == SHARED, f"{hit.num_cached_tokens} tokens were found"
    assert torch.equal(rows_of(hit), family.rows[3]), _apart(rows_of(hit), family.rows[3])


def generation(family: Family) -> None:
    with family.engine() as llm:
        outputs = llm.generate(family.asked(), greedy(NEW_TOKENS), use_tqdm=False)
    for prompt, output in zip(family.prompts, outputs, strict=True):
        made = list(output.outputs[0].token_ids)
        logits = reference_run(family.checkpoint, prompt + made[:-1]).logits
        best = logits[len(prompt) - 1 :].argmax(-1).tolist()
        assert made == best, f"tokens {made}, not {best}"


def preemption(family: Family) -> None:
    with family.engine(max_num_batched_tokens=48, **family.files("preempted")) as llm:
        with failing_allocations(llm):
            outputs = llm.generate(family.asked(), greedy(NEW_TOKENS), use_tqdm=False)
        assert core_of(llm).scheduler._totals.num_preemptions, "nobody was preempted"
    family.check_bits([rows_of(output) for output in outputs])


def tiny_pool(family: Family) -> None:
    files = family.files("tiny")
    with family.engine(**files) as llm:
        core = core_of(llm)
        groups = core.kv_cache_config.kv_cache_groups
        fewest = 1 + blocks_per_request(core.vllm_config, groups)
    with family.engine(num_gpu_blocks_override=fewest, **files) as llm:
        outputs = llm.generate(family.asked(), greedy(NEW_TOKENS), use_tqdm=False)
    family.check_bits([rows_of(output) for output in outputs])


def bfloat16(family: Family) -> None:
    """The middle row is near the float32 one: a rounding may choose another expert for a few."""
    with family.engine(dtype="bfloat16") as llm:
        rounded = family.extracted(llm, family.layers)
    with family.engine(dtype="bfloat16", max_num_batched_tokens=13) as llm:
        chunks = family.extracted(llm, family.layers)
    for ours, again, rows in zip(rounded, chunks, family.rows, strict=True):
        assert torch.equal(ours, again), _apart(ours, again)
        distance = (ours.float() - rows).square().mean(-1).sqrt().median(0).values
        worst = float((distance / rows.square().mean((0, 2)).sqrt()).max())
        assert worst < 0.3, f"the middle row is {worst:.2g} of the rms away"


def files(family: Family) -> None:
    with family.engine(**family.files("files")) as llm:
        outputs = llm.generate(family.asked(), greedy(), use_tqdm=False)
    family.check_bits([rows_of(output) for output in outputs])


def http(family: Family) -> None:
    folder = family.folder / "http"
    with (
        live_server(family.checkpoint, folder, layers=family.layers, **family.options) as server,
        server.client() as client,
    ):
        body = {"prompt": family.prompts, "max_tokens": 1}
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        choices = sorted(answer.json()["choices"], key=lambda choice: int(choice["index"]))
        paths = [choice["kv_transfer_params"]["hidden_states_path"] for choice in choices]
        family.check_bits([load_file(path)["hidden_states"] for path in paths])


def vllm_extract(family: Family) -> None:
    data, output = family.folder / "data.jsonl", family.folder / "extracted"
    data.write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in family.prompts))
    layers = ",".join(map(str, family.layers))
    options = ExtractOptions(input=[str(data)], output=str(output), layers=layers)
    with redirect_stdout(StringIO()):
        status = run_job(options, EngineArgs(model=str(family.checkpoint), **family.options))
    assert status == 0, f"status {status}"
    family.check_bits([sample.hidden_states for sample in HiddenStatesDataset(output)])


KINDS: dict[str, Callable[[Family], None]] = {
    "boundaries": boundaries,
    "order": order,
    "layer 0": layer_0,
    "duplicates": duplicates,
    "in process": in_process,
    "chunking": chunking,
    "prefix": prefix,
    "generation": generation,
    "preemption": preemption,
    "tiny pool": tiny_pool,
    "bfloat16": bfloat16,
    "files": files,
    "HTTP": http,
    "vllm extract": vllm_extract,
}


def problems_of(
    name: str,
    folder: Path,
    kinds: Mapping[str, Callable[[Any], None]] | None = None,
    look_at: Callable[[Family], Any] = lambda family: family,
) -> dict[str, str]:
    """Kind of run -> what is wrong with it, of those where something is."""
    family, problems = look_at(Family(name, folder)), {}
    for kind, run in (KINDS if kinds is None else kinds).items():
        try:
            run(family)
        except Exception as error:  # whatever it is, it is told, and the next kind runs
            problems[kind] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    return problems


def main(
    kinds: Mapping[str, Callable[[Any], None]] = KINDS,
    look_at: Callable[[Family], Any] = lambda family: family,
) -> None:
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("families", nargs="*", help="keys of FAMILIES; all without")
    parser.add_argument("--model-impl", default="auto", choices=["auto", "transformers"])
    parser.add_argument(
        "--options",
        type=json.loads,
        default={},
        help="""options of all engines, such as '{"tensor_parallel_size": 2}'""",
    )
    arguments = parser.parse_args()
    Family.model_impl, Family.more_options = arguments.model_impl, arguments.options
    logging.disable(logging.WARNING)
    found: dict[str, dict[str, str]] = {}
    widths = [len(kind) for kind in kinds]
    print(f"{'family':20} {' '.join(kinds)}  seconds", flush=True)
    for name in arguments.families or FAMILIES:
        start = time.perf_counter()
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            found[name] = problems_of(name, Path(folder), kinds, look_at)
        cells = ("WRONG" if kind in found[name] else "whole" for kind in kinds)
        row = " ".join(f"{cell:{width}}" for cell, width in zip(cells, widths, strict=True))
        print(f"{name:20} {row}  {time.perf_counter() - start:.0f}", flush=True)
        for kind, problem in found[name].items():
            print(f"    {kind}: {problem}", flush=True)
    wrong = [name for name, problems in found.items() if problems]
    print(f"{len(found)} families in {len(kinds)} kinds of run, {len(wrong)} with a fault")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
