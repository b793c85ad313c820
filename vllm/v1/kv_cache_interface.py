"""What the layers of a model keep in the KV pool, under the names that others import."""

from vllm.utils import cdiv
from vllm.v1.cache_kinds.attention import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.cache_kinds.base import (
    PAGE_TOKENS,
    KVCacheConfig,
    KVCacheDataReference,
    KVCacheGroupSpec,
    KVCacheReferences,
    KVCacheSpec,
    KVCacheTensor,
    KVCacheTensorReference,
    context_parallel_size,
)
from vllm.v1.cache_kinds.recurrent import MambaSpec
from vllm.v1.cache_kinds.rows import HiddenStateCacheSpec

# Rows lie in blocks of tokens too, which is what callers want to know who ask for this class.
AttentionSpec.register(HiddenStateCacheSpec)

__all__ = [
    "PAGE_TOKENS",
    "AttentionSpec",
    "ChunkedLocalAttentionSpec",
    "FullAttentionSpec",
    "HiddenStateCacheSpec",
    "KVCacheConfig",
    "KVCacheDataReference",
    "KVCacheGroupSpec",
    "KVCacheReferences",
    "KVCacheSpec",
    "KVCacheTensor",
    "KVCacheTensorReference",
    "MambaSpec",
    "SlidingWindowSpec",
    "cdiv",
    "context_parallel_size",
]
