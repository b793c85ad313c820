"""A server of several HTTP processes: whichever answers, clients see one server."""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from safetensors.torch import load

from tests.engine.harness import random_prompts
from tests.entrypoints.serve_process import WAIT_SECONDS, ServeProcess, serve
from tests.entrypoints.test_hidden_states_field import decoded
from tests.models.adapters import request, write_adapter
from tests.models.checkpoints import make_checkpoint
from vllm import LLM, SamplingParams
from vllm.entrypoints.openai.cli_args import ServerSettings
from vllm.lora.request import LoRARequest

MANY = [prompt["prompt_token_ids"] for prompt in random_prompts(73, [23, 9, 31] * 100, 250)]
IDS = [prompt["prompt_token_ids"] for prompt in random_prompts(72, [9, 40, 17], 250)]
COMPLETIONS = "/v1/completions"
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
LONG: dict[str, Any] = GREEDY | {"prompt": IDS[0], "max_tokens": 400}
ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
FLAGS = ("--api-server-count", "2", "--enable-lora", "--enable-steering-uploads")
FLAGS += ("--enable-hidden-states-download", "--max-total-hidden-states-mib", "1")
FLAGS += ("--max-queued-requests", "4")


@pytest.fixture(scope="module")
def folder(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("several")
    write_adapter(path / "a", tiny_llama, 0)
    return path


@contextmanager
def serve_two(tiny_llama: Path, folder: Path, *flags: str) -> Iterator[ServeProcess]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        rows = ("--hidden-states-folder", str(folder / "rows"))
        with serve(tiny_llama, None, *FLAGS, *rows, *flags) as server:
            yield server


@pytest.fixture(scope="module")
def server(tiny_llama: Path, folder: Path) -> Iterator[ServeProcess]:
    with serve_two(tiny_llama, folder) as running:
        yield running


@pytest.fixture(scope="module")
def llm(tiny_llama: Path) -> Iterator[LLM]:
    options: dict[str, Any] = {"max_model_len": 512, "kv_cache_memory_bytes": 2**24}
    with LLM(str(tiny_llama), enable_lora=True, **options) as one:
        yield one


def http_processes(server: ServeProcess) -> list[psutil.Process]:
    found = psutil.Process(server.process.pid).children()
    module = "vllm.entrypoints.openai.http_process"
    return sorted((one for one in found if module in one.cmdline()), key=lambda one: one.pid)


def num_connections(server: ServeProcess, process: psutil.Process) -> int:
    port = httpx.URL(server.url).port
    return sum(
        1
        for one in process.net_connections()
        if one.laddr.port == port and one.status == "ESTABLISHED"
    )


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextmanager
def two_clients(server: ServeProcess) -> Iterator[tuple[httpx.Client, httpx.Client]]:
    """Clients whose connections are to different processes."""
    wait_until(lambda: [num_connections(server, one) for one in http_processes(server)] == [0, 0])
    with server.client() as one, server.client() as other:
        for client in (one, other):
            assert client.get("/version").status_code == 200
        assert [num_connections(server, process) for process in http_processes(server)] == [1, 1]
        yield one, other


def post(client: httpx.Client, path: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def expected(llm: LLM, ids: list[int], adapter: LoRARequest | None = None) -> list[int]:
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    (output,) = llm.generate({"prompt_token_ids": ids}, params, lora_request=adapter)
    return list(output.outputs[0].token_ids)


def tokens(client: httpx.Client, ids: list[int], **more: Any) -> list[int]:
    found: list[int] = post(client, prompt=ids, max_tokens=6, **GREEDY, **more)["choices"][0][
        "token_ids"
    ]
    return found


def load_of(client: httpx.Client) -> int:
    return int(client.get("/load").json()["server_load"])


def metric(client: httpx.Client, name: str) -> float:
    text = client.get("/metrics").text
    return sum(float(one) for one in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))


def test_values(server: ServeProcess, llm: LLM) -> None:
    """Tokens, rows in the reply and in a file, streams and vectors of both processes are those of
    one engine; a file that one announced is downloaded from and deleted by the other."""
    (sample,) = llm.extract([{"prompt_token_ids": IDS[1]}], layers=[2, 4])
    (vector,) = llm.embed([{"prompt_token_ids": IDS[2]}])
    want = [expected(llm, ids) for ids in IDS]
    with two_clients(server) as clients:
        for client, other in (clients, clients[::-1]):
            assert [tokens(client, ids) for ids in IDS] == want
            wanted = {"layers": [2, 4], "delivery": "inline"}
            answer = post(client, prompt=IDS[1], max_tokens=0, hidden_states=wanted)
            found = answer["choices"][0]["hidden_states"]["tensors"]["hidden_states"]
            assert torch.equal(decoded(found), sample.hidden_states)
            wanted = {"layers": [2, 4], "delivery": "file"}
            answer = post(client, prompt=IDS[1], max_tokens=0, hidden_states=wanted)
            url = answer["choices"][0]["hidden_states"]["hidden_states_url"]
            rows = load(other.get(url).content)["hidden_states"]
            assert torch.equal(rows, sample.hidden_states)
            assert metric(client, "vllm:hidden_states_kept_files") == 1
            assert other.delete(url).status_code == 204
            assert client.get(url).status_code == 404
            answer = post(client, "/v1/embeddings", input=IDS[2])
            assert answer["data"][0]["embedding"] == vector.outputs.embedding
            body = {"prompt": IDS[0], "max_tokens": 6, "stream": True, **GREEDY}
            lines = client.post(COMPLETIONS, json=body).text.splitlines()
            events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
            streamed = [
                t for one in events for choice in one["choices"] for t in choice["token_ids"]
            ]
            assert streamed == want[0]


def test_adapters_and_vectors_are_known_at_once(
    server: ServeProcess, llm: LLM, folder: Path
) -> None:
    want = expected(llm, IDS[0], request(folder / "a", 1))
    assert want != expected(llm, IDS[0])
    data = base64.b64encode(torch.full((72,), 3.0).numpy().tobytes()).decode()
    named = {"name": "calm", "vectors": {"data": data, "shape": [72]}, "layers": 2}
    with two_clients(server) as clients:
        for client, other in (clients, clients[::-1]):
            body = {"lora_name": "a", "lora_path": str(folder / "a")}
            assert client.post("/v1/load_lora_adapter", json=body).status_code == 200
            assert tokens(other, IDS[0], model="a") == tokens(client, IDS[0], model="a") == want
            assert [one["id"] for one in other.get("/v1/models").json()["data"]][-1] == "a"
            assert other.post("/v1/unload_lora_adapter", json={"lora_name": "a"}).status_code == 200
            assert client.post(COMPLETIONS, json={"prompt": [5], "model": "a"}).status_code == 404
            post(client, "/v1/steering_vectors", **named)
            steered = tokens(other, IDS[0], steering="calm")
            assert steered == tokens(client, IDS[0], steering={"name": "calm"})
            assert steered != expected(llm, IDS[0])
            assert other.delete("/v1/steering_vectors/calm").status_code == 200
            assert (
                client.post(COMPLETIONS, json={"prompt": [5], "steering": "calm"}).status_code
                == 404
            )


def test_counts_are_sums(server: ServeProcess) -> None:
    ended, steps = "vllm:e2e_request_latency_seconds_count", "vllm:num_engine_steps_total"
    errors = "vllm:http_errors_total"
    with two_clients(server) as (one, other):
        before = {name: metric(one, name) for name in (ended, steps, errors)}
        for client in (one, other, other):
            tokens(client, IDS[0])
        assert other.post(COMPLETIONS, json={"prompt": 1.5}).status_code == 400
        for client in (one, other):
            assert metric(client, ended) == before[ended] + 3
            assert metric(client, steps) > before[steps]
            assert metric(client, errors) == before[errors] + 1


def test_pauses_and_sleep_reach_all(server: ServeProcess, llm: LLM) -> None:
    """Requests of both processes are aborted, kept, or completed; new ones wait in both."""
    with (
        two_clients(server) as (one, other),
        ThreadPoolExecutor(4) as pool,
        server.client() as more,
    ):

        def begin(**body: Any) -> list[Future[dict[str, Any]]]:
            found = [pool.submit(post, client, **body) for client in (one, other)]
            wait_until(lambda: load_of(more) == 2)
            return found

        running = begin(**LONG)
        wait_until(lambda: metric(more, "vllm:num_requests_running") == 2)
        assert more.post("/pause").json() == {"status": "paused"}
        for answer in running:
            assert answer.result()["choices"][0]["finish_reason"] == "abort"
        assert one.get("/is_paused").json() == other.get("/is_paused").json() == {"is_paused": True}
        waiting = begin(prompt=IDS[0], max_tokens=6, **GREEDY)
        time.sleep(0.3)
        assert not any(answer.done() for answer in waiting)
        assert more.post("/resume").status_code == 200
        want = expected(llm, IDS[0])
        assert [one.result()["choices"][0]["token_ids"] for one in waiting] == [want, want]
        running = begin(**LONG)
        assert more.post("/pause?mode=keep&clear_cache=false").status_code == 200
        time.sleep(0.3)
        assert not any(answer.done() for answer in running)
        assert more.post("/resume").status_code == 200
        assert {len(a.result()["choices"][0]["token_ids"]) for a in running} == {400}
        assert more.post("/sleep?level=1").status_code == 200
        assert other.get("/is_sleeping").json() == {"is_sleeping": True}
        assert one.post(COMPLETIONS, json={"prompt": [5]}).status_code == 503
        assert other.post("/wake_up").status_code == 200
        assert tokens(one, IDS[0]) == want


def test_limits_are_of_all_processes(server: ServeProcess) -> None:
    """--max-queued-requests, and --max-total-hidden-states-mib, are sums."""
    with two_clients(server) as (one, other), ThreadPoolExecutor(8) as pool:
        clients = [server.client() for _ in range(4)]
        assert one.post("/pause").status_code == 200
        running = [pool.submit(post, client, **LONG | {"max_tokens": 2}) for client in clients]
        wait_until(lambda: load_of(one) == 4)
        for client in (one, other):
            assert client.post(COMPLETIONS, json={"prompt": [5]}).status_code == 429
        assert one.post("/resume").status_code == 200
        for answer in running:
            answer.result()
        # Each of these may take all of the memory, so they run one after another.
        wanted = {"layers": [0, 1, 2, 3, 4], "delivery": "safetensors"}
        ids = IDS[1] * 12
        assert one.post("/pause").status_code == 200
        body = {"prompt": ids, "max_tokens": 0, "hidden_states": wanted}
        running = [pool.submit(client.post, COMPLETIONS, json=body) for client in clients[:2]]
        wait_until(lambda: load_of(one) == 2)
        time.sleep(0.3)
        assert one.post("/resume").status_code == 200
        assert len({answer.result().content for answer in running}) == 1
        for client in clients:
            client.close()


def test_a_client_that_leaves(server: ServeProcess) -> None:
    """Its request is aborted, whether it waits for the end of a pause or runs."""
    ended, running = "vllm:request_success_total", "vllm:num_requests_running"
    with two_clients(server) as clients, server.client() as more:
        before = metric(more, ended)
        assert more.post("/pause").status_code == 200
        with pytest.raises(httpx.ReadTimeout):
            clients[0].post(COMPLETIONS, json=LONG, timeout=0.3)
        wait_until(lambda: load_of(more) == 0)
        assert more.post("/resume").status_code == 200
        wait_until(lambda: metric(more, running) == 0)  # LONG would run on for long
        body = LONG | {"n": 32, "stream": True, "temperature": 1}
        for client in clients:
            with client.stream("POST", COMPLETIONS, json=body) as reply:
                assert reply.status_code == 200
                next(reply.iter_lines())
                assert more.post("/pause?mode=keep&clear_cache=false").status_code == 200
            wait_until(lambda: load_of(more) == 0)
            assert more.post("/resume").status_code == 200
        wait_until(lambda: metric(more, running) == 0)
        wait_until(lambda: metric(more, ended) == before + 1 + 2 * 32)


@pytest.mark.exhaustive
def test_a_killed_process(server: ServeProcess, llm: LLM) -> None:
    """Its requests are aborted in the engine; another takes its place, with what was loaded."""
    data = base64.b64encode(torch.full((72,), 3.0).numpy().tobytes()).decode()
    named = {"name": "calm", "vectors": {"data": data, "shape": [72]}, "layers": 2}
    with (
        two_clients(server) as (one, other),
        ThreadPoolExecutor(4) as pool,
        server.client() as more,
    ):
        post(more, "/v1/steering_vectors", **named)
        steered = tokens(one, IDS[0], steering="calm")
        counted = metric(more, "vllm:e2e_request_latency_seconds_count")
        running = [pool.submit(post, client, **LONG) for client in (one, other)]
        wait_until(lambda: load_of(more) == 2)
        port = httpx.URL(server.url).port
        victim, survivor = sorted(
            http_processes(server),
            key=lambda process: sum(1 for c in process.net_connections() if c.laddr.port == port),
        )
        victim.send_signal(signal.SIGKILL)
        ends = [answer.exception() for answer in running]
        assert sorted(end is None for end in ends) == [False, True]
    line = f"(process {victim.pid}) ended with status -9; its requests are aborted"
    wait_until(lambda: line in server.log)
    wait_until(lambda: len(http_processes(server)) == 2)
    with server.client() as client:
        wait_until(lambda: load_of(client) == 0)
        wait_until(lambda: metric(client, "vllm:num_requests_running") == 0)
        assert survivor.is_running()

    def are_ready() -> bool:
        with server.client() as first, server.client() as second:
            first.get("/version"), second.get("/version")
            return [num_connections(server, one) for one in http_processes(server)] == [1, 1]

    wait_until(are_ready)
    with two_clients(server) as clients:
        for client in clients:
            assert tokens(client, IDS[0], steering="calm") == steered
            assert tokens(client, IDS[1]) == expected(llm, IDS[1])
            assert metric(client, "vllm:e2e_request_latency_seconds_count") >= counted
        assert clients[0].delete("/v1/steering_vectors/calm").status_code == 200


def temporary_folders() -> set[str]:
    path = os.environ.get("TMPDIR", "/tmp")
    return {name for name in os.listdir(path) if name.startswith(("vllm-http-", "vllm-server-"))}


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_end(tiny_llama: Path, folder: Path, number: int) -> None:
    """SIGTERM lets requests of both processes finish; no process is left, however the end comes."""
    before = temporary_folders()
    with serve_two(tiny_llama, folder) as server, ThreadPoolExecutor(2) as pool:
        processes = psutil.Process(server.process.pid).children(recursive=True)
        with two_clients(server) as clients:
            running = [pool.submit(post, client, **LONG) for client in clients]
            with server.client() as more:
                wait_until(lambda: load_of(more) == 2)
            server.signal(number)
            if number == signal.SIGTERM:
                wait_until(lambda: "Shutting down" in server.log)
                with server.client() as more:
                    assert more.post(COMPLETIONS, json={"prompt": [5]}).status_code == 503
                for answer in running:
                    assert len(answer.result()["choices"][0]["token_ids"]) == 400
            else:
                assert all(answer.exception() is not None for answer in running)
        assert server.wait() == (0 if number == signal.SIGTERM else -number)
        assert not psutil.wait_procs(processes, timeout=WAIT_SECONDS)[1]
        assert "Traceback" not in server.log, server.log
    if number == signal.SIGTERM:
        assert temporary_folders() <= before


@pytest.mark.exhaustive
def test_requests_that_take_too_long(tiny_llama: Path, folder: Path) -> None:
    """After --shutdown-timeout those that run and those that wait get an error."""
    server_of_two = serve_two(tiny_llama, folder, "--shutdown-timeout", "0.2")
    with server_of_two as server, ThreadPoolExecutor(2) as pool:
        with two_clients(server) as clients, server.client() as more:
            assert more.post("/pause").status_code == 200
            running = [pool.submit(one.post, COMPLETIONS, json=LONG) for one in clients]
            wait_until(lambda: load_of(more) == 2)
            server.signal(signal.SIGTERM)
            for answer in running:
                assert answer.result().status_code == 500, answer.result().text
        assert server.wait() == 0


@pytest.mark.exhaustive
def test_several_engines(tiny_llama: Path, folder: Path, llm: LLM) -> None:
    """Engines are chosen for requests of all processes together; pauses reach all."""
    want = [expected(llm, ids) for ids in IDS]
    server_of_two, pool = serve_two(tiny_llama, folder, "-dp", "2"), ThreadPoolExecutor(4)
    with server_of_two as server, pool, two_clients(server) as clients, server.client() as more:
        for client in clients:
            assert [tokens(client, ids) for ids in IDS] == want
        running = [pool.submit(post, client, **LONG) for client in clients]
        wait_until(lambda: load_of(more) == 2)
        assert more.post("/pause").status_code == 200
        ends = [answer.result()["choices"][0]["finish_reason"] for answer in running]
        assert ends == ["abort", "abort"]
        assert more.post("/resume").status_code == 200
        assert tokens(clients[1], IDS[2]) == want[2]


@pytest.mark.exhaustive
def test_files_of_a_connector(tiny_llama: Path, folder: Path, tmp_path: Path) -> None:
    """A file that the engine wrote for one process is downloaded from the other."""
    flags = (*FLAGS[:2], "--enable-hidden-states-download", "--hidden-states-ttl", "1000")
    with serve(tiny_llama, tmp_path, *flags) as server, two_clients(server) as clients:
        for client, other in (clients, clients[::-1]):
            answer = post(client, prompt=IDS[0], max_tokens=1)
            params = answer.get("kv_transfer_params") or answer["choices"][0]["kv_transfer_params"]
            content = Path(params["hidden_states_path"]).read_bytes()
            assert load(content)["token_ids"].tolist() == IDS[0]
            assert other.get(params["hidden_states_url"]).content == content
            assert other.delete(params["hidden_states_url"]).status_code == 204
            assert client.get(params["hidden_states_url"]).status_code == 404
            assert not Path(params["hidden_states_path"]).exists()


@pytest.mark.exhaustive
def test_the_end_of_the_engine(tiny_llama: Path, folder: Path) -> None:
    """Waiting requests of both processes get an error, and the server ends with status 1."""
    with serve_two(tiny_llama, folder) as server, ThreadPoolExecutor(2) as pool:
        with two_clients(server) as clients:
            bodies = [pool.submit(one.post, COMPLETIONS, json=LONG) for one in clients]
            with server.client() as more:
                wait_until(lambda: load_of(more) == 2)
                server.core().kill()
                for answer in bodies:
                    assert answer.result().status_code == 500, answer.result().text
                    assert "the engine is gone" in answer.result().text
        assert server.wait() == 1


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"mooncake_store": {}}, "api_server_count=2 with mooncake_store"),
        ({"headless": True}, "api_server_count=2 with headless"),
    ],
)
def test_what_cannot_be_shared(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        ServerSettings(api_server_count=2, **options)


@pytest.mark.exhaustive
@pytest.mark.parametrize("mode", ["wait", "keep"])
def test_a_request_is_of_one_model(tiny_llama: Path, folder: Path, mode: str) -> None:
    """Vectors and choices of one request are of the same weights in every process."""
    second = make_checkpoint(folder / f"second {mode}", "llama", seed=77)
    seeded = {"temperature": 0.9, "seed": 5, "ignore_eos": True, "return_token_ids": True}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/embeddings", {"input": MANY, "pooling": "last"}),
        (COMPLETIONS, seeded | {"prompt": MANY[:90], "max_tokens": 3, "n": 2}),
    ]
    bodies = bodies[: 1 if mode == "keep" else 2]  # tokens that clients have stay

    def values(client: httpx.Client, path: str, body: dict[str, Any]) -> Any:
        answer = client.post(path, json=body)
        if answer.status_code == 503 and mode == "keep":
            return None
        assert answer.status_code == 200, answer.text
        entries = answer.json()["data" if path != COMPLETIONS else "choices"]
        return [entry.get("embedding") or entry["token_ids"] for entry in entries]

    def change(client: httpx.Client, number: int) -> None:
        if mode == "keep":
            assert client.post("/pause?mode=keep").status_code == 200
        if number:
            post(client, "/update_weights", update_info={"path": str(second)})
        else:
            post(client, "/collective_rpc", method="reload_weights")
        if mode == "keep":
            assert client.post("/resume").status_code == 200

    flags = ("--weight-folders", str(folder), "--max-queued-requests", "100")
    with serve_two(tiny_llama, folder, *flags) as server, two_clients(server) as clients:
        right = []
        for number in (0, 1):
            change(clients[0], number)
            right.append([values(clients[1], *body) for body in bodies])
        assert right[0] != right[1]
        with server.client() as trainer, ThreadPoolExecutor(2) as threads:
            for number in (0, 1) * 8:
                asked = [
                    (index, threads.submit(values, client, *bodies[index]))
                    for index in range(len(bodies))
                    for client in clients
                ]
                time.sleep(0.05)
                change(trainer, number)
                for index, one in asked:
                    assert one.result() in (None, right[0][index], right[1][index])
