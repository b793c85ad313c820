"""A connector of another package loads through the engine: when its hooks are called, values, and
what happens when it fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.harness import core_of, engine, extraction_config, greedy, random_prompts, rows_of
from tests.kv_connector import slot_connector
from tests.kv_connector.loading import num_cached
from tests.kv_connector.slot_connector import SlotConnector
from vllm import SamplingParams

Checkpoint = Callable[..., Path]
PROMPTS = [p["prompt_token_ids"] for p in random_prompts(73, [60, 90, 48, 49, 20])]


def connector(
    name: str = "SlotConnector", policy: str = "recompute", **options: Any
) -> dict[str, Any]:
    return {
        "kv_transfer_config": {
            "kv_connector": name,
            "kv_connector_module_path": slot_connector.__name__,
            "kv_role": "kv_both",
            "kv_load_failure_policy": policy,
            "kv_connector_extra_config": options,
        }
    }


@pytest.fixture(autouse=True)
def _nothing_stored() -> Iterator[None]:
    yield
    slot_connector.store.clear()
    slot_connector.faults.clear()
    slot_connector.calls.clear()


def tokens_of(outputs: Any) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


SAMPLING = [
    greedy(8),
    SamplingParams(max_tokens=8, temperature=1.0, seed=5, ignore_eos=True),
]


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("params", SAMPLING, ids=["greedy", "seeded"])
@pytest.mark.parametrize("fault", [None, "half", "start_load_kv", "wait_for_layer_load"])
def test_tokens_are_those_computed(
    fault: str | None, params: SamplingParams, in_background: bool, checkpoint: Checkpoint
) -> None:
    folder = checkpoint("llama")
    with engine(folder, block_size=16) as llm:
        expected = tokens_of(llm.generate(PROMPTS, params, use_tqdm=False))
    arguments = connector(in_background=in_background)
    with engine(folder, block_size=16, **arguments) as llm:
        assert tokens_of(llm.generate(PROMPTS, params, use_tqdm=False)) == expected
        llm.reset_prefix_cache()
        if fault is not None:
            slot_connector.faults.add(fault)
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        core_of(llm).scheduler.check_integrity()
    assert tokens_of(outputs) == expected
    is_lost = fault is not None and not (in_background and fault == "wait_for_layer_load")
    if fault is None:
        assert num_cached(outputs) == [48, 48, 47, 48, 0]
    elif is_lost:
        assert max(num_cached(outputs)) < 48


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("fault", ["half", "start_load_kv", "get_num_new_matched_tokens"])
def test_by_default_a_failed_load_fails_its_request(
    fault: str, in_background: bool, checkpoint: Checkpoint
) -> None:
    arguments = connector(policy="fail", in_background=in_background)
    with engine(checkpoint("llama"), block_size=16, **arguments) as llm:
        expected = tokens_of(llm.generate(PROMPTS, greedy(8), use_tqdm=False))
        llm.reset_prefix_cache()
        slot_connector.faults.add(fault)
        outputs = llm.generate(PROMPTS, greedy(8), use_tqdm=False)
        slot_connector.faults.clear()
        for output, tokens in zip(outputs, expected, strict=True):
            if output.outputs[0].finish_reason != "error":
                assert list(output.outputs[0].token_ids) == tokens
        assert outputs[0].outputs[0].finish_reason == "error"
        # The engine goes on.
        assert tokens_of(llm.generate(PROMPTS, greedy(8), use_tqdm=False)) == expected


@pytest.mark.parametrize("in_background", [False, True])
def test_windows_beside_full_attention_share_one_table(
    in_background: bool, checkpoint: Checkpoint, caplog: pytest.LogCaptureFixture
) -> None:
    """For a connector that knows one group only."""
    folder = checkpoint("qwen2")
    with engine(folder, block_size=16) as llm:
        assert len(core_of(llm).kv_cache_config.kv_cache_groups) == 2
        expected = tokens_of(llm.generate(PROMPTS, greedy(30), use_tqdm=False))
    with engine(folder, block_size=16, **connector(in_background=in_background)) as llm:
        assert len(core_of(llm).kv_cache_config.kv_cache_groups) == 1
        assert tokens_of(llm.generate(PROMPTS, greedy(30), use_tqdm=False)) == expected
        llm.reset_prefix_cache()
        outputs = llm.generate(PROMPTS, greedy(30), use_tqdm=False)
    assert tokens_of(outputs) == expected
    assert num_cached(outputs) == [48, 48, 47, 48, 0]
    assert "SlotConnector does not subclass SupportsHMA" in caplog.text


def test_an_offer_of_too_much_is_computed(checkpoint: Checkpoint) -> None:
    with engine(checkpoint("llama"), block_size=16, **connector()) as llm:
        expected = tokens_of(llm.generate(PROMPTS, greedy(8), use_tqdm=False))
        slot_connector.faults.add("too much")
        assert tokens_of(llm.generate(PROMPTS, greedy(8), use_tqdm=False)) == expected


def test_the_order_of_calls(checkpoint: Checkpoint) -> None:
    with engine(checkpoint("llama"), block_size=16, **connector()) as llm:
        llm.generate(PROMPTS[:1], greedy(1), use_tqdm=False)
    assert slot_connector.calls[:21] == [
        "register_kv_caches",
        "register_kv_cache_references",
        "set_host_xfer_buffer_ops",
        "get_handshake_metadata",
        "set_xfer_handshake_metadata",
        "on_new_request",
        "get_num_new_matched_tokens",
        "update_state_after_alloc",
        "build_connector_meta",
        "start_load_kv",
        *["wait_for_layer_load", "save_kv_layer"] * 4,  # layer by layer
        "wait_for_save",
        "take_events",
        "build_connector_meta",
    ]


def test_prompts_without_tokens_run_every_layer_for_the_connector(checkpoint: Checkpoint) -> None:
    """Other requests load what the connector saves of them."""
    with engine(checkpoint("llama"), block_size=16) as llm:
        expected = tokens_of(llm.generate(PROMPTS[:1], greedy(8), use_tqdm=False))
    with engine(checkpoint("llama"), block_size=16, **connector()) as llm:
        list(llm.extract(PROMPTS[:1], layers=[0]))
        llm.reset_prefix_cache()
        outputs = llm.generate(PROMPTS[:1], greedy(8), use_tqdm=False)
    assert num_cached(outputs) == [48]
    assert tokens_of(outputs) == expected


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("WantsTransferResults", "never calls WantsTransferResults.get_transfer_results"),
        ("WantsAnotherOrder", "requires the KV-cache layout 'BLHNC'"),
    ],
)
def test_a_connector_that_waits_for_what_never_comes(
    name: str, message: str, checkpoint: Checkpoint
) -> None:
    with (
        pytest.raises(ValueError, match=message),
        engine(checkpoint("llama"), **connector(name)),
    ):
        pass


def test_a_consumer_writes_no_files(checkpoint: Checkpoint, tmp_path: Path) -> None:
    arguments = extraction_config([1], tmp_path)
    arguments["kv_transfer_config"]["kv_role"] = "kv_consumer"
    with engine(checkpoint("llama"), **arguments) as llm:
        (output,) = llm.generate(PROMPTS[:1], greedy(2), use_tqdm=False)
    assert output.outputs[0].finish_reason == "length"
    assert not (output.kv_transfer_params or {})
    assert list(tmp_path.iterdir()) == []
    arguments["kv_transfer_config"]["kv_role"] = "kv_both"
    with engine(checkpoint("llama"), **arguments) as llm:
        (output,) = llm.generate(PROMPTS[:1], greedy(2), use_tqdm=False)
        assert len(rows_of(output)) == 60


class NotingConnector(SlotConnector):
    """Takes down what it is asked and given; the option ``has`` says whether it has anything."""

    def _name(self) -> str:
        return str(self._kv_transfer_config.get_from_extra_config("name", ""))

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        answer = super().get_num_new_matched_tokens(request, num_computed_tokens)
        has = self._kv_transfer_config.get_from_extra_config("has", True)
        noted.append((self._name(), "asked"))
        return answer if has else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        noted.append((self._name(), num_external_tokens, sum(map(len, blocks.blocks))))


noted: list[tuple[Any, ...]] = []


def test_all_are_asked_and_the_first_that_has_it_loads(checkpoint: Checkpoint) -> None:
    """The others get no blocks, as upstream's connectors expect, and are told before it."""
    own = {"kv_connector": "NotingConnector", "kv_connector_module_path": __name__}
    parts = [
        {**own, "kv_connector_extra_config": {"name": name, "has": name != "empty"}}
        for name in ("empty", "first", "second")
    ]
    several = {"kv_connector": "MultiConnector", "kv_role": "kv_both"}
    several["kv_connector_extra_config"] = {"connectors": parts}
    with engine(checkpoint("llama"), block_size=16, kv_transfer_config=several) as llm:
        expected = tokens_of(llm.generate(PROMPTS[:1], greedy(8), use_tqdm=False))
        llm.reset_prefix_cache()
        noted.clear()
        outputs = llm.generate(PROMPTS[:1], greedy(8), use_tqdm=False)
    assert tokens_of(outputs) == expected
    assert num_cached(outputs) == [48]
    assert noted == [
        ("empty", "asked"),
        ("first", "asked"),
        ("second", "asked"),
        ("empty", 0, 0),
        ("second", 0, 0),
        ("first", 48, 4),
    ]


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3_moe"])
def test_saved_in_one_engine_loaded_in_another(
    family: str, in_background: bool, checkpoint: Checkpoint
) -> None:
    """By a connector of another package, in chunks, in a pool that preempts, between prefix hits;
    rows behind what was loaded are those computed."""
    folder = checkpoint(family)
    prompts = [prompt + [7] * n for n in (1, 30) for prompt in PROMPTS]
    with engine(folder, block_size=16, enable_prefix_caching=False) as llm:
        expected = tokens_of(llm.generate(prompts, greedy(40), use_tqdm=False))
        (whole,) = llm.extract(prompts[1:2], layers=[0, 2, 4])
    sizes: dict[str, Any] = {
        "block_size": 16,
        "max_model_len": 192,
        "max_num_batched_tokens": 64,
        "num_gpu_blocks_override": 40,
    }
    arguments = connector(in_background=in_background)
    for is_there in (False, True):
        with engine(folder, **sizes, **arguments) as llm:
            outputs = llm.generate(prompts, greedy(40), use_tqdm=False)
            assert core_of(llm).scheduler.stats().num_preemptions
            assert tokens_of(outputs) == expected
            llm.reset_prefix_cache()
            positions = range(60, 91)
            (sample,) = llm.extract(prompts[1:2], layers=[0, 2, 4], positions=positions)
            assert torch.equal(sample.hidden_states, whole.hidden_states[60:91])
        assert bool(slot_connector.store)
        if is_there:
            assert min(num_cached(outputs)[:3]) >= 47
