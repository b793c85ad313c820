// Products with weights in panels of kColumns outputs, whatever the number of rows.
//
// An output is the sum of blocks of terms, added in order. A block (512 terms, or 1,024 if there
// are more than 1,024) is one chain of fused multiply-adds over its terms, in order, or for
// bfloat16 on a CPU that multiplies pairs of it, one chain of vdpbf16ps over its pairs. By tiles an
// output is one chain of their sums. Nothing depends on the number of rows, on threads, or on the
// layout of the weight: a row has one value.
//
// Panels are multiplied in rounds that stay in the first cache. The class of a panel defines its
// layout and how its sums are formed.
#pragma once

#include <algorithm>

#include "operation.h"
#include "tile_product.h"

namespace vllm {

constexpr int64_t kColumns = 64;     // outputs of a panel
constexpr int64_t kFewSteps = 64;    // cells of a row in a round with few rows: 16 KiB of weights
constexpr int64_t kFewRows = 16;
#if defined(__AMX_BF16__)
constexpr bool kHasTiles = true;
#else
constexpr bool kHasTiles = false;
#endif
// The same with many rows, whose sums should stay in registers for long. Tiles read weights from
// the second cache just as fast, and sums cost them more.
template <class Math>
constexpr int64_t kSteps = 256;
constexpr int64_t kMostSteps = kHasTiles ? 512 : 256;
// Rows that are multiplied with a panel before the next panel.
template <class Math>
constexpr int64_t kBlockRows = 128;
constexpr int64_t kMostBlockRows = kHasTiles ? 256 : 128;
#if defined(__AMX_BF16__)
template <>
constexpr int64_t kSteps<TileMath> = kMostSteps;
template <>
constexpr int64_t kBlockRows<TileMath> = kMostBlockRows;
#endif
constexpr int64_t kGroupRows = kTileRows;  // rows whose sums are in registers at once
constexpr int64_t kLine = 64;        // bytes that one prefetch brings
// Lines prefetched at a time: the loop in between has no register to spare (one address per step
// and its division took 4 percent of the time of 2,048 rows). Measured: with fewer lines 16 rows
// are slower by 4 percent, with twice as many 24 rows by 5 percent.
constexpr int64_t kAskedLines = 8;
// A weight of at least so many bytes that one group of rows reads bypasses the caches. They then
// hold data that is read again: states, and what the interpreter needs until the next product.
// Measured on Zen 4: a step of one token of a model of 0.5 billion parameters 40.5 -> 37.2 ms.
constexpr int64_t kPassingBytes = 1 << 20;
// With fewer rows the hardware prefetches panels that need no conversion well enough (measured).
constexpr int64_t kGuessedRows = 3;

// Tiles add up 32 terms separately from all others, so all terms are one block.
template <class Math>
inline int64_t terms_of_a_block(int64_t n) {
  if (Math::kIsOfTiles) return round_up(std::max<int64_t>(n, 1), 2 * kMostSteps);
  return n <= 1024 ? 512 : 1024;
}

// Rows from which on tiles multiply tasks (tile_product.h) if the panels are ready: the class of a
// panel then has ready_panels(weight). Fewer rows are faster without the copies (measured).
constexpr int64_t kManyRows = 64;

// Rows that are converted to cells at a time, if x is not in cells.
constexpr int64_t kConvertedRows = 1024;

// Inputs and outputs of a product.
struct ProductArgs {
  int64_t dtype, threads;
  const void* x;
  int64_t rows, n, x_stride;
  int64_t columns;
  const void* bias;  // may be null
  void* out;
  int64_t out_stride;
};

inline ProductArgs product_args(const Tensor& x, const MaybeTensor& bias, const Tensor& out) {
  return {dtype_of(x), num_threads(), x.data_ptr(),   x.size(0),      x.size(1),
          x.stride(0), out.size(1),   data_of(bias), out.data_ptr(), out.stride(0)};
}

struct Buffers {
  alignas(64) Cell weights[kMostSteps * kColumns];
  alignas(64) float sums[kMostBlockRows * kColumns];    // sums of this block of terms
  alignas(64) float totals[kMostBlockRows * kColumns];  // sums of the blocks before
};

// The memory that the next round reads: `lines` cache lines from line `first` on. Line i is number
// i / kColumns of row i % kColumns (a division by a constant). By default lines are contiguous.
struct Ahead {
  const char* data = nullptr;
  int64_t lines = 0;
  int64_t row_stride = kLine, line_stride = kColumns * kLine;  // bytes
  int64_t first = 0;

