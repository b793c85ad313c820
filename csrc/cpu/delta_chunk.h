// What the chunks of the gated delta rule are made of: which tokens they have, where these
// lie, and what they give to a head before any state is looked at (delta_rule.cpp has the
// formulas and their names).
#pragma once

#include <cmath>

#include "delta_state.h"
#include "delta_tiles.h"
#include "state_plan.h"

namespace vllm {

// Tokens of a chunk of 16-bit types, at absolute positions: also the most pending ones.
// PENDING_TOKENS of vllm/ops/delta_rule.py.
constexpr int64_t kDeltaChunkTokens = 16;

// Views of the pool, of what tokens since the last whole chunk left there.
struct Pending {
  void* data = nullptr;
  int64_t block_stride = 0;
};

struct DeltaRuleArgs {
  int64_t dtype, threads;
  const void* qkv;
  int64_t tokens, qkv_stride, num_k_heads, num_v_heads, dk, dv;
  const void* a;
  int64_t a_stride;
  const void* b;
  int64_t b_stride;
  const void* a_log;  // [num_v_heads], as dt_bias
  int64_t a_log_dtype;
  const void* dt_bias;
  int64_t dt_bias_dtype;
  float* state;  // [blocks, num_v_heads, dk, dv], as delta_state.h says
  int64_t state_blocks, state_block_stride, state_head_stride, state_row_stride;
  Pending keys;     // [blocks, num_k_heads, kDeltaChunkTokens, dk]
  Pending updates;  // float [blocks, num_v_heads, kDeltaChunkTokens, dv]
  Pending decays;   // float [blocks, num_v_heads, kDeltaChunkTokens]
  const int32_t* seq_lens;
  StatePlanArgs plan;
  void* out;  // [tokens, num_v_heads, dv] dense
  float beta_scale;
};

// Tokens of a chunk: with one, as for float32, nothing is ever pending.
template <class T>
constexpr int kChunkOf = sizeof(T) == 2 ? int(kDeltaChunkTokens) : 1;

// Whether tokens can be pending, and states lie as delta_state.h says.
template <class T>
constexpr bool kInHalves = kChunkOf<T> > 1;

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

// What the tokens of a chunk give to one v-head, whatever the columns.
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

// Keys and queries of a chunk for one k-head, and their inner products.
template <class Math>
class ChunkRows {
 public:
  using T = typename Math::Element;
  static constexpr int kChunk = kChunkOf<T>;
  using Coefficients = HeadCoefficients<kChunk>;
  static constexpr int kPadded = Coefficients::kPadded;
  using StateRows = PoolRows<kInHalves<T>>;

  // Cells of a row, padded with zeros to a whole vector.
  static int64_t stride(const DeltaRuleArgs& args) {
    return round_up((args.dk + Math::kPerCell - 1) / Math::kPerCell, kWidth);
  }
  static int64_t cells(const DeltaRuleArgs& args) {
    return kPadded * (3 + Math::kPerCell) * stride(args);
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
    turn_keys();  // some time before tiles want them: they wait for stores
    write_norms(chunk, keys_, 1.0f, key_norm_);
    write_norms(chunk, queries_, 1.0f / std::sqrt(float(args_.dk)), query_norm_);
    multiply(chunk);
    if (chunk.end == kChunk && Math::kPerCell > 1) pair_keys();
  }

  // Rows [first, end) of out [2][kChunk, kColumns] = those of the keys, and of the queries, times
  // the state in cells, [stride(), kColumns] with zeros behind its own.
  void recall(const Chunk& chunk, const Cell* state, float* out) const {
    if constexpr (Math::kIsOfTiles) return tiles_.recall(keys_, stride_, state, out);
    recall(chunk, keys_, state, out);
    recall(chunk, queries_, state, out + kChunk * kColumns);
  }

