// Code that the kernels share: element types, loops over vectors.
#pragma once

#include "parallel.h"
#include "tensor.h"
#include "vec.h"

namespace vllm {

// Calls call(T()) for the element type T of `dtype`.
template <class Call>
VLLM_INLINE Status with_dtype(int64_t dtype, const Call& call) {
  switch (dtype) {
    case kFloat32: return call(float());
    case kBFloat16: return call(BFloat16());
    case kFloat16: return call(Float16());
    default: return kBadDtype;
  }
}

inline bool is_dtype(int64_t dtype) { return dtype >= kFloat32 && dtype <= kFloat16; }

// Element i of `values`, whose dtype has been checked.
inline float entry(const void* values, int64_t dtype, int64_t i) {
  switch (dtype) {
    case kBFloat16: return to_float(static_cast<const BFloat16*>(values)[i]);
    case kFloat16: return to_float(static_cast<const Float16*>(values)[i]);
    default: return static_cast<const float*>(values)[i];
  }
}

// block(offset) for whole vectors, then tail(offset, count) for the rest of n.
template <class Block, class Tail>
VLLM_INLINE void for_each_vector(int64_t n, const Block& block, const Tail& tail) {
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) block(i);
  if (i < n) tail(i, n - i);
}

// Prefetches element i of a later row, once per cache line. The outputs of products lie in the
// last cache or beyond it, in rows that are pages apart, so the hardware prefetches none of them.
template <class T>
VLLM_INLINE void prefetch(const T* row, int64_t i) {
  if (i % (64 / int64_t(sizeof(T))) == 0) __builtin_prefetch(row + i, 0, 2);
}

// Distance from each operand to its next row, in elements. 0: there is none to prefetch.
struct NextRow {
  int64_t a = 0, b = 0, out = 0;
};

// out = f(a, b), element by element; f maps vectors.
template <class T, class F>
VLLM_INLINE void map(const T* a, const T* b, T* out, int64_t n, const NextRow& next, const F& f) {
  for_each_vector(
      n,
      [&](int64_t i) VLLM_LAMBDA {
        prefetch(a + next.a, i);
        prefetch(b + next.b, i);
        prefetch(out + next.out, i);
        store(out + i, f(load(a + i), load(b + i)));
      },
      [&](int64_t i, int64_t m) VLLM_LAMBDA {
        store_first(out + i, f(load_first(a + i, m), load_first(b + i, m)), m);
      });
}

}  // namespace vllm
