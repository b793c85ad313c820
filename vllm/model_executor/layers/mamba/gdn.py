"""GatedDeltaNet (Yang et al. 2024), the recurrent layer of Qwen3.5."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from vllm.distributed.parallel_state import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention_layer_base import register_layer
from vllm.model_executor.layers.layernorm import RMSNormGated
from vllm.model_executor.layers.linear import divide, load_part, merged_linear, row_linear
from vllm.model_executor.layers.mamba.causal_conv import CausalConv1d
from vllm.model_executor.layers.mamba.recurrent_layer import RecurrentLayer
from vllm.model_executor.utils import make_parameter
from vllm.ops.backends import check_delta_rule_backend
from vllm.ops.layout import StateTensor
from vllm.ops.recurrent import gated_delta_rule, pending_tensors


class GatedDeltaNet(RecurrentLayer):
    """Projections, causal convolution, gated delta rule, gated norm, output projection.

    ``kv_cache`` is ``(convolution view [blocks, width - 1, channels] in the model's
    dtype, state view [blocks, v heads, dk, dv] in float32, pending tensors of the
    kernels' delta rule...)``.
    """

    mamba_type: ClassVar[str] = "gdn_attention"

    def __init__(
        self,
        *,
        hidden_size: int,
        num_k_heads: int,
        num_v_heads: int,
        head_k_dim: int,
        head_v_dim: int,
        conv_width: int,
        rms_norm_eps: float,
        beta_scale: float = 1.0,
        prefix: str = "",
    ) -> None:
        super().__init__()
        if num_v_heads % num_k_heads:
            raise ValueError(
                f"linear_num_key_heads={num_k_heads} does not divide "
                f"linear_num_value_heads={num_v_heads}"
            )
        tp_size = get_tensor_model_parallel_world_size()
        self.num_k_heads = divide(num_k_heads, tp_size, "linear_num_key_heads")
        self.num_v_heads = divide(num_v_heads, tp_size, "linear_num_value_heads")
        self.head_k_dim = head_k_dim
        self.head_v_dim = head_v_dim
        self.conv_width, self.beta_scale = conv_width, beta_scale
        self.conv_channels = 2 * self.num_k_heads * head_k_dim + self.num_v_heads * head_v_dim
        """Channels of q, k and v on this rank."""
        key_dim, value_dim = num_k_heads * head_k_dim, num_v_heads * head_v_dim
        # One product: [q | k | v | z | b | a].
        self.in_proj_qkvzba = merged_linear(
            hidden_size,
            [key_dim, key_dim, value_dim, value_dim, num_v_heads, num_v_heads],
            f"{prefix}.in_proj_qkvzba",
        )
        self.conv1d = CausalConv1d((key_dim, key_dim, value_dim), conv_width)
        # Spread decays like those of trained models; a checkpoint overwrites them.
        self.A_log = make_parameter(torch.linspace(1.0, 16.0, self.num_v_heads).log(), load_part)
        self.dt_bias = make_parameter(torch.ones(self.num_v_heads), load_part)
        self.norm = RMSNormGated(head_v_dim, eps=rms_norm_eps)
        self.out_proj = row_linear(value_dim, hidden_size, f"{prefix}.out_proj")
        self.layer_name = prefix
        vllm_config = register_layer(self)
        check_delta_rule_backend(
            vllm_config.device_config.device_type, vllm_config.model_config.dtype
        )

    def state_tensors(self, dtype: torch.dtype) -> Sequence[StateTensor]:
        state = (self.num_v_heads, self.head_k_dim, self.head_v_dim)
        inputs = (self.conv_width - 1, self.conv_channels)
        return StateTensor(inputs, dtype), StateTensor(state, torch.float32)

    def pending_tensors(self, device_type: str, dtype: torch.dtype) -> Sequence[StateTensor]:
        heads = (self.num_k_heads, self.num_v_heads, self.head_k_dim, self.head_v_dim)
        return pending_tensors(device_type, dtype, *heads)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """hidden_states: [tokens, hidden] -> [tokens, hidden]."""
        metadata = self.step_metadata()
        conv_cache, state_cache, *pending = self.kv_cache
        heads = (self.num_v_heads, self.head_v_dim)
        sizes = [self.conv_channels, heads[0] * heads[1], heads[0], heads[0]]
        inputs = self.in_proj_qkvzba(hidden_states)
        qkv, z, b, a = torch.split_with_sizes(inputs, sizes, 1)
        convolved = self.conv1d(qkv, metadata, conv_cache, silu=True)
        output = qkv.new_empty((len(qkv), *heads))
        gated_delta_rule(
            convolved,
            a,
            b,
            self.A_log,
            self.dt_bias,
            self.num_k_heads,
            self.beta_scale,
            metadata.layout,
            metadata.states,
            state_cache,
            pending,
            output,
        )
        output = self.norm(output, z.view(output.shape))
        projected: torch.Tensor = self.out_proj(output.flatten(1))
        return projected
