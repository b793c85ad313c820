// The gated delta rule, one token after another, state in float32.
//
// The columns of the state S [dk, dv] never meet, so a task is one request, one v-head
// and kColumns columns: a block of S that stays in the first-level cache while the task
// walks all tokens. One pass over the block updates it with a token, reads that token's
// output from it and starts the next token's S^T k, so every element is loaded and
// stored once a token. Sums run over dk in order; nothing knows where the chunk ends.
#include <cmath>

#include "kernels.h"
#include "vec_math.h"

namespace vllm {
namespace VLLM_ISA {
namespace {

constexpr int kVectors = kWidth == 16 ? 4 : 2;  // as many as the registers hold
constexpr int kColumns = kVectors * kWidth;
constexpr int64_t kAhead = 3;  // tokens from asking for memory to its use

// Per token: [inverse norms of q heads (with the scale) | of k heads | decays | betas].
int64_t scratch_stride(const DeltaRuleArgs& args) {
  return 2 * (args.num_k_heads + args.num_v_heads);
}

template <class T>
float inverse_norm(const T* x, int64_t n) {
  Floats sum = {};
  for_each_vector(
      n,
      [&](int64_t i) VLLM_LAMBDA {
        Floats v = load(x + i);
        sum = fma(v, v, sum);
      },
      [&](int64_t i, int64_t m) VLLM_LAMBDA {
        Floats v = load_first(x + i, m);
        sum = fma(v, v, sum);
      });
  return 1.0f / std::sqrt(reduce_add(sum) + 1e-6f);
}

template <class T>
void prepare_token(const DeltaRuleArgs& args, int64_t token) {
  float* scratch = args.scratch + token * scratch_stride(args);
  const T* q = static_cast<const T*>(args.qkv) + token * args.qkv_stride;
  const T* k = q + args.num_k_heads * args.dk;
  const float scale = 1.0f / std::sqrt(float(args.dk));
  for (int64_t h = 0; h < args.num_k_heads; ++h) {
    scratch[h] = inverse_norm(q + h * args.dk, args.dk) * scale;
    scratch[args.num_k_heads + h] = inverse_norm(k + h * args.dk, args.dk);
  }
  float* decay = scratch + 2 * args.num_k_heads;
  float* beta = decay + args.num_v_heads;
  const T* a = static_cast<const T*>(args.a) + token * args.a_stride;
  const T* b = static_cast<const T*>(args.b) + token * args.b_stride;
  for (int64_t h = 0; h < args.num_v_heads; h += kWidth) {
    const int64_t m = args.num_v_heads - h < kWidth ? args.num_v_heads - h : kWidth;
    auto get = [m](const auto* p) { return m == kWidth ? load(p) : load_first(p, m); };
    auto put = [m](float* p, Floats v) { m == kWidth ? store(p, v) : store_first(p, v, m); };
    Floats rate = exp(get(args.a_log + h)) * softplus(get(a + h) + get(args.dt_bias + h));
    put(decay + h, exp(-rate));
    put(beta + h, sigmoid<float>(get(b + h)));
  }
}

template <class T>
class DeltaTask {
 public:
  // buffer: [dk * kColumns + 4 * padded dk] floats.
  DeltaTask(const DeltaRuleArgs& args, int64_t request, int64_t head, int64_t first_column,
            float* buffer)
      : args_(args),
        request_(request),
        head_(head),
        k_head_(head / (args.num_v_heads / args.num_k_heads)),
        column_(first_column),
        n_(args.dv - first_column < kColumns ? args.dv - first_column : kColumns),
        state_(buffer) {
    const int64_t padded = round_up(args.dk, kWidth);
    for (int i = 0; i < 2; ++i) {
      keys_[i] = buffer + args.dk * kColumns + 2 * i * padded;
      queries_[i] = keys_[i] + padded;
    }
  }