  VLLM_INLINE const char* line(uint64_t i) const {
    return data + int64_t(i % kColumns) * row_stride + int64_t(i / kColumns) * line_stride;
  }
};

// sums[R, kColumns] (+)= x W^T over `steps` cells; if there are totals, the sums are added to them
// and not kept. Meanwhile `ahead` is prefetched.
template <class Math, bool kPasses, int R>
void add_products(const Cell* x, int64_t x_stride, const Cell* weights, int64_t steps, bool first,
                  float* sums, float* totals, const Ahead& ahead) {
  constexpr int kParts = kColumns / (kTileVectors * kWidth);
  const Ahead next = ahead;  // no store can change it
  for (int part = 0; part < kParts; ++part) {
    const int64_t column = part * kTileVectors * kWidth;
    Floats c[R][kTileVectors];
    if (first) {
      start_sums<Start::kZeros>(c, sums + column, kColumns, nullptr);
    } else {
      start_sums<Start::kSums>(c, sums + column, kColumns, nullptr);
    }
    int64_t asked = next.lines * part / kParts;
    const int64_t end = next.lines * (part + 1) / kParts;
    const int64_t pause = end > asked ? std::max<int64_t>(steps * kAskedLines / (end - asked), 1) : steps;
    for (int64_t s = 0; s < steps; s += pause) {
      for (const int64_t due = std::min(asked + kAskedLines, end); asked < due; ++asked) {
        const char* p = next.line(uint64_t(next.first + asked));
        kPasses ? __builtin_prefetch(p, 0, 0) : __builtin_prefetch(p, 0, 3);
      }
      accumulate<Math, kPasses>(c, x + s, x_stride, 1, weights + s * kColumns + column, kColumns,
                                std::min(pause, steps - s));
    }
    totals == nullptr ? store_sums(c, sums + column, kColumns)
                      : add_sums(c, totals + column, kColumns);
  }
}

// The same for all rows, in groups. Each group prefetches its share of the lines, evenly: measured,
// bursts leave the memory idle between them (16 rows: 39 -> 43 GB/s, while one row gets 46).
// passes: the weights are aligned, and no other group reads them. done(begin, end) is called with
// each group's rows as soon as they are done.
template <class Math, class Done>
void add_all_products(const Cell* x, int64_t x_stride, int64_t rows, const Cell* weights,
                      int64_t steps, bool passes, bool first, float* sums, float* totals,
                      const Ahead& ahead, const Done& done) {
#if defined(__AMX_BF16__)
  // Nothing is prefetched. Measured: tiles read whole lines so fast that prefetches only take their
  // places in the queue (4 rows of a bfloat16 weight: 550 us with prefetches, 340 without).
  if constexpr (Math::kIsOfTiles) {
    for_groups_of_tiles(rows, [&](int64_t r, int64_t m) {
      add_tiles(x + r * x_stride, x_stride, m, weights, kColumns, steps, first,
                sums + r * kColumns, kColumns, kColumns);
      done(r, r + m);
    });
    return;
  }
#endif
  using AddProducts = decltype(&add_products<Math, false, 1>);
  static constexpr AddProducts kAddProducts[][2] = {
      {add_products<Math, false, 1>, add_products<Math, true, 1>},
      {add_products<Math, false, 2>, add_products<Math, true, 2>},
      {add_products<Math, false, 3>, add_products<Math, true, 3>},
      {add_products<Math, false, 4>, add_products<Math, true, 4>},
#if defined(__AVX2__)
      {add_products<Math, false, 5>, add_products<Math, true, 5>},
      {add_products<Math, false, 6>, add_products<Math, true, 6>},
#endif
  };
  static_assert(sizeof kAddProducts / sizeof kAddProducts[0] == kGroupRows, "one a size");
  const int64_t groups = (rows + kGroupRows - 1) / kGroupRows;
  Ahead share = ahead;
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t begin = rows * g / groups, end = rows * (g + 1) / groups;
    share.first = ahead.lines * begin / rows;
    share.lines = ahead.lines * end / rows - share.first;
    kAddProducts[end - begin - 1][passes](
        x + begin * x_stride, x_stride, weights, steps, first, sums + begin * kColumns,
        totals == nullptr ? nullptr : totals + begin * kColumns, share);
    done(begin, end);
  }
}

// Rows of x as cells: x itself, or a converted copy.
struct CellRows {
  const Cell* data;
  int64_t stride;
};

