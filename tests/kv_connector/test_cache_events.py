"""A listener on the network learns what enters and leaves the prefix cache."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from tests.engine.harness import core_of, engine, extraction_config, greedy, random_prompts
from vllm import AsyncEngineArgs, AsyncLLM
from vllm.config import KVEventsConfig, ParallelConfig, VllmConfig
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventPublisherFactory,
    KVEventBatch,
    ZmqEventPublisher,
)
from vllm.v1.core.cache_events import CacheEvents
from vllm.v1.core.prefix_hash import extend_prefix_hashes
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request

Checkpoint = Callable[..., Path]
PROMPTS = [p["prompt_token_ids"] for p in random_prompts(71, [60, 90, 33, 118, 75, 110] * 4)]
PATIENCE_S = 20.0


def free_address() -> str:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{one.getsockname()[1]}"


def events_config(**options: Any) -> dict[str, Any]:
    bound = [free_address().replace("127.0.0.1", "*") for _ in range(2)]
    config = {"enable_kv_cache_events": True, "endpoint": bound[0], "replay_endpoint": bound[1]}
    return {**config, **options}


@contextmanager
def connected(kind: int, address: str) -> Iterator[Any]:
    with zmq.Context() as context, context.socket(kind) as client:
        client.linger = 0
        client.connect(address.replace("*", "127.0.0.1"))
        yield client


def replay(address: str, first: int) -> list[tuple[int, KVEventBatch]]:
    """Batches from that number on."""
    found = []
    with connected(zmq.DEALER, address) as client:
        client.send_multipart((b"", first.to_bytes(8, "big")))
        while True:
            assert client.poll(PATIENCE_S * 1000), "no end of the replay"
            _, number, payload = client.recv_multipart()
            if not payload:
                assert number == ZmqEventPublisher.END_SEQ
                return found
            batch = msgspec.msgpack.decode(payload, type=KVEventBatch)
            found.append((int.from_bytes(number, "big"), batch))


def test_a_request_that_begins_again_under_other_hashes() -> None:
    """One that became too long for its model's first rotation: its prefixes are told anew."""
    message = EngineCoreRequest(
        request_id="a", prompt_token_ids=PROMPTS[1], sampling_params=greedy(1), arrival_time=0.0
    )
    request, events = Request(message), CacheEvents()
    events.request = request
    for is_long in (False, True):
        if is_long:
            request.become_long()
        for count in (48, 80):
            extend_prefix_hashes(request, count)
            for digest in request.prefix_hashes:
                events.store(0, digest)
    known = follow([KVEventBatch(ts=0.0, events=events.take())])
    assert sorted(map(len, known.values())) == [16, 16, 32, 32, 48, 48, 64, 64, 80, 80]
    assert all(tokens == PROMPTS[1][: len(tokens)] for tokens in known.values())


def follow(batches: list[KVEventBatch]) -> dict[tuple[int, int], list[int]]:
    """(group, hash) -> the tokens of its prefix, after these events."""
    known: dict[tuple[int, int], list[int]] = {}
    prefixes: dict[tuple[int, int | None], list[int]] = {}
    for event in (event for batch in batches for event in batch.events):
        if isinstance(event, AllBlocksCleared):
            known.clear()
        elif isinstance(event, BlockRemoved):
            for digest in event.block_hashes:
                del known[event.group_idx, digest]
        else:
            assert (event.block_size, event.medium, event.lora_id) == (16, "GPU", None)
            parent = event.parent_block_hash
            for place, digest in enumerate(event.block_hashes):
                tokens = event.token_ids[16 * place : 16 * (place + 1)]
                before = prefixes.get((-1, parent), []) if parent is not None else []
                whole = before + tokens
                prefixes[-1, digest] = whole
                assert (event.group_idx, digest) not in known, "stored twice"
                known[event.group_idx, digest] = whole
                parent = digest
    return known


def check_agrees(llm: Any, known: Collection[tuple[int, int]]) -> None:
    """With what the pool itself finds; of 16 tokens in two blocks one may be left there."""
    core = core_of(llm)
    index = core.scheduler.kv_cache_manager.pool._index
    found = {(group, int.from_bytes(digest[-8:], "big")) for group, digest, _ in index}
    assert found >= set(known)
    groups = core.kv_cache_config.kv_cache_groups
    halves = {i for i, group in enumerate(groups) if group.kv_cache_spec.block_size % 16}
    assert {group for group, _ in found - set(known)} <= halves
    coordinator = core.scheduler.kv_cache_manager.coordinator
    states = coordinator.recurrent.group_ids  # all of them have the events of the first
    assert {group for group, _ in known}.isdisjoint(states[1:])


