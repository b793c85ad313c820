"""Kimi delta attention (Kimi Team 2025), the recurrent layer of Kimi-Linear and Ling 3."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from vllm.distributed.parallel_state import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase, register_layer
from vllm.model_executor.layers.layer import Layer
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    divide,
)
from vllm.model_executor.layers.mamba.causal_conv import CausalConv1dWeight
from vllm.model_executor.model_loader.weight_utils import check_shape
from vllm.model_executor.utils import set_weight_attrs
from vllm.ops.activations import sigmoid_gate
from vllm.ops.channel_delta_rule import channel_delta_rule
from vllm.ops.layout import new_rows_apart
from vllm.ops.plain_math import sigmoid, softplus
from vllm.ops.recurrent import causal_conv1d
from vllm.v1.kv_cache_interface import MambaSpec

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import RecurrentMetadata


class KimiDeltaAttention(Layer, AttentionLayerBase):
    """Projections, causal convolution, delta rule with decays by channel, norm, sigmoid gate.

    Decays are ``exp(-exp(A_log) softplus(f x + dt_bias))``, or with a ``decay_bound``, which is
    below 0, ``exp(decay_bound sigmoid(exp(A_log) (f x + dt_bias)))``; gates are ``g x``. With
    ``low_rank_gates`` f and g are products of two matrices.
    ``kv_cache`` is ``(convolution view [blocks, width - 1, channels] in the model's dtype, state
    view [blocks, heads, head_size, head_size] in float32)``.
    """

    kv_cache: tuple[torch.Tensor, torch.Tensor]

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
        self.in_proj_qkvb = MergedColumnParallelLinear(
            hidden_size,
            [width, width, width, num_heads],
            bias=False,
            prefix=f"{prefix}.in_proj_qkvb",
            return_bias=False,
        )
        self.low_rank_gates, self.decay_bound = low_rank_gates, decay_bound
        for gate in ("f", "g"):
            name, inputs = f"{gate}_proj", hidden_size
            if low_rank_gates:
                first = ReplicatedLinear(
                    hidden_size,
                    head_size,
                    bias=False,
                    prefix=f"{prefix}.{gate}_a_proj",
                    return_bias=False,
                )
                self.add_module(f"{gate}_a_proj", first)
                name, inputs = f"{gate}_b_proj", head_size
            last = ColumnParallelLinear(
                inputs, width, bias=False, prefix=f"{prefix}.{name}", return_bias=False
            )
            self.add_module(name, last)
        self.conv1d = CausalConv1dWeight((width,) * 3, conv_width)
        # A spread of decays, as trained models have; a checkpoint overwrites it.
        self.A_log = nn.Parameter(
            torch.linspace(1.0, 16.0, self.num_heads).log().float(), requires_grad=False
        )
        bias = torch.full((self.num_heads * head_size,), -4.0, dtype=torch.float32)
        self.dt_bias = nn.Parameter(bias, requires_grad=False)
        for parameter in (self.A_log, self.dt_bias):
            set_weight_attrs(parameter, {"weight_loader": self.load_values})
        self.norm = RMSNorm(head_size, eps=rms_norm_eps)
        self.o_proj = RowParallelLinear(
            width, hidden_size, bias=False, prefix=f"{prefix}.o_proj", return_bias=False
        )
        self.layer_name = prefix
        register_layer(self)

    def load_values(self, param: nn.Parameter, loaded_weight: torch.Tensor) -> None:
        """Copy this rank's entries of a vector; A_log may lie there as [1, 1, heads, 1]."""
        tp_size = get_tensor_model_parallel_world_size()
        if loaded_weight.dim() == 4:
            loaded_weight = loaded_weight[0, 0, :, 0]
        check_shape(loaded_weight, (len(param) * tp_size,))
        param.data.copy_(loaded_weight.chunk(tp_size)[get_tensor_model_parallel_rank()])

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> MambaSpec:
        model_config = vllm_config.model_config
        channels, width = self.conv1d.weight.shape
        state = (self.num_heads, self.head_size, self.head_size)
        return MambaSpec(
            block_size=vllm_config.cache_config.mamba_block_size or model_config.max_model_len,
            shapes=((width - 1, channels), state),
            dtypes=(model_config.dtype, torch.float32),
            mamba_type="kda",
        )

    def _project(self, gate: str, x: torch.Tensor) -> torch.Tensor:
        projected: torch.Tensor
        if self.low_rank_gates:
            x = self.get_submodule(f"{gate}_a_proj")(x)
            projected = self.get_submodule(f"{gate}_b_proj")(x)
        else:
            projected = self.get_submodule(f"{gate}_proj")(x)
        return projected

    def _log_decays(self, x: torch.Tensor) -> torch.Tensor:
        """float32 [tokens, heads * head_size]."""
        forgotten = self._project("f", x).float() + self.dt_bias
        rates = torch.exp(self.A_log).repeat_interleave(self.head_size)
        if self.decay_bound is None:
            return softplus(forgotten).mul_(rates).neg_()
        return sigmoid(forgotten.mul_(rates)).mul_(self.decay_bound)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """hidden_states: [tokens, hidden] -> [tokens, hidden]."""
        metadata: RecurrentMetadata = get_forward_context().attn_metadata[self.layer_name]
        layout, states = metadata.layout, metadata.states
        conv_cache, state_cache = self.kv_cache
        heads = (self.num_heads, self.head_size)
        channels = 3 * heads[0] * heads[1]
        qkv, b = torch.split_with_sizes(self.in_proj_qkvb(hidden_states), [channels, heads[0]], 1)
        convolved = new_rows_apart(qkv)
        causal_conv1d(qkv, self.conv1d.weight, None, True, layout, states, conv_cache, convolved)
        log_decays = self._log_decays(hidden_states)
        output = qkv.new_empty((len(qkv), *heads))
        channel_delta_rule(convolved, log_decays, b, layout, states, state_cache, output)
        gate = self._project("g", hidden_states).view(len(qkv), *heads)
        gated = output.new_empty(output.shape)
        sigmoid_gate(self.norm(output), gate, gated)
        projected: torch.Tensor = self.o_proj(gated.flatten(1))
        return projected
