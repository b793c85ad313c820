"""Samples from another process of the machine: the end that a trainer reads."""

from __future__ import annotations

import contextlib
import os
import socket
import time
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Literal

import torch
from torch.utils.data import IterableDataset, get_worker_info

from vllm.exceptions import Failure, FailureKind
from vllm.hidden_states.sample import HiddenStatesError, HiddenStatesSample
from vllm.logger import init_logger
from vllm.training import stream_messages as messages
from vllm.training.stream_messages import MESSAGE_BYTES, StreamError

logger = init_logger(__name__)

_CONNECT_SECONDS = 0.05
_COPIED_BYTES = 1 << 16
"""Most bytes of a segment from which a sample is copied, so that it does not hold the segment."""


class StreamedDataset(IterableDataset[HiddenStatesSample]):
    """Yields the samples of the :class:`HiddenStatesStream` with the same path.

    An iteration yields what one call of ``publish`` publishes, in that order. The tensors are
    views of memory that is shared with the publisher; it is used again when they are gone. Rows
    that are changed in place before their sample is acknowledged stay changed for a next reader.
    A DataLoader may read it with at most one worker.

    Args:
        path: of the publisher's socket, which may be made later.
        timeout: seconds to wait for the publisher, and for each sample.
        acknowledge: ``"each"``: a sample is acknowledged when the next one is requested, so a
            trainer that ends early gets the last one again. ``"by_call"``: :meth:`acknowledge` does
            it, for example after a checkpoint was written; the credit of the publisher bounds what
            may be left.
        on_error: ``"raise"``, or ``"skip"`` to go on behind samples that failed; the log has the
            reason.

    ValueError: an argument cannot be used. The iteration raises StreamError if the publisher
    ended early, or did not go on in time; HiddenStatesError for a sample that failed.
    """

    num_skipped: int
    """Samples that failed and were left out."""

    def __init__(
        self,
        path: str,
        timeout: float = 600.0,
        *,
        acknowledge: Literal["each", "by_call"] = "each",
        on_error: Literal["raise", "skip"] = "raise",
    ) -> None:
        super().__init__()
        if not timeout > 0:
            raise ValueError(f"timeout={timeout!r}: has to be above 0 seconds")
        if acknowledge not in ("each", "by_call"):
            raise ValueError(f'acknowledge={acknowledge!r}: use "each" or "by_call"')
        if on_error not in ("raise", "skip"):
            raise ValueError(f'on_error={on_error!r}: use "raise" or "skip"')
        self.path = os.path.abspath(path)
        self._timeout = timeout
        self._acknowledges_each, self._skips = acknowledge == "each", on_error == "skip"
        self._connection: _Connection | None = None
        self.num_skipped = 0

    def __iter__(self) -> Iterator[HiddenStatesSample]:
        worker = get_worker_info()
        if worker is not None and worker.num_workers > 1:
            raise RuntimeError(
                f"DataLoader(num_workers={worker.num_workers}): a stream has one reader; use 0 or 1"
            )
        self.close()
        self._connection = connection = _Connection(self.path, self._timeout)
        return self._iterate(connection)

    def _iterate(self, connection: _Connection) -> Iterator[HiddenStatesSample]:
        is_complete = False
        try:
            while True:
                if self._acknowledges_each:
                    connection.acknowledge()
                message = connection.receive()
                if isinstance(message, messages.Rows):
                    yield connection.sample(message)
                elif isinstance(message, messages.Failed):
                    self._skip(message)
                elif isinstance(message, messages.Stopped):
                    raise StreamError(Failure(message.kind, message.message))
                else:
                    is_complete = True
                    return
        finally:
            if self._acknowledges_each or not is_complete:
                if is_complete:
                    connection.acknowledge()
                connection.close()

    def _skip(self, message: messages.Failed) -> None:
        failure = Failure(message.kind, message.message)
        if not self._skips:
            raise HiddenStatesError(message.index, failure)
        self.num_skipped += 1
        logger.warning("sample %d is skipped: %s", message.index, failure)

    def acknowledge(self) -> None:
        """Acknowledge every sample that was yielded, for ``acknowledge="by_call"``."""
        if self._connection is not None:
            self._connection.acknowledge()

    def close(self) -> None:
        """Disconnect from the publisher; the next iteration connects again."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class _Connection:
    """A connection to the publisher, and the segments that it sent."""

    def __init__(self, path: str, timeout: float) -> None:
        self._path, self._timeout = path, timeout
        self._socket = _connect(path, timeout)
        self._segments: dict[int, torch.Tensor] = {}
        self._released: deque[int] = deque()  # of this connection; filled from any thread
        self._last = self._last_acknowledged = -1
        self._descriptors: list[int] = []

    def receive(self) -> messages.Published:
        """Wait for the next message."""
        data, self._descriptors = b"", []
        try:
            data, self._descriptors = self._receive()
        except TimeoutError:
            failure = f"nothing was published for {self._timeout:g} seconds (timeout)"
            raise self._error(FailureKind.STREAM_STALLED, failure) from None
        if not data:
            raise self._error(FailureKind.ENGINE_DEAD, "the publishing process ended early")
        message = messages.read_published(data)
        if message is None:
            raise self._error(FailureKind.BAD_REQUEST, "another program publishes there")
        if not isinstance(message, messages.Stopped):
            self._last = message.number
        return message

    def _receive(self) -> tuple[bytes, list[int]]:
        flags = socket.MSG_CMSG_CLOEXEC
        try:
            return socket.recv_fds(self._socket, MESSAGE_BYTES, 1, flags)[:2]
        except ConnectionResetError:  # comes before what was sent until then
            return socket.recv_fds(self._socket, MESSAGE_BYTES, 1, flags)[:2]

    def sample(self, message: messages.Rows) -> HiddenStatesSample:
        """Return the sample that was announced."""
        for one in message.forgotten:
            self._segments.pop(one, None)
        for descriptor in self._descriptors:
            memory = messages.map_segment(descriptor, message.segment_bytes)
            self._segments[message.segment] = memory
            os.close(descriptor)
        memory = self._segments[message.segment]
        end = message.header_start + message.header_bytes
        if end <= _COPIED_BYTES:
            memory = memory[:end].clone()
            self._released.append(message.segment)
        else:
            view = memory.numpy()[:end]
            memory = torch.from_numpy(view)  # holds the view as long as tensors of it exist
            weakref.finalize(view, self._released.append, message.segment).atexit = False
        header = memory[message.header_start : end].numpy().tobytes()
        return messages.unpack(memory, header)

    def acknowledge(self) -> None:
        """Acknowledge everything that was received, and give segments back."""
        released = [self._released.popleft() for _ in range(min(len(self._released), 1024))]
        if self._last == self._last_acknowledged and not released:
            return
        self._last_acknowledged = self._last
        with contextlib.suppress(OSError):  # the next message says why
            self._socket.send(messages.encode(messages.Taken(self._last, released)))

    def close(self) -> None:
        self._socket.close()

    def _error(self, kind: FailureKind, message: str) -> StreamError:
        return StreamError(Failure(kind, f"{self._path}: {message}"))


def _connect(path: str, timeout: float) -> socket.socket:
    deadline = time.monotonic() + timeout
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(timeout)
        try:
            connection.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            connection.close()
        except OSError as error:
            connection.close()
            raise ValueError(f"path={path!r}: cannot be connected to ({error})") from error
        else:
            return connection
        if time.monotonic() >= deadline:
            message = f"{path}: no process publishes there after {timeout:g} seconds (timeout)"
            raise StreamError(Failure(FailureKind.ENGINE_DEAD, message))
        time.sleep(_CONNECT_SECONDS)
