"""Latent attention of a decoder block: projections, norms, rotation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from vllm.config.model_facts import LATENT_SIZE_NAMES, check_whole, config_value
from vllm.model_executor.layers.attention import LatentExpansion, MLAAttention
from vllm.model_executor.layers.attention.token_selection import Indexer, TokenSelection
from vllm.model_executor.layers.layer import Layer
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    ReplicatedLinear,
    column_linear,
    replicated_linear,
    row_linear,
)
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.model_executor.models.decoder_block import make_rope
from vllm.ops.plain_math import sigmoid

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_NORM_EPSILON = 1e-6
"""Epsilon of the norms inside; the config's ``rms_norm_eps`` does not apply to them."""


@dataclass(frozen=True, kw_only=True)
class LatentOptions:
    """Differences of a family's latent attention from DeepSeek-V3's."""

    rotates: bool = True
    """False: the rotated parts of queries and keys are used without rotation."""
    interleaved: bool = True
    """True: the rotation turns pairs (0, 1), (2, 3), ... instead of (i, i + half)."""
    gates_heads: bool = False
    """True: a head's output is multiplied by a sigmoid of the layer's input (``g_proj``)."""
    query_multiplier: float = 1.0
    latent_multiplier: float = 1.0
    """Factor of the normed latent."""
    selection: TokenSelection | None = None
    """Selected tokens, shared by all layers; None: all tokens. Needs low-rank queries."""
    has_indexer: bool = False
    """True: the layer selects again, with the config's ``index_n_heads`` and ``index_head_dim``."""
    interleaves_indexer: bool = False
    """``interleaved`` for the indexer's rotation."""


class LatentSelfAttention(Layer):
    """Low-rank queries (or plain ones), latents, :class:`MLAAttention`, output projection.

    Sizes are the config's, by DeepSeek's names. Submodules have the checkpoints' names.
    """

    def __init__(self, vllm_config: VllmConfig, options: LatentOptions, prefix: str) -> None:
        super().__init__()
        config = vllm_config.model_config.hf_text_config
        check_whole(config, LATENT_SIZE_NAMES)
        heads, rank = config.num_attention_heads, config.kv_lora_rank
        self.key_size, self.rotated_size = config.qk_nope_head_dim, config.qk_rope_head_dim
        query_size = self.key_size + self.rotated_size
        bias = config.attention_bias
        self.q_a_proj: ReplicatedLinear | None = None
        query_input = config.hidden_size
        if (query_rank := config_value(config, ("q_lora_rank",))) is not None:
            query_input = query_rank
            self.q_a_proj = replicated_linear(
                config.hidden_size, query_input, f"{prefix}.q_a_proj", bias=bias
            )
            self.q_a_layernorm = RMSNorm(query_input, eps=_NORM_EPSILON)
        self.q_proj = column_linear(query_input, heads * query_size, f"{prefix}.q_proj")
        self.kv_a_proj_with_mqa = replicated_linear(
            config.hidden_size, rank + self.rotated_size, f"{prefix}.kv_a_proj_with_mqa", bias=bias
        )
        self.kv_a_layernorm = RMSNorm(rank, eps=_NORM_EPSILON)
        self.kv_b_proj = LatentExpansion(
            heads, self.key_size, config.v_head_dim, rank, f"{prefix}.kv_b_proj"
        )
        self.o_proj = row_linear(
            heads * config.v_head_dim, config.hidden_size, f"{prefix}.o_proj", bias=bias
        )
        self.g_proj: ColumnParallelLinear | None = None
        if options.gates_heads:
            self.g_proj = column_linear(config.hidden_size, heads, f"{prefix}.g_proj")
        self.rotary_emb: RotaryEmbedding | None = None
        scale = query_size**-0.5 * options.query_multiplier
        if options.rotates:
            self.rotary_emb = make_rope(
                vllm_config, self.rotated_size, interleaved=options.interleaved
            )
            scale *= yarn_score_factor(config.rope_parameters)
        self.latent_multiplier = options.latent_multiplier
        self.selection = options.selection
        self.indexer: Indexer | None = None
        if options.has_indexer:
            assert options.selection is not None
            self.indexer = Indexer(
                config.hidden_size,
                query_input,
                config.index_n_heads,
                config.index_head_dim,
                make_rope(vllm_config, self.rotated_size, interleaved=options.interleaves_indexer),
                options.selection,
                f"{prefix}.indexer",
            )
        self.attn = MLAAttention(
            self.kv_b_proj,
            self.rotated_size,
            scale,
            cache_config=vllm_config.cache_config,
            prefix=f"{prefix}.attn",
            selects_tokens=options.selection is not None,
        )

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """positions: int64 [tokens]; hidden_states: [tokens, hidden] -> the same shape."""
        x = hidden_states
        if self.q_a_proj is not None:
            x = self.q_a_layernorm(self.q_a_proj(x))
        if self.indexer is not None:
            self.indexer(positions, hidden_states, x)
        query = self.q_proj(x).unflatten(-1, (self.kv_b_proj.heads, -1))
        latent = self.kv_a_proj_with_mqa(hidden_states)
        rank = self.kv_b_proj.rank
        normed = self.kv_a_layernorm(latent[:, :rank])
        latent[:, :rank] = (
            normed if self.latent_multiplier == 1.0 else normed.mul_(self.latent_multiplier)
        )
        if self.rotary_emb is not None:
            self.rotary_emb(positions, query[..., self.key_size :], latent[:, None, rank:])
        attended = self.attn(query, latent, self.selection)
        if self.g_proj is not None:
            gate = sigmoid(self.g_proj(hidden_states).float()).to(attended.dtype)
            attended = attended.unflatten(-1, (gate.shape[1], -1)).mul(gate[..., None]).flatten(1)
        output: torch.Tensor = self.o_proj(attended)
        return output


def latent_names(config: Any) -> dict[str, str]:
    """Return the parts of names that differ in the checkpoint: own -> the checkpoint's."""
    is_low_rank = config_value(config, ("q_lora_rank",)) is not None
    return {"self_attn.q_proj": "self_attn.q_b_proj"} if is_low_rank else {}


def yarn_score_factor(rope_parameters: Mapping[str, Any]) -> float:
    """Return the factor of the scores for a context that is extended by ``factor``.

    ``(0.1 mscale_all_dim ln factor + 1)^2`` (YaRN, arXiv 2309.00071, 3.4, as DeepSeek-V2 applies
    it); 1 without ``mscale_all_dim``.
    """
    mscale, factor = rope_parameters.get("mscale_all_dim"), rope_parameters.get("factor") or 1.0
    if rope_parameters.get("rope_type", "default") == "default" or not mscale or factor <= 1:
        return 1.0
    return float(0.1 * mscale * math.log(factor) + 1.0) ** 2
