// The products of a chunk's keys and queries: with each other, with the state, and with the updates
// that the tokens add to it.
//
// kAsked: the operands multiplied with the state, (2) keys and queries or (1) queries only.
#pragma once

#include "chunk_tiles.h"
#include "chunks.h"

namespace vllm {

constexpr int kVectors = kTileVectors;
constexpr int kColumns = kVectors * kWidth;  // columns of S in one block

// Keys and queries of a chunk for one k-head, and their inner products.
template <class Math, int kAsked>
class ChunkRows {
 public:
  using T = typename Math::Element;
  static constexpr int kChunk = kChunkOf<T>;
  static constexpr int kPadded = (kChunk + kWidth - 1) / kWidth * kWidth;
  using StateRows = PoolRows<kInHalves<T>>;
  // Of a state that a task keeps. It is in a near cache.
  struct OwnRows : PoolRows<Math::kPerCell == 2> {
    static constexpr bool kIsNear = true;
  };
  using Tiles = ChunkTiles<Math>;

  // Cells of a row, padded with zeros to a whole vector.
  static int64_t stride(const ChunkArgs& args) {
    return round_up((args.dk + Math::kPerCell - 1) / Math::kPerCell, kWidth);
  }
  static int64_t cells(const ChunkArgs& args) {
    return kPadded * (3 + Math::kPerCell) * stride(args);
  }

  // Rows of such a state: pairs if they are in halves, as many as the keys have for tiles.
  static int64_t own_rows(const ChunkArgs& args) {
    return Math::kIsOfTiles ? 2 * stride(args) : round_up(args.dk, Math::kPerCell);
  }

  ChunkRows(const ChunkArgs& args, Cell* memory, Tiles& tiles)
      : args_(args), stride_(stride(args)), keys_(memory), queries_(keys_ + kPadded * stride_),
        asked_(kAsked == 2 ? keys_ : queries_), columns_(queries_ + kPadded * stride_),
        pairs_(columns_ + kPadded * stride_), tiles_(tiles) {}

  int64_t stride() const { return stride_; }
  const Cell* keys() const { return keys_; }
  const Cell* queries() const { return queries_; }
  const float* with_keys(int64_t i) const { return products_[0][i]; }
  const float* with_queries(int64_t i) const { return products_[kAsked - 1][i]; }

  // Reads key(i) of all rows and query(i) of this step's rows.
  template <class Key, class Query>
  void read(const Chunk& chunk, const Key& key, const Query& query) {
    for (int64_t i = 0; i < chunk.end; ++i) read_row(key(i), keys_ + i * stride_);
    std::memset(keys_ + chunk.end * stride_, 0,
                size_t((kPadded - chunk.end) * stride_) * sizeof(Cell));
    for (int64_t i = chunk.first; i < chunk.end; ++i) {
      read_row(query(i), queries_ + i * stride_);
    }
    turn_keys();  // early, because tiles that read them wait for the stores
  }

  // Forms with_keys and with_queries: rows [first, end) of the kAsked operands times the keys.
  void multiply(const Chunk& chunk) {
    multiply_rows(chunk);
    if (chunk.end == kChunk && Math::kPerCell > 1) pair_keys();
  }

  // Rows [first, end) of out [kAsked][kChunk, kColumns] = those of the kAsked operands times the
  // state in cells [stride(), kColumns], which has zeros after its last row.
  void recall(const Chunk& chunk, const Cell* state, float* out) const {
    if constexpr (Math::kIsOfTiles) {
      return tiles_.template recall<kAsked>(asked_, stride_, state, out);
    }
    if constexpr (kAsked == 2) recall(chunk, keys_, state, out);
    recall(chunk, queries_, state, out + (kAsked - 1) * kChunk * kColumns);
  }

