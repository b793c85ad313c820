"""Cache events as connectors of other packages collect them; on the wire as upstream's releases.

The engine takes them (``take_events``), adds those of its own pool where ``kv_events_config``
enables them, and hands them to who asked (``on_kv_cache_events`` of ``LLMEngine`` and ``AsyncLLM``)
and to the publisher of that config.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from vllm.distributed.zmq_events import END_OF_REPLAY, EventSockets, offset_endpoint

if TYPE_CHECKING:
    from vllm.config import KVEventsConfig

ExternalBlockHash = bytes | int
MEDIUM_GPU = "GPU"
"""``medium`` of blocks in the pool."""


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Events of one moment."""

    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class KVCacheEvent(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    """Something that happened to blocks of a cache."""

    def __hash__(self) -> int:
        return hash(msgspec.msgpack.encode(self))


class BlockStored(KVCacheEvent):
    """Blocks that can be found from now on."""

    block_hashes: list[ExternalBlockHash]
    parent_block_hash: ExternalBlockHash | None
    token_ids: list[int]
    block_size: int
    """Tokens of one block."""
    lora_id: int | None = None
    medium: str | None = None
    """Where they are: "GPU", "CPU", "DISK"."""
    lora_name: str | None = None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    """What beside the tokens entered each hash."""
    group_idx: int | None = None

    __hash__ = KVCacheEvent.__hash__


class BlockRemoved(KVCacheEvent):
    """Blocks that can be found no longer."""

    block_hashes: list[ExternalBlockHash]
    medium: str | None = None
    group_idx: int | None = None

    __hash__ = KVCacheEvent.__hash__


class AllBlocksCleared(KVCacheEvent):
    """Nothing can be found."""

    __hash__ = KVCacheEvent.__hash__


class KVEventBatch(EventBatch):
    """Cache events of one moment."""

    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


def events_from_message(events: list[Any]) -> list[BlockStored | BlockRemoved | AllBlocksCleared]:
    """Events that were taken apart for a message."""
    return msgspec.convert(events, list[BlockStored | BlockRemoved | AllBlocksCleared])


class KVEventAggregator:
    """Counts the events of several workers; those that all of them had are common."""

    def __init__(self, num_workers: int) -> None:
        if num_workers <= 0:
            raise ValueError(f"num_workers={num_workers} is not a positive number")
        self._num_workers = num_workers
        self._counts: Counter[KVCacheEvent] = Counter()

    def add_events(self, events: Sequence[KVCacheEvent]) -> None:
        """Events of one worker."""
        self._counts.update(events)

    def get_common_events(self) -> list[KVCacheEvent]:
        """Those that every worker had."""
        return [event for event, count in self._counts.items() if count == self._num_workers]

    def get_all_events(self) -> list[KVCacheEvent]:
        """All, as often as they were added."""
        return list(self._counts.elements())

    def clear_events(self) -> None:
        """Forget them."""
        self._counts.clear()

    def increment_workers(self, count: int = 1) -> None:
        """So many workers more take part."""
        if count <= 0:
            raise ValueError(f"count={count} is not a positive number")
        self._num_workers += count

    def reset_workers(self) -> None:
        """One worker takes part."""
        self._num_workers = 1

    def get_number_of_workers(self) -> int:
        """Workers that take part."""
        return self._num_workers


class KVConnectorKVEvents(ABC):
    """What a connector's worker side returns as its events."""

    @abstractmethod
    def add_events(self, events: list[KVCacheEvent]) -> None:
        """Events of one worker."""

    @abstractmethod
    def aggregate(self) -> KVConnectorKVEvents:
        """Those that every worker had."""

    @abstractmethod
    def increment_workers(self, count: int = 1) -> None:
        """So many workers more take part."""

    @abstractmethod
    def get_all_events(self) -> list[KVCacheEvent]:
        """All events."""

    @abstractmethod
    def get_number_of_workers(self) -> int:
        """Workers that take part."""

    @abstractmethod
    def clear_events(self) -> None:
        """Forget them."""

    def merge(self, other: KVConnectorKVEvents) -> KVConnectorKVEvents:
        """This, with the other's events too."""
        self.add_events(other.get_all_events())
        return self


class EventPublisher(ABC):
    """Sends batches of events to who listens."""

    def __init__(self, data_parallel_rank: int = 0) -> None:
        self._data_parallel_rank = data_parallel_rank

    @abstractmethod
    def publish(self, events: EventBatch) -> None:
        """Send a batch; returns at once."""

    @abstractmethod
    def shutdown(self) -> None:
        """Send what is left, and end."""


class NullEventPublisher(EventPublisher):
    """Nobody listens."""

    def publish(self, events: EventBatch) -> None:
        return

    def shutdown(self) -> None:
        return


class ZmqEventPublisher(EventPublisher):
    """Numbered batches on a PUB socket, and again for who missed some (``zmq_events``).

    An ``endpoint`` with ``*``, or of a local kind, is bound, others are connected to; those of
    data-parallel rank n have the n-th next port. Of the last ``buffer_steps`` batches
    ``replay_endpoint`` answers. ``publish`` waits where ``max_queue_size`` of them wait.
    """

    END_SEQ = END_OF_REPLAY

    def __init__(
        self,
        data_parallel_rank: int,
        endpoint: str = "tcp://*:5557",
        replay_endpoint: str | None = None,
        buffer_steps: int = 10_000,
        hwm: int = 100_000,
        max_queue_size: int = 100_000,
        topic: str = "",
    ) -> None:
        super().__init__(data_parallel_rank)
        own = offset_endpoint(endpoint, data_parallel_rank)
        replay = offset_endpoint(replay_endpoint, data_parallel_rank)
        assert own is not None
        self._sockets = EventSockets(own, replay, topic, hwm, buffer_steps, max_queue_size)
        self._is_open = True

    offset_endpoint_port = staticmethod(offset_endpoint)

    def publish(self, events: EventBatch) -> None:
        if not self._is_open:
            raise RuntimeError("this publisher was shut down")
        if events.data_parallel_rank is None:
            events.data_parallel_rank = self._data_parallel_rank
        self._sockets.put(events)

    def shutdown(self) -> None:
        self._is_open = False
        self._sockets.shutdown()


class EventPublisherFactory:
    """Makes publishers by name: "null", "zmq", and those that somebody registered."""

    _makers: ClassVar[dict[str, Callable[..., EventPublisher]]] = {
        "null": NullEventPublisher,
        "zmq": ZmqEventPublisher,
    }

    @classmethod
    def register_publisher(cls, name: str, maker: Callable[..., EventPublisher]) -> None:
        """Make ``maker(data_parallel_rank=..., **options)`` available as ``publisher=name``.

        KeyError: the name is taken.
        """
        if name in cls._makers:
            raise KeyError(f"a publisher {name!r} is registered already; choose another name")
        cls._makers[name] = maker

    @classmethod
    def create(cls, config: KVEventsConfig | None, data_parallel_rank: int = 0) -> EventPublisher:
        """The one that the config names; "null" without one, or where nothing is enabled.

        ValueError: nobody registered that name.
        """
        if config is None or not config.enable_kv_cache_events:
            return NullEventPublisher(data_parallel_rank)
        options = asdict(config)
        del options["enable_kv_cache_events"]
        name = options.pop("publisher")
        if name not in cls._makers:
            known = ", ".join(sorted(cls._makers))
            raise ValueError(f"publisher={name!r} is not registered; registered are: {known}")
        return cls._makers[name](data_parallel_rank=data_parallel_rank, **options)
