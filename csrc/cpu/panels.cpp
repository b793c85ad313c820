// Making panels of weights, as linear.cpp and packed_linear.cpp read them, from a checkpoint's
// rows.
#include "operation.h"
#include "parallel.h"
#include "product.h"

namespace vllm {
namespace {

constexpr int64_t kLineCells = kLine / int64_t(sizeof(Cell));
constexpr int64_t kLinesAhead = 4;

// Writes the line of every row that begins at byte `first`, as [kLineCells][kColumns], with zeros
// after the last row and after the `end` of a row.
void turn_lines(const char* rows, int64_t count, int64_t stride, int64_t first, int64_t end,
                Cell* cells) {
  constexpr int64_t kVector = kWidth * int64_t(sizeof(Cell));
  for (int64_t j = 0; j < kColumns; j += kWidth) {
    for (int64_t i = 0; i < kWidth && j + i < count; ++i) {
      __builtin_prefetch(rows + (j + i) * stride + first + kLinesAhead * kLine, 0, 2);
    }
    for (int64_t s = 0; s < kLineCells; s += kWidth) {
      const int64_t left = end - first - s * int64_t(sizeof(Cell));
      Floats tile[kWidth] = {};
      for (int64_t i = 0; i < kWidth && j + i < count; ++i) {
        const char* from = rows + (j + i) * stride + end - left;
        if (left >= kVector) {
          std::memcpy(&tile[i], from, kVector);
        } else if (left > 0) {
          std::memcpy(&tile[i], from, size_t(left));
        }
      }
      transpose(tile);
      for (int64_t i = 0; i < kWidth; ++i) store_cells(cells + (s + i) * kColumns + j, tile[i]);
    }
  }
}

void store_units(const Cell* cells, int64_t count, uint32_t* out) {
  std::memcpy(out, cells, size_t(count * kColumns) * sizeof *out);
}

// Splits cells into their two units, one above the other.
void store_units(const Cell* cells, int64_t count, uint16_t* out) {
  for (int64_t u = 0; u < count; ++u, out += kColumns) {
    const int shift = u % 2 * 16;
    for (int64_t j = 0; j < kColumns; ++j) out[j] = uint16_t(cells[u / 2 * kColumns + j] >> shift);
  }
}

template <class Unit>
void run(const Tensor& weight, const Tensor& panels) {
  constexpr int64_t kLineUnits = kLine / int64_t(sizeof(Unit));
  const int64_t rows = weight.size(0), bytes = weight.size(1), stride = weight.stride(0);
  const int64_t units = panels.size(1);
  const int64_t threads = rows * units >= kSerialWork * kWidth ? num_threads() : 1;
  parallel_runs(threads, panels.size(0), [&](int64_t panel) {
    const char* first_row = data_of<const char>(weight) + panel * kColumns * stride;
    Unit* out = data_of<Unit>(panels) + panel * kColumns * units;
    alignas(kLine) Cell cells[kLineCells * kColumns];
    for (int64_t u = 0; u < units; u += kLineUnits) {
      turn_lines(first_row, std::min(rows - panel * kColumns, kColumns), stride,
                 u * int64_t(sizeof(Unit)), bytes, cells);
      store_units(cells, std::min(units - u, kLineUnits), out + u * kColumns);
    }
  });
}

void write_panels(const Tensor& weight, const Tensor& panels) {
  const int64_t unit_bytes = panels.size(3);
  if (unit_bytes == sizeof(uint16_t)) {
    run<uint16_t>(weight, panels);
  } else if (unit_bytes == sizeof(uint32_t)) {
    run<uint32_t>(weight, panels);
  } else {
    check(kBadCall, "write_panels");
  }
}

}  // namespace

VLLM_OPERATION(write_panels)

}  // namespace vllm
