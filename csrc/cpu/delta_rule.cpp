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
// steps end. With Math = DotMath the long products multiply pairs of bfloat16 (keys and
// queries as they came, S and w rounded); everything else is float32.
#include <cmath>

#include "cells.h"
#include "kernels.h"

namespace vllm {
namespace VLLM_ISA {
namespace {

// Tokens of a chunk: with one, as for float32, nothing is ever pending.
template <class T>
constexpr int kChunkOf = sizeof(T) == 2 ? int(kDeltaChunkTokens) : 1;

constexpr int kVectors = kTileVectors;
constexpr int kColumns = kVectors * kWidth;  // of S, in one block

// A chunk of a request, as far as this step computes it.
struct Chunk {
  int64_t number;      // of chunks before it in the request
  int64_t token;       // in the batch, of row `first`
  int64_t first, end;  // rows of this step; those before `first` are pending
  int64_t token_of(int64_t row) const { return token + row - first; }
};

struct Request {
  int64_t index, token, tokens, start, block;  // start: absolute position of its first token

  Request(const DeltaRuleArgs& args, int64_t r)
      : index(r),
        token(args.plan.query_start[r]),
        tokens(args.plan.query_start[r + 1] - token),
        start(args.plan.has_state[r] != 0 ? args.seq_lens[r] - tokens : 0),
        block(args.plan.block_ids[r]) {}

  int64_t chunks(int64_t length) const {
    return tokens == 0 ? 0 : (start % length + tokens + length - 1) / length;
  }
  Chunk chunk(int64_t k, int64_t length) const {
    const int64_t begin = k * length - start % length;  // of the chunk, from `token`
    const int64_t first = begin < 0 ? -begin : 0, left = tokens - begin;
    return {start / length + k, token + begin + first, first, left < length ? left : length};
  }
};

// Addresses of the inputs, the outputs and the pool.
template <class T>
struct Places {
  static constexpr int kChunk = kChunkOf<T>;
  const DeltaRuleArgs& args;

  int64_t group() const { return args.num_v_heads / args.num_k_heads; }
  const T* query(int64_t token, int64_t k_head) const {
    return static_cast<const T*>(args.qkv) + token * args.qkv_stride + k_head * args.dk;
  }
  const T* key(int64_t token, int64_t k_head) const {
    return query(token, args.num_k_heads + k_head);
  }
  const T* value(int64_t token, int64_t head) const {
    return query(token, 2 * args.num_k_heads) + head * args.dv;
  }
  T* output(int64_t token, int64_t head) const {
    return static_cast<T*>(args.out) + (token * args.num_v_heads + head) * args.dv;
  }
  float* state(int64_t block, int64_t head) const {
    return args.state + block * args.state_block_stride + head * args.state_head_stride;
  }
  T* pending_key(int64_t block, int64_t row, int64_t k_head) const {
    return static_cast<T*>(args.pending_keys) + block * args.pending_keys_stride +
           (k_head * kChunk + row) * args.dk;
  }
  float* pending_update(int64_t block, int64_t row, int64_t head) const {
    return args.pending_updates + block * args.pending_updates_stride +
           (head * kChunk + row) * args.dv;
  }
  float* pending_decays(int64_t block, int64_t head) const {
    return args.pending_decays + block * args.pending_decays_stride + head * kChunk;
  }
  const T* chunk_key(const Request& request, const Chunk& chunk, int64_t row,
                     int64_t k_head) const {
    return row < chunk.first ? pending_key(request.block, row, k_head)
                             : key(chunk.token_of(row), k_head);
  }
};

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

// What the tokens of a chunk give to one v-head, whatever the columns.
template <int kChunk>
struct HeadCoefficients {
  static constexpr int kPadded = (kChunk + kWidth - 1) / kWidth * kWidth;
  float among_keys[kChunk][kPadded];  // n_i e^{L_i-L_j} (k_i.k_j), j < i
  float with_query[kChunk][kPadded];  // m_i e^{L_i-L_j} (q_i.k_j), j <= i
  float recall[kPadded];              // n_i e^{L_i}
  float answer[kPadded];              // m_i e^{L_i}
  float gain[kPadded];                // n_i beta_i
  float log_decay[kPadded];           // L_i
  float to_end[kPadded];              // e^{L-L_j}; complete chunks only
  float total;                        // e^L; complete chunks only
};

// Keys and queries of a chunk for one k-head, and their inner products.
template <class Math>
class ChunkRows {
 public:
  using T = typename Math::Element;
  static constexpr int kChunk = kChunkOf<T>;
  using Coefficients = HeadCoefficients<kChunk>;
  static constexpr int kPadded = Coefficients::kPadded;

