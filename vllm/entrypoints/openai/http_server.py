"""uvicorn's server with the settings of ours."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.middleware import Middleware

from vllm.entrypoints.openai.http_protocol import limited_protocol
from vllm.logger import adopt_logger

if TYPE_CHECKING:
    from vllm.entrypoints.openai.state import ServerState

PROBES = ("/health", "/health/", "/ping", "/load", "/metrics", "/metrics/")
CLOSE_SECONDS = 3
"""Time for connections to end after the last generation request."""
KEEP_ALIVE_SECONDS = 65
"""Longer than clients keep idle connections, so that they are the ones to close them."""


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    """Return False for successful probes and scrapes, of which there are several per minute.

    uvicorn's arguments are client, method, path (with --root-path before it), HTTP version, status.
    """
    _, _, path, _, status = record.args or (None,) * 5
    return status != 200 or not str(path).partition("?")[0].endswith(PROBES)


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers, which also serves connections that others accepted."""

    on_connection_end: Callable[[], None] | None = None
    """Called when one of those has ended."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def share(self) -> None:
        """Do nothing: the server's state is this process's."""

    def allow(self, grace_seconds: int) -> None:
        """Set the time that connections have to end once ``should_exit`` is set."""
        self.config.timeout_graceful_shutdown = grace_seconds

    async def take_connection(self, connection: socket.socket) -> None:
        """Serve a connection. OSError: it has ended before it could be served."""
        loop: Any = asyncio.get_running_loop()
        make = self._make_protocol
        await loop.connect_accepted_socket(make, connection, ssl=self.config.ssl)

    def _make_protocol(self) -> asyncio.Protocol:
        protocol: Any = self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        protocol.on_end = self.on_connection_end
        return protocol  # type: ignore[no-any-return]


def make_http_server(state: ServerState, *layers: Middleware) -> HttpServer:
    """Make the server of a state. layers: see :func:`.api_server.build_app`."""
    from vllm.entrypoints.openai.api_server import build_app

    settings = state.settings
    config = uvicorn.Config(
        build_app(state, *layers),
        http=limited_protocol(settings.max_head_bytes),
        ws="none",
        log_config=None,
        log_level=settings.uvicorn_log_level,
        access_log=not settings.disable_uvicorn_access_log,
        root_path=settings.root_path,
        ssl_keyfile=settings.ssl_keyfile,
        ssl_certfile=settings.ssl_certfile,
        ssl_ca_certs=settings.ssl_ca_certs,
        ssl_cert_reqs=settings.ssl_cert_reqs,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=CLOSE_SECONDS,
    )
    adopt_logger("uvicorn")
    logging.getLogger("uvicorn.access").addFilter(_is_worth_a_line)
    return HttpServer(config)
