"""Only its files outlive a server, however it ended. API keys are tested as well."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import httpx
import pytest

from tests.entrypoints.serve_process import ServeProcess, serve

BODY = {"prompt": [5, 6, 7, 8], "max_tokens": 1}
DOWNLOAD = "--enable-hidden-states-download"


def ask(server: ServeProcess, path: str, key: str | None, **options: object) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    method = "POST" if "json" in options else str(options.pop("method", "GET"))
    with server.client() as client:
        return client.request(method, path, headers=headers, **options)  # type: ignore[arg-type]


def sockets_folder(server: ServeProcess) -> Path:
    folder = Path(server.core().cmdline()[-1])
    assert list(folder.iterdir()), "sockets"
    return folder


@pytest.mark.exhaustive
def test_a_server_after_another(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "from-environment")
    with serve(tiny_llama, tmp_path, DOWNLOAD) as server:
        key = "from-environment"
        assert ask(server, "/v1/models", None).status_code == 401
        assert ask(server, "/v1/models", "wrong").status_code == 401
        urls, paths = [], []
        for _ in range(3):
            answer = ask(server, "/v1/completions", key, json=BODY).json()
            urls.append(httpx.URL(answer["kv_transfer_params"]["hidden_states_url"]).path)
            paths.append(Path(answer["kv_transfer_params"]["hidden_states_path"]))
        core, folder = server.core(), sockets_folder(server)
        server.signal(signal.SIGKILL)
        core.wait(10)
        assert not folder.exists(), "the core took it away"
    content = paths[0].read_bytes()
    os.utime(paths[2], (time.time() - 5000,) * 2)
    stranger = tmp_path / "cmpl-stranger-0-00c0ffee.safetensors"
    stranger.write_bytes(b"x")
    os.utime(stranger, (time.time() - 5000,) * 2)

    flags = [DOWNLOAD, "--hidden-states-ttl", "4000", "--api-key", "first", "second"]
    with serve(tiny_llama, tmp_path, *flags) as server:
        assert ask(server, "/v1/models", "from-environment").status_code == 401
        assert ask(server, "/v1/models", "second").status_code == 200
        assert ask(server, urls[0], "first").content == content
        assert ask(server, urls[1], "first", method="DELETE").status_code == 204
        assert ask(server, f"/v1/hidden_states/{stranger.stem}", "first").status_code == 404
        deadline = time.monotonic() + 20
        while paths[2].exists():
            assert time.monotonic() < deadline, "too old, and still there"
            time.sleep(0.01)
        assert ask(server, urls[2], "first").status_code == 404
        left = {path.name for path in tmp_path.glob("*.safetensors")}
        assert left == {paths[0].name, stranger.name}
        folder = sockets_folder(server)
        server.core().kill()
        assert server.wait(20) == 1
        assert not folder.exists(), "the HTTP process took it away"
