"""Files over HTTP: ranges, checksums, removal; nothing else is reachable; room is kept."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from fastapi import FastAPI, Request
from safetensors import safe_open
from safetensors.torch import save_file

from tests.entrypoints.gate_harness import Gate, GateState, error_of, gate, wait_until
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states_options import HiddenStatesOptions
from vllm.entrypoints.openai import downloads as download_routes
from vllm.entrypoints.openai import hidden_states_store
from vllm.entrypoints.openai.cli_args import ServerSettings
from vllm.entrypoints.openai.downloads import router
from vllm.entrypoints.openai.errors import EXCEPTION_HANDLERS
from vllm.entrypoints.openai.hidden_states_store import HiddenStatesStore, QuotaExceededError
from vllm.v1.rows.file import write_hidden_states
from vllm.v1.rows.lock import remove_leftovers

GIB = 1 << 30


def damages(path: Path) -> Iterator[str]:
    """Each done to the file in turn."""
    whole = path.read_bytes()
    for what, content in (
        ("cut off", whole[:-8]),
        ("nothing left", b""),
        ("only the start of the header", whole[:6]),
        ("a bit of a row", whole[:-70] + bytes([whole[-70] ^ 1]) + whole[-69:]),
        ("a bit of the header", whole[:30] + bytes([whole[30] ^ 1]) + whole[31:]),
        ("longer", whole + b"x"),
    ):
        path.write_bytes(content)
        yield what
    path.write_bytes(whole)


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def make_store(folder: Path, clock: Callable[[], float] | None = None, **options: Any) -> Any:
    options = {"enable_hidden_states_download": True, **options}
    storage = HiddenStatesOptions(shared_storage_path=str(folder))
    return HiddenStatesStore(storage, ServerSettings(**options), clock or Clock())


@pytest.mark.parametrize(
    "options",
    [
        {"enable_hidden_states_download": True},
        {"hidden_states_ttl": 5.0},
        {"hidden_states_quota_gib": 1.0},
    ],
)
def test_without_files_there_is_nothing_to_keep(options: dict[str, Any]) -> None:
    assert HiddenStatesStore.from_config(VllmConfig(), ServerSettings()) is None
    with pytest.raises(ValueError, match=f"{next(iter(options))} has no effect: "):
        HiddenStatesStore.from_config(VllmConfig(), ServerSettings(**options))


def make_file(folder: Path, name: str = "cmpl-0", num_rows: int = 7) -> Path:
    path = folder / f"{name}.safetensors"
    rows = torch.arange(num_rows * 2 * 8, dtype=torch.float32).reshape(num_rows, 2, 8)
    ids = torch.arange(num_rows)
    write_hidden_states(str(path), {"hidden_states": rows, "token_ids": ids}, {})
    (folder / f"{path.name}.lock").touch()
    return path


@contextmanager
def downloads(store: HiddenStatesStore | None, **options: Any) -> Iterator[Gate]:
    state = GateState(ServerSettings(**options), store=store)

    def make(state: GateState) -> FastAPI:
        app = FastAPI(exception_handlers=EXCEPTION_HANDLERS)
        app.state.server = state
        app.include_router(router)

        @app.get("/url")
        async def url(request: Request, path: str) -> Any:
            return state.store.url_for(request, path)

        return app

    with gate(make, state, **options) as server:
        yield server


def test_a_file_over_http(tmp_path: Path) -> None:
    path = make_file(tmp_path, num_rows=40_000)  # several chunks
    content = path.read_bytes()
    with safe_open(path, "pt") as file:
        checksum = file.metadata()["checksum.hidden_states"].partition(":")[2]
    with downloads(make_store(tmp_path), root_path="/proxy") as server:
        url = httpx.get(f"{server.url}/url", params={"path": str(path)}).json()
        assert url == f"{server.url}/proxy/v1/hidden_states/cmpl-0"
        assert httpx.get(url).content == content
        url = url.replace("/proxy", "")  # what a proxy passes on that takes its path away
        whole = httpx.get(url)
        assert (whole.status_code, whole.content) == (200, content)
        etag = whole.headers["etag"]
        assert checksum in etag
        assert whole.headers["accept-ranges"] == "bytes"
        assert whole.headers["content-disposition"].endswith('filename="cmpl-0.safetensors"')

        head = httpx.head(url)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-length"] == str(len(content))
        assert head.headers["etag"] == etag

        for asked, start, end in (
            ("bytes=0-7", 0, 8),
            ("bytes=100-", 100, len(content)),
            ("bytes=-5", len(content) - 5, len(content)),
            ("bytes=3-99999999999", 3, len(content)),
            (f"bytes=-{10**12}", 0, len(content)),
        ):
            part = httpx.get(url, headers={"range": asked})
            assert (part.status_code, part.content) == (206, content[start:end]), asked
            expected = f"bytes {start}-{end - 1}/{len(content)}"
            assert part.headers["content-range"] == expected
        for ignored in ("bytes=5-3", "bytes=1-2,5-6", "rows=1-2", "bytes=-"):
            assert httpx.get(url, headers={"range": ignored}).status_code == 200
        for outside in (f"bytes={len(content)}-", "bytes=-0", "bytes=-00"):
            for condition in ({}, {"if-range": whole.headers["last-modified"]}):
                refused = httpx.get(url, headers={"range": outside, **condition})
                assert error_of(refused.content)["code"] == 416

        assert httpx.get(url, headers={"if-none-match": etag}).status_code == 304
        assert httpx.get(url, headers={"if-none-match": f'"x", W/{etag}'}).content == b""
        assert httpx.get(url, headers={"if-none-match": '"x"'}).status_code == 200
        resumed = {"range": "bytes=8-", "if-range": etag}
        assert httpx.get(url, headers=resumed).status_code == 206
        resumed["if-range"] = whole.headers["last-modified"]
        assert httpx.get(url, headers=resumed).status_code == 206
        assert httpx.get(url, headers={**resumed, "if-range": '"old"'}).content == content

        assert httpx.delete(url).status_code == 204
        assert list(tmp_path.iterdir()) == [], "the lock is gone too"
        assert error_of(httpx.get(url).content)["code"] == 404
        assert httpx.delete(url).status_code == 404


def test_only_files_of_this_server(tmp_path: Path) -> None:
    folder = tmp_path / "storage"
    folder.mkdir()
    secret = make_file(tmp_path, "secret")
    stranger = make_file(folder, "stranger")
    link = folder / "link.safetensors"
    link.symlink_to(secret)
    store = make_store(folder)
    known = make_file(folder, "known")
    assert store.add(str(known)) == "known"
    assert store.add(str(secret)) is None, "outside"
    assert store.add(f"{folder}/../secret.safetensors") is None
    assert store.add(f"{folder}/{'x' * 300}.safetensors") is None
    assert store.add(f"{folder}/.hidden.safetensors") is None
    assert store.add(f"{folder}/known.safetensors.lock") is None
    store.add(str(link))
    with downloads(store) as server:
        base = f"{server.url}/v1/hidden_states/"
        assert httpx.get(base + "known").status_code == 200
        escapes = ["../secret", "..", "/etc/passwd", f"{stranger}", "known.safetensors", "a\0b"]
        for name in (*escapes, "stranger", "link", ".", "%", "é", "x" * 5000):
            asked = base + urllib.parse.quote(name, safe="")
            assert httpx.get(asked).status_code == 404, name
            raw = f"GET /v1/hidden_states/{name} HTTP/1.1\r\nhost: x\r\n\r\n".encode()
            assert server.exchange(raw)[0] in (400, 404), name
            if name != "link":
                assert httpx.delete(asked).status_code in (404, 405), name
        assert httpx.delete(base + "link").status_code == 204, "the link, not what it points to"
        known.unlink()
        known.symlink_to(secret)
        assert httpx.get(base + "known").status_code == 404
    assert secret.exists() and stranger.exists()


def test_switched_off(tmp_path: Path) -> None:
    path = make_file(tmp_path)
    store = make_store(tmp_path, enable_hidden_states_download=False, hidden_states_ttl=5)
    with downloads(store) as server:
        assert httpx.get(f"{server.url}/url", params={"path": str(path)}).json() is None
        answer = httpx.get(f"{server.url}/v1/hidden_states/cmpl-0")
        assert "--enable-hidden-states-download" in error_of(answer.content)["message"]
        assert httpx.delete(f"{server.url}/v1/hidden_states/cmpl-0").status_code == 404
    with downloads(None) as server:
        assert httpx.get(f"{server.url}/v1/hidden_states/cmpl-0").status_code == 404
    assert path.exists()


def test_age(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    store = make_store(tmp_path, clock, hidden_states_ttl=100)
    old, fetched, reading, moved = (make_file(tmp_path, name) for name in "abcd")
    for path in (old, fetched, reading, moved):
        store.add(str(path))
    clock.now += 60
    young = make_file(tmp_path, "young")
    store.add(str(young))
    with store.reading("b"):
        pass
    moved.unlink()
    clock.now += 60
    with store.reading("c"):
        store.sweep()
        assert reading.exists(), "somebody reads it"
    assert not old.exists() and not (tmp_path / "a.safetensors.lock").exists()
    assert fetched.exists() and young.exists()
    assert store.num_files == 3
    store.add(str(make_file(tmp_path, "taken")))
    (tmp_path / "taken.safetensors").unlink()

    async def watch() -> None:
        task = asyncio.create_task(store.sweep_forever())
        while store.num_files != 3:
            await asyncio.sleep(0.001)
        task.cancel()

    monkeypatch.setattr(hidden_states_store, "SWEEP_SECONDS", 0.01)
    asyncio.run(asyncio.wait_for(watch(), 20))
    clock.now += 101
    store.sweep()
    assert store.num_files == 0
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["d.safetensors.lock", "taken.safetensors.lock"], "the client's"


def test_quota(tmp_path: Path) -> None:
    clock = Clock()
    paths = [make_file(tmp_path, str(number)) for number in range(4)]
    size = paths[0].stat().st_size
    store = make_store(tmp_path, clock, hidden_states_quota_gib=3 * size / GIB)
    for path in paths[:2]:
        store.add(str(path))
        clock.now += 1
        store.check_quota()
    store.add(str(paths[2]))
    store.add(str(paths[3]))
    with pytest.raises(QuotaExceededError, match=r"take .*KiB, and its quota is .*KiB") as refused:
        store.check_quota()
    assert refused.value.status == 507
    assert all(path.exists() for path in paths), "too young to be removed"

    paths[3].unlink()  # a client took one: room again, noticed a moment later
    paths[2].unlink()
    clock.now += 2
    store.check_quota()

    store.add(str(make_file(tmp_path, "4")))
    clock.now += 59  # the first two are more than a minute old now
    with store.reading("0"):
        store.check_quota()
        assert paths[0].exists() and not paths[1].exists(), "the oldest that nobody reads"
    store.check_quota()
    assert store.num_files == 2


@pytest.mark.parametrize("name", ["sub/deep/a.safetensors", "rows", "a b.safetensors"])
def test_files_that_clients_named_count_too(tmp_path: Path, name: str) -> None:
    """They have an age and a size, though no download: neither quota nor age is got round."""
    clock = Clock()
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    make_file(path.parent, "made").rename(path)
    quota = path.stat().st_size / GIB
    store = make_store(tmp_path, clock, hidden_states_quota_gib=quota, hidden_states_ttl=100)
    with downloads(store) as server:
        assert httpx.get(f"{server.url}/url", params={"path": str(path)}).json() is None
        for spelling in (name, name.replace("/", "%2F"), f".%2F{name}", f"./{name}"):
            reply = httpx.get(f"{server.url}/v1/hidden_states/{spelling}")
            assert reply.status_code == 404
    with pytest.raises(QuotaExceededError):
        store.check_quota()
    outside = tmp_path.parent / f"{tmp_path.name}-beside"
    outside.mkdir()
    assert store.add(str(make_file(outside))) is None and store.num_files == 1
    clock.now += 101
    store.sweep()
    assert store.num_files == 0 and not path.exists()
    store.check_quota()


def test_a_download_holds_its_file(tmp_path: Path) -> None:
    path = make_file(tmp_path, num_rows=400_000)
    clock = Clock()
    store = make_store(tmp_path, clock, hidden_states_ttl=5)
    store.add(str(path))
    with downloads(store) as server, server.connect() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(b"GET /v1/hidden_states/cmpl-0 HTTP/1.1\r\nhost: x\r\n\r\n")
        assert wait_until(lambda: store.find("cmpl-0").num_readers == 1)
        clock.now += 50
        store.sweep()
        assert path.exists()
        connection.close()  # half-way
        assert wait_until(lambda: store.find("cmpl-0").num_readers == 0)
        clock.now += 50
        store.sweep()
        assert not path.exists()


def test_a_check_holds_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, begun, go_on = Clock(), threading.Event(), threading.Event()
    store = make_store(tmp_path, clock, hidden_states_ttl=5)
    path = make_file(tmp_path)
    store.add(str(path))

    def check(*_: object) -> None:
        begun.set()
        assert go_on.wait(20)

    monkeypatch.setattr(download_routes, "check_content", check)
    answers: list[httpx.Response] = []
    with downloads(store) as server:
        url = f"{server.url}/v1/hidden_states/cmpl-0"
        thread = threading.Thread(target=lambda: answers.append(httpx.get(url)))
        thread.start()
        assert begun.wait(20)
        clock.now += 50
        store.sweep()
        assert path.exists(), "a client waits for it"
        go_on.set()
        thread.join(20)
        assert [answer.status_code for answer in answers] == [200]


@pytest.mark.parametrize("becomes", ["nothing", "another file", "a pipe"])
@pytest.mark.parametrize("headers", [{}, {"range": "bytes=8-20"}])
def test_a_file_that_a_client_takes_after_its_check(
    becomes: str, headers: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer is an error, and no connection that breaks off."""
    store = make_store(tmp_path)
    path = make_file(tmp_path)
    store.add(str(path))
    make_etag = download_routes._etag

    def etag(*arguments: Any) -> str:
        found = make_etag(*arguments)
        whole = path.read_bytes()
        path.unlink()
        if becomes == "another file":
            path.write_bytes(whole[::-1])
        elif becomes == "a pipe":
            os.mkfifo(path)
        return found

    monkeypatch.setattr(download_routes, "_etag", etag)
    with downloads(store) as server:
        answer = httpx.get(f"{server.url}/v1/hidden_states/cmpl-0", headers=headers, timeout=5.0)
    assert answer.status_code == 404
    assert "The file is gone" in answer.text
    assert store.find("cmpl-0").num_readers == 0


