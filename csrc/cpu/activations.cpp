// Plain activations, and the clamped gate; each element is computed separately.
#include "row_maps.h"

namespace vllm {
namespace {

template <class F>
void run_elementwise(const Tensor& x, const Tensor& out, int64_t work, const char* operation,
                     const F& f) {
  map_rows(x, 0, out, work, operation, [&](Floats v, Floats) VLLM_LAMBDA { return f(v); });
}

void gelu(const Tensor& x, const Tensor& out) {
  run_elementwise(x, out, 40, "gelu", [](Floats v) VLLM_LAMBDA { return gelu_erf(v); });
}

void gelu_tanh(const Tensor& x, const Tensor& out) {
  run_elementwise(x, out, 10, "gelu_tanh", [](Floats v) VLLM_LAMBDA { return gelu_by_tanh(v); });
}

void xielu(const Tensor& x, double positive, double negative, double beta, double epsilon,
           const Tensor& out) {
  const Floats above = splat(float(positive)), below = splat(float(negative));
  const Floats slope = splat(float(beta)), least = splat(float(epsilon));
  run_elementwise(x, out, 15, "xielu", [&](Floats v) VLLM_LAMBDA {
    const Floats curved = below * (expm1(min(least, v)) - v);
    return (v > splat(0.0f) ? above * v * v : curved) + slope * v;
  });
}

void clamped_swiglu(const Tensor& x, double alpha, double limit, const Tensor& out) {
  const int64_t rows = out.size(0), n = out.size(1), stride = x.stride(0);
  const Floats slope = splat(float(alpha)), one = splat(1.0f);
  const float most = float(limit);
  const auto run = [&](auto type) {
    using T = decltype(type);
    parallel_ranges(num_threads(), rows, 6 * n / kWidth + 1, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const T* gates = data_of<const T>(x) + row * stride;
        map(gates, gates + n, data_of<T>(out) + row * n, n, {stride, stride, n},
            [&](Floats gate, Floats up) VLLM_LAMBDA {
              gate = min(splat(most), gate);
              return (clamp(up, -most, most) + one) * gate * sigmoid<T>(slope * gate);
            });
      }
    });
    return kOk;
  };
  check(with_dtype(dtype_of(x), run), "clamped_swiglu");
}

}  // namespace

VLLM_OPERATION(gelu)
VLLM_OPERATION(gelu_tanh)
VLLM_OPERATION(xielu)
VLLM_OPERATION(clamped_swiglu)

}  // namespace vllm
