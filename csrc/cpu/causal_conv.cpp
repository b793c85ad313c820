// Depthwise causal convolution over time, then SiLU if applies_silu.
//
// A task is up to kMaxChannels channels and some requests, whose tokens it walks. A thread goes
// through neighbouring requests, as it will in the delta rule.
// The sum over the taps runs from the oldest input to the newest, then the bias.
#include "state_plan.h"
#include "vec_math.h"

namespace vllm {
namespace {

struct ConvArgs {
  int64_t dtype, threads;
  const void* x;
  int64_t x_stride, channels, width;
  const void* weight;  // [channels, width] dense
  const void* bias;    // may be null
  void* state;         // [blocks, width - 1, channels]
  int64_t state_blocks, state_block_stride, state_row_stride;
  StatePlanArgs plan;
  void* out;  // [tokens, channels]
  int64_t out_stride;
  bool applies_silu;
};

constexpr int64_t kMinChannels = 128, kMaxChannels = 512;
constexpr int64_t kMaxWidth = 8;
constexpr int kTileTokens = 8;

template <class T>
class ConvTask {
 public:
  ConvTask(const ConvArgs& args, int64_t first_channel, int64_t channels)
      : args_(args),
        channel_(first_channel),
        n_(args.channels - first_channel < channels ? args.channels - first_channel : channels) {
    load_weights();
  }

  void run(int64_t request) {
    const StatePlanArgs& plan = args_.plan;
    first_token_ = plan.query_start[request];
    const int64_t tokens = plan.query_start[request + 1] - first_token_;
    if (tokens == 0) return;
    if (request + 1 < plan.requests) prefetch_history(request + 1);
    find_history(request);
    convolve(tokens);
    for (int i = plan.snapshot_start[request]; i < plan.snapshot_start[request + 1]; ++i) {
      save_history(plan.snapshot_tokens[i], plan.snapshot_blocks[i]);
    }
    if (plan.keeps_state(request)) save_history(tokens, plan.block_ids[request]);
  }

 private:
  T* state(int64_t block, int64_t row) const {
    return static_cast<T*>(args_.state) + block * args_.state_block_stride +
           row * args_.state_row_stride + channel_;
  }

  // The input of token t of the chunk; t < 0: of a token before the chunk.
  const T* input(int64_t t) const {
    if (t < 0) return history_[args_.width - 1 + t];
    return static_cast<const T*>(args_.x) + (first_token_ + t) * args_.x_stride + channel_;
  }

  void load_weights() {
    const T* weight = static_cast<const T*>(args_.weight) + channel_ * args_.width;
    const T* bias = static_cast<const T*>(args_.bias);
    for (int64_t c = 0; c < n_; c += kWidth) {
      const int64_t m = n_ - c < kWidth ? n_ - c : kWidth;
      store(bias_ + c, bias == nullptr ? Floats{} : load_first_or_all(bias + channel_ + c, m));
      if (args_.width == 4 && m == kWidth) {
        Floats taps[4];
        load_apart(weight + 4 * c, taps);
        for (int tap = 0; tap < 4; ++tap) store(weight_[tap] + c, taps[tap]);
        continue;
      }
      for (int64_t tap = 0; tap < args_.width; ++tap) {
        T lanes[kWidth] = {};
        for (int64_t i = 0; i < m; ++i) lanes[i] = weight[(c + i) * args_.width + tap];
        store(weight_[tap] + c, load(lanes));
      }
    }
  }

  static Floats load_first_or_all(const T* p, int64_t m) {
    return m == kWidth ? load(p) : load_first(p, m);
  }

  // The inputs before the first token are not copied: they are overwritten only at the end.
  void find_history(int64_t request) {
    static constexpr T kNothing[kMaxChannels] = {};
    const bool kept = args_.plan.has_state[request] != 0;
    for (int64_t row = 0; row < args_.width - 1; ++row) {
      history_[row] = kept ? state(args_.plan.block_ids[request], row) : kNothing;
    }
  }

  // Prefetches a request's state and its first inputs.
  VLLM_INLINE void prefetch_history(int64_t request) const {
    constexpr int64_t kLine = 64 / int64_t(sizeof(T));
    const T* x = static_cast<const T*>(args_.x) +
                 args_.plan.query_start[request] * args_.x_stride + channel_;
    for (int64_t c = 0; c < n_; c += kLine) {
      for (int64_t row = 0; row < args_.width - 1; ++row) {
        __builtin_prefetch(state(args_.plan.block_ids[request], row) + c);
      }
      __builtin_prefetch(x + c);
    }
  }

  // Writes the last inputs before token `tokens` of the chunk, oldest first, because rows that are
  // still to be read come later.
  void save_history(int64_t tokens, int64_t block) const {
    for (int64_t row = 0; row < args_.width - 1; ++row) {
      std::memcpy(state(block, row), input(tokens - (args_.width - 1) + row),
                  size_t(n_) * sizeof(T));
    }
  }

  void convolve(int64_t tokens) const {
    switch (args_.width) {
      case 2: return convolve_tokens<2>(tokens);
      case 3: return convolve_tokens<3>(tokens);
      case 4: return convolve_tokens<4>(tokens);
      default:
        for (int64_t t = 0; t < tokens; ++t) convolve_tile<0, 1>(t);
    }
  }

  template <int width>
  void convolve_tokens(int64_t tokens) const {
    int64_t t = 0;
    for (; t + kTileTokens <= tokens; t += kTileTokens) convolve_tile<width, kTileTokens>(t);
    for (; t < tokens; ++t) convolve_tile<width, 1>(t);
  }

