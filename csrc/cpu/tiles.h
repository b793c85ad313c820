// Products of pairs of bfloat16 by tiles (AMX): 16 rows times 16 outputs over 16 cells at a time.
//
// The CPU forms a tile's sum over 16 cells (in order, with fused multiply-adds, separately from
// earlier sums) and then adds it; subnormal numbers count as zeros. Fewer cells are filled up with
// zeros. So an output is summed in the order of its cells, 16 at a time, whatever other rows there
// are.
#pragma once

#include <algorithm>

#include "cells.h"

namespace vllm {

#if defined(__AMX_BF16__)
// Operands are those of DotMath; only products of whole panels differ.
struct TileMath : DotMath {
  using Cells = TileMath;
  static constexpr bool kIsOfTiles = true;
};

constexpr int64_t kTileSide = 16;  // rows, outputs and cells of a tile
constexpr int64_t kPairRows = 2 * kTileSide;
constexpr int64_t kTileColumns = 4 * kTileSide;  // outputs that lie side by side
constexpr int64_t kTileBytes = kTileSide * int64_t(sizeof(Cell));  // bytes of one row of a tile

// Makes the compiler complete earlier stores: its header (GCC 12) does not tell it that tiles and
// their shapes are read from memory.
inline void settle(const void* data) { asm volatile("" : : "r"(data) : "memory"); }

// The parts of the tiles that are used, in the CPU's format.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int64_t tile_rows) {
    row_bytes[tile] = uint16_t(kTileBytes);
    rows[tile] = uint8_t(tile_rows);
  }
};

// Shapes the tiles of this thread for `rows` rows, up to kPairRows. With more than kTileSide rows,
// tiles 0 and 1 are sums of the first rows, 2 and 3 sums of the others, 4 and 5 the rows; else 0 to
// 3 are sums and 4 the rows. 6 and 7 are weights.
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

// Tiles [rows / 16 rounded up, kColumns] of C += A B, over whole tiles of cells, for the rows that
// the tiles are shaped for: more than 16 with kRows 2.
template <int kRows, int kColumns>
void add_tile_block(const Cell* a, int64_t a_stride, const Cell* b, int64_t b_stride,
                    int64_t steps, bool is_zero, float* c, int64_t c_stride) {
  static_assert((kRows == 1 && kColumns <= 4) || (kRows == 2 && kColumns <= 2));
  const int64_t a_bytes = a_stride * int64_t(sizeof(Cell)), b_bytes = b_stride * int64_t(sizeof(Cell));
  const int64_t c_bytes = c_stride * int64_t(sizeof(float));
  const Cell* lower = a + kTileSide * a_stride;
  float* lower_c = c + kTileSide * c_stride;
  settle(a);
  if (is_zero) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, c, c_bytes);
    if constexpr (kColumns > 1) _tile_loadd(1, c + kTileSide, c_bytes);
    if constexpr (kRows == 2) {
      _tile_loadd(2, lower_c, c_bytes);
      if constexpr (kColumns > 1) _tile_loadd(3, lower_c + kTileSide, c_bytes);
    } else {
      if constexpr (kColumns > 2) _tile_loadd(2, c + 2 * kTileSide, c_bytes);
      if constexpr (kColumns > 3) _tile_loadd(3, c + 3 * kTileSide, c_bytes);
    }
  }
  for (int64_t s = 0; s < steps; s += kTileSide) {
    const Cell* row = b + s * b_stride;
    _tile_loadd(4, a + s, a_bytes);
    _tile_loadd(6, row, b_bytes);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kColumns > 1) {
      _tile_loadd(7, row + kTileSide, b_bytes);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (kRows == 2) {
      _tile_loadd(5, lower + s, a_bytes);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (kColumns > 1) _tile_dpbf16ps(3, 5, 7);
    } else {
      if constexpr (kColumns > 2) {
        _tile_loadd(6, row + 2 * kTileSide, b_bytes);
        _tile_dpbf16ps(2, 4, 6);
      }
      if constexpr (kColumns > 3) {
        _tile_loadd(7, row + 3 * kTileSide, b_bytes);
        _tile_dpbf16ps(3, 4, 7);
      }
    }
  }
  _tile_stored(0, c, c_bytes);
  if constexpr (kColumns > 1) _tile_stored(1, c + kTileSide, c_bytes);
  if constexpr (kRows == 2) {
    _tile_stored(2, lower_c, c_bytes);
    if constexpr (kColumns > 1) _tile_stored(3, lower_c + kTileSide, c_bytes);
  } else {
    if constexpr (kColumns > 2) _tile_stored(2, c + 2 * kTileSide, c_bytes);
    if constexpr (kColumns > 3) _tile_stored(3, c + 3 * kTileSide, c_bytes);
  }
}

