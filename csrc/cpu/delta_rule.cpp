// The gated delta rule in chunks (chunk_task.h).
//
// With S the state [dk, dv] at the chunk's start, L_i the sum of the log decays of its
// tokens up to i, n_i and m_i the inverse norms of key and query (m_i with the scale):
//   w_i = n_i beta_i (v_i - n_i e^{L_i} S^T k_i - sum_{j<i} n_i e^{L_i-L_j} (k_i.k_j) w_j)
//   o_i =                   m_i e^{L_i} S^T q_i + sum_{j<=i} m_i e^{L_i-L_j} (q_i.k_j) w_j
// and, after the chunk's last token: S = e^L S + sum_j k_j (e^{L-L_j} w_j)^T.
//
// Pending are k_j, w_j and L_j of the tokens since the last whole chunk.
#include <cmath>

#include "chunk_task.h"

namespace vllm {
namespace {

struct DeltaRuleArgs : ChunkArgs {
  const void* qkv;
  int64_t qkv_stride;
  const void* a;
  int64_t a_stride;
  const void* b;
  int64_t b_stride;
  const void* a_log;  // [num_v_heads], as dt_bias
  int64_t a_log_dtype;
  const void* dt_bias;
  int64_t dt_bias_dtype;
  float beta_scale;
  Pending keys;            // [blocks, num_k_heads, kChunkTokens, dk]
  Pending updates;         // float [blocks, num_v_heads, kChunkTokens, dv]
  Pending decays;          // float [blocks, num_v_heads, kChunkTokens]
  float* decays_to_be = nullptr;  // [targets, num_v_heads, chunk], until all old ones are read
};

// Addresses of the inputs, the outputs and the pool.
template <class T>
struct Places {
  static constexpr int kChunk = kChunkOf<T>;
  const DeltaRuleArgs& args;

  const T* query(int64_t token, int64_t k_head) const {
    return static_cast<const T*>(args.qkv) + token * args.qkv_stride + k_head * args.dk;
  }
  const T* key(int64_t token, int64_t k_head) const {
    return query(token, args.num_k_heads + k_head);
  }
  const T* value(int64_t token, int64_t head) const {
    return query(token, 2 * args.num_k_heads) + head * args.dv;
  }
  T* pending_key(int64_t block, int64_t row, int64_t k_head) const {
    return static_cast<T*>(args.keys.data) + block * args.keys.block_stride +
           (k_head * kChunk + row) * args.dk;
  }
  float* pending_update(int64_t block, int64_t row, int64_t head) const {
    return static_cast<float*>(args.updates.data) + block * args.updates.block_stride +
           (head * kChunk + row) * args.dv;
  }
  float* pending_decays(int64_t block, int64_t head) const {
    return static_cast<float*>(args.decays.data) + block * args.decays.block_stride +
           head * kChunk;
  }
  const T* chunk_key(const Request& request, const Chunk& chunk, int64_t row,
                     int64_t k_head) const {
    return row < chunk.first ? pending_key(request.block, row, k_head)
                             : key(chunk.token_of(row), k_head);
  }
};

// Coefficients of a chunk's tokens for one v-head, the same for all columns.
template <int kChunk>
struct HeadCoefficients {
  static constexpr int kPadded = (kChunk + kWidth - 1) / kWidth * kWidth;
  float among_keys[kChunk][kPadded];  // -n_i e^{L_i-L_j} (k_i.k_j), j < i
  float with_query[kChunk][kPadded];  // m_i e^{L_i-L_j} (q_i.k_j), j <= i
  float recall[kPadded];              // n_i e^{L_i}
  float answer[kPadded];              // m_i e^{L_i}
  float gain[kPadded];                // n_i beta_i
  float log_decay[kPadded];           // L_i
  float to_end[kPadded];              // e^{L-L_j}; complete chunks only
  float total;                        // e^L; complete chunks only
};

template <class Math>
class DeltaRule {
 public:
  using Args = DeltaRuleArgs;
  using T = typename Math::Element;
  static constexpr int kAsked = 2;
  static constexpr int kChunk = kChunkOf<T>;
  using Rows = ChunkRows<Math, kAsked>;

  static int64_t cells(const Args& args) { return Rows::cells(args) + kChunk * kColumns; }

  DeltaRule(const Args& args, const Request& request, int64_t k_head, Cell* memory,
            Rows::Tiles& tiles)
      : args_(args), places_{args}, request_(request), k_head_(k_head),
        rows_(args, memory, tiles),
        updates_(reinterpret_cast<float*>(memory + Rows::cells(args))) {}

  const Rows& rows() const { return rows_; }

