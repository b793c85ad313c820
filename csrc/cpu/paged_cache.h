// Keys and values of tokens, in blocks of the pool.
#pragma once

#include "operation.h"

namespace vllm {

// [blocks, pages, page_tokens, kv_heads, content]: content is a token's key and its value.
struct PagedCache {
  void* data;
  int64_t blocks, pages, page_tokens, kv_heads;
  int64_t block_stride, page_stride, token_stride, head_stride;

  explicit PagedCache(const Tensor& cache)
      : data(cache.data_ptr()), blocks(cache.size(0)), pages(cache.size(1)),
        page_tokens(cache.size(2)), kv_heads(cache.size(3)), block_stride(cache.stride(0)),
        page_stride(cache.stride(1)), token_stride(cache.stride(2)),
        head_stride(cache.stride(3)) {}
};

}  // namespace vllm
