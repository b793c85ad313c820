// Products of small matrices, on operands of 4-byte cells.
//
// A *cell* is the operand of one multiply-add step of a lane: a float, or (DotMath) a pair
// of bfloat16 that vdpbf16ps multiplies and adds at once. With A [rows, steps] and
// B [steps, columns] in cells, block_product forms C [rows, columns] in float32. Every
// element of C has one chain of operations over the steps, in order, whatever the
// blocking. This makes a row independent of its neighbours.
#pragma once

#include "kernels.h"
#include "vec_math.h"

namespace vllm {

using Cell = uint32_t;

VLLM_INLINE Floats load_cells(const Cell* p) {
  Floats v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

// The same for cells that are read only once: they evict nothing from the caches. p: aligned to a
// vector.
VLLM_INLINE Floats load_passing_cells(const Cell* p) {
#if defined(__AVX512F__)
  return (Floats)_mm512_stream_load_si512(const_cast<Cell*>(p));
#elif defined(__AVX2__)
  return (Floats)_mm256_stream_load_si256(reinterpret_cast<const __m256i*>(p));
#else
  return load_cells(p);
#endif
}
VLLM_INLINE void store_cells(Cell* p, Floats v) { std::memcpy(p, &v, sizeof v); }

// One float per cell. Code that depends only on a `Cells` class is compiled once for all element
// types.
struct FloatCells {
  static constexpr int kPerCell = 1;
  static constexpr bool kIsOfTiles = false, kIsWhole = false;

  static VLLM_INLINE Floats step(Floats a, Floats b, Floats sum) { return fma(a, b, sum); }
  static VLLM_INLINE Floats value(Floats sum) { return sum; }  // a sum as floats

  // The cells of two float32 rows, one above the other (here of the first one only).
  static VLLM_INLINE Floats stacked_cells(Floats upper, Floats) { return upper; }

  // Stores a vector of cells of the probabilities 2^(score * factor + base). Returns sum plus the
  // probabilities as the product will see them.
  static VLLM_INLINE Floats weigh(const float* scores, Floats factor, Floats base, Cell* cells,
                                  Floats sum) {
    const Floats p = exp2(fma(load(scores), factor, base));
    store_cells(cells, p);
    return sum + p;
  }
};

// Makes float cells of elements of type T.
template <class T>
struct FloatMath : FloatCells {
  using Element = T;
  using Cells = FloatCells;

  // Cells [i, i + kWidth) of a row of n elements; zeros beyond the row.
  static VLLM_INLINE Floats row_cells(const T* row, int64_t i, int64_t n) {
    if (i + kWidth <= n) return load(row + i);
    return i < n ? load_first(row + i, n - i) : Floats{};
  }

  // The cells of one step, made of the elements that lie above one another in its rows.
  static VLLM_INLINE Floats column_cells(const T* const* rows, int64_t i, int64_t n) {
    return row_cells(rows[0], i, n);
  }
};

#if defined(__AVX512BF16__)
// Pairs of bfloat16: probabilities are rounded to bfloat16, sums stay in float32.
struct DotMath {
  using Element = BFloat16;
  using Cells = DotMath;
  static constexpr int kPerCell = 2;
  static constexpr bool kIsOfTiles = false, kIsWhole = false;

  static VLLM_INLINE Floats step(Floats a, Floats b, Floats sum) {
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
  }
  static VLLM_INLINE Floats value(Floats sum) { return sum; }

  static VLLM_INLINE Floats row_cells(const BFloat16* row, int64_t i, int64_t n) {
    const int64_t left = n - 2 * i;
    if (left >= 2 * kWidth) return load_cells(reinterpret_cast<const Cell*>(row + 2 * i));
    Cell cells[kWidth] = {};
    if (left > 0) std::memcpy(cells, row + 2 * i, size_t(left) * sizeof(BFloat16));
    return load_cells(cells);
  }

  static VLLM_INLINE Words shorts(const BFloat16* row, int64_t i, int64_t n) {
    if (i + kWidth <= n) {
      Shorts s;
      std::memcpy(&s, row + i, sizeof s);
      return widen(s);
    }
    uint16_t lanes[kWidth] = {};
    if (i < n) std::memcpy(lanes, row + i, size_t(n - i) * sizeof(BFloat16));
    Shorts s;
    std::memcpy(&s, lanes, sizeof s);
    return widen(s);
  }

  static VLLM_INLINE Floats column_cells(const BFloat16* const* rows, int64_t i, int64_t n) {
    return (Floats)(shorts(rows[0], i, n) | (shorts(rows[1], i, n) << 16));
  }

  static VLLM_INLINE Floats stacked_cells(Floats upper, Floats lower) {
    const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh(lower, upper);
    return (Floats)_mm512_permutexvar_epi16(interleaving(), halves);
  }

  // 0, 16, 1, 17, ...
  static VLLM_INLINE __m512i interleaving() {
    const Words lanes = (Words)lane_numbers();
    return (__m512i)(lanes | ((lanes + kWidth) << 16));
  }

  static VLLM_INLINE Floats weigh(const float* scores, Floats factor, Floats base, Cell* cells,
                                  Floats sum) {
    const Floats low = exp2_coarse(fma(load(scores), factor, base));
    const Floats high = exp2_coarse(fma(load(scores + kWidth), factor, base));
    const Floats pairs = (Floats)_mm512_cvtne2ps_pbh(high, low);
    store_cells(cells, pairs);
    return step(pairs, (Floats)(Words{} + 0x3f803f80u), sum);  // times ones
  }
};
#endif

#if defined(__AVX512VNNI__)
// Pairs of 16-bit integers on both sides. Their sums are exact: lanes hold them as 32-bit integers.
struct WholeCells {
  static constexpr int kPerCell = 2;
  static constexpr bool kIsOfTiles = false, kIsWhole = true;

  static VLLM_INLINE Floats step(Floats a, Floats b, Floats sum) {
    return (Floats)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
  }
  static VLLM_INLINE Floats value(Floats sum) { return _mm512_cvtepi32_ps((__m512i)sum); }
};

template <class T>
struct WholeMath : WholeCells {
  using Element = T;
  using Cells = WholeCells;

  static VLLM_INLINE Floats row_cells(const T* row, int64_t i, int64_t n) {
    const __m256i low = halves(row, 2 * i, n), high = halves(row, 2 * i + kWidth, n);
    return (Floats)_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
  }

 private:
  static VLLM_INLINE __m256i halves(const T* row, int64_t i, int64_t n) {
    return _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(FloatMath<T>::row_cells(row, i, n)));
  }
};
#endif

// Calls call(Math()) for the fastest products of elements of `dtype`.
template <class Call>
VLLM_INLINE Status with_math(int64_t dtype, const Call& call) {
#if defined(__AVX512BF16__)
  if (dtype == kBFloat16) return call(DotMath());
#endif
  return with_dtype(dtype, [&](auto type) { return call(FloatMath<decltype(type)>()); });
}

// sums[R rows, V vectors] += A B. kPasses: B is read only once. The cell of A in row r and step s
// is a[r * a_stride + s * a_step].
template <class Cells, bool kPasses = false, int R, int V>
VLLM_INLINE void accumulate(Floats (&sums)[R][V], const Cell* a, int64_t a_stride, int64_t a_step,
                            const Cell* b, int64_t b_stride, int64_t steps) {
  for (int64_t s = 0; s < steps; ++s) {
    Floats cells[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      const Cell* p = b + s * b_stride + v * kWidth;
      cells[v] = kPasses ? load_passing_cells(p) : load_cells(p);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      float cell;
      std::memcpy(&cell, a + r * a_stride + s * a_step, sizeof cell);
      const Floats left = splat(cell);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) sums[r][v] = Cells::step(left, cells[v], sums[r][v]);
    }
  }
}

