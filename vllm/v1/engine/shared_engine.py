"""One engine for callers on several threads.

The engine does not have a thread. A caller that waits for an output runs the next step,
which serves the requests of all callers; each output goes to the caller that asked for it.
Callers take turns in the order of asking, so that a caller that steps in a loop lets the
others submit.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from vllm.outputs import RequestOutput
from vllm.utils.gc_utils import garbage_collected_later
from vllm.utils.interrupts import allow_interrupts, hold_interrupts
from vllm.v1.engine.core_messages import WorkerCall
from vllm.v1.engine.input_processor import ProcessedInput
from vllm.v1.engine.llm_engine import LLMEngine


class Call:
    """One caller's requests: those under way, and the outputs that were not taken yet."""

    def __init__(self) -> None:
        self.pending_ids: set[str] = set()
        """The caller's ids. They change only in a turn of the engine."""
        self.outputs: deque[RequestOutput] = deque()

    def take_outputs(self) -> list[RequestOutput]:
        return [self.outputs.popleft() for _ in range(len(self.outputs))]


class SharedEngine:
    """Gives callers turns on an engine; a caller that waits for outputs runs its steps."""

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine
        self._turns = _Turns()
        self._calls: dict[str, Call] = {}
        """The call of each request, by the caller's id of the request."""
        self._given_up: deque[list[str]] = deque()
        self._gate = threading.RLock()
        """Held while no request may begin."""

    def submit(self, call: Call, requests: Sequence[ProcessedInput]) -> list[ValueError | None]:
        """Hand requests to the engine together; returns why each was not taken, or None.

        RuntimeError: the engine was shut down.
        """
        with self._gate, self._turn():
            return [self._submit(call, request) for request in requests]

    def _submit(self, call: Call, request: ProcessedInput) -> ValueError | None:
        request_id = request.external_id
        self._calls[request_id] = call
        call.pending_ids.add(request_id)
        try:
            self.engine.submit(request)
        except BaseException as error:
            self._forget(request_id)
            if isinstance(error, ValueError):
                return error
            raise
        return None

    def wait(self, call: Call) -> list[RequestOutput]:
        """Return outputs of a call; if there are none, run one step of the engine first.

        RuntimeError: the engine was shut down.
        """
        if not call.outputs:
            with self._turn():
                # Another caller may have run the step in the meantime.
                if not call.outputs:
                    self._step()
                    if call.pending_ids and not self.engine.has_unfinished_requests():
                        raise RuntimeError(
                            f"{len(call.pending_ids)} requests ended without an output: another "
                            "part of the program takes the outputs of this engine's steps"
                        )
        return call.take_outputs()

    def _step(self) -> None:
        for output in self.engine.step():
            call = self._calls.get(output.request_id)
            if call is None:
                continue
            call.outputs.append(output)
            if output.finished:
                self._forget(output.request_id)

    def close(self, call: Call) -> None:
        """End a call: its requests under way are dropped, with their files. Never waits.

        When the garbage collector closes an iterator, this may run in the middle of
        anything, even of a turn: then the requests are dropped when that turn ends.
        """
        self._given_up.append(list(call.pending_ids))
        self._drop_given_up()

    def collective_rpc(self, call: WorkerCall) -> list[Any]:
        """Call every worker between two steps; returns their results."""
        with self._turn():
            return self.engine.collective_rpc(call)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Complete all requests under way, and let none begin inside the block.

        Other threads wait with theirs.
        """
        with self._gate:
            has_requests = True
            while has_requests:
                with self._turn():
                    has_requests = self.engine.has_unfinished_requests()
                    if has_requests:
                        self._step()
            yield

    def reset_prefix_cache(self, *, reset_connector: bool = False) -> bool:
        """Forget every cached prefix; see :meth:`vllm.LLM.reset_prefix_cache`."""
        with self._turn():
            return self.engine.reset_prefix_cache(reset_connector=reset_connector)

    def shutdown(self) -> None:
        """Free threads, memory and files; callers that wait get a RuntimeError."""
        if self._turns.is_mine:  # from a signal's handler
            self.engine.shutdown()
            return
        with self._turn():
            self.engine.shutdown()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Use the engine alone. An interrupt gets through while waiting, and in a step."""
        try:
            with hold_interrupts():
                self._turns.take()
                try:
                    with garbage_collected_later():
                        yield
                finally:
                    self._turns.end()
        finally:
            self._drop_given_up()

    def _drop_given_up(self) -> None:
        # Checked again after the turn: a caller that comes in between finds it taken and leaves.
        while self._given_up and self._turns.take_if_free():
            try:
                with garbage_collected_later():
                    self._drop()
            finally:
                self._turns.end()

    def _drop(self) -> None:
        while self._given_up:
            request_ids = self._given_up.popleft()
            for request_id in request_ids:
                self._forget(request_id)
            if request_ids and self.engine.is_running:
                self.engine.abort_request(request_ids)
        if self.engine.is_running:
            self.engine.settle()

    def _forget(self, request_id: str) -> None:
        call = self._calls.pop(request_id, None)
        if call is not None:
            call.pending_ids.discard(request_id)


class _Turns:
    """A lock that is handed on in the order of asking."""

    def __init__(self) -> None:
        # Reentrant: the garbage collector may call this while this thread is inside.
        self._lock = threading.RLock()
        self._owner: int | None = None
        self._waiting: deque[threading.Lock] = deque()

    @property
    def is_mine(self) -> bool:
        return self._owner == threading.get_ident()

    def take_if_free(self) -> bool:
        with self._lock:
            if self._owner is not None:
                return False
            self._owner = threading.get_ident()
            return True

    def take(self) -> None:
        """Wait for a turn; an interrupt ends the waiting."""
        if self.is_mine:
            raise RuntimeError("this thread is inside a step of this engine: it cannot call it")
        with self._lock:
            if self.take_if_free():
                return
            ticket = threading.Lock()
            ticket.acquire()
            self._waiting.append(ticket)
        try:
            with allow_interrupts():
                ticket.acquire()
        except BaseException:
            with self._lock:
                if ticket in self._waiting:
                    self._waiting.remove(ticket)
                else:  # the turn was handed over already
                    self.end()
            raise
        self._owner = threading.get_ident()

    def end(self) -> None:
        with self._lock:
            self._owner = -1 if self._waiting else None
            if self._waiting:
                self._waiting.popleft().release()