  void run() {
    const StatePlanArgs& plan = args_.plan;
    const int64_t first = plan.query_start[request_];
    const int64_t tokens = plan.query_start[request_ + 1] - first;
    int64_t snapshot = plan.snapshot_start[request_];
    load_state();
    read_query_key(first, 0);
    Floats memory[kVectors];  // S^T k of the token to come
    recall(keys_[0], memory);
    for (int64_t t = 0; t < tokens; ++t) {
      const int now = int(t & 1);
      if (t + kAhead < tokens) prefetch(first + t + kAhead);
      if (t + 1 < tokens) {
        read_query_key(first + t + 1, 1 - now);
        step<true>(first + t, keys_[now], queries_[now], keys_[1 - now], memory);
      } else {
        step<false>(first + t, keys_[now], queries_[now], nullptr, memory);
      }
      for (; snapshot < plan.snapshot_start[request_ + 1] &&
             plan.snapshot_tokens[snapshot] == t + 1;
           ++snapshot) {
        save_snapshot(plan.snapshot_blocks[snapshot]);
      }
    }
    save_state(plan.block_ids[request_]);
  }

 private:
  float* state_address(int64_t block) const {
    return args_.state + block * args_.state_block_stride + head_ * args_.state_head_stride +
           column_;
  }

  void load_state() {
    const bool kept = args_.plan.has_state[request_] != 0;
    if (!kept || n_ < kColumns) {
      std::memset(state_, 0, size_t(args_.dk) * kColumns * sizeof(float));
    }
    if (!kept) return;
    const float* source = state_address(args_.plan.block_ids[request_]);
    for (int64_t i = 0; i < args_.dk; ++i) {
      std::memcpy(state_ + i * kColumns, source + i * args_.state_row_stride,
                  size_t(n_) * sizeof(float));
    }
  }

  void save_state(int64_t block) const {
    float* out = state_address(block);
    for (int64_t i = 0; i < args_.dk; ++i) {
      std::memcpy(out + i * args_.state_row_stride, state_ + i * kColumns,
                  size_t(n_) * sizeof(float));
    }
  }

  // The same around the caches: a snapshot is read when a later request finds it, if ever.
  void save_snapshot(int64_t block) const {
    float* out = state_address(block);
    for (int64_t i = 0; i < args_.dk; ++i, out += args_.state_row_stride) {
      const float* row = state_ + i * kColumns;
      for_each_vector(
          n_, [&](int64_t j) VLLM_LAMBDA { stream(out + j, load(row + j)); },
          [&](int64_t j, int64_t m) VLLM_LAMBDA { store_first(out + j, load(row + j), m); });
    }
    stream_fence();
  }

  const float* token_scratch(int64_t token) const {
    return args_.scratch + token * scratch_stride(args_);
  }

  const T* query(int64_t token) const {
    return static_cast<const T*>(args_.qkv) + token * args_.qkv_stride + k_head_ * args_.dk;
  }
  const T* value(int64_t token) const {
    return static_cast<const T*>(args_.qkv) + token * args_.qkv_stride +
           2 * args_.num_k_heads * args_.dk + head_ * args_.dv + column_;
  }
  T* output(int64_t token) const {
    return static_cast<T*>(args_.out) + (token * args_.num_v_heads + head_) * args_.dv + column_;
  }

  // Asks the memory for what a token to come reads and writes: the rows lie too far apart
  // for the hardware to guess, and a store that misses holds up those that follow.
  void prefetch(int64_t token) const {
    constexpr int64_t kLine = 64 / int64_t(sizeof(T));
    const T *q = query(token), *v = value(token), *out = output(token);
    for (int64_t i = 0; i < args_.dk; i += kLine) {
      __builtin_prefetch(q + i);
      __builtin_prefetch(q + args_.num_k_heads * args_.dk + i);
    }
    for (int64_t i = 0; i < n_; i += kLine) {
      __builtin_prefetch(v + i);
      __builtin_prefetch(out + i, 1);
    }
  }

  void read_query_key(int64_t token, int slot) {
    const T* q = query(token);
    const T* k = q + args_.num_k_heads * args_.dk;
    const float* scales = token_scratch(token) + k_head_;
    scale_row(q, scales[0], queries_[slot]);
    scale_row(k, scales[args_.num_k_heads], keys_[slot]);
  }

  void scale_row(const T* x, float scale, float* out) const {
    const Floats factor = splat(scale);
    for_each_vector(
        args_.dk, [&](int64_t i) VLLM_LAMBDA { store(out + i, load(x + i) * factor); },
        [&](int64_t i, int64_t m) VLLM_LAMBDA {
          store(out + i, load_first(x + i, m) * factor);
        });
  }