// totals[rows, kColumns] = x W^T over `terms` terms, block after block, in rounds for which the
// panel makes cells: Panel::round(), ahead() and passes(). finish(begin, end) is called with rows
// whose totals are complete. It stores to pages of the output that are in no cache; called after
// each group, its stores wait during the products of the next group.
template <class Math, class Panel, class Finish>
void sum_rounds(const Panel& panel, const CellRows& x, int64_t rows, int64_t terms,
                Buffers& buffers, const Finish& finish) {
  const int64_t cells = (terms + Math::kPerCell - 1) / Math::kPerCell;
  const int64_t block_cells = terms_of_a_block<Math>(terms) / Math::kPerCell;
  const int64_t steps = rows <= kFewRows ? kFewSteps : kSteps<Math>;
  const bool passes = rows <= kGroupRows && panel.passes();
  for (int64_t s = 0; s < cells; s += steps) {
    const int64_t end = std::min(s + steps, cells);
    const Cell* weights = panel.round(s, end - s, buffers.weights);
    const bool is_later = s >= block_cells, ends = end == cells || end % block_cells == 0;
    add_all_products<typename Math::Cells>(
        x.data + s, x.stride, rows, weights, end - s, passes, s % block_cells == 0,
        is_later ? buffers.sums : buffers.totals, is_later && ends ? buffers.totals : nullptr,
        panel.ahead(end, steps, rows), [&](int64_t begin_row, int64_t end_row) {
          if (end == cells) finish(begin_row, end_row);
        });
  }
  if (cells == 0) {
    std::memset(buffers.totals, 0, size_t(rows * kColumns) * sizeof(float));
    finish(0, rows);
  }
}

// Panels are made of a Weight. Panel::at_once(rows, panels, threads) returns how many panels make
// an item (`panel` below): one, or several for a lone row. panel.sum(x, first, rows, buffers)
// writes buffers.totals[rows, kColumns], or as many times kColumns as there are panels; x holds the
// cells of rows [first, first + rows).
template <class Math, class Panel, class Weight>
class Product {
 public:
  using T = typename Math::Element;

  Product(const ProductArgs& args, const Weight& weight)
      : args_(args),
        weight_(weight),
        cells_((args.n + Math::kPerCell - 1) / Math::kPerCell),
        panels_((args.columns + kColumns - 1) / kColumns) {}

  Status run() {
    if (args_.rows == 0) return kOk;
    const bool is_cells = !Math::kIsWhole && sizeof(T) * Math::kPerCell == sizeof(Cell) &&
                          args_.n % Math::kPerCell == 0 && args_.x_stride % Math::kPerCell == 0;
    if (is_cells) {
      const CellRows x{static_cast<const Cell*>(args_.x), args_.x_stride / Math::kPerCell};
      return multiply(0, args_.rows, x);
    }
    const int64_t stride = round_up(cells_, kWidth);
    const int64_t most = args_.rows < kConvertedRows ? args_.rows : kConvertedRows;
    static thread_local Scratch scratch;
    auto* cells = static_cast<Cell*>(scratch.reserve(most * stride * int64_t(sizeof(Cell))));
    if (cells == nullptr) return kOutOfMemory;
    for (int64_t first = 0; first < args_.rows; first += most) {
      const int64_t rows = std::min(args_.rows - first, most);
      parallel_ranges(args_.threads, rows, cells_ / kWidth + 1, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
          const T* row = static_cast<const T*>(args_.x) + (first + r) * args_.x_stride;
          for (int64_t i = 0; i < cells_; i += kWidth) {
            store_cells(cells + r * stride + i, Math::row_cells(row, i, args_.n));
          }
        }
      });
      const Status status = multiply(first, rows, {cells, stride});
      if (status != kOk) return status;
    }
    return kOk;
  }

 private:
  // Rows [first, first + rows) of the outputs; x holds their cells.
  Status multiply(int64_t first, int64_t rows, const CellRows& x) const {
    const int64_t blocks = (rows + kBlockRows<Math> - 1) / kBlockRows<Math>;
    // Reading a line of weights from memory takes the time of some 4 operations.
    const int64_t work = panels_ * cells_ * (kColumns / kWidth) * (4 + rows / 4);
    const int64_t threads = work < kSerialWork ? 1 : args_.threads;
#if defined(__AMX_BF16__)
    if constexpr (Math::kIsOfTiles && requires { Panel::ready_panels(weight_); }) {
      const Cell* panels = Panel::ready_panels(weight_);
      const bool is_whole_tiles = cells_ > 0 && cells_ % kTileSide == 0;
      if (panels != nullptr && is_whole_tiles && rows >= kManyRows) {
        return multiply_by_tasks(panels, first, rows, x, threads);
      }
    }
#endif
    const int64_t at_once = Panel::at_once(rows, panels_, threads);
    const int64_t items = (panels_ + at_once - 1) / at_once;
    SharedStatus status;
    parallel_runs(threads, blocks * items, [&](int64_t i) {
      static thread_local Scratch scratch;
      auto* buffers = static_cast<Buffers*>(scratch.reserve(sizeof(Buffers)));
      if (buffers == nullptr) return status.fail(kOutOfMemory);
      const int64_t block = i / items, number = i % items * at_once;
      const int64_t begin = rows * block / blocks, end = rows * (block + 1) / blocks;
      const Panel panel(weight_, number, std::min(panels_ - number, at_once), args_);
      multiply_panel(panel, number, first + begin, end - begin,
                     {x.data + begin * x.stride, x.stride}, *buffers);
    });
    return Status(status.value);
  }

  void multiply_panel(const Panel& panel, int64_t number, int64_t first, int64_t rows,
                      const CellRows& x, Buffers& buffers) const {
    const int64_t column = number * kColumns;
    const auto* bias = static_cast<const T*>(args_.bias);
    panel.sum(x, first, rows, buffers, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        T* out = static_cast<T*>(args_.out) + (first + r) * args_.out_stride + column;
        finish_row(buffers.totals + r * kColumns, bias == nullptr ? nullptr : bias + column, out,
                   panel.columns());
      }
    });
  }

