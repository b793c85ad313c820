"""Weights that change under a server: over HTTP, from folders and from trainers over gloo; sleep,
pauses and calls of the worker.

The trainer is written here: TRL's calls of HTTP, and torch's process group. TRL's own needs CUDA.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

from tests.engine.harness import random_prompts
from tests.entrypoints.live_server import LiveServer, live_server
from tests.entrypoints.test_hidden_states_field import decoded
from tests.models.checkpoints import make_checkpoint
from vllm import LLM
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
from vllm.distributed.utils import StatelessProcessGroup
from vllm.distributed.weight_transfer.nccl_common import trainer_init
from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer
from vllm.entrypoints.openai.cli_args import ServerSettings

IDS = [prompt["prompt_token_ids"] for prompt in random_prompts(91, [7, 33, 18], 250)]
LAYERS = [0, 2, 4]
TIMEOUT = 2.0
BODY: dict[str, Any] = {"max_tokens": 1}
Tensors = dict[str, torch.Tensor]
Rows = list[torch.Tensor]


@pytest.fixture(scope="module")
def folders(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two checkpoints of the same sizes; the second is in the folder that may be loaded."""
    allowed = tmp_path_factory.mktemp("allowed")
    (allowed / "first").symlink_to(tiny_llama)  # it leads out of the folder
    return [tiny_llama, make_checkpoint(allowed / "second", "llama", seed=77)]


@pytest.fixture(scope="module")
def served(folders: list[Path]) -> Iterator[LiveServer]:
    settings = ServerSettings(
        weight_transfer_config=WeightTransferConfig(backend="gloo", timeout=TIMEOUT),
        weight_folders=[str(folders[1].parent)],
    )
    extension = "tests.engine.worker_extension.Extension"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")
        options: dict[str, Any] = {"layers": None, "settings": settings}
        with live_server(
            folders[0], folders[0], worker_extension_cls=extension, **options
        ) as running:
            patch.undo()  # other servers start meanwhile
            yield running


@pytest.fixture(scope="module")
def expected(folders: list[Path]) -> list[Rows]:
    """Rows of all prompts with each checkpoint."""
    found = []
    for folder in folders:
        with LLM(str(folder), max_model_len=512, kv_cache_memory_bytes=2**24) as llm:
            prompts = [{"prompt_token_ids": ids} for ids in IDS]
            found.append([one.hidden_states for one in llm.extract(prompts, LAYERS)])
    return found


@pytest.fixture
def http(served: LiveServer) -> Iterator[httpx.Client]:
    with served.client() as client:
        yield client


def post(http: httpx.Client, path: str, **body: Any) -> Any:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refusal(http: httpx.Client, path: str, status: int, **body: Any) -> str:
    answer = http.post(path, json=body or None)
    assert answer.status_code == status, answer.text
    return str(answer.json()["error"]["message"])


def rows_of(http: httpx.Client, index: int) -> torch.Tensor:
    field = {"layers": LAYERS}
    answer = post(http, "/v1/completions", prompt=IDS[index], hidden_states=field)
    return decoded(answer["choices"][0]["hidden_states"]["tensors"]["hidden_states"])


def is_model(http: httpx.Client, rows: Rows) -> bool:
    return all(torch.equal(rows_of(http, index), right) for index, right in enumerate(rows))


@contextmanager
def requests_all_the_time(served: LiveServer, expected: list[Rows]) -> Iterator[set[int]]:
    """Three clients that ask without a pause; yields the checkpoints whose rows they got.

    All rows of a reply have to be those of one of the two.
    """
    stop, seen, wrong = threading.Event(), set[int](), list[str]()

    def ask() -> None:
        with served.client() as http:
            while not stop.is_set():
                for index in range(len(IDS)):
                    rows = rows_of(http, index)
                    found = [k for k in (0, 1) if torch.equal(rows, expected[k][index])]
                    seen.update(found)
                    if not found:
                        wrong.append(f"prompt {index}")

    with ThreadPoolExecutor(3) as threads:
        asking = [threads.submit(ask) for _ in range(3)]
        time.sleep(0.2)
        try:
            yield seen
        finally:
            time.sleep(0.2)
            stop.set()
    for one in asking:
        one.result()
    assert not wrong


# ---- trainers


def free_port() -> int:
    store = TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    return int(store.port)


