// Products of cells, for all kernels that need them.
#include "cells.h"

namespace vllm {
namespace {

template <class Cells, Start start, int R, int V = kTileVectors>
void product_rows(const Cell* a, int64_t a_stride, const Cell* b, int64_t b_stride, int64_t steps,
                  float* c, int64_t c_stride, int64_t columns, const float* scale) {
  int64_t j = 0;
  for (; j + V * kWidth <= columns; j += V * kWidth) {
    product_tile<Cells, start, R, V>(a, a_stride, b + j, b_stride, steps, c + j, c_stride, scale);
  }
  if constexpr (V > 1) {
    if (j < columns) {
      product_rows<Cells, start, R, V - 1>(a, a_stride, b + j, b_stride, steps, c + j, c_stride,
                                           columns - j, scale);
    }
  }
}

}  // namespace

template <class Cells, Start start>
void block_product(const Cell* a, int64_t a_stride, const Cell* b, int64_t b_stride, int64_t steps,
                   float* c, int64_t c_stride, int64_t rows, int64_t columns, const float* scale) {
  using Rows = void (*)(const Cell*, int64_t, const Cell*, int64_t, int64_t, float*, int64_t,
                        int64_t, const float*);
  static constexpr Rows kRows[] = {
      product_rows<Cells, start, 1>, product_rows<Cells, start, 2>, product_rows<Cells, start, 3>,
      product_rows<Cells, start, 4>,
#if defined(__AVX2__)
      product_rows<Cells, start, 5>, product_rows<Cells, start, 6>,
#endif
  };
  static_assert(sizeof kRows / sizeof kRows[0] == kTileRows, "one instance a number of rows");
  for (int64_t r = 0; r < rows; r += kTileRows) {
    const int64_t m = rows - r < kTileRows ? rows - r : kTileRows;
    kRows[m - 1](a + r * a_stride, a_stride, b, b_stride, steps, c + r * c_stride, c_stride,
                 columns, scale == nullptr ? nullptr : scale + r);
  }
}

#define VLLM_PRODUCTS(cells, start)                                                            \
  template void block_product<cells, start>(const Cell*, int64_t, const Cell*, int64_t, int64_t, \
                                            float*, int64_t, int64_t, int64_t, const float*);
VLLM_PRODUCTS(FloatCells, Start::kZeros)
VLLM_PRODUCTS(FloatCells, Start::kScaled)
#if defined(__AVX512BF16__)
VLLM_PRODUCTS(DotMath, Start::kZeros)
VLLM_PRODUCTS(DotMath, Start::kScaled)
#endif

}  // namespace vllm
