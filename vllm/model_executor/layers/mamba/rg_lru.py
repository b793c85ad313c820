"""The recurrent block of Griffin (De et al. 2024): a convolution and gated linear recurrences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional

from vllm.distributed.parallel_state import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.activation import get_act_fn
from vllm.model_executor.layers.attention_layer_base import register_layer
from vllm.model_executor.layers.layer import Layer
from vllm.model_executor.layers.linear import (
    ShardId,
    divide,
    merged_linear,
    of_this_rank,
    row_linear,
)
from vllm.model_executor.layers.mamba.causal_conv import CausalConv1d
from vllm.model_executor.layers.mamba.recurrent_layer import RecurrentLayer
from vllm.model_executor.utils import check_shape, make_parameter
from vllm.ops.layout import StateTensor
from vllm.ops.linear import linear
from vllm.ops.linear_recurrence import gated_linear_recurrence

_RATE_SCALE = -8.0


class RecurrenceGates(Layer):
    """Rates of decay, and the products that make both gates, separate for each head.

    The checkpoint has weights [heads, inputs, outputs]; here they are [heads, outputs, inputs],
    with the outputs of the input's gate first.
    """

    def __init__(self, num_heads: int, head_size: int) -> None:
        super().__init__()
        self.tp_size = get_tensor_model_parallel_world_size()
        self.num_heads = divide(num_heads, self.tp_size, "num_attention_heads")
        self.head_size = head_size
        shape = (self.num_heads, 2 * head_size)
        self.gate_weight = make_parameter(torch.empty(*shape, head_size), self.load_gate)
        self.gate_bias = make_parameter(torch.zeros(shape), self.load_gate)
        # Spread decays like those of trained models; a checkpoint overwrites them.
        rates = torch.linspace(-0.15, -1.0, self.num_heads * head_size).float()
        self.rates = make_parameter(rates, self.load_rates)

    def checkpoint_layouts(self, leaf: str) -> list[Mapping[str, ShardId]]:
        """Return names in the checkpoint and their shards: 0 is the input's gate, 1 the decay's."""
        if leaf == "rates":
            return [{"recurrent_param": None}]
        kind = leaf.removeprefix("gate_")
        return [{f"input_gate_{kind}": 0, f"recurrent_gate_{kind}": 1}]

    def load_gate(
        self, param: nn.Parameter, loaded_weight: torch.Tensor, loaded_shard_id: int
    ) -> None:
        """loaded_weight: [heads, inputs, outputs] or [heads, outputs] of one gate."""
        size = self.head_size
        tail = (size,) * (param.dim() - 1)
        check_shape(loaded_weight, (self.num_heads * self.tp_size, *tail))
        mine = of_this_rank(loaded_weight)
        target = param.data.narrow(1, loaded_shard_id * size, size)
        target.copy_(mine.transpose(1, 2) if mine.dim() == 3 else mine)

    def load_rates(self, param: nn.Parameter, loaded_weight: torch.Tensor) -> None:
        """loaded_weight: [all channels]."""
        check_shape(loaded_weight, (len(param) * self.tp_size,))
        mine = of_this_rank(loaded_weight)
        param.data.copy_(_RATE_SCALE * functional.softplus(mine.float()))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x: [tokens, channels] -> both gates before their sigmoids, of its shape."""
        size = self.head_size
        gates = x.new_empty((2, *x.shape))
        of_head = x.new_empty((len(x), 2 * size))
        for head in range(self.num_heads):
            own = slice(head * size, (head + 1) * size)
            linear(x[:, own], self.gate_weight[head], self.gate_bias[head], of_head)
            gates[0, :, own], gates[1, :, own] = of_head.chunk(2, dim=-1)
        return gates[0], gates[1]


class RecurrentBlock(RecurrentLayer):
    """``out_proj(activation(y) * recurrence(convolution(x)))``, where ``in_proj`` makes [y | x].

    ``kv_cache`` is ``(convolution view [blocks, width - 1, channels] in the model's dtype, state
    view [blocks, channels] in float32)``.
    """

    mamba_type: ClassVar[str] = "rg_lru"

    def __init__(
        self,
        *,
        hidden_size: int,
        width: int,
        num_heads: int,
        conv_width: int,
        conv_option: str,
        activation: str,
        activation_option: str,
        prefix: str = "",
    ) -> None:
        """width: channels of the recurrence; *_option: the config's names."""
        super().__init__()
        if width % num_heads:
            raise ValueError(
                f"config.json: num_attention_heads={num_heads} does not divide lru_width={width}"
            )
        self.act_fn = get_act_fn(activation, activation_option)
        self.in_proj = merged_linear(hidden_size, [width] * 2, f"{prefix}.in_proj", bias=True)
        self.conv_1d = CausalConv1d((width,), conv_width, bias=True, option=conv_option)
        self.rg_lru = RecurrenceGates(num_heads, width // num_heads)
        self.out_proj = row_linear(width, hidden_size, f"{prefix}.out_proj", bias=True)
        self.layer_name = prefix
        register_layer(self)

    def state_tensors(self, dtype: torch.dtype) -> Sequence[StateTensor]:
        channels, width = self.conv_1d.weight.shape
        return StateTensor((width - 1, channels), dtype), StateTensor((channels,), torch.float32)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """hidden_states: [tokens, hidden] -> [tokens, hidden]."""
        metadata = self.step_metadata()
        conv_cache, state_cache = self.kv_cache
        y, x = self.in_proj(hidden_states).chunk(2, dim=-1)
        convolved = self.conv_1d(x, metadata, conv_cache, silu=False)
        output = x.new_empty(x.shape)
        inputs, decays = self.rg_lru(convolved)
        plan = (metadata.layout, metadata.states)
        rates = self.rg_lru.rates
        gated_linear_recurrence(convolved, inputs, decays, rates, *plan, state_cache, output)
        projected: torch.Tensor = self.out_proj(output.mul_(self.act_fn(y.contiguous())))
        return projected
