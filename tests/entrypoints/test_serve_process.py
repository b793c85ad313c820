"""A server's life from outside: start, summary, drain, signals, what is left behind."""

from __future__ import annotations

import json
import re
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file

from tests.entrypoints.serve_process import WAIT_SECONDS, ServeProcess, command, serve
from vllm.entrypoints.cli.main import main
from vllm.entrypoints.cli.serve_arguments import parse_serve_arguments
from vllm.entrypoints.openai.cli_args import ServerSettings
from vllm.entrypoints.openai.server import bind, check_certificates, run_server
from vllm.version import PRODUCT, VERSION

PROMPT = [5, 6, 7, 8, 9, 10, 11]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rows")


def complete(server: ServeProcess, max_tokens: int = 1, **fields: Any) -> httpx.Response:
    body = {"prompt": PROMPT, "max_tokens": max_tokens, "ignore_eos": True, **fields}
    with server.client() as client:
        return client.post("/v1/completions", json=body)


def begin(server: ServeProcess, pool: ThreadPoolExecutor, count: int, **fields: Any) -> list[Any]:
    """Requests that are under way when this returns."""
    running = [pool.submit(complete, server, **fields) for _ in range(count)]
    with server.client() as client:
        deadline = time.monotonic() + WAIT_SECONDS
        while client.get("/load").json()["server_load"] < count:
            assert time.monotonic() < deadline
            time.sleep(0.005)
    return running


