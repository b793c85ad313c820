"""OPT: learned positions that start at 2, layer norms, ReLU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from vllm.model_executor.layers.activation import get_act_fn
from vllm.model_executor.layers.layernorm import LayerNorm
from vllm.model_executor.models.decoder_block import AttentionOptions, BlockLayout, PlainMLP
from vllm.model_executor.models.decoder_model import DecoderForCausalLM, LearnedPositions
from vllm.model_executor.models.llama import LlamaDecoderLayer
from vllm.model_executor.models.utils import require_option

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_FIRST_POSITION = 2


class OPTForCausalLM(DecoderForCausalLM):
    """OPT in all sizes but 350M, which norms after attention and MLP and projects embeddings."""

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
    checkpoint_base: ClassVar[str] = "model."

    def make_layer(self, vllm_config: VllmConfig, index: int, prefix: str) -> nn.Module:
        config = vllm_config.model_config.hf_text_config
        require_option(
            config,
            do_layer_norm_before=True,
            _remove_final_layer_norm=False,
            layer_norm_elementwise_affine=True,
            word_embed_proj_dim=config.hidden_size,
        )
        options = AttentionOptions(
            qkv_bias=config.enable_bias,
            output_bias=config.enable_bias,
            num_kv_heads=config.num_attention_heads,
            rotates=False,
        )
        mlp = PlainMLP(
            config.hidden_size,
            config.ffn_dim,
            get_act_fn(config.activation_function, "activation_function"),
            bias=config.enable_bias,
            prefix=f"{prefix}.mlp",
        )
        layout = BlockLayout(norm=lambda size: self.make_norm(config, size))
        return LlamaDecoderLayer(vllm_config, options, prefix, mlp=mlp, layout=layout)

    @classmethod
    def make_norm(cls, config: Any, size: int) -> nn.Module:
        return LayerNorm(size)

    def learned_positions(self, config: Any) -> LearnedPositions | None:
        sizes = (config.max_position_embeddings, config.hidden_size)
        return LearnedPositions(*sizes, offset=_FIRST_POSITION)
