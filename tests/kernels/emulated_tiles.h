// The tile instructions that csrc/cpu uses, in C++, for CPUs without them.
//
// CMakeLists.txt (EMULATED_TILES) compiles the sources that know tiles with this header before
// them, and says that there are tiles. The header takes the names of the compiler's intrinsics. TDPBF16PS is computed as
// Intel's manual of instructions describes it: each of the two terms of a cell has a chain of fused
// multiply-adds over the cells, from zero; both chains are added, and their sum is added to the
// tile. Subnormal operands and results are zeros. Whatever the CPU refuses ends the process: tiles
// without shapes, shapes that do not match, one tile as two operands.
#pragma once

#include <immintrin.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#define _tile_loadconfig emulated_tiles::configure
#define _tile_release emulated_tiles::release
#define _tile_loadd emulated_tiles::load
#define _tile_stored emulated_tiles::store
#define _tile_zero emulated_tiles::set_zero
#define _tile_dpbf16ps emulated_tiles::add_product

namespace emulated_tiles {

constexpr int kTiles = 8, kMostRows = 16, kMostBytes = 64;

struct Tile {
  alignas(64) uint8_t row[kMostRows][kMostBytes];  // zeros beyond the shape
  int rows, row_bytes;
};

struct Tiles {
  Tile tile[kTiles];
  bool has_shapes;
};

inline thread_local Tiles tiles;

// Tests read it, to see that products go by tiles.
extern "C" [[gnu::visibility("default"), gnu::used]] inline std::atomic<int64_t>
    num_emulated_products{0};

inline void need(bool holds, const char* rule) {
  if (holds) return;
  std::fprintf(stderr, "emulated tiles: %s\n", rule);
  std::abort();
}

inline Tile& used(int number) {
  need(tiles.has_shapes, "a tile is used before its shape is set");
  Tile& tile = tiles.tile[number];
  need(tile.rows > 0, "a tile without rows is used");
  return tile;
}

inline void release() { std::memset(&tiles, 0, sizeof tiles); }

// 64 bytes: palette, first row, 14 zeros, 16 numbers of bytes in a row (16 bits), 16 of rows.
inline void configure(const void* shapes) {
  const auto* bytes = static_cast<const uint8_t*>(shapes);
  uint16_t row_bytes[16];
  std::memcpy(row_bytes, bytes + 16, sizeof row_bytes);
  const uint8_t* rows = bytes + 48;
  need(bytes[0] == 1, "the palette is not 1");
  for (int i = 1; i < 16; ++i) need(bytes[i] == 0, "a reserved byte is not zero");
  release();
  for (int i = 0; i < 16; ++i) {
    need((rows[i] == 0) == (row_bytes[i] == 0), "a shape has rows or bytes alone");
    need(i < kTiles || rows[i] == 0, "there are 8 tiles");
    need(rows[i] <= kMostRows && row_bytes[i] <= kMostBytes, "a tile is too large");
    if (i < kTiles) tiles.tile[i].rows = rows[i], tiles.tile[i].row_bytes = row_bytes[i];
  }
  tiles.has_shapes = true;
}

inline void set_zero(int number) {
  Tile& tile = used(number);
  std::memset(tile.row, 0, sizeof tile.row);
}

inline void load(int number, const void* data, int64_t stride) {
  set_zero(number);
  Tile& tile = used(number);
  for (int i = 0; i < tile.rows; ++i) {
    std::memcpy(tile.row[i], static_cast<const uint8_t*>(data) + i * stride, tile.row_bytes);
  }
}

inline void store(int number, void* data, int64_t stride) {
  const Tile& tile = used(number);
  for (int i = 0; i < tile.rows; ++i) {
    std::memcpy(static_cast<uint8_t*>(data) + i * stride, tile.row[i], tile.row_bytes);
  }
}

// Not inline: its arithmetic has to stay where the CPU's mode is set.
[[gnu::noinline]] inline void add_product_in_this_mode(Tile& sum, const Tile& a, const Tile& b) {
  const __m512i second = _mm512_set1_epi32(int(0xffff0000));
  for (int i = 0; i < sum.rows; ++i) {
    __m512 sums[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    for (int k = 0; k < b.rows; ++k) {
      int32_t pair;
      std::memcpy(&pair, a.row[i] + k * sizeof pair, sizeof pair);
      const __m512i x = _mm512_set1_epi32(pair), y = _mm512_load_si512(b.row[k]);
      sums[0] = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(x, 16)),
                                _mm512_castsi512_ps(_mm512_slli_epi32(y, 16)), sums[0]);
      sums[1] = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(x, second)),
                                _mm512_castsi512_ps(_mm512_and_si512(y, second)), sums[1]);
    }
    const __m512 product = _mm512_add_ps(sums[0], sums[1]);
    const __m512 total = _mm512_add_ps(_mm512_load_ps(sum.row[i]), product);
    const __mmask16 columns = __mmask16((1u << (sum.row_bytes / 4)) - 1);
    _mm512_mask_store_ps(sum.row[i], columns, total);
  }
}

inline void add_product(int sum_number, int a_number, int b_number) {
  Tile& sum = used(sum_number);
  const Tile &a = used(a_number), &b = used(b_number);
  need(&sum != &a && &sum != &b && &a != &b, "one tile is two operands");
  need(sum.rows == a.rows, "the sums and the first operand differ in rows");
  need(sum.row_bytes == b.row_bytes, "the sums and the second operand differ in columns");
  need(a.row_bytes == 4 * b.rows, "the operands differ in cells");
  num_emulated_products.fetch_add(1, std::memory_order_relaxed);
  // All exceptions masked, to the nearest, subnormal results and operands are zeros.
  constexpr unsigned kMode = 0x1f80 | 0x8000 | 0x0040;
  const unsigned before = _mm_getcsr();
  _mm_setcsr(kMode);
  add_product_in_this_mode(sum, a, b);
  asm volatile("" : : : "memory");
  _mm_setcsr(before);
}

}  // namespace emulated_tiles
