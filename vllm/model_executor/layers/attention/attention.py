"""Causal attention over the KV pool."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention.spread_attention import attend_spread, check_spread
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase, register_layer
from vllm.model_executor.layers.layer import Layer
from vllm.model_executor.layers.linear import refuse_quantization
from vllm.model_executor.layers.shared_tokens import all_tokens_of_branch
from vllm.ops.attention import write_kv
from vllm.ops.backends import check_attention_backend, get_paged_attention
from vllm.ops.operation import KERNEL_DTYPES
from vllm.platforms.interface import asked_attention_backend
from vllm.utils.token_spread import WHOLE
from vllm.v1.kv_cache_interface import (
    PAGE_TOKENS,
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    SlidingWindowSpec,
)

if TYPE_CHECKING:
    from vllm.config import CacheConfig, VllmConfig
    from vllm.v1.attention.backend import AttentionMetadata


class Attention(Layer, AttentionLayerBase):
    """Writes keys and values of the step's tokens, then attends over all that are stored.

    num_heads, num_kv_heads: on this rank. per_layer_sliding_window: number of tokens that a query
    reads, with its own; None: all. cache_config: accepted from model authors and not used; the spec
    follows the engine's config at the time when the spec is built. logits_soft_cap: scores s become
    ``cap * tanh(s / cap)``; 0 or None: they do not change. sinks: [num_heads], for each head one
    more score that takes weight and has no value; usually a parameter of the model, which loads it.
    head_size_v: head size of values; None: that of keys. attention_chunk_size: queries read keys
    from the last multiple of this number on (Llama 4). kv_sharing_target_layer_name: prefix of an
    earlier layer whose keys and values this one reads; it gets and stores none of its own.
    total_num_kv_heads: the number on all ranks; None: the config's.
    ``kv_cache`` is the strided view [blocks, pages, 16, kv_heads, head_size + head_size_v].
    """

    kv_cache: torch.Tensor
    sinks: torch.Tensor | None

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        cache_config: CacheConfig | None = None,
        quant_config: object = None,
        logits_soft_cap: float | None = None,
        per_layer_sliding_window: int | None = None,
        prefix: str = "",
        sinks: torch.Tensor | None = None,
        *,
        head_size_v: int | None = None,
        attention_chunk_size: int | None = None,
        kv_sharing_target_layer_name: str | None = None,
        total_num_kv_heads: int | None = None,
    ) -> None:
        super().__init__()
        refuse_quantization(quant_config, prefix)
        self.num_heads = num_heads
        self.head_size = head_size
        self.head_size_v = head_size if head_size_v is None else head_size_v
        # Of a negative number a power of -0.5 is complex.
        if isinstance(scale, complex) or not 0 < scale < math.inf:
            raise ValueError(
                f"{prefix!r}: scale={scale} is not a finite number above 0 (config.json: "
                "query_pre_attn_scalar, attention_multiplier, key_multiplier)"
            )
        self.scale = scale
        self.num_kv_heads = num_kv_heads or num_heads
        if num_heads % self.num_kv_heads:
            raise ValueError(
                f"{prefix!r}: num_kv_heads={self.num_kv_heads} does not divide "
                f"num_heads={num_heads} (config.json: num_key_value_heads, num_attention_heads)"
            )
        if logits_soft_cap is not None and not 0 <= logits_soft_cap < math.inf:
            raise ValueError(
                f"{prefix!r}: logits_soft_cap={logits_soft_cap} is not a finite number above 0 "
                "(0 or None: no cap)"
            )
        self.logits_soft_cap = logits_soft_cap or None
        self._register_sinks(sinks, prefix)
        self.layer_name = prefix
        vllm_config = get_current_vllm_config()
        self.attention_backend = vllm_config.attention_backend
        model_config = vllm_config.model_config
        check_attention_backend(
            asked_attention_backend(vllm_config.attention_config.backend),
            vllm_config.device_config.device_type,
            model_config.dtype,
            head_size,
            sinks is not None,
            has_chunks=attention_chunk_size is not None,
        )
        if per_layer_sliding_window is not None and per_layer_sliding_window < 1:
            raise ValueError(
                f"{prefix!r}: per_layer_sliding_window={per_layer_sliding_window} has to be above "
                "0, or None (config.json: sliding_window, attention_window_size)"
            )
        # If it is disabled, no request is longer than the window.
        disabled = model_config.disable_sliding_window
        self.sliding_window = None if disabled else per_layer_sliding_window
        self.chunk_size = attention_chunk_size
        if attention_chunk_size is not None and (attention_chunk_size < 1 or self.sliding_window):
            raise ValueError(
                f"{prefix!r}: attention_chunk_size={attention_chunk_size} has to be above 0, and "
                f"per_layer_sliding_window={per_layer_sliding_window} has to be None with it"
            )
        self.spread = WHOLE
        parallel = vllm_config.parallel_config
        if self.sliding_window is None and attention_chunk_size is None:
            self.spread = parallel.token_spread
        if not self.spread.is_whole:
            total = total_num_kv_heads or model_config.get_total_num_kv_heads()
            copies = max(1, parallel.tensor_parallel_size // total)
            check_spread(vllm_config, copies, prefix)
        # A tuple, so that the other layer does not become a submodule.
        self._target: tuple[Attention, ...] = ()
        if kv_sharing_target_layer_name is None:
            register_layer(self)
        else:
            self._target = (self._find_target(vllm_config, kv_sharing_target_layer_name),)

    def _find_target(self, vllm_config: VllmConfig, name: str) -> Attention:
        """Return the layer whose cache this one reads; ValueError: it cannot."""
        target = vllm_config.compilation_config.static_forward_context.get(name)
        if not isinstance(target, Attention):
            raise ValueError(
                f"{self.layer_name!r}: kv_sharing_target_layer_name={name!r} is not an attention "
                "layer that was made before this one and stores keys and values"
            )
        if _cache_facts(target) != _cache_facts(self):
            raise ValueError(
                f"{self.layer_name!r} cannot share keys and values with {name!r}: (head_size, "
                f"head_size_v, num_kv_heads, window, chunk) are {_cache_facts(self)} here, "
                f"{_cache_facts(target)} there"
            )
        return target

    @property
    def cache_owner(self) -> Attention:
        """The layer whose keys and values this one reads: itself, or an earlier one."""
        return self._target[0] if self._target else self

    def _register_sinks(self, sinks: torch.Tensor | None, prefix: str) -> None:
        if sinks is not None:
            _check_sinks(sinks, self.num_heads, prefix)
        if sinks is None or isinstance(sinks, nn.Parameter):
            self.register_parameter("sinks", sinks)
        else:
            self.register_buffer("sinks", sinks, persistent=False)

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> AttentionSpec:
        # Without the hybrid manager all layers share a table, whose blocks are never freed early.
        keeps_all = vllm_config.scheduler_config.disable_hybrid_kv_cache_manager
        spec: dict[str, Any] = {
            "block_size": vllm_config.cache_config.block_size or PAGE_TOKENS,
            "num_kv_heads": self.num_kv_heads,
            "head_size": self.head_size,
            "head_size_v": None if self.head_size_v == self.head_size else self.head_size_v,
            "dtype": vllm_config.model_config.dtype,
            "heads_first": vllm_config.cache_config.kv_cache_layout == "HND",
        }
        if self.sliding_window is not None and not keeps_all:
            return SlidingWindowSpec(**spec, sliding_window=self.sliding_window)
        if self.chunk_size is not None and not keeps_all:
            return ChunkedLocalAttentionSpec(**spec, attention_chunk_size=self.chunk_size)
        return FullAttentionSpec(**spec, spread=self.spread)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None = None,
        value: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """query, key, value: [tokens, heads * head_size] or [tokens, heads, head_size], strided.

        key, value: None: another layer's are read. -> [tokens, num_heads * head_size_v].
        """
        owner = self.cache_owner
        metadata: AttentionMetadata = get_forward_context().attn_metadata[owner.layer_name]
        if owner is self:
            assert key is not None and value is not None
            key, value = all_tokens_of_branch(key), all_tokens_of_branch(value)
            values = value if value.dim() == 3 else value.view(len(value), -1, self.head_size_v)
            write_kv(self._by_head(key), values, metadata.slot_mapping, self.kv_cache)
        output = query.new_empty((query.shape[0], self.num_heads, self.head_size_v))
        if not self.spread.is_whole:
            attend_spread(
                self._by_head(query),
                owner.kv_cache,
                metadata,
                self.spread,
                self.scale,
                self.head_size,
                self.logits_soft_cap,
                self.sinks,
                output,
            )
            return output.flatten(1)
        get_paged_attention(query.device.type, self.attention_backend)(
            self._by_head(query),
            owner.kv_cache,
            metadata.block_table,
            metadata.layout,
            self.scale,
            self.head_size,
            self.sliding_window,
            self.chunk_size,
            self.logits_soft_cap,
            self._kernel_sinks(),
            output,
        )
        return output.flatten(1)

    def _kernel_sinks(self) -> torch.Tensor | None:
        sinks = self.sinks
        return sinks if sinks is None or sinks.dtype in KERNEL_DTYPES else sinks.float()

    def _by_head(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.dim() == 3 else x.view(x.shape[0], -1, self.head_size)


def _cache_facts(layer: Attention) -> tuple[int | None, ...]:
    """Return the facts that have to be equal in a layer and one that reads its cache."""
    sizes = (layer.head_size, layer.head_size_v, layer.num_kv_heads)
    return *sizes, layer.sliding_window, layer.chunk_size


def _check_sinks(sinks: torch.Tensor, num_heads: int, prefix: str) -> None:
    if sinks.shape != (num_heads,) or not (sinks.is_floating_point() and sinks.is_contiguous()):
        raise ValueError(
            f"{prefix!r}: sinks are {sinks.dtype} of shape {tuple(sinks.shape)} and strides "
            f"{sinks.stride()}; they have to be num_heads={num_heads} dense floating-point numbers"
        )