// The start of a product's sums: zeros, C or C * scale[row]. `scale` is null except for the last.
enum class Start { kZeros, kSums, kScaled };

template <Start start, int R, int V>
VLLM_INLINE void start_sums(Floats (&sums)[R][V], const float* c, int64_t c_stride,
                            const float* scale) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      sums[r][v] = start == Start::kZeros ? Floats{} : load(c + r * c_stride + v * kWidth);
      if (start == Start::kScaled) sums[r][v] = sums[r][v] * splat(scale[r]);
    }
  }
}

template <int R, int V>
VLLM_INLINE void store_sums(const Floats (&sums)[R][V], float* c, int64_t c_stride) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) store(c + r * c_stride + v * kWidth, sums[r][v]);
  }
}

// C += sums.
template <int R, int V>
VLLM_INLINE void add_sums(const Floats (&sums)[R][V], float* c, int64_t c_stride) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      float* p = c + r * c_stride + v * kWidth;
      store(p, load(p) + sums[r][v]);
    }
  }
}

// C[R rows, V vectors] = start + A B.
template <class Cells, Start start, int R, int V>
VLLM_INLINE void product_tile(const Cell* a, int64_t a_stride, const Cell* b, int64_t b_stride,
                              int64_t steps, float* c, int64_t c_stride, const float* scale) {
  Floats sums[R][V];
  start_sums<start>(sums, c, c_stride, scale);
  accumulate<Cells>(sums, a, a_stride, 1, b, b_stride, steps);
  store_sums(sums, c, c_stride);
}

constexpr int kTileRows = kWidth == 4 ? 4 : 6;
constexpr int kTileVectors = kWidth == 16 ? 4 : 2;

// C [rows, columns] = start + A B; start is kZeros or kScaled. columns: a multiple of kWidth.
template <class Cells, Start start>
void block_product(const Cell* a, int64_t a_stride, const Cell* b, int64_t b_stride, int64_t steps,
                   float* c, int64_t c_stride, int64_t rows, int64_t columns, const float* scale);

}  // namespace vllm
