"""The causal convolution that recurrent layers share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from vllm.distributed.parallel_state import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.layer import Layer
from vllm.model_executor.layers.linear import of_this_rank
from vllm.model_executor.utils import UnsupportedConfigError, check_shape, make_parameter
from vllm.ops.layout import new_rows_apart
from vllm.ops.recurrent import causal_conv1d

if TYPE_CHECKING:
    from vllm.v1.attention.backend import RecurrentMetadata

_WIDTHS = range(2, 9)


class CausalConv1d(Layer):
    """A depthwise convolution: weight [channels of this rank, width], and optionally a bias.

    channel_sizes: channels of the parts that are split over the ranks separately (such as q, k
    and v). option: the config's name for ``width``.
    """

    def __init__(
        self,
        channel_sizes: tuple[int, ...],
        width: int,
        *,
        bias: bool = False,
        option: str = "linear_conv_kernel_dim",
    ) -> None:
        super().__init__()
        if width not in _WIDTHS:
            raise UnsupportedConfigError(
                f"config.json: {option}={width!r} is not supported; "
                f"supported: {_WIDTHS[0]} to {_WIDTHS[-1]}",
                option,
            )
        self.channel_sizes = channel_sizes
        self.tp_size = get_tensor_model_parallel_world_size()
        channels = sum(channel_sizes) // self.tp_size
        self.weight = make_parameter(torch.empty(channels, width), self.weight_loader)
        self.bias = make_parameter(torch.zeros(channels), self.bias_loader) if bias else None

    def checkpoint_layouts(self, leaf: str) -> list[Mapping[str, int | None]]:
        """List the whole as a layout, beside the parts by which checkpoints of a family store it:
        transformers has one tensor, and writes it with ``save_original_format=False``."""
        return [{leaf: None}]

    def weight_loader(
        self,
        param: nn.Parameter,
        loaded_weight: torch.Tensor,
        loaded_shard_id: int | None = None,
    ) -> None:
        """loaded_weight: [channels, 1, width] of all parts, one after another, or of one."""
        sizes, width = self.channel_sizes, param.shape[1]
        if loaded_shard_id is None:
            check_shape(loaded_weight, (sum(sizes), 1, width))
            param.data.copy_(self._own_part(loaded_weight[:, 0]))
            return
        check_shape(loaded_weight, (sizes[loaded_shard_id], 1, width))
        first = sum(sizes[:loaded_shard_id]) // self.tp_size
        part = of_this_rank(loaded_weight[:, 0])
        param.data[first : first + len(part)].copy_(part)

    def bias_loader(self, param: nn.Parameter, loaded_weight: torch.Tensor) -> None:
        """loaded_weight: [all channels]."""
        check_shape(loaded_weight, (sum(self.channel_sizes),))
        param.data.copy_(self._own_part(loaded_weight))

    def _own_part(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.cat(
            [of_this_rank(part) for part in torch.split(rows, list(self.channel_sizes))]
        )

    def forward(
        self,
        x: torch.Tensor,
        metadata: RecurrentMetadata,
        cache: torch.Tensor,
        *,
        silu: bool,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x: [tokens, channels]; cache: [blocks, width - 1, channels], the last inputs -> like x.

        out: receives the result; None: new, with rows apart. silu: apply SiLU to the result.
        """
        out = new_rows_apart(x) if out is None else out
        plan = (metadata.layout, metadata.states)
        causal_conv1d(x, self.weight, self.bias, silu, *plan, cache, out)
        return out
