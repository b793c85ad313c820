// Root-mean-square norms. A row is reduced in an order that depends on its length only.
#include <cmath>

#include "kernels.h"
#include "vec_math.h"

namespace vllm {
namespace VLLM_ISA {
namespace {

template <class T>
float inverse_rms(const T* x, int64_t n, float eps) {
  Floats sums[4] = {};
  int64_t i = 0;
  for (; i + 4 * kWidth <= n; i += 4 * kWidth) {
    for (int j = 0; j < 4; ++j) {
      Floats v = load(x + i + j * kWidth);
      sums[j] = fma(v, v, sums[j]);
    }
  }
  for (; i + kWidth <= n; i += kWidth) {
    Floats v = load(x + i);
    sums[0] = fma(v, v, sums[0]);
  }
  if (i < n) {
    Floats v = load_first(x + i, n - i);
    sums[1] = fma(v, v, sums[1]);
  }
  float mean = reduce_add((sums[0] + sums[1]) + (sums[2] + sums[3])) / float(n);
  return 1.0f / std::sqrt(mean + eps);
}

// The three ways in which a normalised value meets its weight (vllm/kernels/base.py).
enum class Weighting { kNone, kRoundedFirst, kOffset };

template <class T, Weighting weighting>
VLLM_INLINE Floats weighted(Floats x, Floats weight, Floats scale, Floats offset) {
  if (weighting == Weighting::kNone) return x * scale;
  if (weighting == Weighting::kOffset) return (x * scale) * (weight + offset);
  return rounded_to<T>(x * scale) * weight;
}

template <class T, Weighting weighting>
void norm_row(const T* x, const T* weight, const T* gate, T* out, const RmsNormArgs& args) {
  const Floats scale = splat(inverse_rms(x, args.n, float(args.eps)));
  const Floats offset = splat(float(args.offset));
  auto value = [&](Floats v, Floats w, Floats g) VLLM_LAMBDA {
    Floats y = weighted<T, weighting>(v, w, scale, offset);
    return gate == nullptr ? y : rounded_to<T>(y) * silu<T>(g);
  };
  const T* w = weight == nullptr ? x : weight;  // read, not used
  const T* g = gate == nullptr ? x : gate;
  for_each_vector(
      args.n,
      [&](int64_t i) VLLM_LAMBDA { store(out + i, value(load(x + i), load(w + i), load(g + i))); },
      [&](int64_t i, int64_t m) VLLM_LAMBDA {
        Floats y = value(load_first(x + i, m), load_first(w + i, m), load_first(g + i, m));
        store_first(out + i, y, m);
      });
}

template <class T>
using NormRow = void (*)(const T*, const T*, const T*, T*, const RmsNormArgs&);

template <class T>
NormRow<T> choose_norm_row(const RmsNormArgs& args) {
  if (args.weight == nullptr) return norm_row<T, Weighting::kNone>;
  if (args.offset != 0.0) return norm_row<T, Weighting::kOffset>;
  return norm_row<T, Weighting::kRoundedFirst>;
}

template <class T>
Status run(const RmsNormArgs& args) {
  const NormRow<T> normalise = choose_norm_row<T>(args);
  const auto* weight = static_cast<const T*>(args.weight);
  const auto* gate = static_cast<const T*>(args.gate);
  const int64_t work = (args.gate == nullptr ? 2 : 5) * args.n / kWidth + 4;
  parallel_ranges(args.threads, args.outer * args.inner, work, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t o = row / args.inner, i = row % args.inner;
      const T* x =
          static_cast<const T*>(args.x) + o * args.x_outer_stride + i * args.x_inner_stride;
      if (args.residual != nullptr) {
        T* residual = static_cast<T*>(args.residual) + o * args.residual_stride;
        map(x, residual, residual, args.n, [](Floats a, Floats b) VLLM_LAMBDA { return a + b; });
        x = residual;
      }
      const T* row_gate =
          gate ? gate + o * args.gate_outer_stride + i * args.gate_inner_stride : nullptr;
      normalise(x, weight, row_gate, static_cast<T*>(args.out) + row * args.n, args);
    }
  });
  return kOk;
}

}  // namespace

Status rms_norm(const RmsNormArgs& args) {
  return with_dtype(args.dtype, [&](auto type) { return run<decltype(type)>(args); });
}

}  // namespace VLLM_ISA
}  // namespace vllm
