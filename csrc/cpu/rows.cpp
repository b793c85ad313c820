// Moving keys, values and captured rows into and out of the pool.
#include "kernels.h"

namespace vllm {
namespace VLLM_ISA {
namespace {

template <class T>
T* slot_address(const PagedCache& cache, int64_t slot) {
  const int64_t block_tokens = cache.pages * cache.page_tokens;
  const int64_t block = slot / block_tokens, offset = slot % block_tokens;
  return static_cast<T*>(cache.data) + block * cache.block_stride +
         offset / cache.page_tokens * cache.page_stride +
         offset % cache.page_tokens * cache.token_stride;
}

template <class T>
Status run_write_kv(const WriteKvArgs& args) {
  const PagedCache& cache = args.cache;
  const int64_t slots = cache.blocks * cache.pages * cache.page_tokens;
  const size_t head_bytes = size_t(cache.head_size) * sizeof(T);
  const int64_t work = cache.kv_heads * (2 * cache.head_size / kWidth + 2);
  SharedStatus status;
  parallel_ranges(args.threads, args.tokens, work, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      const int64_t slot = args.slots[token];
      if (slot < 0) continue;
      if (slot >= slots) return status.fail(kBadIndex);
      const T* key = static_cast<const T*>(args.key) + token * args.key_token_stride;
      const T* value = static_cast<const T*>(args.value) + token * args.value_token_stride;
      T* out = slot_address<T>(cache, slot);
      for (int64_t head = 0; head < cache.kv_heads; ++head) {
        T* content = out + head * cache.head_stride;
        std::memcpy(content, key + head * args.key_head_stride, head_bytes);
        std::memcpy(content + cache.head_size, value + head * args.value_head_stride, head_bytes);
      }
    }
  });
  return Status(status.value);
}

template <class T>
T* row_address(const RowCache& cache, int64_t slot) {
  return static_cast<T*>(cache.data) + slot / cache.rows_per_block * cache.block_stride +
         slot % cache.rows_per_block * cache.row_stride;
}

template <class T>
Status run_capture_rows(const CaptureRowsArgs& args) {
  const RowCache& cache = args.cache;
  const int64_t slots = cache.blocks * cache.rows_per_block;
  SharedStatus status;
  if (args.column < 0 || args.column >= cache.layers) return kBadIndex;
  const int64_t work = cache.hidden / kWidth + 1;
  parallel_ranges(args.threads, args.tokens, work, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      const int64_t slot = args.slots[token];
      if (slot < 0) continue;
      if (slot >= slots) return status.fail(kBadIndex);
      T* out = row_address<T>(cache, slot) + args.column * cache.layer_stride;
      const T* hidden = static_cast<const T*>(args.hidden) + token * args.hidden_stride;
      if (args.residual == nullptr) {
        std::memcpy(out, hidden, size_t(cache.hidden) * sizeof(T));
        continue;
      }
      const T* residual = static_cast<const T*>(args.residual) + token * args.residual_stride;
      map(hidden, residual, out, cache.hidden,
          {args.hidden_stride, args.residual_stride, cache.row_stride},
          [](Floats a, Floats b) VLLM_LAMBDA { return a + b; });
    }
  });
  return Status(status.value);
}

// The bits of a type without the sign, and the first pattern that is not finite.
template <class T>
struct Magnitude;
template <>
struct Magnitude<float> {
  using Bits = uint32_t;
  static constexpr Bits kMask = 0x7fffffffu, kInfinity = 0x7f800000u;
};
template <>
struct Magnitude<BFloat16> {
  using Bits = uint16_t;
  static constexpr Bits kMask = 0x7fff, kInfinity = 0x7f80;
};
template <>
struct Magnitude<Float16> {
  using Bits = uint16_t;
  static constexpr Bits kMask = 0x7fff, kInfinity = 0x7c00;
};

// Copies n elements; returns the largest magnitude among them, as bits.
template <class T>
typename Magnitude<T>::Bits copy_and_look(const T* source, T* out, int64_t n) {
  using Bits = typename Magnitude<T>::Bits;
  const auto* in = reinterpret_cast<const Bits*>(source);
  auto* copy = reinterpret_cast<Bits*>(out);
  Bits largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    const Bits bits = in[i], magnitude = bits & Magnitude<T>::kMask;
    copy[i] = bits;
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest;
}

// Lowers *first to `index`; -1 stands for none.
void note_first(int64_t* first, int64_t index) {
  int64_t seen = __atomic_load_n(first, __ATOMIC_RELAXED);
  while ((seen < 0 || index < seen) &&
         !__atomic_compare_exchange_n(first, &seen, index, true, __ATOMIC_RELAXED,
                                      __ATOMIC_RELAXED)) {
  }
}

template <class T>
Status run_gather_rows(const GatherRowsArgs& args) {
  const RowCache& cache = args.cache;
  const int64_t slots = cache.blocks * cache.rows_per_block;
  SharedStatus status;
  args.report[0] = args.report[1] = -1;
  const int64_t work = cache.layers * (cache.hidden / kWidth + 2);
  parallel_ranges(args.threads, args.rows, work, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t slot = args.slots[row];
      if (slot < 0 || slot >= slots) return status.fail(kBadIndex);
      const T* source = row_address<T>(cache, slot);
      for (int64_t layer = 0; layer < cache.layers; ++layer) {
        const int64_t index = row * cache.layers + layer;
        T* out = static_cast<T*>(args.out) + index * cache.hidden;
        const auto largest = copy_and_look(source + layer * cache.layer_stride, out, cache.hidden);
        if (largest >= Magnitude<T>::kInfinity) note_first(&args.report[0], index);
        if (largest == 0) note_first(&args.report[1], index);
      }
    }
  });
  return Status(status.value);
}

}  // namespace

Status write_kv(const WriteKvArgs& args) {
  return with_dtype(args.dtype, [&](auto type) { return run_write_kv<decltype(type)>(args); });
}

Status capture_rows(const CaptureRowsArgs& args) {
  return with_dtype(args.dtype, [&](auto type) { return run_capture_rows<decltype(type)>(args); });
}

Status gather_rows(const GatherRowsArgs& args) {
  return with_dtype(args.dtype, [&](auto type) { return run_gather_rows<decltype(type)>(args); });
}

}  // namespace VLLM_ISA
}  // namespace vllm
