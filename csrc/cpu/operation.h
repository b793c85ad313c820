// A kernel as an operator of torch.
//
// vllm/ops declares what there is: names, arguments, contracts, and a plain body for each. A file
// here defines a function of the same name and arguments, whose last ones are written, and
// registers it: that is all it takes to be called instead. Contracts (shapes, dtypes, dense last
// dimensions) hold when a function is called; indices are its own to check.
//
// Every file is compiled once for each instruction set, into libraries that are never loaded
// together but in tests; VLLM_NAMESPACE names this one's operators.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.h"

#define VLLM_OPERATION(name) \
  STABLE_TORCH_LIBRARY_IMPL(VLLM_NAMESPACE, CPU, library) { library.impl(#name, TORCH_BOX(&name)); }

namespace vllm {

using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

inline int64_t num_threads() {
  uint32_t threads = 1;
  torch_get_num_threads(&threads);
  return threads;
}

inline int64_t dtype_of(const Tensor& tensor) {
  using torch::headeronly::ScalarType;
  switch (tensor.scalar_type()) {
    case ScalarType::Float: return kFloat32;
    case ScalarType::BFloat16: return kBFloat16;
    case ScalarType::Half: return kFloat16;
    default: throw std::runtime_error("a tensor is not of float32, bfloat16 or float16");
  }
}

inline void* data_of(const MaybeTensor& tensor) { return tensor ? tensor->data_ptr() : nullptr; }

template <class T>
T* data_of(const Tensor& tensor) {
  return static_cast<T*>(tensor.data_ptr());
}

// Throws what torch makes a RuntimeError of.
inline void check(Status status, const char* operation) {
  if (status == kOk) return;
  const char* reason = status == kBadDtype      ? "a tensor is of a dtype that it does not take"
                       : status == kBadIndex    ? "a slot, block id or position lies outside of its tensor"
                       : status == kOutOfMemory ? "out of memory"
                                                : "a size that it does not take";
  throw std::runtime_error("CPU kernel " + std::string(operation) + ": " + reason);
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