class Trainer:
    """Does what TRL's client up to 1.10 does, over gloo: it is the last rank of a group."""

    def __init__(self, http: httpx.Client) -> None:
        self.http, port = http, free_port()
        size = http.get("/get_world_size/").json()["world_size"] + 1
        body = {"host": "0.0.0.0", "port": port, "world_size": size, "client_device_uuid": "42"}
        post(http, "/init_communicator/", **body)
        timeout = timedelta(seconds=20)
        store = TCPStore("127.0.0.1", port, size, is_master=False, timeout=timeout)
        prefixed = PrefixStore("client2server", store)
        self.rank, self.group = size - 1, ProcessGroupGloo(prefixed, size - 1, size, timeout)

    def announce(self, name: str, tensor: torch.Tensor) -> None:
        form = {"name": name, "dtype": str(tensor.dtype), "shape": list(tensor.shape)}
        post(self.http, "/update_named_param/", **form)

    def send(self, tensor: torch.Tensor) -> None:
        self.group.broadcast(tensor, self.rank).wait()

    def update(self, weights: Tensors) -> None:
        for name, tensor in weights.items():
            self.announce(name, tensor)
            self.send(tensor)
            self.group.barrier().wait()

    def close(self) -> None:
        post(self.http, "/close_communicator/")


def weights_in(folder: Path) -> Tensors:
    return load_file(folder / "model.safetensors")


def test_folders_under_load(
    served: LiveServer, http: httpx.Client, folders: list[Path], expected: list[Rows]
) -> None:
    with requests_all_the_time(served, expected) as seen:
        post(http, "/update_weights", update_info={"path": str(folders[1])})
        assert is_model(http, expected[1])
        post(http, "/start_weight_update")
        post(http, "/update_weights", update_info={"path": str(folders[1])})
        post(http, "/finish_weight_update")
        post(http, "/collective_rpc", method="reload_weights")
        assert is_model(http, expected[0])
    assert seen == {0, 1}


def test_parameters_of_the_address_in_a_body(http: httpx.Client) -> None:
    """They had no effect there: a sleep discarded nothing, and a pause ended requests."""
    for path, field in (("/sleep", {"level": 2}), ("/pause", {"mode": "keep"})):
        (name,) = field
        told = refusal(http, path, 400, **field)
        assert f"body.{name}: has to be in the address: ?{name}=..." in told
    assert not http.get("/is_sleeping").json()["is_sleeping"]
    assert not http.get("/is_paused").json()["is_paused"]


def test_other_folders_are_refused(
    http: httpx.Client, folders: list[Path], expected: list[Rows]
) -> None:
    for path in (
        *(folders[0], "/etc", folders[1].parent / "first", folders[1] / ".." / ".."),
        f"{folders[1].parent}x",
    ):
        info = {"path": str(path)}
        assert "weight-folders" in refusal(http, "/update_weights", 403, update_info=info)
        body = {"method": "reload_weights", "args": [str(path)]}
        assert "weight-folders" in refusal(http, "/collective_rpc", 403, **body)
    info = {"path": str(folders[1] / "none")}
    assert "no such folder" in refusal(http, "/update_weights", 400, update_info=info)
    info = {"path": str(folders[1].parent)}
    refusal(http, "/update_weights", 400, update_info=info)  # there is no checkpoint
    assert is_model(http, expected[0])


def test_a_trainer_of_trl_under_load(
    served: LiveServer, http: httpx.Client, folders: list[Path], expected: list[Rows]
) -> None:
    trainer = Trainer(http)
    with requests_all_the_time(served, expected) as seen:
        trainer.update(weights_in(folders[1]))  # whole: requests begin without another call
        assert is_model(http, expected[1])
        weights = weights_in(folders[0])
        names = list(weights)
        trainer.update({name: weights[name] for name in names[:5]})
        params = [
            {"name": name, "dtype": "torch.float32", "shape": list(weights[name].shape)}
            for name in names[5:]
        ]
        post(http, "/batch_update_named_params/", params=params)
        for name in names[5:]:
            trainer.send(weights[name])
        trainer.group.barrier().wait()
        post(http, "/reset_prefix_cache/")
        assert is_model(http, expected[0])
    assert seen == {0, 1}
    # Some weights only: the end of the update is the call that TRL makes last.
    name = "model.norm.weight"
    trainer.update({name: weights_in(folders[1])[name].bfloat16()})
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(rows_of, http, 0)
        time.sleep(0.1)
        assert not waiting.done()
        post(http, "/reset_prefix_cache/")
        assert torch.equal(waiting.result(), expected[0][0])  # layers before the norm
    trainer.update({name: weights[name]})
    trainer.close()
    assert is_model(http, expected[0])