def test_a_reader_that_stalls_holds_nothing_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it reads its file is kept, whatever the quota; given up on, it makes room."""
    monkeypatch.setattr(download_routes, "STALLED_SECONDS", 0.5)
    path, clock = make_file(tmp_path, num_rows=400_000), Clock()
    store = make_store(tmp_path, clock, hidden_states_ttl=5, hidden_states_quota_gib=1e-3)
    store.add(str(path))
    with downloads(store) as server, server.connect() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(b"GET /v1/hidden_states/cmpl-0 HTTP/1.1\r\nhost: x\r\n\r\n")
        assert connection.recv(1)  # the file is on its way
        clock.now += 100
        with pytest.raises(QuotaExceededError):
            store.check_quota()
        store.sweep()
        assert path.exists()
        assert wait_until(lambda: store.find("cmpl-0").num_readers == 0)
        httpx.get(server.url)  # by then the loop's thread has done with the store
        clock.now += 100
        store.check_quota()
        assert not path.exists()


def test_many_at_once_leave_no_descriptor(tmp_path: Path) -> None:
    path = make_file(tmp_path, num_rows=20_000)
    content = path.read_bytes()
    store = make_store(tmp_path)
    store.add(str(path))

    def descriptors() -> int:
        names = (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))
        return sum(os.path.lexists(name) and os.readlink(name) == str(path) for name in names)

    with downloads(store) as server:
        results: list[bytes] = []

        def fetch() -> None:
            results.append(httpx.get(f"{server.url}/v1/hidden_states/cmpl-0", timeout=20).content)

        threads = [threading.Thread(target=fetch) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == [content] * 8
        assert wait_until(lambda: descriptors() == 0)


EARLIER = (
    "cmpl-0123456789abcdef-0-00c0ffee",
    "1_chatcmpl-mine-12345678",
    "cmpl-x-0123456789abcdef",
)


def test_files_of_an_earlier_server(tmp_path: Path) -> None:
    """They are served, removed by age and counted for the quota; nobody else's are."""
    folder = tmp_path / "storage"
    (folder / "inner").mkdir(parents=True)
    earlier = [make_file(folder, name) for name in EARLIER]
    for number, path in enumerate(earlier):
        os.utime(path, (time.time() - 1000 + number, time.time() - 1000 + number))
    other_names = [make_file(folder, name) for name in ("cmpl", "12-00c0ffee", "cmpl-0-z0c0ffee")]
    deeper = make_file(folder / "inner", EARLIER[0])
    outside = make_file(tmp_path, "cmpl-outside-0-00c0ffee")
    link = folder / outside.name
    link.symlink_to(outside)
    not_ours = folder / "cmpl-foreign-0-00c0ffee.safetensors"
    save_file({"hidden_states": torch.ones(2, 1, 4), "token_ids": torch.arange(2)}, not_ours)
    cut_off = make_file(folder, "cmpl-cut-0-00c0ffee")
    cut_off.write_bytes(cut_off.read_bytes()[:-1])
    (folder / "cmpl-empty-0-00c0ffee.safetensors").touch()

    store = make_store(folder, hidden_states_ttl=999)
    asyncio.run(store.adopt_earlier_files())
    assert [Path(store.find(name).path) for name in EARLIER] == earlier
    assert store.num_files == 3
    with downloads(store) as server:
        base = f"{server.url}/v1/hidden_states/"
        assert httpx.get(base + EARLIER[1]).content == earlier[1].read_bytes()
        assert httpx.delete(base + EARLIER[2]).status_code == 204
        for path in (*other_names, link, not_ours, cut_off):
            assert httpx.get(base + path.stem).status_code == 404
            assert httpx.delete(base + path.stem).status_code == 404
    store.sweep()
    assert [path.exists() for path in earlier] == [False, True, False], "the second was fetched"
    for path in (*other_names, deeper, outside, link, not_ours, cut_off):
        assert path.exists(), path

    asyncio.run((full := make_store(folder, hidden_states_quota_gib=1e-9)).adopt_earlier_files())
    full.check_quota()
    assert not earlier[1].exists() and not_ours.exists(), "older than a minute"