def hidden_files(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as executor:
        yield executor


def test_the_log_has_one_form(tiny_llama: Path, folder: Path) -> None:
    """The log is of both processes and the HTTP server; probes that went well are not in it."""
    flags = ("--log-format", "json", "--root-path", "/proxy")
    with serve(tiny_llama, folder, *flags) as server:
        with server.client() as client:
            for path in ("/health", "/metrics", "/load?x=1", "/v1/models", "/health?y"):
                assert client.get(path).status_code == 200
            assert client.get("/nowhere").status_code == 404
        server.signal(signal.SIGTERM)
        server.wait()
        entries = [json.loads(line) for line in server.log.splitlines()]
    assert {tuple(entry) for entry in entries} == {("time", "level", "name", "message")}
    names = {entry["name"] for entry in entries}
    assert {"vllm.v1.engine.core", "uvicorn.error", "uvicorn.access"} <= names
    requests = [entry["message"] for entry in entries if entry["name"] == "uvicorn.access"]
    assert [line.split('"')[1] for line in requests] == [
        "GET /proxy/v1/models HTTP/1.1",
        "GET /proxy/nowhere HTTP/1.1",
    ]


def test_a_whole_life(tiny_llama: Path, folder: Path, pool: ThreadPoolExecutor) -> None:
    """Summary, a download, drain: what runs finishes, what comes is turned away, status 0."""
    flags = ["--served-model-name", "tiny", "other", "--enable-hidden-states-download"]
    flags += ["--shutdown-timeout", "60", "--api-server-count", "1", "--renderer-num-workers", "2"]
    stale = folder / f".dead.safetensors.{'0' * 32}.tmp"
    stale.touch()
    (folder / "dead.safetensors.lock").touch()
    with serve(tiny_llama, folder, *flags) as server:
        assert not stale.exists(), "left by a server before this one"
        for line in (
            f"  model       {tiny_llama} (served as tiny, other)",
            "  dtype       float32",
            "  device      cpu",
            "  context     512 tokens per request",
            "  extraction  layers [0, 2, 4] of 0 to 4",
            f"  files       {folder} (also at /v1/hidden_states/{{id}})",
        ):
            assert line in server.log
        with server.client() as client:
            status, metrics = client.get("/").text, client.get("/metrics").text
        hidden_size = json.loads((tiny_llama / "config.json").read_text())["hidden_size"]
        for name, value in (
            ("layers", f"4 of hidden size {hidden_size}"),
            ("dtype", "float32"),
            ("context", "512 tokens per request"),
            ("extraction", "layers [0, 2, 4] of 0 to 4"),
            ("files", f"{folder} (also at /v1/hidden_states/{{id}})"),
        ):
            assert f'<th scope="row">{name}</th><td>{value}</td>' in status
        free = re.search(r"^vllm:hidden_states_disk_free_bytes{.*} (\S+)$", metrics, re.MULTILINE)
        assert free is not None and float(free[1]) > 0
        assert re.search(r"^vllm:hidden_states_kept_files{.*} 0.0$", metrics, re.MULTILINE)
        assert "attention: 4 layers" in server.log
        assert f"{PRODUCT} {VERSION} is ready" in server.log
        assert "vLLM" not in server.log

        choice = complete(server).json()["choices"][0]
        params = choice.get("kv_transfer_params") or complete(server).json()["kv_transfer_params"]
        rows = load_file(params["hidden_states_path"])
        assert rows["token_ids"].tolist() == PROMPT
        fetched = httpx.get(params["hidden_states_url"])
        assert fetched.content == Path(params["hidden_states_path"]).read_bytes()
        assert httpx.delete(params["hidden_states_url"]).status_code == 204
        assert not Path(params["hidden_states_path"]).exists()
        with server.client() as client:
            metrics = client.get("/metrics").text
            assert 'vllm:request_success_total{engine="0",finished_reason="length"' in metrics
            assert client.get("/").headers["content-type"].startswith("text/html")

        running = begin(server, pool, 8, max_tokens=400)
        server.signal(signal.SIGTERM)
        with server.client() as client:
            deadline = time.monotonic() + WAIT_SECONDS
            while client.get("/health").status_code != 200 or "Shutting down" not in server.log:
                assert time.monotonic() < deadline, server.log
                time.sleep(0.005)
        refused = complete(server)
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        for request in running:
            answer = request.result(WAIT_SECONDS)
            assert answer.status_code == 200
            assert answer.json()["usage"]["completion_tokens"] == 400
        assert server.wait() == 0
        assert "Traceback" not in server.log
    assert hidden_files(folder) == []


def test_an_impatient_drain(tiny_llama: Path, folder: Path, pool: ThreadPoolExecutor) -> None:
    """A request that does not finish in time gets an error, and leaves no file."""
    before = {path.name for path in folder.iterdir()}
    with serve(tiny_llama, folder, "--shutdown-timeout", "0.2") as server:
        core = server.core()
        running = begin(server, pool, 4, max_tokens=500)
        server.signal(signal.SIGINT)
        assert server.wait() == 0
        for request in running:
            answer = request.result(WAIT_SECONDS)
            assert answer.status_code in (200, 500, 503)
            if answer.status_code != 200:
                assert answer.json()["error"]["code"] == answer.status_code
        core.wait(20)
        finished = sum(request.result().status_code == 200 for request in running)
    new = [path for path in folder.iterdir() if path.name not in before]
    assert len([path for path in new if path.suffix == ".safetensors"]) == finished
    assert hidden_files(folder) == []


def test_a_second_signal(tiny_llama: Path, folder: Path, pool: ThreadPoolExecutor) -> None:
    with serve(tiny_llama, folder, "--shutdown-timeout", "600") as server:
        core = server.core()
        running = begin(server, pool, 2, max_tokens=500, n=4)
        server.signal(signal.SIGTERM)
        deadline = time.monotonic() + WAIT_SECONDS
        while "Shutting down" not in server.log:
            assert time.monotonic() < deadline, server.log
            time.sleep(0.005)
        server.signal(signal.SIGTERM)
        assert server.wait(10) == 128 + signal.SIGTERM
        core.wait(10)
        for request in running:
            assert isinstance(request.exception(WAIT_SECONDS), httpx.TransportError)
    assert hidden_files(folder) == []


def test_mistakes_at_the_start(
    tiny_llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """In this process, but for the core."""
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(command(tiny_llama, None, "--port", port)[3:]) == 1
    log = "".join(capfd.readouterr())
    assert f"vllm serve: error: port={port} is in use" in log
    assert "weights" not in log, "before anything was loaded"
    layers = "--speculative-config.draft_model_config.hf_config.eagle_aux_hidden_state_layer_ids"
    assert main(command(tiny_llama, tmp_path, "--port", "0", layers, "[2, 99]")[3:]) == 1
    log = "".join(capfd.readouterr())
    assert "holds 99, which this model does not have" in log
    assert "Traceback" not in log


class NeverStarts:
    """A core's process that does not load the model."""

    is_alive = True

    def configure(self, vllm_config: Any) -> None:
        """Take the config."""

    def end(self, grace_seconds: float = 0.0) -> None:
        """End nothing."""


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--chat-template", "{% if x %}"], r"chat_template='{% if x %}': line 1 of the template"),
        (["--chat-template", "FILE"], r"chat_template='.*text': .*can't decode byte 0xff"),
        (["--steering-vectors", "a=/none.pt"], "steering vectors in '/none.pt': No such file"),
        (["--lora-modules", "a=/none"], "started without enable_lora=True"),
        (["--enable-lora", "--lora-modules", "a=/none"], "there is no such folder"),
        (["--enable-lora", "--lora-modules", "a=/", "a=/"], "the name 'a' comes twice"),
        (["--hidden-states-folder", "FILE"], "hidden_states_folder='.*text' cannot be made"),
        (["--served-model-name", "\udcff"], "served_model_name is not valid text"),
        (["--generation-config", "a/b/c"], "generation_config='a/b/c'"),
        (["--hf-overrides", '{"architectures": 5}'], "architectures=5 has to be a list"),
        (
            ["--extract-only-when-asked"],
            "extract_only_when_asked has no effect: this",
        ),
        (["--kv-events-config.hwm", str(2**64)], "hwm=18446744073709551616 is not a positive"),
    ],
)
def test_mistakes_before_the_model_loads(
    flags: list[str],
    message: str,
    tiny_llama: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "text").write_bytes(b"{{\xff}}")
    given = [str(tmp_path / "text") if flag == "FILE" else flag for flag in flags]
    arguments = parse_serve_arguments([str(tiny_llama), "--port", "0", *given])
    core: Any = NeverStarts()
    assert run_server(arguments.engine, arguments.server, core) == 1
    assert re.search(message, capsys.readouterr().err)


