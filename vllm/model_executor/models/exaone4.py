"""EXAONE 4: norms after attention and MLP; layers without a window beside others do not rotate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from torch import nn

from vllm.model_executor.models.decoder_block import AttentionOptions, BlockLayout
from vllm.model_executor.models.decoder_model import DecoderForCausalLM
from vllm.model_executor.models.llama import LlamaDecoderLayer
from vllm.model_executor.models.qwen2 import layer_sliding_window

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class Exaone4ForCausalLM(DecoderForCausalLM):
    """EXAONE 4.0 1.2B and 32B."""

    checkpoint_names: ClassVar[Mapping[str, str]] = {
        "attention_output_norm": "post_attention_layernorm",
        "mlp_output_norm": "post_feedforward_layernorm",
    }

    def make_layer(self, vllm_config: VllmConfig, index: int, prefix: str) -> nn.Module:
        config = vllm_config.model_config.hf_text_config
        window = layer_sliding_window(config, index)
        options = AttentionOptions(
            qk_norm=True,
            rotates=config.sliding_window is None or window is not None,
            sliding_window=window,
        )
        layout = BlockLayout(
            norm=lambda size: self.make_norm(config, size), norms_before=False, norms_after=True
        )
        return LlamaDecoderLayer(vllm_config, options, prefix, layout=layout)
