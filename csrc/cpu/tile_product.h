// Products of many rows with panels of bfloat16, by tiles.
//
// Tiles multiply faster than the second cache and what lies behind it deliver their operands. So a
// thread multiplies a *task* of up to kTaskGroups groups of rows with up to kTaskPanels panels,
// whose sums stay in its second cache, slice of terms by slice of terms:
//
// * A group's cells of one slice lie tile by tile in the first cache while they are multiplied with
//   the slices of all panels of the task. The cells of the next group are copied meanwhile.
// * A task reads weights from behind the second cache once: while a slice is multiplied, the next
//   one is prefetched.
// * A finished block of sums is rounded and stored while the next one is multiplied.
//
// An output is summed over 16 cells at a time, in order, as in tiles.h; sums that wait for the next
// slice are float32. So it has the bits that it has with few rows.
#pragma once

#include <algorithm>

#include "tiles.h"

#if defined(__AMX_BF16__)
namespace vllm {

constexpr int64_t kSliceCells = 192;  // of a group: 24 KiB
constexpr int64_t kTaskGroups = 8;    // of kPairRows rows
constexpr int64_t kTaskPanels = 8;    // sums of a whole task: 512 KiB
constexpr int64_t kHalves = 2, kHalfColumns = kTileColumns / kHalves;  // of a panel
constexpr int64_t kTileCells = kTileSide * kTileSide, kPairCells = 2 * kTileCells;
constexpr int64_t kBlockSums = kPairRows * kHalfColumns;  // 4 tiles, one after the other

struct TileTaskBuffers {
  alignas(64) Cell rows[2][kPairRows * kSliceCells];
  alignas(64) float done[2][kBlockSums];
  alignas(64) float sums[kTaskGroups * kTaskPanels * kHalves * kBlockSums];
};

// Strides of x are in cells, those of out in elements.
struct TileTask {
  const Cell* x;                // [rows, cells]
  int64_t x_stride, rows;
  int64_t cells;                // a multiple of kTileSide
  const Cell* weights;          // the first of its panels
  int64_t panels;
  const Cell* next_weights;     // the first panel of the task that follows
  const BFloat16* bias;         // of its columns; may be null
  BFloat16* out;
  int64_t out_stride, columns;  // at most kTileColumns a panel
};

class TileTaskRun {
 public:
  TileTaskRun(const TileTask& task, TileTaskBuffers& buffers)
      : task_(task),
        buffers_(buffers),
        groups_((task.rows + kPairRows - 1) / kPairRows),
        blocks_(task.panels * kHalves) {}

  void run() {
    shape_tiles(kPairRows);
    Part part{0, 0, tiles_from(0), 0};
    for (int64_t s = 0; s < part.tiles; ++s) copy_rows(part, 0, kPairRows, s);
    while (part.tiles > 0) {
      const Part next = after(part);
      for (int64_t block = 0; block < blocks_; ++block) {
        multiply_block(buffers_.rows[part.buffer], part, next, block);
      }
      part = next;
    }
    finish_rows(0, kPairRows);
    _tile_release();
  }

 private:
  // A group of rows in a slice, whose cells lie in a buffer. With no tiles it is the end.
  struct Part {
    int64_t first = 0, group = 0, tiles = 0;
    int buffer = 0;
  };

  // A complete block that is to be rounded and stored.
  struct Done {
    const float* sums = nullptr;
    BFloat16* out = nullptr;
    const BFloat16* bias = nullptr;
    int64_t rows = 0, columns = 0;
  };

  int64_t tiles_from(int64_t first) const {
    return std::max<int64_t>(std::min(task_.cells - first, kSliceCells) / kTileSide, 0);
  }

  Part after(const Part& part) const {
    const bool is_last = part.group + 1 == groups_;
    const int64_t first = is_last ? part.first + kSliceCells : part.first;
    return {first, is_last ? 0 : part.group + 1, tiles_from(first), 1 - part.buffer};
  }

  // Calls call(number, cells) for tile s of rows [begin, end) of a part. The last row stands for those
  // that are missing.
  template <class Call>
  VLLM_INLINE void for_rows(const Part& part, int64_t begin, int64_t end, int64_t s, const Call& call) {
    const int64_t first = part.group * kPairRows, last = task_.rows - 1 - first;
    const Cell* cells = task_.x + first * task_.x_stride + part.first + s * kTileSide;
    for (int64_t r = begin; r < end; ++r) call(r, cells + std::min(r, last) * task_.x_stride);
  }

  VLLM_INLINE void copy_rows(const Part& part, int64_t begin, int64_t end, int64_t s) {
    Cell* to = buffers_.rows[part.buffer] + s * kPairCells;
    for_rows(part, begin, end, s, [&](int64_t r, const Cell* cells) VLLM_LAMBDA {
      store_cells(to + r * kTileSide, load_cells(cells));
    });
  }

