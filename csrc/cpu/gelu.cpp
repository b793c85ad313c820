// GELU as a gate.
#include "operation.h"
#include "vec_math.h"

namespace vllm {
namespace {

VLLM_INLINE Floats gelu_tanh(Floats x) {
  const Floats cubed = splat(0.044715f) * x * x * x;
  return splat(0.5f) * x * (splat(1.0f) + tanh(splat(0.7978845608f) * (x + cubed)));
}

void gelu_tanh_and_mul(const Tensor& x, const Tensor& out) {
  const int64_t rows = out.size(0), n = out.size(1), stride = x.stride(0);
  const auto run = [&](auto type) {
    using T = decltype(type);
    parallel_ranges(num_threads(), rows, 10 * n / kWidth + 1, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const T* gate = data_of<const T>(x) + row * stride;
        map(gate, gate + n, data_of<T>(out) + row * n, n, {stride, stride, n},
            [](Floats g, Floats up) VLLM_LAMBDA { return gelu_tanh(g) * up; });
      }
    });
    return kOk;
  };
  check(with_dtype(dtype_of(x), run), "gelu_tanh_and_mul");
}

}  // namespace

VLLM_OPERATION(gelu_tanh_and_mul)

}  // namespace vllm
