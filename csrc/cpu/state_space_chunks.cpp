// The recurrence of Mamba-2 in chunks (chunk_task.h).
//
// With S the state at the chunk's start, s_i the step and L_i the sum of the log decays of its
// tokens up to i:
//   y_i = e^{L_i} S^T C_i + sum_{j<=i} e^{L_i-L_j} (C_i.B_j) s_j x_j + D x_i
// and, after the chunk's last token: S = e^L S + sum_j B_j (e^{L-L_j} s_j x_j)^T.
//
// Pending are the inputs x, B and dt of the tokens since the last whole chunk.
#include "chunk_task.h"
#include "state_space.h"

namespace vllm {
namespace {

template <class Math>
class StateSpaceRule {
 public:
  using Args = StateSpaceArgs;
  using T = typename Math::Element;
  static constexpr int kAsked = 1;
  static constexpr int kChunk = kChunkOf<T>;
  using Rows = ChunkRows<Math, kAsked>;
  static constexpr int kPadded = Rows::kPadded;

  static int64_t cells(const Args& args) { return Rows::cells(args) + kChunk * kColumns; }

  StateSpaceRule(const Args& args, const Request& request, int64_t group, Cell* memory,
                 Rows::Tiles& tiles)
      : args_(args), request_(request), group_(group), rows_(args, memory, tiles),
        values_(reinterpret_cast<float*>(memory + Rows::cells(args))) {}

  const Rows& rows() const { return rows_; }

  void read(const Chunk& chunk) {
    rows_.read(
        chunk, [&](int64_t i) VLLM_LAMBDA { return row(chunk, i) + args_.b_of(group_); },
        [&](int64_t i) VLLM_LAMBDA { return row(chunk, i) + args_.c_of(group_); });
    rows_.multiply(chunk);
  }

  void enter_head(const Chunk& chunk, int64_t head) {
    write_decays(chunk, head);
    for (int64_t i = chunk.first; i < chunk.end; ++i) {
      const Floats now = splat(log_decay_[i]);
      for (int64_t j = 0; j <= i; j += kWidth) {
        const Floats kept = exp(now - load(log_decay_ + j)) * load(steps_ + j);
        store(&with_query_[i][j], kept * load(rows_.with_queries(i) + j));
      }
      with_query_[i][i] += args_.d[head];
    }
    if (chunk.end < kChunk) return;
    const Floats last = splat(log_decay_[kChunk - 1]);
    for (int64_t j = 0; j < kPadded; j += kWidth) {
      store(to_end_ + j, exp(last - load(log_decay_ + j)) * load(steps_ + j));
    }
    total_ = exp(last)[0];
  }

  void load_pending(const Chunk&, const Columns&) const {}

  // Prefetches the next group's pending data, as far as it is like this one's.
  VLLM_INLINE void prefetch_pending(const Chunk& chunk, const Columns& at) const {
    if (at.head + 1 == args_.num_v_heads) return;
    for (int64_t i = 0; i < chunk.first; ++i) {
      const T* next = args_.template pending_row<T>(request_.block, i) + args_.x_of(at.head + 1);
      for (int64_t j = 0; j < args_.dv; j += kLine) __builtin_prefetch(next + j);
    }
  }

  void compute(const Chunk& chunk, const Columns& at, const float* answers, bool) {
    for (int64_t i = 0; i < chunk.end; ++i) {
      const T* values = row(chunk, i) + args_.x_of(at.head) + at.column;
      for (int64_t v = 0; v < kColumns; v += kWidth) {
        store(values_ + i * kColumns + v, load_up_to(values + v, at.n - v));
      }
    }
    for (int64_t i = chunk.first; i < chunk.end; ++i) {
      compute_row(chunk, i, at, answers + i * kColumns);
      const int64_t later = chunk.token_of(i) + kChunk;
      if (later < request_.token + request_.tokens) prefetch(later, at);
    }
  }

  VLLM_INLINE const float* update(const Chunk&, int64_t j) const { return values_ + j * kColumns; }
  float to_end(int64_t j) const { return to_end_[j]; }
  float total() const { return total_; }

  void save_pending(int64_t, int64_t, int64_t, int64_t, const Columns&) const {}

 private:
  static constexpr int64_t kLine = 64 / int64_t(sizeof(T));

  // x and B of any row of the chunk; C of this step's.
  VLLM_INLINE const T* row(const Chunk& chunk, int64_t i) const {
    return i < chunk.first ? args_.template pending_row<T>(request_.block, i)
                           : args_.template row<T>(chunk.token_of(i));
  }

