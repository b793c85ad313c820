"""Zamba2: Mamba-2 layers; before some of them one of a few shared attention blocks.

A shared block reads the stream beside the embeddings, and what it gives enters the Mamba layer
behind it, not the stream. Its weights lie in the checkpoint at the first layer that uses it; every
use has adapters of its own, and keys and values of its own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import nn

from vllm.model_executor.layers.activation import get_act_and_mul_fn
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.mamba.mamba2 import Mamba2Mixer, Mamba2Sizes
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.models.decoder_block import BlockLayout, DecoderBlock
from vllm.model_executor.models.decoder_loop import DecoderLayer, Stream
from vllm.model_executor.models.decoder_model import DecoderForCausalLM, DecoderModel
from vllm.model_executor.models.utils import StackedParams, layer_kind

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_NORM_EPS = 1e-5
"""Of the norm inside the Mamba layers, whatever the config says of others."""


class _Adapters(nn.ModuleDict):
    """Two thin products for every use of a block, added to what one of its projections gives."""

    def __init__(
        self, uses: Sequence[int], sizes: tuple[int, int, Sequence[int]], prefix: str
    ) -> None:
        """sizes: input, rank, outputs."""
        super().__init__()
        width, rank, outputs = sizes
        for use in uses:
            down = ReplicatedLinear(
                width, rank, bias=False, prefix=f"{prefix}.{use}.0", return_bias=False
            )
            up = MergedColumnParallelLinear(
                rank, outputs, bias=False, prefix=f"{prefix}.{use}.1", return_bias=False
            )
            self[str(use)] = nn.Sequential(down, up)


class Zamba2Attention(nn.Module):
    """Attention over [stream | embeddings], with the adapters of its uses."""

    def __init__(self, vllm_config: VllmConfig, uses: Sequence[int], prefix: str) -> None:
        super().__init__()
        config = vllm_config.model_config.hf_text_config
        width, head_size = 2 * config.hidden_size, config.attention_head_dim
        self.qkv_proj = QKVParallelLinear(
            width,
            head_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            bias=False,
            prefix=f"{prefix}.qkv_proj",
            return_bias=False,
        )
        self.o_proj = RowParallelLinear(
            config.num_attention_heads * head_size,
            config.hidden_size,
            bias=False,
            prefix=f"{prefix}.o_proj",
            return_bias=False,
        )
        self.has_adapters = config.use_shared_attention_adapter
        for part, size in zip("qkv", self.qkv_proj.output_sizes, strict=True):
            name = f"linear_{part}_adapter_list"
            sizes = (width, config.adapter_rank, [size])
            adapters = _Adapters(uses if self.has_adapters else (), sizes, f"{prefix}.{name}")
            self.add_module(name, adapters)
        self.rotary_emb = None
        if config.use_mem_rope:
            self.rotary_emb = get_rope(
                head_size,
                config.max_position_embeddings,
                rope_parameters=config.rope_parameters,
                num_positions=vllm_config.model_config.max_model_len,
            )

    def make_cache(self, vllm_config: VllmConfig, prefix: str) -> Attention:
        """Where one use keeps its keys and values."""
        head_size = self.qkv_proj.head_size
        return Attention(
            self.qkv_proj.num_heads,
            head_size,
            (head_size / 2) ** -0.5,
            num_kv_heads=self.qkv_proj.num_kv_heads,
            cache_config=vllm_config.cache_config,
            prefix=prefix,
        )

    def forward(
        self, positions: torch.Tensor, x: torch.Tensor, use: int, cache: Attention
    ) -> torch.Tensor:
        """positions: int64 [tokens]; x: [tokens, 2 * hidden] -> [tokens, hidden]."""
        qkv = self.qkv_proj(x)
        parts = qkv.split(self.qkv_proj.output_partition_sizes, dim=-1)
        for part, values in zip("qkv", parts, strict=True):
            if self.has_adapters:
                values += self.get_submodule(f"linear_{part}_adapter_list.{use}")(x)
        q, k, v = (values.unflatten(-1, (-1, cache.head_size)) for values in parts)
        if self.rotary_emb is not None:
            q, k = self.rotary_emb(positions, q, k)
        output: torch.Tensor = self.o_proj(cache(q, k, v))
        return output


class Zamba2MLP(nn.Module):
    """``down(activation(gate) * up)``, with the adapters of its uses on gate and up."""

    def __init__(self, config: Any, uses: Sequence[int], prefix: str) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden,
            [inner, inner],
            bias=config.add_bias_linear,
            prefix=f"{prefix}.gate_up_proj",
            return_bias=False,
        )
        self.down_proj = RowParallelLinear(
            inner,
            hidden,
            bias=config.add_bias_linear,
            prefix=f"{prefix}.down_proj",
            return_bias=False,
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


class SharedBlock(nn.Module):
    """Norm, attention, norm, MLP, without a stream of its own."""

    def __init__(self, vllm_config: VllmConfig, uses: Sequence[int], prefix: str) -> None:
        super().__init__()
        config = vllm_config.model_config.hf_text_config
        self.input_layernorm = RMSNorm(2 * config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Zamba2Attention(vllm_config, uses, f"{prefix}.self_attn")
        self.pre_ff_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.feed_forward = Zamba2MLP(config, uses, f"{prefix}.feed_forward")

    def forward(
        self, positions: torch.Tensor, x: torch.Tensor, use: int, cache: Attention
    ) -> torch.Tensor:
        """x: [tokens, 2 * hidden] -> [tokens, hidden]."""
        mixed = self.self_attn(positions, self.input_layernorm(x), use, cache)
        output: torch.Tensor = self.feed_forward(self.pre_ff_layernorm(mixed), use)
        return output


class Zamba2HybridLayer(nn.Module):
    """One use of a shared block, and the Mamba layer that reads what it gives."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        shared: SharedBlock,
        use: int,
        mamba: DecoderBlock,
        prefix: str,
    ) -> None:
        super().__init__()
        config = vllm_config.model_config.hf_text_config
        self.use = use
        self.shared_transformer = shared
        self.attn = shared.self_attn.make_cache(vllm_config, f"{prefix}.attn")
        self.linear = ReplicatedLinear(
            config.hidden_size,
            config.hidden_size,
            bias=False,
            prefix=f"{prefix}.linear",
            return_bias=False,
        )
        self.mamba_decoder = mamba

    def forward(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        residual: torch.Tensor | None,
        embeddings: torch.Tensor,
    ) -> Stream:
        """The stream ``hidden_states (+ residual)``, [tokens, hidden], after this layer."""
        stream = hidden_states if residual is None else residual.add_(hidden_states)
        x = torch.cat((stream, embeddings), dim=-1)
        shared = self.linear(self.shared_transformer(positions, x, self.use, self.attn))
        mamba = self.mamba_decoder
        assert mamba.input_layernorm is not None
        return mamba.mix(positions, mamba.input_layernorm(stream + shared)), stream


