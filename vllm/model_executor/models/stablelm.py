"""StableLM: Llama with layer norms, a partial rotation, and norms of each head of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from vllm.model_executor.layers.layernorm import LayerNorm
from vllm.model_executor.layers.linear import ShardId
from vllm.model_executor.model_loader.weight_utils import check_shape
from vllm.model_executor.models.decoder_block import AttentionOptions, BlockLayout
from vllm.model_executor.models.decoder_model import DecoderForCausalLM
from vllm.model_executor.models.llama import LlamaDecoderLayer
from vllm.model_executor.utils import set_weight_attrs

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class NormOfEachHead(LayerNorm):
    """A layer norm with weights for every head, which are a tensor each in the checkpoint."""

    def __init__(self, heads: int, size: int, eps: float) -> None:
        super().__init__(heads, size, eps=eps, bias=False)
        set_weight_attrs(self.weight, {"weight_loader": self.load_head})

    def checkpoint_layouts(self, leaf: str) -> list[Mapping[str, ShardId]]:
        """The one way in which they lie there."""
        return [{f"norms.{head}.{leaf}": head for head in range(len(self.weight))}]

    def load_head(
        self, param: nn.Parameter, loaded_weight: torch.Tensor, shard_id: ShardId
    ) -> None:
        """Copy the weights of head ``shard_id``."""
        assert isinstance(shard_id, int)
        check_shape(loaded_weight, tuple(param.shape[1:]))
        param.data[shard_id] = loaded_weight


class StableLmForCausalLM(DecoderForCausalLM):
    """StableLM 3B, StableLM 2 1.6B and 12B."""

    checkpoint_names: ClassVar[Mapping[str, str]] = {
        "self_attn.q_norm": "self_attn.q_layernorm",
        "self_attn.k_norm": "self_attn.k_layernorm",
    }

    def make_layer(self, vllm_config: VllmConfig, index: int, prefix: str) -> nn.Module:
        config = vllm_config.model_config.hf_text_config

        def norm_of_heads(heads: int, size: int) -> nn.Module:
            return NormOfEachHead(heads, size, config.layer_norm_eps)

        options = AttentionOptions(
            qkv_bias=config.use_qkv_bias, qk_norm=norm_of_heads if config.qk_layernorm else False
        )
        layout = BlockLayout(
            norm=lambda size: self.make_norm(config, size),
            parallel="one norm" if config.use_parallel_residual else "no",
        )
        return LlamaDecoderLayer(vllm_config, options, prefix, layout=layout)

    @classmethod
    def make_norm(cls, config: Any, size: int) -> nn.Module:
        return LayerNorm(size, eps=config.layer_norm_eps)