  void write_decays(const Chunk& chunk, int64_t head) {
    float times[kPadded] = {};
    for (int64_t i = 0; i < chunk.end; ++i) {
      times[i] = to_float(i < chunk.first ? args_.template pending_step<T>(request_.block, i)[head]
                                          : args_.template step<T>(chunk.token_of(i))[head]);
    }
    const Floats speed = exp(splat(args_.a_log[head]));
    for (int64_t i = 0; i < kPadded; i += kWidth) {
      const Floats step = args_.limited_step(load(times + i), head);
      store(steps_ + i, step);
      // e^-110 is 0 in float32; a larger rate would only cost the sums digits.
      store(log_decay_ + i, min(splat(110.0f), speed * step));
    }
    float sum = 0.0f;
    for (int64_t i = 0; i < kPadded; ++i) log_decay_[i] = sum -= log_decay_[i];
    for (int64_t i = 0; i < kPadded; i += kWidth) store(answer_ + i, exp(load(log_decay_ + i)));
  }

  void compute_row(const Chunk& chunk, int64_t i, const Columns& at, const float* answers) const {
    const Floats answer = splat(answer_[i]);
    Floats out[kVectors];
    for (int v = 0; v < kVectors; ++v) out[v] = answer * load(answers + v * kWidth);
    const float* values = values_;
    for (int64_t j = 0; j <= i; ++j, values += kColumns) {
      const Floats query = splat(with_query_[i][j]);
      for (int v = 0; v < kVectors; ++v) out[v] = fma(query, load(values + v * kWidth), out[v]);
    }
    T* result = args_.template output<T>(chunk.token_of(i), at.head) + at.column;
    for (int v = 0; v < kVectors; ++v) {
      const int64_t left = at.n - v * kWidth;
      if (left >= kWidth) {
        store(result + v * kWidth, out[v]);
      } else if (left > 0) {
        store_first(result + v * kWidth, out[v], left);
      }
    }
  }

  // Prefetches a token of the next chunk: rows are pages apart, so the hardware does not.
  VLLM_INLINE void prefetch(int64_t token, const Columns& at) const {
    const T* row = args_.template row<T>(token);
    if (at.column == 0 && at.head % args_.group() == 0) {
      for (int64_t i = 0; i < args_.dk; i += kLine) {
        __builtin_prefetch(row + args_.b_of(group_) + i);
        __builtin_prefetch(row + args_.c_of(group_) + i);
      }
    }
    if (at.column == 0) __builtin_prefetch(args_.template step<T>(token) + at.head);
    const T* x = row + args_.x_of(at.head) + at.column;
    T* out = args_.template output<T>(token, at.head) + at.column;
    for (int64_t i = 0; i < at.n; i += kLine) {
      __builtin_prefetch(x + i);
      __builtin_prefetch(out + i, 1);
    }
  }

  const Args& args_;
  const Request& request_;
  const int64_t group_;
  Rows rows_;
  float* values_;  // x, [kChunk, kColumns]
  float steps_[kPadded], log_decay_[kPadded], answer_[kPadded], to_end_[kPadded], total_ = 0.0f;
  float with_query_[kChunk][kPadded];  // e^{L_i-L_j} (C_i.B_j) s_j, j <= i, with D where j = i
};

// Saves the inputs of incomplete chunks to the pool.
template <class T>
void save_inputs(const StateSpaceArgs& args, const Request& request) {
  for_each_pending(args, request, kChunkOf<T>, [&](int64_t, int64_t block, const Chunk& chunk,
                                                   int64_t first, int64_t end) VLLM_LAMBDA {
    for (int64_t i = first; i < end; ++i) {
      const bool kept = i < chunk.first;
      const int64_t token = chunk.token_of(i);
      const T* row = kept ? args.pending_row<T>(request.block, i) : args.row<T>(token);
      const T* step = kept ? args.pending_step<T>(request.block, i) : args.step<T>(token);
      std::memcpy(args.pending_row<T>(block, i), row, size_t(args.kept_columns()) * sizeof(T));
      std::memcpy(args.pending_step<T>(block, i), step, size_t(args.num_v_heads) * sizeof(T));
    }
  });
}

}  // namespace

Status scan_chunks(const StateSpaceArgs& args) {
  return with_tile_math(args.dtype, [&](auto math) -> Status {
    using Math = decltype(math);
    using T = typename Math::Element;
    if constexpr (Math::kPerCell == 1) {
      return kBadDtype;  // measured: token by token is faster, above all when decoding
    } else {
      return run_chunks<Math, StateSpaceRule<Math>>(
          args, [&](const Request& request) { save_inputs<T>(args, request); });
    }
  });
}

}  // namespace vllm
