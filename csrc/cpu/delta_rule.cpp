// The gated delta rule in chunks of kChunk tokens that begin at absolute positions.
//
// With S the state [dk, dv] at the chunk's start, L_i the sum of the log decays of its
// tokens up to i, n_i and m_i the inverse norms of key and query (m_i with the scale):
//   w_i = n_i beta_i (v_i - n_i e^{L_i} S^T k_i - sum_{j<i} n_i e^{L_i-L_j} (k_i.k_j) w_j)
//   o_i =                   m_i e^{L_i} S^T q_i + sum_{j<=i} m_i e^{L_i-L_j} (q_i.k_j) w_j
// and, after the chunk's last token: S = e^L S + sum_j k_j (e^{L-L_j} w_j)^T.
//
// A chunk that is not complete leaves S as it was and the *pending* k_j, w_j and L_j of its
// tokens in the request's block; the next step goes on from them. Every element has one
// chain of operations, which only tokens before it enter, so no value depends on where
// steps end. With Math = DotMath, and by tiles with TileMath, the long products multiply
// pairs of bfloat16 (keys and queries as they came, S and w rounded); everything else is float32.
#include "delta_chunk.h"

namespace vllm {
namespace {

// Where a request's state goes: after the step, or as a snapshot.
struct Target {
  int64_t block, tokens;  // of this step
};

// The targets of a request, in order of tokens; the last one is its own block, if it is kept.
class Targets {
 public:
  Targets(const StatePlanArgs& plan, const Request& request)
      : plan_(plan), request_(request), first_(plan.snapshot_start[request.index]) {}

  int64_t count() const { return snapshots() + plan_.keeps_state(request_.index); }
  Target operator[](int64_t i) const {
    if (i == snapshots()) return {request_.block, request_.tokens};
    return {plan_.snapshot_blocks[first_ + i], plan_.snapshot_tokens[first_ + i]};
  }
  // Among the targets of all requests.
  int64_t number(int64_t i) const {
    return first_ - plan_.snapshot_start[0] + request_.index + i;
  }

 private:
  int64_t snapshots() const { return plan_.snapshot_start[request_.index + 1] - first_; }

  const StatePlanArgs& plan_;
  const Request& request_;
  const int64_t first_;
};

// One request, one k-head and some blocks of columns of its v-heads, chunk after chunk.
template <class Math>
class DeltaTask {
 public:
  using T = typename Math::Element;
  static constexpr int kChunk = kChunkOf<T>;
  static constexpr bool kPacks = Math::kPerCell > 1;

  static int64_t cells(const DeltaRuleArgs& args, int64_t blocks) {
    const int64_t padded = round_up(args.dk, kWidth);
    return ChunkRows<Math>::cells(args) +
           (blocks * (padded + packed_rows(args) + 2) + 4 * kChunk) * kColumns;
  }

  // Column blocks [first_block, end_block) of the k-head's v-heads. decays: see run().
  DeltaTask(const DeltaRuleArgs& args, const Request& request, int64_t k_head,
            int64_t first_block, int64_t end_block, float* decays, Cell* memory)
      : args_(args), places_{args}, request_(request), targets_(args.plan, request),
        k_head_(k_head), first_block_(first_block), end_block_(end_block), decays_(decays),
        padded_(round_up(args.dk, kWidth)), packed_rows_(packed_rows(args)), rows_(args, memory) {
    updates_ = reinterpret_cast<float*>(memory + ChunkRows<Math>::cells(args));
    recalled_ = updates_ + kChunk * kColumns;
    answered_ = recalled_ + kChunk * kColumns;
    passing_ = answered_ + kChunk * kColumns;
    weighted_ = reinterpret_cast<Cell*>(passing_ + 2 * (end_block - first_block) * kColumns);
    states_ = reinterpret_cast<float*>(weighted_ + kChunk * kColumns);
    packed_states_ =
        reinterpret_cast<Cell*>(states_ + (end_block - first_block) * padded_ * kColumns);
    if constexpr (Math::kIsOfTiles) fill_tiles();
  }

