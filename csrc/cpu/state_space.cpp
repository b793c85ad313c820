// The recurrence of Mamba-2, token by token: y = D x + sum over n of C_n S_n, n ascending.
//
// A state is stored as [state_size, head_dim], so that vectors run over head_dim and B and C are
// broadcast. A tile of it stays in registers for up to kPiece tokens. Every element has one chain
// of operations from token to token, so no value depends on where steps and pieces end, and a
// request that continues needs only its state.
//
// A task is one request and some heads of one group, for which B and C are widened once.
#include "state_space.h"

namespace vllm {
namespace {

constexpr int64_t kPiece = 16;      // tokens; a multiple of kWidth
constexpr int64_t kMostHeads = 4;   // most heads of a task
constexpr int kTileRows = 4;        // rows of the state
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int kTileVectors = 2;     // 16 registers
#else
constexpr int kTileVectors = 4;     // 32
#endif

// Rows of a state, or their target; null: zeros, or no target.
struct Place {
  float* data;
  int64_t stride;

  Place from(int64_t row, int64_t column) const {
    return {data == nullptr ? nullptr : data + row * stride + column, stride};
  }
};

// The inputs and outputs of a piece of tokens for one head.
struct Piece {
  int64_t tokens, state_size, padded;
  const float *b, *c;    // [tokens, state_size]
  const float* decay;    // [tokens]
  const float* updates;  // dt x, [tokens, padded]
  float* sums;           // y, [tokens, padded]
};

// Advances rows [row, row + rows) of the state, `vectors` vectors of them from `column` on.
template <int rows, int vectors>
void advance_tile(const Piece& piece, int64_t row, int64_t column, Place source, Place target) {
  Floats state[rows][vectors];
#pragma GCC unroll 4
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) {
      state[r][v] = source.data == nullptr
                        ? Floats{}
                        : load(source.data + r * source.stride + v * kWidth);
    }
  }
  const float *b = piece.b + row, *c = piece.c + row;
  const float* updates = piece.updates + column;
  float* sums = piece.sums + column;
  for (int64_t t = 0; t < piece.tokens; ++t) {
    const Floats decay = splat(piece.decay[t]);
    Floats update[vectors], sum[vectors];
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) {
      update[v] = load(updates + v * kWidth);
      sum[v] = load(sums + v * kWidth);
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r) {
      const Floats in = splat(b[r]), out = splat(c[r]);
#pragma GCC unroll 4
      for (int v = 0; v < vectors; ++v) {
        state[r][v] = fma(in, update[v], state[r][v] * decay);
        sum[v] = fma(out, state[r][v], sum[v]);
      }
    }
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) store(sums + v * kWidth, sum[v]);
    b += piece.state_size, c += piece.state_size;
    updates += piece.padded, sums += piece.padded;
  }
  if (target.data == nullptr) return;
#pragma GCC unroll 4
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) {
      store(target.data + r * target.stride + v * kWidth, state[r][v]);
    }
  }
}

template <int vectors>
void advance_columns(const Piece& piece, int64_t column, Place source, Place target) {
  int64_t row = 0;
  for (; row + kTileRows <= piece.state_size; row += kTileRows) {
    advance_tile<kTileRows, vectors>(piece, row, column, source.from(row, column),
                                     target.from(row, column));
  }
  for (; row < piece.state_size; ++row) {
    advance_tile<1, vectors>(piece, row, column, source.from(row, column),
                             target.from(row, column));
  }
}

void advance(const Piece& piece, Place source, Place target) {
  int64_t column = 0;
  for (; column + kTileVectors * kWidth <= piece.padded; column += kTileVectors * kWidth) {
    advance_columns<kTileVectors>(piece, column, source, target);
  }
  for (; column < piece.padded; column += kWidth) {
    advance_columns<1>(piece, column, source, target);
  }
}

template <class T>
class ScanTask {
 public:
  static int64_t floats(const StateSpaceArgs& args, int64_t heads) {
    return 2 * kPiece * args.dk + 2 * kPiece * round_up(args.dv, kWidth) + 2 * kPiece +
           heads * args.dk * round_up(args.dv, kWidth);
  }

  // Heads [first, first + heads), all of one group.
  ScanTask(const StateSpaceArgs& args, int64_t request, int64_t first, int64_t heads, float* memory)
      : args_(args), request_(request), first_(first), heads_(heads),
        begin_(args.plan.query_start[request]),
        tokens_(args.plan.query_start[request + 1] - begin_), padded_(round_up(args.dv, kWidth)),
        is_whole_(padded_ == args.dv) {
    updates_ = memory;
    sums_ = updates_ + kPiece * padded_;
    b_ = sums_ + kPiece * padded_;
    c_ = b_ + kPiece * args.dk;
    dt_ = c_ + kPiece * args.dk;
    decay_ = dt_ + kPiece;
    states_ = decay_ + kPiece;
  }

