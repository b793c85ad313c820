// Products by tiles for a chunk of tokens (chunk_rows.h): all products except those in float32.
//
// kAsked: the operands multiplied with the state, (2) keys and queries or (1) queries only. They
// lie one after the other, 16 rows each, so that both are multiplied at once, and so are a lone key
// and its query. There is one order of sums, whatever part of the chunk the step has. Rows that the
// step does not have are multiplied too, but their results are not read.
#pragma once

#include <algorithm>

#include "state_halves.h"
#include "tiles.h"

namespace vllm {

template <class Math>
class ChunkTiles {};  // empty for a Math without tiles

#if defined(__AMX_BF16__)
// Owns the tiles of its thread during its lifetime.
template <>
class ChunkTiles<TileMath> {
 public:
  ChunkTiles() = default;
  ChunkTiles(const ChunkTiles&) = delete;
  ~ChunkTiles() { _tile_release(); }

  // products[kAsked][16][16] = the operands times the keys. columns[step][16 keys]: keys in cells.
  template <int kAsked>
  void multiply(const Cell* rows, int64_t stride, const Cell* columns, float* products) {
    const int64_t bytes = stride * int64_t(sizeof(Cell));
    take_shape(kPairRows);
    settle(rows);
    _tile_zero(0);
    if constexpr (kAsked == 2) _tile_zero(2);
    for (int64_t s = 0; s < stride; s += kTileSide) {
      _tile_loadd(6, columns + s * kTileSide, kTileBytes);
      _tile_loadd(4, rows + s, bytes);
      _tile_dpbf16ps(0, 4, 6);
      if constexpr (kAsked == 2) {
        _tile_loadd(5, rows + kTileSide * stride + s, bytes);
        _tile_dpbf16ps(2, 5, 6);
      }
    }
    _tile_stored(0, products, kTileBytes);
    if constexpr (kAsked == 2) _tile_stored(2, products + kTileSide * kTileSide, kTileBytes);
  }

  // The same for a lone token, whose query lies `apart` cells after its key.
  template <int kAsked>
  void multiply_row(const Cell* row, int64_t apart, int64_t stride, const Cell* columns,
                    float* products) {
    take_shape(kAsked);
    settle(row);
    _tile_zero(0);
    for (int64_t s = 0; s < stride; s += kTileSide) {
      _tile_loadd(6, columns + s * kTileSide, kTileBytes);
      _tile_loadd(4, row + s, apart * int64_t(sizeof(Cell)));
      _tile_dpbf16ps(0, 4, 6);
    }
    _tile_stored(0, products, kTileSide * kTileBytes);
  }

  // out[kAsked][16][kTileColumns] = the operands times the state [stride, kTileColumns].
  template <int kAsked>
  void recall(const Cell* rows, int64_t stride, const Cell* state, float* out) {
    take_shape(kPairRows);
    add_tile_blocks<kAsked>(rows, stride, state, kTileColumns, stride, true, out, kTileColumns,
                       kTileColumns);
  }

  // out[blocks][kAsked][kTileColumns] = a lone token's operands times blocks of columns of a state
  // in the pool. Nothing is prefetched: measured, tiles only wait for prefetches.
  template <int kAsked, class Rows>
  void recall_row(const Cell* row, int64_t apart, Rows rows, int64_t blocks, float* out) {
    take_shape(kAsked);
    for (int64_t b = 0; b < blocks; ++b) {
      recall_block(row, apart, rows, out + kAsked * b * kTileColumns);
      rows.first += kTileColumns;
    }
  }

  // pairs[element][16 cells]: that element of two keys in each of the first 8 cells, then zeros.
  static void pair_keys(const Cell* columns, int64_t stride, Cell* pairs) {
    alignas(64) uint16_t halves[2 * kTileSide];  // the even ones, then the odd ones
    for (int i = 0; i < kTileSide; ++i) halves[i] = 2 * i, halves[kTileSide + i] = 2 * i + 1;
    const __m512i order = _mm512_load_si512(halves);
    for (int64_t s = 0; s < stride; ++s, pairs += 2 * kTileSide) {
      const __m512i cells = _mm512_load_si512(columns + s * kTileSide);
      const __m512i turned = _mm512_permutexvar_epi16(order, cells);
      _mm512_store_si512(pairs, _mm512_zextsi256_si512(_mm512_castsi512_si256(turned)));
      _mm512_store_si512(pairs + kTileSide,
                         _mm512_zextsi256_si512(_mm512_extracti64x4_epi64(turned, 1)));
    }
  }

