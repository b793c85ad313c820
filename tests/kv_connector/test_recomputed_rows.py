"""Rows of requests whose load failed, with kv_load_failure_policy="recompute"."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.harness import core_of, engine, greedy, rows_of
from tests.kv_connector.loading import OFFLOADING, ask, beside_extraction, forget, only, same
from tests.kv_connector.test_shared_storage import storing
from vllm import LLM, SamplingParams
from vllm.hidden_states import ExtractRequest

Checkpoint = Callable[..., Path]
TEXT = [(7 * n * n + n) % 300 for n in range(400)]
PROMPTS = [TEXT[:n] + [n % 300] * 9 for n in range(40, 200, 16)]
RECOMPUTE = {"kv_load_failure_policy": "recompute"}
SIZES: dict[str, Any] = {
    "max_model_len": 420,
    "max_num_batched_tokens": 96,
    "async_scheduling": True,  # a step is planned before the load of the step before it failed
}
SMALL_POOL = {"kv_cache_memory_bytes": 2**20}


def damage(folder: Path) -> None:
    """Change a bit of every second stored block, under all of its names."""
    for number, file in enumerate(sorted((folder / "blocks").rglob("*.block"))):
        if number % 2:
            content = bytearray(file.read_bytes())
            content[len(content) // 2] ^= 1
            file.unlink()
            file.write_bytes(content)


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "qwen2"])
def test_files_have_the_rows_that_were_computed_again(
    family: str, checkpoint: Checkpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In chunks, among other requests, with preemptions, and with the rows of output tokens."""
    folder = checkpoint(family)
    with engine(folder, enable_prefix_caching=False, **beside_extraction(tmp_path / "a")) as llm:
        expected = ask(llm, PROMPTS, 60)
    arguments = beside_extraction(tmp_path, storing(tmp_path), **RECOMPUTE)
    with engine(folder, **SIZES, **SMALL_POOL, **arguments) as llm:
        same(ask(llm, PROMPTS, 60), expected)
    damage(tmp_path)
    with engine(folder, **SIZES, **SMALL_POOL, **arguments) as llm:
        same(ask(llm, PROMPTS, 60), expected)
        core_of(llm).scheduler.check_integrity()
    assert "is computed instead" in caplog.text


def rows(llm: LLM, num_last: int | None = None) -> list[torch.Tensor]:
    requests = [
        ExtractRequest(prompt, positions="all" if num_last is None else range(-num_last, 0))
        for prompt in PROMPTS
    ]
    return [sample.hidden_states for sample in llm.extract(requests, layers=[0, 2, 4])]


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_callers_get_the_rows_that_were_computed_again(
    family: str, checkpoint: Checkpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = checkpoint(family)
    with engine(folder, enable_prefix_caching=False) as llm:
        whole = rows(llm)
    arguments = only(storing(tmp_path), **RECOMPUTE)
    with engine(folder, **SIZES, **arguments) as llm:
        rows(llm, num_last=12)
    damage(tmp_path)
    with engine(folder, **SIZES, **SMALL_POOL, **arguments) as llm:
        got = rows(llm, num_last=12)
    for one, other in zip(got, whole, strict=True):
        assert torch.equal(one, other[-12:])
    assert "is computed instead" in caplog.text


def test_a_connector_that_cannot_keep_rows_back_fails_the_request(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as own

    connector = own.ExampleHiddenStatesConnector
    monkeypatch.setattr(connector, "keeps_rows_back", False)
    folder = checkpoint("llama")
    arguments = beside_extraction(tmp_path, storing(tmp_path), **RECOMPUTE)
    with engine(folder, **arguments) as llm:
        ask(llm, PROMPTS[:2])
    damage(tmp_path)
    with engine(folder, **arguments) as llm:
        outputs = ask(llm, PROMPTS[:2])
        assert outputs[0].outputs[0].finish_reason == "error"
        assert "hidden states that were computed from them have left" in str(
            outputs[0].outputs[0].stop_reason
        )
        (again,) = ask(llm, [[5] * 30])
        assert len(rows_of(again)) == 33


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("beside", [[], [OFFLOADING]], ids=["alone", "offloading"])
@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_nothing_computed_from_a_failed_load_is_stored(
    family: str, beside: list[Any], policy: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder, connectors = checkpoint(family), [*beside, storing(tmp_path)]
    multi = {"kv_connector": "MultiConnector"}
    multi |= {"kv_connector_extra_config": {"connectors": connectors}}
    arguments = only(multi if beside else connectors[0], kv_load_failure_policy=policy)
    prompts = [TEXT[:301], [3, *TEXT[:270]]]

    params = SamplingParams(max_tokens=4, temperature=0.0, logprobs=3, ignore_eos=True)

    def logprobs(llm: LLM) -> list[Any]:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [output.outputs[0].logprobs for output in outputs]

    with engine(folder, enable_prefix_caching=False) as llm:
        expected = logprobs(llm)
    with engine(folder, **SIZES, **arguments) as llm:
        llm.generate([TEXT[:64], [3, *TEXT[:64]]], greedy(1), use_tqdm=False)
    damage(tmp_path)
    engines = 3
    for _ in range(engines):
        with engine(folder, **SIZES, **arguments) as llm:
            got = logprobs(llm)
            forget(llm)
            again = logprobs(llm)
        for one, two, right in zip(got, again, expected, strict=True):
            may_fail = [None, []] if policy == "fail" else []
            assert one in [right, *may_fail]
            assert two in [right, *may_fail]
