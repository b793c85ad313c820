// The delta rule with decays by channel, token by token: lanes are columns of the state.
//
// With S the state after the previous token, still without its last update k' u'^T, one pass over
// the rows forms D = diag(decay) (S + k' u'^T), D^T k and D^T q; then u = beta (v - D^T k), and the
// output is D^T q + (k.q) u. Every element has one chain of operations that only earlier tokens
// enter, so no value depends on where steps end.
#include <cmath>
#include <utility>

#include "state_plan.h"
#include "vec_math.h"

namespace vllm {
namespace {

struct ChannelDeltaArgs {
  int64_t threads, heads, dk, dv;
  const void* qkv;
  int64_t qkv_stride;
  const float* log_decays;  // [tokens, heads * dk]
  const void* b;
  int64_t b_stride;
  float* state;  // [blocks, heads, dk, dv]
  int64_t state_blocks, state_block_stride, state_head_stride, state_row_stride;
  StatePlanArgs plan;
  void* out;  // [tokens, heads, dv]
};

constexpr int kVectors = 4;
constexpr int64_t kColumns = kVectors * kWidth;
constexpr float kNormEps = 1e-6f;

template <class T>
class ChannelDeltaTask {
 public:
  static int64_t floats(const ChannelDeltaArgs& args) {
    return args.dk * kColumns + 4 * round_up(args.dk, kWidth) + kColumns;
  }

  ChannelDeltaTask(const ChannelDeltaArgs& args, int64_t head, int64_t column, float* memory)
      : args_(args), head_(head), column_(column),
        n_(args.dv - column < kColumns ? args.dv - column : kColumns),
        padded_(round_up(args.dk, kWidth)) {
    states_ = memory;
    keys_ = states_ + args.dk * kColumns;
    queries_ = keys_ + padded_;
    decays_ = queries_ + padded_;
    last_keys_ = decays_ + padded_;
    update_ = last_keys_ + padded_;
  }

  void run(int64_t request) {
    const StatePlanArgs& plan = args_.plan;
    const int64_t begin = plan.query_start[request], end = plan.query_start[request + 1];
    if (begin == end) return;
    load_state(request);
    walk_tokens(
        plan, request, [&](int64_t token) VLLM_LAMBDA { advance(token); },
        [&](int64_t block) VLLM_LAMBDA { save_state(block); });
  }

 private:
  float* state_row(int64_t block, int64_t i) const {
    return args_.state + block * args_.state_block_stride + head_ * args_.state_head_stride +
           i * args_.state_row_stride + column_;
  }

  void load_state(int64_t request) {
    std::memset(last_keys_, 0, size_t(padded_) * sizeof(float));
    std::memset(update_, 0, size_t(kColumns) * sizeof(float));
    std::memset(states_, 0, size_t(args_.dk * kColumns) * sizeof(float));
    if (!args_.plan.has_state[request]) return;
    for (int64_t i = 0; i < args_.dk; ++i) {
      std::memcpy(states_ + i * kColumns, state_row(args_.plan.block_ids[request], i),
                  size_t(n_) * sizeof(float));
    }
  }

  void save_state(int64_t block) const {
    for (int64_t i = 0; i < args_.dk; ++i) {
      for (int64_t j = 0; j < n_; j += kWidth) {
        const Floats state = fma(splat(last_keys_[i]), load(update_ + j),
                                 load(states_ + i * kColumns + j));
        const int64_t left = n_ - j;
        float* row = state_row(block, i) + j;
        left >= kWidth ? store(row, state) : store_first(row, state, left);
      }
    }
  }

  // Loads row `from` of dk elements, times `scale` over its norm.
  void load_unit(const T* from, float scale, float* to) const {
    Floats squares = {};
    for (int64_t i = 0; i < padded_; i += kWidth) {
      const Floats row = load_up_to(from + i, args_.dk - i);
      squares = fma(row, row, squares);
      store(to + i, row);
    }
    const Floats factor = splat(scale / std::sqrt(reduce_add(squares) + kNormEps));
    for (int64_t i = 0; i < padded_; i += kWidth) store(to + i, load(to + i) * factor);
  }

