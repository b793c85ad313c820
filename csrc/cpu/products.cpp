// x W^T of bfloat16 for few rows: the weights are read once, at the speed of memory.
//
// An output is one chain of vdpbf16ps over the pairs of a block of terms, in order, and the
// sums of the blocks are added in order. That is how oneDNN sums up as well, so that a row
// has the same bits here and there (native_cpu.py makes sure of it, and finds the block).
#include "cells.h"

namespace vllm {
namespace VLLM_ISA {

#if defined(__AVX512BF16__)
namespace {

constexpr int64_t kColumns = 64;  // outputs formed together: one block of oneDNN's order
constexpr int kVectors = kColumns / kWidth;
constexpr int64_t kSteps = 64;  // cells of a row a round: 16 KiB of weights stay in L1
constexpr int kGroupRows = 6;   // rows whose sums are in registers
constexpr int64_t kLine = 64;   // bytes that one prefetch brings
// Measured, of weights in blocked order: with fewer rows what the hardware guesses is enough.
constexpr int64_t kGuessedRows = 3;
constexpr uint64_t kRowLines = kSteps * sizeof(Cell) / kLine;  // of a row (or step) a round
constexpr int64_t kLines = kColumns * kRowLines;               // of a round

struct Buffers {
  alignas(64) Cell weights[kSteps * kColumns];
  alignas(64) float sums[kMaxLinearRows * kColumns];    // of this block of terms
  alignas(64) float totals[kMaxLinearRows * kColumns];  // of the blocks before
};

// What the next round reads from memory: kColumns rows of kRowLines lines; of these `lines` from
// line `first` on are to be asked for.
struct Ahead {
  const char* data;
  int64_t stride, lines;
  int64_t first = 0;

