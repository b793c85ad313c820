// The most likely token of each row of logits.
#include <limits>

#include "operation.h"

namespace vllm {
namespace {

struct MostLikelyArgs {
  int64_t dtype, threads;
  const void* logits;
  int64_t rows, n, row_stride;
  int64_t* out;
};

constexpr int64_t kPiece = 64 * kWidth;  // elements of a piece, which may be searched twice

// The largest element, and whether there is a NaN.
struct Largest {
  float value;
  bool is_nan;
};

template <class T>
Largest largest_of(const T* piece, int64_t n) {
  Floats largest = splat(-std::numeric_limits<float>::infinity());
  Ints unordered{};
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) {
    const Floats v = load(piece + i);
    largest = max(v, largest);
    unordered |= (Ints)(v != v);
  }
  Largest found{reduce_max(largest), false};
  for (int lane = 0; lane < kWidth; ++lane) found.is_nan |= unordered[lane] != 0;
  for (; i < n; ++i) {
    const float v = to_float(piece[i]);
    found.is_nan |= v != v;
    if (v > found.value) found.value = v;
  }
  return found;
}

// The first NaN, or the first of the largest elements.
template <class T>
int64_t first_largest(const T* row, int64_t n) {
  float best = -std::numeric_limits<float>::infinity();
  int64_t index = 0;
  for (int64_t begin = 0; begin < n; begin += kPiece) {
    const Largest found = largest_of(row + begin, n - begin < kPiece ? n - begin : kPiece);
    if (!found.is_nan && !(found.value > best)) continue;
    best = found.value;
    for (index = begin;; ++index) {
      const float v = to_float(row[index]);
      if (found.is_nan ? v != v : v == best) break;
    }
    if (found.is_nan) break;
  }
  return index;
}

template <class T>
Status run_most_likely(const MostLikelyArgs& args) {
  if (args.n < 1) return kBadCall;
  parallel_ranges(args.threads, args.rows, args.n / kWidth + 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* logits = static_cast<const T*>(args.logits) + row * args.row_stride;
      args.out[row] = first_largest(logits, args.n);
    }
  });
  return kOk;
}

void most_likely(const Tensor& logits, const Tensor& out) {
  const MostLikelyArgs args{dtype_of(logits), num_threads(),    logits.data_ptr(),
                            logits.size(0),   logits.size(1),   logits.stride(0),
                            data_of<int64_t>(out)};
  check(with_dtype(args.dtype, [&](auto type) { return run_most_likely<decltype(type)>(args); }),
        "most_likely");
}

}  // namespace

VLLM_OPERATION(most_likely)

}  // namespace vllm
