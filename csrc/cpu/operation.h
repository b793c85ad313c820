// A kernel as an operator of torch.
//
// vllm/ops declares all operations: their names, arguments, contracts, and plain bodies. A file
// here defines a function of the same name and arguments, of which the last ones are written, and
// registers it. The function is then called instead of the body. Contracts (shapes, dtypes, dense
// last dimensions) hold when a function is called, but it has to check indices itself.
//
// Every file is compiled once for each instruction set, into libraries that are loaded together
// only in tests; each has a namespace for its operators.
#pragma once

#include "kernels.h"
#include "tensor.h"

#define VLLM_OPERATION(name) \
  static const Registration name##_registration(kNamespace, #name, call_with<&name>);

namespace vllm {

extern const char kNamespace[];  // CMakeLists.txt writes it

inline void* data_of(const MaybeTensor& tensor) { return tensor ? tensor->data_ptr() : nullptr; }

template <class T>
T* data_of(const Tensor& tensor) {
  return static_cast<T*>(tensor.data_ptr());
}

// x as [outer, inner, n], of one to three dimensions, the last one dense.
struct Rows3 {
  void* data;
  int64_t outer = 1, inner = 1, n, outer_stride = 0, inner_stride = 0;

  explicit Rows3(const Tensor& x) : data(x.data_ptr()), n(x.size(x.dim() - 1)) {
    if (x.dim() >= 2) outer = x.size(0), outer_stride = x.stride(0);
    if (x.dim() == 3) inner = x.size(1), inner_stride = x.stride(1);
  }
  int64_t rows() const { return outer * inner; }
};

}  // namespace vllm
