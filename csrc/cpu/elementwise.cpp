// Gates and rotary embeddings; each element is computed separately.
#include "operation.h"
#include "vec_math.h"

namespace vllm {
namespace {

constexpr int64_t kMaxRotaryDim = 1024;

struct SiluAndMulArgs {
  int64_t dtype, threads;
  const void* x;
  int64_t rows, n, x_stride;
  void* out;
};

struct ReluSquaredArgs {
  int64_t dtype, threads;
  const void* x;
  int64_t rows, n, x_stride;
  void* out;
};

struct GateArgs {
  int64_t dtype, threads, outer, inner, n;
  const void* x;
  int64_t x_outer_stride, x_inner_stride;
  const void* gate;
  int64_t gate_outer_stride, gate_inner_stride;
  void* out;
};

struct RotaryArgs {
  int64_t dtype, threads;
  const int64_t* positions;
  int64_t tokens;
  void* query;
  int64_t query_heads, query_token_stride, query_head_stride;
  void* key;
  int64_t key_heads, key_token_stride, key_head_stride;
  const float* cos_sin;  // [max_position, rotary_dim]
  int64_t cos_sin_stride, max_position, rotary_dim;
  bool interleaved;
};

template <class T>
Status run_silu_and_mul(const SiluAndMulArgs& args) {
  const int64_t work = 4 * args.n / kWidth + 1;
  parallel_ranges(args.threads, args.rows, work, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* x = static_cast<const T*>(args.x) + row * args.x_stride;
      T* out = static_cast<T*>(args.out) + row * args.n;
      map(x, x + args.n, out, args.n, {args.x_stride, args.x_stride, args.n},
          [](Floats gate, Floats up) VLLM_LAMBDA { return silu<T>(gate) * up; });
    }
  });
  return kOk;
}

template <class T>
Status run_relu_squared(const ReluSquaredArgs& args) {
  const int64_t work = 2 * args.n / kWidth + 1;
  parallel_ranges(args.threads, args.rows, work, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* x = static_cast<const T*>(args.x) + row * args.x_stride;
      map(x, x, static_cast<T*>(args.out) + row * args.n, args.n, {args.x_stride, 0, args.n},
          [](Floats v, Floats) VLLM_LAMBDA {
            const Floats positive = max(Floats{}, v);  // NaN stays NaN
            return positive * positive;
          });
    }
  });
  return kOk;
}

// x * f(gate)
template <class T, class F>
Status run_gate(const GateArgs& args, const F& f) {
  const int64_t work = 4 * args.n / kWidth + 1;
  parallel_ranges(args.threads, args.outer * args.inner, work, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t o = row / args.inner, i = row % args.inner;
      const T* x =
          static_cast<const T*>(args.x) + o * args.x_outer_stride + i * args.x_inner_stride;
      const T* gate = static_cast<const T*>(args.gate) + o * args.gate_outer_stride +
                      i * args.gate_inner_stride;
      map(x, gate, static_cast<T*>(args.out) + row * args.n, args.n,
          {args.x_outer_stride, args.gate_outer_stride, args.inner * args.n},
          [&](Floats v, Floats g) VLLM_LAMBDA { return v * f(g); });
    }
  });
  return kOk;
}

// Pairs (i, i + half).
template <class T>
void rotate_half_split(T* x, const float* cosine, const float* sine, int64_t half) {
  auto rotate = [&](auto get, auto get_table, auto put, int64_t i) VLLM_LAMBDA {
    Floats a = get(x + i), b = get(x + half + i);
    Floats c = get_table(cosine + i), s = get_table(sine + i);
    put(x + i, a * c - b * s);
    put(x + half + i, b * c + a * s);
  };
  for_each_vector(
      half,
      [&](int64_t i) VLLM_LAMBDA {
        rotate([](const T* p) VLLM_LAMBDA { return load(p); },
               [](const float* p) VLLM_LAMBDA { return load(p); },
               [](T* p, Floats v) VLLM_LAMBDA { store(p, v); }, i);
      },
      [&](int64_t i, int64_t m) VLLM_LAMBDA {
        rotate([m](const T* p) VLLM_LAMBDA { return load_first(p, m); },
               [m](const float* p) VLLM_LAMBDA { return load_first(p, m); },
               [m](T* p, Floats v) VLLM_LAMBDA { store_first(p, v, m); }, i);
      });
}

// Pairs (2i, 2i + 1).
template <class T>
void rotate_interleaved(T* x, const float* cosine, const float* sine, int64_t half) {
  float in[kMaxRotaryDim + kWidth], out[kMaxRotaryDim + kWidth];
  const int64_t n = 2 * half;
  for_each_vector(
      n, [&](int64_t i) VLLM_LAMBDA { store(in + i, load(x + i)); },
      [&](int64_t i, int64_t m) VLLM_LAMBDA { store(in + i, load_first(x + i, m)); });
  for (int64_t i = 0; i < half; ++i) {
    const float a = in[2 * i], b = in[2 * i + 1], c = cosine[i], s = sine[i];
    out[2 * i] = a * c - b * s;
    out[2 * i + 1] = b * c + a * s;
  }
  for_each_vector(
      n, [&](int64_t i) VLLM_LAMBDA { store(x + i, load(out + i)); },
      [&](int64_t i, int64_t m) VLLM_LAMBDA { store_first(x + i, load(out + i), m); });
}