@pytest.mark.parametrize("buffer_bytes", [None, 1000, 2**30])
def test_a_trainer_of_vllm_under_load(
    buffer_bytes: int | None,
    served: LiveServer,
    http: httpx.Client,
    folders: list[Path],
    expected: list[Rows],
) -> None:
    """The trainer is rank 0; its tensors come alone or in buffers."""
    info = {"master_address": "127.0.0.1", "master_port": free_port(), "world_size": 2}
    with ThreadPoolExecutor(1) as threads:
        meeting = threads.submit(trainer_init, info)
        post(http, "/init_weight_transfer_engine", init_info={**info, "rank_offset": 1})
        group = meeting.result()
        with requests_all_the_time(served, expected) as seen:
            for model in (1, 0):
                weights = weights_in(folders[model])
                update = {
                    "names": list(weights),
                    "dtype_names": ["float32"] * len(weights),
                    "shapes": [list(tensor.shape) for tensor in weights.values()],
                    "packed": buffer_bytes is not None,
                }
                if buffer_bytes is not None:
                    update["packed_buffer_size_bytes"] = buffer_bytes
                post(http, "/start_weight_update")
                sending = threads.submit(
                    packed_nccl_broadcast_producer,
                    iter(weights.items()),
                    group,
                    0,
                    lambda item: item[1],
                    buffer_bytes or 0,
                )
                post(http, "/update_weights", update_info=update)
                sending.result()
                post(http, "/finish_weight_update")
                assert is_model(http, expected[model])
        assert seen == {0, 1}


def test_the_names_that_trl_imports(
    http: httpx.Client, folders: list[Path], expected: list[Rows]
) -> None:
    """TRL up to 1.10 imports them; here on a CPU."""
    port = free_port()
    post(http, "/init_communicator/", host="0.0.0.0", port=port, world_size=2)
    group = StatelessProcessGroup.create("127.0.0.1", port, 1, 2)
    communicator = PyNcclCommunicator(group, "cpu")
    for model in (1, 0):
        for name, tensor in weights_in(folders[model]).items():
            form = {"name": name, "dtype": str(tensor.dtype), "shape": list(tensor.shape)}
            post(http, "/update_named_param/", **form)
            communicator.broadcast(tensor, src=1)
            communicator.group.barrier()
        assert is_model(http, expected[model])
    post(http, "/close_communicator/")


# ---- trainers that fail

DYING = """
import os, sys
from datetime import timedelta
import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore
port, shape = int(sys.argv[1]), [int(one) for one in sys.argv[2:]]
print("ready", flush=True)
store = TCPStore("127.0.0.1", port, 2, is_master=False, timeout=timedelta(seconds=20))
group = ProcessGroupGloo(PrefixStore("client2server", store), 1, 2, timedelta(seconds=20))
print("met", flush=True)
sys.stdin.readline()
group.broadcast(torch.ones(shape), 1).wait()
group.barrier().wait()
print("sent", flush=True)
sys.stdin.readline()
"""
NORM = "model.layers.1.input_layernorm.weight"


