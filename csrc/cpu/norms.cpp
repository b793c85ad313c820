// Root-mean-square norms. A row is reduced in an order that depends only on its length.
#include <cmath>

#include "operation.h"
#include "vec_math.h"

namespace vllm {
namespace {

// x[outer, inner, n] -> out dense. weight may be null. gate: gated_rms_norm only.
// residual: add_rms_norm only, updated in place, inner == 1.
struct RmsNormArgs {
  int64_t dtype, threads, outer, inner, n;
  const void* x;
  int64_t x_outer_stride, x_inner_stride;
  void* out;
  double eps;
  const void* weight = nullptr;
  double offset = 0.0;
  void* residual = nullptr;
  int64_t residual_stride = 0;
  const void* gate = nullptr;
  int64_t gate_outer_stride = 0, gate_inner_stride = 0;

  RmsNormArgs(const Tensor& tensor, double epsilon, const Tensor& result)
      : dtype(dtype_of(tensor)), threads(num_threads()), out(result.data_ptr()), eps(epsilon) {
    const Rows3 rows(tensor);
    outer = rows.outer, inner = rows.inner, n = rows.n;
    x = rows.data, x_outer_stride = rows.outer_stride, x_inner_stride = rows.inner_stride;
  }
};

template <class T>
float inverse_rms(const T* x, int64_t n, float eps) {
  Floats sums[4] = {};
  int64_t i = 0;
  for (; i + 4 * kWidth <= n; i += 4 * kWidth) {
    for (int j = 0; j < 4; ++j) {
      Floats v = load(x + i + j * kWidth);
      sums[j] = fma(v, v, sums[j]);
    }
  }
  for (; i + kWidth <= n; i += kWidth) {
    Floats v = load(x + i);
    sums[0] = fma(v, v, sums[0]);
  }
  if (i < n) {
    Floats v = load_first(x + i, n - i);
    sums[1] = fma(v, v, sums[1]);
  }
  float mean = reduce_add((sums[0] + sums[1]) + (sums[2] + sums[3])) / float(n);
  return 1.0f / std::sqrt(mean + eps);
}

// The three ways to multiply a normalised value by its weight (vllm/ops/norms.py).
enum class Weighting { kNone, kRoundedFirst, kOffset };

template <class T, Weighting weighting>
VLLM_INLINE Floats weighted(Floats x, Floats weight, Floats scale, Floats offset) {
  if (weighting == Weighting::kNone) return x * scale;
  if (weighting == Weighting::kOffset) return (x * scale) * (weight + offset);
  return rounded_to<T>(x * scale) * weight;
}

// Row `row` of the operands: the inner rows of one token, then those of the next.
template <class T>
struct Operands {
  const T *x, *gate;
  T *residual, *out;
  NextRow next;  // distances to the same row of the next token: x, gate and out