  // Cells of a row, padded with zeros to a whole vector.
  static int64_t stride(const DeltaRuleArgs& args) {
    return round_up((args.dk + Math::kPerCell - 1) / Math::kPerCell, kWidth);
  }
  static int64_t cells(const DeltaRuleArgs& args) {
    return kPadded * (3 * stride(args) + round_up(args.dk, kWidth));
  }

  ChunkRows(const DeltaRuleArgs& args, Cell* memory)
      : args_(args), places_{args}, stride_(stride(args)), keys_(memory),
        queries_(keys_ + kPadded * stride_), columns_(queries_ + kPadded * stride_),
        pairs_(columns_ + kPadded * stride_) {}

  void read(const Request& request, const Chunk& chunk, int64_t k_head) {
    for (int64_t i = 0; i < chunk.end; ++i) {
      read_row(places_.chunk_key(request, chunk, i, k_head), keys_ + i * stride_);
    }
    std::memset(keys_ + chunk.end * stride_, 0,
                size_t((kPadded - chunk.end) * stride_) * sizeof(Cell));
    for (int64_t i = chunk.first; i < chunk.end; ++i) {
      read_row(places_.query(chunk.token_of(i), k_head), queries_ + i * stride_);
    }
    write_norms(chunk, keys_, 1.0f, key_norm_);
    write_norms(chunk, queries_, 1.0f / std::sqrt(float(args_.dk)), query_norm_);
    turn_keys();
    multiply(chunk, keys_, key_products_);
    multiply(chunk, queries_, query_products_);
    if (chunk.end == kChunk && Math::kPerCell > 1) pair_keys();
  }

  // Rows [first, end) of out [kChunk, kColumns] = rows of keys or queries times the state.
  void recall_keys(const Chunk& chunk, const Cell* state, float* out) const {
    recall(chunk, keys_, state, out);
  }
  void recall_queries(const Chunk& chunk, const Cell* state, float* out) const {
    recall(chunk, queries_, state, out);
  }

  // state [dk, kColumns] = scales * state (null: nothing) + keys^T updates, those in cells.
  void add_outer_products(const Cell* updates, const float* scales, float* state) const {
    constexpr bool kPairs = Math::kPerCell > 1;
    const Cell* keys = kPairs ? pairs_ : keys_;
    const int64_t step = kPairs ? round_up(args_.dk, kWidth) : stride_;
    (scales == nullptr ? block_product<Math, false> : block_product<Math, true>)(
        keys, 1, step, updates, kColumns, kChunk / Math::kPerCell, state, kColumns, args_.dk,
        kColumns, scales);
  }

  void write_coefficients(const Request& request, const Chunk& chunk, int64_t head,
                          Coefficients& out) const {
    write_gates(request, chunk, head, out);
    for (int64_t i = chunk.first; i < chunk.end; ++i) {
      const Floats key_norm = splat(key_norm_[i]), query_norm = splat(query_norm_[i]);
      const Floats now = splat(out.log_decay[i]);
      for (int64_t j = 0; j <= i; j += kWidth) {
        const Floats kept = exp(now - load(out.log_decay + j));
        store(&out.among_keys[i][j], kept * key_norm * load(&key_products_[i][j]));
        store(&out.with_query[i][j], kept * query_norm * load(&query_products_[i][j]));
      }
    }
    if (chunk.end < kChunk) return;
    const Floats last = splat(out.log_decay[kChunk - 1]);
    for (int64_t j = 0; j < kPadded; j += kWidth) {
      store(out.to_end + j, exp(last - load(out.log_decay + j)));
    }
    out.total = exp(last)[0];
  }