  void run() {
    const int64_t chunks = request_.chunks(kChunk);
    int64_t target = 0;  // first one that is not reached yet
    for (int64_t k = 0; k < chunks; ++k) {
      const Chunk chunk = request_.chunk(k, kChunk);
      int64_t next = target;
      while (next < targets_.count() && position(next, chunk) <= chunk.end) ++next;
      rows_.read(request_, chunk, k_head_);
      passes_ = k == 0 && passes(target, next, chunk);
      for (int64_t b = first_block_; b < end_block_; ++b) {
        enter_block(b, chunk);
        if (k == 0) load_block(b, chunk);
        compute(b, chunk);
        save_pending(chunk, target, next);
        if (chunk.end < kChunk || !is_read(target, next, chunk, k + 1 < chunks)) continue;
        if (passes_) {
          advance_in_place(chunk);
          continue;
        }
        advance(chunk);
        for (int64_t i = target; i < next; ++i) {
          if (position(i, chunk) == kChunk) save_state(targets_[i].block);
        }
      }
      target = next;
    }
  }

 private:
  // Of a state in cells.
  static int64_t packed_rows(const DeltaRuleArgs& args) {
    return kPacks ? ChunkRows<Math>::stride(args) : 0;
  }

  // Zeros behind what fills no whole tile.
  void fill_tiles() const {
    const int64_t cells = (args_.dk + 1) / 2;
    for (int64_t b = 0; b < end_block_ - first_block_; ++b) {
      std::memset(packed_states_ + (b * packed_rows_ + cells) * kColumns, 0,
                  size_t((packed_rows_ - cells) * kColumns) * sizeof(Cell));
    }
    std::memset(weighted_ + kChunk / 2 * kColumns, 0, kChunk / 2 * kColumns * sizeof(Cell));
  }

  // Whether anybody needs the state at the chunk's end.
  bool is_read(int64_t target, int64_t end, const Chunk& chunk, bool goes_on) const {
    for (int64_t i = target; i < end; ++i) goes_on |= position(i, chunk) == kChunk;
    return goes_on;
  }

  // Whether a lone token asks the state in the pool and updates it there: no copy is made.
  bool passes(int64_t target, int64_t end, const Chunk& chunk) const {
    const bool alone = request_.tokens == 1 && chunk.number > 0;
    if (!alone || args_.dv % kColumns != 0) return false;
    for (int64_t i = target; i < end; ++i) {
      if (targets_[i].block != request_.block) return false;
    }
    return true;
  }

  // Rows of the chunk that target i covers; 0 and less: an earlier chunk's.
  int64_t position(int64_t i, const Chunk& chunk) const {
    return request_.start + targets_[i].tokens - chunk.number * kChunk;
  }

  // Turns to block b; computes the coefficients of a new head.
  void enter_block(int64_t b, const Chunk& chunk) {
    const int64_t per_head = (args_.dv + kColumns - 1) / kColumns;
    column_ = b % per_head * kColumns;
    n_ = args_.dv - column_ < kColumns ? args_.dv - column_ : kColumns;
    state_ = states_ + (b - first_block_) * padded_ * kColumns;
    packed_ = kPacks ? packed_states_ + (b - first_block_) * packed_rows_ * kColumns
                     : reinterpret_cast<Cell*>(state_);
    const int64_t head = k_head_ * places_.group() + b / per_head;
    if (b == first_block_ || head != head_) {
      head_ = head;
      rows_.write_coefficients(request_, chunk, head, by_);
    }
  }

  void load_block(int64_t b, const Chunk& chunk) {
    const bool starts_head = b == first_block_ || column_ == 0;
    if (starts_head && chunk.number > 0) passes_ ? ask_state(b, chunk) : load_state(b);
    for (int64_t i = 0; i < chunk.first && !passes_; ++i) {
      float* row = updates_ + i * kColumns;
      std::memset(row, 0, kColumns * sizeof(float));
      std::memcpy(row, places_.pending_update(request_.block, i, head_) + column_,
                  size_t(n_) * sizeof(float));
    }
  }

  // Where the state of this head lies in a block of the pool, from column_ on.
  typename ChunkRows<Math>::StateRows pool_rows(int64_t block) const {
    return {places_.state(block, head_) + column_, args_.state_row_stride, args_.dk};
  }