  // state[dk, kTileColumns] = kept * state + keys^T updates. updates[16 cells]: 8 cells of two
  // tokens each, then zeros.
  template <class Rows>
  void add_outer_products(const Cell* pairs, const Cell* updates, float kept, const Rows& state) {
    const Floats scale = splat(kept);
    const auto sum = [&](Floats old, const float* sums) VLLM_LAMBDA {
      return fma(old, scale, load(sums));
    };
    const auto take = [&](int64_t first, const float* sums) VLLM_LAMBDA {
      const int64_t end = std::min(first + kTileSide, state.dk);
      int64_t i = first;
      for (; i + 2 <= end; i += 2, sums += 2 * kTileColumns) {
        float *rounded = state.rounded(i / 2), *low = state.low(i / 2);
#pragma GCC unroll 4
        for (int64_t j = 0; j < kTileColumns; j += kWidth) {
          const Floats halves = load(rounded + j), rest = load(low + j);
          const Floats upper = sum(join_upper(halves, rest), sums + j);
          const Floats lower = sum(join_lower(halves, rest), sums + kTileColumns + j);
          store(rounded + j, rounded_halves(upper, lower));
          store(low + j, low_halves(upper, lower));
        }
      }
      for (int64_t j = 0; i < end && j < kTileColumns; j += kWidth) {
        float* row = state.plain(i) + j;
        store(row, sum(load(row), sums + j));
      }
    };
    form_outer_products(pairs, updates, state.dk, take);
  }

 private:
  // Rows that do not fill a tile are copied.
  template <class Rows>
  static void recall_block(const Cell* key, int64_t apart, const Rows& rows, float* out) {
    const int64_t pairs = rows.pairs(), whole = pairs / kTileSide * kTileSide;
    const auto cells = [&](int64_t s) VLLM_LAMBDA {
      return reinterpret_cast<const Cell*>(rows.rounded(s));
    };
    add_tile_block<1, 4>(key, apart, cells(0), rows.stride, whole, true, out, kTileColumns);
    if (2 * whole == rows.dk) return;
    alignas(64) Cell last[kTileSide * kTileColumns] = {};
    for (int64_t s = whole; s < pairs; ++s) {
      std::memcpy(last + (s - whole) * kTileColumns, cells(s), kTileColumns * sizeof(Cell));
    }
    for (int64_t j = 0; 2 * pairs < rows.dk && j < kTileColumns; j += kWidth) {
      store_cells(last + (pairs - whole) * kTileColumns + j,
                  rounded_halves(load(rows.plain(2 * pairs) + j), Floats{}));
    }
    add_tile_block<1, 4>(key + whole, apart, last, kTileColumns, kTileSide, false, out,
                           kTileColumns);
  }

  // Calls take(i, sums) for every 16 rows of keys^T updates, from row i on: sums[16, kTileColumns].
  template <class Take>
  void form_outer_products(const Cell* pairs, const Cell* updates, int64_t rows,
                           const Take& take) {
    constexpr int64_t kBytes = kTileColumns * int64_t(sizeof(Cell));
    take_shape(kPairRows);
    alignas(64) float sums[2][kTileSide * kTileColumns];
    settle(updates);
    _tile_loadd(4, updates, kBytes);
    _tile_loadd(5, updates + kTileSide, kBytes);
    _tile_loadd(6, updates + 2 * kTileSide, kBytes);
    _tile_loadd(7, updates + 3 * kTileSide, kBytes);
    const auto multiply = [&](int64_t i) VLLM_LAMBDA {
      float* out = sums[i / kTileSide % 2];
      _tile_loadd(0, pairs + i * kTileSide, kTileBytes);
      _tile_zero(1);
      _tile_dpbf16ps(1, 0, 4);
      _tile_stored(1, out, kBytes);
      _tile_zero(2);
      _tile_dpbf16ps(2, 0, 5);
      _tile_stored(2, out + kTileSide, kBytes);
      _tile_zero(3);
      _tile_dpbf16ps(3, 0, 6);
      _tile_stored(3, out + 2 * kTileSide, kBytes);
      _tile_zero(1);
      _tile_dpbf16ps(1, 0, 7);
      _tile_stored(1, out + 3 * kTileSide, kBytes);
    };
    multiply(0);  // one tile ahead of `take`, because stores cannot be read at once
    for (int64_t i = 0; i < rows; i += kTileSide) {
      if (i + kTileSide < rows) multiply(i + kTileSide);
      take(i, sums[i / kTileSide % 2]);
    }
  }

  void take_shape(int64_t rows) {
    if (rows == rows_) return;
    rows_ = rows;
    shape_tiles(rows);
  }

  int64_t rows_ = 0;
};
#endif

}  // namespace vllm