def test_addresses(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for host in ("127.0.0.1", None, "0.0.0.0"):
            with pytest.raises(ValueError, match=f"port={port} is in use"):
                bind(ServerSettings(host=host, port=port))
    with pytest.raises(ValueError, match=r"host='no.such.host.invalid', port=0"):
        bind(ServerSettings(host="no.such.host.invalid", port=0))
    with pytest.raises(ValueError, match="host is not valid text"):
        bind(ServerSettings(host="\udcff", port=0))
    bound = bind(ServerSettings(port=0, root_path="/proxy"))
    assert bound.url == f"http://localhost:{bound.socket.getsockname()[1]}/proxy"
    bound.close()
    path = tmp_path / "socket"
    path.touch()
    with pytest.raises(ValueError, match=r"uds=.*in use"):
        bind(ServerSettings(uds=str(path)))
    assert path.exists(), "somebody's file"


def test_unix_socket_with_tls_and_no_extraction(tiny_llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))  # nobody listens: it is replaced
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-keyout", str(key), "-out", str(certificate), "-subj", "/CN=server"),
            *("-addext", "subjectAltName=DNS:server"),
        ],
        check=True,
        capture_output=True,
    )
    flags = ["--uds", str(path), "--ssl-keyfile", str(key), "--ssl-certfile", str(certificate)]
    with serve(tiny_llama, None, *flags) as server:
        assert server.url == f"unix:{path}"
        assert "on request" in server.log.split("extraction")[1].splitlines()[0]
        context = ssl.create_default_context(cafile=str(certificate))
        transport = httpx.HTTPTransport(uds=str(path), verify=context)
        with httpx.Client(transport=transport, base_url="https://server") as client:
            assert client.get("/health").status_code == 200
            answer = client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 2})
            assert answer.json()["usage"]["completion_tokens"] == 2
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
    assert not path.exists()


def test_broken_clients_and_no_orphan(tiny_llama: Path, folder: Path) -> None:
    """Against the real endpoints: always an error in the one form, never a 5xx or a hang.

    In the end the HTTP process is killed, and its core goes with it.
    """
    flags = ["--max-body-bytes", "100000", "--body-timeout", "0.5", "--api-key", "secret"]
    flags += ["--extract-only-when-asked"]
    with serve(tiny_llama, folder, *flags) as server, server.client() as client:
        key = {"authorization": "Bearer secret", "content-type": "application/json"}
        assert client.post("/v1/completions", json={"prompt": PROMPT}).status_code == 401
        assert client.get("/health").status_code == 200
        deep = b'{"prompt": ' + b"[" * 40_000 + b"]" * 40_000 + b"}"
        for content in (b"{", b"\xff\xfe", b'{"prompt": "\xff"}', deep, b"[]", b"nul"):
            answer = client.post("/v1/completions", content=content, headers=key)
            assert 400 <= answer.status_code < 500, content[:20]
            assert answer.json()["error"]["code"] == answer.status_code
        long = json.dumps({"prompt": "x" * 200_000})
        assert client.post("/v1/completions", content=long, headers=key).status_code == 413

        def drip() -> Iterator[bytes]:
            for _ in range(20):
                yield b" "
                threading.Event().wait(0.1)

        answer = client.post("/v1/completions", content=drip(), headers=key)
        assert answer.status_code == 408
        body, before = {"prompt": PROMPT, "max_tokens": 1}, set(folder.iterdir())
        good = client.post("/v1/completions", json=body, headers=key)
        assert good.status_code == 200
        assert good.json()["kv_transfer_params"] is None
        assert set(folder.iterdir()) == before
        asked = client.post("/v1/completions", json=body | {"kv_transfer_params": {}}, headers=key)
        path = asked.json()["kv_transfer_params"]["hidden_states_path"]
        assert Path(path) in set(folder.iterdir()) - before

        core = server.core()
        server.signal(signal.SIGKILL)
        core.wait(10)


def test_files_that_are_no_certificates(tmp_path: Path) -> None:
    """They are noticed before the model loads."""
    (tmp_path / "text").write_text("no certificate")
    settings = ServerSettings(ssl_certfile=str(tmp_path / "text"))
    with pytest.raises(ValueError, match=r"ssl_certfile='.*text', .*use PEM files"):
        check_certificates(settings)
    check_certificates(ServerSettings())