  // The same of the chunk's only row and `Blocks` blocks of a state in the pool, which is read
  // once, and only what a product takes: out [block] = the key's products, then the query's.
  template <int Blocks>
  void recall_row(const Chunk& chunk, const float* state, float* out) const {
    constexpr int kPer = Math::kPerCell, kAll = Blocks * kVectors;
    constexpr int64_t kAhead = 16;  // rows from asking for memory to its use
    const Cell *key = keys_ + chunk.first * stride_, *query = queries_ + chunk.first * stride_;
    const PoolRows<kInHalves<T>, const float> rows{state, args_.state_row_stride, args_.dk};
    if constexpr (Math::kIsOfTiles) {
      return tiles_.recall_row(key, query - key, rows, Blocks, out);
    }
    Floats by_key[kAll] = {}, by_query[kAll] = {};
    const auto add = [&](int64_t step, int v, Floats cells) VLLM_LAMBDA {
      float with[2];
      std::memcpy(with, key + step, sizeof(Cell));
      std::memcpy(with + 1, query + step, sizeof(Cell));
      by_key[v] = Math::step(splat(with[0]), cells, by_key[v]);
      by_query[v] = Math::step(splat(with[1]), cells, by_query[v]);
    };
    const auto ask = [&](const float* row, int v) VLLM_LAMBDA {
      if (v % (16 / kWidth) == 0) __builtin_prefetch(row + v * kWidth);
    };
    for (int64_t s = 0; s < rows.pairs(); ++s) {
      const int64_t later = s + kAhead, over = later - rows.pairs();
      const float* next = over < 0 ? rows.rounded(later)  // else the next head's
                                   : state + args_.state_head_stride + over * rows.stride;
#pragma GCC unroll 8
      for (int v = 0; v < kAll; ++v) {
        const Floats rounded = load(rows.rounded(s) + v * kWidth);
        ask(next, v);
        if (kPer == 2) {
          add(s, v, rounded);
        } else {
          const float* low = rows.low(s) + v * kWidth;
          ask(rows.low(later), v);
          add(2 * s, v, join_upper(rounded, load(low)));
          add(2 * s + 1, v, join_lower(rounded, load(low)));
        }
      }
    }
    for (int64_t i = 2 * rows.pairs(); i < args_.dk; ++i) {
#pragma GCC unroll 8
      for (int v = 0; v < kAll; ++v) {
        ask(rows.plain(i + kAhead), v);
        const Floats row = load(rows.plain(i) + v * kWidth);
        add(i / kPer, v, kPer == 2 ? rounded_halves(row, Floats{}) : row);
      }
    }
    for (int v = 0; v < kAll; ++v, out += kWidth) {
      if (v > 0 && v % kVectors == 0) out += kColumns;
      store(out, by_key[v]);
      store(out + kColumns, by_query[v]);
    }
  }

  // state [dk, kColumns] = kept * state (kStart: kScaled; kZeros: nothing) + keys^T updates,
  // those in cells; where cells are pairs, `packed` gets the new state in cells.
  template <Start kStart>
  void add_outer_products(const Cell* updates, float kept, float* state, Cell* packed) const {
    if constexpr (Math::kIsOfTiles) {
      return tiles_.template add_outer_products<kStart>(pairs_, updates, args_.dk, kept, state,
                                                        packed);
    }
    static_assert(kTileRows % 2 == 0, "pairs of rows stay together");
    int64_t i = 0;
    for (; i + kTileRows <= args_.dk; i += kTileRows) {
      add_to_rows<kStart, kTileRows>(i, updates, kept, state, packed);
    }
    for (; i + 2 <= args_.dk; i += 2) add_to_rows<kStart, 2>(i, updates, kept, state, packed);
    if (i < args_.dk) add_to_rows<kStart, 1>(i, updates, kept, state, packed);
  }

  // The same, with kStart: kScaled, of kColumns columns of a state where it lies in the pool.
  void add_in_place(const Cell* updates, float kept, const StateRows& state) const {
    if constexpr (Math::kIsOfTiles) return tiles_.add_in_place(pairs_, updates, kept, state);
    int64_t i = 0;
    for (; i + kTileRows <= args_.dk; i += kTileRows) {
      add_in_place<kTileRows>(i, updates, kept, state);
    }
    for (; i + 2 <= args_.dk; i += 2) add_in_place<2>(i, updates, kept, state);
    if (i < args_.dk) add_in_place<1>(i, updates, kept, state);
  }

