"""Samples for a trainer in another process of the machine: the end that publishes them."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import stat
import subprocess
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from msgspec import structs

from vllm.exceptions import Failure, FailureKind, kind_of
from vllm.hidden_states.sample import FailedSample, HiddenStatesSample
from vllm.logger import init_logger
from vllm.training import stream_messages as messages
from vllm.training.stream_messages import MESSAGE_BYTES, PackedSample, StreamError

logger = init_logger(__name__)

_MOST_SAMPLES = 128
"""Most samples on their way, however small; each holds a file descriptor."""
_SEGMENT_GRAIN = 1 << 16
_REMOVE_SOCKET = 'read -r _; [ "$(stat -c %i -- "$1" 2>&1)" = "$2" ] && rm -f -- "$1"'


@dataclass(frozen=True)
class _Segment:
    id: int
    descriptor: int
    memory: torch.Tensor
    """uint8 [bytes]"""

    @property
    def num_bytes(self) -> int:
        return len(self.memory)


class _Segments:
    """The shared memory of a stream. It is used again when the reader has released it.

    A segment that an earlier reader knows is not: tensors of that reader may still be views of it.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._all: dict[int, _Segment] = {}
        self._free: list[_Segment] = []
        self._lent: dict[int, None] = {}  # acknowledged, but still used by the reader
        self._known: set[int] = set()  # to the present reader
        self._retired: set[int] = set()  # known to an earlier one
        self.forgotten: list[int] = []  # segments that the reader may forget
        self._next_id = 0

    def take(self, num_bytes: int) -> _Segment:
        """Return a segment with room for so many bytes that nobody uses."""
        size = num_bytes + -num_bytes % _SEGMENT_GRAIN
        fitting = [s for s in self._free if size <= s.num_bytes <= 2 * size]
        if fitting:
            found = min(fitting, key=lambda segment: segment.num_bytes)
            self._free.remove(found)
            return found
        while self._all and self._is_full(size) and (self._free or self._lent):
            self._forget(self._free[0].id if self._free else next(iter(self._lent)))
        descriptor = messages.new_segment(size)
        segment = _Segment(self._next_id, descriptor, messages.map_segment(descriptor, size))
        self._next_id += 1
        self._all[segment.id] = segment
        return segment

    def _is_full(self, size: int) -> bool:
        held = sum(segment.num_bytes for segment in self._all.values())
        return held + size > self._most_bytes or len(self._all) >= 2 * _MOST_SAMPLES

    def is_new(self, segment: _Segment) -> bool:
        """Return whether the reader does not know the segment."""
        return segment.id not in self._known

    def was_sent(self, segment: _Segment) -> None:
        """Remember that the reader knows the segment, and what it was told to forget."""
        self._known.add(segment.id)
        self.forgotten.clear()

    def lend(self, segment: _Segment) -> None:
        """Leave an acknowledged segment to the reader until it is released."""
        self._lent[segment.id] = None

    def release(self, ids: Iterable[int], unacknowledged: set[int]) -> None:
        """Take segments back that the reader does not use any more."""
        for one in ids:
            if one in self._all and one not in unacknowledged:
                self._lent.pop(one, None)
                self._free.append(self._all[one])
                if one in self._retired:
                    self._forget(one)

    def end_connection(self) -> None:
        """Forget what only the reader that is gone used."""
        self._retired |= self._known
        for one in [*self._lent, *(s.id for s in self._free if s.id in self._known)]:
            self._forget(one)
        self._known.clear()
        self.forgotten.clear()

    def _forget(self, one: int) -> None:
        segment = self._all.pop(one)
        self._free = [other for other in self._free if other.id != one]
        self._lent.pop(one, None)
        self._retired.discard(one)
        if one in self._known:
            self._known.remove(one)
            self.forgotten.append(one)
        os.close(segment.descriptor)

    def close(self) -> None:
        for one in list(self._all):
            self._forget(one)


@dataclass(frozen=True)
class _Entry:
    """Something that the reader has not acknowledged."""

    message: messages.Published
    segment: _Segment | None = None

    @property
    def num_bytes(self) -> int:
        return 0 if self.segment is None else self.segment.num_bytes