@pytest.mark.parametrize("with_rows", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3_5"])
def test_a_listener_knows_what_the_pool_finds(
    family: str, with_rows: bool, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """In a pool that overwrites, in chunks; batches are numbered, and can be had again."""
    config = events_config(topic="kv")
    arguments: dict[str, Any] = {"max_model_len": 128, "max_num_batched_tokens": 48}
    if with_rows:
        arguments |= extraction_config([1, 2], tmp_path)
    blocks = {"num_gpu_blocks_override": 60}
    with engine(checkpoint(family), kv_events_config=config, **blocks, **arguments) as llm:
        with connected(zmq.SUB, config["endpoint"]) as listener:
            listener.subscribe("kv")
            time.sleep(0.3)
            for _ in range(2):
                llm.generate(PROMPTS, greedy(8), use_tqdm=False)
            assert listener.poll(PATIENCE_S * 1000)
            topic, number, payload = listener.recv_multipart()
        batches = replay(config["replay_endpoint"], 0)
        assert [number for number, _ in batches] == list(range(len(batches)))
        assert (topic, msgspec.msgpack.decode(payload, type=KVEventBatch)) == (
            b"kv",
            batches[int.from_bytes(number, "big")][1],
        )
        known = follow([batch for _, batch in batches])
        check_agrees(llm, known)
        starts = {tuple(p[:16]) for p in PROMPTS}
        assert all(tuple(tokens[:16]) in starts for tokens in known.values())
        events = [event for _, batch in batches for event in batch.events]
        assert {type(event) for event in events} == {BlockStored, BlockRemoved}
        assert batches[0][1].data_parallel_rank == 0
        assert len(replay(config["replay_endpoint"], len(batches) - 2)) == 2
        llm.reset_prefix_cache()
        llm.generate([[1, 2]], greedy(1), use_tqdm=False)
        batches = replay(config["replay_endpoint"], 0)
        assert AllBlocksCleared() in batches[-1][1].events
        assert not follow([batch for _, batch in batches])
        check_agrees(llm, [])


def test_from_a_process_of_its_own(checkpoint: Checkpoint) -> None:
    """Events leave there, and come to callbacks of the engine."""
    config = events_config()
    told: list[Any] = []

    async def run() -> list[Any]:
        arguments = {"model": str(checkpoint("llama")), "max_model_len": 128}
        llm = AsyncLLM.from_engine_args(AsyncEngineArgs(kv_events_config=config, **arguments))
        llm.on_kv_cache_events.append(told.extend)
        try:
            async for _ in llm.generate({"prompt_token_ids": PROMPTS[1]}, greedy(4), "one"):
                pass
            return await asyncio.to_thread(replay, config["replay_endpoint"], 0)
        finally:
            await llm.shutdown()

    batches = asyncio.run(run())
    assert [event for _, batch in batches for event in batch.events] == told
    assert len(follow([batch for _, batch in batches])) == 5  # 93 tokens, in steps of 16


def test_addresses_that_cannot_be_used(checkpoint: Checkpoint) -> None:
    config = events_config()
    with (
        engine(checkpoint("llama"), kv_events_config=config),
        pytest.raises(ValueError, match=r"kv_events_config\.endpoint='tcp://\*:\d+'.*in use"),
        engine(checkpoint("llama"), kv_events_config=config),
    ):
        pass
    for _ in range(8):  # each has let go of them when it has ended
        EventPublisherFactory.create(KVEventsConfig(**config)).shutdown()
    with pytest.raises(ValueError, match="replay_endpoint='nowhere'"):
        EventPublisherFactory.create(KVEventsConfig(**events_config(replay_endpoint="nowhere")))


@pytest.mark.parametrize("option", ["endpoint", "replay_endpoint"])
@pytest.mark.parametrize(
    "place", ["*:99999999", "*:65536", "10.0.0.2:70000", "[::1]:0", "*:5557x", "*:-1", "localhost"]
)
def test_ports_that_do_not_exist(option: str, place: str) -> None:
    """zmq itself would bind "*:99999999" to port 57599."""
    message = rf"kv_events_config\.{option}=.* has the port .*; use a number from 1 to 65535"
    with pytest.raises(ValueError, match=message):
        KVEventsConfig(enable_kv_cache_events=True, **{option: f"tcp://{place}"})
    assert KVEventsConfig(**{option: f"tcp://{place}"})  # not used


def test_a_port_for_each_engine() -> None:
    events = KVEventsConfig(enable_kv_cache_events=True, endpoint="tcp://*:65535")
    VllmConfig(kv_events_config=events)
    with pytest.raises(ValueError, match="from 1 to 65534, because 2 engines use one port each"):
        VllmConfig(kv_events_config=events, parallel_config=ParallelConfig(data_parallel_size=2))


@pytest.mark.parametrize(
    ("endpoint", "replay", "num_engines", "is_free"),
    [
        ("127.0.0.1:5557", "127.0.0.1:5557", 1, False),
        ("127.0.0.1:5557", "127.0.0.1:5558", 1, True),
        ("127.0.0.1:5557", "127.0.0.1:5558", 2, False),
        ("*:5560", "127.0.0.1:5558", 3, False),
        ("*:5560", "127.0.0.1:5557", 3, True),
        ("10.0.0.2:5557", "*:5557", 2, True),  # the first is another machine's
    ],
)
def test_ports_of_engines_that_meet(
    endpoint: str, replay: str, num_engines: int, is_free: bool
) -> None:
    """The second engine's events would be where the first one's are asked for again."""
    config = KVEventsConfig(endpoint=f"tcp://{endpoint}", replay_endpoint=f"tcp://{replay}")
    config.publisher = "zmq"
    if is_free:
        config.check_ports(num_engines)
        return
    with pytest.raises(ValueError, match=f"use ports that are at least {num_engines} apart"):
        config.check_ports(num_engines)


def test_this_machine_only_by_default() -> None:
    assert KVEventsConfig().endpoint == "tcp://127.0.0.1:5557"
    config = KVEventsConfig(enable_kv_cache_events=True, endpoint=free_address())
    publisher = EventPublisherFactory.create(config)
    try:
        port = int(config.endpoint.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), PATIENCE_S):
            pass
        with socket.socket() as other:  # free on all other addresses of this machine
            other.bind(("127.0.0.2", port))
    finally:
        publisher.shutdown()


def test_ports_of_ranks() -> None:
    offset = ZmqEventPublisher.offset_endpoint_port
    assert offset("tcp://*:5557", 0) == "tcp://*:5557"
    assert offset("tcp://*:5557", 2) == "tcp://*:5559"
    assert offset("inproc://events", 1) == "inproc://events_dp1"
    assert offset(None, 1) is None