#if defined(__AMX_BF16__)
  // The same for many rows (tile_product.h); panels: those of the weight.
  Status multiply_by_tasks(const Cell* panels, int64_t first, int64_t rows, const CellRows& x,
                           int64_t threads) const {
    const int64_t groups = (rows + kPairRows - 1) / kPairRows;
    int64_t blocks = (groups + kTaskGroups - 1) / kTaskGroups, parts = 0;
    // Two tasks for each of several threads, if need be of fewer panels, then of fewer rows.
    const int64_t wanted = threads > 1 ? 2 * threads : 1;
    for (int64_t at_once = kTaskPanels; at_once > 0; at_once /= 2) {
      parts = (panels_ + at_once - 1) / at_once;
      if (blocks * parts >= wanted) break;
    }
    blocks = std::min(groups, std::max(blocks, (wanted + parts - 1) / parts));
    const auto* bias = static_cast<const T*>(args_.bias);
    SharedStatus status;
    parallel_runs(threads, blocks * parts, [&](int64_t i) {
      static thread_local Scratch scratch;
      auto* buffers = static_cast<TileTaskBuffers*>(scratch.reserve(sizeof(TileTaskBuffers)));
      if (buffers == nullptr) return status.fail(kOutOfMemory);
      const int64_t block = i / parts, part = i % parts, next = (part + 1) % parts;
      const int64_t begin = groups * block / blocks * kPairRows;
      const int64_t end = std::min(groups * (block + 1) / blocks * kPairRows, rows);
      const int64_t panel = panels_ * part / parts, panels_end = panels_ * (part + 1) / parts;
      const int64_t column = panel * kColumns, size = cells_ * kColumns;
      const TileTask task{x.data + begin * x.stride,
                          x.stride,
                          end - begin,
                          cells_,
                          panels + panel * size,
                          panels_end - panel,
                          panels + panels_ * next / parts * size,
                          bias == nullptr ? nullptr : bias + column,
                          static_cast<T*>(args_.out) + (first + begin) * args_.out_stride + column,
                          args_.out_stride,
                          std::min(args_.columns - column, (panels_end - panel) * kColumns)};
      TileTaskRun(task, *buffers).run();
    });
    return Status(status.value);
  }
#endif

  static void finish_row(const float* sums, const T* bias, T* out, int64_t columns) {
    for (int64_t j = 0; j < columns; j += kWidth) {
      const int64_t m = columns - j;
      Floats v = load(sums + j);
      if (bias != nullptr) v = v + load_up_to(bias + j, m);
      m < kWidth ? store_first(out + j, v, m) : store(out + j, v);
    }
  }

  const ProductArgs& args_;
  const Weight& weight_;
  const int64_t cells_, panels_;
};

}  // namespace vllm
