"""xLSTM: an mLSTM, whose memory is one matrix per head, and an MLP in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import nn

from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.mamba.mlstm import MLSTMLayer
from vllm.model_executor.models.decoder_block import BlockLayout, DecoderBlock, GatedMLP
from vllm.model_executor.models.decoder_model import DecoderForCausalLM
from vllm.model_executor.models.utils import StackedParams, require_option
from vllm.model_executor.utils import make_parameter

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class BiasedRMSNorm(RMSNorm):
    """An RMS norm with a bias after its weight."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps)
        self.bias = make_parameter(torch.zeros(hidden_size))

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """Do as :meth:`RMSNorm.forward`, and add the bias."""
        if residual is None:
            return super().forward(x).add_(self.bias)
        normed, stream = super().forward(x, residual)
        return normed.add_(self.bias), stream


class xLSTMForCausalLM(DecoderForCausalLM):  # noqa: N801 (the architecture's name)
    """xLSTM 7B: only recurrent layers, whose memories are matrices.

    The config's kernels and modes do not matter: all of them compute the same values.
    """

    has_inner_state: ClassVar[Literal[True]] = True
    norm_epsilon = "norm_eps"
    checkpoint_prefixes: ClassVar[Mapping[str, str]] = {"model.": "backbone."}
    checkpoint_names: ClassVar[Mapping[str, str]] = {
        "model.embed_tokens": "model.embeddings",
        "model.layers": "model.blocks",
        "model.norm": "model.out_norm",
        "input_layernorm": "norm_mlstm",
        "post_attention_layernorm": "norm_ffn",
        "mlp": "ffn",
        "mlp.down_proj": "ffn.proj_down",
        "multihead_norm.norm": "multihead_norm",
    }

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        check_config(vllm_config.model_config.hf_text_config)
        super().__init__(vllm_config=vllm_config, prefix=prefix)

    @property
    def is_fused(self) -> bool:
        """True if the checkpoint also has the projections of one input as one tensor."""
        return bool(self.config.weight_mode == "fused")

    def stacked_in_checkpoint(self) -> StackedParams:
        if self.is_fused:
            return {}
        return {
            "in_proj": {"q": 0, "k": 1, "v": 2, "ogate_preact": 3},
            "gate_proj": {"igate_preact": 0, "fgate_preact": 1},
            "gate_up_proj": {"proj_up_gate": 0, "proj_up": 1},
        }

    def names_in_checkpoint(self) -> Mapping[str, str]:
        if not self.is_fused:
            return self.checkpoint_names
        return {
            **self.checkpoint_names,
            "in_proj": "qkv_opreact",
            "gate_proj": "ifgate_preact",
            "mlp.gate_up_proj": "ffn.proj_up_gate_z",
        }

    def make_layer(self, vllm_config: VllmConfig, index: int, prefix: str) -> nn.Module:
        config = vllm_config.model_config.hf_text_config
        norm_class = BiasedRMSNorm if config.use_bias else RMSNorm
        layout = BlockLayout(norm=lambda size: norm_class(size, config.norm_eps))
        mixer = MLSTMLayer(
            hidden_size=config.hidden_size,
            num_heads=config.num_heads,
            key_width=int(config.hidden_size * config.qk_dim_factor),
            value_width=int(config.hidden_size * config.v_dim_factor),
            gate_cap=config.gate_soft_cap,
            epsilon=config.eps,
            norm_eps=config.norm_eps,
            bias=config.use_bias,
            prefix=f"{prefix}.mlstm_layer",
        )
        multiple = config.ffn_round_up_to_multiple_of
        width = int((config.hidden_size * config.ffn_proj_factor + multiple - 1) // multiple)
        mlp = GatedMLP(
            config.hidden_size, width * multiple, bias=config.use_bias, prefix=f"{prefix}.mlp"
        )
        recurrent = {"mlstm_layer": mixer}
        return DecoderBlock(config.hidden_size, None, mlp, layout, recurrent=recurrent)

    def make_logits_processor(self, config: Any) -> LogitsProcessor:
        return LogitsProcessor(config.vocab_size, soft_cap=config.output_logit_soft_cap)


def check_config(config: Any) -> None:
    """Raise ValueError for an option that is invalid, or that this class does not support."""
    require_option(
        config,
        embedding_dim=config.hidden_size,
        add_out_norm=True,
        norm_reduction_force_float32=True,
        # A state that is rounded between two steps would make bits depend on a prompt's chunks.
        inference_state_dtype="float32",
    )
    for name in ("gate_soft_cap", "output_logit_soft_cap", "ffn_proj_factor"):
        if not getattr(config, name) > 0:
            raise ValueError(f"config.json: {name}={getattr(config, name)!r} has to be above 0")
    for name in ("qk_dim_factor", "v_dim_factor"):
        factor, heads = getattr(config, name), config.num_heads
        width = int(config.hidden_size * factor)
        if heads < 1 or width < 1 or width % heads:
            raise ValueError(
                f"config.json: num_heads={heads} does not divide hidden_size * {name} = {width}"
            )
