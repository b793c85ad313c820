// Mixtures of experts: the sum of what a token's experts gave.
#include "operation.h"
#include "vec_math.h"

namespace vllm {
namespace {

struct CombineArgs {
  int64_t tokens, ranks, n, pairs, stride;
  const int64_t* places;
  const float* weights;
  const void* outputs;
  const void* shared;  // may be null
  int64_t shared_stride;
  const float* shared_weights;  // may be null
  void* out;
};

// Elements [i, i + kWidth) of a token, of which `put` takes what there is: the shared ones first,
// then the ranks in order; every product and every sum is rounded by itself.
template <class T, class Get, class Put>
VLLM_INLINE void combine(const CombineArgs& args, int64_t token, int64_t i, const Get& get,
                         const Put& put) {
  Floats total{};
  if (args.shared != nullptr) {
    total = get(static_cast<const T*>(args.shared) + token * args.shared_stride + i);
    if (args.shared_weights != nullptr) total = total * splat(args.shared_weights[token]);
  }
  for (int64_t rank = token * args.ranks; rank < (token + 1) * args.ranks; ++rank) {
    const T* output = static_cast<const T*>(args.outputs) + args.places[rank] * args.stride;
    total = total + splat(args.weights[rank]) * get(output + i);
  }
  put(static_cast<T*>(args.out) + token * args.n + i, total);
}

template <class T>
Status run_combine(const CombineArgs& args) {
  for (int64_t rank = 0; rank < args.tokens * args.ranks; ++rank) {
    if (args.places[rank] < 0 || args.places[rank] >= args.pairs) return kBadIndex;
  }
  const int64_t work = 2 * (args.ranks + 1) * args.n / kWidth + 1;
  parallel_ranges(num_threads(), args.tokens, work, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      for_each_vector(
          args.n,
          [&](int64_t i) VLLM_LAMBDA {
            combine<T>(args, token, i, [](const T* p) VLLM_LAMBDA { return load(p); },
                       [](T* p, Floats v) VLLM_LAMBDA { store(p, v); });
          },
          [&](int64_t i, int64_t m) VLLM_LAMBDA {
            combine<T>(args, token, i, [m](const T* p) VLLM_LAMBDA { return load_first(p, m); },
                       [m](T* p, Floats v) VLLM_LAMBDA { store_first(p, v, m); });
          });
    }
  });
  return kOk;
}

void combine_experts(const Tensor& outputs, const Tensor& places, const Tensor& weights,
                     const MaybeTensor& shared, const MaybeTensor& shared_weights,
                     const Tensor& out) {
  const CombineArgs args{out.size(0),
                         places.size(1),
                         out.size(1),
                         outputs.size(0),
                         outputs.stride(0),
                         data_of<const int64_t>(places),
                         data_of<const float>(weights),
                         outputs.data_ptr(),
                         data_of(shared),
                         shared ? shared->stride(0) : 0,
                         static_cast<const float*>(data_of(shared_weights)),
                         out.data_ptr()};
  check(with_dtype(dtype_of(out), [&](auto type) { return run_combine<decltype(type)>(args); }),
        "combine_experts");
}

}  // namespace

VLLM_OPERATION(combine_experts)

}  // namespace vllm