  VLLM_INLINE void ask(uint64_t line) const {
    _mm_prefetch(data + int64_t(line / kRowLines) * stride + line % kRowLines * kLine, _MM_HINT_T0);
  }
};

// Cells [first, first + steps) of `columns` rows of W, as [steps][kColumns]; others are zero.
// Prefetches into L2: measured, L1 is too small for them beside what is ordered.
void order_cells(const BFloat16* weight, int64_t columns, int64_t first, int64_t steps, int64_t n,
                 Cell* cells, const Ahead& ahead) {
  for (int64_t j = 0; j < kColumns; j += kWidth) {
    for (int64_t s = 0; s < steps; s += kWidth) {
      Floats tile[kWidth];
      for (int64_t i = 0; i < kWidth; ++i) {
        tile[i] = j + i < columns ? DotMath::row_cells(weight + (j + i) * n, first + s, n)
                                  : Floats{};
        if (ahead.lines > 0) {
          _mm_prefetch(ahead.data + (j + i) * ahead.stride + s / kWidth * kLine, _MM_HINT_T1);
        }
      }
      transpose(tile);
      for (int64_t i = 0; i < kWidth; ++i) store_cells(cells + (s + i) * kColumns + j, tile[i]);
    }
  }
}

// sums[R, kColumns] (+)= x W^T over `steps` cells.
template <int R>
void add_products(const Cell* x, int64_t x_stride, const Cell* weights, int64_t steps, bool first,
                  float* sums, const Ahead& ahead) {
  const Ahead next = ahead;  // no store can change it
  Floats c[R][kVectors];
  if (first) {
    start_sums<Start::kZeros>(c, sums, kColumns, nullptr);
  } else {
    start_sums<Start::kSums>(c, sums, kColumns, nullptr);
  }
  accumulate<DotMath>(c, x, x_stride, 1, weights, kColumns, steps, [&](int64_t s) VLLM_LAMBDA {
    const int64_t end = (s + 1) * next.lines / kSteps;
    for (int64_t i = s * next.lines / kSteps; i < end; ++i) next.ask(uint64_t(next.first + i));
  });
  store_sums(c, sums, kColumns);
}

// The same for all rows, in groups. Each asks for its share of the lines, evenly: measured,
// bursts leave the memory idle between them (16 rows: 39 -> 43 GB/s where one row gets 46).
void add_all_products(const Cell* x, int64_t x_stride, int64_t rows, const Cell* weights,
                      int64_t steps, bool first, float* sums, const Ahead& ahead) {
  using AddProducts = decltype(&add_products<1>);
  static constexpr AddProducts kAddProducts[] = {add_products<1>, add_products<2>,
                                                 add_products<3>, add_products<4>,
                                                 add_products<5>, add_products<6>};
  static_assert(sizeof kAddProducts / sizeof kAddProducts[0] == kGroupRows, "one a size");
  const int64_t groups = (rows + kGroupRows - 1) / kGroupRows;
  Ahead share = ahead;
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t begin = rows * g / groups, end = rows * (g + 1) / groups;
    share.first = ahead.lines * begin / rows;
    share.lines = ahead.lines * end / rows - share.first;
    kAddProducts[end - begin - 1](x + begin * x_stride, x_stride, weights, steps, first,
                                  sums + begin * kColumns, share);
  }
}

void finish_row(const float* sums, const BFloat16* bias, BFloat16* out, int64_t columns) {
  for (int64_t j = 0; j < columns; j += kWidth) {
    const int64_t m = columns - j < kWidth ? columns - j : kWidth;
    Floats v = load(sums + j);
    if (bias != nullptr) v = v + (m < kWidth ? load_first(bias + j, m) : load(bias + j));
    store_first(out + j, v, m);
  }
}

// The outputs of block `block` of kColumns.
void product_block(const LinearArgs& args, int64_t block, Buffers& buffers) {
  const int64_t column = block * kColumns;
  const int64_t columns = args.columns - column < kColumns ? args.columns - column : kColumns;
  const auto* x = static_cast<const Cell*>(args.x);
  const auto* rows_of_weight = static_cast<const BFloat16*>(args.weight) + column * args.n;
  const int64_t cells = args.n / 2, sum_cells = args.sum_block / 2;
  const Cell* blocked = static_cast<const Cell*>(args.weight) + column * (round_up(args.n, 32) / 2);
  for (int64_t s = 0; s < cells; s += kSteps) {
    const int64_t end = s + kSteps < cells ? s + kSteps : cells, steps = end - s;
    const Cell* weights = buffers.weights;
    Ahead ahead;
    if (args.is_blocked) {
      weights = blocked + s * kColumns;
      ahead = {reinterpret_cast<const char*>(weights + kSteps * kColumns),
               kColumns * int64_t(sizeof(Cell)), args.rows < kGuessedRows ? 0 : kLines};
    } else {
      // Prefetched where most of the time goes: few rows are quicker to multiply than to order.
      const BFloat16* next = rows_of_weight + (end < cells ? 2 * end : kColumns * args.n);
      ahead = {reinterpret_cast<const char*>(next), args.n * int64_t(sizeof(BFloat16)), kLines};
      Ahead now = ahead;
      (args.rows > kGroupRows ? now : ahead).lines = 0;
      order_cells(rows_of_weight, columns, s, steps, args.n, buffers.weights, now);
    }
    const bool first = s % sum_cells == 0;
    float* sums = s < sum_cells ? buffers.totals : buffers.sums;
    add_all_products(x + s, cells, args.rows, weights, steps, first, sums, ahead);
    if (s >= sum_cells && (end == cells || end % sum_cells == 0)) {
      map(buffers.totals, sums, buffers.totals, args.rows * kColumns, {},
          [](Floats total, Floats sum) VLLM_LAMBDA { return total + sum; });
    }
  }
  for (int64_t r = 0; r < args.rows; ++r) {
    const auto* bias = static_cast<const BFloat16*>(args.bias);
    finish_row(buffers.totals + r * kColumns, bias == nullptr ? nullptr : bias + column,
               static_cast<BFloat16*>(args.out) + r * args.columns + column, columns);
  }
}

}  // namespace

Status linear(const LinearArgs& args) {
  if (args.dtype != kBFloat16) return kBadDtype;
  if (args.rows > kMaxLinearRows || args.n % 2 != 0) return kBadCall;
  if (args.sum_block <= 0 || args.sum_block % (2 * kSteps) != 0) return kBadCall;
  SharedStatus status;
  const int64_t blocks = (args.columns + kColumns - 1) / kColumns;
  // A line of weights comes from memory in the time of some 4 operations.
  const int64_t work = blocks * (args.n / 2) * kVectors * (4 + args.rows / 4);
  parallel_runs(work < kSerialWork ? 1 : args.threads, blocks, [&](int64_t block) {
    static thread_local Scratch scratch;
    auto* buffers = static_cast<Buffers*>(scratch.reserve(sizeof(Buffers)));
    if (buffers == nullptr) return status.fail(kOutOfMemory);
    product_block(args, block, *buffers);
  });
  return Status(status.value);
}

#else

Status linear(const LinearArgs&) { return kBadDtype; }

#endif

Status embedding(const EmbeddingArgs& args) {
  constexpr int64_t kBlockRows = 64;
  if (args.dtype != kBFloat16) return kBadDtype;
  if (args.n % 2 != 0) return kBadCall;
  const int64_t cells = args.n / 2, padded = round_up(args.n, 32) / 2;
  SharedStatus status;
  // Every cell is a line of its own: some 4 operations.
  parallel_ranges(args.threads, args.tokens, 4 * cells, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      const int64_t id = args.ids[token];
      if (id < 0 || id >= args.rows) return status.fail(kBadIndex);
      const Cell* row = static_cast<const Cell*>(args.table) +
                        id / kBlockRows * kBlockRows * padded + id % kBlockRows;
      Cell* out = static_cast<Cell*>(args.out) + token * cells;
      for (int64_t s = 0; s < cells; ++s) out[s] = row[s * kBlockRows];
    }
  });
  return Status(status.value);
}

}  // namespace VLLM_ISA
}  // namespace vllm
