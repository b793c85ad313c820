"""OPT: learned positions that start at 2, layer norms, ReLU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from vllm.model_executor.layers.layernorm import LayerNorm
from vllm.model_executor.models.decoder_block import AttentionOptions, PlainMLP
from vllm.model_executor.models.decoder_model import DecoderForCausalLM, LearnedPositions
from vllm.model_executor.models.utils import require_option

_FIRST_POSITION = 2


class OPTForCausalLM(DecoderForCausalLM):
    """OPT in all sizes but 350M, which norms after attention and MLP, and projects embeddings."""

    supported_options: ClassVar[Mapping[str, Any]] = {
        "do_layer_norm_before": True,
        "_remove_final_layer_norm": False,
        "layer_norm_elementwise_affine": True,
    }
    mlp_class = PlainMLP
    mlp_activation = "activation_function"
    mlp_bias = "enable_bias"
    checkpoint_names: ClassVar[Mapping[str, str]] = {
        "model.embed_tokens": "model.decoder.embed_tokens",
        "model.learned_positions": "model.decoder.embed_positions",
        "model.layers": "model.decoder.layers",
        "model.norm": "model.decoder.final_layer_norm",
        "input_layernorm": "self_attn_layer_norm",
        "post_attention_layernorm": "final_layer_norm",
        "self_attn.o_proj": "self_attn.out_proj",
        "mlp.up_proj": "fc1",
        "mlp.down_proj": "fc2",
    }

    def attention_options(self, config: Any, index: int) -> AttentionOptions:
        require_option(config, word_embed_proj_dim=config.hidden_size)
        heads = config.num_attention_heads
        return AttentionOptions(bias=config.enable_bias, num_kv_heads=heads, rotates=False)

    def make_mlp(self, config: Any, index: int, prefix: str) -> nn.Module:
        return self.dense_mlp(config, prefix, config.ffn_dim)

    @classmethod
    def make_norm(cls, config: Any, size: int) -> nn.Module:
        return LayerNorm(size)

    def learned_positions(self, config: Any) -> LearnedPositions | None:
        sizes = (config.max_position_embeddings, config.hidden_size)
        return LearnedPositions(*sizes, offset=_FIRST_POSITION)
