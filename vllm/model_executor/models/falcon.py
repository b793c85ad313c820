"""Falcon 7B, 40B and 180B: attention and MLP side by side, few key and value heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn

from vllm.model_executor.layers.layernorm import LayerNorm
from vllm.model_executor.models.decoder_block import AttentionOptions, BlockLayout, PlainMLP
from vllm.model_executor.models.decoder_model import DecoderForCausalLM
from vllm.model_executor.models.utils import StackedParams
from vllm.model_executor.utils import check_shape


class FalconForCausalLM(DecoderForCausalLM):
    """Falcon 7B, 11B, 40B and 180B; models with ALiBi run as transformers' module."""

    supported_options: ClassVar[Mapping[str, Any]] = {"alibi": False}
    norm_class = LayerNorm
    norm_epsilon = "layer_norm_epsilon"
    mlp_class = PlainMLP
    mlp_activation = "activation"
    mlp_bias = "bias"
    stacked_params: ClassVar[StackedParams] = {}
    checkpoint_names: ClassVar[Mapping[str, str]] = {
        "model.embed_tokens": "transformer.word_embeddings",
        "model.layers": "transformer.h",
        "model.norm": "transformer.ln_f",
        "self_attn.qkv_proj": "self_attention.query_key_value",
        "self_attn.o_proj": "self_attention.dense",
        "mlp.up_proj": "mlp.dense_h_to_4h",
        "mlp.down_proj": "mlp.dense_4h_to_h",
    }

    def names_in_checkpoint(self) -> Mapping[str, str]:
        if _parallel(self.config) != "two norms":
            return self.checkpoint_names
        norms = {"input_layernorm": "ln_attn", "post_attention_layernorm": "ln_mlp"}
        return {**self.checkpoint_names, **norms}

    def attention_options(self, config: Any, index: int) -> AttentionOptions:
        return AttentionOptions(bias=config.bias, num_kv_heads=_num_kv_heads(config))

    def block_layout(self, config: Any, index: int) -> BlockLayout:
        return replace(super().block_layout(config, index), parallel=_parallel(config))

    def make_mlp(self, config: Any, index: int, prefix: str) -> nn.Module:
        return self.dense_mlp(config, prefix, config.ffn_hidden_size)

    def convert_weight(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Reorder [queries, key, value] of each KV head to all queries, all keys, all values."""
        if ".query_key_value." not in name:
            return tensor
        config = self.config
        kv_heads, head_size = _num_kv_heads(config), config.head_dim
        queries = config.num_attention_heads // kv_heads
        rows = kv_heads * (queries + 2) * head_size
        check_shape(tensor, (rows, *tensor.shape[1:]))
        by_head = tensor.reshape(kv_heads, queries + 2, head_size, -1)
        parts = torch.split(by_head, [queries, 1, 1], dim=1)
        return torch.cat([part.flatten(0, 2) for part in parts]).view(tensor.shape)


def _num_kv_heads(config: Any) -> int:
    if config.new_decoder_architecture:
        return int(config.num_kv_heads)
    return 1 if config.multi_query else int(config.num_attention_heads)


def _parallel(config: Any) -> Any:
    if config.new_decoder_architecture:
        return "two norms" if config.num_ln_in_parallel_attn != 1 else "one norm"
    return "one norm" if config.parallel_attn else "no"