  // Multiplies the rows of this part with half a panel.
  void multiply_block(const Cell* rows, const Part& part, const Part& next, int64_t block) {
    const bool ends = part.first + kSliceCells >= task_.cells;
    float* sums = buffers_.sums + (block * groups_ + part.group) * kBlockSums;
    float* to = ends ? buffers_.done[flip_ ^= 1] : sums;
    const Cell* weights = task_.weights + block / kHalves * task_.cells * kTileColumns +
                          part.first * kTileColumns + block % kHalves * kHalfColumns;
    settle(rows);
    if (part.first == 0) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    } else {
      _tile_loadd(0, sums, kTileBytes);
      _tile_loadd(1, sums + kTileCells, kTileBytes);
      _tile_loadd(2, sums + 2 * kTileCells, kTileBytes);
      _tile_loadd(3, sums + 3 * kTileCells, kTileBytes);
    }
    Beside beside(*this, part, next, block);
    for (int64_t s = 0; s < part.tiles; ++s) {
      add_tile(rows + s * kPairCells, weights + s * kTileSide * kTileColumns);
      beside.step(s);
    }
    beside.end();
    _tile_stored(0, to, kTileBytes);
    _tile_stored(1, to + kTileCells, kTileBytes);
    _tile_stored(2, to + 2 * kTileCells, kTileBytes);
    _tile_stored(3, to + 3 * kTileCells, kTileBytes);
    settle(to);
    done_ = ends ? finished_block(to, part.group, block) : Done{};
  }

  // Loads come first: measured, 4 to 9 % faster than between the products while the core was shared.
  static VLLM_INLINE void add_tile(const Cell* rows, const Cell* weights) {
    constexpr int64_t kBytes = kTileColumns * int64_t(sizeof(Cell));
    _tile_loadd(4, rows, kTileBytes);
    _tile_loadd(5, rows + kTileCells, kTileBytes);
    _tile_loadd(6, weights, kBytes);
    _tile_loadd(7, weights + kTileSide, kBytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }

  // What is done beside the products of a block, a share of it after each tile of cells: the next
  // part's rows are copied, those of the part after it and the next slice's weights prefetched, and
  // the block before is rounded and stored.
  class Beside {
   public:
    VLLM_INLINE Beside(TileTaskRun& run, const Part& part, const Part& next, int64_t block)
        : run_(run),
          part_(part),
          next_(next),
          later_(next.tiles > 0 ? run.after(next) : Part{}),
          begin_(kPairRows * block / run.blocks_),
          end_(kPairRows * (block + 1) / run.blocks_),
          finished_((kPairRows + part.tiles - 1) / part.tiles) {
      const TileTask& task = run.task_;
      const bool ends = part.first + kSliceCells >= task.cells;
      const int64_t from = ends ? 0 : part.first + kSliceCells;
      const Cell* weights = (ends ? task.next_weights : task.weights) +
                            block / kHalves * task.cells * kTileColumns + from * kTileColumns;
      const int64_t lines = std::min(task.cells - from, kSliceCells) * kTileColumns / kTileSide;
      const int64_t share = lines / (kHalves * run.groups_);
      lines_ = share / part.tiles;
      weights_ = weights + (block % kHalves * run.groups_ + part.group) * share * kTileSide;
      if (!ends) return;
      const int64_t row = part.group * kPairRows;
      out_ = task.out + row * task.out_stride + block * kHalfColumns;
      out_rows_ = std::min(task.rows - row, kPairRows);
    }

    VLLM_INLINE void step(int64_t s) {
      for (int64_t i = 0; i < lines_; ++i, weights_ += kTileSide) __builtin_prefetch(weights_, 0, 2);
      if (s < next_.tiles) run_.copy_rows(next_, begin_, end_, s);
      if (s < later_.tiles) {
        run_.for_rows(later_, begin_, end_, s, [](int64_t, const Cell* cells) VLLM_LAMBDA {
          __builtin_prefetch(cells, 0, 2);
        });
      }
      const int64_t row = s * finished_, end = row + finished_;
      run_.finish_rows(row, end);
      for (int64_t r = row; r < std::min(end, out_rows_); ++r) {
        __builtin_prefetch(out_ + r * run_.task_.out_stride, 1, 2);
      }
    }

    // The next part may have more tiles of cells than this one.
    VLLM_INLINE void end() {
      for (int64_t s = part_.tiles; s < next_.tiles; ++s) run_.copy_rows(next_, begin_, end_, s);
    }

   private:
    TileTaskRun& run_;
    const Part &part_, &next_;
    const Part later_;
    const int64_t begin_, end_, finished_;
    const Cell* weights_;
    int64_t lines_;
    const BFloat16* out_ = nullptr;
    int64_t out_rows_ = 0;
  };

  // Rounds and stores rows [begin, end) of the block that is complete.
  VLLM_INLINE void finish_rows(int64_t begin, int64_t end) const {
    for (int64_t r = begin; r < std::min(end, done_.rows); ++r) {
      const float* sums = done_.sums + r / kTileSide * 2 * kTileCells + r % kTileSide * kTileSide;
      BFloat16* out = done_.out + r * task_.out_stride;
      for (int64_t j = 0; j < done_.columns; j += kTileSide, sums += kTileCells) {
        const int64_t m = done_.columns - j;
        Floats v = load(sums);
        if (done_.bias != nullptr) v = v + load_up_to(done_.bias + j, m);
        m < kWidth ? store_first(out + j, v, m) : store(out + j, v);
      }
    }
  }

  Done finished_block(const float* sums, int64_t group, int64_t block) const {
    const int64_t row = group * kPairRows, column = block * kHalfColumns;
    return {sums, task_.out + row * task_.out_stride + column,
            task_.bias == nullptr ? nullptr : task_.bias + column,
            std::min(task_.rows - row, kPairRows), std::min(task_.columns - column, kHalfColumns)};
  }

  const TileTask& task_;
  TileTaskBuffers& buffers_;
  const int64_t groups_, blocks_;
  Done done_;
  int flip_ = 0;
};

}  // namespace vllm
#endif