 private:
  void read_row(const T* row, Cell* out) const {
    for (int64_t i = 0; i < stride_; i += kWidth) {
      store_cells(out + i, Math::row_cells(row, i, args_.dk));
    }
  }

  // The inverse norms of this step's rows, times scale; sums over lanes in order.
  void write_norms(const Chunk& chunk, const Cell* rows, float scale, float* norms) const {
    for (int64_t i = chunk.first / kWidth * kWidth; i < chunk.end; i += kWidth) {
      Floats sums[kWidth] = {};
      for (int64_t r = 0; r < kWidth; ++r) {
        if (i + r < chunk.first || i + r >= chunk.end) continue;
        for (int64_t s = 0; s < stride_; s += kWidth) {
          const Floats cells = load_cells(rows + (i + r) * stride_ + s);
          sums[r] = Math::step(cells, cells, sums[r]);
        }
      }
      transpose(sums);
      for (int lane = 1; lane < kWidth; ++lane) sums[0] = sums[0] + sums[lane];
      store(norms + i, sums[0]);
    }
    for (int64_t i = 0; i < kPadded; ++i) {
      const bool own = i >= chunk.first && i < chunk.end;
      norms[i] = own ? scale / std::sqrt(norms[i] + 1e-6f) : 0.0f;
    }
  }

  // columns_[step][row] = keys_[row][step]
  void turn_keys() {
    for (int64_t s = 0; s < stride_; s += kWidth) {
      for (int64_t j = 0; j < kPadded; j += kWidth) {
        Floats square[kWidth];
        for (int r = 0; r < kWidth; ++r) square[r] = load_cells(keys_ + (j + r) * stride_ + s);
        transpose(square);
        for (int r = 0; r < kWidth; ++r) store_cells(columns_ + (s + r) * kPadded + j, square[r]);
      }
    }
  }

  // pairs_[step][i]: element i of the keys of two tokens. Cells are two elements here.
  void pair_keys() {
    const T* rows[kChunk];
    for (int64_t j = 0; j < kChunk; ++j) rows[j] = reinterpret_cast<const T*>(keys_ + j * stride_);
    const int64_t padded = round_up(args_.dk, kWidth);
    for (int64_t s = 0; s < kChunk / Math::kPerCell; ++s) {
      for (int64_t i = 0; i < padded; i += kWidth) {
        store_cells(pairs_ + s * padded + i,
                    Math::column_cells(rows + s * Math::kPerCell, i, args_.dk));
      }
    }
  }

  void multiply(const Chunk& chunk, const Cell* rows, float (*products)[kPadded]) const {
    if constexpr (kChunk == 16 && kWidth == 16) {  // all rows at once: chains enough to be busy
      if (chunk.end - chunk.first == kChunk) {
        return product_tile<Math, false, kChunk, 1>(rows, stride_, 1, columns_, kPadded, stride_,
                                                    products[0], kPadded, nullptr);
      }
    }
    block_product<Math, false>(rows + chunk.first * stride_, stride_, 1, columns_, kPadded,
                               stride_, products[chunk.first], kPadded, chunk.end - chunk.first,
                               kPadded, nullptr);
  }

  void recall(const Chunk& chunk, const Cell* rows, const Cell* state, float* out) const {
    const int64_t steps = (args_.dk + Math::kPerCell - 1) / Math::kPerCell;
    block_product<Math, false>(rows + chunk.first * stride_, stride_, 1, state, kColumns, steps,
                               out + chunk.first * kColumns, kColumns, chunk.end - chunk.first,
                               kColumns, nullptr);
  }