template <class T>
void rotate_heads(T* x, int64_t heads, int64_t head_stride, const float* table,
                  const RotaryArgs& args) {
  const int64_t half = args.rotary_dim / 2;
  for (int64_t head = 0; head < heads; ++head) {
    T* row = x + head * head_stride;
    if (args.interleaved) {
      rotate_interleaved(row, table, table + half, half);
    } else {
      rotate_half_split(row, table, table + half, half);
    }
  }
}

template <class T>
Status run_rotary(const RotaryArgs& args) {
  if (args.rotary_dim > kMaxRotaryDim || args.rotary_dim % 2 != 0) return kBadCall;
  SharedStatus status;
  const int64_t heads = args.query_heads + args.key_heads;
  const int64_t work = heads * (3 * args.rotary_dim / kWidth + 4);
  parallel_ranges(args.threads, args.tokens, work, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      const int64_t position = args.positions[token];
      if (position < 0 || position >= args.max_position) return status.fail(kBadIndex);
      const float* table = args.cos_sin + position * args.cos_sin_stride;
      T* query = static_cast<T*>(args.query) + token * args.query_token_stride;
      T* key = static_cast<T*>(args.key) + token * args.key_token_stride;
      rotate_heads(query, args.query_heads, args.query_head_stride, table, args);
      rotate_heads(key, args.key_heads, args.key_head_stride, table, args);
    }
  });
  return Status(status.value);
}

void silu_and_mul(const Tensor& x, const Tensor& out) {
  const SiluAndMulArgs args{dtype_of(x), num_threads(), x.data_ptr(), x.size(0),
                            out.size(1), x.stride(0),   out.data_ptr()};
  check(with_dtype(args.dtype,
                   [&](auto type) { return run_silu_and_mul<decltype(type)>(args); }),
        "silu_and_mul");
}

void relu_squared(const Tensor& x, const Tensor& out) {
  const ReluSquaredArgs args{dtype_of(x), num_threads(), x.data_ptr(), x.size(0),
                             x.size(1),   x.stride(0),   out.data_ptr()};
  check(with_dtype(args.dtype,
                   [&](auto type) { return run_relu_squared<decltype(type)>(args); }),
        "relu_squared");
}

GateArgs gate_args(const Tensor& x, const Tensor& gate, const Tensor& out) {
  const Rows3 rows(x), gates(gate);
  return {dtype_of(x),       num_threads(),      rows.outer,         rows.inner, rows.n,
          rows.data,         rows.outer_stride,  rows.inner_stride,  gates.data, gates.outer_stride,
          gates.inner_stride, out.data_ptr()};
}

void sigmoid_gate(const Tensor& x, const Tensor& gate, const Tensor& out) {
  const GateArgs args = gate_args(x, gate, out);
  check(with_dtype(args.dtype,
                   [&](auto type) {
                     using T = decltype(type);
                     return run_gate<T>(args, [](Floats g) VLLM_LAMBDA { return sigmoid<T>(g); });
                   }),
        "sigmoid_gate");
}

void silu_gate(const Tensor& x, const Tensor& gate, const Tensor& out) {
  const GateArgs args = gate_args(x, gate, out);
  check(with_dtype(args.dtype,
                   [&](auto type) {
                     using T = decltype(type);
                     return run_gate<T>(args, [](Floats g) VLLM_LAMBDA { return silu<T>(g); });
                   }),
        "silu_gate");
}

void rotary_embedding(const Tensor& positions, const Tensor& query, const Tensor& key,
                      const Tensor& cos_sin, bool interleaved) {
  const Rows3 queries(query), keys(key);
  const RotaryArgs args{dtype_of(query),
                        num_threads(),
                        data_of<const int64_t>(positions),
                        queries.outer,
                        queries.data,
                        queries.inner,
                        queries.outer_stride,
                        queries.inner_stride,
                        keys.data,
                        keys.inner,
                        keys.outer_stride,
                        keys.inner_stride,
                        data_of<const float>(cos_sin),
                        cos_sin.stride(0),
                        cos_sin.size(0),
                        cos_sin.size(1),
                        interleaved};
  check(with_dtype(args.dtype, [&](auto type) { return run_rotary<decltype(type)>(args); }),
        "rotary_embedding");
}

}  // namespace

VLLM_OPERATION(silu_and_mul)
VLLM_OPERATION(relu_squared)
VLLM_OPERATION(sigmoid_gate)
VLLM_OPERATION(silu_gate)
VLLM_OPERATION(rotary_embedding)

}  // namespace vllm
