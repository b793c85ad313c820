// RWKV-4's weighted mean of values, token by token; lanes are channels.
//
// Every element of a state has one chain of operations that only its own request's tokens enter, so
// no value depends on where steps end.
#include "state_plan.h"
#include "vec_math.h"

namespace vllm {
namespace {

struct WkvArgs {
  int64_t threads, channels;
  const void *key, *value, *receptance;  // [tokens, channels]
  int64_t key_stride, value_stride, receptance_stride;
  const float *log_decay, *bonus;  // [channels]
  float* state;                    // [blocks, 3, channels]
  int64_t state_blocks, state_block_stride, state_row_stride;
  StatePlanArgs plan;
  void* out;
  int64_t out_stride;
};

constexpr float kNoToken = -1e38f;  // NO_TOKEN of vllm/ops/wkv.py

// Walks a vector of channels of one request; n: number of channels in it.
template <class T>
void walk(const WkvArgs& args, int64_t request, int64_t channel, int64_t n) {
  const StatePlanArgs& plan = args.plan;
  const int64_t begin = plan.query_start[request], end = plan.query_start[request + 1];
  if (begin == end) return;
  const auto get = [&](const void* rows, int64_t stride, int64_t token) VLLM_LAMBDA {
    const T* row = static_cast<const T*>(rows) + token * stride + channel;
    if (token + 1 < end) __builtin_prefetch(row + stride);
    return load_up_to(row, n);
  };
  const auto row_of = [&](int64_t block, int row) VLLM_LAMBDA {
    return args.state + block * args.state_block_stride + row * args.state_row_stride + channel;
  };
  const int64_t own = plan.block_ids[request];
  Floats top = {}, bottom = {}, greatest = splat(kNoToken);
  if (plan.has_state[request]) {
    top = load_up_to(row_of(own, 0), n);
    bottom = load_up_to(row_of(own, 1), n);
    greatest = load_up_to(row_of(own, 2), n);
  }
  const auto keep = [&](int64_t block) VLLM_LAMBDA {
    store_first(row_of(block, 0), top, n);
    store_first(row_of(block, 1), bottom, n);
    store_first(row_of(block, 2), greatest, n);
  };
  const Floats log_decay = load_up_to(args.log_decay + channel, n);
  const Floats bonus = load_up_to(args.bonus + channel, n);
  const auto advance = [&](int64_t t) VLLM_LAMBDA {
    const Floats key = get(args.key, args.key_stride, t);
    const Floats value = get(args.value, args.value_stride, t);
    const Floats ours = key + bonus, limit = max(greatest, ours);
    const Floats kept = exp(greatest - limit), added = exp(ours - limit);
    const Floats mean = fma(kept, top, added * value) / fma(kept, bottom, added);
    const Floats gate = sigmoid<float>(get(args.receptance, args.receptance_stride, t));
    T* out = static_cast<T*>(args.out) + t * args.out_stride + channel;
    n == kWidth ? store(out, mean * gate) : store_first(out, mean * gate, n);
    const Floats faded = greatest + log_decay, next = max(faded, key);
    const Floats share = exp(faded - next), weight = exp(key - next);
    top = fma(share, top, weight * value);
    bottom = fma(share, bottom, weight);
    greatest = next;
  };
  walk_tokens(plan, request, advance, keep);
}

constexpr int64_t kWorkOfAToken = 120;

template <class T>
Status run(const WkvArgs& args) {
  return walk_channels(args, kWorkOfAToken, walk<T>);
}

void wkv(const Tensor& key, const Tensor& value, const Tensor& receptance, const Tensor& log_decay,
         const Tensor& bonus, const Tensor& query_start, const Tensor& /*seq_lens*/,
         const Tensor& block_ids, const Tensor& has_state, const Tensor& snapshot_start,
         const Tensor& snapshot_tokens, const Tensor& snapshot_blocks, const MaybeTensor& is_final,
         const Tensor& state_cache, const Tensor& out) {
  const WkvArgs args{num_threads(),
                     key.size(1),
                     key.data_ptr(),
                     value.data_ptr(),
                     receptance.data_ptr(),
                     key.stride(0),
                     value.stride(0),
                     receptance.stride(0),
                     data_of<const float>(log_decay),
                     data_of<const float>(bonus),
                     data_of<float>(state_cache),
                     state_cache.size(0),
                     state_cache.stride(0),
                     state_cache.stride(1),
                     StatePlanArgs(query_start, block_ids, has_state, snapshot_start,
                                   snapshot_tokens, snapshot_blocks, is_final),
                     out.data_ptr(),
                     out.stride(0)};
  check(with_dtype(dtype_of(key), [&](auto type) { return run<decltype(type)>(args); }), "wkv");
}

}  // namespace

VLLM_OPERATION(wkv)

}  // namespace vllm