  void write_gates(const Request& request, const Chunk& chunk, int64_t head,
                   Coefficients& out) const {
    float a[kPadded] = {}, b[kPadded] = {}, rates[kPadded];
    for (int64_t i = chunk.first; i < chunk.end; ++i) {
      const int64_t token = chunk.token_of(i);
      a[i] = to_float(static_cast<const T*>(args_.a)[token * args_.a_stride + head]);
      b[i] = to_float(static_cast<const T*>(args_.b)[token * args_.b_stride + head]);
    }
    const Floats speed = exp(splat(args_.a_log[head])), bias = splat(args_.dt_bias[head]);
    for (int64_t i = 0; i < kPadded; i += kWidth) {
      // e^-110 is 0 in float32; a larger rate would only cost the sums their digits.
      store(rates + i, min(splat(110.0f), speed * softplus(load(a + i) + bias)));
    }
    std::memset(out.log_decay, 0, sizeof out.log_decay);
    float sum = 0.0f;
    if (chunk.first > 0) {
      std::memcpy(out.log_decay, places_.pending_decays(request.block, head),
                  size_t(chunk.first) * sizeof(float));
      sum = out.log_decay[chunk.first - 1];
    }
    for (int64_t i = chunk.first; i < chunk.end; ++i) out.log_decay[i] = sum -= rates[i];
    for (int64_t i = 0; i < kPadded; i += kWidth) {
      const Floats kept = exp(load(out.log_decay + i)), key_norm = load(key_norm_ + i);
      store(out.recall + i, kept * key_norm);
      store(out.answer + i, kept * load(query_norm_ + i));
      store(out.gain + i, sigmoid<float>(load(b + i)) * key_norm);
    }
  }

  const DeltaRuleArgs& args_;
  const Places<T> places_;
  const int64_t stride_;
  Cell *keys_, *queries_, *columns_, *pairs_;
  float key_norm_[kPadded], query_norm_[kPadded];
  float key_products_[kChunk][kPadded], query_products_[kChunk][kPadded];
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
    return ChunkRows<Math>::cells(args) + (blocks + kPacks) * padded * kColumns + padded +
           4 * kChunk * kColumns;
  }

  // Column blocks [first_block, end_block) of the k-head's v-heads. decays: see run().
  DeltaTask(const DeltaRuleArgs& args, const Request& request, int64_t k_head,
            int64_t first_block, int64_t end_block, float* decays, Cell* memory)
      : args_(args), places_{args}, request_(request), targets_(args.plan, request),
        k_head_(k_head), first_block_(first_block), end_block_(end_block), decays_(decays),
        padded_(round_up(args.dk, kWidth)), rows_(args, memory) {
    scales_ = reinterpret_cast<float*>(memory + ChunkRows<Math>::cells(args));
    updates_ = scales_ + padded_;
    recalled_ = updates_ + kChunk * kColumns;
    answered_ = recalled_ + kChunk * kColumns;
    weighted_ = reinterpret_cast<Cell*>(answered_ + kChunk * kColumns);
    packed_ = weighted_ + kChunk * kColumns;
    states_ = reinterpret_cast<float*>(packed_ + kPacks * padded_ * kColumns);
  }

  void run() {
    const int64_t chunks = request_.chunks(kChunk);
    int64_t target = 0;  // first one that is not reached yet
    for (int64_t k = 0; k < chunks; ++k) {
      const Chunk chunk = request_.chunk(k, kChunk);
      int64_t next = target;
      while (next < targets_.count() && position(next, chunk) <= chunk.end) ++next;
      rows_.read(request_, chunk, k_head_);
      for (int64_t b = first_block_; b < end_block_; ++b) {
        enter_block(b, chunk);
        if (k == 0) load_block(b, chunk);
        compute(chunk);
        save_pending(chunk, target, next);
        if (chunk.end < kChunk || !is_read(target, next, chunk, k + 1 < chunks)) continue;
        advance(chunk);
        for (int64_t i = target; i < next; ++i) {
          if (position(i, chunk) == kChunk) save_state(targets_[i].block);
        }
      }
      target = next;
    }
  }

 private:
  // Whether anybody needs the state at the chunk's end.
  bool is_read(int64_t target, int64_t end, const Chunk& chunk, bool goes_on) const {
    for (int64_t i = target; i < end; ++i) goes_on |= position(i, chunk) == kChunk;
    return goes_on;
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
    const int64_t head = k_head_ * places_.group() + b / per_head;
    if (b == first_block_ || head != head_) {
      head_ = head;
      rows_.write_coefficients(request_, chunk, head, by_);
    }
  }

