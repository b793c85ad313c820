// Products of pairs of bfloat16 by tiles (AMX): 16 rows times 16 outputs over 16 cells at a time.
//
// A tile's sum over 16 cells is the CPU's own affair (in order, with fused multiply-adds, apart from
// what was there before) and is then added; subnormal numbers count as zeros. Sums of fewer cells
// are those with zeros behind them. So an output's order of sums is that of its cells, 16 by 16,
// whatever other rows there are.
#pragma once

#include "cells.h"

namespace vllm {

#if defined(__AMX_BF16__)
// What a product is made of is as for DotMath; who multiplies whole panels differs.
struct TileMath : DotMath {
  using Cells = TileMath;
  static constexpr bool kIsOfTiles = true;
};

constexpr int64_t kTileSide = 16;  // rows, outputs and cells of a tile
constexpr int64_t kPairRows = 2 * kTileSide;
constexpr int64_t kTileColumns = 4 * kTileSide;  // outputs that lie side by side
constexpr int64_t kTileBytes = kTileSide * int64_t(sizeof(Cell));  // of one of its rows

// What was written before is in memory: the compiler's header (GCC 12) does not tell it that tiles
// and their shapes are read from there.
inline void settle(const void* data) { asm volatile("" : : "r"(data) : "memory"); }

// Which part of a tile counts, as the CPU reads it.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int64_t tile_rows) {
    row_bytes[tile] = uint16_t(kTileBytes);
    rows[tile] = uint8_t(tile_rows);
  }
};

// Tiles of this thread for `rows` rows, up to kPairRows: of more than kTileSide, 0 and 1 are sums of
// the first rows, 2 and 3 of the others, 4 and 5 the rows; else 0 to 3 are sums, 4 the rows. 6 and
// 7 are weights.
inline void shape_tiles(int64_t rows) {
  TileShapes shapes;
  const int64_t upper = rows < kTileSide ? rows : kTileSide;
  const int64_t lower = rows > kTileSide ? rows - kTileSide : upper;
  for (const int tile : {0, 1, 4}) shapes.set(tile, upper);
  for (const int tile : {2, 3, 5}) shapes.set(tile, lower);
  for (const int tile : {6, 7}) shapes.set(tile, kTileSide);
  settle(&shapes);
  _tile_loadconfig(&shapes);
}

// sums[up to 32 rows, 32 of kTileColumns outputs] (+)= x W^T over `steps` cells, a multiple of
// kTileSide. Strides are of rows, in cells.
inline void add_pairs_of_tiles(const Cell* x, int64_t x_stride, const Cell* weights,
                               int64_t stride, int64_t steps, bool first, float* sums) {
  constexpr int64_t kSumBytes = kTileColumns * int64_t(sizeof(float));
  const int64_t x_bytes = x_stride * int64_t(sizeof(Cell));
  const int64_t bytes = stride * int64_t(sizeof(Cell));
  const Cell* lower = x + kTileSide * x_stride;
  float* lower_sums = sums + kTileSide * kTileColumns;
  settle(x);
  if (first) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, sums, kSumBytes);
    _tile_loadd(1, sums + kTileSide, kSumBytes);
    _tile_loadd(2, lower_sums, kSumBytes);
    _tile_loadd(3, lower_sums + kTileSide, kSumBytes);
  }
  for (int64_t s = 0; s < steps; s += kTileSide) {
    _tile_loadd(6, weights + s * stride, bytes);
    _tile_loadd(4, x + s, x_bytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, weights + s * stride + kTileSide, bytes);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, lower + s, x_bytes);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sums, kSumBytes);
  _tile_stored(1, sums + kTileSide, kSumBytes);
  _tile_stored(2, lower_sums, kSumBytes);
  _tile_stored(3, lower_sums + kTileSide, kSumBytes);
}

// The same for up to 16 rows and all outputs.
inline void add_row_of_tiles(const Cell* x, int64_t x_stride, const Cell* weights,
                             int64_t stride, int64_t steps, bool first, float* sums) {
  constexpr int64_t kSumBytes = kTileColumns * int64_t(sizeof(float));
  const int64_t x_bytes = x_stride * int64_t(sizeof(Cell));
  const int64_t bytes = stride * int64_t(sizeof(Cell));
  settle(x);
  if (first) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, sums, kSumBytes);
    _tile_loadd(1, sums + kTileSide, kSumBytes);
    _tile_loadd(2, sums + 2 * kTileSide, kSumBytes);
    _tile_loadd(3, sums + 3 * kTileSide, kSumBytes);
  }
  for (int64_t s = 0; s < steps; s += kTileSide) {
    const Cell* row = weights + s * stride;
    _tile_loadd(4, x + s, x_bytes);
    _tile_loadd(6, row, bytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, row + kTileSide, bytes);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(6, row + 2 * kTileSide, bytes);
    _tile_dpbf16ps(2, 4, 6);
    _tile_loadd(7, row + 3 * kTileSide, bytes);
    _tile_dpbf16ps(3, 4, 7);
  }
  _tile_stored(0, sums, kSumBytes);
  _tile_stored(1, sums + kTileSide, kSumBytes);
  _tile_stored(2, sums + 2 * kTileSide, kSumBytes);
  _tile_stored(3, sums + 3 * kTileSide, kSumBytes);
}
#endif

// Calls call(Math()) for the fastest products of elements of `dtype`, of those that know tiles.
template <class Call>
VLLM_INLINE Status with_tile_math(int64_t dtype, const Call& call) {
#if defined(__AMX_BF16__)
  if (dtype == kBFloat16) return call(TileMath());
#endif
  return with_math(dtype, call);
}

}  // namespace vllm
