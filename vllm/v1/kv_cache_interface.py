"""Specs of what a model's layers keep in the KV pool, under the names that others import."""

from vllm.utils import cdiv as cdiv
from vllm.v1.cache_kinds.attention import AttentionSpec as AttentionSpec
from vllm.v1.cache_kinds.attention import ChunkedLocalAttentionSpec as ChunkedLocalAttentionSpec
from vllm.v1.cache_kinds.attention import FullAttentionSpec as FullAttentionSpec
from vllm.v1.cache_kinds.attention import MLAAttentionSpec as MLAAttentionSpec
from vllm.v1.cache_kinds.attention import SlidingWindowSpec as SlidingWindowSpec
from vllm.v1.cache_kinds.base import PAGE_TOKENS as PAGE_TOKENS
from vllm.v1.cache_kinds.base import KVCacheConfig as KVCacheConfig
from vllm.v1.cache_kinds.base import KVCacheDataReference as KVCacheDataReference
from vllm.v1.cache_kinds.base import KVCacheGroupSpec as KVCacheGroupSpec
from vllm.v1.cache_kinds.base import KVCacheReferences as KVCacheReferences
from vllm.v1.cache_kinds.base import KVCacheSpec as KVCacheSpec
from vllm.v1.cache_kinds.base import KVCacheTensor as KVCacheTensor
from vllm.v1.cache_kinds.base import KVCacheTensorReference as KVCacheTensorReference
from vllm.v1.cache_kinds.base import context_parallel_size as context_parallel_size
from vllm.v1.cache_kinds.recurrent import MambaSpec as MambaSpec
from vllm.v1.cache_kinds.rows import HiddenStateCacheSpec as HiddenStateCacheSpec

# Callers test for this class to learn whether a layer lies in blocks of tokens: rows do, too.
AttentionSpec.register(HiddenStateCacheSpec)
