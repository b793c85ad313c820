"""The life of a server, from its arguments and its socket to its exit status.

bind -> core process starts -> config, tokenizer -> core is ready -> app -> serve
first SIGTERM / SIGINT: new requests get 503, running ones finish in their time, exit 0
second: everything ends at once
the core ends by itself: waiting requests get an error, /health says 503, exit 1
"""

from __future__ import annotations

import asyncio
import errno
import json
import math
import os
import signal
import socket
import ssl
import stat
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import uvloop

from vllm.entrypoints.openai.cli_args import ServerSettings
from vllm.entrypoints.openai.http_server import CLOSE_SECONDS, HttpServer, make_http_server
from vllm.logger import init_logger
from vllm.transformers_utils.chat_template import load_chat_template
from vllm.utils.gc_utils import settle_garbage_collector
from vllm.utils.text import check_text
from vllm.v1.engine.core_client import CoreHandle
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.version import PRODUCT, VERSION

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.openai.http_processes import HttpProcesses
    from vllm.entrypoints.openai.state import ServerState
    from vllm.v1.engine.core_messages import CoreStarted
    from vllm.v1.metrics.prometheus import MeteredAsyncLLM

logger = init_logger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
EVERYWHERE = ("", "0.0.0.0", "::")
POLL_SECONDS = 0.05
LAST_WORDS_SECONDS = 1.0
"""Time that a server without an engine continues, so that clients and probes learn of it."""


class BoundSocket(NamedTuple):
    """A bound socket and its address."""

    socket: socket.socket
    url: str
    """The URL for a client on this machine."""
    uds: str | None = None

    def close(self) -> None:
        """Release the address."""
        self.socket.close()
        if self.uds is not None:
            with suppress(OSError):
                os.unlink(self.uds)


def check_certificates(settings: ServerSettings) -> None:
    """Raise ValueError if files for HTTPS cannot be used; uvicorn reads them after the model."""
    if settings.ssl_certfile is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # With a password nobody is asked for one; a key without encryption does not need it.
        context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile, password="-")
        if settings.ssl_ca_certs is not None:
            context.load_verify_locations(settings.ssl_ca_certs)
    except OSError as error:
        names = ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs")
        files = ", ".join(f"{name}={vars(settings)[name]!r}" for name in names)
        raise ValueError(
            f"{files}: {error}; use PEM files of a certificate and its key, not encrypted"
        ) from None


def check_weight_transfer(settings: ServerSettings, config: VllmConfig) -> None:
    """Raise ValueError if the device cannot take weights in the way that the settings ask for."""
    transfer, device = settings.weight_transfer_config, config.device_config.device_type
    if transfer is not None and transfer.backend == "nccl" and device != "cuda":
        raise ValueError(
            f'weight_transfer_config.backend="nccl" needs a CUDA device, and this is a {device}; '
            'use "gloo"'
        )
    parallel = config.parallel_config
    num_workers = parallel.world_size * len(parallel.engines_served)
    if transfer is not None and num_workers > 1:
        raise ValueError(
            f"weight_transfer_config is not supported with {num_workers} workers; use "
            "tensor_parallel_size=1 and data_parallel_size=1, or weight_folders"
        )


def bind(settings: ServerSettings) -> BoundSocket:
    """Bind host and port, or the Unix socket; raises ValueError if it is in use or not allowed."""
    if settings.uds is not None:
        return _bind_unix(settings.uds)
    host = settings.host or ""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sends small answers at once only for sockets that are marked as TCP.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, settings.port))
    except OSError as error:
        bound.close()
        raise ValueError(_bind_failure(host, settings.port, error)) from None
    except (TypeError, ValueError):  # characters that no name can have
        bound.close()
        raise ValueError(f"host={host!r} is not a name; name an address of this machine") from None
    scheme = "https" if settings.ssl_certfile else "http"
    name = "localhost" if host in EVERYWHERE else f"[{host}]" if ":" in host else host
    return BoundSocket(bound, f"{scheme}://{name}:{bound.getsockname()[1]}{settings.root_path}")


