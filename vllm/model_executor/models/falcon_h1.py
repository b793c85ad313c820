"""Falcon-H1: attention and Mamba-2 side by side in every layer, with multipliers everywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from vllm.model_executor.hook_points import BlockHook
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.mamba.mamba2 import Gating, Mamba2Mixer, Mamba2Sizes
from vllm.model_executor.models.decoder_block import (
    AttentionOptions,
    DecoderBlock,
    GatedMLP,
    SelfAttention,
)
from vllm.model_executor.models.decoder_model import HybridForCausalLM
from vllm.model_executor.models.utils import require_option

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def _times(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x if factor == 1.0 else x * factor


def _multipliers(config: Any, option: str, count: int) -> list[float]:
    values = getattr(config, option)
    if len(values) != count:
        raise ValueError(f"config.json: {option}={values!r} has to be {count} numbers")
    return [float(value) for value in values]


class FalconH1Attention(SelfAttention):
    """Attention with multipliers of input and output; the keys' multiplier is part of the scale."""

    def __init__(
        self, vllm_config: VllmConfig, norm: Callable[[int], nn.Module], prefix: str
    ) -> None:
        config = vllm_config.model_config.hf_text_config
        options = AttentionOptions(
            bias=config.attention_bias,
            scale=vllm_config.model_config.get_head_size() ** -0.5 * config.key_multiplier,
        )
        super().__init__(vllm_config, options, norm, prefix)
        self.input_multiplier = float(config.attention_in_multiplier)
        self.output_multiplier = float(config.attention_out_multiplier)

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """positions: int64 [tokens]; hidden_states: [tokens, hidden] -> the same shape."""
        output = super().forward(positions, _times(hidden_states, self.input_multiplier))
        return _times(output, self.output_multiplier)


class FalconH1Mixer(Mamba2Mixer):
    """Mamba-2 with multipliers of input, projections and output; its norm is optional."""

    def __init__(self, config: Any, prefix: str) -> None:
        require_option(config, hidden_act="silu")
        gating: Gating = "gate"
        if config.mamba_rms_norm:
            gating = "norm, gate" if config.mamba_norm_before_gate else "gate, norm"
        super().__init__(
            config.hidden_size,
            Mamba2Sizes.read(config),
            norm_eps=config.rms_norm_eps,
            gating=gating,
            input_bias=config.mamba_proj_bias,
            output_bias=config.projectors_bias,
            conv_bias=config.mamba_conv_bias,
            dt_limits=config.time_step_limit,
            multipliers=_multipliers(config, "ssm_multipliers", 5),
            prefix=prefix,
        )
        self.input_multiplier = float(config.ssm_in_multiplier)
        self.output_multiplier = float(config.ssm_out_multiplier)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """hidden_states: [tokens, hidden] -> [tokens, hidden]."""
        output = super().forward(_times(hidden_states, self.input_multiplier))
        return _times(output, self.output_multiplier)


class FalconH1MLP(GatedMLP):
    """``m2 down(silu(m1 gate(x)) * up(x))``."""

    def __init__(self, config: Any, prefix: str) -> None:
        sizes = (config.hidden_size, config.intermediate_size)
        super().__init__(*sizes, config.hidden_act, bias=config.mlp_bias, prefix=prefix)
        factors = _multipliers(config, "mlp_multipliers", 2)
        self.gate_multiplier, self.output_multiplier = factors

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        gate_up = self.gate_up_proj(x)
        if self.gate_multiplier != 1.0:
            gate_up[:, : gate_up.shape[1] // 2].mul_(self.gate_multiplier)
        return _times(self.down_proj(self.act_fn(gate_up)), self.output_multiplier)


class FalconH1Block(DecoderBlock):
    """A block whose mixers multiply what they return."""

    def hook_points(self) -> Iterator[BlockHook]:
        """Yield the points of a block, the mixers' outputs before their multipliers."""
        for hook in super().hook_points():
            if isinstance(hook.path_of, FalconH1Attention):
                hook = hook._replace(module=hook.path_of.o_proj)
            elif isinstance(hook.path_of, FalconH1Mixer):
                hook = hook._replace(module=hook.path_of.out_proj)
            yield hook


class FalconH1ForCausalLM(HybridForCausalLM):
    """Falcon-H1 0.5B to 34B: attention and Mamba-2 side by side in every layer."""

    block_class = FalconH1Block

    checkpoint_names: ClassVar[Mapping[str, str]] = {
        "model.norm": "model.final_layernorm",
        "post_attention_layernorm": "pre_ff_layernorm",
        "mlp": "feed_forward",
    }

    def make_mixers(self, vllm_config: VllmConfig, index: int, prefix: str) -> dict[str, nn.Module]:
        config = vllm_config.model_config.hf_text_config
        norm = partial(self.make_norm, config)
        return {
            "self_attn": FalconH1Attention(vllm_config, norm, f"{prefix}.self_attn"),
            "mamba": FalconH1Mixer(config, f"{prefix}.mamba"),
        }

    def make_mlp(self, config: Any, index: int, prefix: str) -> nn.Module:
        return FalconH1MLP(config, prefix)

    def embedding_scale(self, config: Any, dtype: torch.dtype) -> float:
        return float(config.embedding_multiplier)

    def make_logits_processor(self, config: Any) -> LogitsProcessor:
        return LogitsProcessor(config.vocab_size, scale=config.lm_head_multiplier)
