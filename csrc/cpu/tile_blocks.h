// block_product by tiles.
//
// An element's order of sums: cells by 16 from the first one of a call, apart from what C held. So
// calls that are to agree begin at the same cells; cells of zeros behind them change nothing.
#pragma once

#include "tiles.h"

#if defined(__AMX_BF16__)
namespace vllm {

// columns: at most kTileColumns, a multiple of 16.
template <Start start>
void block_product_by_tiles(const Cell* a, int64_t a_stride, const Cell* b, int64_t b_stride,
                            int64_t steps, float* c, int64_t c_stride, int64_t rows,
                            int64_t columns, const float* scale) {
  const int64_t whole = steps / kTileSide * kTileSide, left = steps - whole;
  alignas(64) Cell last_a[kPairRows * kTileSide], last_b[kTileSide * kTileColumns];
  if (left > 0) {
    std::memset(last_b, 0, sizeof last_b);
    for (int64_t s = 0; s < left; ++s) {
      std::memcpy(last_b + s * columns, b + (whole + s) * b_stride, size_t(columns) * sizeof(Cell));
    }
  }
  for (int64_t r = 0, shaped = 0; r < rows; r += kPairRows) {
    const int64_t m = std::min(rows - r, kPairRows);
    if (m != shaped) shape_tiles(shaped = m);
    const Cell* own = a + r * a_stride;
    float* out = c + r * c_stride;
    if (start == Start::kScaled) {
      for (int64_t i = 0; i < m; ++i) {
        const Floats factor = splat(scale[r + i]);
        for (int64_t j = 0; j < columns; j += kWidth) {
          float* p = out + i * c_stride + j;
          store(p, load(p) * factor);
        }
      }
    }
    const auto add = m > kTileSide ? add_tile_blocks<2> : add_tile_blocks<1>;
    const bool is_zero = start == Start::kZeros;
    if (whole > 0) add(own, a_stride, b, b_stride, whole, is_zero, out, c_stride, columns);
    if (left == 0) continue;
    std::memset(last_a, 0, sizeof last_a);
    for (int64_t i = 0; i < m; ++i) {
      std::memcpy(last_a + i * kTileSide, own + i * a_stride + whole, size_t(left) * sizeof(Cell));
    }
    add(last_a, kTileSide, last_b, columns, kTileSide, is_zero && whole == 0, out, c_stride, columns);
  }
  _tile_release();
}

template <>
inline void block_product<TileMath, Start::kZeros>(const Cell* a, int64_t a_stride, const Cell* b,
                                                   int64_t b_stride, int64_t steps, float* c,
                                                   int64_t c_stride, int64_t rows, int64_t columns,
                                                   const float* scale) {
  block_product_by_tiles<Start::kZeros>(a, a_stride, b, b_stride, steps, c, c_stride, rows,
                                        columns, scale);
}

template <>
inline void block_product<TileMath, Start::kScaled>(const Cell* a, int64_t a_stride, const Cell* b,
                                                    int64_t b_stride, int64_t steps, float* c,
                                                    int64_t c_stride, int64_t rows,
                                                    int64_t columns, const float* scale) {
  block_product_by_tiles<Start::kScaled>(a, a_stride, b, b_stride, steps, c, c_stride, rows,
                                         columns, scale);
}

}  // namespace vllm
#endif
