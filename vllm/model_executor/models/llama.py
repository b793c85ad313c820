"""Llama, and the families that differ from it in the options of their attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vllm.model_executor.layers.activation import SiluAndMul, require_silu
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.models.decoder_loop import Stream
from vllm.model_executor.models.decoder_model import DecoderForCausalLM

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True)
class AttentionOptions:
    """Where one layer's attention differs from plain Llama's."""

    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    """RMS norm of every query and key head, before the rotation."""
    sliding_window: int | None = None
    """Tokens a query reads, its own included; None: all."""


class LlamaAttention(nn.Module):
    """Projections, rotation, attention, output projection."""

    def __init__(self, vllm_config: VllmConfig, options: AttentionOptions, prefix: str) -> None:
        super().__init__()
        config = vllm_config.model_config.hf_text_config
        head_size = vllm_config.model_config.get_head_size()
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            head_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            bias=options.qkv_bias,
            prefix=f"{prefix}.qkv_proj",
            return_bias=False,
        )
        self.o_proj = RowParallelLinear(
            config.num_attention_heads * head_size,
            config.hidden_size,
            bias=options.output_bias,
            prefix=f"{prefix}.o_proj",
            return_bias=False,
        )
        self.qk_norm = options.qk_norm
        if options.qk_norm:
            self.q_norm = RMSNorm(head_size, eps=config.rms_norm_eps)
            self.k_norm = RMSNorm(head_size, eps=config.rms_norm_eps)
        self.rotary_emb = get_rope(
            head_size,
            config.max_position_embeddings,
            rope_parameters=config.rope_parameters,
            num_positions=vllm_config.model_config.max_model_len,
        )
        self.attn = Attention(
            self.qkv_proj.num_heads,
            head_size,
            head_size**-0.5,
            num_kv_heads=self.qkv_proj.num_kv_heads,
            cache_config=vllm_config.cache_config,
            per_layer_sliding_window=options.sliding_window,
            prefix=f"{prefix}.attn",
        )

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """positions: int64 [tokens]; hidden_states: [tokens, hidden] -> the same shape."""
        qkv = self.qkv_proj(hidden_states).unflatten(-1, (-1, self.attn.head_size))
        kv_heads = self.attn.num_kv_heads
        q, k, v = qkv.split([self.attn.num_heads, kv_heads, kv_heads], dim=1)
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self.rotary_emb(positions, q, k)
        output: torch.Tensor = self.o_proj(self.attn(q, k, v))
        return output


class LlamaMLP(nn.Module):
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self, config: Any, prefix: str, *, bias: bool = False) -> None:
        super().__init__()
        require_silu(config.hidden_act)
        self.gate_up_proj = MergedColumnParallelLinear(
            config.hidden_size,
            [config.intermediate_size] * 2,
            bias=bias,
            prefix=f"{prefix}.gate_up_proj",
            return_bias=False,
        )
        self.down_proj = RowParallelLinear(
            config.intermediate_size,
            config.hidden_size,
            bias=bias,
            prefix=f"{prefix}.down_proj",
            return_bias=False,
        )
        self.act_fn = SiluAndMul()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        output: torch.Tensor = self.down_proj(self.act_fn(self.gate_up_proj(x)))
        return output


class LlamaDecoderLayer(nn.Module):
    """Norm, attention, norm, MLP around the residual stream."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        options: AttentionOptions,
        prefix: str,
        *,
        mlp_bias: bool = False,
    ) -> None:
        super().__init__()
        config = vllm_config.model_config.hf_text_config
        self.self_attn = LlamaAttention(vllm_config, options, f"{prefix}.self_attn")
        self.mlp = LlamaMLP(config, f"{prefix}.mlp", bias=mlp_bias)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> Stream:
        """The stream ``hidden_states (+ residual)``, [tokens, hidden], after this layer."""
        if residual is None:
            residual = hidden_states
            hidden_states = self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.self_attn(positions, hidden_states)
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        return self.mlp(hidden_states), residual


class LlamaForCausalLM(DecoderForCausalLM):
    """Llama 1 to 3."""

    def make_layer(self, vllm_config: VllmConfig, index: int, prefix: str) -> nn.Module:
        config = vllm_config.model_config.hf_text_config
        options = AttentionOptions(
            qkv_bias=config.attention_bias, output_bias=config.attention_bias
        )
        return LlamaDecoderLayer(vllm_config, options, prefix, mlp_bias=config.mlp_bias)


class MistralForCausalLM(DecoderForCausalLM):
    """Mistral: Llama with a sliding window in every layer, or in none."""

    def make_layer(self, vllm_config: VllmConfig, index: int, prefix: str) -> nn.Module:
        config = vllm_config.model_config.hf_text_config
        options = AttentionOptions(sliding_window=config.sliding_window)
        return LlamaDecoderLayer(vllm_config, options, prefix)
