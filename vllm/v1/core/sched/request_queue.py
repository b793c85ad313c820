"""Requests that wait for blocks and budget, in the order in which they are served."""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Iterator
from typing import Literal

from vllm.v1.request import Request


class RequestQueue:
    """A waiting queue: adding, peeking and removing never scan all of it.

    "fcfs": first come, first served. "priority": the lowest ``priority`` first, then the first
    queued. Neither reads a clock, because clocks are set.
    """

    def __init__(self, policy: Literal["fcfs", "priority"]) -> None:
        self._is_fcfs = policy == "fcfs"
        self._waiting: OrderedDict[str, Request] = OrderedDict()  # with "fcfs" in their order
        # With "priority". Entries of removed requests stay until they come up.
        self._heap: list[tuple[tuple[int, int], Request]] = []
        self._counter = itertools.count(1)

    def add(self, request: Request) -> None:
        """Queue a new request."""
        request.arrival_order = next(self._counter)
        self._put(request)

    def _put(self, request: Request) -> None:
        self._waiting[request.request_id] = request
        if not self._is_fcfs:
            heapq.heappush(self._heap, (_rank(request), request))

    def put_back(self, request: Request) -> None:
        """Queue a preempted request again, ahead of new ones of its priority."""
        self._put(request)
        if self._is_fcfs:
            self._waiting.move_to_end(request.request_id, last=False)

    def peek(self) -> Request:
        """Return the first request. StopIteration or IndexError: there is none."""
        if self._is_fcfs:
            return next(iter(self._waiting.values()))
        while True:
            request = self._heap[0][1]
            if self._waiting.get(request.request_id) is request:
                return request
            heapq.heappop(self._heap)

    def pop(self) -> Request:
        """Remove and return the first request."""
        request = self.peek()
        if self._heap:
            heapq.heappop(self._heap)
        self.remove(request)
        return request

    def remove(self, request: Request) -> None:
        """Remove a request, wherever it is."""
        del self._waiting[request.request_id]
        if not self._waiting:
            self._heap.clear()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        waiting = self._waiting.values()
        return iter(list(waiting) if self._is_fcfs else sorted(waiting, key=_rank))


def _rank(request: Request) -> tuple[int, int]:
    return request.priority, request.arrival_order
