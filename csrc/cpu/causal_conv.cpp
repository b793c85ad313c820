// Depthwise causal convolution over time, then SiLU.
//
// A task is one request and kChannels channels; it walks the request's tokens. The sum
// over the taps runs from the oldest input to the newest, then the bias.
#include "kernels.h"
#include "vec_math.h"

namespace vllm {
namespace VLLM_ISA {
namespace {

constexpr int64_t kChannels = 256;
constexpr int64_t kMaxWidth = 16;

template <class T>
class ConvTask {
 public:
  ConvTask(const ConvArgs& args, int64_t request, int64_t first_channel)
      : args_(args),
        first_token_(args.plan.query_start[request]),
        tokens_(args.plan.query_start[request + 1] - first_token_),
        channel_(first_channel),
        n_(args.channels - first_channel < kChannels ? args.channels - first_channel : kChannels) {
    load_weights();
    load_history(request);
  }

  void run(int64_t request) {
    for (int64_t t = 0; t < tokens_; ++t) convolve(t);
    const StatePlanArgs& plan = args_.plan;
    for (int i = plan.snapshot_start[request]; i < plan.snapshot_start[request + 1]; ++i) {
      save_history(plan.snapshot_tokens[i], plan.snapshot_blocks[i]);
    }
    save_history(tokens_, plan.block_ids[request]);
  }

 private:
  T* state(int64_t block, int64_t row) const {
    return static_cast<T*>(args_.state) + block * args_.state_block_stride +
           row * args_.state_row_stride + channel_;
  }

  // The input of token t of the chunk; t < 0: of the tokens before it.
  const T* input(int64_t t) const {
    if (t < 0) return history_[args_.width - 1 + t];
    return static_cast<const T*>(args_.x) + (first_token_ + t) * args_.x_stride + channel_;
  }

  void load_weights() {
    const T* weight = static_cast<const T*>(args_.weight) + channel_ * args_.width;
    const T* bias = static_cast<const T*>(args_.bias);
    for (int64_t c = 0; c < n_; c += kWidth) {
      const int64_t m = n_ - c < kWidth ? n_ - c : kWidth;
      for (int64_t tap = 0; tap < args_.width; ++tap) {
        T lanes[kWidth] = {};
        for (int64_t i = 0; i < m; ++i) lanes[i] = weight[(c + i) * args_.width + tap];
        store(weight_[tap] + c, load(lanes));
      }
      store(bias_ + c, bias == nullptr ? Floats{} : load_first_or_all(bias + channel_ + c, m));
    }
  }

  static Floats load_first_or_all(const T* p, int64_t m) {
    return m == kWidth ? load(p) : load_first(p, m);
  }

  void load_history(int64_t request) {
    const bool kept = args_.plan.has_state[request] != 0;
    for (int64_t row = 0; row < args_.width - 1; ++row) {
      if (kept) {
        std::memcpy(history_[row], state(args_.plan.block_ids[request], row), size_t(n_) * sizeof(T));
      } else {
        std::memset(history_[row], 0, sizeof history_[row]);
      }
    }
  }

  // Writes the last inputs before token `tokens` of the chunk.
  void save_history(int64_t tokens, int64_t block) const {
    for (int64_t row = 0; row < args_.width - 1; ++row) {
      std::memcpy(state(block, row), input(tokens - (args_.width - 1) + row),
                  size_t(n_) * sizeof(T));
    }
  }

  void convolve(int64_t t) const {
    const T* taps[kMaxWidth];
    for (int64_t i = 0; i < args_.width; ++i) taps[i] = input(t - (args_.width - 1) + i);
    T* out = static_cast<T*>(args_.out) + (first_token_ + t) * args_.channels + channel_;
    switch (args_.width) {
      case 2: return convolve_row<2>(taps, out);
      case 3: return convolve_row<3>(taps, out);
      case 4: return convolve_row<4>(taps, out);
      default: return convolve_row<0>(taps, out);
    }
  }

  // width: the number of taps, 0: args_.width.
  template <int width>
  void convolve_row(const T* const* taps, T* out) const {
    const int64_t count = width == 0 ? args_.width : width;
    auto value = [&](int64_t c, auto get) VLLM_LAMBDA {
      Floats sum = {};
      for (int64_t i = 0; i < count; ++i) sum = fma(get(taps[i] + c), load(weight_[i] + c), sum);
      return silu(sum + load(bias_ + c));
    };
    for_each_vector(
        n_,
        [&](int64_t c) VLLM_LAMBDA {
          store(out + c, value(c, [](const T* p) VLLM_LAMBDA { return load(p); }));
        },
        [&](int64_t c, int64_t m) VLLM_LAMBDA {
          Floats v = value(c, [m](const T* p) VLLM_LAMBDA { return load_first(p, m); });
          store_first(out + c, v, m);
        });
  }

  const ConvArgs& args_;
  const int64_t first_token_, tokens_, channel_, n_;
  float weight_[kMaxWidth][kChannels];
  float bias_[kChannels];
  T history_[kMaxWidth][kChannels];
};

template <class T>
Status run(const ConvArgs& args) {
  if (args.width < 1 || args.width > kMaxWidth) return kBadCall;
  if (!blocks_in_range(args.plan, args.state_blocks)) return kBadIndex;
  const int64_t blocks = (args.channels + kChannels - 1) / kChannels;
  const int64_t tokens = args.plan.query_start[args.plan.requests];
  const int64_t work = tokens * args.channels / kWidth * (args.width + 4);
  const int64_t threads = work < kSerialWork ? 1 : args.threads;
  parallel_for(threads, args.plan.requests * blocks, [&](int64_t i) {
    const int64_t request = i / blocks;
    if (args.plan.query_start[request + 1] == args.plan.query_start[request]) return;
    ConvTask<T>(args, request, i % blocks * kChannels).run(request);
  });
  return kOk;
}

}  // namespace

Status causal_conv1d(const ConvArgs& args) {
  return with_dtype(args.dtype, [&](auto type) { return run<decltype(type)>(args); });
}

}  // namespace VLLM_ISA
}  // namespace vllm