def test_a_trainer_that_is_killed(
    http: httpx.Client, folders: list[Path], expected: list[Rows]
) -> None:
    """While the server waits for its second tensor: requests are refused until all came again."""
    port = free_port()
    command = [sys.executable, "-c", DYING, str(port), "72"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as trainer:
        assert trainer.stdout.readline() == "ready\n"  # type: ignore[union-attr]
        post(http, "/init_communicator/", host="0.0.0.0", port=port, world_size=2)
        assert trainer.stdout.readline() == "met\n"  # type: ignore[union-attr]
        form = {"name": NORM, "dtype": "torch.float32", "shape": [72]}
        post(http, "/update_named_param/", **form)
        trainer.stdin.write("\n")  # type: ignore[union-attr]
        trainer.stdin.flush()  # type: ignore[union-attr]
        assert trainer.stdout.readline() == "sent\n"  # type: ignore[union-attr]
        post(http, "/update_named_param/", **form | {"name": "model.norm.weight"})
        trainer.kill()
    began = time.monotonic()
    message = refusal(http, "/v1/completions", 503, prompt=IDS[0], **BODY)  # it waited
    assert "weights are mixed, because a transfer failed" in message
    assert "load a whole checkpoint first" in message
    assert time.monotonic() - began < TIMEOUT
    assert http.get("/health").status_code == 200
    assert "transfer of weights failed" in refusal(http, "/update_named_param/", 500, **form)
    update_again(http, folders, expected)


def test_a_trainer_that_stops_between_two_tensors(
    http: httpx.Client, folders: list[Path], expected: list[Rows]
) -> None:
    trainer = Trainer(http)
    trainer.update({NORM: torch.ones(72)})
    began = time.monotonic()
    message = refusal(http, "/v1/completions", 503, prompt=IDS[0], **BODY)
    assert f"weights are mixed, because the trainer sent nothing for {TIMEOUT:g} s" in message
    assert TIMEOUT - 0.5 < time.monotonic() - began < TIMEOUT + 3
    update_again(http, folders, expected)


def update_again(http: httpx.Client, folders: list[Path], expected: list[Rows]) -> None:
    """A new trainer sends all weights; before the last one requests are refused."""
    trainer, weights = Trainer(http), weights_in(folders[0])
    *names, last = weights
    trainer.update({name: weights[name] for name in names})
    post(http, "/reset_prefix_cache/")
    assert "mixed" in refusal(http, "/v1/completions", 503, prompt=IDS[0], **BODY)
    trainer.update({last: weights[last]})
    post(http, "/reset_prefix_cache/")
    assert is_model(http, expected[0])
    trainer.close()


def test_a_trainer_of_vllm_that_dies(http: httpx.Client, expected: list[Rows]) -> None:
    info = {"master_address": "127.0.0.1", "master_port": free_port(), "world_size": 2}
    with ThreadPoolExecutor(1) as threads:
        meeting = threads.submit(trainer_init, info)
        post(http, "/init_weight_transfer_engine", init_info=info)
        group = meeting.result()
    post(http, "/start_weight_update")
    update = {"names": ["model.norm.weight"], "dtype_names": ["float32"], "shapes": [[72]]}
    began = time.monotonic()
    message = refusal(http, "/update_weights", 500, update_info=update)
    assert "transfer of weights failed" in message and time.monotonic() - began < TIMEOUT + 3
    post(http, "/finish_weight_update")
    assert is_model(http, expected[0])  # nothing came, so nothing is mixed
    assert group is not None


def test_a_group_that_is_left_before_it_meets(http: httpx.Client, expected: list[Rows]) -> None:
    """A second call is refused meanwhile, and the first one ends when the group is left."""
    info = {"master_address": "127.0.0.1", "master_port": free_port(), "world_size": 2}
    body = {"init_info": info}
    with ThreadPoolExecutor(2) as threads:
        calls = [
            threads.submit(http.post, "/init_weight_transfer_engine", json=body) for _ in range(2)
        ]
        assert "meeting already" in next(as_completed(calls)).result().text
        post(http, "/close_communicator/")
    answers = sorted((call.result().status_code, call.result().text) for call in calls)
    assert [status for status, _ in answers] == [400, 500]
    assert "left before it met" in answers[1][1]
    assert is_model(http, expected[0])


def test_what_does_not_fit_is_refused(http: httpx.Client, expected: list[Rows]) -> None:
    update = {"names": ["model.norm.weight"], "dtype_names": ["float32"], "shapes": [[72]]}
    assert "no group" in refusal(http, "/update_weights", 400, update_info=update)
    trainer = Trainer(http)
    good = {"name": "model.norm.weight", "dtype": "torch.float32", "shape": [72]}
    for change, message in (
        ({"shape": [63]}, "has the shape (63,); the model's is (72,)"),
        ({"dtype": "torch.int64"}, "is of 'torch.int64': use float32"),
        ({"name": "other", "shape": [2**40, 2**20]}, "is too large"),
        ({"shape": [0]}, "body.shape.0"),
        ({"name": ""}, "body.name"),
    ):
        assert message in refusal(http, "/update_named_param/", 400, **good | change)
    assert "body.params" in refusal(http, "/batch_update_named_params/", 400, params=[])
    assert is_model(http, expected[0])  # no update stayed open
    trainer.close()
    for body, message in (
        ({"world_size": 3}, "world_size=3"),
        ({"port": 0}, "body.port"),
        ({"host": None}, "body.host"),
    ):
        body = {"host": "0.0.0.0", "port": 1234, "world_size": 2} | body
        assert message in refusal(http, "/init_communicator/", 400, **body)
    info = {"master_address": "127.0.0.1", "master_port": free_port(), "world_size": 2}
    for more, status, message in (
        ({"rank_offset": 2}, 400, "rank_offset=2"),
        ({}, 500, "did not meet"),
    ):
        answer = refusal(http, "/init_weight_transfer_engine", status, init_info=info | more)
        assert message in answer
    for update_info in ({}, update | {"shapes": []}, update | {"names": "a"}):
        answer = refusal(http, "/update_weights", 400, update_info=update_info)
        assert "body.update_info" in answer
    assert is_model(http, expected[0])


# ---- the rest


def test_sleep_and_pause(
    served: LiveServer, http: httpx.Client, folders: list[Path], expected: list[Rows]
) -> None:
    assert http.get("/is_sleeping").json() == {"is_sleeping": False}
    for level in (1, 2):
        assert http.post(f"/sleep?level={level}").status_code == 200
        assert http.get("/is_sleeping").json() == {"is_sleeping": True}
        for path, body in (
            ("/v1/completions", {"prompt": IDS[0], **BODY}),
            ("/v1/completions", {"prompt": IDS[0], "hidden_states": {"layers": LAYERS}}),
            ("/v1/embeddings", {"input": IDS}),
        ):
            assert "sleeps" in refusal(http, path, 503, **body)
        assert http.post("/wake_up?tags=weights").status_code == 200
        if level == 2:
            assert http.post("/wake_up?tags=kv_cache").status_code == 200
            assert "discarded" in refusal(http, "/v1/completions", 503, prompt=IDS[0], **BODY)
            post(http, "/collective_rpc", method="reload_weights")
        assert http.post("/wake_up").status_code == 200
        assert http.get("/is_sleeping").json() == {"is_sleeping": False}
        assert is_model(http, expected[0])
    for path in ("/sleep?level=3", "/sleep?level=x", "/pause?mode=drop", "/wake_up?tags=x"):
        error = refusal(http, path, 400)
        assert path.partition("?")[2].partition("=")[0] in error
    assert http.post("/pause?mode=wait").json() == {"status": "paused"}
    assert http.get("/is_paused").json() == {"is_paused": True}
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(rows_of, http, 1)
        time.sleep(0.1)
        assert not waiting.done()
        # An update inside the pause does not end it.
        post(http, "/update_weights", update_info={"path": str(folders[1])})
        time.sleep(0.1)
        assert not waiting.done()
        assert http.post("/resume").json() == {"status": "resumed"}
        assert torch.equal(waiting.result(), expected[1][1])
        assert http.get("/is_paused").json() == {"is_paused": False}
        post(http, "/collective_rpc", method="reload_weights")
        body = {"prompt": IDS[0], "max_tokens": 400, "ignore_eos": True}
        long = threads.submit(post, http, "/v1/completions", **body)
        time.sleep(0.1)
        http.post("/pause")
        assert long.result()["choices"][0]["finish_reason"] == "abort"
        http.post("/resume")
        body["hidden_states"] = {"layers": LAYERS}
        without_rows = threads.submit(refusal, http, "/v1/completions", 503, **body)
        time.sleep(0.1)
        http.post("/pause")
        assert "abort" in without_rows.result()
        http.post("/resume")
    assert http.post("/sleep?mode=keep").status_code == 400
    assert http.get("/is_paused").json() == {"is_paused": False}


def streamed(http: httpx.Client, seen: list[str], **body: Any) -> None:
    """Read a streamed completion, and keep its events."""
    with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        assert answer.status_code == 200
        seen.extend(line[6:] for line in answer.iter_lines() if line.startswith("data: {"))


MANY = [prompt["prompt_token_ids"] for prompt in random_prompts(92, [23, 9, 31] * 200, 250)]


@pytest.mark.parametrize("mode", ["wait", "keep"])
def test_all_vectors_of_a_request_are_of_one_model(
    served: LiveServer, http: httpx.Client, folders: list[Path], mode: str
) -> None:
    """Weights change when some vectors of a request exist, and others do not: all are of the old
    ones. Requests that are kept begin again, so such a reply is an error."""

    def vectors() -> httpx.Response:
        with served.client() as other:
            return other.post("/v1/embeddings", json={"input": MANY, "pooling": "last"})

    engine = served.state.engine

    async def wait_for_the_first() -> None:
        count = engine.output_processor.get_num_unfinished_requests
        while not count():
            await asyncio.sleep(0.001)
        while count() == len(MANY):
            await asyncio.sleep(0)
        if mode == "keep":
            await engine.pause_generation("keep")

    def change(number: int) -> None:
        if number:
            post(http, "/update_weights", update_info={"path": str(folders[1])})
        else:
            post(http, "/collective_rpc", method="reload_weights")

    right = [vectors().json()["data"]]
    change(1)
    right.append(vectors().json()["data"])
    change(0)
    assert right[0] != right[1]
    statuses = list[int]()
    for number in (1, 0):
        with ThreadPoolExecutor(1) as threads:
            asking = threads.submit(vectors)
            asyncio.run_coroutine_threadsafe(wait_for_the_first(), served.loop).result(30)
            change(number)
            if mode == "keep":
                assert http.post("/resume").status_code == 200
            answer = asking.result()
        statuses.append(answer.status_code)
        if answer.status_code == 200:
            data = answer.json()["data"]
            assert data == right[1 - number] or (data == right[number] and mode == "keep")
        else:
            assert answer.status_code == 503 and mode == "keep"
            assert "send it again" in answer.json()["error"]["message"]
    assert mode == "wait" or 503 in statuses
    assert vectors().json()["data"] == right[0]


@pytest.mark.parametrize("clear_cache", ["true", "false"])
def test_a_pause_keeps_streams(http: httpx.Client, folders: list[Path], clear_cache: str) -> None:
    """A client stays connected, and gets what it would have got; with new weights meanwhile, what
    they make of the tokens that were there."""
    body = {"prompt": IDS[0], "max_tokens": 300, "ignore_eos": True, "temperature": 0}
    body |= {"return_token_ids": True}
    right: list[str] = []
    streamed(http, right, **body)
    for changes in (False, True):
        seen: list[str] = []
        with ThreadPoolExecutor(1) as threads:
            stream = threads.submit(streamed, http, seen, **body)
            while len(seen) < 5:
                time.sleep(0.001)
            keep = f"/pause?mode=keep&clear_cache={clear_cache}"
            assert http.post(keep).json() == {"status": "paused"}
            time.sleep(0.1)
            count = len(seen)
            if changes:
                post(http, "/update_weights", update_info={"path": str(folders[1])})
            time.sleep(0.1)
            assert len(seen) == count and not stream.done()
            assert http.post("/resume").json() == {"status": "resumed"}
            stream.result()
        begun, tokens, old = tokens_in(seen[:count]), tokens_in(seen), tokens_in(right)
        assert len(tokens) == len(old) == 300 and begun == old[: len(begun)]
        assert (tokens == old) != changes
        if changes:
            rest = {**body, "prompt": IDS[0] + begun, "max_tokens": 300 - len(begun)}
            (choice,) = post(http, "/v1/completions", **rest)["choices"]
            is_new = choice["token_ids"] == tokens[len(begun) :]
            assert is_new or clear_cache == "false"
    post(http, "/collective_rpc", method="reload_weights")


def tokens_in(events: list[str]) -> list[int]:
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    return [token for choice in choices for token in choice.get("token_ids") or ()]


def test_calls_of_the_worker(http: httpx.Client) -> None:
    found = post(http, "/collective_rpc", method="add", args=[2], kwargs={"b": 5})
    assert found == {"results": ["7"]}
    assert "no method 'subtract'" in refusal(http, "/collective_rpc", 400, method="subtract")
    assert "body.method" in refusal(http, "/collective_rpc", 400, method="_private")
    info = http.get("/server_info?config_format=json").json()["vllm_config"]
    assert info["weight_transfer_config"] == {"backend": "gloo"}
    assert info["model_config"]["dtype"] == "torch.float32"


def test_without_the_options(server: LiveServer) -> None:
    with server.client() as http:
        for path in ("/sleep", "/pause", "/collective_rpc", "/update_weights", "/server_info"):
            assert http.post(path).status_code == 404
        form = {"name": "a", "dtype": "float32", "shape": [1]}
        assert "--weight-transfer-config" in refusal(http, "/update_named_param/", 501, **form)
