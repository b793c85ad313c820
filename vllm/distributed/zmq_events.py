"""Cache events over zmq, as upstream's releases send them.

PUB      topic, number of the batch (8 bytes, big endian), batch as msgpack
ROUTER   (``replay_endpoint``) asked with the number of a batch, answers with it and all later
         ones that are kept: an empty frame, number, batch; at the end -1 and an empty batch
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from vllm.logger import init_logger

if TYPE_CHECKING:
    import zmq

logger = init_logger(__name__)

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
_POLL_SECONDS = 0.1
_SHUTDOWN_SECONDS = 1.0


def offset_endpoint(endpoint: str | None, data_parallel_rank: int) -> str | None:
    """The endpoint of a data-parallel rank: ports count up, names get a suffix."""
    if endpoint is None or data_parallel_rank == 0:
        return endpoint
    if endpoint.startswith("tcp://"):
        base, _, port = endpoint.rpartition(":")
        return f"{base}:{int(port) + data_parallel_rank}"
    return f"{endpoint}_dp{data_parallel_rank}"


def _is_bound(endpoint: str) -> bool:
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


class EventSockets:
    """Sockets, and the thread that uses them. ValueError: an address cannot be used."""

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None,
        topic: str,
        hwm: int,
        buffer_steps: int,
        max_queue_size: int,
    ) -> None:
        import zmq  # only where events are published: an engine starts without it

        self._topic = topic.encode()
        self._queue: queue.Queue[msgspec.Struct] = queue.Queue(max_queue_size)
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=buffer_steps)
        self._numbers = itertools.count()
        self._encoder = msgspec.msgpack.Encoder()
        self._is_ending = False
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._publish = context.socket(zmq.PUB)
        self._publish.set_hwm(hwm)
        self._replay = None if replay_endpoint is None else context.socket(zmq.ROUTER)
        if self._replay is not None:  # of more than it takes, a router drops what is left
            self._replay.set_hwm(buffer_steps + 1)
        try:
            _open(self._publish, "endpoint", endpoint, binds=_is_bound(endpoint))
            if self._replay is not None and replay_endpoint is not None:
                _open(self._replay, "replay_endpoint", replay_endpoint, binds=True)
        except ValueError:
            self._close()
            raise
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def put(self, batch: msgspec.Struct) -> None:
        """Send it soon; waits where too many wait."""
        self._queue.put(batch)

    def shutdown(self) -> None:
        """Send what is left, as far as a second allows. May be called twice."""
        self._is_ending = True
        self._thread.join(_SHUTDOWN_SECONDS)

    def _run(self) -> None:
        while not (self._is_ending and self._queue.empty()):
            for act in (self._send_next, self._answer):
                try:
                    act()
                except Exception:  # the engine waits for this thread: the next ones are tried
                    logger.exception("cache events are not published")
        self._close()

    def _send_next(self) -> None:
        try:
            batch = self._queue.get(timeout=_POLL_SECONDS)
        except queue.Empty:
            return
        parts = (next(self._numbers).to_bytes(8, "big"), self._encoder.encode(batch))
        self._sent.append(parts)
        self._publish.send_multipart((self._topic, *parts))

    def _answer(self) -> None:
        """Whoever asked for batches that it missed."""
        while self._replay is not None and self._replay.poll(0):
            asker, *_, start = self._replay.recv_multipart()
            first = int.from_bytes(start, "big")
            for number, payload in self._sent:
                if int.from_bytes(number, "big") >= first:
                    self._replay.send_multipart((asker, b"", number, payload))
            self._replay.send_multipart((asker, b"", END_OF_REPLAY, b""))

    def _close(self) -> None:
        for socket in (self._publish, self._replay):
            if socket is not None:
                socket.close(linger=0 if socket is self._replay else int(_SHUTDOWN_SECONDS * 1000))


def _open(socket: zmq.Socket[bytes], option: str, address: str, *, binds: bool) -> None:
    import zmq

    try:
        (socket.bind if binds else socket.connect)(address)
    except zmq.ZMQError as error:
        raise ValueError(
            f"kv_events_config.{option}={address!r}: {error}; use an address such as "
            "'tcp://*:5557' that is free"
        ) from error
