"""The engine's process's view of the other ranks: their calls, their answers, and their ends."""

from __future__ import annotations

import os
import pickle
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

import zmq

from vllm.distributed.broadcast import BroadcastSender
from vllm.utils.child_process import ChildProcess, ending_of, private_folder, with_last_lines
from vllm.utils.stop_watch import StopWatch
from vllm.v1.executor.rank_messages import RankAnswer, RankSettings
from vllm.v1.outputs import KVConnectorOutput

POLL_MILLISECONDS = 200
KEPT_ANSWERS = 8
"""Calls whose answers may be read again: those of a step are, when the next one fails. An answer
that was not read is kept, because any number of calls may come between a step and its result."""
STACKS_SECONDS = 1.0
"""Time that a process which hangs has to write its stacks into the log."""


class RankDiedError(Exception):
    """A rank's process ended or hangs; the message says which and how."""


class RankClient(ABC):
    """Another rank, with the calls that it was sent."""

    def __init__(self, rank: int, socket: zmq.Socket[bytes], timeout_seconds: float) -> None:
        self.rank = rank
        self._socket, self._timeout_seconds = socket, timeout_seconds
        self._answers: dict[int, RankAnswer] = {}
        self._read: set[int] = set()

    @property
    @abstractmethod
    def ending(self) -> str | None:
        """A sentence about how the process ended; None: it runs."""

    @property
    def is_stopped(self) -> bool:
        """True if a signal has stopped the process for a while; it may go on. False if nothing on
        its machine can say so, as of a Ray actor."""
        return False

    @abstractmethod
    def wait_for_end(self) -> None:
        """Return when the process has ended."""

    @abstractmethod
    def write_stacks(self) -> None:
        """Let the process write what it does into its log."""

    @abstractmethod
    def end(self, grace_seconds: float) -> None:
        """Give the process ``grace_seconds`` to end, then kill it."""

    def answer(self, number: int, ranks: Sequence[RankClient]) -> RankAnswer:
        """Wait for the answer to a call. RankDiedError: it does not come, or one of ``ranks``, for
        which this one may wait, ended.
        """
        deadline = time.monotonic() + self._timeout_seconds
        while number not in self._answers:
            if self._socket.poll(POLL_MILLISECONDS):
                answer: RankAnswer = pickle.loads(self._socket.recv())
                self._answers[answer.number] = answer
            else:
                self.check((self, *ranks), deadline)
        self._read.add(number)
        for old in [one for one in self._read if one <= number - KEPT_ANSWERS]:
            self._read.remove(old)
            self._answers.pop(old, None)
        return self._answers[number]

    def take_reports(self, number: int) -> Sequence[KVConnectorOutput]:
        """Return the connector's reports in the answer to a call, once. Empty: it did not come."""
        if (answer := self._answers.get(number)) is None:
            return ()
        self._answers[number] = answer._replace(reports=())
        return answer.reports

    def check(self, ranks: Sequence[RankClient], deadline: float) -> None:
        """Look while this rank is waited for. RankDiedError: one of ``ranks`` ended, or the time is
        up."""
        if endings := [one.ending for one in ranks if one.ending is not None]:
            raise RankDiedError(endings[0])
        if time.monotonic() > deadline:
            self.write_stacks()
            time.sleep(STACKS_SECONDS)
            raise RankDiedError(
                f"rank {self.rank} has not answered for {self._timeout_seconds:g} s "
                "(distributed_timeout_seconds); its stacks are in the log"
            )


class Caller(Protocol):
    """A way to one or more ranks."""

    def has_room(self, message: bytes) -> bool:
        """Return whether a call is sent before the processes have ended earlier ones."""
        ...

    def call(self, message: bytes) -> None:
        """Send a call. RankDiedError: a process does not take it."""
        ...

    def dismiss(self) -> None:
        """Ask the processes to end."""
        ...


class DistantRank(RankClient):
    """A rank of another machine, or one that something else has started."""

    def has_room(self, message: bytes) -> bool:
        return True  # a socket keeps many

    def call(self, message: bytes) -> None:
        deadline = time.monotonic() + self._timeout_seconds
        # A socket whose other end is gone, or never came, would wait for ever.
        while not self._socket.poll(POLL_MILLISECONDS, zmq.POLLOUT):
            self.check((self,), deadline)
        self._socket.send(message)

    def dismiss(self) -> None:
        with suppress(zmq.ZMQError):
            self._socket.send(pickle.dumps(None), zmq.NOBLOCK)


class RankProcess(RankClient):
    """A rank's process on this machine."""

    def __init__(
        self, context: zmq.Context[Any], rank: int, timeout_seconds: float, files: Sequence[int]
    ) -> None:
        folder = private_folder("vllm-rank-")
        socket = context.socket(zmq.PAIR)
        socket.bind(f"ipc://{folder}/answers")
        super().__init__(rank, socket, timeout_seconds)
        self._process = ChildProcess("vllm.v1.executor.rank_process", folder, files)
        self._stop_watch = StopWatch(f"rank {rank}", self._process.pid)

    def send(self, settings: RankSettings) -> None:
        """Let the process begin. RankDiedError: it has ended."""
        try:
            self._process.send(settings)
        except BrokenPipeError:
            raise RankDiedError(
                f"the process of rank {self.rank} ended before it started; its log says why"
            ) from None

    @property
    def ending(self) -> str | None:
        status = self._process.status
        if status is None:
            self._stop_watch.check()  # whoever asks waits for the process
            return None
        ending = ending_of("rank", self.rank, status)
        return with_last_lines(ending, self._process.last_lines)

    @property
    def is_stopped(self) -> bool:
        return self._stop_watch.check()

    def wait_for_end(self) -> None:
        self._process.wait()

    def write_stacks(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGUSR1)

    def end(self, grace_seconds: float) -> None:
        self._process.end(grace_seconds)


class RanksHere:
    """The processes of the other ranks of this machine, which hear calls in memory that they share
    with this process."""

    def __init__(
        self,
        context: zmq.Context[Any],
        ranks: Sequence[int],
        timeout_seconds: float,
        files: Sequence[int],
    ) -> None:
        """Start the processes. ValueError: there is not enough memory."""
        self.processes: list[RankProcess] = []
        self._timeout_seconds = timeout_seconds
        self._sender = BroadcastSender(len(ranks))
        self.places = self._sender.places
        files = [*files, *{place.file_descriptor for place in self.places}]
        try:
            for rank in ranks:
                self.processes.append(RankProcess(context, rank, timeout_seconds, files))
        except BaseException:
            for process in self.processes:
                process.end(0.0)
            raise
        finally:
            self._sender.close_file()

    def has_room(self, message: bytes) -> bool:
        return self._sender.has_room(message)

    def call(self, message: bytes) -> None:
        deadline = time.monotonic() + self._timeout_seconds

        def look(reader: int) -> None:
            self.processes[reader].check(self.processes, deadline)

        self._sender.send(message, look)

    def dismiss(self) -> None:
        def give_up(reader: int) -> None:
            raise RankDiedError(f"rank {self.processes[reader].rank} takes no calls")

        with suppress(RankDiedError):
            self._sender.send(pickle.dumps(None), give_up)
