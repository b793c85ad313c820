"""The mLSTM layer of xLSTM (Beck et al. 2024, arXiv 2405.04517; xLSTM 7B, arXiv 2503.13427)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import nn

from vllm.distributed.parallel_state import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention_layer_base import register_layer
from vllm.model_executor.layers.layer import Layer
from vllm.model_executor.layers.layernorm import LayerNorm
from vllm.model_executor.layers.linear import divide, load_part, merged_linear, row_linear
from vllm.model_executor.layers.mamba.recurrent_layer import RecurrentLayer
from vllm.model_executor.utils import check_shape, make_parameter, set_weight_attrs
from vllm.ops.activations import sigmoid_gate
from vllm.ops.layout import StateTensor
from vllm.ops.mlstm import mlstm


class HeadsLayerNorm(Layer):
    """A layer norm of each head of this rank; the weights of all ranks, and a bias if there is
    one, are [heads * n]."""

    def __init__(self, num_heads: int, size: int, eps: float, *, bias: bool) -> None:
        super().__init__()
        self.norm = LayerNorm(num_heads, size, eps=eps, bias=False)
        self.bias: nn.Parameter | None = None
        parameters = [self.norm.weight]
        if bias:
            self.bias = make_parameter(torch.zeros(num_heads, size))
            parameters.append(self.bias)
        for parameter in parameters:
            set_weight_attrs(parameter, {"weight_loader": _load_flat})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, heads, n] -> the same shape."""
        normed: torch.Tensor = self.norm(x)
        return normed if self.bias is None else normed.add_(self.bias)


def _load_flat(param: nn.Parameter, loaded_weight: torch.Tensor) -> None:
    """loaded_weight: [heads of all ranks * n]."""
    check_shape(loaded_weight, (param.numel() * get_tensor_model_parallel_world_size(),))
    load_part(param, loaded_weight.view(-1, param.shape[1]))


class MLSTMLayer(RecurrentLayer):
    """``out_proj(sigmoid(o) * norm(mlstm(q, k, v, gates)))``.

    ``in_proj`` makes [q | k | v | o], ``gate_proj`` the input gate and the forget gate.
    ``kv_cache`` is ``(memory [blocks, heads, dk, dv], normaliser [blocks, heads, dk], stabiliser
    [blocks, heads])``, views in float32.
    """

    kv_cache: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    mamba_type: ClassVar[str] = "mlstm"

    def __init__(
        self,
        *,
        hidden_size: int,
        num_heads: int,
        key_width: int,
        value_width: int,
        gate_cap: float,
        epsilon: float,
        norm_eps: float,
        bias: bool,
        prefix: str = "",
    ) -> None:
        """key_width, value_width: of all heads; epsilon: added to the divisor of outputs."""
        super().__init__()
        ranks = get_tensor_model_parallel_world_size()
        self.num_heads = divide(num_heads, ranks, "num_heads")
        self.gate_cap, self.epsilon = gate_cap, epsilon
        self.dk, self.dv = key_width // num_heads, value_width // num_heads
        self.in_proj = merged_linear(
            hidden_size,
            [key_width, key_width, value_width, value_width],
            f"{prefix}.in_proj",
            bias=bias,
        )
        self.gate_proj = merged_linear(
            hidden_size, [num_heads, num_heads], f"{prefix}.gate_proj", bias=True
        )
        self.multihead_norm = HeadsLayerNorm(self.num_heads, self.dv, norm_eps, bias=bias)
        self.out_proj = row_linear(value_width, hidden_size, f"{prefix}.out_proj", bias=bias)
        self.layer_name = prefix
        register_layer(self)

    def state_tensors(self, dtype: torch.dtype) -> Sequence[StateTensor]:
        heads = self.num_heads
        shapes = ((heads, self.dk, self.dv), (heads, self.dk), (heads,))
        return [StateTensor(shape, torch.float32) for shape in shapes]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """hidden_states: [tokens, hidden] -> [tokens, hidden]."""
        metadata = self.step_metadata()
        heads = (self.num_heads, self.dv)
        projected = self.in_proj(hidden_states)
        width = self.num_heads * self.dv
        qkv, gate = projected.split([projected.shape[1] - width, width], dim=-1)
        output = projected.new_empty((len(projected), *heads))
        mlstm(
            qkv,
            self.gate_proj(hidden_states),
            self.gate_cap,
            self.epsilon,
            metadata.layout,
            metadata.states,
            *self.kv_cache,
            output,
        )
        gated = torch.empty_like(output)
        sigmoid_gate(self.multihead_norm(output), gate.unflatten(1, heads), gated)
        mixed: torch.Tensor = self.out_proj(gated.flatten(1))
        return mixed
