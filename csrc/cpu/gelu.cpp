// GELU as a gate.
#include "operation.h"
#include "vec_math.h"

namespace vllm {
namespace {

// out = f(gate) * up of x as (gate | up); work: operations a vector.
template <class F>
void run_gate(const Tensor& x, const Tensor& out, int64_t work, const char* operation,
              const F& f) {
  const int64_t rows = out.size(0), n = out.size(1), stride = x.stride(0);
  const auto run = [&](auto type) {
    using T = decltype(type);
    parallel_ranges(num_threads(), rows, work * n / kWidth + 1, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const T* gate = data_of<const T>(x) + row * stride;
        map(gate, gate + n, data_of<T>(out) + row * n, n, {stride, stride, n},
            [&](Floats g, Floats up) VLLM_LAMBDA { return f(g) * up; });
      }
    });
    return kOk;
  };
  check(with_dtype(dtype_of(x), run), operation);
}

void gelu_and_mul(const Tensor& x, const Tensor& out) {
  run_gate(x, out, 40, "gelu_and_mul", [](Floats g) VLLM_LAMBDA { return gelu_erf(g); });
}

void gelu_tanh_and_mul(const Tensor& x, const Tensor& out) {
  run_gate(x, out, 10, "gelu_tanh_and_mul", [](Floats g) VLLM_LAMBDA { return gelu_by_tanh(g); });
}

}  // namespace

VLLM_OPERATION(gelu_and_mul)
VLLM_OPERATION(gelu_tanh_and_mul)

}  // namespace vllm
