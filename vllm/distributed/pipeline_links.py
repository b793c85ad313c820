"""Links between the stages of a pipeline: one process sends tensors, another receives them.

A link is a meeting: the sender waits until the receiver takes what it has. So a stage is at most
one step ahead of the next one, and nothing is stored between them.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from vllm.distributed.communicators import DirectCommunicator


class _Header(NamedTuple):
    """A description of the tensors that follow on a link."""

    about: Any
    forms: list[tuple[torch.Size, torch.dtype]]


class Link:
    """One end of a link."""

    def __init__(self, communicator: DirectCommunicator) -> None:
        self._communicator = communicator

    def send(self, about: Any, tensors: Sequence[torch.Tensor]) -> None:
        """Send tensors, and something about them that can be pickled.

        GroupClosedError: the other end does not take them.
        """
        tensors = [tensor.contiguous() for tensor in tensors]
        header = pickle.dumps(_Header(about, [(one.shape, one.dtype) for one in tensors]))
        self._communicator.send(torch.tensor([len(header)]))
        self._communicator.send(torch.frombuffer(bytearray(header), dtype=torch.uint8))
        for tensor in tensors:
            self._communicator.send(tensor)

    def receive(self) -> tuple[Any, list[torch.Tensor]]:
        """Wait for what the other end sends. GroupClosedError: it sends nothing."""
        length = torch.empty(1, dtype=torch.int64)
        self._communicator.receive_into(length)
        data = torch.empty(int(length), dtype=torch.uint8)
        self._communicator.receive_into(data)
        header: _Header = pickle.loads(data.numpy().tobytes())
        tensors = [torch.empty(shape, dtype=dtype) for shape, dtype in header.forms]
        for tensor in tensors:
            self._communicator.receive_into(tensor)
        return header.about, tensors

    def close(self) -> None:
        """End the other end's calls."""
        self._communicator.close()


@dataclass(frozen=True)
class PipelineLinks:
    """The links of one process."""

    stage: int = 0
    """Number of the process's stage."""
    num_stages: int = 1
    before: Link | None = None
    """From the stage before; None: this is the first."""
    after: Link | None = None
    """To the stage after; None: this is the last."""
    tokens_from: Link | None = None
    """From the last stage, which samples."""
    tokens_to: tuple[Link, ...] = ()
    """To all other stages, in the last one."""

    def close(self) -> None:
        for link in (self.before, self.after, self.tokens_from, *self.tokens_to):
            if link is not None:
                link.close()


NO_LINKS = PipelineLinks()
