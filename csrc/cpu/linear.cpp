// Products with unquantised weights of linear layers and of experts, and look-ups in embeddings in
// panels.
//
// A weight [columns, n] lies in *panels* of kColumns outputs: term by term, with the panel's
// weights of one term side by side (for bfloat16 those of two terms in turns, as pairs), so that it
// is read from its beginning to its end. Weights of types that the products do not take are
// converted round by round. A weight in plain rows is transposed round by round.
#include <cstring>

#include "product.h"

namespace vllm {
namespace {

struct FloatWeight {
  const void* data;
  bool is_panels;
  int64_t stride;  // of plain rows
};

// Number of elements of each column that lie side by side in a panel, by dtype.
template <class T>
constexpr int kPaired = 1;
template <>
constexpr int kPaired<BFloat16> = 2;

// The weights of one panel, round by round.
template <class Math>
class FloatPanel {
 public:
  using T = typename Math::Element;
  static constexpr int kPer = Math::kPerCell, kPairs = kPaired<T>;
  static constexpr bool kIsReady = sizeof(T) * kPairs == sizeof(Cell) && kPer == kPairs;

  static int64_t at_once(int64_t, int64_t, int64_t) { return 1; }

  // The cells of all panels, if the weight has them as products take them; else null.
  static const Cell* ready_panels(const FloatWeight& weight) {
    return kIsReady && weight.is_panels ? static_cast<const Cell*>(weight.data) : nullptr;
  }

  FloatPanel(const FloatWeight& weight, int64_t number, int64_t, const ProductArgs& args)
      : n_(args.n),
        columns_(std::min(args.columns - number * kColumns, kColumns)),
        is_panels_(weight.is_panels),
        stride_(weight.is_panels ? kColumns * kPairs : weight.stride),
        data_(static_cast<const T*>(weight.data) +
              number * kColumns * (weight.is_panels ? round_up(args.n, kPairs) : stride_)),
        passes_(kIsReady && is_panels_ && is_aligned(data_) &&
                args.columns * args.n * int64_t(sizeof(T)) >= kPassingBytes) {}

  int64_t columns() const { return columns_; }

  template <class Finish>
  void sum(const CellRows& x, int64_t, int64_t rows, Buffers& buffers, const Finish& finish) const {
    sum_rounds<Math>(*this, x, rows, n_, buffers, finish);
  }

  // Returns cells [first, first + steps) as [steps][kColumns].
  const Cell* round(int64_t first, int64_t steps, Cell* buffer) const {
    if (!is_panels_) {
      turn(first, steps, buffer);
    } else if constexpr (kIsReady) {
      return reinterpret_cast<const Cell*>(data_) + first * kColumns;
    } else if constexpr (kPairs == 2) {
      part_pairs(first, steps, buffer);
    } else {
      widen_rows(first, steps, buffer);
    }
    return buffer;
  }

  // Whether rounds read the weight itself as cells, and it is too large to stay in a cache.
  bool passes() const { return passes_; }

  // The memory that the round of `steps` cells after cell `end` reads, of this or the next panel.
  Ahead ahead(int64_t end, int64_t steps, int64_t rows) const {
    const int64_t bytes = int64_t(sizeof(T)) * kPer * steps * kColumns;
    if (is_panels_) {
      if (kIsReady && rows < kGuessedRows) return {};
      const T* next = data_ + round_up(end * kPer, kPairs) * kColumns;
      return {reinterpret_cast<const char*>(next), bytes / kLine};
    }
    const bool ends = end * kPer >= n_;
    const T* next = ends ? data_ + kColumns * stride_ : data_ + end * kPer;
    return {reinterpret_cast<const char*>(next), bytes / kLine, stride_ * int64_t(sizeof(T)), kLine};
  }

 private:
  static bool is_aligned(const T* p) { return reinterpret_cast<uintptr_t>(p) % kLine == 0; }

  void turn(int64_t first, int64_t steps, Cell* cells) const {
    for (int64_t j = 0; j < kColumns; j += kWidth) {
      for (int64_t s = 0; s < steps; s += kWidth) {
        Floats tile[kWidth];
        for (int64_t i = 0; i < kWidth; ++i) {
          tile[i] = j + i < columns_ ? Math::row_cells(data_ + (j + i) * stride_, first + s, n_)
                                     : Floats{};
        }
        transpose(tile);
        for (int64_t i = 0; i < kWidth; ++i) store_cells(cells + (s + i) * kColumns + j, tile[i]);
      }
    }
  }

