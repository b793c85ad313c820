"""Requests that wait for blocks and budget, in the order in which they are served."""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Iterator
from typing import Literal, Protocol

from vllm.v1.request import Request


class RequestQueue(Protocol):
    """What the scheduler asks of a waiting queue; no operation looks at the whole of it."""

    def add(self, request: Request) -> None:
        """Queue a new request."""
        ...

    def put_back(self, request: Request) -> None:
        """Queue a request that was preempted: it comes before new ones of its rank."""
        ...

    def peek(self) -> Request: ...

    def pop(self) -> Request: ...

    def remove(self, request: Request) -> None: ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...


class FCFSQueue:
    """First come, first served."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, Request] = OrderedDict()

    def add(self, request: Request) -> None:
        self._requests[request.request_id] = request

    def put_back(self, request: Request) -> None:
        self._requests[request.request_id] = request
        self._requests.move_to_end(request.request_id, last=False)

    def peek(self) -> Request:
        return next(iter(self._requests.values()))

    def pop(self) -> Request:
        return self._requests.popitem(last=False)[1]

    def remove(self, request: Request) -> None:
        del self._requests[request.request_id]

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())


def _rank(request: Request) -> tuple[int, float, int]:
    return request.priority, request.arrival_time, request.arrival_order


class PriorityQueue:
    """Lowest ``priority`` first, then the earliest arrival, then the first queued."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, float, int], Request]] = []
        self._waiting: dict[str, Request] = {}
        self._counter = itertools.count()

    def add(self, request: Request) -> None:
        request.arrival_order = next(self._counter)
        self.put_back(request)

    def put_back(self, request: Request) -> None:
        self._waiting[request.request_id] = request
        heapq.heappush(self._heap, (_rank(request), request))

    def peek(self) -> Request:
        # Entries of removed requests stay in the heap until they come up.
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
        return iter(sorted(self._waiting.values(), key=_rank))


def make_queue(policy: Literal["fcfs", "priority"]) -> RequestQueue:
    """The queue of a scheduling policy."""
    return PriorityQueue() if policy == "priority" else FCFSQueue()
