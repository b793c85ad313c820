"""StableLM: Llama with layer norms, a partial rotation, and a separate norm for each head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from vllm.model_executor.layers.layernorm import LayerNorm
from vllm.model_executor.layers.linear import ShardId
from vllm.model_executor.layers.weight_share import HeadSlice
from vllm.model_executor.models.decoder_block import AttentionOptions, BlockLayout
from vllm.model_executor.models.decoder_model import DecoderForCausalLM
from vllm.model_executor.utils import check_shape, set_weight_attrs


class NormOfEachHead(LayerNorm):
    """A layer norm with weights for each head; the checkpoint has one tensor per head."""

    def __init__(self, heads: HeadSlice, size: int, eps: float) -> None:
        super().__init__(heads.count, size, eps=eps, bias=False)
        self._heads = heads
        set_weight_attrs(self.weight, {"weight_loader": self.load_head})

    def checkpoint_layouts(self, leaf: str) -> list[Mapping[str, ShardId]]:
        """Return the only layout of the weights in checkpoints."""
        return [{f"norms.{head}.{leaf}": head for head in range(self._heads.total)}]

    def load_head(
        self, param: nn.Parameter, loaded_weight: torch.Tensor, shard_id: ShardId
    ) -> None:
        """Copy the weights of head ``shard_id``, if this rank has it."""
        assert isinstance(shard_id, int)
        check_shape(loaded_weight, tuple(param.shape[1:]))
        if 0 <= shard_id - self._heads.first < self._heads.count:
            param.data[shard_id - self._heads.first] = loaded_weight


class StableLmForCausalLM(DecoderForCausalLM):
    """StableLM 3B, StableLM 2 1.6B and 12B."""

    norm_class = LayerNorm
    norm_epsilon = "layer_norm_eps"
    checkpoint_names: ClassVar[Mapping[str, str]] = {
        "self_attn.q_norm": "self_attn.q_layernorm",
        "self_attn.k_norm": "self_attn.k_layernorm",
    }

    def attention_options(self, config: Any, index: int) -> AttentionOptions:
        norm = partial(NormOfEachHead, eps=config.layer_norm_eps) if config.qk_layernorm else False
        return AttentionOptions(qkv_bias=config.use_qkv_bias, qk_norm=norm)

    def block_layout(self, config: Any, index: int) -> BlockLayout:
        return replace(
            super().block_layout(config, index),
            parallel="one norm" if config.use_parallel_residual else "no",
        )
