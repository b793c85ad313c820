// Mamba's selective scan, token by token, and the gate after it.
//
// A task is up to kMaxChannels channels of one group and some requests, whose tokens it walks;
// lanes are channels. Every element of a state, and every output, has one chain of operations that
// only its own request's tokens enter, so no value depends on where steps end.
#include "state_plan.h"
#include "vec_math.h"

namespace vllm {
namespace {

struct ScanRows {
  const void* data;
  int64_t stride;
  explicit ScanRows(const Tensor& x) : data(x.data_ptr()), stride(x.stride(0)) {}
};

struct ScanArgs {
  int64_t threads, channels, groups, state_size;
  ScanRows x, step, gate;  // [tokens, channels]
  ScanRows b, c;           // [tokens, groups, state_size]
  int64_t b_group_stride, c_group_stride;
  const float *rates, *step_bias, *skip;  // [state_size, channels], [channels], [channels]
  float* state;                           // [blocks, state_size, channels]
  int64_t state_blocks, state_block_stride, state_row_stride;
  StatePlanArgs plan;
  void* out;
  int64_t out_stride;

  int64_t group_channels() const { return channels / groups; }
};

constexpr int64_t kMaxChannels = 64;

template <class T>
class ScanTask {
 public:
  static int64_t floats(const ScanArgs& args) {
    return 2 * args.state_size * kMaxChannels + 2 * round_up(args.state_size, kWidth) +
           2 * kMaxChannels;
  }

  ScanTask(const ScanArgs& args, int64_t group, int64_t first, float* memory)
      : args_(args), group_(group), channel_(group * args.group_channels() + first),
        n_(args.group_channels() - first < kMaxChannels ? args.group_channels() - first
                                                        : kMaxChannels) {
    states_ = memory;
    rates_ = states_ + args.state_size * kMaxChannels;
    keys_ = rates_ + args.state_size * kMaxChannels;
    queries_ = keys_ + round_up(args.state_size, kWidth);
    step_bias_ = queries_ + round_up(args.state_size, kWidth);
    skip_ = step_bias_ + kMaxChannels;
    for (int64_t i = 0; i < args.state_size; ++i) {
      copy(rates_ + i * kMaxChannels, args.rates + i * args.channels + channel_);
    }
    copy(step_bias_, args.step_bias + channel_);
    copy(skip_, args.skip + channel_);
  }

  void run(int64_t request) {
    const StatePlanArgs& plan = args_.plan;
    const int64_t begin = plan.query_start[request], end = plan.query_start[request + 1];
    if (begin == end) return;
    load_state(request);
    walk_tokens(
        plan, request, [&](int64_t token) VLLM_LAMBDA { advance(token, token + 1 < end ? 1 : 0); },
        [&](int64_t block) VLLM_LAMBDA { save_state(block); });
  }

 private:
  // Lanes without a channel are zeros.
  void copy(float* to, const float* from) const {
    std::memcpy(to, from, size_t(n_) * sizeof(float));
    std::memset(to + n_, 0, size_t(kMaxChannels - n_) * sizeof(float));
  }

  float* state_row(int64_t block, int64_t i) const {
    return args_.state + block * args_.state_block_stride + i * args_.state_row_stride + channel_;
  }

  void load_state(int64_t request) {
    if (!args_.plan.has_state[request]) {
      std::memset(states_, 0, size_t(args_.state_size * kMaxChannels) * sizeof(float));
      return;
    }
    for (int64_t i = 0; i < args_.state_size; ++i) {
      copy(states_ + i * kMaxChannels, state_row(args_.plan.block_ids[request], i));
    }
  }

  void save_state(int64_t block) const {
    for (int64_t i = 0; i < args_.state_size; ++i) {
      std::memcpy(state_row(block, i), states_ + i * kMaxChannels, size_t(n_) * sizeof(float));
    }
  }

  const T* row(const ScanRows& rows, int64_t token) const {
    return static_cast<const T*>(rows.data) + token * rows.stride + channel_;
  }

  void load_floats(const ScanRows& rows, int64_t group_stride, int64_t token, float* out) const {
    const T* from = static_cast<const T*>(rows.data) + token * rows.stride + group_ * group_stride;
    for_each_vector(
        args_.state_size, [&](int64_t i) VLLM_LAMBDA { store(out + i, load(from + i)); },
        [&](int64_t i, int64_t m) VLLM_LAMBDA { store(out + i, load_first(from + i, m)); });
  }

