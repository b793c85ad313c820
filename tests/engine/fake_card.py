"""A card made of host memory, on which waiting can be forbidden and work can be done late.

Tensors of this card say that they are on ``cuda:0`` and compute on the CPU, in the order that a
``tests.engine.card_order`` chooses. Between
:meth:`FakeCard.no_waiting` and its end every operation for which a real card would have to be
waited for raises :class:`Waited`: values that become Python numbers, shapes that depend on
values, copies from or to memory that is not pinned, events that are synchronised.
"""

from __future__ import annotations

import dataclasses
import gc
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, get_type_hints

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.engine.card_order import POISON, AtOnce, Launch
from vllm.ops.operation import Operation, Source, Written, use_sources
from vllm.ops.sources import find_source
from vllm.platforms.cuda import CudaPlatform
from vllm.v1.worker import row_extractor

CARD = torch.device("cuda", 0)
aten = torch.ops.aten
VALUES_TO_HOST = {
    aten._local_scalar_dense.default,
    aten.equal.default,
    aten.is_nonzero.default,
    aten.item.default,
}
SHAPE_FROM_VALUES = {
    aten.nonzero.default,
    aten.masked_select.default,
    aten.bincount.default,
    aten.repeat_interleave.Tensor,
    aten._unique2.default,
    aten.unique_consecutive.default,
    aten.unique_dim.default,
}
NEW_MEMORY = {aten.empty_like.default, aten.zeros_like.default, aten.full_like.default}


class Waited(AssertionError):
    """Something that a step must not do."""


class CardTensor(torch.Tensor):
    """A tensor of the card; ``inner`` holds its values."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> CardTensor:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device="meta",
            dispatch_device=True,
        )
        made.inner = inner
        THE_CARD.memory.hold(made)
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CARD

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return THE_CARD.run(func, args, kwargs or {})


def each(change: Callable[[Any], Any], value: Any) -> Any:
    """``value`` with every leaf changed; ``tree_map`` takes longer than the operations do."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*[each(change, part) for part in value])
    if isinstance(value, tuple | list):
        return type(value)(each(change, part) for part in value)
    if isinstance(value, dict):
        return {key: each(change, part) for key, part in value.items()}
    return change(value)


def unwrap(value: Any) -> Any:
    """The same with the values of card tensors, inside of dataclasses too."""
    if isinstance(value, CardTensor):
        return value.inner
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **each(unwrap, fields))
    return value


def wrap(value: Any) -> Any:
    is_plain = isinstance(value, torch.Tensor) and not isinstance(value, CardTensor)
    return CardTensor(value) if is_plain else value


class CardMemory:
    """Bytes of the storages that tensors of the card stand in; what one stream let go of, another
    does not get."""

    def __init__(self) -> None:
        self._used: Counter[_Stream] = Counter()
        self._peaks: Counter[_Stream] = Counter()
        self._num_users: dict[int, int] = {}
        self._allocated_on: dict[int, _Stream] = {}
        self._changing = threading.RLock()

    @property
    def used_bytes(self) -> int:
        return self._used.total()

    def hold(self, tensor: CardTensor) -> None:
        storage = tensor.inner.untyped_storage()
        place, stream = storage.data_ptr(), THE_CARD.current_stream()
        weakref.finalize(tensor, self._release, storage).atexit = False
        with self._changing:
            self._num_users[place] = self._num_users.get(place, 0) + 1
            if self._num_users[place] == 1:
                self._allocated_on[place] = stream
                self._used[stream] += storage.nbytes()
                self._peaks[stream] = max(self._peaks[stream], self._used[stream])

    def _release(self, storage: torch.UntypedStorage) -> None:
        place = storage.data_ptr()
        with self._changing:
            self._num_users[place] -= 1
            if self._num_users[place] == 0:
                del self._num_users[place]
                stream = self._allocated_on.pop(place)
                self._used[stream] -= storage.nbytes()
                THE_CARD.order.release(stream, storage)

    def measure_peak(self, run: Callable[[], object]) -> int:
        """Bytes that ``run`` takes at its peak beside what is there."""
        return self.measure_peaks(run).total()

    def measure_peaks(self, run: Callable[[], object]) -> Counter[str]:
        """The same of each stream; of those that are not the main one, together."""
        gc.collect()
        before, self._peaks = self._used.copy(), self._used.copy()
        run()
        peaks: Counter[str] = Counter()
        for stream, peak in self._peaks.items():
            peaks[stream.name] += peak - before[stream]
        return peaks