  void run() {
    int snapshot = args_.plan.snapshot_start[request_];
    const int end = args_.plan.snapshot_start[request_ + 1];
    for (int64_t t = 0; t < tokens_;) {
      int64_t next = t + kPiece < tokens_ ? t + kPiece : tokens_;
      if (snapshot < end && args_.plan.snapshot_tokens[snapshot] < next) {
        next = args_.plan.snapshot_tokens[snapshot];
      }
      widen_inputs(t, next - t);
      const int first_snapshot = snapshot;
      while (snapshot < end && args_.plan.snapshot_tokens[snapshot] == next) ++snapshot;
      for (int64_t h = 0; h < heads_; ++h) {
        const Place target = place_after(h, next, snapshot > first_snapshot);
        const Place source = place_before(h, t);
        read_head(first_ + h, t, next - t);
        prefetch_next(h, t, next);
        advance({next - t, args_.dk, padded_, b_, c_, decay_, updates_, sums_}, source,
                target);
        write_rows(first_ + h, t, next - t);
        for (int i = first_snapshot; i < snapshot; ++i) {
          save(target, h, args_.plan.snapshot_blocks[i]);
        }
        const bool ends = next == tokens_ && args_.plan.keeps_state(request_);
        if (ends && target.data != pool(h, own_block())) save(target, h, own_block());
      }
      t = next;
    }
  }

 private:
  int64_t own_block() const { return args_.plan.block_ids[request_]; }
  float* pool(int64_t h, int64_t block) const {
    return args_.state_of(block, first_ + h);
  }
  Place scratch(int64_t h) const {
    return {states_ + h * args_.dk * padded_, padded_};
  }

  // The state before token t; a copy of it if its rows do not fill vectors.
  Place place_before(int64_t h, int64_t t) const {
    if (t > 0) return scratch(h);
    if (!args_.plan.has_state[request_]) return {nullptr, 0};
    const float* kept = pool(h, own_block());
    if (is_whole_) return {const_cast<float*>(kept), args_.dv};
    const Place copy = scratch(h);
    for (int64_t n = 0; n < args_.dk; ++n) {
      for (int64_t i = 0; i < padded_; i += kWidth) {
        store(copy.data + n * padded_ + i,
              load_up_to(kept + n * args_.dv + i, args_.dv - i));
      }
    }
    return copy;
  }

  // The place for the state before token t.
  Place place_after(int64_t h, int64_t t, bool is_snapshot) const {
    if (t < tokens_ || is_snapshot || !is_whole_) {
      const bool is_read = t < tokens_ || is_snapshot || args_.plan.keeps_state(request_);
      return is_read ? scratch(h) : Place{nullptr, 0};
    }
    return {args_.plan.keeps_state(request_) ? pool(h, own_block()) : nullptr, args_.dv};
  }

  void save(Place state, int64_t h, int64_t block) const {
    float* kept = pool(h, block);
    for (int64_t n = 0; n < args_.dk; ++n) {
      std::memcpy(kept + n * args_.dv, state.data + n * state.stride,
                  size_t(args_.dv) * sizeof(float));
    }
  }

  const T* row(int64_t t) const {
    return args_.template row<T>(begin_ + t);
  }

  // B and C of the group.
  void widen_inputs(int64_t first, int64_t count) const {
    const int64_t n = args_.dk, group = first_ / args_.group();
    for (int64_t t = 0; t < count; ++t) {
      to_floats(row(first + t) + args_.b_of(group), b_ + t * n, n);
      to_floats(row(first + t) + args_.c_of(group), c_ + t * n, n);
    }
  }

  static void to_floats(const T* in, float* out, int64_t n) {
    for_each_vector(
        n, [&](int64_t i) VLLM_LAMBDA { store(out + i, load(in + i)); },
        [&](int64_t i, int64_t m) VLLM_LAMBDA { store_first(out + i, load_first(in + i, m), m); });
  }

  void read_head(int64_t head, int64_t first, int64_t count) const {
    for (int64_t t = 0; t < kPiece; ++t) {
      dt_[t] = t < count ? to_float(args_.template step<T>(begin_ + first + t)[head]) : 0.0f;
    }
    const Floats rate = -exp(splat(args_.a_log[head]));
    for (int64_t t = 0; t < count; t += kWidth) {
      const Floats step = args_.limited_step(load(dt_ + t), head);
      store(dt_ + t, step);
      store(decay_ + t, exp(step * rate));
    }
    const Floats skip = splat(args_.d[head]);
    for (int64_t t = 0; t < count; ++t) {
      const T* x = row(first + t) + args_.x_of(head);
      const Floats scale = splat(dt_[t]);
      for (int64_t i = 0; i < padded_; i += kWidth) {
        const Floats values = load_up_to(x + i, args_.dv - i);
        store(updates_ + t * padded_ + i, values * scale);
        store(sums_ + t * padded_ + i, values * skip);
      }
    }
  }