// The same for `columns` columns, a multiple of 16.
template <int kRows>
void add_tile_blocks(const Cell* a, int64_t a_stride, const Cell* b, int64_t b_stride,
                     int64_t steps, bool is_zero, float* c, int64_t c_stride, int64_t columns) {
  constexpr int kMost = 4 / kRows;
  using Add = decltype(&add_tile_block<kRows, 1>);
  static constexpr Add kAdd[] = {
      add_tile_block<kRows, 1>, add_tile_block<kRows, 2>,
      add_tile_block<kRows, kRows == 1 ? 3 : 2>, add_tile_block<kRows, kMost>};
  for (int64_t j = 0; j < columns; j += kMost * kTileSide) {
    const int64_t tiles = std::min<int64_t>((columns - j) / kTileSide, kMost);
    kAdd[tiles - 1](a, a_stride, b + j, b_stride, steps, is_zero, c + j, c_stride);
  }
}

// C [rows, columns] (+)= A B over any number of cells, for up to kPairRows rows, for which the
// tiles are shaped, and for up to kTileColumns columns, a multiple of 16.
inline void add_tiles(const Cell* a, int64_t a_stride, int64_t rows, const Cell* b,
                      int64_t b_stride, int64_t steps, bool is_zero, float* c, int64_t c_stride,
                      int64_t columns) {
  const auto add = rows > kTileSide ? add_tile_blocks<2> : add_tile_blocks<1>;
  const int64_t whole = steps / kTileSide * kTileSide, left = steps - whole;
  if (whole > 0) add(a, a_stride, b, b_stride, whole, is_zero, c, c_stride, columns);
  if (left == 0) return;
  // The last cells, followed by zeros.
  alignas(64) Cell last_a[kPairRows * kTileSide] = {}, last_b[kTileSide * kTileColumns] = {};
  for (int64_t i = 0; i < rows; ++i) {
    std::memcpy(last_a + i * kTileSide, a + i * a_stride + whole, size_t(left) * sizeof(Cell));
  }
  for (int64_t s = 0; s < left; ++s) {
    std::memcpy(last_b + s * columns, b + (whole + s) * b_stride, size_t(columns) * sizeof(Cell));
  }
  add(last_a, kTileSide, last_b, columns, kTileSide, is_zero && whole == 0, c, c_stride, columns);
}

// Calls group(first row, rows) for all rows, with tiles of that shape.
template <class Group>
VLLM_INLINE void for_groups_of_tiles(int64_t rows, const Group& group) {
  for (int64_t r = 0, shaped = 0; r < rows; r += kPairRows) {
    const int64_t m = std::min(rows - r, kPairRows);
    if (m != shaped) shape_tiles(shaped = m);
    group(r, m);
  }
  _tile_release();
}
#endif

// Calls call(Math()) for the fastest products of elements of `dtype`, tiles included.
template <class Call>
VLLM_INLINE Status with_tile_math(int64_t dtype, const Call& call) {
#if defined(__AMX_BF16__)
  if (dtype == kBFloat16) return call(TileMath());
#endif
  return with_math(dtype, call);
}

}  // namespace vllm