  void advance(int64_t token) {
    const T* rows = static_cast<const T*>(args_.qkv) + token * args_.qkv_stride;
    const int64_t keys = args_.heads * args_.dk;
    load_unit(rows + head_ * args_.dk, 1.0f / std::sqrt(float(args_.dk)), queries_);
    load_unit(rows + keys + head_ * args_.dk, 1.0f, keys_);
    const float* log_decays = args_.log_decays + token * keys + head_ * args_.dk;
    Floats products = {};
    for (int64_t i = 0; i < padded_; i += kWidth) {
      store(decays_ + i, exp(load_up_to(log_decays + i, args_.dk - i)));
      products = fma(load(keys_ + i), load(queries_ + i), products);
    }
    const Floats product = splat(reduce_add(products));
    Floats last[kVectors], recalled[kVectors] = {}, answered[kVectors] = {};
    for (int v = 0; v < kVectors; ++v) last[v] = load(update_ + v * kWidth);
    for (int64_t i = 0; i < args_.dk; ++i) {
      const Floats last_key = splat(last_keys_[i]), decay = splat(decays_[i]);
      const Floats key = splat(keys_[i]), query = splat(queries_[i]);
      float* row = states_ + i * kColumns;
      for (int v = 0; v < kVectors; ++v) {
        const Floats state = fma(last_key, last[v], load(row + v * kWidth)) * decay;
        store(row + v * kWidth, state);
        recalled[v] = fma(key, state, recalled[v]);
        answered[v] = fma(query, state, answered[v]);
      }
    }
    const T gate = static_cast<const T*>(args_.b)[token * args_.b_stride + head_];
    const Floats beta = sigmoid<float>(splat(to_float(gate)));
    const T* values = rows + 2 * keys + head_ * args_.dv + column_;
    T* out = static_cast<T*>(args_.out) + (token * args_.heads + head_) * args_.dv + column_;
    for (int v = 0; v < kVectors; ++v) {
      const int64_t at = v * kWidth, left = n_ - at;
      const Floats update = (load_up_to(values + at, left) - recalled[v]) * beta;
      store(update_ + at, update);
      const Floats result = fma(product, update, answered[v]);
      if (left >= kWidth) {
        store(out + at, result);
      } else if (left > 0) {
        store_first(out + at, result, left);
      }
    }
    std::swap(keys_, last_keys_);
  }

  const ChannelDeltaArgs& args_;
  const int64_t head_, column_, n_, padded_;
  float *states_, *keys_, *queries_, *decays_, *last_keys_, *update_;
};

template <class T>
Status run(const ChannelDeltaArgs& args) {
  if (!args.plan.blocks_in_range(args.state_blocks)) return kBadIndex;
  const int64_t requests = args.plan.requests;
  const int64_t per_head = (args.dv + kColumns - 1) / kColumns;
  const int64_t blocks = args.heads * per_head;
  // Requests are cut only until every thread gets two tasks.
  int64_t parts = (2 * args.threads + blocks - 1) / blocks;
  if (parts > requests) parts = requests;
  const int64_t tokens = args.plan.query_start[requests];
  const int64_t work = tokens * blocks * args.dk * kVectors * 4;
  SharedStatus status;
  parallel_for(work < kSerialWork ? 1 : args.threads, parts * blocks, [&](int64_t i) {
    const WithoutSubnormals zeros;
    static thread_local Scratch scratch;
    auto* memory = static_cast<float*>(
        scratch.reserve(ChannelDeltaTask<T>::floats(args) * int64_t(sizeof(float))));
    if (memory == nullptr) return status.fail(kOutOfMemory);
    const int64_t block = i % blocks, part = i / blocks;
    const int64_t end = requests * (part + 1) / parts;
    for (int64_t r = requests * part / parts; r < end; ++r) {
      ChannelDeltaTask<T>(args, block / per_head, block % per_head * kColumns, memory).run(r);
    }
  });
  return Status(status.value);
}

void channel_delta_rule(const Tensor& qkv, const Tensor& log_decays, const Tensor& b,
                        const Tensor& query_start, const Tensor& /*seq_lens*/,
                        const Tensor& block_ids, const Tensor& has_state,
                        const Tensor& snapshot_start, const Tensor& snapshot_tokens,
                        const Tensor& snapshot_blocks, const MaybeTensor& is_final,
                        const Tensor& state_cache, const Tensor& out) {
  const ChannelDeltaArgs args{num_threads(),
                              state_cache.size(1),
                              state_cache.size(2),
                              state_cache.size(3),
                              qkv.data_ptr(),
                              qkv.stride(0),
                              data_of<const float>(log_decays),
                              b.data_ptr(),
                              b.stride(0),
                              data_of<float>(state_cache),
                              state_cache.size(0),
                              state_cache.stride(0),
                              state_cache.stride(1),
                              state_cache.stride(2),
                              StatePlanArgs(query_start, block_ids, has_state, snapshot_start,
                                            snapshot_tokens, snapshot_blocks, is_final),
                              out.data_ptr()};
  check(with_dtype(dtype_of(qkv), [&](auto type) { return run<decltype(type)>(args); }),
        "channel_delta_rule");
}

}  // namespace

VLLM_OPERATION(channel_delta_rule)

}  // namespace vllm
