"""``MooncakeStore``: samples in a store with the API of Mooncake's client."""

from __future__ import annotations

import dataclasses
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.engine.harness import engine, random_prompts
from tests.training.store_double import StoreDouble, install_client
from tests.training.test_hidden_states_stream import sample
from vllm.exceptions import Failure, FailureError, FailureKind
from vllm.hidden_states import FailedSample
from vllm.training.mooncake_store import MooncakeStore, StoredSample
from vllm.v1.rows.fields.layout import TensorForm

Checkpoint = Callable[..., Path]
ROWS = {"a": torch.randn(5, 3).to(torch.bfloat16), "b": torch.arange(7), "c": torch.empty(0, 4)}


@pytest.fixture
def client() -> Iterator[StoreDouble]:
    client = StoreDouble(most_bytes=1 << 16)
    yield client
    assert not client.registered
    client.close()


def test_tensors_come_back_by_another_client(client: StoreDouble) -> None:
    config = object()
    forms = MooncakeStore(client, config).put("run/0", ROWS)
    assert forms["a"] == TensorForm(torch.bfloat16, (5, 3))
    assert client.all_keys() == ["run/0/a", "run/0/b", "run/0/c"]
    assert client.configs == [config] * 3
    got = MooncakeStore(client).get("run/0", forms)
    for name, tensor in ROWS.items():
        assert torch.equal(got[name], tensor) and got[name].dtype == tensor.dtype


def test_samples_of_an_engine(checkpoint: Checkpoint, client: StoreDouble) -> None:
    store, prompts = MooncakeStore(client), random_prompts(3, [11, 5, 19])
    failed = FailedSample(7, "x", Failure(FailureKind.ROWS_NOT_FINITE, "row 1"))
    with engine(checkpoint("qwen3_5")) as llm:
        samples = list(llm.extract(prompts, [1, "norm"]))
    *stored, last = store.publish([*samples, failed], "run")
    assert last is failed and client.all_keys()[0] == "run/0/hidden_states"
    for expected, one in zip(samples, stored, strict=True):
        assert isinstance(one, StoredSample)
        got = store.fetch(one)
        assert torch.equal(got.hidden_states, expected.hidden_states)
        assert torch.equal(got.token_ids, expected.token_ids)
        assert (got.index, got.layer_ids) == (expected.index, expected.layer_ids)


def test_what_a_sample_has_besides_its_tensors(client: StoreDouble) -> None:
    facts = {"record": 4, "constants": {"expert_layers": [1, 3]}, "columns": {"label": [1, "x"]}}
    store, one = MooncakeStore(client), sample(2)
    one = dataclasses.replace(one, num_generated_tokens=3, **facts)
    (stored,) = store.publish([one], "run")
    got = store.fetch(pickle.loads(pickle.dumps(stored)))
    assert {name: getattr(got, name) for name in facts} == facts
    assert got.request_id == one.request_id
    assert got.num_prompt_tokens == one.num_prompt_tokens == len(one.token_ids) - 3


def test_a_full_store_keeps_nothing_of_a_sample(client: StoreDouble) -> None:
    store = MooncakeStore(client)
    store.put("run/0", ROWS)
    before = client.all_keys()
    with pytest.raises(FailureError, match=r"run/1/large: could not .* -200\)") as raised:
        store.put("run/1", {"b": torch.ones(3), "large": torch.ones(1 << 15), "c": torch.ones(2)})
    assert raised.value.failure.kind is FailureKind.DISK_FULL
    assert client.all_keys() == before


def test_objects_that_exist(client: StoreDouble) -> None:
    store = MooncakeStore(client)
    store.put("run/0", {"a": torch.ones(3)})
    with pytest.raises(FailureError, match="run/0/a: exists in the store already"):
        store.put("run/0", {"b": torch.ones(2), "a": torch.zeros(3)})
    assert client.all_keys() == ["run/0/a"]
    client.end_leases()
    forms = store.put("run/0", {"a": torch.zeros(4)}, replace=True)
    assert store.get("run/0", forms)["a"].tolist() == [0.0] * 4
    store.remove(["run/0/a", "run/0/missing"])
    assert client.all_keys() == []


def test_objects_that_are_not_as_expected(client: StoreDouble) -> None:
    store = MooncakeStore(client)
    store.put("run/0", {"a": torch.ones(3)})
    for name, size, kind in (("b", 3, FailureKind.FILE_GONE), ("a", 4, FailureKind.FILE_DAMAGED)):
        with pytest.raises(FailureError, match=f"run/0/{name}: ") as raised:
            store.get("run/0", {name: TensorForm(torch.float32, (size,))})
        assert raised.value.failure.kind is kind


def test_a_store_that_is_gone_fails_samples_alone() -> None:
    class Gone(StoreDouble):
        def __init__(self) -> None:
            self.registered = {}

        def is_exist(self, key: str) -> int:
            raise ConnectionError("no master")

    (failed,) = MooncakeStore(Gone()).publish([sample(4)], "run")
    assert isinstance(failed, FailedSample)
    assert failed.failure.kind is FailureKind.CONNECTOR_FAILED
    assert failed.reason == "run/4/hidden_states: ConnectionError: no master"


def test_connecting(monkeypatch: pytest.MonkeyPatch, client: StoreDouble) -> None:
    monkeypatch.setitem(sys.modules, "mooncake", None)
    with pytest.raises(ImportError, match=r"pip install '\.\[mooncake\]'"):
        MooncakeStore.connect()
    setups = install_client(monkeypatch, client)
    MooncakeStore.connect(local_hostname="here").put("run/0", {"a": torch.ones(2)})
    assert setups[0] == {
        "local_hostname": "here",
        "metadata_server": "http://localhost:8080/metadata",
        "global_segment_size": 2**30,
        "local_buffer_size": 2**30,
        "protocol": "tcp",
        "rdma_devices": "",
        "master_server_addr": "localhost:50051",
    }
    assert client.configs[0] == SimpleNamespace(replica_num=1, with_hard_pin=True)
    with pytest.raises(FailureError, match=r"could not be set up \(status -1\)"):
        MooncakeStore.connect(protocol="rdma")
    with pytest.raises(ValueError, match=r"\['master'\]: options are local_hostname"):
        MooncakeStore.connect(master="x")