class FakeCard:
    """Runs the operations; what it is asked to watch for is found in ``run``."""

    def __init__(self, order: AtOnce | None = None) -> None:
        self.order = order or AtOnce()
        self.watched_thread: int | None = None
        self.memory = CardMemory()
        self.num_stream_waits = 0
        """Number of times that a stream was made to wait for an event."""
        self.copies: list[tuple[str, torch.dtype, int]] = []
        """Stream, dtype and bytes of each copy to the host."""
        self.launches: Counter[tuple[str, str]] = Counter()
        """Number of times that each stream was given each operation, but for new memory."""
        self.host_copies: list[int] = []
        """Bytes of each copy between tensors on the host, by the watched thread."""
        self.pinned_bytes: list[int] = []
        """Bytes of every tensor that needed new pinned memory: torch keeps what others left, in
        classes of powers of two."""
        self._left_pinned: Counter[int] = Counter()
        self._pinned: set[int] = set()
        self._threads = threading.local()
        self._pinning = threading.RLock()

    def current_stream(self, device: torch.device | None = None) -> _Stream:
        """Return this thread's stream."""
        stream: _Stream = getattr(self._threads, "stream", _MAIN)
        return stream

    @contextmanager
    def on_stream(self, stream: _Stream) -> Iterator[None]:
        before, self._threads.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self._threads.stream = before

    @contextmanager
    def no_waiting(self) -> Iterator[None]:
        """Inside the block waiting is an error, on this thread."""
        self.watched_thread = threading.get_ident()
        try:
            yield
        finally:
            self.watched_thread = None

    def waits(self, what: object) -> None:
        """Called where a real card is waited for."""
        if self.watched_thread == threading.get_ident():
            raise Waited(f"{what} waits for the device")

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        size_class, storage = (tensor.nbytes - 1).bit_length(), tensor.untyped_storage()
        with self._pinning:
            self._left_pinned[size_class] -= 1
            if self._left_pinned[size_class] < 0:
                self._left_pinned[size_class] = 0
                self.pinned_bytes.append(tensor.nbytes)
            self._pinned.add(storage.data_ptr())
        weakref.finalize(storage, self._unpin, storage.data_ptr(), size_class).atexit = False
        return tensor

    def _unpin(self, place: int, size_class: int) -> None:
        with self._pinning:
            self._left_pinned[size_class] += 1
            self._pinned.discard(place)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._pinned

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One operation of which a tensor is, or is to be, on the card."""
        if func is torch.ops.prim.device.default:  # asked by torch's own C++, which has no card
            return torch.device("cpu")
        if any(isinstance(x, CardTensor) for x in args) and func not in VALUES_TO_HOST:
            parts = func.decompose(*args, **kwargs)  # of what inference mode leaves whole
            if parts is not NotImplemented:
                return parts
        self._check(func, args, kwargs)
        asked = kwargs.get("device")
        inner = {k: unwrap(v) for k, v in kwargs.items()}
        if asked is not None:
            inner["device"] = torch.device("cpu")
        is_pinned = inner.pop("pin_memory", None)
        to_host = asked is not None and asked.type == "cpu"
        if func in VALUES_TO_HOST or func in SHAPE_FROM_VALUES or to_host:
            if func not in NEW_MEMORY:
                self.order.synchronize_stream(self.current_stream())
            result = func(*each(unwrap, args), **inner)
        else:
            result = self._launch(func, each(unwrap, args), each(unwrap, inner))
        if to_host:
            return self.pin(result) if is_pinned else result
        if func is aten.copy_.default:
            return args[0]
        mine = {id(a.inner): a for a in args if isinstance(a, CardTensor)}
        with torch.inference_mode(_makes_inference_tensors(func, args)):
            return each(lambda x: mine.get(id(x)) if id(x) in mine else wrap(x), result)

    def _launch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The operation on the values, now or when the order wants it."""
        returns = [r.alias_info for r in func._schema.returns]
        if any(alias is not None and not alias.is_write for alias in returns):
            return func(*args, **kwargs)  # a view
        written = [
            value
            for argument, value in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        written += [kwargs[name] for name in ("out",) if name in kwargs]
        reads = _storages((args, kwargs))
        if not self.order.is_late or not reads:  # what reads nothing has its memory for itself
            result = func(*args, **kwargs)
            self._give(func._schema.name, reads, _storages((written, result)), _nothing)
            return result
        if written:
            each(_poison_host, [x for x in written if self.is_pinned(x)])
            self._give(func._schema.name, reads, _storages(written), lambda: func(*args, **kwargs))
            return written[0]
        with no_dispatch():
            shapes = func(*each(_shape_of, args), **each(_shape_of, kwargs))
        result = each(_poisoned, shapes)

        def run() -> None:
            _put(func(*args, **kwargs), result)

        self._give(func._schema.name, reads, _storages(result), run)
        return result

    def kernel(self, operation: Operation[Any], args: tuple[Any, ...]) -> None:
        """One of the engine's operations; what it does is neither on the card nor pins memory."""
        inner = each(unwrap, args)
        hints = get_type_hints(operation.body, include_extras=True).values()
        written = [x for x, hint in zip(inner, hints, strict=False) if hint is Written]

        def run() -> None:
            operation.body(*inner)

        if not self.order.is_late:
            run()
            run = _nothing
        self._give(operation.name, _storages(inner), _storages(written), run)

    def upload(self, tensor: torch.Tensor, non_blocking: bool) -> CardTensor:
        """A copy on the card."""
        if not (non_blocking and self.is_pinned(tensor)):
            self.waits("a copy to the card from memory that is not pinned")
            return CardTensor(tensor.clone())
        there = torch.empty_like(tensor) if self.order.is_late else tensor.clone()
        run = (lambda: there.copy_(tensor)) if self.order.is_late else _nothing
        self._give("upload", _storages(tensor), _storages(there), run)
        return CardTensor(there)

    def _give(
        self, name: str, reads: frozenset[int], writes: frozenset[int], run: Callable[[], object]
    ) -> None:
        def quietly() -> None:
            with torch._C.DisableTorchFunction(), no_dispatch():
                run()

        stream = self.current_stream()
        if "empty" not in name:
            self.launches[stream.name, name] += 1
        self.order.launch(stream, Launch(name, reads - writes, writes, quietly))

    def _check(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if func in VALUES_TO_HOST or func in SHAPE_FROM_VALUES:
            self.waits(func)
        if func in (aten.index.Tensor, aten.index_put_.default, aten.index_put.default):
            for index in args[1]:
                if index is not None and index.dtype in (torch.bool, torch.uint8):
                    self.waits(f"{func} with a mask")
        if func is aten.copy_.default:
            target, source = args[:2]
            self.check_copy(source, target, *args[2:], **kwargs)
            return
        if func is aten._to_copy.default:
            target_device = kwargs.get("device", args[0].device)
            if torch.device(target_device).type == "cpu" and not kwargs.get("pin_memory"):
                self.waits(f"{func} to memory that is not pinned")
            return
        tensors: list[torch.Tensor] = []
        each(lambda x: tensors.append(x) if isinstance(x, torch.Tensor) else None, (args, kwargs))
        for tensor in tensors:
            if not isinstance(tensor, CardTensor) and tensor.dim():
                self.waits(f"{func} of tensors on the card and on the host")

    def check_copy(
        self, source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False
    ) -> None:
        """A copy in which one of both is on the card."""
        on_host = [t for t in (source, target) if not isinstance(t, CardTensor)]
        if not on_host or (not on_host[0].dim() and on_host[0] is source):
            return
        if not non_blocking:
            self.waits("a copy that is not non_blocking")
        if not self.is_pinned(on_host[0]):
            self.waits("a copy through memory that is not pinned")
        if source.dtype != target.dtype:
            self.waits("a copy that casts, through memory that is not pinned")
        if on_host[0] is target:
            self.copies.append((self.current_stream().name, source.dtype, source.nbytes))


def _nothing() -> None:
    """Do nothing: the operation was done already."""


def _storages(value: Any) -> frozenset[int]:
    """Addresses of the memory of all tensors inside, of dataclasses too."""
    found: set[int] = set()

    def look(leaf: Any) -> None:
        if isinstance(leaf, torch.Tensor) and leaf.numel():
            found.add(leaf.untyped_storage().data_ptr())
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            each(look, tuple(getattr(leaf, f.name) for f in dataclasses.fields(leaf)))

    each(look, value)
    return frozenset(found)


def _shape_of(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return torch.device("meta") if isinstance(value, torch.device) else value
    layout = value.shape, value.stride()
    return torch.empty_strided(*layout, dtype=value.dtype, device="meta")


def _poisoned(shape: Any) -> Any:
    if not isinstance(shape, torch.Tensor):
        return shape
    made = torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype)
    made.untyped_storage().fill_(POISON)
    return made


def _makes_inference_tensors(func: Any, args: tuple[Any, ...]) -> bool:
    """Views count the versions of what they show, whatever the mode."""
    shown = [r for r in func._schema.returns if r.alias_info and not r.alias_info.is_write]
    if shown and isinstance(args[0], torch.Tensor):
        return args[0].is_inference()
    return torch.is_inference_mode_enabled()


def _poison_host(tensor: torch.Tensor) -> None:
    tensor.fill_(float("nan") if tensor.is_floating_point() else -1)


def _put(found: Any, places: Any) -> None:
    if isinstance(found, torch.Tensor):
        places.copy_(found)
    elif isinstance(found, tuple | list):
        for one, place in zip(found, places, strict=True):
            _put(one, place)


class _Operations(TorchDispatchMode):
    """Makes tensors on the card, and memory that counts as pinned."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if any(isinstance(x, CardTensor) for x in args) or (device and device.type == "cuda"):
            return THE_CARD.run(func, args, kwargs)
        if func is aten.copy_.default and THE_CARD.watched_thread == threading.get_ident():
            THE_CARD.host_copies.append(args[0].nbytes)
        if func is aten.is_pinned.default:
            return THE_CARD.is_pinned(args[0])
        if func in (aten.pin_memory.default, aten._pin_memory.default):
            return THE_CARD.pin(args[0].clone())
        if kwargs.pop("pin_memory", None):
            return THE_CARD.pin(func(*args, **kwargs))
        return func(*args, **kwargs)


class _Functions(TorchFunctionMode):
    """Stands in for calls that need a real device before they come to an operation."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor, torch.Tensor.new_tensor):
            device = kwargs.get("device")
            like = isinstance(args[0], CardTensor)
            if like or (device is not None and torch.device(device).type == "cuda"):
                THE_CARD.waits(func)
                kwargs["device"] = "cpu"
                return wrap(func(*each(unwrap, args), **kwargs))
        if func in (torch.Tensor.to, torch.Tensor.cpu):
            target = _target_device(*args[1:2], **kwargs) if args[1:] or kwargs else "cpu"
            if isinstance(args[0], CardTensor) and target == "cpu":
                THE_CARD.waits(func)
                THE_CARD.order.synchronize_stream(THE_CARD.current_stream())
                return args[0].inner.clone()
            if not isinstance(args[0], CardTensor) and target == "cuda":
                return THE_CARD.upload(args[0], kwargs.get("non_blocking", False))
        if func is torch.Tensor.tolist and isinstance(args[0], CardTensor):
            THE_CARD.waits(func)
            THE_CARD.order.synchronize_stream(THE_CARD.current_stream())
            return args[0].inner.tolist()
        return func(*args, **kwargs)


def _target_device(first: Any = None, *, device: Any = None, **_: Any) -> str | None:
    """Type of the device that the arguments of ``Tensor.to`` name."""
    asked = first.device if isinstance(first, torch.Tensor) else device or first
    return torch.device(asked).type if isinstance(asked, str | torch.device) else None


class _Event:
    def __init__(self, device: torch.device | None = None, *, blocking: bool = False) -> None:
        self._blocking = blocking
        self._recorded: list[Any] = []

    def record(self, stream: _Stream | None = None) -> None:
        self._recorded = [THE_CARD.order.record(stream or THE_CARD.current_stream())]

    def query(self) -> bool:
        return True

    def wait(self) -> None:
        THE_CARD.num_stream_waits += 1
        for event in self._recorded:
            THE_CARD.order.wait(THE_CARD.current_stream(), event)

    def synchronize(self) -> None:
        THE_CARD.waits("Event.synchronize")
        if not self._blocking:
            raise Waited("a thread that waits for this event spins: it is not blocking")
        for event in self._recorded:
            THE_CARD.order.synchronize(event)


class _Stream:
    name = "side"

    def __init__(self, device: torch.device | None = None, priority: int = 0) -> None:
        self.priority = priority

    def wait_stream(self, other: _Stream) -> None:
        THE_CARD.order.wait(self, THE_CARD.order.record(other))

    def wait_event(self, event: _Event) -> None:
        for recorded in event._recorded:
            THE_CARD.order.wait(self, recorded)

    def synchronize(self) -> None:
        THE_CARD.waits("Stream.synchronize")
        THE_CARD.order.synchronize_stream(self)


_MAIN = _Stream()
_MAIN.name = "main"
THE_CARD = FakeCard()


class _Generator(torch.Generator):
    def __new__(cls, device: torch.device | None = None) -> _Generator:
        return super().__new__(cls)


class _UnwatchedSource(Source):
    """The plain bodies of operations; what they do is neither on the card nor pins memory."""

    def find(self, operation: Operation[Any]) -> Callable[..., None]:
        def call(*args: Any) -> None:
            with torch._C.DisableTorchFunction(), no_dispatch():
                operation.body(*args)

        return call


class CardSource(_UnwatchedSource):
    """The plain bodies of operations, on the values of card tensors."""

    name = "card"

    def find(self, operation: Operation[Any]) -> Callable[..., None]:
        return lambda *args: THE_CARD.kernel(operation, args)


def _knows_the_card() -> None:
    """Prepare a thread that gives the card something to do: each thread has its own modes."""
    _Functions().__enter__()
    _Operations().__enter__()


@contextmanager
def fake_card(monkeypatch: pytest.MonkeyPatch, order: AtOnce | None = None) -> Iterator[FakeCard]:
    """Inside the block ``device="cuda"`` is a :class:`FakeCard`; the CPU has the same kernels."""
    THE_CARD.__init__(order)  # type: ignore[misc]
    for name, replacement in (
        ("_lazy_init", lambda: None),
        ("Stream", _Stream),
        ("Event", _Event),
        ("current_stream", THE_CARD.current_stream),
        ("stream", THE_CARD.on_stream),
    ):
        monkeypatch.setattr(torch.cuda, name, replacement)
    monkeypatch.setattr(torch, "Event", _Event)
    threads = partial(ThreadPoolExecutor, initializer=_knows_the_card)
    monkeypatch.setattr(row_extractor, "ThreadPoolExecutor", threads)
    monkeypatch.setattr(torch, "Generator", _Generator)
    for name, value in (
        ("device_name", property(lambda self: "a fake card")),
        ("supported_dtypes", property(lambda self: (torch.bfloat16, torch.float16, torch.float32))),
        ("total_memory_bytes", lambda self: 2**30),
        ("available_memory_bytes", lambda self: 2**30),
        ("kv_cache_budget_bytes", lambda self, share: int(share * 2**30)),
        ("measure_peak_bytes", lambda self, run: run() or 2**20),
        ("measure_held_bytes", lambda self, make: make() or 2**20),
    ):
        monkeypatch.setattr(CudaPlatform, name, value)
    monkeypatch.setattr(CudaPlatform, "recurrent_chunk_tokens", 1)
    use_sources(lambda device_type: CardSource() if device_type == "cuda" else _UnwatchedSource())
    with ExitStack() as stack:
        stack.enter_context(_Functions())
        stack.enter_context(_Operations())
        try:
            yield THE_CARD
        finally:
            use_sources(find_source)