class HiddenStatesStream:
    """Publishes samples to one reader at a time, a ``StreamedDataset`` with the same path.

    A reader acknowledges samples. One that connects after another has ended gets all samples
    that were not acknowledged. No method may be called while another one runs.

    Args:
        path: of the Unix socket, which is made here and which only this user may connect to.
        credit_bytes: most bytes of samples that were published and not acknowledged; a single
            larger sample may be on its way alone.
        timeout: seconds to wait for the reader when the credit is used up, or at the end.

    ValueError: an argument cannot be used.
    """

    def __init__(self, path: str, credit_bytes: int = 1 << 30, timeout: float = 600.0) -> None:
        if not isinstance(credit_bytes, int) or credit_bytes < 1:
            raise ValueError(
                f"credit_bytes={credit_bytes!r}: has to be a whole number of at least 1"
            )
        if not timeout > 0:
            raise ValueError(f"timeout={timeout!r}: has to be above 0 seconds")
        self.path = os.path.abspath(path)
        self._credit_bytes, self._timeout = credit_bytes, timeout
        self._segments = _Segments(credit_bytes)
        self._unacknowledged: dict[int, _Entry] = {}  # by number, ascending
        self._next_number = 0
        self._next_sent = 0
        self._connection: socket.socket | None = None
        self._failure: Failure | None = None
        self._listener = _listen(self.path)
        self._remove_socket = weakref.finalize(self, _remove, self.path, _janitor(self.path))

    def publish(self, items: Iterable[HiddenStatesSample | FailedSample]) -> int:
        """Publish everything, and wait until it is acknowledged; returns the number of items.

        The reader's iteration ends with the last item. ``items`` may be a call of ``extract()``,
        an ``ExtractingDataset``, a ``HiddenStatesDataset``, or a list of samples. If an error
        ends them, a reader that is connected gets a StreamError of its kind.

        StreamError: see :meth:`put`.
        """
        first = self._next_number
        try:
            for item in items:
                self.put(item)
        except StreamError:
            raise
        except BaseException as error:
            message = str(error) or type(error).__name__
            self._stop(Failure(kind_of(error, FailureKind.JOB_FAILED), message))
            raise
        count = self._next_number - first
        self._add(lambda number: _Entry(messages.End(number)))
        self._wait(lambda: not self._unacknowledged)
        return count

    def put(self, item: HiddenStatesSample | FailedSample) -> None:
        """Publish a sample; waits for credit first.

        StreamError: there was no reader, or it acknowledged nothing, for ``timeout`` seconds. The
        stream has ended then. ValueError: the sample has columns that cannot be published.
        """
        if isinstance(item, FailedSample):
            text = messages.text_of(item.failure)
            kind, index, name = item.failure.kind, item.index, item.request_id
            self._wait(lambda: len(self._unacknowledged) < _MOST_SAMPLES)
            self._add(lambda n: _Entry(messages.Failed(n, index, name, kind, text)))
        else:
            packed = messages.pack(item)
            self._wait(lambda: self._has_credit(packed.num_bytes))
            self._add(lambda number: self._fill(number, packed))
        self._wait(lambda: True)

    def close(self) -> None:
        """End the stream and remove the socket; a reader that waits for more gets an error."""
        if self._failure is None:
            self._stop(Failure(FailureKind.ENGINE_DEAD, f"{self.path}: the stream was closed"))

    def __enter__(self) -> HiddenStatesStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _has_credit(self, num_bytes: int) -> bool:
        entries = self._unacknowledged.values()
        used = sum(entry.num_bytes for entry in entries)
        fits = used + num_bytes <= self._credit_bytes and len(entries) < _MOST_SAMPLES
        return fits or not entries

    def _fill(self, number: int, packed: PackedSample) -> _Entry:
        segment = self._segments.take(packed.num_bytes)
        packed.write(segment.memory)
        message = messages.Rows(
            number, segment.id, segment.num_bytes, packed.header_start, len(packed.header), []
        )
        return _Entry(message, segment)

    def _add(self, make: Callable[[int], _Entry]) -> None:
        self._unacknowledged[self._next_number] = make(self._next_number)
        self._next_number += 1

    def _wait(self, holds: Callable[[], bool]) -> None:
        """Serve the reader until ``holds()``."""
        if self._failure is not None:
            raise StreamError(self._failure)
        deadline = time.monotonic() + self._timeout
        while True:
            if self._serve(0):
                deadline = time.monotonic() + self._timeout
            self._send()
            if holds():
                return
            left = deadline - time.monotonic()
            if left <= 0:
                raise StreamError(self._stop(self._stalled()))
            if self._serve(left):
                deadline = time.monotonic() + self._timeout

    def _stalled(self) -> Failure:
        count, seconds = len(self._unacknowledged), f"{self._timeout:g} seconds"
        what = f"the reader acknowledged none of {count} samples for {seconds}"
        if self._connection is None:
            what = f"no reader connected for {seconds}"
        return Failure(FailureKind.STREAM_STALLED, f"{self.path}: {what} (timeout)")

    def _serve(self, seconds: float) -> bool:
        """Wait for the reader; returns whether one came or acknowledged something."""
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        if (connection := self._connection) is not None:
            waits = self._next_sent < self._next_number
            poll.register(connection, select.POLLIN | (select.POLLOUT if waits else 0))
        ready = dict(poll.poll(seconds * 1000))
        went_on = False
        if connection is not None and ready.get(connection.fileno(), 0) & ~select.POLLOUT:
            went_on = self._receive(connection)
        if self._listener.fileno() in ready:
            went_on |= self._accept()
        return went_on

    def _accept(self) -> bool:
        connection, _ = self._listener.accept()
        connection.setblocking(False)
        if self._connection is None:
            self._connection = connection
            self._next_sent = next(iter(self._unacknowledged), self._next_number)
            return True
        failure = Failure(FailureKind.BAD_REQUEST, f"{self.path}: has another reader already")
        with connection, contextlib.suppress(OSError):
            connection.send(messages.encode(messages.stopped(failure)))
        return False

    def _receive(self, connection: socket.socket) -> bool:
        """Read what the reader sent; returns whether it acknowledged something."""
        before = len(self._unacknowledged)
        while self._connection is connection:
            try:
                data = connection.recv(MESSAGE_BYTES)
            except BlockingIOError:
                break
            except ConnectionResetError:  # comes before what was sent until then
                continue
            taken = messages.read_taken(data) if data else None
            if taken is not None and taken.number < self._next_sent:
                self._take(taken)
                continue
            if data:
                logger.warning("%s: a reader sent what no reader sends; it is dropped", self.path)
            self._disconnect()
        return len(self._unacknowledged) < before

    def _take(self, taken: messages.Taken) -> None:
        while self._unacknowledged and (first := next(iter(self._unacknowledged))) <= taken.number:
            segment = self._unacknowledged.pop(first).segment
            if segment is not None:
                self._segments.lend(segment)
        waiting = {e.segment.id for e in self._unacknowledged.values() if e.segment is not None}
        self._segments.release(taken.released, waiting)

    def _send(self) -> None:
        """Send what the reader was not sent yet, as far as the socket takes it."""
        while self._connection is not None and self._next_sent < self._next_number:
            entry = self._unacknowledged[self._next_sent]
            message, segment, descriptors = entry.message, entry.segment, list[int]()
            if isinstance(message, messages.Rows) and segment is not None:
                message = structs.replace(message, forgotten=self._segments.forgotten)
                descriptors = [segment.descriptor] if self._segments.is_new(segment) else []
            try:
                socket.send_fds(self._connection, [messages.encode(message)], descriptors)
            except BlockingIOError:
                return
            except OSError:  # the reader is gone, perhaps after it acknowledged something
                self._receive(self._connection)
                return
            if segment is not None:
                self._segments.was_sent(segment)
            self._next_sent += 1

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
            self._segments.end_connection()

    def _stop(self, failure: Failure) -> Failure:
        """End the stream, and tell the reader why."""
        self._failure = failure
        self._send()
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.send(messages.encode(messages.stopped(failure)))
        self._disconnect()
        self._listener.close()
        self._segments.close()
        self._remove_socket()
        return failure


def _listen(path: str) -> socket.socket:
    """Return a socket that listens at ``path``. ValueError: it cannot be made there."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        _remove_stale(path)
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen()
    except OSError as error:
        listener.close()
        raise ValueError(f"path={path!r}: no socket can be made there ({error})") from error
    except ValueError:
        listener.close()
        raise
    return listener


def _remove_stale(path: str) -> None:
    """Remove the socket of a process that has ended. ValueError: the path is in use."""
    if not os.path.lexists(path):
        return
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        raise ValueError(f"path={path!r}: is not a socket; choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
    raise ValueError(f"path={path!r}: another process publishes there; choose another path")


def _janitor(path: str) -> subprocess.Popen[bytes]:
    """Start a process that removes the socket when this one ends, even if it is killed."""
    inode = str(os.lstat(path).st_ino)
    return subprocess.Popen(
        ["sh", "-c", _REMOVE_SOCKET, "sh", path, inode],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )


def _remove(path: str, janitor: subprocess.Popen[bytes]) -> None:
    assert janitor.stdin is not None
    janitor.stdin.close()
    janitor.wait()