  // Copies the state of this head from column_ on, in the order in which it lies in memory.
  void load_state(int64_t b) {
    constexpr int64_t kAhead = 12;  // rows from asking for memory to its use
    const int64_t blocks = (args_.dv - column_ + kColumns - 1) / kColumns;
    const int64_t mine = end_block_ - b < blocks ? end_block_ - b : blocks;
    const int64_t n = args_.dv - column_ < mine * kColumns ? args_.dv - column_ : mine * kColumns;
    const auto rows = pool_rows(request_.block);
    const auto load_row = [&](const float* row, int64_t j) VLLM_LAMBDA {
      if (j % 16 == 0) __builtin_prefetch(row + kAhead * rows.stride + j);
      return load_up_to(row + j, n - j);
    };
    for (int64_t s = 0; s < rows.pairs(); ++s) {
      for (int64_t j = 0; j < mine * kColumns; j += kWidth) {
        const int64_t first = j / kColumns * padded_;  // row of the column's block
        const int64_t packed = j / kColumns * packed_rows_ + s;
        float* out = state_ + (first + 2 * s) * kColumns + j % kColumns;
        const Floats rounded = load_row(rows.rounded(s), j), low = load_row(rows.low(s), j);
        store(out, join_upper(rounded, low));
        store(out + kColumns, join_lower(rounded, low));
        if (kPacks) store_cells(packed_ + packed * kColumns + j % kColumns, rounded);
      }
    }
    for (int64_t i = 2 * rows.pairs(); i < args_.dk; ++i) {
      for (int64_t j = 0; j < mine * kColumns; j += kWidth) {
        const int64_t first = j / kColumns * padded_;
        const Floats row = load_row(rows.plain(i), j);
        store(state_ + (first + i) * kColumns + j % kColumns, row);
        if (!kPacks) continue;
        store_cells(packed_ + (j / kColumns * packed_rows_ + i / 2) * kColumns + j % kColumns,
                    rounded_halves(row, Floats{}));
      }
    }
  }

  // What the state in the pool answers the token, for this head's columns from column_ on:
  // passing_[block] = its key's answer, then its query's.
  void ask_state(int64_t b, const Chunk& chunk) const {
    const int64_t blocks = (args_.dv - column_) / kColumns;
    const int64_t mine = end_block_ - b < blocks ? end_block_ - b : blocks;
    const float* state = places_.state(request_.block, head_) + column_;
    float* out = passing_ + 2 * (b - first_block_) * kColumns;
    prefetch_pending(chunk);
    int64_t i = 0;
    for (; i + 2 <= mine; i += 2) {
      rows_.template recall_row<2>(chunk, state + i * kColumns, out + 2 * i * kColumns);
    }
    if (i < mine) rows_.template recall_row<1>(chunk, state + i * kColumns, out + 2 * i * kColumns);
  }

  // Asks the memory for what the next k-head has pending, as far as it is like this one's, and
  // for where its token goes.
  VLLM_INLINE void prefetch_pending(const Chunk& chunk) const {
    if (kChunk == 1 || k_head_ + 1 == args_.num_k_heads) return;
    const int64_t head = head_ + places_.group();
    for (int64_t i = 0; i <= chunk.first; ++i) {
      const T* key = places_.pending_key(request_.block, i, k_head_ + 1);
      for (int64_t j = 0; j < args_.dk; j += 64 / sizeof(T)) __builtin_prefetch(key + j);
      const float* update = places_.pending_update(request_.block, i, head);
      for (int64_t j = 0; j < args_.dv; j += 16) __builtin_prefetch(update + j);
    }
    __builtin_prefetch(places_.pending_decays(request_.block, head));
  }

