#include "tensor.h"

#include <torch/csrc/stable/library.h>

#include <stdexcept>
#include <string>
#include <type_traits>

namespace vllm {
namespace {

namespace stable = torch::stable::detail;

static_assert(std::is_same_v<Argument, StableIValue>);

void require(AOTITorchError error) {
  if (error != 0) throw std::runtime_error("torch does not answer a kernel's question");
}

template <class T, class Get>
T ask(const Get& get, AtenTensorHandle tensor) {
  T answer;
  require(get(tensor, &answer));
  return answer;
}

AtenTensorHandle handle_of(void* tensor) { return static_cast<AtenTensorHandle>(tensor); }

}  // namespace

void check(Status status, const char* operation) {
  if (status == kOk) return;
  const char* reason = status == kBadDtype      ? "a tensor is of a dtype that it does not take"
                       : status == kBadIndex    ? "a slot, block id or position lies outside of its tensor"
                       : status == kOutOfMemory ? "out of memory"
                                                : "a size that it does not take";
  throw std::runtime_error("CPU kernel " + std::string(operation) + ": " + reason);
}

Tensor::Tensor(Argument argument) {
  const auto tensor = stable::to<AtenTensorHandle>(argument);
  handle_ = tensor;
  data_ = ask<void*>(aoti_torch_get_data_ptr, tensor);
  dim_ = ask<int64_t>(aoti_torch_get_dim, tensor);
  sizes_ = ask<int64_t*>(aoti_torch_get_sizes, tensor);
  strides_ = ask<int64_t*>(aoti_torch_get_strides, tensor);
}

void Tensor::release() { aoti_torch_delete_tensor_object(handle_of(handle_)); }

Dtype Tensor::dtype() const {
  using torch::headeronly::ScalarType;
  const auto dtype = ask<int32_t>(aoti_torch_get_dtype, handle_of(handle_));
  switch (stable::to<ScalarType>(stable::from(dtype))) {
    case ScalarType::Float: return kFloat32;
    case ScalarType::BFloat16: return kBFloat16;
    case ScalarType::Half: return kFloat16;
    case ScalarType::Char: return kSigned8;
    case ScalarType::Float8_e4m3fn: return kFloat8E4M3;
    case ScalarType::Float8_e8m0fnu: return kFloat8E8M0;
    default: return kOtherDtype;
  }
}

int64_t dtype_of(const Tensor& tensor) {
  const Dtype dtype = tensor.dtype();
  if (dtype <= kFloat16) return dtype;
  throw std::runtime_error("a tensor is not of float32, bfloat16 or float16");
}

int64_t num_threads() {
  uint32_t threads = 1;
  torch_get_num_threads(&threads);
  return threads;
}

template <> bool take(Argument argument) { return stable::to<bool>(argument); }
template <> int64_t take(Argument argument) { return stable::to<int64_t>(argument); }
template <> double take(Argument argument) { return stable::to<double>(argument); }
template <> Tensor take(Argument argument) { return Tensor(argument); }
template <> std::optional<int64_t> take(Argument argument) {
  return stable::to<std::optional<int64_t>>(argument);
}
template <> std::optional<double> take(Argument argument) {
  return stable::to<std::optional<double>>(argument);
}
template <> MaybeTensor take(Argument argument) {
  const auto handle = stable::to<std::optional<AtenTensorHandle>>(argument);
  return handle ? MaybeTensor(stable::from(*handle)) : std::nullopt;
}
template <> std::vector<Tensor> take(Argument argument) {
  std::vector<Tensor> tensors;
  for (const auto handle : stable::to<std::vector<AtenTensorHandle>>(argument)) {
    tensors.emplace_back(stable::from(handle));
  }
  return tensors;
}

void check_counts(uint64_t arguments, uint64_t parameters, uint64_t results) {
  if (arguments == parameters && results == 0) return;
  throw std::runtime_error("a kernel of " + std::to_string(parameters) +
                           " parameters got the schema of another one: " +
                           std::to_string(arguments) + " arguments, " + std::to_string(results) +
                           " results");
}

Registration::Registration(const char* library, const char* name, Function function)
    : library_(new stable::StableLibrary(stable::StableLibrary::Kind::IMPL, library, "CPU",
                                         __FILE__, __LINE__)) {
  static_cast<stable::StableLibrary*>(library_)->impl(name, function);
}

Registration::~Registration() { delete static_cast<stable::StableLibrary*>(library_); }

}  // namespace vllm
