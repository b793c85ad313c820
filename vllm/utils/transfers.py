"""Copies between host and device that do not wait, so that no step stops the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import numpy.typing as npt


def pinned_for(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    """Pin the host tensor unless the device is the CPU, so that a copy to it does not wait.

    A copy from other memory would wait for everything queued before it, and so would a copy that
    changes the dtype.
    """
    return tensor if device.type == "cpu" else tensor.pin_memory()


def to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Copy the array to the device; more kernels may be queued while the copy runs."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return pinned_for(device, tensor).to(device, non_blocking=True)


def prepare_pinned_memory(largest_bytes: int) -> None:
    """Make torch hold pinned memory of every size that steps will ask for, up to ``largest_bytes``.

    torch keeps it in classes of powers of two. When a class has none free, torch asks the driver,
    which stalls the device.
    """
    held = []
    for bits in range(largest_bytes.bit_length()):
        count = PINNED_OF_A_CLASS if 1 << bits <= _SMALL_BYTES else PINNED_OF_A_LARGE_CLASS
        held += [torch.empty(1 << bits, dtype=torch.int8, pin_memory=True) for _ in range(count)]


def prepare_pinned_pieces(num_bytes: int, count: int) -> None:
    """Make torch hold pinned memory for ``count`` pieces of ``num_bytes`` each."""
    held = [torch.empty(num_bytes, dtype=torch.int8, pin_memory=True) for _ in range(count)]
    del held


PINNED_OF_A_CLASS, PINNED_OF_A_LARGE_CLASS = 48, 3
_SMALL_BYTES = 1 << 18


class HostCopy:
    """A copy of a tensor to the host, queued on the tensor's stream."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._host = tensor
        self._arrival: torch.Event | None = None
        if tensor.device.type != "cpu":
            self._host = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._arrival = torch.Event(tensor.device, blocking=True)  # a waiting thread sleeps
            self._arrival.record()

    def wait_on_device(self) -> None:
        """Make later work on the device's current stream wait for the copy."""
        if self._arrival is not None:
            self._arrival.wait()

    def result(self) -> torch.Tensor:
        """The tensor in host memory; waits for it."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return self._host
