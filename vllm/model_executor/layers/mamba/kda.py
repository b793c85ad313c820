"""Kimi delta attention (Kimi Team 2025), the recurrent layer of Kimi-Linear and Ling 3."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import nn

from vllm.distributed.parallel_state import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention_layer_base import register_layer
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    column_linear,
    divide,
    load_part,
    merged_linear,
    replicated_linear,
    row_linear,
)
from vllm.model_executor.layers.mamba.causal_conv import CausalConv1d
from vllm.model_executor.layers.mamba.recurrent_layer import RecurrentLayer
from vllm.model_executor.utils import make_parameter
from vllm.ops.activations import sigmoid_gate
from vllm.ops.channel_delta_rule import channel_delta_rule
from vllm.ops.layout import StateTensor
from vllm.ops.plain_math import sigmoid, softplus


class KimiDeltaAttention(RecurrentLayer):
    """Projections, causal convolution, delta rule with decays by channel, norm, sigmoid gate.

    Decays are ``exp(-exp(A_log) softplus(f x + dt_bias))``, or with a negative ``decay_bound``
    ``exp(decay_bound sigmoid(exp(A_log) (f x + dt_bias)))``; gates are ``g x``. With
    ``low_rank_gates`` f and g are products of two matrices.
    ``kv_cache`` is ``(convolution view [blocks, width - 1, channels] in the model's dtype, state
    view [blocks, heads, head_size, head_size] in float32)``.
    """

    mamba_type: ClassVar[str] = "kda"

    def __init__(
        self,
        *,
        hidden_size: int,
        num_heads: int,
        head_size: int,
        conv_width: int,
        rms_norm_eps: float,
        low_rank_gates: bool = True,
        decay_bound: float | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        tp_size = get_tensor_model_parallel_world_size()
        self.num_heads = divide(num_heads, tp_size, "linear_num_heads")
        self.head_size = head_size
        width = num_heads * head_size
        # One product: [q | k | v | b].
        self.in_proj_qkvb = merged_linear(
            hidden_size, [width, width, width, num_heads], f"{prefix}.in_proj_qkvb"
        )
        self.low_rank_gates, self.decay_bound = low_rank_gates, decay_bound
        for gate in ("f", "g"):
            name, inputs = f"{gate}_proj", hidden_size
            if low_rank_gates:
                first = replicated_linear(hidden_size, head_size, f"{prefix}.{gate}_a_proj")
                self.add_module(f"{gate}_a_proj", first)
                name, inputs = f"{gate}_b_proj", head_size
            last = column_linear(inputs, width, f"{prefix}.{name}")
            self.add_module(name, last)
        self.conv1d = CausalConv1d((width,) * 3, conv_width)
        # Spread decays like those of trained models; a checkpoint overwrites them.
        spread = torch.linspace(1.0, 16.0, self.num_heads)
        self.A_log = make_parameter(spread.log().float(), _load_values)
        bias = torch.full((self.num_heads * head_size,), -4.0, dtype=torch.float32)
        self.dt_bias = make_parameter(bias, _load_values)
        self.norm = RMSNorm(head_size, eps=rms_norm_eps)
        self.o_proj = row_linear(width, hidden_size, f"{prefix}.o_proj")
        self.layer_name = prefix
        register_layer(self)

    def state_tensors(self, dtype: torch.dtype) -> Sequence[StateTensor]:
        channels, width = self.conv1d.weight.shape
        state = (self.num_heads, self.head_size, self.head_size)
        return StateTensor((width - 1, channels), dtype), StateTensor(state, torch.float32)

    def _project(self, gate: str, x: torch.Tensor) -> torch.Tensor:
        projected: torch.Tensor
        if self.low_rank_gates:
            x = self.get_submodule(f"{gate}_a_proj")(x)
            projected = self.get_submodule(f"{gate}_b_proj")(x)
        else:
            projected = self.get_submodule(f"{gate}_proj")(x)
        return projected

    def _log_decays(self, x: torch.Tensor) -> torch.Tensor:
        """-> float32 [tokens, heads * head_size]."""
        steps = self._project("f", x).float() + self.dt_bias
        rates = torch.exp(self.A_log).repeat_interleave(self.head_size)
        if self.decay_bound is None:
            return softplus(steps).mul_(rates).neg_()
        return sigmoid(steps.mul_(rates)).mul_(self.decay_bound)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """hidden_states: [tokens, hidden] -> [tokens, hidden]."""
        metadata = self.step_metadata()
        conv_cache, state_cache = self.kv_cache
        heads = (self.num_heads, self.head_size)
        channels = 3 * heads[0] * heads[1]
        qkv, b = torch.split_with_sizes(self.in_proj_qkvb(hidden_states), [channels, heads[0]], 1)
        convolved = self.conv1d(qkv, metadata, conv_cache, silu=True)
        log_decays = self._log_decays(hidden_states)
        output = qkv.new_empty((len(qkv), *heads))
        plan = (metadata.layout, metadata.states)
        channel_delta_rule(convolved, log_decays, b, *plan, state_cache, output)
        gate = self._project("g", hidden_states).view(len(qkv), *heads)
        gated = output.new_empty(output.shape)
        sigmoid_gate(self.norm(output), gate, gated)
        projected: torch.Tensor = self.o_proj(gated.flatten(1))
        return projected


def _load_values(param: nn.Parameter, loaded_weight: torch.Tensor) -> None:
    """Load a vector, which the checkpoint may have as [1, 1, heads, 1]."""
    load_part(param, loaded_weight[0, 0, :, 0] if loaded_weight.dim() == 4 else loaded_weight)
