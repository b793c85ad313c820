"""Weights that a trainer sends to an engine which runs, through a group of processes.

join      on a thread: the group meets when the trainer comes
begin     an update begins: no request runs until it ends
check     tensors that the trainer announces
receive   these tensors, in their order
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from concurrent.futures import Future

import torch

from vllm.distributed.weight_transfer import Announced, GroupPlace, WeightGroup
from vllm.distributed.weight_transfer.packed_tensor import (
    TensorForm,
    in_buffers,
    num_bytes,
    unpacked,
)
from vllm.exceptions import Failure, FailureError, FailureKind
from vllm.model_executor.utils import LOADABLE_DTYPES
from vllm.v1.worker.weight_updates import WeightUpdates

_MOST_TIMES_THE_MODEL = 4
"""Bytes of one tensor or buffer, relative to the model's weights: trainers may send float32."""


class WeightReceiver:
    """One worker's part of the transfers."""

    def __init__(self, updates: WeightUpdates, device: torch.device, model_bytes: int) -> None:
        self._updates, self._device, self._buffers = updates, device, device
        self._most_bytes = _MOST_TIMES_THE_MODEL * model_bytes
        self._group: Future[WeightGroup] | None = None

    def join(self, place: GroupPlace, uses_nccl: bool, timeout: float) -> None:
        """Begin to join a group, and leave one that has met.

        ValueError: another group is meeting.
        """
        if self._group is not None and not self._group.done():
            raise ValueError(
                f"a group of trainer and workers is meeting already; it gives up after {timeout:g} "
                "s without the trainer"
            )
        self._buffers = self._device if uses_nccl else torch.device("cpu")
        self._group = group = Future[WeightGroup]()

        def meet() -> None:
            try:
                found = WeightGroup(*place, timeout)
                found.connect(self._buffers)
                group.set_result(found)
            except Exception as error:
                group.set_exception(error)

        # A daemon, because nothing ends the wait for a trainer that does not come.
        threading.Thread(target=meet, name="weight-group", daemon=True).start()

    def has_joined(self) -> bool:
        """Return whether the group has met. FailureError: it could not, or was left."""
        if self._group is None:
            raise _failed("the group of trainer and workers was left before it met")
        return self._group.done() and bool(self._joined(0))

    def _joined(self, timeout: float) -> WeightGroup:
        if self._group is None:
            raise ValueError("there is no group of trainer and workers: join one first")
        try:
            return self._group.result(timeout)
        except TimeoutError:
            raise _failed("the trainer did not join the group in time") from None
        except Exception as error:
            self._group = None
            raise _failed(f"the group of trainer and workers did not meet: {error}") from error

    def leave(self) -> None:
        """Leave the group. One that is meeting gives up by itself."""
        self._group = None

    def begin(self) -> None:
        """Note that an update begins. No request may run until it ends."""
        self._updates.begin()

    def interrupt(self, reason: str) -> None:
        """Note that the update ended before its end."""
        self._updates.interrupt(reason)

    def check(self, announced: Announced) -> None:
        """Raise ValueError if tensors do not fit the model, or weights cannot be replaced."""
        forms = _forms(announced)
        for form in forms:
            if num_bytes(form) > self._most_bytes:
                raise ValueError(f"weight {form.name!r} of {num_bytes(form)} bytes is too large")
        self._updates.check_forms({form.name: form.shape for form in forms})

    def receive(self, announced: Announced, timeout: float) -> bool:
        """Receive tensors, which replace weights; returns whether the update is whole now.

        ValueError: they do not fit. FailureError: the trainer has gone, or did not send them in
        time. Then the group is left, so that the trainer learns of it, and the weights are mixed
        if some of them were replaced since the update began.
        """
        try:
            self.check(announced)
            group = self._joined(timeout)
            for named in self._arrivals(group, announced):
                self._updates.load(named)
            if announced.has_barrier:
                group.barrier()
        except Exception as error:
            self.leave()
            self._updates.interrupt(f"a transfer failed: {error}")
            if isinstance(error, ValueError | FailureError):
                raise
            raise _failed(f"the transfer of weights failed: {error}") from error
        return self._updates.is_whole

    def _arrivals(
        self, group: WeightGroup, announced: Announced
    ) -> Iterator[dict[str, torch.Tensor]]:
        # A buffer that holds more than this is sent, so with 0 each tensor comes alone.
        for batch in in_buffers(_forms(announced), num_bytes, announced.packed_bytes):
            size = sum(map(num_bytes, batch))
            if size > self._most_bytes:
                raise ValueError(f"a buffer of {size} bytes is larger than the model's weights")
            buffer = torch.empty(size, dtype=torch.uint8, device=self._buffers)
            group.broadcast(buffer, announced.src)
            names = [form.name for form in batch]
            yield dict(zip(names, unpacked(buffer, batch), strict=True))


def _failed(reason: str) -> FailureError:
    return FailureError(Failure(FailureKind.TRANSFER_FAILED, reason))


def _forms(announced: Announced) -> list[TensorForm]:
    """Return the forms of tensors. ValueError: a name comes twice, or a dtype is not known."""
    known = {str(dtype).removeprefix("torch."): dtype for dtype in LOADABLE_DTYPES}
    forms: dict[str, TensorForm] = {}
    for name, dtype, shape in announced.tensors:
        found = known.get(dtype.removeprefix("torch."))
        if found is None:
            raise ValueError(f"weight {name!r} is of {dtype!r}: use {', '.join(known)}")
        if name in forms:
            raise ValueError(f"weights: {name!r} comes twice")
        if any(length < 0 for length in shape) or math.prod(shape) == 0:
            raise ValueError(f"weight {name!r} has the shape {tuple(shape)}")
        forms[name] = TensorForm(name, found, tuple(shape))
    return list(forms.values())
