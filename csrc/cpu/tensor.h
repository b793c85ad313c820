// Torch's tensors and operators, as the kernels see them.
//
// Only tensor.cpp includes torch's headers, and it is compiled once for all instruction sets:
// parsing them costs more than compiling most of the kernels.
#pragma once

#include <cstdint>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

namespace vllm {

enum Status : int {
  kOk = 0,
  kBadCall = 1,      // a size that is not supported
  kBadDtype = 2,     // not float32, bfloat16 or float16
  kBadIndex = 3,     // a slot, block id or position outside of its tensor
  kOutOfMemory = 4,
};

// Throws an exception that torch turns into a RuntimeError.
void check(Status status, const char* operation);

enum Dtype : int64_t {
  kFloat32 = 0,
  kBFloat16 = 1,
  kFloat16 = 2,
  kSigned8 = 3,
  kFloat8E4M3 = 4,
  kFloat8E8M0 = 5,
  kOtherDtype = 6,
};

// An argument as torch passes it to an operator, which then owns it.
using Argument = uint64_t;

class Tensor {
 public:
  explicit Tensor(Argument argument);
  Tensor(Tensor&& other) noexcept
      : handle_(std::exchange(other.handle_, nullptr)), data_(other.data_), dim_(other.dim_),
        sizes_(other.sizes_), strides_(other.strides_) {}
  Tensor& operator=(Tensor&&) = delete;
  ~Tensor() {
    if (handle_ != nullptr) release();
  }

  void* data_ptr() const { return data_; }
  int64_t dim() const { return dim_; }
  int64_t size(int64_t dimension) const { return sizes_[dimension]; }
  int64_t stride(int64_t dimension) const { return strides_[dimension]; }
  Dtype dtype() const;

 private:
  void release();

  void* handle_;
  void* data_;
  int64_t dim_;
  const int64_t *sizes_, *strides_;
};

using MaybeTensor = std::optional<Tensor>;

// The tensor's dtype if it is one of the three that kernels compute with; else throws.
int64_t dtype_of(const Tensor& tensor);

int64_t num_threads();

// The value of an argument.
template <class T>
T take(Argument argument);
template <> bool take(Argument argument);
template <> int64_t take(Argument argument);
template <> double take(Argument argument);
template <> Tensor take(Argument argument);
template <> std::optional<int64_t> take(Argument argument);
template <> std::optional<double> take(Argument argument);
template <> MaybeTensor take(Argument argument);
template <> std::vector<Tensor> take(Argument argument);

// Registers a function as an operator of torch for the lifetime of this object.
class Registration {
 public:
  using Function = void (*)(Argument* arguments, uint64_t count, uint64_t results);

  Registration(const char* library, const char* name, Function function);
  ~Registration();

 private:
  void* const library_;
};

// Throws unless an operator's schema has as many arguments as its function has, and no result.
void check_counts(uint64_t arguments, uint64_t parameters, uint64_t results);

template <class... Parameters, size_t... kIndices>
void call(void (*function)(Parameters...), Argument* arguments, std::index_sequence<kIndices...>) {
  function(take<std::remove_cvref_t<Parameters>>(arguments[kIndices])...);
}

template <class... Parameters>
constexpr size_t num_parameters(void (*)(Parameters...)) {
  return sizeof...(Parameters);
}

// Calls `kFunction` with the arguments that torch passes.
template <auto kFunction>
void call_with(Argument* arguments, uint64_t count, uint64_t results) {
  constexpr size_t kParameters = num_parameters(kFunction);
  check_counts(count, kParameters, results);
  call(kFunction, arguments, std::make_index_sequence<kParameters>());
}

}  // namespace vllm
