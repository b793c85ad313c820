// The recurrence of Mamba-2: its arguments, and its two implementations.
//
//   S = decay S + B (dt x)^T        y = S^T C + D x
//
// In the terms of chunks.h, B are the keys, C the queries and x the values.
#pragma once

#include "chunks.h"

namespace vllm {

struct StateSpaceArgs : ChunkArgs {
  const void* xbc;  // [tokens, x of all heads | B of all groups | C of all groups]
  int64_t xbc_stride;
  const void* dt;  // [tokens, heads]
  int64_t dt_stride;
  const float *a_log, *dt_bias, *d;  // [heads]
  float dt_min, dt_max;
  Pending rows;   // [blocks, kChunkTokens, x of all heads | B of all groups]
  Pending steps;  // [blocks, kChunkTokens, heads], as dt

  // Columns of xbc.
  int64_t x_of(int64_t head) const { return head * dv; }
  int64_t b_of(int64_t group) const { return num_v_heads * dv + group * dk; }
  int64_t c_of(int64_t group) const { return b_of(num_k_heads + group); }
  int64_t kept_columns() const { return c_of(0); }

  template <class T>
  const T* row(int64_t token) const {
    return static_cast<const T*>(xbc) + token * xbc_stride;
  }
  template <class T>
  const T* step(int64_t token) const {
    return static_cast<const T*>(dt) + token * dt_stride;
  }
  template <class T>
  T* pending_row(int64_t block, int64_t i) const {
    return static_cast<T*>(rows.data) + block * rows.block_stride + i * kept_columns();
  }
  template <class T>
  T* pending_step(int64_t block, int64_t i) const {
    return static_cast<T*>(steps.data) + block * steps.block_stride + i * num_v_heads;
  }

  // The step for each `time` of one head.
  VLLM_INLINE Floats limited_step(Floats time, int64_t head) const {
    return clamp(softplus(time + splat(dt_bias[head])), dt_min, dt_max);
  }
};

// The scan in chunks, with pending tokens: only for bfloat16 if pairs of it are multiplied.
Status scan_chunks(const StateSpaceArgs& args);

}  // namespace vllm