  void read(const Chunk& chunk) {
    rows_.read(
        chunk,
        [&](int64_t i) VLLM_LAMBDA { return places_.chunk_key(request_, chunk, i, k_head_); },
        [&](int64_t i) VLLM_LAMBDA { return places_.query(chunk.token_of(i), k_head_); });
    write_norms(chunk, rows_.keys(), 1.0f, key_norm_);
    write_norms(chunk, rows_.queries(), 1.0f / std::sqrt(float(args_.dk)), query_norm_);
    rows_.multiply(chunk);
  }

  void enter_head(const Chunk& chunk, int64_t head) {
    write_gates(chunk, head);
    for (int64_t i = chunk.first; i < chunk.end; ++i) {
      const Floats key_norm = splat(key_norm_[i]), query_norm = splat(query_norm_[i]);
      const Floats now = splat(by_.log_decay[i]);
      for (int64_t j = 0; j <= i; j += kWidth) {
        const Floats kept = exp(now - load(by_.log_decay + j));
        store(&by_.among_keys[i][j], -(kept * key_norm * load(rows_.with_keys(i) + j)));
        store(&by_.with_query[i][j], kept * query_norm * load(rows_.with_queries(i) + j));
      }
    }
    if (chunk.end < kChunk) return;
    const Floats last = splat(by_.log_decay[kChunk - 1]);
    for (int64_t j = 0; j < Rows::kPadded; j += kWidth) {
      store(by_.to_end + j, exp(last - load(by_.log_decay + j)));
    }
    by_.total = exp(last)[0];
  }

  void load_pending(const Chunk& chunk, const Columns& at) const {
    for (int64_t i = 0; i < chunk.first; ++i) {
      float* row = updates_ + i * kColumns;
      std::memset(row, 0, kColumns * sizeof(float));
      std::memcpy(row, places_.pending_update(request_.block, i, at.head) + at.column,
                  size_t(at.n) * sizeof(float));
    }
  }

  // Prefetches the next k-head's pending data, as far as it is like this one's, and the place for
  // its token.
  VLLM_INLINE void prefetch_pending(const Chunk& chunk, const Columns& at) const {
    if (kChunk == 1 || k_head_ + 1 == args_.num_k_heads) return;
    const int64_t head = at.head + args_.group();
    for (int64_t i = 0; i <= chunk.first; ++i) {
      const T* key = places_.pending_key(request_.block, i, k_head_ + 1);
      for (int64_t j = 0; j < args_.dk; j += 64 / sizeof(T)) __builtin_prefetch(key + j);
      const float* update = places_.pending_update(request_.block, i, head);
      for (int64_t j = 0; j < args_.dv; j += 16) __builtin_prefetch(update + j);
    }
    __builtin_prefetch(places_.pending_decays(request_.block, head));
  }

  void compute(const Chunk& chunk, const Columns& at, const float* answers, bool passes) {
    at_ = at, passes_ = passes;
    for (int64_t i = chunk.first; i < chunk.end; ++i) {
      compute_row(chunk, i, answers, answers + kChunk * kColumns);
      const int64_t later = chunk.token_of(i) + kChunk;
      if (later < request_.token + request_.tokens) prefetch(later);
    }
  }

  // w_j; for a token that passes, the pending ones are read from the pool.
  VLLM_INLINE const float* update(const Chunk& chunk, int64_t j) const {
    if (!passes_ || j >= chunk.first) return updates_ + j * kColumns;
    return places_.pending_update(request_.block, j, at_.head) + at_.column;
  }
  float to_end(int64_t j) const { return by_.to_end[j]; }
  float total() const { return by_.total; }

  void save_pending(int64_t target, int64_t block, int64_t begin, int64_t end,
                    const Columns& at) const {
    for (int64_t j = begin; j < end; ++j) {
      std::memcpy(places_.pending_update(block, j, at.head) + at.column, updates_ + j * kColumns,
                  size_t(at.n) * sizeof(float));
    }
    if (at.column > 0) return;
    std::memcpy(args_.decays_to_be + (target * args_.num_v_heads + at.head) * kChunk,
                by_.log_decay, kChunk * sizeof(float));
  }

 private:
  Floats sum_of_squares(const Cell* row) const {
    Floats sum = {};
    for (int64_t s = 0; s < rows_.stride(); s += kWidth) {
      const Floats cells = load_cells(row + s);
      sum = Math::step(cells, cells, sum);
    }
    return sum;
  }

