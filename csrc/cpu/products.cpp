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
// Measured, of weights in blocked order: with fewer rows than kGuessedRows what the hardware
// guesses is enough; with kBusyRows there is so much to compute that one round is short notice.
constexpr int64_t kGuessedRows = 3;
constexpr int64_t kBusyRows = 9;
constexpr int64_t kLines = kSteps * sizeof(Cell) / kLine;  // of a row (or step) a round

struct Buffers {
  alignas(64) Cell weights[kSteps * kColumns];
  alignas(64) float sums[kMaxLinearRows * kColumns];    // of this block of terms
  alignas(64) float totals[kMaxLinearRows * kColumns];  // of the blocks before
};

// What the next round reads from memory: kColumns rows of `lines` lines. `further` bytes after
// each line lies one to be brought nearer, into L2 (0: none).
struct Ahead {
  const char* data;
  int64_t stride, lines;
  int64_t further = 0;
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
    const char* row = next.data + s * next.stride;
    for (int64_t line = 0; line < next.lines; ++line) {
      _mm_prefetch(row + line * kLine, _MM_HINT_T0);
      if (next.further != 0) _mm_prefetch(row + line * kLine + next.further, _MM_HINT_T1);
    }
  });
  store_sums(c, sums, kColumns);
}

// The same for all rows, in groups; each prefetches its share of the lines.
void add_all_products(const Cell* x, int64_t x_stride, int64_t rows, const Cell* weights,
                      int64_t steps, bool first, float* sums, Ahead ahead) {
  using AddProducts = decltype(&add_products<1>);
  static constexpr AddProducts kAddProducts[] = {add_products<1>, add_products<2>,
                                                 add_products<3>, add_products<4>,
                                                 add_products<5>, add_products<6>};
  static_assert(sizeof kAddProducts / sizeof kAddProducts[0] == kGroupRows, "one a size");
  const int64_t groups = (rows + kGroupRows - 1) / kGroupRows;
  int64_t lines_left = ahead.lines;
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t begin = rows * g / groups, end = rows * (g + 1) / groups;
    ahead.lines = (lines_left + groups - g - 1) / (groups - g);
    kAddProducts[end - begin - 1](x + begin * x_stride, x_stride, weights, steps, first,
                                  sums + begin * kColumns, ahead);
    ahead.data += ahead.lines * kLine;
    lines_left -= ahead.lines;
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
      const int64_t row_bytes = kColumns * int64_t(sizeof(Cell));
      ahead = {reinterpret_cast<const char*>(weights + kSteps * kColumns), row_bytes,
               args.rows < kGuessedRows ? 0 : kLines,
               args.rows < kBusyRows ? 0 : kSteps * row_bytes};
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

}  // namespace VLLM_ISA
}  // namespace vllm