  // Snapshots go around the caches: they are read when a later request finds them, if ever.
  void save_state(int64_t block) const {
    const auto rows = pool_rows(block);
    const bool own = block == request_.block;
    const auto save_row = [&](float* row, int64_t j, Floats v) VLLM_LAMBDA {
      if (n_ - j < kWidth) return store_first(row + j, v, n_ - j);
      own ? store(row + j, v) : stream(row + j, v);
    };
    for (int64_t s = 0; s < rows.pairs(); ++s) {
      const float* row = state_ + 2 * s * kColumns;
      for (int64_t j = 0; j < n_; j += kWidth) {
        const Floats upper = load(row + j), lower = load(row + kColumns + j);
        save_row(rows.rounded(s), j, rounded_halves(upper, lower));
        save_row(rows.low(s), j, low_halves(upper, lower));
      }
    }
    for (int64_t i = 2 * rows.pairs(); i < args_.dk; ++i) {
      for (int64_t j = 0; j < n_; j += kWidth) {
        save_row(rows.plain(i), j, load(state_ + i * kColumns + j));
      }
    }
    if (!own) stream_fence();
  }

  // To the targets inside this chunk: the state at its start and the updates since.
  void save_pending(const Chunk& chunk, int64_t target, int64_t end) const {
    for (int64_t i = target; i < end; ++i) {
      const int64_t rows = position(i, chunk), block = targets_[i].block;
      if (rows == kChunk) continue;
      const bool there = block == request_.block && chunk.number * kChunk <= request_.start;
      if (chunk.number > 0 && !there) save_state(block);
      for (int64_t j = there ? chunk.first : 0; j < rows; ++j) {
        std::memcpy(places_.pending_update(block, j, head_) + column_, updates_ + j * kColumns,
                    size_t(n_) * sizeof(float));
      }
      if (column_ == 0) {
        float* decays = decays_ + (targets_.number(i) * args_.num_v_heads + head_) * kChunk;
        std::memcpy(decays, by_.log_decay, kChunk * sizeof(float));
      }
    }
  }

  void compute(int64_t b, const Chunk& chunk) {
    if (passes_) {
      const float* answers = passing_ + 2 * (b - first_block_) * kColumns;
      std::memcpy(recalled_ + chunk.first * kColumns, answers, kColumns * sizeof(float));
      std::memcpy(answered_ + chunk.first * kColumns, answers + kColumns,
                  kColumns * sizeof(float));
    } else if (chunk.number > 0) {
      rows_.recall(chunk, packed_, recalled_);  // and answered_
    } else {
      std::memset(recalled_, 0, 2 * kChunk * kColumns * sizeof(float));
    }
    for (int64_t i = chunk.first; i < chunk.end; ++i) {
      compute_row(chunk, i);
      const int64_t later = chunk.token_of(i) + kChunk;
      if (later < request_.token + request_.tokens) prefetch(later);
    }
  }