  // Writes the inverse norms of this step's rows, times scale; lanes are summed in order.
  __attribute__((noinline)) void write_norms(const Chunk& chunk, const Cell* rows, float scale,
                                             float* norms) const {
    const bool alone = chunk.end - chunk.first == 1;
    if (alone) {
      float lanes[kWidth];
      store(lanes, sum_of_squares(rows + chunk.first * rows_.stride()));
      for (int lane = 1; lane < kWidth; ++lane) lanes[0] += lanes[lane];
      norms[chunk.first] = lanes[0];
    }
    for (int64_t i = chunk.first / kWidth * kWidth; i < chunk.end && !alone; i += kWidth) {
      Floats sums[kWidth] = {};
      for (int64_t r = 0; r < kWidth; ++r) {
        if (i + r < chunk.first || i + r >= chunk.end) continue;
        sums[r] = sum_of_squares(rows + (i + r) * rows_.stride());
      }
      transpose(sums);
      for (int lane = 1; lane < kWidth; ++lane) sums[0] = sums[0] + sums[lane];
      store(norms + i, sums[0]);
    }
    for (int64_t i = 0; i < Rows::kPadded; ++i) {
      const bool own = i >= chunk.first && i < chunk.end;
      norms[i] = own ? scale / std::sqrt(norms[i] + 1e-6f) : 0.0f;
    }
  }

  void write_gates(const Chunk& chunk, int64_t head) {
    float a[Rows::kPadded] = {}, b[Rows::kPadded] = {}, rates[Rows::kPadded];
    for (int64_t i = chunk.first; i < chunk.end; ++i) {
      const int64_t token = chunk.token_of(i);
      a[i] = to_float(static_cast<const T*>(args_.a)[token * args_.a_stride + head]);
      b[i] = to_float(static_cast<const T*>(args_.b)[token * args_.b_stride + head]);
    }
    const Floats speed = exp(splat(entry(args_.a_log, args_.a_log_dtype, head)));
    const Floats bias = splat(entry(args_.dt_bias, args_.dt_bias_dtype, head));
    for (int64_t i = 0; i < Rows::kPadded; i += kWidth) {
      // e^-110 is 0 in float32; a larger rate would only cost the sums digits.
      store(rates + i, min(splat(110.0f), speed * softplus(load(a + i) + bias)));
    }
    std::memset(by_.log_decay, 0, sizeof by_.log_decay);
    float sum = 0.0f;
    if (chunk.first > 0) {
      std::memcpy(by_.log_decay, places_.pending_decays(request_.block, head),
                  size_t(chunk.first) * sizeof(float));
      sum = by_.log_decay[chunk.first - 1];
    }
    for (int64_t i = chunk.first; i < chunk.end; ++i) by_.log_decay[i] = sum -= rates[i];
    for (int64_t i = 0; i < Rows::kPadded; i += kWidth) {
      const Floats kept = exp(load(by_.log_decay + i)), key_norm = load(key_norm_ + i);
      store(by_.recall + i, kept * key_norm);
      store(by_.answer + i, kept * load(query_norm_ + i));
      store(by_.gain + i, splat(args_.beta_scale) * sigmoid<float>(load(b + i)) * key_norm);
    }
  }

  void compute_row(const Chunk& chunk, int64_t i, const float* recalled, const float* answered) {
    const T* values = places_.value(chunk.token_of(i), at_.head) + at_.column;
    const Floats recall = splat(-by_.recall[i]), answer = splat(by_.answer[i]);
    Floats update[kVectors], out[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      const int64_t at = i * kColumns + v * kWidth, left = at_.n - v * kWidth;
      update[v] = fma(recall, load(recalled + at), load_up_to(values + v * kWidth, left));
      out[v] = answer * load(answered + at);
    }
    const float* pending = places_.pending_update(request_.block, 0, at_.head) + at_.column;
    const float* row = passes_ ? pending : updates_;
    const int64_t stride = passes_ ? args_.dv : kColumns;
    for (int64_t j = 0; kChunk > 1 && j < i; ++j, row += stride) {
      const Floats key = splat(by_.among_keys[i][j]), query = splat(by_.with_query[i][j]);
      for (int v = 0; v < kVectors; ++v) {
        const Floats w = load(row + v * kWidth);
        update[v] = fma(key, w, update[v]);
        out[v] = fma(query, w, out[v]);
      }
    }
    T* result = args_.template output<T>(chunk.token_of(i), at_.head) + at_.column;
    const Floats gain = splat(by_.gain[i]), own = splat(by_.with_query[i][i]);
    for (int v = 0; v < kVectors; ++v) {
      const int64_t left = at_.n - v * kWidth;
      const Floats w = gain * update[v];
      store(updates_ + i * kColumns + v * kWidth, w);
      const Floats o = fma(own, w, out[v]);
      if (left >= kWidth) {
        store(result + v * kWidth, o);
      } else if (left > 0) {
        store_first(result + v * kWidth, o, left);
      }
    }
  }

