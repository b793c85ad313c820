"""Connectors of other packages: subclasses, late readers, several at once, and the registry."""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file

from tests.engine.harness import extraction_config
from tests.kv_connector import out_of_tree_connectors
from tests.kv_connector.connector_harness import PATIENCE_S, Harness, MakeHarness
from tests.kv_connector.out_of_tree_connectors import StoreConnector
from vllm import AsyncEngineArgs, AsyncLLM
from vllm.config import KVTransferConfig, connectors
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    StillReadingError,
    supports_hma,
)
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
)
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states_saver import RowSaver
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.outputs import ExtractedRows
from vllm.v1.request import RequestStatus
from vllm.v1.rows.writer import (
    CollectedRows,
    HostEvent,
)

SMALL = {"kv_cache_memory_bytes": 2**24, "max_model_len": 64}
MODULE = out_of_tree_connectors.__name__
EXAMPLE = {"kv_connector": "ExampleHiddenStatesConnector"}
STORE = {"kv_connector": "StoreConnector", "kv_connector_module_path": MODULE}


@pytest.fixture(autouse=True)
def _empty_store() -> Iterator[None]:
    yield
    StoreConnector.stored.clear()


def run_two(harness: Harness) -> dict[str, dict[str, Any] | None]:
    """Two requests in chunks, one preempted; returns the params of their replies."""
    harness.add("a", 17)
    harness.add("b", 11)
    harness.step({"a": 6, "b": 7})
    harness.preempt("b")
    harness.step({"a": 11})
    harness.step({"a": 1, "b": 11})
    params = {name: harness.finish(name) for name in ("a", "b")}
    harness.idle_until_done("a", "b")
    assert harness.failures == {}
    return params