def test_leftovers_of_dead_writers(tmp_path: Path) -> None:
    import fcntl

    random = "0123456789abcdef" * 2
    alive, dead = tmp_path / "alive.safetensors", tmp_path / "dead.safetensors"
    done = make_file(tmp_path, "done")
    for path in (alive, dead):
        (tmp_path / f".{path.name}.{random}.tmp").write_bytes(b"half")
        (tmp_path / f"{path.name}.lock").touch()
    (tmp_path / f".unlocked.safetensors.{random}.tmp").touch()
    (tmp_path / ".other-program.tmp").touch()
    (tmp_path / "other-program.lock").touch()
    stale = tmp_path / "gone.safetensors.lock"
    stale.touch()
    for path in tmp_path.glob("dead.*"):
        os.utime(path, (0, 0))
    with open(tmp_path / "alive.safetensors.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert remove_leftovers(str(tmp_path)) == 2, "the dead one's file and lock"
        assert remove_leftovers(str(tmp_path), unlocked_seconds=-1) == 2
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [
        f".alive.safetensors.{random}.tmp",
        ".other-program.tmp",
        "alive.safetensors.lock",
        done.name,
        f"{done.name}.lock",
        "other-program.lock",
    ]
    assert remove_leftovers(str(tmp_path / "nowhere")) == 0


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_damaged_file_is_not_sent(tmp_path: Path, is_ours: bool) -> None:
    """By its checksums, or by its size where another connector wrote it."""
    path = make_file(tmp_path)
    if not is_ours:
        save_file({"hidden_states": torch.ones(9, 2, 8)}, path)
    store = make_store(tmp_path)
    with downloads(store) as server:
        url = f"{server.url}/v1/hidden_states/cmpl-0"
        assert store.add(str(path)) == "cmpl-0"
        content, refused = httpx.get(url).content, 0
        for what in damages(path):
            if not is_ours and "bit" in what:
                continue
            for headers in ({}, {"range": "bytes=0-3"}):
                found = error_of(httpx.get(url, headers=headers).content)
                assert (found["code"], found["type"]) == (410, "GoneError"), what
                assert "damaged" in found["message"] and str(tmp_path) not in found["message"]
                refused += 1
        assert server.state.metrics.damaged_files == refused
        assert httpx.get(url).content == content == path.read_bytes()
