"""Hooks of layers are called inside the forward pass, each in its layer's turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.harness import core_of, engine, greedy, random_prompts
from tests.kv_connector import layerwise_connector
from tests.kv_connector.loading import (
    FAMILIES,
    OFFLOADING,
    ask,
    beside_extraction,
    forget,
    num_cached,
    only,
    same,
)
from tests.worker.test_recorded_steps import Recorder
from vllm.config.capabilities import needs_eager_steps
from vllm.v1.worker import gpu_model_runner

Checkpoint = Callable[..., Path]
LAYERWISE = {
    "kv_connector": "LayerwiseConnector",
    "kv_connector_module_path": layerwise_connector.__name__,
}
(TEXT,) = [p["prompt_token_ids"] for p in random_prompts(79, [400])]
PROMPTS = [TEXT[:n] + [n % 300] * 20 for n in (133, 64, 15, 257)]


@pytest.fixture(autouse=True)
def _nothing_stored() -> Iterator[None]:
    yield
    layerwise_connector.store.clear()
    layerwise_connector.calls.clear()
    layerwise_connector.faults.clear()


def steps() -> list[list[tuple[str, str]]]:
    """Return the calls of each step."""
    found: list[list[tuple[str, str]]] = []
    for call in layerwise_connector.calls:
        if call[0] == "start":
            found.append([])
        else:
            found[-1].append(call)
    return [step for step in found if step]


def fresh(folder: Path, path: Path, prompts: list[list[int]]) -> Any:
    arguments = beside_extraction(path)
    with engine(folder, enable_prefix_caching=False, **arguments) as llm:
        return ask(llm, prompts)


@pytest.mark.parametrize("budget", [48, 1024])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_comes_layer_by_layer_is_what_is_computed(
    family: str, budget: int, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """A layer's data come in its own turn only, and leave in it: earlier, the pool is NaN."""
    folder = checkpoint(family, dtype=torch.bfloat16)
    expected = fresh(folder, tmp_path / "fresh", PROMPTS)
    arguments = beside_extraction(tmp_path, LAYERWISE)
    with engine(folder, max_num_batched_tokens=budget, **arguments) as llm:
        published = core_of(llm).executor.worker.model_runner._published
        rows = list(published)[-1]
        assert rows.startswith("cache_only_layers.")
        layers = [name for name in published if name != rows]
        same(ask(llm, PROMPTS), expected)
        forget(llm)
        outputs = ask(llm, PROMPTS)
        same(outputs, expected)
        assert [n // 16 * 16 for n in (152, 83, 34, 276)] == num_cached(outputs)
    in_turn = [(hook, name) for name in layers for hook in ("wait", "save")]
    assert all(step == [("wait", rows), *in_turn, ("save", rows), ("end", "")] for step in steps())
    assert len(steps()) >= (15 if budget == 48 else 8)


@pytest.mark.parametrize("beside", [(), (OFFLOADING,)], ids=["alone", "in a MultiConnector"])
@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_a_load_that_fails_inside_the_pass_is_computed(
    family: str, beside: tuple[dict[str, Any], ...], checkpoint: Checkpoint
) -> None:
    folder = checkpoint(family, dtype=torch.bfloat16)
    with engine(folder, enable_prefix_caching=False) as llm:
        expected = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, greedy(4))]
    arguments = only(LAYERWISE, kv_load_failure_policy="recompute")
    if beside:
        parts = {"connectors": [LAYERWISE, *beside]}
        arguments = only(
            {"kv_connector": "MultiConnector", "kv_connector_extra_config": parts},
            kv_load_failure_policy="recompute",
        )
    with engine(folder, **arguments) as llm:
        llm.generate(PROMPTS, greedy(4), use_tqdm=False)
        forget(llm)
        third = list(core_of(llm).executor.worker.model_runner._published)[2]
        layerwise_connector.faults.add(f"wait of {third}")
        outputs = llm.generate(PROMPTS, greedy(4), use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == expected
    assert max(num_cached(outputs)) < 16


def test_a_save_that_fails_ends_the_requests_of_its_step(checkpoint: Checkpoint) -> None:
    folder = checkpoint("qwen3_5")
    with engine(folder, **only(LAYERWISE)) as llm:
        expected = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, greedy(4))]
        forget(llm)
        layerwise_connector.store.clear()
        layerwise_connector.faults.add("save")
        outputs = llm.generate(PROMPTS, greedy(4), use_tqdm=False)
        assert {output.outputs[0].finish_reason for output in outputs} == {"error"}
        assert "save is out of order" in str(outputs[0].outputs[0].stop_reason)
        layerwise_connector.faults.clear()
        again = llm.generate(PROMPTS, greedy(4), use_tqdm=False)
    assert [o.outputs[0].token_ids for o in again] == expected


def test_layers_that_a_shorter_pass_leaves_out_are_not_named(checkpoint: Checkpoint) -> None:
    with engine(checkpoint("llama"), **only(LAYERWISE)) as llm:
        layers = list(core_of(llm).executor.worker.model_runner._published)
        list(llm.extract(PROMPTS[:1], layers=[2]))
    names = [name for _, name in steps()[0] if name]
    assert list(dict.fromkeys(names)) == layers[:2]


def test_nothing_is_called_where_no_connector_has_hooks(checkpoint: Checkpoint) -> None:
    with engine(checkpoint("llama"), **only(OFFLOADING)) as llm:
        calls = core_of(llm).executor.worker.model_runner.connector
        assert not calls.connector.works_layer_by_layer
        assert not calls.modules
        assert not calls._views
        model = core_of(llm).executor.worker.model_runner.model
        assert not any(module._forward_hooks for module in model.modules())


def test_who_has_to_be_called_inside_runs_without_recordings(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CUDA; others are called around the steps that are recorded."""
    for name in ("NeedsEagerSteps", "LayerwiseConnector", "Multi"):
        part = {**LAYERWISE, "kv_connector": name}
        if name == "Multi":
            parts = {"connectors": [OFFLOADING, {**LAYERWISE, "kv_connector": "NeedsEagerSteps"}]}
            part = {"kv_connector": "MultiConnector", "kv_connector_extra_config": parts}
        with engine(checkpoint("llama"), **only(part)) as llm:
            runner = core_of(llm).executor.worker.model_runner
            transfer = runner.vllm_config.kv_transfer_config
            assert needs_eager_steps(transfer) == (name != "LayerwiseConnector")
            with monkeypatch.context() as patch:
                patch.setattr(runner, "device", torch.device("cuda"))
                patch.setattr(gpu_model_runner, "source_of", lambda _: object.__new__(_Triton))
                assert runner.records_cuda_graphs == (name == "LayerwiseConnector")


def test_of_a_recorded_step_each_layer_has_its_turn_around_it(checkpoint: Checkpoint) -> None:
    folder = checkpoint("qwen3_5")
    with engine(folder, enable_prefix_caching=False) as llm:
        expected = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, greedy(6))]
    with engine(folder, **only(LAYERWISE)) as llm:
        runner = core_of(llm).executor.worker.model_runner
        layers = list(runner._published)
        recorder = Recorder()
        runner.record_decode_steps(recorder)
        layerwise_connector.calls.clear()
        recorder.batch_sizes.clear()
        outputs = llm.generate(PROMPTS, greedy(6), use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == expected
    assert recorder.batch_sizes == [4] * 5
    around = [(hook, name) for hook in ("wait", "save") for name in layers]
    assert steps()[-1] == [*around, ("end", "")]
    assert steps()[0] != steps()[-1]


class _Triton:
    name = "triton"
