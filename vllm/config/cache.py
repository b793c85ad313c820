"""CacheConfig: the KV pool."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Literal

from pydantic import Field

from vllm.platforms.interface import PAGE_TOKENS
from vllm.utils.checked import SizeBytes, at_most, config, require
from vllm.utils.options import Option

MambaStateDType = Literal["auto", "float32"]
KVCacheLayout = Literal["NHD", "HND"]
_BACKENDS = "use 'native', 'lmcache' or the name of a connector"


@config()
class CacheConfig:
    """Memory of the KV pool, and its division into blocks."""

    block_size: Annotated[int, at_most(1 << 16)] | None = None
    """Tokens of one attention block, a multiple of 16. Default: chosen for the model."""
    gpu_memory_utilization: Annotated[float, Field(gt=0.0, le=1.0)] = 0.9
    """Fraction of the device's memory that the engine may use; on a CPU, of the free memory. The
    pool takes no more than max_num_seqs requests of max_model_len tokens can use."""
    kv_cache_memory_bytes: SizeBytes | None = None
    """Size of the pool in bytes, or as "4GiB" or "512M". Overrides gpu_memory_utilization."""
    cache_dtype: Annotated[str, Option("kv_cache_dtype")] = "auto"
    """Dtype of keys and values in the pool. Only "auto", the model's own, is supported."""
    enable_prefix_caching: bool = True
    """Reuse what earlier requests with the same prefix computed."""
    prefix_caching_hash_algo: Literal["sha256"] = "sha256"
    """Hash that identifies a prefix."""
    num_gpu_blocks_override: Annotated[int | None, Field(ge=2)] = None
    """Number of blocks in the pool, whatever the memory. For tests of preemption."""
    attn_pack_size: Annotated[int | None, Field(ge=1)] = None
    """Hybrid models: number of full-attention layers that share one page. Default: all of them."""
    mamba_block_size: int | None = None
    """Tokens between two kept recurrent states, a multiple of 16. Default: chosen for the model."""
    mamba_cache_dtype: Literal["auto"] = "auto"
    """Dtype of the convolution states. "auto" is the model's own."""
    mamba_ssm_cache_dtype: MambaStateDType = "auto"
    """Dtype of the recurrent states. "auto" is float32."""
    hidden_state_cache_bytes: SizeBytes | None = None
    """Bytes of hidden-state blocks that are kept for prefix hits after their requests end."""
    kv_cache_layout: KVCacheLayout | None = None  # VllmConfig fills in the answer
    """Order of keys and values in a block: "NHD" token by token, or "HND" head by head, over all
    layers. Default: as the KV connector requires, else "NHD"."""
    kv_offloading_size: Annotated[float | None, Field(gt=0.0, allow_inf_nan=False)] = None
    """GiB of host memory to which a connector offloads blocks. Default: no offloading."""
    kv_offloading_backend: Annotated[str | None, require(lambda name: name != "", _BACKENDS)] = None
    """Connector that offloads: "native", "lmcache", or a connector's name. Default: "native"."""

    num_gpu_blocks: int | None = field(default=None, init=False)
    """Number of blocks in the pool; the engine sets it when the memory is known."""

    def __post_init__(self) -> None:
        for option in ("block_size", "mamba_block_size"):
            value = getattr(self, option)
            if value is not None and (value < 1 or value % PAGE_TOKENS):
                raise ValueError(
                    f"{option}={value} is not a positive multiple of {PAGE_TOKENS}; "
                    f"use for instance {max(PAGE_TOKENS, value // PAGE_TOKENS * PAGE_TOKENS)}"
                )
        for option in ("kv_cache_memory_bytes", "hidden_state_cache_bytes"):
            value = getattr(self, option)
            if value is not None and value <= 0:
                raise ValueError(f"{option}={value} is not a size; use a positive number of bytes")
        if self.cache_dtype != "auto":
            raise ValueError(
                f"kv_cache_dtype={self.cache_dtype!r} is not supported; supported: 'auto' "
                "(keys and values in the model's dtype)"
            )
        if self.kv_offloading_backend is not None and self.kv_offloading_size is None:
            raise ValueError(
                f"kv_offloading_backend={self.kv_offloading_backend!r} has no effect without "
                "kv_offloading_size; give the size in GiB"
            )