  // Convolves `tokens` tokens from t on; an input is read once for all of them. width: the number
  // of taps, 0: args_.width.
  template <int width, int tokens>
  void convolve_tile(int64_t t) const {
    const int64_t taps = width == 0 ? args_.width : width;
    const bool applies_silu = args_.applies_silu;
    const T* rows[kMaxWidth + tokens];
    for (int64_t i = 0; i < taps - 1 + tokens; ++i) rows[i] = input(t - (taps - 1) + i);
    T* out = static_cast<T*>(args_.out) + (first_token_ + t) * args_.out_stride + channel_;
    for_each_vector(
        n_,
        [&](int64_t c) VLLM_LAMBDA {
          Floats inputs[(width == 0 ? kMaxWidth : width) + tokens], sums[tokens];
          for (int64_t i = 0; i < taps - 1; ++i) inputs[i] = load(rows[i] + c);
#pragma GCC unroll 8
          for (int j = 0; j < tokens; ++j) {
            inputs[taps - 1 + j] = load(rows[taps - 1 + j] + c);
            Floats sum = {};
            for (int64_t i = 0; i < taps; ++i) sum = fma(inputs[j + i], load(weight_[i] + c), sum);
            sums[j] = sum + load(bias_ + c);
          }
          if (applies_silu) {
#pragma GCC unroll 8
            for (int j = 0; j < tokens; ++j) sums[j] = silu<T>(sums[j]);
          }
#pragma GCC unroll 8
          for (int j = 0; j < tokens; ++j) store(out + j * args_.out_stride + c, sums[j]);
        },
        [&](int64_t c, int64_t m) VLLM_LAMBDA {
          for (int j = 0; j < tokens; ++j) {
            convolve_last(rows + j, c, m, out + j * args_.out_stride);
          }
        });
  }

  // Convolves m channels of a token from c on, fewer than a vector; rows: the inputs of its taps.
  __attribute__((noinline)) void convolve_last(const T* const* rows, int64_t c, int64_t m,
                                               T* out) const {
    Floats sum = {};
    for (int64_t i = 0; i < args_.width; ++i) {
      sum = fma(load_first(rows[i] + c, m), load(weight_[i] + c), sum);
    }
    sum = sum + load(bias_ + c);
    store_first(out + c, args_.applies_silu ? silu<T>(sum) : sum, m);
  }

  const ConvArgs& args_;
  const int64_t channel_, n_;
  int64_t first_token_ = 0;
  float weight_[kMaxWidth][kMaxChannels];
  float bias_[kMaxChannels];
  const T* history_[kMaxWidth];
};

// Channels per task: many enough for memory, few enough that every thread gets two tasks or more.
int64_t channels_of_a_task(const ConvArgs& args) {
  const int64_t share = args.channels * args.plan.requests / (2 * args.threads);
  const int64_t channels = round_up(share, kMinChannels);
  if (channels < kMinChannels) return kMinChannels;
  return channels > kMaxChannels ? kMaxChannels : channels;
}

template <class T>
Status run(const ConvArgs& args) {
  if (args.width < 1 || args.width > kMaxWidth) return kBadCall;
  if (!args.plan.blocks_in_range(args.state_blocks)) return kBadIndex;
  const int64_t requests = args.plan.requests;
  const int64_t channels = channels_of_a_task(args);
  const int64_t blocks = (args.channels + channels - 1) / channels;
  int64_t groups = (2 * args.threads + blocks - 1) / blocks;
  if (groups < args.threads) groups = args.threads;
  if (groups > requests) groups = requests;
  const int64_t tokens = args.plan.query_start[requests];
  const int64_t work = tokens * args.channels / kWidth * (args.width + 4);
  const int64_t threads = work < kSerialWork ? 1 : args.threads;
  parallel_runs(threads, groups * blocks, [&](int64_t i) {
    ConvTask<T> task(args, i % blocks * channels, channels);
    const int64_t group = i / blocks;
    const int64_t end = requests * (group + 1) / groups;
    for (int64_t r = requests * group / groups; r < end; ++r) task.run(r);
  });
  return kOk;
}

void causal_conv1d(const Tensor& x, const Tensor& weight, const MaybeTensor& bias,
                   bool applies_silu, const Tensor& query_start, const Tensor& /*seq_lens*/,
                   const Tensor& block_ids, const Tensor& has_state, const Tensor& snapshot_start,
                   const Tensor& snapshot_tokens, const Tensor& snapshot_blocks,
                   const MaybeTensor& is_final, const Tensor& state_cache, const Tensor& out) {
  const ConvArgs args{dtype_of(x),
                      num_threads(),
                      x.data_ptr(),
                      x.stride(0),
                      x.size(1),
                      weight.size(1),
                      weight.data_ptr(),
                      data_of(bias),
                      state_cache.data_ptr(),
                      state_cache.size(0),
                      state_cache.stride(0),
                      state_cache.stride(1),
                      StatePlanArgs(query_start, block_ids, has_state, snapshot_start,
                                    snapshot_tokens, snapshot_blocks, is_final),
                      out.data_ptr(),
                      out.stride(0),
                      applies_silu};
  check(with_dtype(args.dtype, [&](auto type) { return run<decltype(type)>(args); }),
        "causal_conv1d");
}

}  // namespace

VLLM_OPERATION(causal_conv1d)

}  // namespace vllm
