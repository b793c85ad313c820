// block_product by tiles.
//
// An element is summed over 16 cells at a time, from the first cell of a call, then added to C. So
// calls that are to agree begin at the same cells; zero cells after the last ones change nothing.
#pragma once

#include "tiles.h"

#if defined(__AMX_BF16__)
namespace vllm {

// columns: at most kTileColumns, a multiple of 16.
template <Start start>
void block_product_by_tiles(const Cell* a, int64_t a_stride, const Cell* b, int64_t b_stride,
                            int64_t steps, float* c, int64_t c_stride, int64_t rows,
                            int64_t columns, const float* scale) {
  for_groups_of_tiles(rows, [&](int64_t r, int64_t m) {
    float* out = c + r * c_stride;
    for (int64_t i = 0; start == Start::kScaled && i < m; ++i) {
      const Floats factor = splat(scale[r + i]);
      for (int64_t j = 0; j < columns; j += kWidth) {
        store(out + i * c_stride + j, load(out + i * c_stride + j) * factor);
      }
    }
    add_tiles(a + r * a_stride, a_stride, m, b, b_stride, steps, start == Start::kZeros, out,
              c_stride, columns);
  });
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