  void load_block(int64_t b, const Chunk& chunk) {
    const bool starts_head = b == first_block_ || column_ == 0;
    if (starts_head) load_state(b, chunk.number > 0);
    for (int64_t i = 0; i < chunk.first; ++i) {
      float* row = updates_ + i * kColumns;
      std::memset(row, 0, kColumns * sizeof(float));
      std::memcpy(row, places_.pending_update(request_.block, i, head_) + column_,
                  size_t(n_) * sizeof(float));
    }
  }

  // The state of this head from column_ on, in the order in which it lies in memory.
  void load_state(int64_t b, bool kept) {
    constexpr int64_t kAhead = 12;  // rows from asking for memory to its use
    const int64_t blocks = (args_.dv - column_ + kColumns - 1) / kColumns;
    const int64_t mine = end_block_ - b < blocks ? end_block_ - b : blocks;
    const int64_t whole = mine * kColumns, left = args_.dv - column_;
    const int64_t n = whole < left ? whole : left;
    if (!kept) return;
    if (n < whole) std::memset(state_, 0, size_t(mine * padded_) * kColumns * sizeof(float));
    const float* row = places_.state(request_.block, head_) + column_;
    for (int64_t i = 0; i < args_.dk; ++i, row += args_.state_row_stride) {
      for (int64_t j = 0; j < n; j += kColumns) {
        const int64_t m = n - j < kColumns ? n - j : kColumns;
        float* out = state_ + (j / kColumns * padded_ + i) * kColumns;
        for (int64_t line = 0; line < m; line += 16) {
          __builtin_prefetch(row + kAhead * args_.state_row_stride + j + line);
        }
        std::memcpy(out, row + j, size_t(m) * sizeof(float));
      }
    }
  }

