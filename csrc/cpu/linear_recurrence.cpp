// The real-gated linear recurrent unit, token by token; lanes are channels.
//
// Every element of a state has one chain of operations that only its own request's tokens enter, so
// no value depends on where steps end.
#include <cmath>

#include "state_plan.h"
#include "vec_math.h"

namespace vllm {
namespace {

VLLM_INLINE Floats square_root(Floats v) {
  for (int i = 0; i < kWidth; ++i) v[i] = std::sqrt(v[i]);
  return v;
}

struct RecurrenceArgs {
  int64_t threads, channels;
  const void *x, *input_gate, *decay_gate;  // [tokens, channels]
  int64_t x_stride, input_stride, decay_stride;
  const float* rates;  // [channels]
  float* state;        // [blocks, channels]
  int64_t state_blocks, state_block_stride;
  StatePlanArgs plan;
  void* out;
  int64_t out_stride;
};

// Walks a vector of channels of one request; n: number of channels in it.
template <class T>
void walk(const RecurrenceArgs& args, int64_t request, int64_t channel, int64_t n) {
  const StatePlanArgs& plan = args.plan;
  const int64_t begin = plan.query_start[request], end = plan.query_start[request + 1];
  if (begin == end) return;
  const auto get = [&](const void* rows, int64_t stride, int64_t token) VLLM_LAMBDA {
    const T* row = static_cast<const T*>(rows) + token * stride + channel;
    if (token + 1 < end) __builtin_prefetch(row + stride);
    return load_up_to(row, n);
  };
  const bool known = plan.has_state[request] != 0;
  const float* own = args.state + plan.block_ids[request] * args.state_block_stride + channel;
  Floats state = known ? load_up_to(own, n) : Floats{};
  const Floats rate = load_up_to(args.rates + channel, n);
  const auto advance = [&](int64_t t) VLLM_LAMBDA {
    const Floats decay = exp(rate * sigmoid<float>(get(args.decay_gate, args.decay_stride, t)));
    Floats root = square_root(fma(-decay, decay, splat(1.0f)));
    if (t == begin && !known) root = splat(1.0f);
    const Floats gate = sigmoid<float>(get(args.input_gate, args.input_stride, t));
    state = fma(decay, state, root * gate * get(args.x, args.x_stride, t));
    T* out = static_cast<T*>(args.out) + t * args.out_stride + channel;
    n == kWidth ? store(out, state) : store_first(out, state, n);
  };
  walk_tokens(plan, request, advance, [&](int64_t block) VLLM_LAMBDA {
    store_first(args.state + block * args.state_block_stride + channel, state, n);
  });
}

constexpr int64_t kWorkOfAToken = 60;

template <class T>
Status run(const RecurrenceArgs& args) {
  return walk_channels(args, kWorkOfAToken, walk<T>);
}

void gated_linear_recurrence(const Tensor& x, const Tensor& input_gate, const Tensor& decay_gate,
                             const Tensor& rates, const Tensor& query_start,
                             const Tensor& /*seq_lens*/, const Tensor& block_ids,
                             const Tensor& has_state, const Tensor& snapshot_start,
                             const Tensor& snapshot_tokens, const Tensor& snapshot_blocks,
                             const MaybeTensor& is_final, const Tensor& state_cache,
                             const Tensor& out) {
  const RecurrenceArgs args{num_threads(),
                            x.size(1),
                            x.data_ptr(),
                            input_gate.data_ptr(),
                            decay_gate.data_ptr(),
                            x.stride(0),
                            input_gate.stride(0),
                            decay_gate.stride(0),
                            data_of<const float>(rates),
                            data_of<float>(state_cache),
                            state_cache.size(0),
                            state_cache.stride(0),
                            StatePlanArgs(query_start, block_ids, has_state, snapshot_start,
                                          snapshot_tokens, snapshot_blocks, is_final),
                            out.data_ptr(),
                            out.stride(0)};
  check(with_dtype(dtype_of(x), [&](auto type) { return run<decltype(type)>(args); }),
        "gated_linear_recurrence");
}

}  // namespace

VLLM_OPERATION(gated_linear_recurrence)

}  // namespace vllm