def _bind_failure(host: str, port: int, error: OSError) -> str:
    known = {
        errno.EADDRINUSE: "is in use; stop the program that listens there, or choose another port",
        errno.EACCES: "needs more rights than this user has; use a port above 1023",
    }
    if error.errno in known:
        return f"port={port} {known[error.errno]}"
    return f"host={host!r}, port={port}: {error.strerror or error}; name an address of this machine"


def _bind_unix(path: str) -> BoundSocket:
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_dead_socket(path)
        bound.bind(path)
    except OSError as error:
        bound.close()
        reason = error.strerror or error
        raise ValueError(f"uds={path!r} cannot be used: {reason}; name another path") from None
    return BoundSocket(bound, f"unix:{path}", path)


def _remove_dead_socket(path: str) -> None:
    """Remove a socket on which no process listens any more."""
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(path)
            except ConnectionRefusedError:
                os.unlink(path)


def run_server(
    engine_args: AsyncEngineArgs, settings: ServerSettings, handle: CoreHandle | None = None
) -> int:
    """Serve until a signal or a failure; returns the exit status. Mistakes are printed to stderr.

    ``handle``: a core process that is already started; it loads its modules while the config
    is made here.
    """
    with ExitStack() as stack:
        # Until the event loop handles signals, a signal ends the program in order.
        for number in STOP_SIGNALS:
            stack.callback(signal.signal, number, signal.signal(number, _stop_start))
        core = handle or CoreHandle()
        stack.callback(core.end)
        try:
            check_certificates(settings)
            template = load_chat_template(settings.chat_template)
            bound = bind(settings)
            stack.callback(bound.close)
            processes = None
            if settings.api_server_count > 1:
                from vllm.entrypoints.openai.http_processes import HttpProcesses

                processes = HttpProcesses(settings.api_server_count)
                stack.callback(processes.abandon)
            from vllm.v1.metrics.prometheus import MeteredAsyncLLM

            config = engine_args.create_engine_config()
            if settings.extract_only_when_asked:
                from vllm.distributed.kv_transfer.kv_connector.v1.storage_folder import (
                    extract_only_when_asked,
                )

                extract_only_when_asked(config)
            engine = MeteredAsyncLLM(
                config,
                handle=core,
                num_renderer_threads=settings.renderer_num_workers,
            )
            check_weight_transfer(settings, engine.vllm_config)
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                log_stats = not engine_args.disable_log_stats
                server = Server(engine, settings, bound, core, template, log_stats, processes)
                return runner.run(server.run())
        except (ValueError, EngineDeadError) as error:
            print(f"vllm serve: error: {error}", file=sys.stderr)
            return 1


