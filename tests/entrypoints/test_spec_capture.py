"""``POST /generate`` of SpecForge: rows in a store, against transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.harness import random_prompts
from tests.entrypoints.live_server import LiveServer, live_server
from tests.models.oracle import reference_run, relative_error
from tests.training.store_double import StoreDouble, install_client
from vllm.entrypoints.openai.cli_args import ServerSettings
from vllm.entrypoints.openai.spec_capture import CaptureStore
from vllm.entrypoints.openai.state import ServerState
from vllm.training.mooncake_store import MooncakeStore
from vllm.v1.rows.fields.layout import TensorForm

PROMPTS = [one["prompt_token_ids"] for one in random_prompts(11, [9, 1, 33], 250)]
AUX = [0, 2]
ROWS = {"aux": "hidden_state", "last_hidden": "target"}


@pytest.fixture(scope="module")
def store() -> Iterator[StoreDouble]:
    store = StoreDouble(most_bytes=1 << 18)
    yield store
    assert not store.registered
    store.close()


@pytest.fixture(scope="module")
def capturing(
    tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory, store: StoreDouble
) -> Iterator[LiveServer]:
    options = {"local_hostname": "here"}
    settings = ServerSettings(
        mooncake_store=options, spec_capture_aux_layer_ids=AUX, max_hidden_states_mib=0.2
    )
    with pytest.MonkeyPatch.context() as patch:
        setups = install_client(patch, store)
        folder = tmp_path_factory.mktemp("captures")
        with live_server(tiny_llama, folder, layers=None, settings=settings) as running:
            assert setups[0]["local_hostname"] == "here"
            yield running


@pytest.fixture(autouse=True)
def empty(store: StoreDouble) -> Iterator[None]:
    yield
    store.end_leases()
    for key in store.all_keys():
        assert store.remove(key) == 0


def capture(index: int, **more: Any) -> dict[str, Any]:
    mask = {"name": "loss_mask", "data": [1] * len(PROMPTS[index]), "dtype": "int64"}
    return {
        "store_id": "run",
        "sample_id": f"run:{index}",
        "gen": 1,
        "replace": False,
        "features": ROWS,
        "passthrough": [{**mask, "shape": [1, len(PROMPTS[index])]}],
        **more,
    }


def body(**more: Any) -> dict[str, Any]:
    """A request as SpecForge 0.2 sends it."""
    return {
        "input_ids": PROMPTS,
        "extra_key": ["a", "b", "c"],
        "sampling_params": {"temperature": 0.0, "max_new_tokens": 0},
        "spec_capture": [capture(index) for index in range(len(PROMPTS))],
        **more,
    }


def post(capturing: LiveServer, **more: Any) -> list[dict[str, Any]]:
    """The results of the samples."""
    with capturing.client() as http:
        answer = http.post("/generate", json=body(**more))
    assert answer.status_code == 200, answer.text
    rows = answer.json()
    assert [one["meta_info"]["prompt_tokens"] for one in rows] == [len(ids) for ids in PROMPTS]
    return [one["meta_info"]["spec_capture"] for one in rows]


def fetch(store: StoreDouble, result: dict[str, Any]) -> dict[str, torch.Tensor]:
    forms = {
        name: TensorForm(getattr(torch, one["dtype"]), tuple(one["shape"]))
        for name, one in result["features"].items()
    }
    return MooncakeStore(store).get(f"run/{result['sample_id']}/g{result['gen']}", forms)


def refusal(capturing: LiveServer, **more: Any) -> str:
    with capturing.client() as http:
        answer = http.post("/generate", json=body(**more))
    assert answer.status_code == 400, answer.text
    message: str = answer.json()["error"]["message"]
    return message


def test_rows_are_those_of_transformers(
    capturing: LiveServer, store: StoreDouble, tiny_llama: Path
) -> None:
    results = post(capturing)
    names = ("hidden_state", "loss_mask", "target")
    assert store.all_keys() == [f"run/run:{i}/g1/{name}" for i in range(3) for name in names]
    for index, (ids, result) in enumerate(zip(PROMPTS, results, strict=True)):
        about = {key: result[key] for key in ("sample_id", "store_id", "gen", "aux_layer_ids")}
        assert about == {
            "sample_id": f"run:{index}", "store_id": "run", "gen": 1, "aux_layer_ids": AUX,
        }  # fmt: skip
        found, expected = fetch(store, result), reference_run(tiny_llama, ids)
        aux = torch.cat([expected.streams[one + 1] for one in AUX], dim=-1)
        assert relative_error(found["hidden_state"], aux[None]) < 1e-4
        assert relative_error(found["target"], expected.head_input[None]) < 1e-4
        assert found["loss_mask"].tolist() == [[1] * len(ids)]


def test_one_of_the_artifacts_and_values_of_the_client(
    capturing: LiveServer, store: StoreDouble
) -> None:
    values = [1.5, -2.0]
    given = {"name": "x", "data": values, "shape": [2, 1], "dtype": "bfloat16"}
    passthrough = [given, {"name": "y", "data": [False, True], "shape": [2], "dtype": "bool"}]
    ones = [capture(i, features={"aux": "a"}, passthrough=passthrough, gen=4) for i in range(3)]
    (result, *_) = post(capturing, spec_capture=ones)
    assert result["features"].keys() == {"a", "x", "y"}
    found = fetch(store, result)
    assert found["x"].dtype == torch.bfloat16 and found["x"].tolist() == [[1.5], [-2.0]]
    assert found["y"].tolist() == [False, True]
    rows_alone = [capture(i, features={"last_hidden": "b"}, passthrough=[]) for i in range(3)]
    assert post(capturing, spec_capture=rows_alone)[1]["features"].keys() == {"b"}


def test_a_retry_replaces_its_objects(capturing: LiveServer, store: StoreDouble) -> None:
    first = post(capturing)
    again = post(capturing)
    assert "exists in the store already" in again[0]["error"]
    assert again[0]["kind"] == "write_failed"
    store.end_leases()
    replacing = [capture(index, replace=True) for index in range(3)]
    assert post(capturing, spec_capture=replacing) == first


def test_a_store_that_is_full_fails_its_samples_alone(
    capturing: LiveServer, store: StoreDouble
) -> None:
    room = (1 << 18) - 40_000
    MooncakeStore(store).put("other", {"a": torch.ones(room, dtype=torch.uint8)})
    large = {"name": "big", "data": [1] * 6000, "shape": [1, 6000], "dtype": "int64"}
    results = post(
        capturing, spec_capture=[capture(0), capture(1, passthrough=[large]), capture(2, gen=2)]
    )
    assert [one.get("kind") for one in results] == [None, "disk_full", None]
    assert not any("run:1" in key for key in store.all_keys())
    assert all(key in store.all_keys() for key in ("run/run:0/g1/target", "run/run:2/g2/target"))


def test_a_store_that_is_gone(
    capturing: LiveServer, store: StoreDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> int:
        raise ConnectionError("no master")

    with monkeypatch.context() as patch:
        patch.setattr(store, "is_exist", fail)
        results = post(capturing)
    for index, result in enumerate(results):
        message = f"run/run:{index}/g1/hidden_state: ConnectionError: no master"
        assert result == {
            "sample_id": f"run:{index}", "error": message, "kind": "connector_failed",
        }  # fmt: skip
    assert all("features" in one for one in post(capturing))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"spec_capture": [capture(0)]}, "spec_capture: has 1 objects for 3 lists in input_ids"),
        ({"spec_capture": None}, "body.spec_capture: "),
        ({"input_ids": [PROMPTS[0], PROMPTS[1], [1] * 600]}, "input_ids: prompt 2: "),
        ({"input_ids": [*PROMPTS[:2], [1, -1]]}, "body.input_ids.2.1: "),
        ({"image_data": ["x"]}, "body.image_data: "),
        ({"sampling_params": {"max_new_tokens": 5}}, "sampling_params.max_new_tokens=5: has to be"),
        (
            {"spec_capture": [capture(0), capture(1), capture(1)]},
            "spec_capture.2.sample_id='run:1': is also that of spec_capture.1",
        ),
    ],
)
def test_bad_bodies(
    capturing: LiveServer, store: StoreDouble, more: dict[str, Any], message: str
) -> None:
    assert message in refusal(capturing, **more)
    assert store.all_keys() == []


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"store_id": ""}, "store_id: "),
        ({"store_id": "run/1"}, ": store_id 'run/1' has a slash"),
        ({"features": {"aux": "a/g2/x"}}, ": the name 'a/g2/x' has a slash"),
        ({"features": {"last_hidden": "/"}}, ": the name '/' has a slash"),
        ({"gen": "1"}, "gen: "),
        ({"gen": -1}, "gen: "),
        ({"features": {"logits": "x"}}, "features.logits: "),
        ({"features": {}, "passthrough": []}, ".features: names nothing to store"),
        ({"features": {"aux": "a", "last_hidden": "a"}}, ": the name 'a' comes twice"),
        ({"features": {"aux": "loss_mask"}}, ": the name 'loss_mask' comes twice"),
        ({"more": 1}, "more: "),
    ],
)
def test_bad_samples(capturing: LiveServer, more: dict[str, Any], message: str) -> None:
    found = refusal(capturing, spec_capture=[capture(0), capture(1, **more), capture(2)])
    assert f"spec_capture.1.{message}".replace("..", ".").replace(".:", ":") in found


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"shape": [1, 3]}, "data: shape '[1, 3]' is invalid for input of size 2"),
        ({"shape": [-1]}, "shape.0: "),
        ({"dtype": "float8"}, "dtype: "),
        ({"data": [1, "x"]}, "data.1"),
        ({"data": [1, 1.5]}, "data: has fractions, and dtype is int64"),
        ({"data": [1, 300], "dtype": "uint8"}, "data: value cannot be converted"),
        ({"data": [1, 2**70]}, "data: "),
    ],
)
def test_bad_tensors(capturing: LiveServer, more: dict[str, Any], message: str) -> None:
    given = {"name": "x", "data": [1, 2], "shape": [1, 2], "dtype": "int64", **more}
    found = refusal(
        capturing, spec_capture=[capture(0, passthrough=[given]), capture(1), capture(2)]
    )
    assert f"spec_capture.0.passthrough.0.{message}" in found


def test_more_rows_than_a_request_may_have(capturing: LiveServer) -> None:
    count = 30
    ones = [capture(2, sample_id=str(index)) for index in range(count)]
    assert "--max-hidden-states-mib" in refusal(
        capturing, input_ids=[PROMPTS[2]] * count, spec_capture=ones
    )


def test_trls_endpoint_is_another(capturing: LiveServer) -> None:
    with capturing.client() as http:
        answer = http.post("/generate/", json={"prompts": [PROMPTS[0]], "max_tokens": 2})
    assert len(answer.json()["completion_ids"][0]) == 2


def test_servers_without_a_store(server: LiveServer, capturing: LiveServer) -> None:
    with server.client() as http:
        answer = http.post("/generate", json=body())
    assert answer.status_code == 403
    assert "start it with --mooncake-store (TRL's endpoint is" in answer.json()["error"]["message"]
    for running, options, message in (
        (server, {}, "a server with speculative_config gives rows to its KV connector"),
        (capturing, {"spec_capture_aux_layer_ids": [0, 4]}, r"=\[0, 4\]: 4 is not .* use 0 to 3"),
        (
            capturing,
            {"mooncake_store": {"master": 1}},
            r"mooncake_store: \['master'\]: options",
        ),
        (capturing, {"mooncake_store": {"protocol": "rdma"}}, r"mooncake_store: .* \(status -1\)"),
        (
            capturing,
            {"spec_capture_aux_layer_ids": None},
            "aux_layer_ids is not set, and",
        ),
    ):
        fields = {"mooncake_store": {}, "spec_capture_aux_layer_ids": AUX, **options}
        state = running.state
        other = ServerState(state.engine, ServerSettings(**fields), ["tiny"], state.metrics)
        with pytest.raises(ValueError, match=message):
            CaptureStore(other)
