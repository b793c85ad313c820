// Moving keys, values and captured rows into and out of the pool.
#include "paged_cache.h"

namespace vllm {
namespace {

struct WriteKvArgs {
  int64_t dtype, threads;
  Rows3 key, value;
  const int64_t* slots;
  PagedCache cache;
};

// The rows [blocks, rows_per_block, layers, hidden].
struct RowCache {
  void* data;
  int64_t blocks, rows_per_block, layers, hidden;
  int64_t block_stride, row_stride, layer_stride;

  explicit RowCache(const Tensor& rows)
      : data(rows.data_ptr()), blocks(rows.size(0)), rows_per_block(rows.size(1)),
        layers(rows.size(2)), hidden(rows.size(3)), block_stride(rows.stride(0)),
        row_stride(rows.stride(1)), layer_stride(rows.stride(2)) {}
};

struct CaptureRowsArgs {
  int64_t dtype, threads;
  RowCache cache;
  const int64_t* slots;
  int64_t tokens, column;
  const void* hidden;
  int64_t hidden_stride;
  const void* residual;  // may be null
  int64_t residual_stride;
};

struct GatherRowsArgs {
  int64_t dtype, threads;
  RowCache cache;
  const int64_t* slots;
  int64_t rows;
  void* out;        // [rows, layers, hidden] dense
  int64_t* report;  // first index row * layers + column: not finite, all zeros; -1: none
};

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
  const size_t key_bytes = size_t(args.key.n) * sizeof(T);
  const size_t value_bytes = size_t(args.value.n) * sizeof(T);
  const int64_t work = cache.kv_heads * ((args.key.n + args.value.n) / kWidth + 2);
  SharedStatus status;
  parallel_ranges(args.threads, args.key.outer, work, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      const int64_t slot = args.slots[token];
      if (slot < 0) continue;
      if (slot >= slots) return status.fail(kBadIndex);
      const T* key = static_cast<const T*>(args.key.data) + token * args.key.outer_stride;
      const T* value = static_cast<const T*>(args.value.data) + token * args.value.outer_stride;
      T* out = slot_address<T>(cache, slot);
      for (int64_t head = 0; head < cache.kv_heads; ++head) {
        T* content = out + head * cache.head_stride;
        std::memcpy(content, key + head * args.key.inner_stride, key_bytes);
        std::memcpy(content + args.key.n, value + head * args.value.inner_stride, value_bytes);
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

// A mask for the bits of a type without the sign, and the first pattern that is not finite.
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

void write_kv(const Tensor& key, const Tensor& value, const Tensor& slots,
              const Tensor& kv_cache) {
  const WriteKvArgs args{dtype_of(key), num_threads(), Rows3(key), Rows3(value),
                         data_of<const int64_t>(slots), PagedCache(kv_cache)};
  check(with_dtype(args.dtype, [&](auto type) { return run_write_kv<decltype(type)>(args); }),
        "write_kv");
}

void capture_rows(const Tensor& hidden, const MaybeTensor& residual, const Tensor& slots,
                  int64_t column, const Tensor& row_cache) {
  const CaptureRowsArgs args{dtype_of(hidden),
                             num_threads(),
                             RowCache(row_cache),
                             data_of<const int64_t>(slots),
                             slots.size(0),
                             column,
                             hidden.data_ptr(),
                             hidden.stride(0),
                             data_of(residual),
                             residual ? residual->stride(0) : 0};
  check(with_dtype(args.dtype, [&](auto type) { return run_capture_rows<decltype(type)>(args); }),
        "capture_rows");
}

void gather_rows(const Tensor& row_cache, const Tensor& slots, const Tensor& out,
                 const Tensor& report) {
  const GatherRowsArgs args{dtype_of(out),
                            num_threads(),
                            RowCache(row_cache),
                            data_of<const int64_t>(slots),
                            slots.size(0),
                            out.data_ptr(),
                            data_of<int64_t>(report)};
  check(with_dtype(args.dtype, [&](auto type) { return run_gather_rows<decltype(type)>(args); }),
        "gather_rows");
}

}  // namespace

VLLM_OPERATION(write_kv)
VLLM_OPERATION(capture_rows)
VLLM_OPERATION(gather_rows)

}  // namespace vllm