  // Snapshots go around the caches: they are read when a later request finds them, if ever.
  void save_state(int64_t block) const {
    float* out = places_.state(block, head_) + column_;
    const bool own = block == request_.block;
    for (int64_t i = 0; i < args_.dk; ++i, out += args_.state_row_stride) {
      const float* row = state_ + i * kColumns;
      for_each_vector(
          n_,
          [&](int64_t j) VLLM_LAMBDA {
            const Floats v = load(row + j);
            own ? store(out + j, v) : stream(out + j, v);
          },
          [&](int64_t j, int64_t m) VLLM_LAMBDA {
            store_first(out + j, load(row + j), m);
          });
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

  void compute(const Chunk& chunk) {
    if (chunk.number > 0) {
      const Cell* state = pack_state();
      rows_.recall_keys(chunk, state, recalled_);
      rows_.recall_queries(chunk, state, answered_);
    } else {
      std::memset(recalled_, 0, 2 * kChunk * kColumns * sizeof(float));
    }
    for (int64_t i = chunk.first; i < chunk.end; ++i) {
      compute_row(chunk, i);
      const int64_t later = chunk.token_of(i) + kChunk;
      if (later < request_.token + request_.tokens) prefetch(later);
    }
  }

  const Cell* pack_state() const {
    if (!kPacks) return reinterpret_cast<const Cell*>(state_);
    const int64_t steps = (args_.dk + Math::kPerCell - 1) / Math::kPerCell;
    for (int64_t s = 0; s < steps; ++s) {
      const float* rows = state_ + s * Math::kPerCell * kColumns;
      const bool alone = (s + 1) * Math::kPerCell > args_.dk;  // the last of an odd number
      for (int64_t j = 0; j < kColumns; j += kWidth) {
        const Floats upper = load(rows + j);
        const Floats lower = alone ? Floats{} : load(rows + kColumns + j);
        store_cells(packed_ + s * kColumns + j, Math::stacked_cells(upper, lower));
      }
    }
    return packed_;
  }

  void compute_row(const Chunk& chunk, int64_t i) {
    const T* values = places_.value(chunk.token_of(i), head_) + column_;
    const Floats recall = splat(-by_.recall[i]), answer = splat(by_.answer[i]);
    Floats update[kVectors], out[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      const int64_t at = i * kColumns + v * kWidth, left = n_ - v * kWidth;
      const T* p = values + v * kWidth;
      const Floats value = left >= kWidth ? load(p) : left > 0 ? load_first(p, left) : Floats{};
      update[v] = fma(recall, load(recalled_ + at), value);
      out[v] = answer * load(answered_ + at);
    }
    for (int64_t j = 0; kChunk > 1 && j < i; ++j) {
      const Floats key = splat(-by_.among_keys[i][j]), query = splat(by_.with_query[i][j]);
      for (int v = 0; v < kVectors; ++v) {
        const Floats w = load(updates_ + j * kColumns + v * kWidth);
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
  void prefetch(int64_t token) const {
    constexpr int64_t kLine = 64 / int64_t(sizeof(T));
    if (column_ == 0) {
      const T *q = places_.query(token, k_head_), *k = places_.key(token, k_head_);
      for (int64_t i = 0; i < args_.dk; i += kLine) {
        __builtin_prefetch(q + i);
        __builtin_prefetch(k + i);
      }
    }
    const T* v = places_.value(token, head_) + column_;
    T* out = places_.output(token, head_) + column_;
    for (int64_t i = 0; i < n_; i += kLine) {
      __builtin_prefetch(v + i);
      __builtin_prefetch(out + i, 1);
    }
  }

  // S = e^L S + sum_j k_j (e^{L-L_j} w_j)^T; a request's first chunk has no S yet.
  void advance(const Chunk& chunk) {
    constexpr int kPer = Math::kPerCell;
    for (int64_t i = 0; i < args_.dk; ++i) scales_[i] = by_.total;
    for (int64_t s = 0; s < kChunk; s += kPer) {
      const Floats upper = splat(by_.to_end[s]), lower = splat(by_.to_end[s + kPer - 1]);
      for (int64_t v = 0; v < kColumns; v += kWidth) {
        const float* row = updates_ + s * kColumns + v;
        store_cells(weighted_ + s / kPer * kColumns + v,
                    Math::stacked_cells(load(row) * upper,
                                        load(row + (kPer - 1) * kColumns) * lower));
      }
    }
    rows_.add_outer_products(weighted_, chunk.number > 0 ? scales_ : nullptr, state_);
  }

  const DeltaRuleArgs& args_;
  const Places<T> places_;
  const Request& request_;
  const Targets targets_;
  const int64_t k_head_, first_block_, end_block_;
  float* decays_;
  const int64_t padded_;
  ChunkRows<Math> rows_;
  typename ChunkRows<Math>::Coefficients by_;
  int64_t head_ = -1, column_ = 0, n_ = 0;
  float *state_ = nullptr, *states_, *scales_, *updates_, *recalled_, *answered_;
  Cell *weighted_, *packed_;
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
  if (!blocks_in_range(args.plan, args.state_blocks)) return kBadIndex;
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
  SharedStatus status;
  parallel_for(threads, plan.requests * args.num_k_heads * parts, [&](int64_t i) {
    const int64_t part = i % parts, k_head = i / parts % args.num_k_heads;
    const Request request(args, i / parts / args.num_k_heads);
    if (request.tokens == 0) return;
    const int64_t first = blocks * part / parts, end = blocks * (part + 1) / parts;
    const int64_t cells = DeltaTask<Math>::cells(args, end - first);
    auto* memory = static_cast<Cell*>(
        Memory::of_thread().task.reserve(cells * int64_t(sizeof(Cell))));
    if (memory == nullptr) return status.fail(kOutOfMemory);
    DeltaTask<Math>(args, request, k_head, first, end, decays, memory).run();
  });
  if (status.failed()) return Status(status.value);
  for (int64_t r = 0; r < plan.requests; ++r) {
    const Request request(args, r);
    if (request.tokens > 0) {
      save_keys_and_decays<typename Math::Element>(args, request, decays);
    }
  }
  return kOk;
}

}  // namespace

Status gated_delta_rule(const DeltaRuleArgs& args) {
  return with_math(args.dtype, [&](auto math) { return run<decltype(math)>(args); });
}

}  // namespace VLLM_ISA
}  // namespace vllm