def _stop_start(signal_number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(0)


@dataclass
class Server:
    """One server in one event loop."""

    engine: MeteredAsyncLLM
    settings: ServerSettings
    bound: BoundSocket
    core: CoreHandle
    chat_template: str | None = None
    log_stats: bool = True
    processes: HttpProcesses | None = None
    """The HTTP processes; None: this process serves."""
    _stop: asyncio.Event = field(default_factory=asyncio.Event)
    _background: list[asyncio.Task[None]] = field(default_factory=list)

    async def run(self) -> int:
        """Serve; returns the exit status."""
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self._take_signal, number)
        try:
            self._remove_leftovers()
            state = await self._make_state()  # reads the files that options name
            if not await self._start_engine():
                return 0
            state.facts = server_facts(
                self.engine.vllm_config,
                self.settings,
                self.engine.started,
                state.served_model_names,
            )
            await state.adapters.load_modules(self.settings.lora_modules)
            return await self._serve(state)
        finally:
            for task in self._background:
                task.cancel()
            await self.engine.shutdown()
            self._remove_leftovers()

    async def _start_engine(self) -> bool:
        """Wait for the core; returns False if a signal came first."""
        starting = asyncio.ensure_future(self.engine.start())
        stopped = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait((starting, stopped), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not starting.done():
            starting.cancel()
            with suppress(asyncio.CancelledError):
                await starting
            return False
        starting.result()
        # A full garbage collection takes a third of a second, in which no request is answered.
        settle_garbage_collector()
        return True

    async def _make_state(self) -> ServerState:
        from vllm.entrypoints.openai.hidden_states_store import HiddenStatesStore, storage_folder
        from vllm.entrypoints.openai.server_metrics import ServerMetrics
        from vllm.entrypoints.openai.state import ServerState

        config = self.engine.vllm_config
        names = config.model_config.served_model_name or config.model_config.model
        served_model_names = [names] if isinstance(names, str) else list(names)
        for name in served_model_names:
            check_text("served_model_name", name)
        folder = storage_folder(config, self.settings)
        check_text("shared_storage_path", folder or "")
        first = str(config.parallel_config.engines_served.start)
        metrics = ServerMetrics(lambda: self.engine.stats, served_model_names[0], first)
        self.engine.metrics = metrics
        self.engine.on_connector_stats.append(metrics.follow_connector(config))
        store = metrics.store = HiddenStatesStore.from_config(config, self.settings)
        if store is not None:
            await store.adopt_earlier_files()
        state = ServerState(
            engine=self.engine,
            settings=self.settings,
            served_model_names=served_model_names,
            chat_template=self.chat_template,
            store=store,
            storage_folder=folder,
            metrics=metrics,
        )
        state.adapters.check_modules(self.settings.lora_modules)
        return state

    def _announce(self, state: ServerState) -> None:
        """Log that the server is ready, and start the background tasks."""
        from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging
        from vllm.v1.metrics.loggers import log_stats_forever

        if state.store is not None:
            self._background.append(asyncio.create_task(state.store.sweep_forever()))
        if self.log_stats:
            counted = KVConnectorLogging(self.engine.vllm_config.kv_transfer_config)
            self.engine.on_connector_stats.append(counted.observe)
            task = log_stats_forever(lambda: self.engine.stats, counted)
            self._background.append(asyncio.create_task(task))
        logger.info("%s", startup_summary(state.facts, self.settings, self.bound.url))

    async def _serve(self, state: ServerState) -> int:
        http: HttpServer | HttpProcesses
        if self.processes is None:
            http = make_http_server(state)
        else:
            http = self.processes
            http.attach(state)
        serving = asyncio.create_task(http.serve(sockets=[self.bound.socket]))
        try:
            await self._until(lambda: http.started or serving.done())
            if not serving.done():
                self._announce(state)
            await self._until(lambda: self._stop.is_set() or self.engine.errored or serving.done())
            if serving.done():  # although it was not asked to end
                serving.result()
                return 1
            if self.engine.errored:
                logger.error("The engine is gone; shutting down the server")
                await asyncio.sleep(LAST_WORDS_SECONDS)
                return 1
            return await self._drain(state, http)
        except OSError as error:  # another process began to listen after the bind
            raise ValueError(f"{self.bound.url}: {error.strerror or error}") from None
        finally:
            http.should_exit = True
            await asyncio.wait((serving,))

    async def _drain(self, state: ServerState, http: HttpServer | HttpProcesses) -> int:
        """Let running requests finish; those that take too long end with an error."""
        state.is_draining = True
        await http.share()
        timeout_seconds = self.settings.shutdown_timeout
        logger.info(
            "Shutting down: %d requests have %g s to finish, new ones get 503; a second signal "
            "ends the server at once",
            state.server_load,
            timeout_seconds,
        )
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_seconds
        await self._until(
            lambda: not state.server_load or self.engine.errored or loop.time() > deadline
        )
        # uvicorn waits for other requests, such as downloads.
        remaining = math.ceil(deadline - loop.time())
        http.allow(max(CLOSE_SECONDS, remaining))
        if self.engine.errored:
            return 1
        if state.server_load:
            logger.warning("%d requests did not finish and are ended", state.server_load)
            await self.engine.shutdown()
        return 0

    async def _until(self, is_true: Callable[[], bool]) -> None:
        while not is_true():
            await asyncio.sleep(POLL_SECONDS)

    def _take_signal(self, number: int) -> None:
        if not self._stop.is_set():
            self._stop.set()
            return
        logger.warning("Second signal: ending the server at once")
        self.core.end()
        if self.processes is not None:
            self.processes.abandon()
        self._remove_leftovers()
        self.bound.close()
        os._exit(128 + number)

    def _remove_leftovers(self) -> None:
        """Remove files of writers that died in our folder, in this or an earlier run."""
        from vllm.entrypoints.openai.hidden_states_store import storage_folder
        from vllm.v1.rows.lock import remove_leftovers

        folder = storage_folder(self.engine.vllm_config, self.settings)
        if folder is not None:
            remove_leftovers(folder)


def startup_summary(facts: list[tuple[str, str]], settings: ServerSettings, url: str) -> str:
    """Return one line for each fact and for the address."""
    where = "this address only"
    if settings.uds is not None or (settings.host or "") in EVERYWHERE:
        where = "all addresses" if settings.uds is None else "a Unix socket"
    rows = [*facts, ("URL", f"{url} ({where}; status at /, API at /docs)")]
    width = max(len(name) for name, _ in rows)
    lines = [f"  {name:{width}}  {value}" for name, value in rows]
    return "\n".join([f"{PRODUCT} {VERSION} is ready", *lines])


def server_facts(
    config: VllmConfig,
    settings: ServerSettings,
    started: CoreStarted,
    served_model_names: list[str],
) -> list[tuple[str, str]]:
    """Return names and values for model, layers, dtype, device, pool and extraction."""
    model = config.model_config
    names = ", ".join(served_model_names)
    pool = [line.removeprefix("KV pool: ") for line in started.pool_description]
    layers = f"{model.get_total_num_hidden_layers()} of hidden size {model.get_hidden_size():,}"
    return [
        ("model", model.model if names == model.model else f"{model.model} (served as {names})"),
        ("layers", layers),
        ("dtype", str(model.dtype).removeprefix("torch.")),
        ("device", config.device_config.device_type),
        ("context", f"{started.max_model_len:,} tokens per request"),
        *(("" if index else "pool", line) for index, line in enumerate(pool)),
        *_extraction_rows(config, settings),
    ]


def _extraction_rows(config: VllmConfig, settings: ServerSettings) -> list[tuple[str, str]]:
    from vllm.entrypoints.openai.hidden_states_store import storage_folder

    speculative, folder = config.speculative_config, storage_folder(config, settings)
    files = ("files", f"{folder}{_downloads(settings)}")
    if speculative is None:
        return [("extraction", "on request"), *[files] * (folder is not None)]
    layers = json.dumps(list(speculative.hidden_state_layer_ids))
    extracted = f"layers {layers} of 0 to {config.model_config.get_total_num_hidden_layers()}"
    row = ("files", "none: kv_transfer_config names no connector")
    if folder is not None:
        row = files
    elif config.kv_transfer_config is not None:
        row = ("connector", str(config.kv_transfer_config.kv_connector))
    return [("extraction", extracted), row]


def _downloads(settings: ServerSettings) -> str:
    parts = []
    if settings.enable_hidden_states_download:
        parts.append("also at /v1/hidden_states/{id}")
    if settings.hidden_states_ttl:
        parts.append(f"kept {settings.hidden_states_ttl:g} s")
    if settings.hidden_states_quota_gib is not None:
        parts.append(f"at most {settings.hidden_states_quota_gib:g} GiB")
    return f" ({', '.join(parts)})" if parts else ""
