"""Cache events, in the classes that third-party connectors use and upstream's wire format.

    PUB      topic, number of the batch (8 bytes, big endian), batch as msgpack
    ROUTER   (``replay_endpoint``) a client sends the number of a batch and gets that batch and all
             later ones that are kept: an empty frame, number, batch; at the end -1 and an empty
             batch

The engine takes the events of connectors (``take_events``) and adds those of its own pool if
``kv_events_config`` enables them. It hands all of them to the callbacks ``on_kv_cache_events`` of
``LLMEngine`` and ``AsyncLLM`` and to the publisher of that config.
"""

from __future__ import annotations

import itertools
import queue
import threading
import uuid
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from vllm.logger import init_logger

if TYPE_CHECKING:
    import zmq

    from vllm.config import KVEventsConfig

logger = init_logger(__name__)

_POLL_SECONDS = 0.1
_SHUTDOWN_SECONDS = 1.0
_LINGER_MS = int(_SHUTDOWN_SECONDS * 1000)

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
    """Memory that holds the blocks: "GPU", "CPU" or "DISK"."""
    lora_name: str | None = None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    """Inputs of each hash besides the tokens."""
    group_idx: int | None = None

    __hash__ = KVCacheEvent.__hash__


class BlockRemoved(KVCacheEvent):
    """Blocks that can no longer be found."""

    block_hashes: list[ExternalBlockHash]
    medium: str | None = None
    group_idx: int | None = None

    __hash__ = KVCacheEvent.__hash__


class AllBlocksCleared(KVCacheEvent):
    """The cache was cleared: no block can be found."""

    __hash__ = KVCacheEvent.__hash__


class KVEventBatch(EventBatch):
    """Cache events of one moment."""

    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


def events_from_message(events: list[Any]) -> list[BlockStored | BlockRemoved | AllBlocksCleared]:
    """Return events again, from the plain values that a message carries."""
    return msgspec.convert(events, list[BlockStored | BlockRemoved | AllBlocksCleared])


class KVEventAggregator:
    """Counts the events of several workers; an event of all workers is common."""

    def __init__(self, num_workers: int) -> None:
        if num_workers <= 0:
            raise ValueError(f"num_workers={num_workers} is not a positive number")
        self._num_workers = num_workers
        self._counts: Counter[KVCacheEvent] = Counter()

    def add_events(self, events: Sequence[KVCacheEvent]) -> None:
        """Add the events of one worker."""
        self._counts.update(events)

    def get_common_events(self) -> list[KVCacheEvent]:
        """Return the events that every worker had."""
        return [event for event, count in self._counts.items() if count == self._num_workers]

    def get_all_events(self) -> list[KVCacheEvent]:
        """Return all events, each one once for each time that it was added."""
        return list(self._counts.elements())

    def clear_events(self) -> None:
        """Forget all events."""
        self._counts.clear()

    def increment_workers(self, count: int = 1) -> None:
        """Count ``count`` more workers."""
        if count <= 0:
            raise ValueError(f"count={count} is not a positive number")
        self._num_workers += count

    def reset_workers(self) -> None:
        """Set the number of workers to one."""
        self._num_workers = 1

    def get_number_of_workers(self) -> int:
        """Return the number of workers."""
        return self._num_workers


class KVConnectorKVEvents(ABC):
    """Events that the worker side of a connector returns."""

    @abstractmethod
    def add_events(self, events: list[KVCacheEvent]) -> None:
        """Add the events of one worker."""

    @abstractmethod
    def aggregate(self) -> KVConnectorKVEvents:
        """Return the events that every worker had."""

    @abstractmethod
    def increment_workers(self, count: int = 1) -> None:
        """Count ``count`` more workers."""

    @abstractmethod
    def get_all_events(self) -> list[KVCacheEvent]:
        """Return all events."""

    @abstractmethod
    def get_number_of_workers(self) -> int:
        """Return the number of workers."""

    @abstractmethod
    def clear_events(self) -> None:
        """Forget all events."""

    def merge(self, other: KVConnectorKVEvents) -> KVConnectorKVEvents:
        """Add the events of ``other`` to these, and return these."""
        self.add_events(other.get_all_events())
        return self


class EventPublisher(ABC):
    """Sends batches of events to subscribers."""

    def __init__(self, data_parallel_rank: int = 0) -> None:
        self._data_parallel_rank = data_parallel_rank

    @abstractmethod
    def publish(self, events: EventBatch) -> None:
        """Send a batch, and return at once."""

    @abstractmethod
    def shutdown(self) -> None:
        """Send the batches that are left, and end."""


class NullEventPublisher(EventPublisher):
    """Drops all events."""

    def publish(self, events: EventBatch) -> None:
        return

    def shutdown(self) -> None:
        return


def _offset_endpoint(endpoint: str | None, data_parallel_rank: int) -> str | None:
    """Return the endpoint of a data-parallel rank: ports count up, names get a suffix."""
    if endpoint is None or data_parallel_rank == 0:
        return endpoint
    if endpoint.startswith("tcp://"):
        base, _, port = endpoint.rpartition(":")
        return f"{base}:{int(port) + data_parallel_rank}"
    return f"{endpoint}_dp{data_parallel_rank}"


def _is_bound(endpoint: str) -> bool:
    is_local = endpoint.startswith(("ipc://", "inproc://", "tcp://127.0.0.1:"))
    return is_local or "*" in endpoint or "::" in endpoint


