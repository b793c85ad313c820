// The mLSTM, token by token. First the gates, stabiliser and normaliser of each head give three
// factors per token; then the memory is advanced, with its columns as lanes.
//
// Every element has one chain of operations that only earlier tokens enter, so no value depends on
// where steps end.
#include <cmath>

#include "state_plan.h"
#include "vec_math.h"

namespace vllm {
namespace {

struct MlstmArgs {
  int64_t threads, heads, dk, dv;
  const void* qkv;
  int64_t qkv_stride;
  const void* gates;
  int64_t gates_stride;
  float gate_cap, epsilon;
  float* memory;  // [blocks, heads, dk, dv]
  int64_t memory_block_stride, memory_head_stride, memory_row_stride;
  float* normaliser;  // [blocks, heads, dk]
  int64_t normaliser_block_stride, normaliser_head_stride;
  float* stabiliser;  // [blocks, heads]
  int64_t stabiliser_block_stride, state_blocks;
  StatePlanArgs plan;
  void* out;  // [tokens, heads, dv]
};

// Factors of one token: of a head's memory, of the added update, and of the output.
struct Factors {
  float kept, added, output;
};

constexpr int kVectors = 4;
constexpr int64_t kColumns = kVectors * kWidth;

// Writes a row of n elements as floats, followed by zeros, and returns it.
template <class T>
VLLM_INLINE const float* widen_row(const T* from, int64_t n, float* to) {
  for (int64_t i = 0; i < n; i += kWidth) store(to + i, load_up_to(from + i, n - i));
  return to;
}

// scratch: 3 rows of dk, rounded up to whole vectors.
template <class T>
void run_gates(const MlstmArgs& args, int64_t request, int64_t head, Factors* factors,
               float* scratch) {
  const StatePlanArgs& plan = args.plan;
  const int64_t padded = round_up(args.dk, kWidth);
  float *normaliser = scratch, *key = scratch + padded, *query = key + padded;
  const auto row_of = [&](int64_t block) {
    return args.normaliser + block * args.normaliser_block_stride +
           head * args.normaliser_head_stride;
  };
  const auto stabiliser_of = [&](int64_t block) {
    return args.stabiliser + block * args.stabiliser_block_stride + head;
  };
  const bool known = plan.has_state[request] != 0;
  const int64_t own = plan.block_ids[request];
  Floats stabiliser = splat(known ? *stabiliser_of(own) : 0.0f);
  for (int64_t i = 0; i < padded; i += kWidth) {
    store(normaliser + i, known ? load_up_to(row_of(own) + i, args.dk - i) : Floats{});
  }
  const Floats cap = splat(args.gate_cap);
  const float scale = 1.0f / std::sqrt(float(args.dk));
  const auto advance = [&](int64_t token) {
    const T* row = static_cast<const T*>(args.qkv) + token * args.qkv_stride;
    widen_row(row + head * args.dk, args.dk, query);
    widen_row(row + (args.heads + head) * args.dk, args.dk, key);
    const T* gates = static_cast<const T*>(args.gates) + token * args.gates_stride + head;
    const Floats input = cap * tanh(splat(to_float(gates[0])) / cap);
    const Floats forget = cap * tanh(splat(to_float(gates[args.heads])) / cap);
    const Floats faded = stabiliser - softplus(-forget);
    stabiliser = max(faded, input);
    const Floats kept = exp(faded - stabiliser), added = exp(input - stabiliser);
    Floats sums = {};
    for (int64_t i = 0; i < padded; i += kWidth) {
      const Floats next = fma(kept, load(normaliser + i), added * load(key + i));
      store(normaliser + i, next);
      sums = fma(load(query + i), next, sums);
    }
    const float size = std::fabs(reduce_add(sums) * scale), least = exp(-stabiliser)[0];
    factors[token * args.heads + head] = {
        kept[0], added[0], scale / ((size > least ? size : least) + args.epsilon)};
  };
  walk_tokens(plan, request, advance, [&](int64_t block) {
    std::memcpy(row_of(block), normaliser, size_t(args.dk) * sizeof(float));
    *stabiliser_of(block) = stabiliser[0];
  });
}

// scratch: [dk][kColumns] of the memory, then 2 rows of dk, rounded up to whole vectors.
template <class T>
void run_memory(const MlstmArgs& args, int64_t request, int64_t head, int64_t column,
                const Factors* factors, float* scratch) {
  const StatePlanArgs& plan = args.plan;
  const int64_t n = args.dv - column < kColumns ? args.dv - column : kColumns;
  float *memory = scratch, *key = scratch + args.dk * kColumns;
  float* query = key + round_up(args.dk, kWidth);
  const auto row_of = [&](int64_t block, int64_t i) {
    return args.memory + block * args.memory_block_stride + head * args.memory_head_stride +
           i * args.memory_row_stride + column;
  };
  std::memset(memory, 0, size_t(args.dk * kColumns) * sizeof(float));
  if (plan.has_state[request]) {
    for (int64_t i = 0; i < args.dk; ++i) {
      std::memcpy(memory + i * kColumns, row_of(plan.block_ids[request], i),
                  size_t(n) * sizeof(float));
    }
  }
  const auto advance = [&](int64_t token) {
    const T* row = static_cast<const T*>(args.qkv) + token * args.qkv_stride;
    widen_row(row + head * args.dk, args.dk, query);
    widen_row(row + (args.heads + head) * args.dk, args.dk, key);
    const T* values = row + 2 * args.heads * args.dk + head * args.dv + column;
    const Factors& factor = factors[token * args.heads + head];
    const Floats kept = splat(factor.kept);
    Floats value[kVectors], sums[kVectors] = {};
    for (int v = 0; v < kVectors; ++v) {
      value[v] = load_up_to(values + v * kWidth, n - v * kWidth) * splat(factor.added);
    }
    for (int64_t i = 0; i < args.dk; ++i) {
      float* cells = memory + i * kColumns;
      const Floats k = splat(key[i]), q = splat(query[i]);
      for (int v = 0; v < kVectors; ++v) {
        const Floats next = fma(k, value[v], kept * load(cells + v * kWidth));
        store(cells + v * kWidth, next);
        sums[v] = fma(q, next, sums[v]);
      }
    }
    T* out = static_cast<T*>(args.out) + (token * args.heads + head) * args.dv + column;
    for (int v = 0; v < kVectors; ++v) {
      const int64_t at = v * kWidth, left = n - at;
      const Floats result = sums[v] * splat(factor.output);
      if (left >= kWidth) {
        store(out + at, result);
      } else if (left > 0) {
        store_first(out + at, result, left);
      }
    }
  };
  walk_tokens(plan, request, advance, [&](int64_t block) {
    for (int64_t i = 0; i < args.dk; ++i) {
      std::memcpy(row_of(block, i), memory + i * kColumns, size_t(n) * sizeof(float));
    }
  });
}

template <class T>
Status run(const MlstmArgs& args) {
  if (!args.plan.blocks_in_range(args.state_blocks)) return kBadIndex;
  const int64_t requests = args.plan.requests, tokens = args.plan.query_start[requests];
  const int64_t per_head = (args.dv + kColumns - 1) / kColumns;
  const int64_t floats = args.dk * kColumns + 3 * round_up(args.dk, kWidth);
  static thread_local Scratch shared;
  auto* factors = static_cast<Factors*>(
      shared.reserve(tokens * args.heads * int64_t(sizeof(Factors))));
  if (factors == nullptr && tokens > 0) return kOutOfMemory;
  SharedStatus status;
  // Calls body(request, head, column, memory) for all columns of all heads of all requests.
  const auto together = [&](int64_t per_head_tasks, int64_t work, const auto& body) {
    const int64_t tasks = requests * args.heads * per_head_tasks;
    parallel_for(work < kSerialWork ? 1 : args.threads, tasks, [&](int64_t i) {
      const WithoutSubnormals zeros;
      static thread_local Scratch scratch;
      auto* own = static_cast<float*>(scratch.reserve(floats * int64_t(sizeof(float))));
      if (own == nullptr) return status.fail(kOutOfMemory);
      const int64_t head = i / per_head_tasks;
      body(head / args.heads, head % args.heads, i % per_head_tasks * kColumns, own);
    });
  };
  const int64_t work = tokens * args.heads * args.dk;
  together(1, work / kWidth * 4, [&](int64_t request, int64_t head, int64_t, float* own) {
    run_gates<T>(args, request, head, factors, own);
  });
  if (status.failed()) return Status(status.value);
  together(per_head, work * per_head * kVectors * 3,
           [&](int64_t request, int64_t head, int64_t column, float* own) {
             run_memory<T>(args, request, head, column, factors, own);
           });
  return Status(status.value);
}

void mlstm(const Tensor& qkv, const Tensor& gates, double gate_cap, double epsilon,
           const Tensor& query_start, const Tensor& /*seq_lens*/, const Tensor& block_ids,
           const Tensor& has_state, const Tensor& snapshot_start, const Tensor& snapshot_tokens,
           const Tensor& snapshot_blocks, const MaybeTensor& is_final, const Tensor& memory_cache,
           const Tensor& normaliser_cache, const Tensor& stabiliser_cache, const Tensor& out) {
  const MlstmArgs args{num_threads(),
                       memory_cache.size(1),
                       memory_cache.size(2),
                       memory_cache.size(3),
                       qkv.data_ptr(),
                       qkv.stride(0),
                       gates.data_ptr(),
                       gates.stride(0),
                       float(gate_cap),
                       float(epsilon),
                       data_of<float>(memory_cache),
                       memory_cache.stride(0),
                       memory_cache.stride(1),
                       memory_cache.stride(2),
                       data_of<float>(normaliser_cache),
                       normaliser_cache.stride(0),
                       normaliser_cache.stride(1),
                       data_of<float>(stabiliser_cache),
                       stabiliser_cache.stride(0),
                       stabiliser_cache.size(0),
                       StatePlanArgs(query_start, block_ids, has_state, snapshot_start,
                                     snapshot_tokens, snapshot_blocks, is_final),
                       out.data_ptr()};
  check(with_dtype(dtype_of(qkv), [&](auto type) { return run<decltype(type)>(args); }), "mlstm");
}

}  // namespace

VLLM_OPERATION(mlstm)

}  // namespace vllm
