"""Zamba2: Mamba-2 layers, and a few attention blocks that some of them share.

The blocks are used as in Zamba (``zamba.py``); each use has its own adapters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from vllm.model_executor.layers.activation import get_act_and_mul_fn
from vllm.model_executor.layers.layer import Layer
from vllm.model_executor.layers.linear import merged_linear, replicated_linear, row_linear
from vllm.model_executor.layers.mamba.mamba2 import Mamba2Mixer, Mamba2Sizes
from vllm.model_executor.models.decoder_block import make_rope
from vllm.model_executor.models.utils import STACKED_QKV, StackedParams, require_option
from vllm.model_executor.models.zamba import SharedAttention, SharedBlock, SharingForCausalLM

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_NORM_EPS = 1e-5
"""Epsilon of the norm inside Mamba layers; the config's value is for the other norms."""


class _Adapters(nn.ModuleDict):
    """A low-rank product for each use of a block, added to the output of one projection."""

    def __init__(
        self, uses: Sequence[int], sizes: tuple[int, int, Sequence[int]], prefix: str
    ) -> None:
        """sizes: input, rank, outputs."""
        super().__init__()
        width, rank, outputs = sizes
        for use in uses:
            down = replicated_linear(width, rank, f"{prefix}.{use}.0")
            up = merged_linear(rank, outputs, f"{prefix}.{use}.1")
            self[str(use)] = nn.Sequential(down, up)


class Zamba2Attention(SharedAttention):
    """Shared attention with adapters for its uses, and a rotation if the config has one."""

    def __init__(self, vllm_config: VllmConfig, uses: Sequence[int], prefix: str) -> None:
        super().__init__(vllm_config, prefix)
        config = vllm_config.model_config.hf_text_config
        width = 2 * config.hidden_size
        self.has_adapters = config.use_shared_attention_adapter
        for part, size in zip("qkv", self.qkv_proj.output_sizes, strict=True):
            name = f"linear_{part}_adapter_list"
            sizes = (width, config.adapter_rank, [size])
            adapters = _Adapters(uses if self.has_adapters else (), sizes, f"{prefix}.{name}")
            self.add_module(name, adapters)
        if config.use_mem_rope:
            self.rotary_emb = make_rope(vllm_config, config.attention_head_dim)

    def project(self, x: torch.Tensor, use: int) -> tuple[torch.Tensor, ...]:
        parts = super().project(x, use)
        for part, values in zip("qkv", parts, strict=True):
            if self.has_adapters:
                values += self.get_submodule(f"linear_{part}_adapter_list.{use}")(x)
        return parts


class Zamba2MLP(Layer):
    """``down(activation(gate) * up)``, with adapters for its uses on gate and up."""

    def __init__(self, config: Any, uses: Sequence[int], prefix: str) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_up_proj = merged_linear(
            hidden, [inner, inner], f"{prefix}.gate_up_proj", bias=config.add_bias_linear
        )
        self.down_proj = row_linear(
            inner, hidden, f"{prefix}.down_proj", bias=config.add_bias_linear
        )
        name, sizes = "gate_up_proj_adapter_list", (hidden, config.adapter_rank, [inner, inner])
        self.gate_up_proj_adapter_list = _Adapters(uses, sizes, f"{prefix}.{name}")
        self.act_fn = get_act_and_mul_fn(config.hidden_act)

    def forward(self, x: torch.Tensor, use: int) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        gate_up = self.gate_up_proj(x)
        gate_up += self.gate_up_proj_adapter_list[str(use)](x)
        output: torch.Tensor = self.down_proj(self.act_fn(gate_up))
        return output


class Zamba2Block(SharedBlock):
    """A shared block whose MLP has adapters for its uses, too."""

    def run_mlp(self, x: torch.Tensor, use: int) -> torch.Tensor:
        output: torch.Tensor = self.feed_forward(x, use)
        return output


class Zamba2ForCausalLM(SharingForCausalLM):
    """Zamba2 1.2B, 2.7B and 7B: Mamba-2, and attention blocks that layers share."""

    stacked_params: ClassVar[StackedParams] = STACKED_QKV
    checkpoint_names: ClassVar[Mapping[str, str]] = {"model.norm": "model.final_layernorm"}

    def num_blocks(self, config: Any) -> int:
        blocks: int = config.num_mem_blocks
        return blocks

    def make_block(self, vllm_config: VllmConfig, first_use: int, prefix: str) -> SharedBlock:
        config = vllm_config.model_config.hf_text_config
        require_option(config, hybrid_layer_ids=self._hybrid_ids)  # adapters are in their order
        uses = range(first_use, len(self._hybrid_ids), config.num_mem_blocks)
        attention = Zamba2Attention(vllm_config, uses, f"{prefix}.self_attn")
        return Zamba2Block(config, attention, Zamba2MLP(config, uses, f"{prefix}.feed_forward"))

    def make_recurrent(self, config: Any, index: int, prefix: str) -> nn.Module:
        sizes = Mamba2Sizes.read(
            config,
            num_heads="n_mamba_heads",
            head_dim="mamba_headdim",
            num_groups="mamba_ngroups",
        )
        if sizes.inner_size != config.mamba_expand * config.hidden_size:
            raise ValueError(
                f"config.json: n_mamba_heads={sizes.num_heads} does not divide mamba_expand * "
                f"hidden_size = {config.mamba_expand * config.hidden_size}"
            )
        return Mamba2Mixer(
            config.hidden_size,
            sizes,
            norm_eps=_NORM_EPS,
            input_bias=config.add_bias_linear,
            output_bias=config.add_bias_linear,
            dt_limits=(config.time_step_min, math.inf),
            prefix=prefix,
        )
