"""EXAONE 4: norms after attention and MLP; if some layers have a window, others do not rotate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from vllm.model_executor.models.decoder_block import AttentionOptions, BlockLayout
from vllm.model_executor.models.decoder_model import DecoderForCausalLM
from vllm.model_executor.models.qwen2 import layer_sliding_window


class Exaone4ForCausalLM(DecoderForCausalLM):
    """EXAONE 4.0 1.2B and 32B."""

    checkpoint_names: ClassVar[Mapping[str, str]] = {
        "attention_output_norm": "post_attention_layernorm",
        "mlp_output_norm": "post_feedforward_layernorm",
    }

    def attention_options(self, config: Any, index: int) -> AttentionOptions:
        window = layer_sliding_window(config, index)
        return AttentionOptions(
            qk_norm=True,
            rotates=config.sliding_window is None or window is not None,
            sliding_window=window,
        )

    def block_layout(self, config: Any, index: int) -> BlockLayout:
        layout = super().block_layout(config, index)
        return replace(layout, norms_before=False, norms_after=True)