  // Prefetches the rows that head h writes next, and what is read after that: the next head's x, or
  // the next piece's inputs. Rows are pages apart, so the hardware does not prefetch them.
  VLLM_INLINE void prefetch_next(int64_t h, int64_t t, int64_t next) const {
    const int64_t size = args_.dv, n = args_.dk, head = first_ + h, group = head / args_.group();
    for (int64_t i = t; i < next; ++i) ask<1>(out_row(head, i), size);
    if (h + 1 < heads_) {
      for (int64_t i = t; i < next; ++i) ask<0>(row(i) + args_.x_of(head + 1), size);
      return;
    }
    const int64_t end = next + kPiece < tokens_ ? next + kPiece : tokens_;
    for (int64_t i = next; i < end; ++i) {
      ask<0>(row(i) + args_.x_of(first_), size);
      ask<0>(row(i) + args_.b_of(group), n);
      ask<0>(row(i) + args_.c_of(group), n);
      ask<0>(args_.template step<T>(begin_ + i) + first_, 1);
    }
  }

  template <int writes>
  VLLM_INLINE static void ask(const T* values, int64_t count) {
    for (int64_t i = 0; i < count; i += 64 / int64_t(sizeof(T))) {
      __builtin_prefetch(values + i, writes, 3);
    }
  }

  T* out_row(int64_t head, int64_t t) const {
    return args_.template output<T>(begin_ + t, head);
  }

  void write_rows(int64_t head, int64_t first, int64_t count) const {
    for (int64_t t = 0; t < count; ++t) {
      T* out = out_row(head, first + t);
      const float* sums = sums_ + t * padded_;
      for_each_vector(
          args_.dv,
          [&](int64_t i) VLLM_LAMBDA { store(out + i, load(sums + i)); },
          [&](int64_t i, int64_t m) VLLM_LAMBDA { store_first(out + i, load(sums + i), m); });
    }
  }

  const StateSpaceArgs& args_;
  const int64_t request_, first_, heads_, begin_, tokens_, padded_;
  const bool is_whole_;
  float *updates_, *sums_, *b_, *c_, *dt_, *decay_, *states_;
};

template <class T>
Status walk(const StateSpaceArgs& args) {
  const int64_t per_group = args.group();
  const int64_t heads = per_group < kMostHeads ? per_group : kMostHeads;
  const int64_t blocks = (per_group + heads - 1) / heads;  // per group
  const int64_t tasks = args.num_k_heads * blocks;              // per request
  const int64_t work = 3 * args.tokens * args.num_v_heads * args.dk * round_up(args.dv, kWidth) / kWidth;
  SharedStatus status;
  parallel_runs(work < kSerialWork ? 1 : args.threads, args.plan.requests * tasks, [&](int64_t i) {
    const WithoutSubnormals zeros;
    static thread_local Scratch scratch;
    void* memory = scratch.reserve(ScanTask<T>::floats(args, heads) * int64_t(sizeof(float)));
    if (memory == nullptr) return status.fail(kOutOfMemory);
    const int64_t group = i % tasks / blocks, offset = i % blocks * heads;
    const int64_t count = per_group - offset < heads ? per_group - offset : heads;
    ScanTask<T>(args, i / tasks, group * per_group + offset, count, static_cast<float*>(memory))
        .run();
  });
  return Status(status.value);
}

Status run(const StateSpaceArgs& args) {
  if (!args.plan.blocks_in_range(args.state_blocks)) return kBadIndex;
  if (args.rows.data != nullptr) return scan_chunks(args);
  return with_dtype(args.dtype, [&](auto type) { return walk<decltype(type)>(args); });
}

void state_space_scan(const Tensor& xbc, const Tensor& dt, const Tensor& a_log,
                      const Tensor& dt_bias, const Tensor& d, int64_t num_groups, double dt_min,
                      double dt_max, const Tensor& query_start, const Tensor& seq_lens,
                      const Tensor& block_ids, const Tensor& has_state,
                      const Tensor& snapshot_start, const Tensor& snapshot_tokens,
                      const Tensor& snapshot_blocks, const MaybeTensor& is_final,
                      const Tensor& state_cache, const std::vector<Tensor>& pending,
                      const Tensor& out) {
  const StatePlanArgs plan(query_start, block_ids, has_state, snapshot_start, snapshot_tokens,
                           snapshot_blocks, is_final);
  const StateSpaceArgs args{{xbc, num_groups, state_cache, seq_lens, plan, out},
                            xbc.data_ptr(),
                            xbc.stride(0),
                            dt.data_ptr(),
                            dt.stride(0),
                            data_of<const float>(a_log),
                            data_of<const float>(dt_bias),
                            data_of<const float>(d),
                            float(dt_min),
                            float(dt_max),
                            pending_view(pending, 0),
                            pending_view(pending, 1)};
  check(run(args), "state_space_scan");
}

}  // namespace

VLLM_OPERATION(state_space_scan)

}  // namespace vllm
