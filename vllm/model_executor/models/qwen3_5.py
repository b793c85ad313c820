"""Qwen3.5, dense: GatedDeltaNet layers with gated attention every few layers.

Every norm but the one inside GatedDeltaNet is zero-centred. Text only: of a checkpoint
with a vision tower or a multi-token-prediction head those weights are skipped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layer import Layer
from vllm.model_executor.layers.layernorm import GemmaRMSNorm
from vllm.model_executor.layers.linear import qkv_linear, row_linear
from vllm.model_executor.layers.mamba.gdn import GatedDeltaNet
from vllm.model_executor.models.decoder_block import make_rope
from vllm.model_executor.models.decoder_model import DecoderForCausalLM, HybridForCausalLM
from vllm.model_executor.models.utils import StackedParams, require_option
from vllm.ops.activations import sigmoid_gate

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class Qwen3_5Attention(Layer):  # noqa: N801
    """Attention whose output is multiplied by a sigmoid gate, head by head.

    ``q_proj`` of the checkpoint is twice as wide as the queries: [q | gate] of each head.
    """

    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = vllm_config.model_config.hf_text_config
        head_size = config.head_dim
        self.qkv_proj = qkv_linear(
            config.hidden_size,
            head_size,
            2 * config.num_attention_heads,
            config.num_key_value_heads,
            f"{prefix}.qkv_proj",
            bias=config.attention_bias,
        )
        self.o_proj = row_linear(
            config.num_attention_heads * head_size,
            config.hidden_size,
            f"{prefix}.o_proj",
            bias=config.attention_bias,
        )
        self.q_norm = GemmaRMSNorm(head_size, eps=config.rms_norm_eps)
        self.k_norm = GemmaRMSNorm(head_size, eps=config.rms_norm_eps)
        self.rotary_emb = make_rope(vllm_config, head_size)
        self.attn = Attention(
            self.qkv_proj.num_heads // 2,
            head_size,
            head_size**-0.5,
            num_kv_heads=self.qkv_proj.num_kv_heads,
            cache_config=vllm_config.cache_config,
            prefix=f"{prefix}.attn",
        )

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """positions: int64 [tokens]; hidden_states: [tokens, hidden] -> the same shape."""
        heads, kv_heads = self.attn.num_heads, self.attn.num_kv_heads
        head_size = self.attn.head_size
        num_tokens = len(positions)
        qkv = self.qkv_proj(hidden_states).view(num_tokens, -1, head_size)
        q_gate, k, v = torch.split_with_sizes(qkv, [2 * heads, kv_heads, kv_heads], 1)
        # q, gate: [tokens, heads, head_size]
        q, gate = q_gate.view(num_tokens, heads, 2, head_size).unbind(2)
        q, k = self.rotary_emb.after_norms(positions, q, k, self.q_norm, self.k_norm)
        output = self.attn(q, k, v).view(num_tokens, heads, head_size)
        gated = torch.empty_like(output)
        sigmoid_gate(output, gate, gated)
        projected: torch.Tensor = self.o_proj(gated.flatten(1))
        return projected


def make_gated_delta_net(
    config: Any, prefix: str, norm_epsilon: float, *, beta_scale: float = 1.0
) -> GatedDeltaNet:
    """The recurrent layer that a Qwen3.5 config describes; norm_epsilon: of the norm inside."""
    require_option(config, hidden_act="silu")  # of the convolution and the gate
    return GatedDeltaNet(
        hidden_size=config.hidden_size,
        num_k_heads=config.linear_num_key_heads,
        num_v_heads=config.linear_num_value_heads,
        head_k_dim=config.linear_key_head_dim,
        head_v_dim=config.linear_value_head_dim,
        conv_width=config.linear_conv_kernel_dim,
        rms_norm_eps=norm_epsilon,
        beta_scale=beta_scale,
        prefix=prefix,
    )


class Qwen3_5ForCausalLM(HybridForCausalLM):  # noqa: N801
    """Qwen3.5, dense, text, as a checkpoint of its own: gated delta net and gated attention."""

    recurrent_name = "linear_attn"
    norm_class = GemmaRMSNorm
    stacked_params: ClassVar[StackedParams] = {
        **DecoderForCausalLM.stacked_params,
        "in_proj_qkvzba": {
            "in_proj_qkv": (0, 1, 2),
            "in_proj_z": 3,
            "in_proj_b": 4,
            "in_proj_a": 5,
        },
    }
    skipped_weights: ClassVar[tuple[str, ...]] = ("mtp.",)

    def make_attention(self, vllm_config: VllmConfig, index: int, prefix: str) -> nn.Module:
        return Qwen3_5Attention(vllm_config, prefix)

    def make_recurrent(self, config: Any, index: int, prefix: str) -> nn.Module:
        return make_gated_delta_net(config, prefix, config.rms_norm_eps)


class Qwen3_5ForConditionalGeneration(Qwen3_5ForCausalLM):  # noqa: N801
    """Qwen3.5, dense, as published: the text model; vision and MTP weights are skipped."""

    checkpoint_prefixes: ClassVar[Mapping[str, str]] = {"model.": "model.language_model."}
    skipped_weights: ClassVar[tuple[str, ...]] = ("mtp.", "model.visual.")
