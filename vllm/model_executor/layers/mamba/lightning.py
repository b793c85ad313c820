"""Lightning attention (Qin et al. 2024, arXiv 2401.04658): linear attention with a fixed decay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import nn

from vllm.distributed.parallel_state import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from vllm.model_executor.layers.attention_layer_base import register_layer
from vllm.model_executor.layers.layernorm import WideRMSNorm
from vllm.model_executor.layers.linear import (
    column_linear,
    divide,
    merged_linear,
    row_linear,
)
from vllm.model_executor.layers.mamba.recurrent_layer import RecurrentLayer
from vllm.model_executor.layers.weight_share import HeadSlice
from vllm.ops.activations import sigmoid_gate
from vllm.ops.layout import StateTensor
from vllm.ops.plain_math import silu
from vllm.ops.state_space import state_space_scan


class LightningAttention(RecurrentLayer):
    """Per head and token ``S = decay S + k v^T; o = S^T q``, with SiLU of q, k and v.

    This is the recurrence of Mamba-2 with steps of one and one group per head. ``vkq_proj``
    makes all values, then all keys, then all queries. A norm over all heads and a sigmoid gate
    follow. slope: the layer's factor; the decay of head h is ``exp(-slope 2^(-8 (h + 1) /
    heads))``. ``kv_cache`` is ``(state view [blocks, heads, head_size, head_size] in float32,)``,
    whose last dimensions are [key, value].
    """

    mamba_type: ClassVar[str] = "linear_attention"

    def __init__(
        self, hidden_size: int, num_heads: int, head_size: int, slope: float, prefix: str = ""
    ) -> None:
        super().__init__()
        tp_size = get_tensor_model_parallel_world_size()
        self.num_heads = divide(num_heads, tp_size, "num_attention_heads")
        self.head_size = head_size
        width = num_heads * head_size
        self.vkq_proj = merged_linear(hidden_size, [width] * 3, f"{prefix}.vkq_proj")
        self.output_gate = column_linear(hidden_size, width, f"{prefix}.output_gate")
        self.out_proj = row_linear(width, hidden_size, f"{prefix}.out_proj")
        first = get_tensor_model_parallel_rank() * self.num_heads
        own = HeadSlice(self.num_heads, first, num_heads)
        self.norm = WideRMSNorm.over_heads(eps=1e-6)(own, head_size)
        heads = torch.arange(first + 1, first + 1 + self.num_heads, dtype=torch.float32)
        slopes = torch.exp2(heads * (-8.0 / num_heads)) * slope
        self.log_slopes = nn.Buffer(slopes.log(), persistent=False)
        self.zeros = nn.Buffer(torch.zeros_like(slopes), persistent=False)
        self.layer_name = prefix
        register_layer(self)

    def state_tensors(self, dtype: torch.dtype) -> Sequence[StateTensor]:
        return (StateTensor((self.num_heads, self.head_size, self.head_size), torch.float32),)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """hidden_states: [tokens, hidden] -> [tokens, hidden]."""
        metadata = self.step_metadata()
        (cache,) = self.kv_cache
        heads = (self.num_heads, self.head_size)
        vkq = silu(self.vkq_proj(hidden_states).float()).to(hidden_states.dtype)
        steps = vkq.new_zeros((1, heads[0])).expand(len(vkq), -1)
        output = vkq.new_empty((len(vkq), *heads))
        state_space_scan(
            vkq,
            steps,
            self.log_slopes,
            self.zeros,
            self.zeros,
            heads[0],
            1.0,
            1.0,
            metadata.layout,
            metadata.states,
            cache,
            (),  # pending tokens would take an eighth of the state: one key per head
            output,
        )
        gated = output.new_empty(output.shape)
        gate = self.output_gate(hidden_states).unflatten(-1, heads)
        sigmoid_gate(self.norm(output), gate, gated)
        projected: torch.Tensor = self.out_proj(gated.flatten(1))
        return projected