def test_a_connector_that_writes_in_its_own_form(make_harness: MakeHarness, storage: Path) -> None:
    harness = make_harness("HalvingConnector", MODULE, options={"its_own_option": 3})
    assert harness.scheduler.rows_leave_each_step
    params = run_two(harness)
    for name, length in (("a", 17), ("b", 11)):
        assert params[name] == {"hidden_states_path": str(storage / f"{name}.safetensors")}
        tensors = load_file(storage / f"{name}.safetensors")
        assert torch.equal(tensors["hidden_states"], harness.rows(name, length) / 2)
        assert tensors["scales"].shape == (length, 1, 1)
        assert tensors["token_ids"].tolist() == list(range(100, 100 + length))
        with open(storage / f"{name}.safetensors.lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert len(os.listdir(storage)) == 4


def test_rows_that_are_collected_leave_the_memory_they_came_in(
    make_harness: MakeHarness, storage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that a request has collected no longer count as in flight, and keep no piece alive."""
    send = RowSaver._send
    buffers: list[weakref.ref[Any]] = []

    def watched(self: RowSaver, *arguments: Any) -> Any:
        leaving, room = send(self, *arguments)
        buffer = room["hidden_states"].numpy().copy()
        buffers.append(weakref.ref(buffer))
        room = {"hidden_states": torch.from_numpy(buffer)}
        leaving._outs = [room]
        return leaving, room

    monkeypatch.setattr(RowSaver, "_send", watched)
    options = {"max_bytes_in_flight": 10 * 3 * 7 * 4}
    harness = make_harness("HalvingConnector", MODULE, options=options)
    harness.add("long", 90)
    harness.add("chat", 20, {"include_output_tokens": True})
    for _ in range(3):
        harness.step({"long": 30})
    harness.step({"chat": 20})
    for _ in range(30):
        harness.step({"chat": 1})
    stats = harness.worker.save_stats
    deadline = time.monotonic() + PATIENCE_S
    while any(buffer() is not None for buffer in buffers):
        assert time.monotonic() < deadline, "pieces are held by requests that have not ended"
        harness.step()
    assert len(buffers) >= 40
    report = stats()
    assert report is not None
    assert report.bytes_in_flight == 0
    harness.finish("long")
    harness.finish("chat")
    harness.idle_until_done("long", "chat")
    assert harness.failures == {}
    for name, length in (("long", 90), ("chat", 50)):
        rows = load_file(storage / f"{name}.safetensors")["hidden_states"]
        assert torch.equal(rows, harness.rows(name, length) / 2)


def hidden_rows(rows: torch.Tensor) -> ExtractedRows:
    return ExtractedRows({"hidden_states": rows}, {})


def test_collected_rows_are_allocated_once_where_their_number_is_known(tmp_path: Path) -> None:
    written: dict[str, torch.Tensor] = {}

    def write(tensors: dict[str, torch.Tensor], event: Any, name: str, lock: int | None) -> None:
        written.update(tensors)
        Path(name).touch()

    rows = torch.randn(40, 2, 3)
    for num_rows in (40, 33, 7):  # of a prompt; then output tokens come on top
        sink = CollectedRows(str(tmp_path / "x"), write, None, 33)
        places = set()
        for start in range(0, num_rows, 5):
            sink.append(hidden_rows(rows[start : min(start + 5, num_rows)]))
            places.add(sink._tensors["hidden_states"].data_ptr())
        assert len(places) == (2 if num_rows == 40 else 1)
        sink.finish(list(range(num_rows)))
        assert torch.equal(written["hidden_states"], rows[:num_rows])
        assert written["hidden_states"].is_contiguous()


def test_collected_rows_that_are_not_all_there_are_not_written(tmp_path: Path) -> None:
    sink = CollectedRows(str(tmp_path / "x"), Mock(), None, 5)
    sink.append(hidden_rows(torch.randn(4, 2, 3)))
    with pytest.raises(ValueError, match="4 rows"):
        sink.finish([1, 2, 3, 4, 5])
    sink.discard()
    assert not list(tmp_path.iterdir())


def test_a_connector_whose_writer_raises(make_harness: MakeHarness, storage: Path) -> None:
    harness = make_harness("BreakingConnector", MODULE)
    harness.add("r", 4)
    harness.step({"r": 4})
    harness.finish("r")
    harness.idle_until_done("r")
    assert "quantiser out of order" in harness.failures["r"]
    assert os.listdir(storage) == []


def test_base_write_tensors_makes_a_whole_file(tmp_path: Path) -> None:
    tensors = {"hidden_states": torch.randn(3, 2, 4), "token_ids": torch.arange(3)}
    event = HostEvent()
    path = tmp_path / "x.safetensors"
    descriptor = os.open(tmp_path / "lock", os.O_CREAT | os.O_RDWR)
    ExampleHiddenStatesConnector._write_tensors(tensors, event, str(path), descriptor)
    loaded = load_file(path)
    assert torch.equal(loaded["hidden_states"], tensors["hidden_states"])
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_connector_that_reads_all_blocks_at_the_end(make_harness: MakeHarness) -> None:
    harness = make_harness("StoreConnector", MODULE)
    assert not harness.scheduler.rows_leave_each_step
    assert not harness.scheduler.reply_when_saved
    params = run_two(harness)
    assert params["a"] == {"handle": "store:a"}
    assert torch.equal(StoreConnector.stored["a"], harness.rows("a", 17))
    assert torch.equal(StoreConnector.stored["b"], harness.rows("b", 11))


def test_a_subclass_that_moves_rows_itself_keeps_its_blocks(make_harness: MakeHarness) -> None:
    harness = make_harness("LateConnector", MODULE)
    assert not harness.scheduler.rows_leave_each_step
    assert harness.scheduler.reply_when_saved
    run_two(harness)


def multi(*connectors: dict[str, Any]) -> dict[str, Any]:
    return {"connectors": list(connectors)}


def test_several_connectors_save_the_same_rows(make_harness: MakeHarness, storage: Path) -> None:
    example = {**EXAMPLE, "kv_connector_extra_config": {"shared_storage_path": str(storage)}}
    harness = make_harness("MultiConnector", options=multi(example, STORE))
    assert harness.scheduler.reply_when_saved
    assert not harness.scheduler.rows_leave_each_step
    params = run_two(harness)
    for name, length in (("a", 17), ("b", 11)):
        path = str(storage / f"{name}.safetensors")
        assert params[name] == {"hidden_states_path": path, "handle": f"store:{name}"}
        assert torch.equal(load_file(path)["hidden_states"], harness.rows(name, length))
        assert torch.equal(StoreConnector.stored[name], harness.rows(name, length))

    harness.add("gone", 9)
    harness.step({"gone": 9})
    harness.finish("gone", RequestStatus.FINISHED_ABORTED)  # the store still wants it
    harness.idle_until_done("gone")
    assert not (storage / "gone.safetensors").exists()


def test_an_abort_before_the_reply_reaches_those_who_delay_it(
    make_harness: MakeHarness, storage: Path
) -> None:
    example = {**EXAMPLE, "kv_connector_extra_config": {"shared_storage_path": str(storage)}}
    harness = make_harness("MultiConnector", options=multi(example, STORE))
    request = harness.add("r", 9)
    harness.step({"r": 9})
    harness.finish("r")
    harness.abort_delivery(request)
    harness.idle_until_done("r")
    harness.worker.shutdown()
    assert os.listdir(storage) == []
    assert torch.equal(StoreConnector.stored["r"], harness.rows("r", 9))


def test_one_that_fails_does_not_take_blocks_from_one_that_reads_them(
    make_harness: MakeHarness,
) -> None:
    broken = {**STORE, "kv_connector": "BrokenEndConnector"}
    harness = make_harness("MultiConnector", options=multi(broken, STORE))
    harness.add("r", 9)
    harness.step({"r": 9})
    with pytest.raises(StillReadingError, match="RuntimeError: out of order"):
        harness.finish("r")
    harness.finished_ids.add("r")
    harness.idle_until_done("r")
    assert torch.equal(StoreConnector.stored["r"], harness.rows("r", 9))


def test_the_first_of_two_answers_is_kept(make_harness: MakeHarness) -> None:
    second = {**STORE, "kv_connector_extra_config": {"handle": "second:"}}
    harness = make_harness("MultiConnector", options=multi(STORE, second))
    assert run_two(harness)["a"] == {"handle": "store:a"}


def config(name: str | None, **fields: Any) -> KVTransferConfig:
    return KVTransferConfig(kv_connector=name, kv_role="kv_both", **fields)


@pytest.mark.parametrize(
    ("connectors", "hma", "leave"),
    [
        ([EXAMPLE], True, True),
        ([EXAMPLE, STORE], True, False),
        ([EXAMPLE, {**STORE, "kv_connector": "PlainConnector"}], False, False),
        (
            [{"kv_connector": "MultiConnector", "kv_connector_extra_config": multi(EXAMPLE)}],
            True,
            True,
        ),
    ],
)
def test_what_several_connectors_can_do_together(
    connectors: list[dict[str, Any]], hma: bool, leave: bool
) -> None:
    both = config("MultiConnector", kv_connector_extra_config=multi(*connectors))
    assert KVConnectorFactory.supports_hma(both) is hma
    assert KVConnectorFactory.rows_leave_each_step(both) is leave


def test_supports_hma_of_class_and_instance(make_harness: MakeHarness) -> None:
    assert supports_hma(ExampleHiddenStatesConnector)
    assert supports_hma(MultiConnector)
    assert supports_hma(make_harness().worker)
    assert not supports_hma(out_of_tree_connectors.PlainConnector)


@pytest.mark.parametrize(
    ("name", "module_path", "message"),
    [
        ("ExampleHiddenStateConector", None, "did you mean 'ExampleHiddenStatesConnector'"),
        ("Nothing", None, "available: ExampleConnector, ExampleHiddenStatesConnector, Multi"),
        ("X", "no_such_package.connectors", "'no_such_package.connectors' cannot be imported"),
        ("StoreConector", MODULE, "no connector class 'StoreConector' .*'StoreConnector'"),
        ("NotAConnector", MODULE, "no connector class 'NotAConnector'"),
    ],
)
def test_connectors_that_are_not_there(name: str, module_path: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KVConnectorFactory.get_connector_class(config(name, kv_connector_module_path=module_path))


@pytest.mark.parametrize("connectors", [None, [], "Example", [5]])
def test_a_multi_connector_needs_a_list(connectors: Any) -> None:
    with pytest.raises(ValueError, match="connector"):
        KVConnectorFactory.supports_hma(
            config("MultiConnector", kv_connector_extra_config={"connectors": connectors})
        )


def test_registering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.config.connectors.REGISTERED", dict(connectors.REGISTERED))
    KVConnectorFactory.register_connector("mine", MODULE, "StoreConnector")
    KVConnectorFactory.register_connector("mine", MODULE, "StoreConnector")
    assert KVConnectorFactory.get_connector_class(config("mine")) is StoreConnector
    with pytest.raises(ValueError, match="'mine' is registered already"):
        KVConnectorFactory.register_connector("mine", MODULE, "LateConnector")


def test_extraction_has_to_be_on(make_harness: MakeHarness) -> None:
    worker = make_harness().worker
    bare = worker._vllm_config
    bare.speculative_config = None
    with pytest.raises(ValueError, match="needs speculative_config with method"):
        ExampleHiddenStatesConnector(bare, worker.role, worker._kv_cache_config)


@pytest.mark.exhaustive
def test_a_registered_connector_reaches_an_engine_in_another_process(
    checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm.config.connectors.REGISTERED", dict(connectors.REGISTERED))
    KVConnectorFactory.register_connector("mine", MODULE, "StoreConnector")

    async def run() -> None:
        options = extraction_config([1], tmp_path) | SMALL
        options["kv_transfer_config"]["kv_connector"] = "mine"
        args = AsyncEngineArgs(str(checkpoint("llama")), **options)
        llm = AsyncLLM.from_engine_args(args)
        try:
            await llm.start()
        finally:
            await llm.shutdown()

    asyncio.run(run())
