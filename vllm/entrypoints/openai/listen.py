"""The socket a server listens at, bound before anything slow begins."""

from __future__ import annotations

import errno
import os
import socket
import stat
from contextlib import suppress
from typing import NamedTuple

from vllm.entrypoints.openai.cli_args import ServerSettings

_EVERYWHERE = ("", "0.0.0.0", "::")


class BoundSocket(NamedTuple):
    """A bound socket, and what to call it."""

    socket: socket.socket
    url: str
    """As a client on this machine would write it."""
    uds: str | None = None

    def close(self) -> None:
        """Give the address back."""
        self.socket.close()
        if self.uds is not None:
            with suppress(OSError):
                os.unlink(self.uds)


def bind(settings: ServerSettings) -> BoundSocket:
    """Bind host and port, or the Unix socket. ValueError: it is taken, or not ours to take."""
    if settings.uds is not None:
        return _bind_unix(settings.uds)
    host = settings.host or ""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sends small answers at once only for sockets that say they are TCP.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, settings.port))
    except OSError as error:
        bound.close()
        raise ValueError(_bind_failure(host, settings.port, error)) from None
    scheme = "https" if settings.ssl_certfile else "http"
    name = "localhost" if host in _EVERYWHERE else f"[{host}]" if ":" in host else host
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
    """Remove a socket that nobody listens at any more."""
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(path)
            except ConnectionRefusedError:
                os.unlink(path)
