"""The function with which TRL sends weights to an engine's workers: many tensors in one buffer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import torch

from vllm.distributed.weight_transfer import PACKED_BYTES, Communicator

T = TypeVar("T")


class TensorForm(NamedTuple):
    """Name, dtype and shape of a tensor that will come."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


def in_buffers(
    items: Iterable[T], num_bytes: Callable[[T], int], buffer_bytes: int
) -> Iterator[list[T]]:
    """Yield the tensors of each buffer: it is sent when it holds more than ``buffer_bytes``."""
    left = iter(items)
    while True:
        found, size = list[T](), 0
        for item in left:
            found.append(item)
            size += num_bytes(item)
            if size > buffer_bytes:
                break
        if not found:
            return
        yield found


def packed_nccl_broadcast_producer(
    iterator: Iterator[tuple[str, torch.Tensor]],
    group: Communicator,
    src: int,
    post_iter_func: Callable[[tuple[str, torch.Tensor]], torch.Tensor],
    buffer_size_bytes: int = PACKED_BYTES,
    num_buffers: int = 1,
) -> None:
    """Send named tensors to all other ranks, in buffers of bytes.

    post_iter_func: returns the tensor to send for a pair. num_buffers: without effect.
    """
    tensors = map(post_iter_func, iterator)
    for batch in in_buffers(tensors, lambda tensor: tensor.nbytes, buffer_size_bytes):
        flat = (tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in batch)
        group.broadcast(torch.cat(list(flat)), src)


def num_bytes(form: TensorForm) -> int:
    """Return the bytes of a tensor of this form."""
    return math.prod(form.shape) * form.dtype.itemsize


def unpacked(buffer: torch.Tensor, forms: Sequence[TensorForm]) -> list[torch.Tensor]:
    """Return the tensors that a buffer of bytes holds."""
    parts = torch.split(buffer, [num_bytes(form) for form in forms])
    return [
        part.clone().view(form.dtype).view(form.shape)
        for part, form in zip(parts, forms, strict=True)
    ]


__all__ = ["packed_nccl_broadcast_producer"]
