"""A card made of host memory, on which waiting can be forbidden.

Tensors of this card say that they are on ``cuda:0`` and compute on the CPU. Between
:meth:`FakeCard.no_waiting` and its end every operation for which a real card would have to be
waited for raises :class:`Waited`: values that become Python numbers, shapes that depend on
values, copies from or to memory that is not pinned, events that are synchronised.
"""

from __future__ import annotations

import dataclasses
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from vllm.ops.operation import Operation, use_sources
from vllm.ops.sources import PlainSource, find_source
from vllm.platforms.cuda import CudaPlatform

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
    """Bytes of the storages that tensors of the card stand in."""

    def __init__(self) -> None:
        self.used_bytes = 0
        self.peak_bytes = 0
        self._num_users: dict[int, int] = {}
        self._changing = threading.RLock()

    def hold(self, tensor: CardTensor) -> None:
        storage = tensor.inner.untyped_storage()
        place, num_bytes = storage.data_ptr(), storage.nbytes()
        weakref.finalize(tensor, self._release, place, num_bytes).atexit = False
        with self._changing:
            self._num_users[place] = self._num_users.get(place, 0) + 1
            if self._num_users[place] == 1:
                self.used_bytes += num_bytes
                self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def _release(self, place: int, num_bytes: int) -> None:
        with self._changing:
            self._num_users[place] -= 1
            if self._num_users[place] == 0:
                del self._num_users[place]
                self.used_bytes -= num_bytes

    def measure_peak(self, run: Callable[[], object]) -> int:
        """What ``run`` takes at its peak beside what is there."""
        gc.collect()
        before = self.peak_bytes = self.used_bytes
        run()
        return self.peak_bytes - before


class FakeCard:
    """Runs the operations; what it is asked to watch for is found in ``run``."""

    def __init__(self) -> None:
        self.watched_thread: int | None = None
        self.stream = "main"
        self.memory = CardMemory()
        self.num_stream_waits = 0
        """How often a stream was made to wait for an event."""
        self.copies: list[tuple[str, torch.dtype, int]] = []
        """Stream, dtype and bytes of each copy to the host."""
        self._pinned: dict[int, torch.Tensor] = {}

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
        self._pinned[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

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
        result = func(*each(unwrap, args), **each(unwrap, inner))
        if asked is not None and asked.type == "cpu":
            return self.pin(result) if is_pinned else result
        if func is aten.copy_.default:
            return args[0]
        mine = {id(a.inner): a for a in args if isinstance(a, CardTensor)}
        return each(lambda x: mine.get(id(x)) if id(x) in mine else wrap(x), result)

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
            self.copies.append((self.stream, source.dtype, source.nbytes))


THE_CARD = FakeCard()


class _Operations(TorchDispatchMode):
    """Makes tensors on the card, and memory that counts as pinned."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if any(isinstance(x, CardTensor) for x in args) or (device and device.type == "cuda"):
            return THE_CARD.run(func, args, kwargs)
        if func is aten.is_pinned.default:
            return THE_CARD.is_pinned(args[0])
        if func in (aten.pin_memory.default, aten._pin_memory.default):
            return THE_CARD.pin(args[0].clone())
        if kwargs.pop("pin_memory", None):
            return THE_CARD.pin(func(*args, **kwargs))
        return func(*args, **kwargs)


class _Functions(TorchFunctionMode):
    """What needs a real device before it comes to an operation."""

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
                return args[0].inner.clone()
            if not isinstance(args[0], CardTensor) and target == "cuda":
                if not (kwargs.get("non_blocking") and THE_CARD.is_pinned(args[0])):
                    THE_CARD.waits("a copy to the card from memory that is not pinned")
                return wrap(args[0].clone())
        if func is torch.Tensor.tolist and isinstance(args[0], CardTensor):
            THE_CARD.waits(func)
            return args[0].inner.tolist()
        return func(*args, **kwargs)


def _target_device(first: Any = None, *, device: Any = None, **_: Any) -> str | None:
    """Type of the device that the arguments of ``Tensor.to`` name."""
    asked = first.device if isinstance(first, torch.Tensor) else device or first
    return torch.device(asked).type if isinstance(asked, str | torch.device) else None


class _Event:
    def __init__(self, device: torch.device | None = None) -> None:
        pass

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def wait(self) -> None:
        THE_CARD.num_stream_waits += 1

    def synchronize(self) -> None:
        THE_CARD.waits("Event.synchronize")


class _Stream:
    def __init__(self, device: torch.device | None = None) -> None:
        pass

    def wait_stream(self, other: object) -> None:
        pass

    def synchronize(self) -> None:
        THE_CARD.waits("Stream.synchronize")


@contextmanager
def _on_stream(stream: _Stream) -> Iterator[None]:
    before, THE_CARD.stream = THE_CARD.stream, "side"
    yield
    THE_CARD.stream = before


class _Generator(torch.Generator):
    def __new__(cls, device: torch.device | None = None) -> _Generator:
        return super().__new__(cls)


class _UnwatchedSource(PlainSource):
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
        body = super().find(operation)
        return lambda *args: body(*each(unwrap, args))


@contextmanager
def fake_card(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCard]:
    """Inside the block ``device="cuda"`` is a :class:`FakeCard`; the CPU has the same kernels."""
    THE_CARD.__init__()  # type: ignore[misc]
    for name, replacement in (
        ("_lazy_init", lambda: None),
        ("Stream", _Stream),
        ("current_stream", _Stream),
        ("stream", _on_stream),
    ):
        monkeypatch.setattr(torch.cuda, name, replacement)
    monkeypatch.setattr(torch, "Event", _Event)
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
