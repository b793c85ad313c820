"""The mixer of Mamba (Gu and Dao 2023): a convolution and a selective scan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import torch
from torch import nn

from vllm.distributed.parallel_state import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention_layer_base import register_layer
from vllm.model_executor.layers.layer import Layer
from vllm.model_executor.layers.linear import (
    column_linear,
    divide,
    load_part,
    merged_linear,
    of_this_rank,
    row_linear,
)
from vllm.model_executor.layers.mamba.causal_conv import CausalConv1d
from vllm.model_executor.layers.mamba.recurrent_layer import RecurrentLayer
from vllm.model_executor.utils import check_shape, make_parameter
from vllm.ops.layout import StateTensor
from vllm.ops.linear import linear_by_head
from vllm.ops.selective_scan import selective_scan

MAMBA_NAMES: Mapping[str, str] = {"rates": "A_log", "step_bias": "dt_proj.bias", "skip": "D"}
"""Own names of parameters -> names in checkpoints."""


class LinearByHead(Layer):
    """A separate product for each head: weight [heads, outputs, inputs]."""

    def __init__(self, num_heads: int, inputs: int, outputs: int) -> None:
        super().__init__()
        ranks = get_tensor_model_parallel_world_size()
        heads = divide(num_heads, ranks, "the heads of Mamba's state")
        self.weight = make_parameter(torch.empty(heads, outputs, inputs), load_part)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, heads, inputs] -> [tokens, heads, outputs]."""
        out = x.new_empty((*x.shape[:2], self.weight.shape[1]))
        linear_by_head(x, self.weight, out)
        return out


class MambaMixer(RecurrentLayer):
    """Projections, causal convolution, selective scan, gate, output projection.

    ``kv_cache`` is ``(convolution view [blocks, width - 1, channels] in the model's dtype, state
    view [blocks, state_size, channels] in float32)``. norm: makes the norms of the steps' inputs,
    of B and of C (Jamba, Falcon-Mamba). num_heads: number of heads among which the channels are
    divided; the steps, B and C of a head depend only on its own channels (Zamba).
    """

    mamba_type: ClassVar[str] = "mamba1"

    def __init__(
        self,
        *,
        hidden_size: int,
        intermediate_size: int,
        state_size: int,
        step_rank: int,
        conv_width: int,
        conv_option: str,
        conv_bias: bool,
        bias: bool,
        norm: Callable[[int], nn.Module] | None = None,
        num_heads: int | None = None,
        prefix: str = "",
    ) -> None:
        """conv_option: the config's name for ``conv_width``; bias: for in_proj and out_proj."""
        super().__init__()
        self.tp_size = get_tensor_model_parallel_world_size()
        self.channels = divide(intermediate_size, self.tp_size, "the width of Mamba's state")
        self.state_size, self.step_rank = state_size, step_rank
        self.in_proj = merged_linear(
            hidden_size, [intermediate_size] * 2, f"{prefix}.in_proj", bias=bias
        )
        self.conv1d = CausalConv1d(
            (intermediate_size,), conv_width, bias=conv_bias, option=conv_option
        )
        self.num_heads = num_heads
        outputs = step_rank + 2 * state_size
        self.x_proj: nn.Module
        self.dt_proj: nn.Module
        if num_heads is not None:
            head_size = intermediate_size // num_heads
            self.x_proj = LinearByHead(num_heads, head_size, outputs)
            self.dt_proj = LinearByHead(num_heads, step_rank, head_size)
        else:
            self.x_proj = row_linear(intermediate_size, outputs, f"{prefix}.x_proj")
            self.dt_proj = column_linear(step_rank, intermediate_size, f"{prefix}.dt_proj")
        self.out_proj = row_linear(intermediate_size, hidden_size, f"{prefix}.out_proj", bias=bias)
        self.dt_layernorm = self.b_layernorm = self.c_layernorm = None
        if norm is not None:
            self.dt_layernorm = norm(step_rank)
            self.b_layernorm, self.c_layernorm = norm(state_size), norm(state_size)
        # Values of an untrained model; a checkpoint overwrites them.
        rates = -torch.arange(1.0, state_size + 1.0).repeat_interleave(self.channels)
        self.rates = make_parameter(rates.float(), self.load_rates)
        """``-exp(A_log)``, float32 [state_size * channels], the channels of an entry together."""
        self.step_bias = make_parameter(
            torch.linspace(-4.6, -2.2, self.channels).float(), load_part
        )
        self.skip = make_parameter(torch.ones(self.channels).float(), load_part)
        self.layer_name = prefix
        register_layer(self)

    def load_rates(self, param: nn.Parameter, loaded_weight: torch.Tensor) -> None:
        """loaded_weight: A_log [all channels, state_size]."""
        check_shape(loaded_weight, (self.channels * self.tp_size, self.state_size))
        rates = -torch.exp(of_this_rank(loaded_weight).float())
        param.data.copy_(rates.t().flatten())

    def state_tensors(self, dtype: torch.dtype) -> Sequence[StateTensor]:
        channels, width = self.conv1d.weight.shape
        state = (self.state_size, channels)
        return StateTensor((width - 1, channels), dtype), StateTensor(state, torch.float32)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """hidden_states: [tokens, hidden] -> [tokens, hidden]."""
        metadata = self.step_metadata()
        conv_cache, state_cache = self.kv_cache
        x, gate = self.in_proj(hidden_states).chunk(2, dim=-1)
        convolved = self.conv1d(x, metadata, conv_cache, silu=True)
        step, b, c = self._scan_inputs(convolved)
        output = x.new_empty(x.shape)
        selective_scan(
            convolved,
            step,
            b,
            c,
            gate,
            self.rates.view(self.state_size, -1),
            self.step_bias,
            self.skip,
            metadata.layout,
            metadata.states,
            state_cache,
            output,
        )
        projected: torch.Tensor = self.out_proj(output)
        return projected

    def _scan_inputs(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x: [tokens, channels] -> steps of its shape, B and C [tokens, groups, state_size]."""
        sizes = [self.step_rank, self.state_size, self.state_size]
        if self.num_heads is not None:
            projected = self.x_proj(x.view(len(x), self.num_heads // self.tp_size, -1))
            step, b, c = projected.split(sizes, dim=-1)
            return self.dt_proj(step).flatten(1), b, c
        step, b, c = self.x_proj(x).split(sizes, dim=-1)
        if self.dt_layernorm is not None:
            assert self.b_layernorm is not None and self.c_layernorm is not None
            step, b, c = self.dt_layernorm(step), self.b_layernorm(b), self.c_layernorm(c)
        return self.dt_proj(step), b.unsqueeze(1), c.unsqueeze(1)
