// The interface between the kernels and Python: one struct of 8-byte fields an operation.
//
// vllm/kernels/native_cpu.py packs the same fields in the same order; kAbiVersion is
// raised whenever a field or an operation changes. Strides count elements, not bytes.
#pragma once

#include <cstdint>

namespace vllm {

constexpr int64_t kAbiVersion = 8;

enum Status : int {
  kOk = 0,
  kBadCall = 1,        // unknown operation, instruction set or size of the arguments
  kBadDtype = 2,       // not float32, bfloat16 or float16
  kBadIndex = 3,       // a slot, block id or position outside of its tensor
  kOutOfMemory = 4,
};

enum Dtype : int64_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

// Tokens of a chunk of the gated delta rule, at absolute positions: also the most pending ones.
constexpr int64_t kDeltaChunkTokens = 16;

enum Isa : int { kBaseline = 0, kAvx2 = 1, kAvx512 = 2, kAvx512Bf16 = 3, kNumIsas = 4 };

// x[outer, inner, n] -> out dense. weight may be null. gate: gated_rms_norm only.
// residual: add_rms_norm only, updated in place, inner == 1.
struct RmsNormArgs {
  int64_t dtype, threads;
  const void* x;
  int64_t outer, inner, n, x_outer_stride, x_inner_stride;
  const void* weight;
  void* residual;
  int64_t residual_stride;
  const void* gate;
  int64_t gate_outer_stride, gate_inner_stride;
  void* out;
  double eps, offset;
};

// out[rows, n] dense = silu(x[:, :n]) * x[:, n:]
struct SiluAndMulArgs {
  int64_t dtype, threads;
  const void* x;
  int64_t rows, n, x_stride;
  void* out;
};

// out[outer, inner, n] dense = x * sigmoid(gate)
struct SigmoidGateArgs {
  int64_t dtype, threads;
  const void* x;
  int64_t outer, inner, n, x_outer_stride, x_inner_stride;
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
  int64_t cos_sin_stride, max_position, rotary_dim, interleaved;
};

// The paged cache [blocks, pages, page_tokens, kv_heads, 2 * head_size].
struct PagedCache {
  void* data;
  int64_t blocks, pages, page_tokens, kv_heads, head_size;
  int64_t block_stride, page_stride, token_stride, head_stride;
};

struct WriteKvArgs {
  int64_t dtype, threads;
  const void* key;
  int64_t key_token_stride, key_head_stride;
  const void* value;
  int64_t value_token_stride, value_head_stride;
  const int64_t* slots;
  int64_t tokens;
  PagedCache cache;
};

struct AttentionArgs {
  int64_t dtype, threads;
  const void* query;
  int64_t query_token_stride, query_head_stride, heads;
  PagedCache cache;
  const int32_t* block_table;
  int64_t table_stride, max_blocks;
  const int32_t* query_start;
  const int32_t* seq_lens;
  int64_t requests;
  int64_t sliding_window;  // 0: none
  const void* sinks;       // [heads] scores without values; may be null
  int64_t sinks_dtype;
  void* out;  // [tokens, heads, head_size] dense
  double scale;
  double soft_cap;  // 0: none
};

// Mirrors StatePlan (vllm/kernels/base.py).
struct StatePlanArgs {
  const int32_t* query_start;
  int64_t requests;
  const int32_t* block_ids;
  const uint8_t* has_state;
  const int32_t* snapshot_start;
  const int32_t* snapshot_tokens;
  const int32_t* snapshot_blocks;
  const uint8_t* is_final;  // the state after the last token is not read; may be null