  // The same for the chunk's only row and `Blocks` blocks of a state in the pool. The state is read
  // once, and only the part that a product needs. out: [block][kAsked, kColumns].
  template <int Blocks>
  void recall_row(const Chunk& chunk, const float* state, float* out) const {
    constexpr int kPer = Math::kPerCell, kAll = Blocks * kVectors;
    constexpr int64_t kAhead = 16;  // rows from a prefetch to its use
    const Cell* row = asked_ + chunk.first * stride_;
    const int64_t apart = kPadded * stride_;
    const PoolRows<kInHalves<T>, const float> rows{state, args_.state_row_stride, args_.dk};
    if constexpr (Math::kIsOfTiles) {
      return tiles_.template recall_row<kAsked>(row, apart, rows, Blocks, out);
    }
    Floats sums[kAsked][kAll] = {};
    const auto add = [&](int64_t step, int v, Floats cells) VLLM_LAMBDA {
#pragma GCC unroll 2
      for (int a = 0; a < kAsked; ++a) {
        float with;
        std::memcpy(&with, row + a * apart + step, sizeof(Cell));
        sums[a][v] = Math::step(splat(with), cells, sums[a][v]);
      }
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
    for (int v = 0; v < kAll; ++v) {
      float* block = out + v / kVectors * kAsked * kColumns + v % kVectors * kWidth;
      for (int a = 0; a < kAsked; ++a) store(block + a * kColumns, sums[a][v]);
    }
  }

  // state [dk, kColumns] = kept * state + keys^T updates, with the updates in cells. State:
  // StateRows or OwnRows.
  template <class State>
  void add_outer_products(const Cell* updates, float kept, const State& state) const {
    if constexpr (Math::kIsOfTiles) {
      return tiles_.add_outer_products(pairs_, updates, kept, state);
    }
    static_assert(kTileRows % 2 == 0, "pairs of rows stay together");
    int64_t i = 0;
    for (; i + kTileRows <= state.dk; i += kTileRows) {
      add_to_rows<kTileRows>(i, updates, kept, state);
    }
    const PoolRows<State::kIsInHalves>& last = state;  // one body for both kinds
    for (; i + 2 <= state.dk; i += 2) add_to_rows<2>(i, updates, kept, last);
    if (i < state.dk) add_to_rows<1>(i, updates, kept, last);
  }

 private:
  void read_row(const T* row, Cell* out) const {
    for (int64_t i = 0; i < stride_; i += kWidth) {
      store_cells(out + i, Math::row_cells(row, i, args_.dk));
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

  // Writes pairs_[step][i]: element i of the keys of two tokens. Cells are two elements here.
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

  void multiply_rows(const Chunk& chunk) {
    const Cell* rows = asked_ + chunk.first * stride_;
    const int64_t count = chunk.end - chunk.first, apart = kPadded * stride_;
    if constexpr (Math::kIsOfTiles) {
      return count == 1 ? tiles_.template multiply_row<kAsked>(rows, apart, stride_, columns_,
                                                               products_[0][chunk.first])
                        : tiles_.template multiply<kAsked>(asked_, stride_, columns_,
                                                           products_[0][0]);
    }
    if (count == 1) {  // all at once, so that there are enough chains of operations
      return block_product<typename Math::Cells, Start::kZeros>(
          rows, apart, columns_, kPadded, stride_, products_[0][chunk.first], kChunk * kPadded,
          kAsked, kPadded, nullptr);
    }
    for (int a = 0; a < kAsked; ++a, rows += apart) {
      float* out = products_[a][chunk.first];
      if constexpr (kChunk == 16 && kWidth == 16) {  // for the same reason
        if (count == kChunk) {
          product_tile<Math, Start::kZeros, kChunk, 1>(rows, stride_, columns_, kPadded, stride_,
                                                       out, kPadded, nullptr);
          continue;
        }
      }
      block_product<typename Math::Cells, Start::kZeros>(rows, stride_, columns_, kPadded, stride_,
                                                         out, kPadded, count, kPadded, nullptr);
    }
  }

  void recall(const Chunk& chunk, const Cell* rows, const Cell* state, float* out) const {
    const int64_t steps = (args_.dk + Math::kPerCell - 1) / Math::kPerCell;
    block_product<typename Math::Cells, Start::kZeros>(
        rows + chunk.first * stride_, stride_, state, kColumns, steps, out + chunk.first * kColumns,
        kColumns, chunk.end - chunk.first, kColumns, nullptr);
  }

  template <int R, class State>
  __attribute__((noinline)) void add_to_rows(int64_t i, const Cell* updates, float kept,
                                             const State& state) const {
    constexpr int64_t kAhead = 4 * kTileRows;  // rows from a prefetch to its use
    constexpr int kPaired = State::kIsInHalves ? R / 2 * 2 : 0;
    const Floats scale = splat(kept);
    const auto ask = [&](const float* row, int v) VLLM_LAMBDA {
      if (!State::kIsNear && v % (16 / kWidth) == 0) __builtin_prefetch(row + v * kWidth);
    };
    Floats sums[R][kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
#pragma GCC unroll 8
      for (int r = 0; r + 1 < R && r < kPaired; r += 2) {  // the rounded halves were just read
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
    add_outer_products_to(i, updates, sums);
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

  // sums += rows [i, i + R) of keys^T updates.
  template <int R>
  VLLM_INLINE void add_outer_products_to(int64_t i, const Cell* updates,
                                         Floats (&sums)[R][kVectors]) const {
    constexpr int kPer = Math::kPerCell;
    const Cell* keys = kPer > 1 ? pairs_ : keys_;
    const int64_t step = kPer > 1 ? round_up(args_.dk, kWidth) : stride_;
    accumulate<Math>(sums, keys + i, 1, step, updates, kColumns, kChunk / kPer);
  }

  const ChunkArgs& args_;
  const int64_t stride_;
  Cell *keys_, *queries_, *asked_, *columns_, *pairs_;
  float products_[kAsked][kChunk][kPadded];
  Tiles& tiles_;
};

}  // namespace vllm