  void write_coefficients(const Request& request, const Chunk& chunk, int64_t head,
                          Coefficients& out) const {
    write_gates(request, chunk, head, out);
    for (int64_t i = chunk.first; i < chunk.end; ++i) {
      const Floats key_norm = splat(key_norm_[i]), query_norm = splat(query_norm_[i]);
      const Floats now = splat(out.log_decay[i]);
      for (int64_t j = 0; j <= i; j += kWidth) {
        const Floats kept = exp(now - load(out.log_decay + j));
        store(&out.among_keys[i][j], -(kept * key_norm * load(&products_[0][i][j])));
        store(&out.with_query[i][j], kept * query_norm * load(&products_[1][i][j]));
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

  Floats sum_of_squares(const Cell* row) const {
    Floats sum = {};
    for (int64_t s = 0; s < stride_; s += kWidth) {
      const Floats cells = load_cells(row + s);
      sum = Math::step(cells, cells, sum);
    }
    return sum;
  }

  // The inverse norms of this step's rows, times scale; sums over lanes in order.
  void write_norms(const Chunk& chunk, const Cell* rows, float scale, float* norms) const {
    const bool alone = chunk.end - chunk.first == 1;
    if (alone) {
      float lanes[kWidth];
      store(lanes, sum_of_squares(rows + chunk.first * stride_));
      for (int lane = 1; lane < kWidth; ++lane) lanes[0] += lanes[lane];
      norms[chunk.first] = lanes[0];
    }
    for (int64_t i = chunk.first / kWidth * kWidth; i < chunk.end && !alone; i += kWidth) {
      Floats sums[kWidth] = {};
      for (int64_t r = 0; r < kWidth; ++r) {
        if (i + r < chunk.first || i + r >= chunk.end) continue;
        sums[r] = sum_of_squares(rows + (i + r) * stride_);
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
    if constexpr (Math::kIsOfTiles) return tiles_.pair_keys(columns_, stride_, pairs_);
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

  // products_: rows of the keys, and of the queries, times the keys.
  void multiply(const Chunk& chunk) {
    const Cell *keys = keys_ + chunk.first * stride_, *queries = queries_ + chunk.first * stride_;
    const int64_t rows = chunk.end - chunk.first;
    if constexpr (Math::kIsOfTiles) {
      return rows == 1 ? tiles_.multiply_row(keys, queries - keys, stride_, columns_,
                                             products_[0][chunk.first])
                       : tiles_.multiply(keys_, stride_, columns_, products_[0][0]);
    }
    if constexpr (kChunk == 16 && kWidth == 16) {  // all rows at once: chains enough to be busy
      if (rows == kChunk) {
        product_tile<Math, Start::kZeros, kChunk, 1>(keys, stride_, columns_, kPadded, stride_,
                                                     products_[0][0], kPadded, nullptr);
        return product_tile<Math, Start::kZeros, kChunk, 1>(
            queries, stride_, columns_, kPadded, stride_, products_[1][0], kPadded, nullptr);
      }
    }
    if (rows == 1) {  // both at once, for the same reason
      return block_product<typename Math::Cells, Start::kZeros>(keys, queries - keys, columns_, kPadded, stride_,
                                                products_[0][chunk.first], kChunk * kPadded, 2,
                                                kPadded, nullptr);
    }
    block_product<typename Math::Cells, Start::kZeros>(keys, stride_, columns_, kPadded, stride_,
                                       products_[0][chunk.first], kPadded, rows, kPadded, nullptr);
    block_product<typename Math::Cells, Start::kZeros>(queries, stride_, columns_, kPadded, stride_,
                                       products_[1][chunk.first], kPadded, rows, kPadded, nullptr);
  }

  void recall(const Chunk& chunk, const Cell* rows, const Cell* state, float* out) const {
    const int64_t steps = (args_.dk + Math::kPerCell - 1) / Math::kPerCell;
    block_product<typename Math::Cells, Start::kZeros>(rows + chunk.first * stride_, stride_, state, kColumns,
                                       steps, out + chunk.first * kColumns, kColumns,
                                       chunk.end - chunk.first, kColumns, nullptr);
  }

  template <Start kStart, int R>
  __attribute__((noinline)) void add_to_rows(int64_t i, const Cell* updates, float kept, float* state, Cell* packed) const {
    constexpr int kPer = Math::kPerCell;
    const Cell* keys = kPer > 1 ? pairs_ : keys_;
    const int64_t step = kPer > 1 ? round_up(args_.dk, kWidth) : stride_;
    float scale[R];
    for (int r = 0; r < R; ++r) scale[r] = kept;
    Floats sums[R][kVectors];
    start_sums<kStart>(sums, state + i * kColumns, kColumns, scale);
    accumulate<Math>(sums, keys + i, 1, step, updates, kColumns, kChunk / kPer,
                     [](int64_t) VLLM_LAMBDA {});
    store_sums(sums, state + i * kColumns, kColumns);
    if (kPer == 1) return;
#pragma GCC unroll 8
    for (int r = 0; r < R; r += 2) {
      Cell* cells = packed + (i + r) / 2 * kColumns;
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        const Floats lower = r + 1 < R ? sums[r + 1 < R ? r + 1 : r][v] : Floats{};
        store_cells(cells + v * kWidth, rounded_halves(sums[r][v], lower));
      }
    }
  }

  template <int R>
  __attribute__((noinline)) void add_in_place(int64_t i, const Cell* updates, float kept, const StateRows& state) const {
    constexpr int kPer = Math::kPerCell;
    constexpr int64_t kAhead = 4 * kTileRows;  // rows from asking for memory to its use
    constexpr int kPaired = kInHalves<T> ? R / 2 * 2 : 0;  // rows that lie as halves
    const Cell* keys = kPer > 1 ? pairs_ : keys_;
    const int64_t step = kPer > 1 ? round_up(args_.dk, kWidth) : stride_;
    const Floats scale = splat(kept);
    const auto ask = [&](const float* row, int v) VLLM_LAMBDA {
      if (v % (16 / kWidth) == 0) __builtin_prefetch(row + v * kWidth);
    };
    Floats sums[R][kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
#pragma GCC unroll 8
      for (int r = 0; r + 1 < R && r < kPaired; r += 2) {  // its rounded halves were just read
        const Floats rounded = load(state.rounded((i + r) / 2) + v * kWidth);
        const Floats low = load(state.low((i + r) / 2) + v * kWidth);
        ask(state.low((i + r + kAhead) / 2), v);
        sums[r][v] = join_upper(rounded, low) * scale;
        sums[r + 1][v] = join_lower(rounded, low) * scale;
      }
#pragma GCC unroll 8
      for (int r = kPaired; r < R; ++r) {
        ask(state.plain(i + r + kAhead), v);
        sums[r][v] = load(state.plain(i + r) + v * kWidth) * scale;
      }
    }
    accumulate<Math>(sums, keys + i, 1, step, updates, kColumns, kChunk / kPer,
                     [](int64_t) VLLM_LAMBDA {});
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
#pragma GCC unroll 8
      for (int r = 0; r + 1 < R && r < kPaired; r += 2) {
        const Floats upper = sums[r][v], lower = sums[r + 1][v];
        store(state.rounded((i + r) / 2) + v * kWidth, rounded_halves(upper, lower));
        store(state.low((i + r) / 2) + v * kWidth, low_halves(upper, lower));
      }
#pragma GCC unroll 8
      for (int r = kPaired; r < R; ++r) store(state.plain(i + r) + v * kWidth, sums[r][v]);
    }
  }

  void write_gates(const Request& request, const Chunk& chunk, int64_t head,
                   Coefficients& out) const {
    float a[kPadded] = {}, b[kPadded] = {}, rates[kPadded];
    for (int64_t i = chunk.first; i < chunk.end; ++i) {
      const int64_t token = chunk.token_of(i);
      a[i] = to_float(static_cast<const T*>(args_.a)[token * args_.a_stride + head]);
      b[i] = to_float(static_cast<const T*>(args_.b)[token * args_.b_stride + head]);
    }
    const Floats speed = exp(splat(entry(args_.a_log, args_.a_log_dtype, head)));
    const Floats bias = splat(entry(args_.dt_bias, args_.dt_bias_dtype, head));
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
      store(out.gain + i, splat(args_.beta_scale) * sigmoid<float>(load(b + i)) * key_norm);
    }
  }

  const DeltaRuleArgs& args_;
  const Places<T> places_;
  const int64_t stride_;
  Cell *keys_, *queries_, *columns_, *pairs_;
  float key_norm_[kPadded], query_norm_[kPadded];
  float products_[2][kChunk][kPadded];
  [[no_unique_address]] mutable ChunkTiles<Math> tiles_;
};

}  // namespace vllm