  // Splits pairs of bfloat16 into floats, one term above the other.
  void part_pairs(int64_t first, int64_t steps, Cell* cells) const {
    const Cell* pairs = reinterpret_cast<const Cell*>(data_) + first / 2 * kColumns;
    for (int64_t s = 0; s < steps; s += 2, pairs += kColumns, cells += 2 * kColumns) {
      for (int64_t j = 0; j < kColumns; j += kWidth) {
        const Words both = (Words)load_cells(pairs + j);
        store_cells(cells + j, (Floats)(both << 16));
        store_cells(cells + kColumns + j, (Floats)(both & 0xffff0000u));
      }
    }
  }

  void widen_rows(int64_t first, int64_t steps, Cell* cells) const {
    const T* row = data_ + first * kColumns;
    for (int64_t i = 0; i < steps * kColumns; i += kWidth) store_cells(cells + i, load(row + i));
  }

  const int64_t n_, columns_;
  const bool is_panels_;
  const int64_t stride_;
  const T* const data_;
  const bool passes_;
};

void linear(const Tensor& x, const Tensor& weight, const MaybeTensor& bias, const Tensor& out) {
  const FloatWeight floats{weight.data_ptr(), weight.dim() == 4, weight.stride(0)};
  const ProductArgs args = product_args(x, bias, out);
  check(with_tile_math(args.dtype,
                  [&](auto math) {
                    using Math = decltype(math);
                    return Product<Math, FloatPanel<Math>, FloatWeight>(args, floats).run();
                  }),
        "linear");
}

// The same, head by head. Heads are independent products; if there are at least as many as threads,
// each product runs on one thread.
template <class Math>
Status run_by_head(const Tensor& x, const Tensor& weight, const Tensor& out) {
  using T = typename Math::Element;
  const int64_t heads = x.size(1), threads = num_threads();
  const int64_t work = heads * out.size(2) * x.size(2) / (kWidth * Math::kPerCell) *
                       (4 + x.size(0) / 4);
  const bool shares_heads = heads >= threads;
  SharedStatus status;
  parallel_for(shares_heads && work >= kSerialWork ? threads : 1, heads, [&](int64_t head) {
    const ProductArgs args{dtype_of(x),
                           shares_heads ? 1 : threads,
                           static_cast<const T*>(x.data_ptr()) + head * x.stride(1),
                           x.size(0),
                           x.size(2),
                           x.stride(0),
                           out.size(2),
                           nullptr,
                           static_cast<T*>(out.data_ptr()) + head * out.stride(1),
                           out.stride(0)};
    const FloatWeight floats{static_cast<const T*>(weight.data_ptr()) + head * weight.stride(0),
                             weight.dim() == 5, weight.stride(1)};
    const Status found = Product<Math, FloatPanel<Math>, FloatWeight>(args, floats).run();
    if (found != kOk) status.fail(found);
  });
  return Status(status.value);
}

void linear_by_head(const Tensor& x, const Tensor& weight, const Tensor& out) {
  check(with_tile_math(dtype_of(x),
                  [&](auto math) { return run_by_head<decltype(math)>(x, weight, out); }),
        "linear_by_head");
}

struct ExpertArgs {
  int64_t dtype;
  const void* x;
  int64_t x_rows, n, x_stride;
  const int64_t* rows;    // [pairs]; null: x has a row for each pair
  const int64_t* starts;  // [experts + 1]
  const char* weight;
  bool is_panels;
  int64_t weight_bytes, row_stride;  // of an expert; of plain rows
  const char* bias;                  // [experts, columns]; may be null
  char* out;                         // [pairs, columns]
  int64_t pairs, columns;
};

template <class Math>
Status multiply_expert(const ExpertArgs& args, int64_t expert, int64_t threads) {
  using T = typename Math::Element;
  const int64_t begin = args.starts[expert], count = args.starts[expert + 1] - begin;
  const T* x = static_cast<const T*>(args.x);
  int64_t stride = args.x_stride;
  std::vector<T> gathered;
  if (args.rows == nullptr) {
    x += begin * stride;
  } else if (count == 1) {
    x += args.rows[begin] * stride;
  } else {
    gathered.resize(size_t(count * args.n));
    for (int64_t i = 0; i < count; ++i) {
      std::memcpy(gathered.data() + i * args.n, x + args.rows[begin + i] * stride,
                  size_t(args.n) * sizeof(T));
    }
    x = gathered.data(), stride = args.n;
  }
  const int64_t size = args.columns * int64_t(sizeof(T));
  const char* bias = args.bias == nullptr ? nullptr : args.bias + expert * size;
  const ProductArgs product{args.dtype,   threads, x,    count, args.n, stride,
                            args.columns, bias,    args.out + begin * size, args.columns};
  const FloatWeight floats{args.weight + expert * args.weight_bytes, args.is_panels,
                           args.row_stride};
  return Product<Math, FloatPanel<Math>, FloatWeight>(product, floats).run();
}

// The experts one after another, each on all threads; or a thread for each, if no expert has most
// of the pairs.
template <class Math>
Status run_by_expert(const ExpertArgs& args, int64_t experts) {
  if (args.rows != nullptr) {
    for (int64_t pair = 0; pair < args.pairs; ++pair) {
      if (args.rows[pair] < 0 || args.rows[pair] >= args.x_rows) return kBadIndex;
    }
  }
  std::vector<int64_t> active;
  int64_t most = 0;
  for (int64_t expert = 0; expert < experts; ++expert) {
    const int64_t begin = args.starts[expert], end = args.starts[expert + 1];
    if (begin < 0 || begin > end || end > args.pairs) return kBadIndex;
    if (begin < end) active.push_back(expert);
    most = std::max(most, end - begin);
  }
  const int64_t threads = num_threads(), count = int64_t(active.size());
  const int64_t cells = args.columns * args.n / (kWidth * Math::kPerCell);
  const bool shares = count >= threads && 2 * most * threads <= 3 * args.pairs;
  const bool is_work = cells * (4 * count + args.pairs / 4) >= kSerialWork;
  SharedStatus status;
  parallel_for(shares && is_work ? threads : 1, count, [&](int64_t i) {
    const int64_t each = shares || !is_work ? 1 : threads;
    const Status found = multiply_expert<Math>(args, active[size_t(i)], each);
    if (found != kOk) status.fail(found);
  });
  return Status(status.value);
}

void expert_linear(const Tensor& x, const MaybeTensor& rows, const Tensor& starts,
                   const Tensor& weight, const MaybeTensor& bias, const Tensor& out) {
  check(with_tile_math(dtype_of(x),
                  [&](auto math) {
                    using T = typename decltype(math)::Element;
                    const ExpertArgs args{dtype_of(x),
                                          x.data_ptr(),
                                          x.size(0),
                                          x.size(1),
                                          x.stride(0),
                                          static_cast<const int64_t*>(data_of(rows)),
                                          data_of<const int64_t>(starts),
                                          data_of<const char>(weight),
                                          weight.dim() == 5,
                                          weight.stride(0) * int64_t(sizeof(T)),
                                          weight.stride(1),
                                          static_cast<const char*>(data_of(bias)),
                                          data_of<char>(out),
                                          out.size(0),
                                          out.size(1)};
                    return run_by_expert<decltype(math)>(args, starts.size(0) - 1);
                  }),
        "expert_linear");
}

struct EmbeddingArgs {
  int64_t dtype, threads;
  const int64_t* ids;
  int64_t tokens;
  const void* table;
  int64_t rows, n;
  void* out;
};

template <class T>
Status look_up(const EmbeddingArgs& args) {
  constexpr int kPairs = kPaired<T>;
  const int64_t padded = round_up(args.n, kPairs);
  SharedStatus status;
  // Every cell is in its own cache line, which costs some 4 operations.
  parallel_ranges(args.threads, args.tokens, 4 * padded, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      const int64_t id = args.ids[token];
      if (id < 0 || id >= args.rows) return status.fail(kBadIndex);
      const T* row = static_cast<const T*>(args.table) + id / kColumns * kColumns * padded +
                     id % kColumns * kPairs;
      T* out = static_cast<T*>(args.out) + token * args.n;
      for (int64_t i = 0; i < args.n; ++i) {
        out[i] = row[i / kPairs * kPairs * kColumns + i % kPairs];
      }
    }
  });
  return Status(status.value);
}

void panel_embedding(const Tensor& token_ids, const Tensor& panels, int64_t rows,
                     const Tensor& out) {
  const EmbeddingArgs args{dtype_of(out),     num_threads(), data_of<const int64_t>(token_ids),
                           token_ids.size(0), panels.data_ptr(), rows,
                           out.size(1),       out.data_ptr()};
  check(with_dtype(args.dtype, [&](auto type) { return look_up<decltype(type)>(args); }),
        "panel_embedding");
}

}  // namespace

VLLM_OPERATION(linear)
VLLM_OPERATION(linear_by_head)
VLLM_OPERATION(expert_linear)
VLLM_OPERATION(panel_embedding)

}  // namespace vllm
