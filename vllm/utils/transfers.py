"""Between host and device without waiting: for a step nothing is worth stopping the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import numpy.typing as npt


def pinned_for(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    """The host tensor in memory from which a copy to the device waits for nothing.

    From other memory it would wait for everything queued before it, and so would a copy that
    changes the dtype.
    """
    return tensor if device.type == "cpu" else tensor.pin_memory()


def to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """The array on the device; on the way there later kernels may be queued."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return pinned_for(device, tensor).to(device, non_blocking=True)


def prepare_pinned_memory(largest_bytes: int) -> None:
    """Let torch have pinned memory of every size that steps will ask for, up to ``largest_bytes``.

    It keeps it in classes of powers of two, and asks the driver, which holds the device up, when
    a class has none free.
    """
    held = []
    for bits in range(largest_bytes.bit_length()):
        count = PINNED_OF_A_CLASS if 1 << bits <= _SMALL_BYTES else PINNED_OF_A_LARGE_CLASS
        held += [torch.empty(1 << bits, dtype=torch.int8, pin_memory=True) for _ in range(count)]


def prepare_pinned_pieces(num_bytes: int, count: int) -> None:
    """Let torch have so much pinned memory for ``count`` pieces of one size."""
    held = [torch.empty(num_bytes, dtype=torch.int8, pin_memory=True) for _ in range(count)]
    del held


PINNED_OF_A_CLASS, PINNED_OF_A_LARGE_CLASS = 48, 3
_SMALL_BYTES = 1 << 18


class HostCopy:
    """A tensor on its way to the host, behind what its stream has queued."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._host = tensor
        self._arrival: torch.Event | None = None
        if tensor.device.type != "cpu":
            self._host = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._arrival = torch.Event(tensor.device, blocking=True)  # whoever waits sleeps
            self._arrival.record()

    def wait_on_device(self) -> None:
        """What the device's current stream is given from now on comes after the copy."""
        if self._arrival is not None:
            self._arrival.wait()

    def result(self) -> torch.Tensor:
        """The tensor in host memory; waits for it."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return self._host
