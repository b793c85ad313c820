"""MiniMax-Text-01: lightning attention, attention every few layers, experts in all of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from vllm.model_executor.layers.mamba.lightning import LightningAttention
from vllm.model_executor.models.decoder_block import DecoderBlock
from vllm.model_executor.models.decoder_loop import Stream
from vllm.model_executor.models.decoder_model import HybridForCausalLM
from vllm.model_executor.models.mixtral import MixtralForCausalLM
from vllm.model_executor.models.utils import require_option
from vllm.model_executor.utils import check_shape

if TYPE_CHECKING:
    from vllm.config import VllmConfig


_SMALLEST_SLOPE = 1e-5


class MiniMaxBlock(DecoderBlock):
    """A block that passes the normed stream on: ``x = norm(s); s = alpha x + beta branch(x)``."""

    attention_factors: tuple[float, float]
    """The factors alpha and beta."""
    mlp_factors: tuple[float, float]

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> Stream:
        """Return the stream, [tokens, hidden], after this layer."""
        assert residual is None and self.input_layernorm is not None
        assert self.post_attention_layernorm is not None and self.mlp is not None
        x = self.input_layernorm(hidden_states)
        x = _join(x, self.run_mixers(positions, x), self.attention_factors)
        x = self.post_attention_layernorm(x)
        return _join(x, self.run_mlp(x, x), self.mlp_factors), None


def _join(stream: torch.Tensor, branch: torch.Tensor, factors: tuple[float, float]) -> torch.Tensor:
    alpha, beta = factors
    return stream * alpha + branch * beta


class MiniMaxForCausalLM(HybridForCausalLM, MixtralForCausalLM):
    """MiniMax-Text-01: lightning attention, attention every few layers, experts."""

    recurrent_name = "lightning"
    block_class = MiniMaxBlock
    checkpoint_names: ClassVar[Mapping[str, str]] = {
        **MixtralForCausalLM.checkpoint_names,
        "lightning": "self_attn",
        "lightning.vkq_proj": "self_attn.qkv_proj",
    }

    def make_layer(self, vllm_config: VllmConfig, index: int, prefix: str) -> nn.Module:
        config = vllm_config.model_config.hf_text_config
        layer = super().make_layer(vllm_config, index, prefix)
        assert isinstance(layer, MiniMaxBlock)
        branch = "full_attn" if layer.self_attn is not None else "linear_attn"
        layer.attention_factors = _factors(config, branch)
        layer.mlp_factors = _factors(config, "mlp")
        return layer

    def make_recurrent(self, config: Any, index: int, prefix: str) -> nn.Module:
        require_option(config, hidden_act="silu")
        return LightningAttention(
            config.hidden_size,
            config.num_attention_heads,
            _head_size(config),
            slope=1.0 - index / (config.num_hidden_layers - 1 + 1e-5) + _SMALLEST_SLOPE,
            prefix=prefix,
        )

    def convert_weight(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Reorder [query, key, value] of each head to all values, all keys, all queries."""
        if not name.endswith(".self_attn.qkv_proj.weight"):
            return tensor
        heads, size = self.config.num_attention_heads, _head_size(self.config)
        check_shape(tensor, (heads * 3 * size, self.config.hidden_size))
        return tensor.view(heads, 3, size, -1).flip(1).transpose(0, 1).reshape(tensor.shape)


def _factors(config: Any, branch: str) -> tuple[float, float]:
    names = (f"{branch}_alpha_factor", f"{branch}_beta_factor")
    alpha, beta = (float(getattr(config, name)) for name in names)
    return alpha, beta


def _head_size(config: Any) -> int:
    return int(config.head_dim or config.hidden_size // config.num_attention_heads)
