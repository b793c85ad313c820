"""Addresses and ports of this machine."""

from __future__ import annotations

import socket
from contextlib import suppress

from vllm.utils.text import brief

LAST_PORT = 65535


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


def check_port(option: str, value: object, port: int | str, *, num_ports: int = 1) -> None:
    """Raise ValueError unless ``port``, which ``option`` has in its ``value``, and the ports that
    follow it exist."""
    text = str(port)
    is_number = text.isascii() and text.isdecimal() and len(text) <= len(str(LAST_PORT))
    if not is_number or not 1 <= int(text) <= LAST_PORT + 1 - num_ports:
        several = "" if num_ports == 1 else f", because {num_ports} engines use one port each"
        raise ValueError(
            f"{option}={brief(value)} has the port {brief(text)}; use a number from 1 to "
            f"{LAST_PORT + 1 - num_ports}{several}"
        )
