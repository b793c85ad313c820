"""Causal attention over the KV pool."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import nn

from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase, register_layer
from vllm.model_executor.layers.linear import refuse_quantization
from vllm.ops.attention import write_kv
from vllm.ops.backends import check_attention_backend, get_paged_attention
from vllm.ops.operation import KERNEL_DTYPES
from vllm.platforms.interface import asked_attention_backend
from vllm.v1.kv_cache_interface import PAGE_TOKENS, FullAttentionSpec, SlidingWindowSpec

if TYPE_CHECKING:
    from vllm.config import CacheConfig, VllmConfig
    from vllm.v1.attention.backend import AttentionMetadata


class Attention(nn.Module, AttentionLayerBase):
    """Writes keys and values of the step's tokens, then attends over all that are stored.

    num_heads, num_kv_heads: of this rank. per_layer_sliding_window: tokens a query
    reads, its own included; None: all of them. cache_config: model authors hand it over;
    what is kept follows the engine's config when the spec is built, not when the layer is.
    logits_soft_cap: scores s become ``cap * tanh(s / cap)``; 0 or None: they stay. sinks:
    [num_heads], one more score for each head that takes weight and has no value; as a rule a
    parameter of the model, which loads it. head_size_v: of values, where they are not as wide as
    keys. ``kv_cache`` is the strided view [blocks, pages, 16, kv_heads, head_size + head_size_v].
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
    ) -> None:
        super().__init__()
        refuse_quantization(quant_config, prefix)
        self.num_heads = num_heads
        self.head_size = head_size
        self.head_size_v = head_size if head_size_v is None else head_size_v
        self.scale = scale
        self.num_kv_heads = num_kv_heads or num_heads
        if num_heads % self.num_kv_heads:
            raise ValueError(
                f"{prefix!r}: num_kv_heads={self.num_kv_heads} does not divide "
                f"num_heads={num_heads}"
            )
        if logits_soft_cap is not None and not 0 <= logits_soft_cap < math.inf:
            raise ValueError(
                f"{prefix!r}: logits_soft_cap={logits_soft_cap} is not a finite number above 0 "
                "(0 or None: no cap)"
            )
        self.logits_soft_cap = logits_soft_cap or None
        self._register_sinks(sinks, prefix)
        self.layer_name = prefix
        vllm_config = register_layer(self)
        self.attention_backend = vllm_config.attention_backend
        model_config = vllm_config.model_config
        check_attention_backend(
            asked_attention_backend(vllm_config.attention_config.backend),
            vllm_config.device_config.device_type,
            model_config.dtype,
            head_size,
            sinks is not None,
        )
        # Disabled, no request is longer than the window.
        disabled = model_config.disable_sliding_window
        self.sliding_window = None if disabled else per_layer_sliding_window

    def _register_sinks(self, sinks: torch.Tensor | None, prefix: str) -> None:
        if sinks is not None:
            _check_sinks(sinks, self.num_heads, prefix)
        if sinks is None or isinstance(sinks, nn.Parameter):
            self.register_parameter("sinks", sinks)
        else:
            self.register_buffer("sinks", sinks, persistent=False)

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> FullAttentionSpec | SlidingWindowSpec:
        block_size = vllm_config.cache_config.block_size or PAGE_TOKENS
        dtype = vllm_config.model_config.dtype
        # Without the hybrid manager all layers share a table of which nothing is let go.
        keeps_all = vllm_config.scheduler_config.disable_hybrid_kv_cache_manager
        heads_first = vllm_config.cache_config.kv_cache_layout == "HND"
        if self.sliding_window is None or keeps_all:
            return FullAttentionSpec(
                block_size=block_size,
                num_kv_heads=self.num_kv_heads,
                head_size=self.head_size,
                head_size_v=self._spec_head_size_v,
                dtype=dtype,
                heads_first=heads_first,
            )
        return SlidingWindowSpec(
            block_size=block_size,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            head_size_v=self._spec_head_size_v,
            dtype=dtype,
            heads_first=heads_first,
            sliding_window=self.sliding_window,
        )

    @property
    def _spec_head_size_v(self) -> int | None:
        return None if self.head_size_v == self.head_size else self.head_size_v

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Each [tokens, heads * head_size] or [tokens, heads, head_size], strided.

        Returns [tokens, num_heads * head_size_v].
        """
        metadata: AttentionMetadata = get_forward_context().attn_metadata[self.layer_name]
        values = value if value.dim() == 3 else value.view(len(value), -1, self.head_size_v)
        write_kv(self._by_head(key), values, metadata.slot_mapping, self.kv_cache)
        output = query.new_empty((query.shape[0], self.num_heads, self.head_size_v))
        get_paged_attention(query.device.type, self.attention_backend)(
            self._by_head(query),
            self.kv_cache,
            metadata.block_table,
            metadata.layout,
            self.scale,
            self.head_size,
            self.sliding_window,
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


def _check_sinks(sinks: torch.Tensor, num_heads: int, prefix: str) -> None:
    if sinks.shape != (num_heads,) or not (sinks.is_floating_point() and sinks.is_contiguous()):
        raise ValueError(
            f"{prefix!r}: sinks are {sinks.dtype} of shape {tuple(sinks.shape)} and strides "
            f"{sinks.stride()}; wanted are num_heads={num_heads} dense floating-point numbers"
        )
