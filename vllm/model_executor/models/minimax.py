"""MiniMax-Text-01: lightning attention, attention every few layers, experts in all of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import nn

from vllm.model_executor.layers.activation import get_act_and_mul_fn
from vllm.model_executor.layers.fused_moe import Experts, FusedMoE, RoutingRule
from vllm.model_executor.layers.mamba.lightning import LightningAttention
from vllm.model_executor.model_loader.weight_utils import check_shape
from vllm.model_executor.models.decoder_block import (
    AttentionOptions,
    BlockLayout,
    DecoderBlock,
    SelfAttention,
)
from vllm.model_executor.models.decoder_loop import Stream
from vllm.model_executor.models.decoder_model import DecoderForCausalLM
from vllm.model_executor.models.mixtral import MixtralForCausalLM
from vllm.model_executor.models.utils import layer_kind, require_option

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_KINDS = ("linear_attention", "full_attention")
_SMALLEST_SLOPE = 1e-5


class MiniMaxDecoderLayer(DecoderBlock):
    """The stream that goes on is the normed one: ``x = norm(s); s = alpha x + beta branch(x)``."""

    def __init__(
        self, config: Any, kind: str, mixer: nn.Module, mlp: nn.Module, layout: BlockLayout
    ) -> None:
        is_attention = kind == "full_attention"
        attention = mixer if is_attention else None
        recurrent = None if is_attention else {"lightning": mixer}
        super().__init__(config.hidden_size, attention, mlp, layout, recurrent=recurrent)
        name = "full_attn" if is_attention else "linear_attn"
        self.attention_factors = (
            float(getattr(config, f"{name}_alpha_factor")),
            float(getattr(config, f"{name}_beta_factor")),
        )
        self.mlp_factors = (float(config.mlp_alpha_factor), float(config.mlp_beta_factor))

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> Stream:
        """[tokens, hidden], after this layer."""
        assert residual is None and self.input_layernorm is not None
        assert self.post_attention_layernorm is not None and self.mlp is not None
        x = self.input_layernorm(hidden_states)
        x = _join(x, self.mix(positions, x), self.attention_factors)
        x = self.post_attention_layernorm(x)
        return _join(x, self.mlp(x), self.mlp_factors), None


def _join(stream: torch.Tensor, branch: torch.Tensor, factors: tuple[float, float]) -> torch.Tensor:
    alpha, beta = factors
    return stream * alpha + branch * beta


class MiniMaxForCausalLM(DecoderForCausalLM):
    """MiniMax-Text-01: lightning attention, attention every few layers, experts."""

    has_inner_state: ClassVar[Literal[True]] = True
    is_hybrid: ClassVar[Literal[True]] = True
    checkpoint_names: ClassVar[Mapping[str, str]] = {
        **MixtralForCausalLM.checkpoint_names,
        "lightning": "self_attn",
        "lightning.vkq_proj": "self_attn.qkv_proj",
    }

    def make_layer(self, vllm_config: VllmConfig, index: int, prefix: str) -> nn.Module:
        config = vllm_config.model_config.hf_text_config
        layout = BlockLayout(norm=lambda size: self.make_norm(config, size))
        experts = Experts(
            config.num_local_experts,
            config.hidden_size,
            config.intermediate_size,
            activation=get_act_and_mul_fn(config.hidden_act),
            projections=("w1", "w3", "w2"),
            prefix=f"{prefix}.mlp.experts",
        )
        rule = RoutingRule(top_k=config.num_experts_per_tok, renormalise=True)
        mlp = FusedMoE(config.hidden_size, experts, rule, prefix=f"{prefix}.mlp")
        kind = layer_kind(config, index, _KINDS)
        mixer: nn.Module
        if kind == "full_attention":
            options = AttentionOptions(sliding_window=config.sliding_window)
            mixer = SelfAttention(vllm_config, options, layout.norm, f"{prefix}.self_attn")
        else:
            require_option(config, hidden_act="silu")
            last = config.num_hidden_layers - 1
            mixer = LightningAttention(
                config.hidden_size,
                config.num_attention_heads,
                vllm_config.model_config.get_head_size(),
                slope=1.0 - index / (last + 1e-5) + _SMALLEST_SLOPE,
                prefix=f"{prefix}.lightning",
            )
        return MiniMaxDecoderLayer(config, kind, mixer, mlp, layout)

    def convert_weight(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """[query, key, value] of each head -> all values, all keys, all queries."""
        if not name.endswith(".self_attn.qkv_proj.weight"):
            return tensor
        heads = self.config.num_attention_heads
        size = self.config.head_dim or self.config.hidden_size // heads
        check_shape(tensor, (heads * 3 * size, self.config.hidden_size))
        return tensor.view(heads, 3, size, -1).flip(1).transpose(0, 1).reshape(tensor.shape)
