"""Offloading to a place of somebody else's, through the interface of upstream's specs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests.engine.harness import core_of, engine, greedy, random_prompts
from tests.kv_connector import own_offloading_spec as own
from tests.kv_connector.loading import (
    FAMILIES,
    ask,
    beside_extraction,
    forget,
    num_cached,
    only,
    same,
)
from vllm.v1.kv_offload.base import (
    get_offload_block_hash,
    get_offload_group_idx,
    make_offload_key,
)
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

Checkpoint = Callable[..., Path]
LONG = {"max_position_embeddings": 2048}
(TEXT,) = [p["prompt_token_ids"] for p in random_prompts(71, [300])]
PROMPTS = [TEXT[:n] + [n % 300] * 20 for n in (200, 133, 64, 15)]


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    own.MANAGERS.clear()
    own.FAILING.clear()
    yield
    own.FAILING.clear()


def connector(**options: Any) -> dict[str, Any]:
    options = {"spec_module_path": own.__name__, "num_slots": 400, **options}
    options.setdefault("spec_name", "SlotOffloadingSpec")
    return {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": options}


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_and_tokens_are_those_computed(
    family: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder = checkpoint(family, **LONG)
    arguments = beside_extraction(tmp_path, connector(patience=3))
    with engine(folder, max_model_len=512, max_num_batched_tokens=96, **arguments) as llm:
        expected = ask(llm, PROMPTS)
        forget(llm)
        outputs = ask(llm, PROMPTS)
        same(outputs, expected)
        assert [n // 16 * 16 for n in (219, 152, 83, 34)] == num_cached(outputs)
        (manager,) = own.MANAGERS
        assert manager.patience == 0 and set(manager.calls) == {"stored"}
        manager.check(400)
    assert manager.is_shut_down


def test_few_slots_and_transfers_that_fail(checkpoint: Checkpoint) -> None:
    """The tokens are right all the same, and the manager's books agree."""
    folder = checkpoint("qwen3_5", **LONG)
    arguments = only(connector(num_slots=24), kv_load_failure_policy="recompute")
    with engine(folder, max_model_len=512, max_num_batched_tokens=96, **arguments) as llm:
        (manager,) = own.MANAGERS
        expected = llm.generate(PROMPTS, greedy(4), use_tqdm=False)
        for failing in ({"GPU"}, {"slots"}, {"GPU", "slots"}, set[str]()):
            own.FAILING.clear()
            own.FAILING.update(failing)
            forget(llm)
            outputs = llm.generate(PROMPTS, greedy(4), use_tqdm=False)
            for one, other in zip(outputs, expected, strict=True):
                assert one.outputs[0].token_ids == other.outputs[0].token_ids
            forget(llm)
            manager.check(24)
        assert "lost" in manager.calls and list(manager.take_events()) == []
        core_of(llm).scheduler.kv_cache_manager.pool.check_integrity({})


def test_keys() -> None:
    key = make_offload_key(b"hash", 3)
    assert get_offload_block_hash(key) == b"hash" and get_offload_group_idx(key) == 3


def test_a_manager_that_cannot_look_costs_what_it_would_have_loaded(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = only(connector(), kv_load_failure_policy="recompute")
    with engine(checkpoint("llama", **LONG), max_model_len=512, **arguments) as llm:
        expected = llm.generate(PROMPTS, greedy(4), use_tqdm=False)
        forget(llm)
        lookup = Mock(side_effect=OSError("the index is away"))
        monkeypatch.setattr(own.SlotManager, "lookup", lookup)
        outputs = llm.generate(PROMPTS, greedy(4), use_tqdm=False)
        assert lookup.called
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in expected]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"spec_name": "SlotOffloadSpec"}, "SlotOffloadSpec.*did you mean 'SlotOffloadingSpec'"),
        ({"spec_name": "NotASpec"}, "is no OffloadingSpec"),
        ({"spec_name": "NoManagerSpec"}, "lacks get_handlers, get_manager; get_worker"),
        ({"spec_module_path": "no.such"}, "spec_module_path='no.such' cannot be imported"),
        ({"spec_module_path": None}, "is not known"),
        ({"block_size": 64}, "block_size=64 is not supported .* of 16 tokens"),
    ],
)
def test_what_cannot_be_used_is_refused(
    options: dict[str, Any], message: str, checkpoint: Checkpoint
) -> None:
    with (
        pytest.raises(ValueError, match=message),
        engine(checkpoint("llama"), **only(connector(**options))),
    ):
        pass


def test_a_registered_name(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OffloadingSpecFactory, "_registered", {})
    OffloadingSpecFactory.register_spec("slots", own.__name__, "SlotOffloadingSpec")
    with pytest.raises(ValueError, match="registered already"):
        OffloadingSpecFactory.register_spec("slots", own.__name__, "NotASpec")
    arguments = only(connector(spec_name="slots", spec_module_path=None))
    with engine(checkpoint("llama", **LONG), max_model_len=512, **arguments) as llm:
        llm.generate([TEXT[:100]], greedy(1), use_tqdm=False)
        forget(llm)
        (output,) = llm.generate([TEXT[:100]], greedy(1), use_tqdm=False)
        assert output.num_cached_tokens == 96
