"""A server on a free port of this machine: the real application, HTTP and, mostly, engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import uvicorn
import uvloop

from tests.engine.harness import extraction_config
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.openai.api_server import build_app
from vllm.entrypoints.openai.cli_args import ServerSettings
from vllm.entrypoints.openai.hidden_states_store import HiddenStatesStore
from vllm.entrypoints.openai.http_protocol import PromptHeadProtocol
from vllm.entrypoints.openai.server_metrics import ServerMetrics
from vllm.entrypoints.openai.state import ServerState
from vllm.v1.metrics.prometheus import MeteredAsyncLLM

NAMES = ["tiny", "also-tiny"]
START_SECONDS = 300.0


@dataclass
class LiveServer:
    """The parts of a running server that tests need."""

    url: str
    state: ServerState
    loop: asyncio.AbstractEventLoop

    @property
    def port(self) -> int:
        return httpx.URL(self.url).port or 0

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=30.0, trust_env=False)

    def openai(self) -> openai.OpenAI:
        http = httpx.Client(timeout=30.0, trust_env=False)
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="EMPTY", max_retries=0, http_client=http
        )

    def call(self, function: Callable[[], Any]) -> Any:
        """The result of ``function``, run on the server's event loop."""

        async def run() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(START_SECONDS)

    def num_tasks(self) -> int:
        """Tasks on the event loop, the asking one not counted."""
        return int(self.call(lambda: len(asyncio.all_tasks(self.loop)) - 1))


@contextmanager
def live_server(
    checkpoint: Path,
    folder: Path,
    *,
    layers: Sequence[int] | None = (0, 2, 4),
    settings: ServerSettings | None = None,
    connector: dict[str, Any] | None = None,
    **engine_options: Any,
) -> Iterator[LiveServer]:
    """A server for ``checkpoint`` that writes the rows of ``layers`` (None: no extraction)."""
    settings = settings or ServerSettings()
    options: dict[str, Any] = {"max_model_len": 512, "kv_cache_memory_bytes": 2**24}
    if layers is not None:
        options |= extraction_config(layers, folder, **(connector or {}))
    arguments = AsyncEngineArgs(model=str(checkpoint), **options | engine_options)

    async def make_state() -> ServerState:
        engine = MeteredAsyncLLM.from_engine_args(arguments)
        await engine.start()
        engine.metrics = metrics = ServerMetrics(lambda: engine.stats, NAMES[0])
        store = HiddenStatesStore.from_config(engine.vllm_config, settings)
        state = ServerState(engine, settings, list(NAMES), metrics, store=store)
        await state.adapters.load_modules(settings.lora_modules)
        return state

    with serve_state(make_state) as server:
        yield server


@contextmanager
def serve_state(make_state: Callable[[], Any]) -> Iterator[LiveServer]:
    """A server for the state that the coroutine function ``make_state`` makes."""
    ready = threading.Event()
    found: list[LiveServer] = []
    problems: list[BaseException] = []
    uvicorns: list[uvicorn.Server] = []

    async def run() -> None:
        state = await make_state()
        config = uvicorn.Config(
            build_app(state),
            http=PromptHeadProtocol,
            host="127.0.0.1",
            port=0,
            log_level="warning",
        )
        server = uvicorn.Server(config)
        uvicorns.append(server)
        task = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.005)
        port = server.servers[0].sockets[0].getsockname()[1]
        found.append(LiveServer(f"http://127.0.0.1:{port}", state, asyncio.get_running_loop()))
        ready.set()
        await task
        await state.engine.shutdown()

    def thread() -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(run())
        except BaseException as error:
            problems.append(error)
        finally:
            ready.set()

    worker = threading.Thread(target=thread, name="live-server")
    worker.start()
    try:
        assert ready.wait(START_SECONDS), "the server did not start"
        if problems:
            raise problems[0]
        yield found[0]
    finally:
        for server in uvicorns:
            server.should_exit = True
        worker.join(START_SECONDS)
    if problems:
        raise problems[0]