  bool keeps_state(int64_t request) const { return is_final == nullptr || !is_final[request]; }
};

struct ConvArgs {
  int64_t dtype, threads;
  const void* x;
  int64_t x_stride, channels, width;
  const void* weight;  // [channels, width] dense
  const void* bias;    // may be null
  void* state;         // [blocks, width - 1, channels]
  int64_t state_blocks, state_block_stride, state_row_stride;
  StatePlanArgs plan;
  void* out;  // [tokens, channels]
  int64_t out_stride;
};

struct DeltaRuleArgs {
  int64_t dtype, threads;
  const void* qkv;
  int64_t tokens, qkv_stride, num_k_heads, num_v_heads, dk, dv;
  const void* a;
  int64_t a_stride;
  const void* b;
  int64_t b_stride;
  const void* a_log;  // [num_v_heads], as dt_bias
  int64_t a_log_dtype;
  const void* dt_bias;
  int64_t dt_bias_dtype;
  float* state;  // [blocks, num_v_heads, dk, dv], as delta_state.h says
  int64_t state_blocks, state_block_stride, state_head_stride, state_row_stride;
  void* pending_keys;  // [blocks, num_k_heads, kDeltaChunkTokens, dk]
  int64_t pending_keys_stride;
  float* pending_updates;  // [blocks, num_v_heads, kDeltaChunkTokens, dv]
  int64_t pending_updates_stride;
  float* pending_decays;  // [blocks, num_v_heads, kDeltaChunkTokens]
  int64_t pending_decays_stride;
  const int32_t* seq_lens;
  StatePlanArgs plan;
  void* out;  // [tokens, num_v_heads, dv] dense
};

// The rows [blocks, rows_per_block, layers, hidden].
struct RowCache {
  void* data;
  int64_t blocks, rows_per_block, layers, hidden;
  int64_t block_stride, row_stride, layer_stride;
};

struct CaptureRowsArgs {
  int64_t dtype, threads;
  RowCache cache;
  const int64_t* slots;
  int64_t tokens, column;
  const void* hidden;
  int64_t hidden_stride;
  const void* residual;  // may be null
  int64_t residual_stride;
};

struct GatherRowsArgs {
  int64_t dtype, threads;
  RowCache cache;
  const int64_t* slots;
  int64_t rows;
  void* out;        // [rows, layers, hidden] dense
  int64_t* report;  // first index row * layers + column: not finite, all zero; -1: none
};

// The most rows of one linear().
constexpr int64_t kMaxLinearRows = 64;

// out[rows, columns] dense = x weight^T + bias. bfloat16 on AVX512-BF16 only; n is even.
struct LinearArgs {
  int64_t dtype, threads;
  const void* x;  // [rows, n] dense
  int64_t rows, n;
  const void* weight;           // [columns, n] dense, or
  int64_t columns, is_blocked;  // is_blocked: oneDNN's [columns / 64, n / 2, 64, 2], padded
  int64_t sum_block;            // terms that are summed up before they are added to the rest
  const void* bias;             // may be null
  void* out;
};

// out[tokens, n] dense = rows `ids` of a table [rows, n] in LinearArgs' blocked order; n is even.
struct EmbeddingArgs {
  int64_t dtype, threads;
  const int64_t* ids;
  int64_t tokens;
  const void* table;
  int64_t rows, n;
  void* out;
};

// out[row] = index of the largest of n > 0 elements: the first of equals, of NaN if there is one.
struct MostLikelyArgs {
  int64_t dtype, threads;
  const void* logits;
  int64_t rows, n, row_stride;
  int64_t* out;
};

// Every operation once: its name, its argument struct.
#define VLLM_CPU_OPERATIONS(X)         \
  X(rms_norm, RmsNormArgs)             \
  X(silu_and_mul, SiluAndMulArgs)      \
  X(sigmoid_gate, SigmoidGateArgs)     \
  X(rotary_embedding, RotaryArgs)      \
  X(write_kv, WriteKvArgs)             \
  X(paged_attention, AttentionArgs)    \
  X(causal_conv1d, ConvArgs)           \
  X(gated_delta_rule, DeltaRuleArgs)   \
  X(capture_rows, CaptureRowsArgs)     \
  X(gather_rows, GatherRowsArgs)       \
  X(linear, LinearArgs)                \
  X(embedding, EmbeddingArgs)          \
  X(most_likely, MostLikelyArgs)

// Index of an operation in vllm_cpu_run, in the order above.
enum Operation : int {
#define X(name, Args) k_##name,
  VLLM_CPU_OPERATIONS(X)
#undef X
  kNumOperations
};

// The kernels of one instruction set.
struct KernelTable {
#define X(name, Args) Status (*name)(const Args&);
  VLLM_CPU_OPERATIONS(X)
#undef X
};

}  // namespace vllm
