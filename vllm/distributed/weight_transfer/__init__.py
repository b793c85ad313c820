"""A group of processes in which a trainer sends weights to the workers of running engines.

The names that TRL's clients import are in ``vllm.distributed.utils``,
``vllm.distributed.device_communicators.pynccl``, and the modules of this package. Both ends need
this package: a group of vLLM's own communicators cannot be joined.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, TCPStore

from vllm.utils.network_utils import check_port

GROUP_SECONDS = 300.0
"""Time for the processes of a group to meet, and for each transfer."""
PACKED_BYTES = 2**30
"""Bytes after which the buffer of a packed transfer is sent (vLLM's default)."""
_STORE_PREFIX = "client2server"  # as TRL's clients without PyNcclCommunicator name it


class GroupPlace(NamedTuple):
    """The group of a trainer, and the worker's place in it."""

    host: str
    port: int
    rank: int
    world_size: int


class Announced(NamedTuple):
    """Tensors that the trainer will send."""

    tensors: Sequence[tuple[str, str, Sequence[int]]]
    """Name, dtype and shape of each."""
    src: int
    """The rank of the trainer."""
    packed_bytes: int = 0
    """Bytes after which a buffer is sent; 0: each tensor comes alone."""
    has_barrier: bool = False
    """The trainer waits behind the last tensor."""


class WeightGroup:
    """One process in a group: it meets the others at an address, then they exchange bytes.

    The group uses NCCL between CUDA devices and gloo otherwise. Rank 0 listens at the address.
    """

    def __init__(
        self, host: str, port: int, rank: int, world_size: int, timeout: float = GROUP_SECONDS
    ) -> None:
        """Wait for the others. RuntimeError: they did not come in time, or the port is in use."""
        check_port("port", port, port)
        self.rank, self.world_size = rank, world_size
        self._timeout = timedelta(seconds=timeout)
        self.store: Any = TCPStore(
            host, port, world_size, is_master=rank == 0, timeout=self._timeout
        )
        self.socket: None = None
        """TRL's clients set it to None, like the store, when they end the group."""
        self._backend: Any = None

    @classmethod
    def create(
        cls, host: str, port: int, rank: int, world_size: int, store_timeout: float = GROUP_SECONDS
    ) -> WeightGroup:
        """Do what the constructor does, under vLLM's name."""
        return cls(host, port, rank, world_size, store_timeout)

    def connect(self, device: torch.device) -> None:
        """Connect to the others, for tensors on this device."""
        store = PrefixStore(_STORE_PREFIX, self.store)
        place = (store, self.rank, self.world_size)
        if device.type != "cuda":
            self._backend = ProcessGroupGloo(*place, self._timeout)
            return
        from torch._C._distributed_c10d import ProcessGroupNCCL  # CPU builds have none

        options = ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        with torch.cuda.device(device):
            self._backend = ProcessGroupNCCL(*place, options)

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        """Send a dense tensor from rank ``src`` to all others, which receive into theirs.

        RuntimeError: a process has gone, or did not answer in time.
        """
        if not tensor.numel():
            return
        # As bytes, because gloo does not know all dtypes.
        self._backend.broadcast(tensor.view(-1).view(torch.uint8), src).wait()
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)

    def barrier(self) -> None:
        """Wait until all have called it. RuntimeError: as for :meth:`broadcast`."""
        self._backend.barrier().wait()


class Communicator:
    """A connected group, with the methods of vLLM's PyNcclCommunicator that trainers call."""

    def __init__(self, group: WeightGroup, device: torch.device | str | int) -> None:
        device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        self.group = group
        group.connect(device)

    def broadcast(self, tensor: torch.Tensor, src: int, stream: object = None) -> None:
        """Send a tensor, or receive it if this is not rank ``src``. stream: without effect."""
        content = tensor.detach().contiguous()
        self.group.broadcast(content, src)
        if content.data_ptr() != tensor.data_ptr() and src != self.group.rank:
            tensor.copy_(content)