  // ahead: whether there is a next token, whose rows are prefetched.
  void advance(int64_t token, int64_t ahead) {
    load_floats(args_.b, args_.b_group_stride, token, keys_);
    load_floats(args_.c, args_.c_group_stride, token, queries_);
    const T *x = row(args_.x, token), *step = row(args_.step, token),
            *gate = row(args_.gate, token);
    T* out = static_cast<T*>(args_.out) + token * args_.out_stride + channel_;
    for_each_vector(
        n_,
        [&](int64_t i) VLLM_LAMBDA {
          prefetch(x + ahead * args_.x.stride, i);
          prefetch(step + ahead * args_.step.stride, i);
          prefetch(gate + ahead * args_.gate.stride, i);
          store(out + i, compute(i, load(x + i), load(step + i), load(gate + i)));
        },
        [&](int64_t i, int64_t m) VLLM_LAMBDA {
          store_first(out + i,
                      compute(i, load_first(x + i, m), load_first(step + i, m),
                              load_first(gate + i, m)),
                      m);
        });
  }

  // Advances the state of channels [i, i + kWidth) by one token, and returns their output.
  VLLM_INLINE Floats compute(int64_t i, Floats x, Floats step, Floats gate) {
    const Floats delta = softplus(step + load(step_bias_ + i));
    const Floats exponent = delta * splat(1.44269504f), input = delta * x;
    Floats sum = load(skip_ + i) * x;
    for (int64_t j = 0; j < args_.state_size; ++j) {
      float* state = states_ + j * kMaxChannels + i;
      const Floats decay = exp2(exponent * load(rates_ + j * kMaxChannels + i));
      const Floats next = fma(decay, load(state), splat(keys_[j]) * input);
      store(state, next);
      sum = fma(splat(queries_[j]), next, sum);
    }
    return sum * silu<T>(gate);
  }

  const ScanArgs& args_;
  const int64_t group_, channel_, n_;
  float *states_, *rates_, *keys_, *queries_, *step_bias_, *skip_;
};

template <class T>
Status run(const ScanArgs& args) {
  if (!args.plan.blocks_in_range(args.state_blocks)) return kBadIndex;
  const int64_t requests = args.plan.requests;
  const int64_t per_group = (args.group_channels() + kMaxChannels - 1) / kMaxChannels;
  const int64_t blocks = args.groups * per_group;
  // Requests are cut only until every thread gets two tasks.
  int64_t parts = (2 * args.threads + blocks - 1) / blocks;
  if (parts > requests) parts = requests;
  const int64_t tokens = args.plan.query_start[requests];
  const int64_t work = tokens * args.channels / kWidth * (args.state_size * 16 + 40);
  const int64_t threads = work < kSerialWork ? 1 : args.threads;
  SharedStatus status;
  parallel_for(threads, parts * blocks, [&](int64_t i) {
    const WithoutSubnormals zeros;
    static thread_local Scratch scratch;
    auto* memory = static_cast<float*>(
        scratch.reserve(ScanTask<T>::floats(args) * int64_t(sizeof(float))));
    if (memory == nullptr) return status.fail(kOutOfMemory);
    const int64_t block = i % blocks, part = i / blocks;
    ScanTask<T> task(args, block / per_group, block % per_group * kMaxChannels, memory);
    const int64_t end = requests * (part + 1) / parts;
    for (int64_t r = requests * part / parts; r < end; ++r) task.run(r);
  });
  return Status(status.value);
}

void selective_scan(const Tensor& x, const Tensor& step, const Tensor& b, const Tensor& c,
                    const Tensor& gate, const Tensor& rates, const Tensor& step_bias,
                    const Tensor& skip, const Tensor& query_start, const Tensor& /*seq_lens*/,
                    const Tensor& block_ids, const Tensor& has_state, const Tensor& snapshot_start,
                    const Tensor& snapshot_tokens, const Tensor& snapshot_blocks,
                    const MaybeTensor& is_final, const Tensor& state_cache, const Tensor& out) {
  const ScanArgs args{num_threads(),
                      x.size(1),
                      b.size(1),
                      rates.size(0),
                      ScanRows(x),
                      ScanRows(step),
                      ScanRows(gate),
                      ScanRows(b),
                      ScanRows(c),
                      b.stride(1),
                      c.stride(1),
                      data_of<const float>(rates),
                      data_of<const float>(step_bias),
                      data_of<const float>(skip),
                      data_of<float>(state_cache),
                      state_cache.size(0),
                      state_cache.stride(0),
                      state_cache.stride(1),
                      StatePlanArgs(query_start, block_ids, has_state, snapshot_start,
                                    snapshot_tokens, snapshot_blocks, is_final),
                      out.data_ptr(),
                      out.stride(0)};
  check(with_dtype(dtype_of(x), [&](auto type) { return run<decltype(type)>(args); }),
        "selective_scan");
}

}  // namespace

VLLM_OPERATION(selective_scan)

}  // namespace vllm
