"""Queues keep an order, and nothing of requests that left them."""

from __future__ import annotations

import gc
import weakref
from typing import Literal

import pytest

from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request

Policy = Literal["fcfs", "priority"]


def request(name: str, priority: int = 0, arrival_time: float = 0.0) -> Request:
    return Request(
        EngineCoreRequest(
            request_id=name,
            prompt_token_ids=[1],
            sampling_params=SamplingParams(),
            arrival_time=arrival_time,
            priority=priority,
        )
    )


@pytest.mark.parametrize(
    ("policy", "order"), [("fcfs", "zyabcd"), ("priority", "bdyacz")], ids=["fcfs", "priority"]
)
def test_who_was_preempted_comes_first_of_its_rank(policy: Policy, order: str) -> None:
    queue = RequestQueue(policy)
    for name, priority in [("y", 1), ("a", 1), ("z", 2), ("b", 0), ("c", 1), ("d", 0)]:
        queue.add(request(name, priority))
    started = [one for one in queue if one.request_id in "yz"]
    for one in started:
        queue.remove(one)
    for one in started:
        queue.put_back(one)
    assert [one.request_id for one in queue] == list(order)
    assert [queue.pop().request_id for _ in range(len(queue))] == list(order)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_clock_that_is_set_back_changes_no_order(policy: Policy) -> None:
    queue = RequestQueue(policy)
    for name, arrival_time in [("a", 100.0), ("b", 40.0), ("c", 41.0), ("d", -1.0)]:
        queue.add(request(name, arrival_time=arrival_time))
    first = queue.pop()
    queue.put_back(first)
    assert [queue.pop().request_id for _ in range(4)] == list("abcd")


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_an_emptied_queue_holds_no_request(policy: Policy) -> None:
    queue = RequestQueue(policy)
    requests = [request(name) for name in "abc"]
    for one in requests:
        queue.add(one)
    for one in requests:
        queue.remove(one)
    gone = [weakref.ref(one) for one in requests]
    del one, requests
    gc.collect()
    assert [reference() for reference in gone] == [None] * 3