class Zamba2Model(DecoderModel):
    """The embeddings go on to the layers that read them again."""

    def layer_calls(
        self, input_ids: torch.Tensor | None, hidden_states: torch.Tensor
    ) -> Iterable[DecoderLayer]:
        embeddings = hidden_states.clone()  # layers change the stream in place
        return [
            functools.partial(layer, embeddings=embeddings)
            if isinstance(layer, Zamba2HybridLayer)
            else layer
            for layer in self.layers
        ]


class Zamba2ForCausalLM(DecoderForCausalLM):
    """Zamba2 1.2B, 2.7B and 7B: Mamba-2, and attention blocks that layers share."""

    has_inner_state: ClassVar[Literal[True]] = True
    is_hybrid: ClassVar[Literal[True]] = True
    model_class: ClassVar[type[DecoderModel]] = Zamba2Model
    stacked_params: ClassVar[StackedParams] = {
        "qkv_proj": DecoderForCausalLM.stacked_params["qkv_proj"]
    }
    checkpoint_names: ClassVar[Mapping[str, str]] = {"model.norm": "model.final_layernorm"}

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        self._shared: dict[int, SharedBlock] = {}  # by the number of the block
        super().__init__(vllm_config=vllm_config, prefix=prefix)

    def weights_to_skip(self) -> tuple[str, ...]:
        """Copies of shared blocks at later uses."""
        if not self.tied:
            return ()
        again = self.config.hybrid_layer_ids[self.config.num_mem_blocks :]
        return tuple(f"model.layers.{index}.shared_transformer." for index in again)

    def make_layer(self, vllm_config: VllmConfig, index: int, prefix: str) -> nn.Module:
        config = vllm_config.model_config.hf_text_config
        kinds = ("linear_attention", "hybrid")
        if layer_kind(config, index, kinds, "layers_block_type") == "linear_attention":
            return make_mamba_layer(config, prefix)
        use = config.hybrid_layer_ids.index(index)
        first_use = use % config.num_mem_blocks
        # As in transformers, blocks are shared where the embeddings are.
        block = first_use if vllm_config.model_config.hf_config.tie_word_embeddings else use
        if block not in self._shared:
            uses = range(first_use, len(config.hybrid_layer_ids), config.num_mem_blocks)
            shared_prefix = f"{prefix}.shared_transformer"
            self._shared[block] = SharedBlock(vllm_config, uses, shared_prefix)
        mamba = make_mamba_layer(config, f"{prefix}.mamba_decoder")
        return Zamba2HybridLayer(vllm_config, self._shared[block], use, mamba, prefix)


def make_mamba_layer(config: Any, prefix: str) -> DecoderBlock:
    """A norm and the recurrent layer that the config describes."""
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
    mixer = Mamba2Mixer(
        config.hidden_size,
        sizes,
        norm_eps=_NORM_EPS,
        input_bias=config.add_bias_linear,
        output_bias=config.add_bias_linear,
        dt_limits=(config.time_step_min, math.inf),
        prefix=f"{prefix}.mamba",
    )
    layout = BlockLayout(norm=lambda size: RMSNorm(size, eps=config.rms_norm_eps))
    return DecoderBlock(config.hidden_size, None, None, layout, recurrent={"mamba": mixer})
