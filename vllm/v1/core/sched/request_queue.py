"""Requests that wait for blocks and budget, in the order in which they are served."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from typing import Literal

from vllm.v1.request import Request

Rank = tuple[int, float, int]


class RequestQueue:
    """By a policy; nothing but iterating looks at the whole of it.

    fcfs: first come, first served. priority: lowest ``priority`` first, then the earliest arrival,
    then the first queued.
    """

    def __init__(self, policy: Literal["fcfs", "priority"]) -> None:
        self._by_priority = policy == "priority"
        # Entries of removed requests stay in the heap until they come up.
        self._heap: list[tuple[Rank, Request]] = []
        self._waiting: dict[str, Request] = {}
        self._counter = itertools.count(1)

    def add(self, request: Request) -> None:
        request.arrival_order = next(self._counter)
        self._push(request)

    def put_back(self, request: Request) -> None:
        """Queue a request that was preempted: it comes before new ones of its rank."""
        if not self._by_priority:
            request.arrival_order = -next(self._counter)
        self._push(request)

    def _push(self, request: Request) -> None:
        self._waiting[request.request_id] = request
        heapq.heappush(self._heap, (self._rank(request), request))

    def _rank(self, request: Request) -> Rank:
        if self._by_priority:
            return request.priority, request.arrival_time, request.arrival_order
        return 0, 0.0, request.arrival_order

    def peek(self) -> Request:
        while self._waiting.get(self._heap[0][1].request_id) is not self._heap[0][1]:
            heapq.heappop(self._heap)
        return self._heap[0][1]

    def pop(self) -> Request:
        request = self.peek()
        heapq.heappop(self._heap)
        del self._waiting[request.request_id]
        return request

    def remove(self, request: Request) -> None:
        del self._waiting[request.request_id]

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(sorted(self._waiting.values(), key=self._rank))