  Operands(const RmsNormArgs& args, int64_t row) {
    const int64_t o = row / args.inner, i = row % args.inner;
    x = static_cast<const T*>(args.x) + o * args.x_outer_stride + i * args.x_inner_stride;
    residual = args.residual == nullptr
                   ? nullptr
                   : static_cast<T*>(args.residual) + o * args.residual_stride;
    gate = args.gate == nullptr ? nullptr
                                : static_cast<const T*>(args.gate) + o * args.gate_outer_stride +
                                      i * args.gate_inner_stride;
    out = static_cast<T*>(args.out) + row * args.n;
    next = {args.x_outer_stride, args.gate_outer_stride, args.inner * args.n};
  }
};

// Adds x to the residual, which then replaces x.
template <class T>
void add_residual(Operands<T>& row, const RmsNormArgs& args) {
  map(row.x, row.residual, row.residual, args.n, {args.x_outer_stride, args.residual_stride, 0},
      [](Floats a, Floats b) VLLM_LAMBDA { return a + b; });
  row.x = row.residual;
  row.next.a = 0;  // already prefetched
}

template <class T, Weighting weighting>
void norm_row(const Operands<T>& row, const T* weight, float inverse, const RmsNormArgs& args) {
  const Floats scale = splat(inverse), offset = splat(float(args.offset));
  auto value = [&](Floats v, Floats w, Floats g) VLLM_LAMBDA {
    Floats y = weighted<T, weighting>(v, w, scale, offset);
    return row.gate == nullptr ? y : rounded_to<T>(y) * silu<T>(g);
  };
  const T* w = weight == nullptr ? row.x : weight;  // read, not used
  const T* g = row.gate == nullptr ? row.x : row.gate;
  for_each_vector(
      args.n,
      [&](int64_t i) VLLM_LAMBDA {
        prefetch(row.x + row.next.a, i);
        prefetch(g + row.next.b, i);
        prefetch(row.out + row.next.out, i);
        store(row.out + i, value(load(row.x + i), load(w + i), load(g + i)));
      },
      [&](int64_t i, int64_t m) VLLM_LAMBDA {
        Floats y = value(load_first(row.x + i, m), load_first(w + i, m), load_first(g + i, m));
        store_first(row.out + i, y, m);
      });
}

template <class T>
using NormRow = void (*)(const Operands<T>&, const T*, float, const RmsNormArgs&);

template <class T>
NormRow<T> choose_norm_row(const RmsNormArgs& args) {
  if (args.weight == nullptr) return norm_row<T, Weighting::kNone>;
  if (args.offset != 0.0) return norm_row<T, Weighting::kOffset>;
  return norm_row<T, Weighting::kRoundedFirst>;
}

template <class T>
Status run(const RmsNormArgs& args) {
  const NormRow<T> normalise = choose_norm_row<T>(args);
  const auto* weight = static_cast<const T*>(args.weight);
  const int64_t work = (args.gate == nullptr ? 2 : 5) * args.n / kWidth + 4;
  parallel_ranges(args.threads, args.outer * args.inner, work, [&](int64_t begin, int64_t end) {
    // The norms of several rows come first: one row alone waits for its sum, root and quotient.
    constexpr int64_t kTogether = 8;
    for (int64_t first = begin; first < end; first += kTogether) {
      const int64_t last = first + kTogether < end ? first + kTogether : end;
      float inverse[kTogether];
      for (int64_t r = first; r < last; ++r) {
        Operands<T> row(args, r);
        if (row.residual != nullptr) add_residual(row, args);
        inverse[r - first] = inverse_rms(row.x, args.n, float(args.eps));
      }
      for (int64_t r = first; r < last; ++r) {
        Operands<T> row(args, r);
        if (row.residual != nullptr) row.x = row.residual;
        normalise(row, weight, inverse[r - first], args);
      }
    }
  });
  return kOk;
}

// gates_first: the norm of x * silu(gate); else the norm of x, times silu(gate).
struct GroupGatedArgs {
  RmsNormArgs rows;  // weight: [inner, n]
  bool gates_first;
};

template <class T>
void group_gated_row(const Operands<T>& row, const T* weight, const GroupGatedArgs& args,
                     float* values) {
  const int64_t n = args.rows.n;
  const bool gates_first = args.gates_first;
  const auto gated = [&](Floats v, Floats g) VLLM_LAMBDA {
    return gates_first ? v * silu<T>(g) : v;
  };
  for_each_vector(
      n,
      [&](int64_t i) VLLM_LAMBDA {
        prefetch(row.x + row.next.a, i);
        prefetch(row.gate + row.next.b, i);
        prefetch(row.out + row.next.out, i);
        store(values + i, gated(load(row.x + i), load(row.gate + i)));
      },
      [&](int64_t i, int64_t m) VLLM_LAMBDA {
        store_first(values + i, gated(load_first(row.x + i, m), load_first(row.gate + i, m)), m);
      });
  const Floats scale = splat(inverse_rms(values, n, float(args.rows.eps)));
  const auto normed = [&](Floats v, Floats w, Floats g) VLLM_LAMBDA {
    const Floats y = v * scale * w;
    return gates_first ? y : y * silu<T>(g);
  };
  for_each_vector(
      n,
      [&](int64_t i) VLLM_LAMBDA {
        store(row.out + i, normed(load(values + i), load(weight + i), load(row.gate + i)));
      },
      [&](int64_t i, int64_t m) VLLM_LAMBDA {
        const Floats y = normed(load_first(values + i, m), load_first(weight + i, m),
                                load_first(row.gate + i, m));
        store_first(row.out + i, y, m);
      });
}

template <class T>
Status run_group_gated(const GroupGatedArgs& args) {
  const RmsNormArgs& rows = args.rows;
  const int64_t work = 6 * rows.n / kWidth + 8;
  SharedStatus status;
  parallel_ranges(rows.threads, rows.outer * rows.inner, work, [&](int64_t begin, int64_t end) {
    static thread_local Scratch scratch;
    auto* values = static_cast<float*>(scratch.reserve(rows.n * int64_t(sizeof(float))));
    if (values == nullptr) return status.fail(kOutOfMemory);
    for (int64_t r = begin; r < end; ++r) {
      const T* weight = static_cast<const T*>(rows.weight) + r % rows.inner * rows.n;
      group_gated_row(Operands<T>(rows, r), weight, args, values);
    }
  });
  return Status(status.value);
}

void run(const RmsNormArgs& args, const char* operation) {
  check(with_dtype(args.dtype, [&](auto type) { return run<decltype(type)>(args); }), operation);
}

void rms_norm(const Tensor& x, const MaybeTensor& weight, double epsilon, double offset,
              const Tensor& out) {
  RmsNormArgs args(x, epsilon, out);
  args.weight = data_of(weight);
  args.offset = offset;
  run(args, "rms_norm");
}

void add_rms_norm(const Tensor& x, const Tensor& residual, const Tensor& weight, double epsilon,
                  double offset, const Tensor& out) {
  RmsNormArgs args(x, epsilon, out);
  args.weight = weight.data_ptr();
  args.offset = offset;
  args.residual = residual.data_ptr();
  args.residual_stride = residual.stride(0);
  run(args, "add_rms_norm");
}

RmsNormArgs gated_args(const Tensor& x, const Tensor& gate, const Tensor& weight, double epsilon,
                       const Tensor& out) {
  const Rows3 gates(gate);
  RmsNormArgs args(x, epsilon, out);
  args.weight = weight.data_ptr();
  args.gate = gates.data;
  args.gate_outer_stride = gates.outer_stride;
  args.gate_inner_stride = gates.inner_stride;
  return args;
}

void gated_rms_norm(const Tensor& x, const Tensor& gate, const Tensor& weight, double epsilon,
                    const Tensor& out) {
  run(gated_args(x, gate, weight, epsilon, out), "gated_rms_norm");
}

void group_gated_rms_norm(const Tensor& x, const Tensor& gate, const Tensor& weight,
                          double epsilon, bool gates_first, const Tensor& out) {
  const GroupGatedArgs args{gated_args(x, gate, weight, epsilon, out), gates_first};
  check(with_dtype(args.rows.dtype,
                   [&](auto type) { return run_group_gated<decltype(type)>(args); }),
        "group_gated_rms_norm");
}

}  // namespace

VLLM_OPERATION(rms_norm)
VLLM_OPERATION(add_rms_norm)
VLLM_OPERATION(gated_rms_norm)
VLLM_OPERATION(group_gated_rms_norm)

}  // namespace vllm