  void compute_row(const Chunk& chunk, int64_t i) {
    const T* values = places_.value(chunk.token_of(i), head_) + column_;
    const Floats recall = splat(-by_.recall[i]), answer = splat(by_.answer[i]);
    Floats update[kVectors], out[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      const int64_t at = i * kColumns + v * kWidth, left = n_ - v * kWidth;
      update[v] = fma(recall, load(recalled_ + at), load_up_to(values + v * kWidth, left));
      out[v] = answer * load(answered_ + at);
    }
    const float* pending = places_.pending_update(request_.block, 0, head_) + column_;
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
    T* result = places_.output(chunk.token_of(i), head_) + column_;
    const Floats gain = splat(by_.gain[i]), own = splat(by_.with_query[i][i]);
    for (int v = 0; v < kVectors; ++v) {
      const int64_t left = n_ - v * kWidth;
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

  // Asks the memory for a token of the next chunk: rows lie too far apart for the hardware
  // to guess, and a store that misses holds up those that follow.
  VLLM_INLINE void prefetch(int64_t token) const {
    constexpr int64_t kLine = 64 / int64_t(sizeof(T));
    if (column_ == 0) {
      const T *q = places_.query(token, k_head_), *k = places_.key(token, k_head_);
      for (int64_t i = 0; i < args_.dk; i += kLine) {
        __builtin_prefetch(q + i);
        __builtin_prefetch(k + i);
      }
      __builtin_prefetch(static_cast<const T*>(args_.a) + token * args_.a_stride + head_);
      __builtin_prefetch(static_cast<const T*>(args_.b) + token * args_.b_stride + head_);
    }
    const T* v = places_.value(token, head_) + column_;
    T* out = places_.output(token, head_) + column_;
    for (int64_t i = 0; i < n_; i += kLine) {
      __builtin_prefetch(v + i);
      __builtin_prefetch(out + i, 1);
    }
  }

  // w_j of row j: a token that passes leaves the pending ones where they lie.
  VLLM_INLINE const float* update_row(const Chunk& chunk, int64_t j) const {
    if (!passes_ || j >= chunk.first) return updates_ + j * kColumns;
    return places_.pending_update(request_.block, j, head_) + column_;
  }

  // e^{L-L_j} w_j, in cells.
  void weigh_updates(const Chunk& chunk) const {
    constexpr int kPer = Math::kPerCell;
    for (int64_t s = 0; s < kChunk; s += kPer) {
      const Floats upper = splat(by_.to_end[s]), lower = splat(by_.to_end[s + kPer - 1]);
      const float *row = update_row(chunk, s), *next = update_row(chunk, s + kPer - 1);
      for (int64_t v = 0; v < kColumns; v += kWidth) {
        store_cells(weighted_ + s / kPer * kColumns + v,
                    Math::stacked_cells(load(row + v) * upper, load(next + v) * lower));
      }
    }
  }

  // S = e^L S + sum_j k_j (e^{L-L_j} w_j)^T; a request's first chunk has no S yet.
  void advance(const Chunk& chunk) {
    weigh_updates(chunk);
    if (chunk.number > 0) {
      rows_.template add_outer_products<Start::kScaled>(weighted_, by_.total, state_, packed_);
    } else {
      rows_.template add_outer_products<Start::kZeros>(weighted_, 0.0f, state_, packed_);
    }
  }

  // The same of the state in the pool, for a token that passes: there is one.
  void advance_in_place(const Chunk& chunk) const {
    weigh_updates(chunk);
    rows_.add_in_place(weighted_, by_.total, pool_rows(request_.block));
  }

  const DeltaRuleArgs& args_;
  const Places<T> places_;
  const Request& request_;
  const Targets targets_;
  const int64_t k_head_, first_block_, end_block_;
  float* decays_;
  const int64_t padded_, packed_rows_;
  ChunkRows<Math> rows_;
  typename ChunkRows<Math>::Coefficients by_;
  int64_t head_ = -1, column_ = 0, n_ = 0;
  bool passes_ = false;  // of the chunk at hand
  float *state_ = nullptr, *states_, *updates_, *recalled_, *answered_, *passing_;
  Cell *weighted_, *packed_ = nullptr, *packed_states_;
};

// What the tasks share of incomplete chunks, to the pool; they may all have read from there.
template <class T>
void save_keys_and_decays(const DeltaRuleArgs& args, const Request& request, const float* decays) {
  constexpr int kChunk = kChunkOf<T>;
  const Places<T> places{args};
  const Targets targets(args.plan, request);
  for (int64_t i = 0; i < targets.count(); ++i) {
    const int64_t block = targets[i].block, end = request.start % kChunk + targets[i].tokens;
    if (end % kChunk == 0) continue;
    const Chunk chunk = request.chunk(end / kChunk, kChunk);
    for (int64_t j = block == request.block ? chunk.first : 0; j < end % kChunk; ++j) {
      for (int64_t h = 0; h < args.num_k_heads; ++h) {
        std::memcpy(places.pending_key(block, j, h), places.chunk_key(request, chunk, j, h),
                    size_t(args.dk) * sizeof(T));
      }
    }
    const float* rows = decays + targets.number(i) * args.num_v_heads * kChunk;
    for (int64_t h = 0; h < args.num_v_heads; ++h) {
      std::memcpy(places.pending_decays(block, h), rows + h * kChunk,
                  size_t(end % kChunk) * sizeof(float));
    }
  }
}

struct Memory {
  Scratch task, decays;
  static Memory& of_thread() {
    static thread_local Memory memory;
    return memory;
  }
};

template <class Math>
Status run(const DeltaRuleArgs& args) {
  if (!args.plan.blocks_in_range(args.state_blocks)) return kBadIndex;
  constexpr int kChunk = kChunkOf<typename Math::Element>;
  const StatePlanArgs& plan = args.plan;
  const int64_t targets =
      plan.requests + plan.snapshot_start[plan.requests] - plan.snapshot_start[0];
  auto* decays = static_cast<float*>(Memory::of_thread().decays.reserve(
      targets * args.num_v_heads * kChunk * int64_t(sizeof(float))));
  if (decays == nullptr) return kOutOfMemory;
  const int64_t work = (args.tokens + plan.requests) * args.num_v_heads * args.dk * args.dv;
  const int64_t threads = work / kWidth < kSerialWork ? 1 : args.threads;
  const int64_t blocks =
      args.num_v_heads / args.num_k_heads * ((args.dv + kColumns - 1) / kColumns);
  int64_t parts = 1;  // of a k-head's columns: each forms the inner products again
  while (parts < blocks && plan.requests * args.num_k_heads * parts < 2 * threads) ++parts;
  const int64_t tasks = plan.requests * args.num_k_heads * parts;
  SharedStatus status;
  const auto run_task = [&](int64_t i) {
    const int64_t part = i % parts, k_head = i / parts % args.num_k_heads;
    const Request request(args, i / parts / args.num_k_heads);
    if (request.tokens == 0) return;
    const int64_t first = blocks * part / parts, end = blocks * (part + 1) / parts;
    const int64_t cells = DeltaTask<Math>::cells(args, end - first);
    auto* memory = static_cast<Cell*>(
        Memory::of_thread().task.reserve(cells * int64_t(sizeof(Cell))));
    if (memory == nullptr) return status.fail(kOutOfMemory);
    DeltaTask<Math> task(args, request, k_head, first, end, decays, memory);
    task.run();
  };
  parallel_runs(threads, tasks, run_task);  // the states of neighbours lie side by side
  if (status.failed()) return Status(status.value);
  parallel_runs(threads, plan.requests, [&](int64_t r) {
    const Request request(args, r);
    if (request.tokens > 0) {
      save_keys_and_decays<typename Math::Element>(args, request, decays);
    }
  });
  return kOk;
}

Pending pending_view(const std::vector<Tensor>& views, size_t i) {
  if (i >= views.size()) return {};  // of float32 nothing is ever pending
  return {views[i].data_ptr(), views[i].stride(0)};
}

void gated_delta_rule(const Tensor& qkv, const Tensor& a, const Tensor& b, const Tensor& a_log,
                      const Tensor& dt_bias, int64_t num_k_heads, double beta_scale,
                      const Tensor& query_start, const Tensor& seq_lens, const Tensor& block_ids,
                      const Tensor& has_state, const Tensor& snapshot_start,
                      const Tensor& snapshot_tokens, const Tensor& snapshot_blocks,
                      const MaybeTensor& is_final, const Tensor& state_cache,
                      const std::vector<Tensor>& pending, const Tensor& out) {
  const DeltaRuleArgs args{dtype_of(qkv),
                           num_threads(),
                           qkv.data_ptr(),
                           qkv.size(0),
                           qkv.stride(0),
                           num_k_heads,
                           state_cache.size(1),
                           state_cache.size(2),
                           state_cache.size(3),
                           a.data_ptr(),
                           a.stride(0),
                           b.data_ptr(),
                           b.stride(0),
                           a_log.data_ptr(),
                           dtype_of(a_log),
                           dt_bias.data_ptr(),
                           dtype_of(dt_bias),
                           data_of<float>(state_cache),
                           state_cache.size(0),
                           state_cache.stride(0),
                           state_cache.stride(1),
                           state_cache.stride(2),
                           pending_view(pending, 0),
                           pending_view(pending, 1),
                           pending_view(pending, 2),
                           data_of<const int32_t>(seq_lens),
                           StatePlanArgs(query_start, block_ids, has_state, snapshot_start,
                                         snapshot_tokens, snapshot_blocks, is_final),
                           out.data_ptr(),
                           float(beta_scale)};
  check(with_tile_math(args.dtype, [&](auto math) { return run<decltype(math)>(args); }),
        "gated_delta_rule");
}

}  // namespace

VLLM_OPERATION(gated_delta_rule)

}  // namespace vllm