  // Prefetches a token of the next chunk: rows lie too far apart for hardware prefetching, and a
  // store that misses delays later ones.
  VLLM_INLINE void prefetch(int64_t token) const {
    constexpr int64_t kLine = 64 / int64_t(sizeof(T));
    if (at_.column == 0) {
      const T *q = places_.query(token, k_head_), *k = places_.key(token, k_head_);
      for (int64_t i = 0; i < args_.dk; i += kLine) {
        __builtin_prefetch(q + i);
        __builtin_prefetch(k + i);
      }
      __builtin_prefetch(static_cast<const T*>(args_.a) + token * args_.a_stride + at_.head);
      __builtin_prefetch(static_cast<const T*>(args_.b) + token * args_.b_stride + at_.head);
    }
    const T* v = places_.value(token, at_.head) + at_.column;
    T* out = args_.template output<T>(token, at_.head) + at_.column;
    for (int64_t i = 0; i < at_.n; i += kLine) {
      __builtin_prefetch(v + i);
      __builtin_prefetch(out + i, 1);
    }
  }

  const Args& args_;
  const Places<T> places_;
  const Request& request_;
  const int64_t k_head_;
  Rows rows_;
  HeadCoefficients<kChunk> by_;
  float key_norm_[Rows::kPadded], query_norm_[Rows::kPadded];
  float* updates_;
  Columns at_{-1, 0, 0};
  bool passes_ = false;
};

// Saves the data of incomplete chunks that tasks share to the pool.
template <class T>
void save_keys_and_decays(const DeltaRuleArgs& args, const Request& request) {
  constexpr int kChunk = kChunkOf<T>;
  const Places<T> places{args};
  for_each_pending(args, request, kChunk, [&](int64_t target, int64_t block, const Chunk& chunk,
                                              int64_t first, int64_t end) VLLM_LAMBDA {
    for (int64_t j = first; j < end; ++j) {
      for (int64_t h = 0; h < args.num_k_heads; ++h) {
        std::memcpy(places.pending_key(block, j, h), places.chunk_key(request, chunk, j, h),
                    size_t(args.dk) * sizeof(T));
      }
    }
    const float* rows = args.decays_to_be + target * args.num_v_heads * kChunk;
    for (int64_t h = 0; h < args.num_v_heads; ++h) {
      std::memcpy(places.pending_decays(block, h), rows + h * kChunk,
                  size_t(end) * sizeof(float));
    }
  });
}

template <class Math>
Status run(DeltaRuleArgs args) {
  using T = typename Math::Element;
  const StatePlanArgs& plan = args.plan;
  if (!plan.blocks_in_range(args.state_blocks)) return kBadIndex;
  const int64_t targets =
      plan.requests + plan.snapshot_start[plan.requests] - plan.snapshot_start[0];
  static thread_local Scratch scratch;
  args.decays_to_be = static_cast<float*>(scratch.reserve(
      targets * args.num_v_heads * kChunkOf<T> * int64_t(sizeof(float))));
  if (args.decays_to_be == nullptr) return kOutOfMemory;
  return run_chunks<Math, DeltaRule<Math>>(
      args, [&](const Request& request) { save_keys_and_decays<T>(args, request); });
}

void gated_delta_rule(const Tensor& qkv, const Tensor& a, const Tensor& b, const Tensor& a_log,
                      const Tensor& dt_bias, int64_t num_k_heads, double beta_scale,
                      const Tensor& query_start, const Tensor& seq_lens, const Tensor& block_ids,
                      const Tensor& has_state, const Tensor& snapshot_start,
                      const Tensor& snapshot_tokens, const Tensor& snapshot_blocks,
                      const MaybeTensor& is_final, const Tensor& state_cache,
                      const std::vector<Tensor>& pending, const Tensor& out) {
  const StatePlanArgs plan(query_start, block_ids, has_state, snapshot_start, snapshot_tokens,
                           snapshot_blocks, is_final);
  const DeltaRuleArgs args{{qkv, num_k_heads, state_cache, seq_lens, plan, out},
                           qkv.data_ptr(),
                           qkv.stride(0),
                           a.data_ptr(),
                           a.stride(0),
                           b.data_ptr(),
                           b.stride(0),
                           a_log.data_ptr(),
                           dtype_of(a_log),
                           dt_bias.data_ptr(),
                           dtype_of(dt_bias),
                           float(beta_scale),
                           pending_view(pending, 0),
                           pending_view(pending, 1),
                           pending_view(pending, 2)};
  check(with_tile_math(args.dtype, [&](auto math) { return run<decltype(math)>(args); }),
        "gated_delta_rule");
}

}  // namespace

VLLM_OPERATION(gated_delta_rule)

}  // namespace vllm
