"""A process that torchrun, or a test in its place, starts: it makes an engine and prints results.

    python -m tests.engine.external_process CHECKPOINT RESULTS OPTIONS CALLS

OPTIONS is JSON; RESULTS is the beginning of the names of the files with what each process got.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch

from tests.engine import rank_functions
from tests.engine.test_ranks import LAYERS, PROMPTS, SAMPLED, results, tokens
from vllm import LLM


def values(llm: LLM) -> dict[str, Any]:
    """Return the results that a process gets from an engine."""
    samples = results(llm)
    in_fp8 = llm.extract(PROMPTS, layers=LAYERS, dtype="fp8")
    return {
        "rows": [sample.hidden_states for sample in samples],
        "codes": [sample.hidden_states.view(torch.uint8) for sample in in_fp8],
        "activations": [sample.activations for sample in samples],
        "logprobs": [sample.top_logprobs for sample in samples],
        "tokens": tokens(llm, SAMPLED),
    }


def check_values(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare two results of :func:`values`, bit by bit."""
    assert found["tokens"] == expected["tokens"]
    for name in ("rows", "codes"):
        for ours, other in zip(found[name], expected[name], strict=True):
            assert torch.equal(ours, other)
    for ours, other in zip(found["activations"], expected["activations"], strict=True):
        assert all(torch.equal(ours[name], other[name]) for name in other)
    for ours, other in zip(found["logprobs"], expected["logprobs"], strict=True):
        assert other is None or torch.equal(ours, other)


def failure_of(llm: LLM) -> str:
    (failed,) = llm.extract(PROMPTS[:1], layers=[4], on_error="yield")
    return str(failed)


def planted_failures(llm: LLM, own: int) -> dict[str, Any]:
    """Failures of each rank, and of a process that asks for something else."""
    before = list(llm.extract(PROMPTS, layers=LAYERS))
    found: dict[str, Any] = {}
    try:
        llm.collective_rpc(lambda worker: worker)
    except ValueError as error:
        found["a worker"] = str(error)
    for rank in range(2):
        llm.collective_rpc(rank_functions.fail_in_next_pass, args=(rank,))
        found[f"rank {rank}"] = failure_of(llm)
    after = list(llm.extract(PROMPTS, layers=LAYERS))
    found["same"] = all(
        torch.equal(a.hidden_states, b.hidden_states) for a, b in zip(before, after, strict=True)
    )
    (failed,) = llm.extract([PROMPTS[own]], layers=[4], on_error="yield")
    found["other prompts"] = str(failed)
    return found


def main() -> None:
    checkpoint, path, options, *calls = sys.argv[1:]
    own = int(os.environ["RANK"])
    given = json.loads(options)
    given = given[own] if isinstance(given, list) else given
    found: dict[str, Any] = {}
    if "init" in calls:
        torch.distributed.init_process_group("gloo")
    try:
        llm = LLM(checkpoint, distributed_executor_backend="external_launcher", **given)
        for call in calls:
            if call == "values":
                found |= values(llm)
            elif call == "failures":
                found |= planted_failures(llm, own)
            elif call == "ranks":
                found["ranks"] = llm.collective_rpc(rank_functions.rank)
            elif call == "sum":
                total = torch.ones(1)
                torch.distributed.all_reduce(total)
                found["sum"] = int(total)
            elif call == "end_first" and own == 1:
                os.kill(os.getpid(), 9)
            elif call == "hang_first" and own == 1:
                time.sleep(3600)
            elif call == "extract":
                start = time.monotonic()
                found["failure"] = failure_of(llm)
                found["seconds"] = time.monotonic() - start
        llm.shutdown()
    except ValueError as error:
        found["error"] = str(error)
    torch.save(found, f"{path}.{own}")


if __name__ == "__main__":
    main()