class ZmqEventPublisher(EventPublisher):
    """Sends numbered batches on a PUB socket, and sends batches again to subscribers that ask.

    The publisher binds an ``endpoint`` with ``*`` or of this machine, and connects to others. On
    data-parallel rank n it adds n to the port. ``replay_endpoint`` serves the last ``buffer_steps``
    batches. ``publish`` waits while ``max_queue_size`` batches are queued; the publisher's own
    thread uses the sockets. ValueError: an address cannot be used.
    """

    END_SEQ = (-1).to_bytes(8, "big", signed=True)
    offset_endpoint_port = staticmethod(_offset_endpoint)

    def __init__(
        self,
        data_parallel_rank: int,
        endpoint: str = "tcp://127.0.0.1:5557",
        replay_endpoint: str | None = None,
        buffer_steps: int = 10_000,
        hwm: int = 100_000,
        max_queue_size: int = 100_000,
        topic: str = "",
    ) -> None:
        import zmq  # imported late: an engine that publishes no events starts without zmq

        super().__init__(data_parallel_rank)
        own = _offset_endpoint(endpoint, data_parallel_rank)
        replay = _offset_endpoint(replay_endpoint, data_parallel_rank)
        assert own is not None
        self._topic = topic.encode()
        self._queue: queue.Queue[msgspec.Struct] = queue.Queue(max_queue_size)
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=buffer_steps)
        self._numbers = itertools.count()
        self._encoder = msgspec.msgpack.Encoder()
        self._is_ending = False
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._publish = context.socket(zmq.PUB)
        self._publish.set_hwm(hwm)
        self._replay = None if replay is None else context.socket(zmq.ROUTER)
        try:
            _open(self._publish, "endpoint", own, binds=_is_bound(own))
            if self._replay is not None and replay is not None:
                self._replay.set_hwm(buffer_steps + 1)  # zmq drops messages beyond this number
                _open(self._replay, "replay_endpoint", replay, binds=True)
        except ValueError:
            self._close()
            raise
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def publish(self, events: EventBatch) -> None:
        if self._is_ending:
            raise RuntimeError("this publisher was shut down")
        if events.data_parallel_rank is None:
            events.data_parallel_rank = self._data_parallel_rank
        self._queue.put(events)

    def shutdown(self) -> None:
        """Send the batches that are left, for a second at most, and free the addresses. May be
        called twice."""
        self._is_ending = True
        self._thread.join(2 * _SHUTDOWN_SECONDS)

    def _run(self) -> None:
        while not (self._is_ending and self._queue.empty()):
            for act in (self._send_next, self._answer):
                try:
                    act()
                except Exception:  # the engine waits for this thread, so it goes on
                    logger.exception("cache events are not published")
        self._close()

    def _send_next(self) -> None:
        try:
            batch = self._queue.get(timeout=_POLL_SECONDS)
        except queue.Empty:
            return
        parts = (next(self._numbers).to_bytes(8, "big"), self._encoder.encode(batch))
        self._sent.append(parts)
        self._publish.send_multipart((self._topic, *parts))

    def _answer(self) -> None:
        """Answer the clients that asked for batches which they missed."""
        while self._replay is not None and self._replay.poll(0):
            client, *_, start = self._replay.recv_multipart()
            first = int.from_bytes(start, "big")
            for number, payload in self._sent:
                if int.from_bytes(number, "big") >= first:
                    self._replay.send_multipart((client, b"", number, payload))
            self._replay.send_multipart((client, b"", self.END_SEQ, b""))

    def _close(self) -> None:
        for socket in (self._publish, self._replay):
            if socket is not None:
                _close(socket, linger_ms=0 if socket is self._replay else _LINGER_MS)


def _close(socket: zmq.Socket[bytes], linger_ms: int) -> None:
    """Close ``socket`` and wait until its address is free: zmq closes it later, on a thread of its
    own, and then ends the socket's monitor."""
    import zmq

    address = f"inproc://{uuid.uuid4().hex}"  # zmq's own is one for all sockets of a descriptor
    with socket.get_monitor_socket(zmq.EVENT_MONITOR_STOPPED, address) as monitor:
        socket.close(linger_ms)
        monitor.poll(_LINGER_MS)


def _open(socket: zmq.Socket[bytes], option: str, address: str, *, binds: bool) -> None:
    import zmq

    try:
        (socket.bind if binds else socket.connect)(address)
    except zmq.ZMQError as error:
        raise ValueError(
            f"kv_events_config.{option}={address!r}: {error}; use an address such as "
            "'tcp://127.0.0.1:5557' that is free"
        ) from error


class EventPublisherFactory:
    """Makes publishers by name: "null", "zmq" and registered ones."""

    _makers: ClassVar[dict[str, Callable[..., EventPublisher]]] = {
        "null": NullEventPublisher,
        "zmq": ZmqEventPublisher,
    }

    @classmethod
    def register_publisher(cls, name: str, maker: Callable[..., EventPublisher]) -> None:
        """Make ``maker(data_parallel_rank=..., **options)`` available as ``publisher=name``.

        KeyError: the name is taken already.
        """
        if name in cls._makers:
            raise KeyError(f"a publisher {name!r} is registered already; choose another name")
        cls._makers[name] = maker

    @classmethod
    def create(cls, config: KVEventsConfig | None, data_parallel_rank: int = 0) -> EventPublisher:
        """Make the publisher that the config names; "null" if there is no config, or if it does not
        enable events.

        ValueError: no publisher of that name is registered.
        """
        if config is None or not config.enable_kv_cache_events or config.publisher == "null":
            return NullEventPublisher(data_parallel_rank)
        options = asdict(config)
        del options["enable_kv_cache_events"]
        name = options.pop("publisher")
        if name not in cls._makers:
            known = ", ".join(sorted(cls._makers))
            raise ValueError(f"publisher={name!r} is not registered; registered are: {known}")
        return cls._makers[name](data_parallel_rank=data_parallel_rank, **options)
