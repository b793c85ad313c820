"""Addresses and ports of this machine."""

from __future__ import annotations

import socket
from contextlib import suppress


def get_ip() -> str:
    """Return the address from which this machine reaches others; 127.0.0.1 without a network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # sends nothing
        return str(probe.getsockname()[0])
    return "127.0.0.1"


def get_open_port() -> int:
    """Return a TCP port that no program listens on now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
