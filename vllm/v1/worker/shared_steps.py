"""Steps that engines take together, because each has some of the experts.

All ranks of all engines begin a step at the same time, also those that have no tokens. The pass of
an engine meets the others at each mixture of experts. Behind its last layer, or without a pass, a
rank serves the mixtures that the deepest of the passes still comes to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from vllm.distributed.communicators import GroupClosedError
from vllm.distributed.engine_group import get_engine_group
from vllm.distributed.parallel_state import get_tp_group
from vllm.exceptions import Failure, FailureError, FailureKind
from vllm.model_executor.layers.fused_moe import number_shared_mixtures
from vllm.model_executor.models.interfaces import supports_row_capture

_ALL_LAYERS = 2**31


class SharedSteps:
    """One rank's part in the steps of all engines; a block that does nothing if engines share no
    experts."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        """dtype: that of the tokens between layers."""
        self._mixtures, self._dtype = number_shared_mixtures(model), dtype
        self._group = get_engine_group() if self._mixtures else None
        self._stops_early = supports_row_capture(model)
        self.not_ready_reason: Callable[[], str | None] = lambda: None
        """Returns why this rank cannot compute; None: it can."""

    @property
    def are_shared(self) -> bool:
        return self._group is not None

    @contextmanager
    def step(self, num_tokens: int = 0, num_layers: int | None = None) -> Iterator[None]:
        """Let the block make a pass of this engine, whose experts are on all of them.

        num_layers: how many run; None: all. FailureError: an engine has ended, or cannot compute.
        GroupClosedError: the step failed on another rank.
        """
        group = self._group
        if group is None:
            yield
            return
        get_tp_group().barrier()  # a rank that fails before this keeps its engine out of the step
        depth = _ALL_LAYERS if num_layers is None or not self._stops_early else num_layers
        group.begin_step(num_tokens, depth, is_ready=self.not_ready_reason() is None)
        unready = [number for number, one in enumerate(group.step) if not one.is_ready]
        if unready and group.has_tokens:
            group.end_step()
            if num_tokens:
                raise FailureError(
                    Failure(
                        FailureKind.NOT_READY,
                        f"engine {unready[0]} of {group.num_engines}, which has some of the "
                        "experts, sleeps or has no whole weights: wake_up(), or load a whole "
                        "checkpoint",
                    )
                )
            yield
            return
        try:
            yield
            if group.has_tokens:
                for mixture in self._mixtures[group.num_begun :]:
                    mixture.serve(self._dtype)
            group.end_step()
        except GroupClosedError as closed:
            group.end_step()  # the one that failed has left
            raise GroupClosedError(
                "another rank of the engines that share experts failed in this step"
            ) from closed
        except BaseException:
            group.leave_step()
            raise