  // memory = S^T k
  void recall(const float* k, Floats* memory) const {
    Floats sums[kVectors] = {};
    for (int64_t i = 0; i < args_.dk; ++i) {
      for (int j = 0; j < kVectors; ++j) {
        sums[j] = fma(splat(k[i]), load(state_ + i * kColumns + j * kWidth), sums[j]);
      }
    }
    for (int j = 0; j < kVectors; ++j) memory[j] = sums[j];
  }

  // beta * (v - decay * memory)
  Floats correction(const T* values, int j, Floats memory, Floats decay, Floats beta) const {
    const int64_t left = n_ - j * kWidth;
    if (left <= 0) return Floats{};
    const T* p = values + j * kWidth;
    Floats v = left >= kWidth ? load(p) : load_first(p, left);
    return beta * (v - decay * memory);
  }

  template <bool has_next>
  void step(int64_t token, const float* k, const float* q, const float* next_k, Floats* memory) {
    const float* gates = token_scratch(token) + 2 * args_.num_k_heads + head_;
    const Floats decay = splat(gates[0]), beta = splat(gates[args_.num_v_heads]);
    Floats delta[kVectors], out[kVectors] = {}, next[kVectors] = {};
    for (int j = 0; j < kVectors; ++j) delta[j] = correction(value(token), j, memory[j], decay, beta);
    float* row = state_;
    for (int64_t i = 0, dk = args_.dk; i < dk; ++i, row += kColumns) {
      const Floats ki = splat(k[i]), qi = splat(q[i]);
      const Floats next_ki = has_next ? splat(next_k[i]) : Floats{};
      for (int j = 0; j < kVectors; ++j) {
        Floats s = fma(ki, delta[j], decay * load(row + j * kWidth));
        store(row + j * kWidth, s);
        out[j] = fma(qi, s, out[j]);
        if (has_next) next[j] = fma(next_ki, s, next[j]);
      }
    }
    T* result = output(token);
    for (int j = 0; j < kVectors; ++j) {
      const int64_t left = n_ - j * kWidth;
      if (left >= kWidth) {
        store(result + j * kWidth, out[j]);
      } else if (left > 0) {
        store_first(result + j * kWidth, out[j], left);
      }
      memory[j] = next[j];
    }
  }

  const DeltaRuleArgs& args_;
  const int64_t request_, head_, k_head_, column_, n_;
  float* state_;
  float *keys_[2], *queries_[2];
};

Scratch& state_scratch() {
  static thread_local Scratch scratch;
  return scratch;
}

template <class T>
Status run(const DeltaRuleArgs& args) {
  if (!blocks_in_range(args.plan, args.state_blocks)) return kBadIndex;
  const int64_t token_work =
      args.num_k_heads * (2 * args.dk / kWidth + 16) + args.num_v_heads * 100 / kWidth;
  parallel_ranges(args.threads, args.tokens, token_work, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) prepare_token<T>(args, token);
  });
  const int64_t blocks = (args.dv + kColumns - 1) / kColumns;
  const int64_t tasks = args.plan.requests * args.num_v_heads * blocks;
  const int64_t work = (args.tokens + args.plan.requests) * args.num_v_heads * args.dk * args.dv;
  const int64_t threads = work / kWidth < kSerialWork ? 1 : args.threads;
  const int64_t floats = args.dk * kColumns + 4 * round_up(args.dk, kWidth);
  SharedStatus status;
  parallel_for(threads, tasks, [&](int64_t i) {
    const int64_t block = i % blocks, head = i / blocks % args.num_v_heads;
    const int64_t request = i / blocks / args.num_v_heads;
    if (args.plan.query_start[request + 1] == args.plan.query_start[request]) return;
    auto* buffer = static_cast<float*>(state_scratch().reserve(floats * int64_t(sizeof(float))));
    if (buffer == nullptr) return status.fail(kOutOfMemory);
    DeltaTask<T>(args, request, head, block * kColumns, buffer).run();
  });
  return Status(status.value);
}

}  // namespace

Status gated_delta_rule(const DeltaRuleArgs& args) {
  return with_dtype(args.dtype, [&](auto type) { return run<decltype(type)>(args); });
}

}  // namespace VLLM_ISA
}  // namespace vllm
