"""OLMo-Hybrid: gated delta nets with norms before them, attention with norms after it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn

from vllm.model_executor.layers.layernorm import WideRMSNorm
from vllm.model_executor.models.decoder_block import AttentionOptions, BlockLayout
from vllm.model_executor.models.decoder_model import DecoderForCausalLM, HybridForCausalLM
from vllm.model_executor.models.qwen3_5 import make_gated_delta_net
from vllm.model_executor.models.utils import StackedParams, number_at_end
from vllm.ops.packed_linear import PackedWeight

_OUTPUT_NORM_EPS = 1e-5
"""Epsilon of the norm inside a delta net; the config's value does not apply to it."""


class OlmoHybridForCausalLM(HybridForCausalLM):
    """OLMo-Hybrid 7B: attention, and gated delta nets that may have negative eigenvalues."""

    recurrent_name = "linear_attn"
    stacked_params: ClassVar[StackedParams] = {
        **DecoderForCausalLM.stacked_params,
        "in_proj_qkvzba": {
            f"{name}_proj": part for part, name in enumerate(("q", "k", "v", "g", "b", "a"))
        },
        "conv1d": {f"{name}_conv1d": part for part, name in enumerate("qkv")},
    }
    checkpoint_names: ClassVar[Mapping[str, str]] = {
        "input_layernorm": "attention_layer_norm",
        "post_attention_layernorm": "feedforward_layer_norm",
        "attention_output_norm": "post_attention_layernorm",
        "mlp_output_norm": "post_feedforward_layernorm",
        "linear_attn.norm": "linear_attn.o_norm",
        "linear_attn.out_proj": "linear_attn.o_proj",
    }

    def attention_options(self, config: Any, index: int) -> AttentionOptions:
        rope = config.rope_parameters
        return AttentionOptions(
            bias=config.attention_bias,
            qk_norm=WideRMSNorm.over_heads(config.rms_norm_eps),
            rotates=rope is not None and rope.get("rope_theta") is not None,
        )

    def block_layout(self, config: Any, index: int) -> BlockLayout:
        attends = config.layer_types[index] == "full_attention"
        layout = super().block_layout(config, index)
        return replace(layout, norms_before=not attends, norms_after=attends)

    def make_recurrent(self, config: Any, index: int, prefix: str) -> nn.Module:
        beta_scale = 2.0 if config.linear_allow_neg_eigval else 1.0
        return make_gated_delta_net(config, prefix, _OUTPUT_NORM_EPS, beta_scale=beta_scale)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor | PackedWeight]]) -> set[str]:
        return super().load_weights(self._by_projection(weights))

    def _by_projection(
        self, weights: Iterable[tuple[str, torch.Tensor | PackedWeight]]
    ) -> Iterator[tuple[str, torch.Tensor | PackedWeight]]:
        """Cut convolutions into those of q, k and v. transformers saves three equal parts of all
        channels under these names, however wide q, k and v are."""
        config = self.config
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        values = config.linear_num_value_heads * config.linear_value_head_dim
        waiting: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
        for name, tensor in weights:
            prefix, found, _ = name.rpartition("_conv1d.weight")
            layer = prefix[:-1]
            if not found or not isinstance(tensor, torch.Tensor):
                yield name, tensor
                continue
            parts = waiting[layer]
            parts[name] = tensor
            if len(parts) == len("qkv"):
                names = [f"{layer}{part}_conv1d.weight" for part in "qkv"]
                whole = torch.cat([parts[each] for each in names])
                sizes = [len(parts[each]) for each in names]
                is_thirds = sizes == [len(part) for part in whole.chunk(3)]
                if is_thirds and len(whole) == 2 * keys + values:
                    cut = torch.split_with_sizes(whole, [keys, keys, values])
                    parts = dict(zip(names, cut, strict=True))
                yield from parts.items()
                del waiting[layer]
        for parts in waiting.values():
            yield from parts.items()

    def published_name(self, name: str) -> str:
        """Rename attention's norm, for which transformers writes the name of a delta net's norm."""
        head, found, tail = name.partition(".feedforward_layer_norm.")
        kinds = dict(enumerate(self.config.layer_types))
        if not found or kinds.get(number_at_end(head)) != "full_attention":
            return name
        return f"{head}.post_attention_layernorm.{tail}"
