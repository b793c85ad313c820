// GELU as a gate.
#include "row_maps.h"

namespace vllm {
namespace {

// out = f(gate) * up, for x as (gate | up).
template <class F>
void run_gate(const Tensor& x, const Tensor& out, int64_t work, const char* operation,
              const F& f) {
  map_rows(x, out.size(1), out, work, operation,
           [&](Floats g, Floats up) VLLM_LAMBDA { return f(g) * up; });
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
