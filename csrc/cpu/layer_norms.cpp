// Layer norms. A row is reduced in an order that depends only on its length.
#include <cmath>

#include "operation.h"

namespace vllm {
namespace {

// x[outer, inner, n] -> out dense. weight: [n], or [inner, n] with one row for each inner row;
// bias: [n] or null. residual: add_layer_norm only, updated in place, inner == 1.
struct LayerNormArgs {
  int64_t dtype, threads;
  Rows3 x;
  const void* weight;
  int64_t weight_stride;
  const void* bias;
  float epsilon;
  void* out;
  void* residual = nullptr;
  int64_t residual_stride = 0;
};

// Sum of f(vector) over a row; values of f beyond the end of the row do not count.
template <class T, class F>
VLLM_INLINE float sum_of(const T* x, int64_t n, const F& f) {
  Floats sums[4] = {};
  int64_t i = 0;
  for (; i + 4 * kWidth <= n; i += 4 * kWidth) {
    for (int j = 0; j < 4; ++j) sums[j] = sums[j] + f(load(x + i + j * kWidth));
  }
  for (; i + kWidth <= n; i += kWidth) sums[0] = sums[0] + f(load(x + i));
  if (i < n) {
    const Floats rest = f(load_first(x + i, n - i));
    sums[1] = sums[1] + (lane_numbers() < int(n - i) ? rest : Floats{});
  }
  return reduce_add((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

template <class T>
void norm_row(const LayerNormArgs& args, int64_t row) {
  const int64_t n = args.x.n, outer = row / args.x.inner, inner = row % args.x.inner;
  const T* x = static_cast<const T*>(args.x.data) + outer * args.x.outer_stride +
               inner * args.x.inner_stride;
  int64_t next = args.x.outer_stride;  // distance to the same row of the next token
  if (args.residual != nullptr) {
    T* residual = static_cast<T*>(args.residual) + outer * args.residual_stride;
    map(x, residual, residual, n, {args.x.outer_stride, args.residual_stride, 0},
        [](Floats a, Floats b) VLLM_LAMBDA { return a + b; });
    x = residual, next = 0;
  }
  const float mean = sum_of(x, n, [](Floats v) VLLM_LAMBDA { return v; }) / float(n);
  const Floats middle = splat(mean);
  const float variance = sum_of(x, n, [&](Floats v) VLLM_LAMBDA {
                           const Floats centred = v - middle;
                           return centred * centred;
                         }) / float(n);
  const Floats scale = splat(1.0f / std::sqrt(variance + args.epsilon));
  const T* weight = static_cast<const T*>(args.weight) + inner * args.weight_stride;
  const T* bias = static_cast<const T*>(args.bias);
  T* out = static_cast<T*>(args.out) + row * n;
  for_each_vector(
      n,
      [&](int64_t i) VLLM_LAMBDA {
        prefetch(x + next, i);
        prefetch(out + args.x.inner * n, i);
        const Floats y = (load(x + i) - middle) * scale * load(weight + i);
        store(out + i, bias == nullptr ? y : y + load(bias + i));
      },
      [&](int64_t i, int64_t m) VLLM_LAMBDA {
        const Floats y = (load_first(x + i, m) - middle) * scale * load_first(weight + i, m);
        store_first(out + i, bias == nullptr ? y : y + load_first(bias + i, m), m);
      });
}

void run(const LayerNormArgs& args, const char* operation) {
  const auto run_rows = [&](auto type) {
    using T = decltype(type);
    const int64_t work = 4 * args.x.n / kWidth + 8;
    parallel_ranges(args.threads, args.x.rows(), work, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) norm_row<T>(args, row);
    });
    return kOk;
  };
  check(with_dtype(args.dtype, run_rows), operation);
}

LayerNormArgs layer_norm_args(const Tensor& x, const Tensor& weight, const MaybeTensor& bias,
                              double epsilon, const Tensor& out) {
  const int64_t stride = weight.dim() == 2 ? weight.stride(0) : 0;
  return {dtype_of(x),    num_threads(),   Rows3(x),       weight.data_ptr(), stride,
          data_of(bias), float(epsilon), out.data_ptr()};
}

void layer_norm(const Tensor& x, const Tensor& weight, const MaybeTensor& bias, double epsilon,
                const Tensor& out) {
  run(layer_norm_args(x, weight, bias, epsilon, out), "layer_norm");
}

void add_layer_norm(const Tensor& x, const Tensor& residual, const Tensor& weight,
                    const MaybeTensor& bias, double epsilon, const Tensor& out) {
  LayerNormArgs args = layer_norm_args(x, weight, bias, epsilon, out);
  args.residual = residual.data_ptr();
  args.residual_stride = residual.stride(0);
  run(args, "add_layer_norm");
}

}  // namespace

VLLM_OPERATION(layer_norm)
VLLM_OPERATION(add_layer_norm)

}  // namespace vllm
