"""Requests that wait for blocks and budget, in the order in which they are served."""

from __future__ import annotations

import heapq
import itertools
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
        self._heap: list[tuple[tuple[int, int], Request]] = []
        self._waiting: dict[str, Request] = {}
        self._counter = itertools.count(1)

    def _rank(self, request: Request) -> tuple[int, int]:
        return 0 if self._is_fcfs else request.priority, request.arrival_order

    def _push(self, request: Request) -> None:
        self._waiting[request.request_id] = request
        heapq.heappush(self._heap, (self._rank(request), request))

    def add(self, request: Request) -> None:
        """Queue a new request."""
        request.arrival_order = next(self._counter)
        self._push(request)

    def put_back(self, request: Request) -> None:
        """Queue a preempted request again, ahead of new ones of its rank."""
        if self._is_fcfs:
            request.arrival_order = -next(self._counter)
        self._push(request)

    def peek(self) -> Request:
        # Entries of removed requests stay in the heap until they come up.
        while True:
            request = self._heap[0][1]
            if self._waiting.get(request.request_id) is request:
                return request
            heapq.heappop(self._heap)

    def pop(self) -> Request:
        request = self.peek()
        heapq.heappop(self._heap)
        self.remove(request)
        return request

    def remove(self, request: Request) -> None:
        del self._waiting[request.request_id]
        if not self._waiting:
            self._heap.clear()

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(sorted(self._waiting.values(), key=self._rank))
