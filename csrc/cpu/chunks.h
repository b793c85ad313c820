// Chunks of tokens that begin at absolute positions, and the places of their states.
#pragma once

#include "operation.h"
#include "state_halves.h"
#include "state_plan.h"

namespace vllm {

// Tokens of a chunk of 16-bit types, at absolute positions; at most so many are pending.
// PENDING_TOKENS of vllm/ops/layout.py.
constexpr int64_t kChunkTokens = 16;

// Tokens of a chunk. With one token, as for float32, nothing is ever pending.
template <class T>
constexpr int kChunkOf = sizeof(T) == 2 ? int(kChunkTokens) : 1;

// Whether tokens can be pending, and states are stored as in state_halves.h.
template <class T>
constexpr bool kInHalves = kChunkOf<T> > 1;

// A view of the pool with data of the tokens since the last whole chunk.
struct Pending {
  void* data = nullptr;
  int64_t block_stride = 0;
};

inline Pending pending_view(const std::vector<Tensor>& views, size_t i) {
  if (i >= views.size()) return {};  // with float32 nothing is ever pending
  return {views[i].data_ptr(), views[i].stride(0)};
}

// Arguments that all rules by which tokens change states share. A head of keys and queries serves
// num_v_heads / num_k_heads heads of values.
struct ChunkArgs {
  int64_t dtype, threads, tokens, num_k_heads, num_v_heads, dk, dv;
  float* state;  // [blocks, num_v_heads, dk, dv], stored as in state_halves.h
  int64_t state_blocks, state_block_stride, state_head_stride, state_row_stride;
  const int32_t* seq_lens;
  StatePlanArgs plan;
  void* out;  // [tokens, num_v_heads, dv] dense

  ChunkArgs(const Tensor& inputs, int64_t key_heads, const Tensor& state_cache,
            const Tensor& lengths, const StatePlanArgs& states, const Tensor& output)
      : dtype(dtype_of(inputs)), threads(num_threads()), tokens(inputs.size(0)),
        num_k_heads(key_heads), num_v_heads(state_cache.size(1)), dk(state_cache.size(2)),
        dv(state_cache.size(3)), state(data_of<float>(state_cache)),
        state_blocks(state_cache.size(0)), state_block_stride(state_cache.stride(0)),
        state_head_stride(state_cache.stride(1)), state_row_stride(state_cache.stride(2)),
        seq_lens(data_of<const int32_t>(lengths)), plan(states), out(output.data_ptr()) {}

  int64_t group() const { return num_v_heads / num_k_heads; }
  float* state_of(int64_t block, int64_t head) const {
    return state + block * state_block_stride + head * state_head_stride;
  }
  template <class T>
  T* output(int64_t token, int64_t head) const {
    return static_cast<T*>(out) + (token * num_v_heads + head) * dv;
  }
};

// The part of a request's chunk that this step computes.
struct Chunk {
  int64_t number;      // number of chunks before it in the request
  int64_t token;       // token in the batch of row `first`
  int64_t first, end;  // rows of this step; rows before `first` are pending
  int64_t token_of(int64_t row) const { return token + row - first; }
};

struct Request {
  int64_t index, token, tokens, start, block;  // start: absolute position of its first token

  Request(const ChunkArgs& args, int64_t r)
      : index(r),
        token(args.plan.query_start[r]),
        tokens(args.plan.query_start[r + 1] - token),
        start(args.plan.has_state[r] != 0 ? args.seq_lens[r] - tokens : 0),
        block(args.plan.block_ids[r]) {}

  int64_t chunks(int64_t length) const {
    return tokens == 0 ? 0 : (start % length + tokens + length - 1) / length;
  }
  Chunk chunk(int64_t k, int64_t length) const {
    const int64_t begin = k * length - start % length;  // of the chunk, relative to `token`
    const int64_t first = begin < 0 ? -begin : 0, left = tokens - begin;
    return {start / length + k, token + begin + first, first, left < length ? left : length};
  }
};

// The block that gets a request's state, after the step or as a snapshot.
struct Target {
  int64_t block, tokens;  // tokens: of this step, before the state is saved
};

// The targets of a request, in order of tokens. The last is its own block, if the state is kept.
class Targets {
 public:
  Targets(const StatePlanArgs& plan, const Request& request)
      : plan_(plan), request_(request), first_(plan.snapshot_start[request.index]) {}

  int64_t count() const { return snapshots() + plan_.keeps_state(request_.index); }
  Target operator[](int64_t i) const {
    if (i == snapshots()) return {request_.block, request_.tokens};
    return {plan_.snapshot_blocks[first_ + i], plan_.snapshot_tokens[first_ + i]};
  }
  // The index of target i among the targets of all requests.
  int64_t number(int64_t i) const {
    return first_ - plan_.snapshot_start[0] + request_.index + i;
  }
  // Rows of the chunk that target i covers; 0 or less: it lies in an earlier chunk.
  int64_t position(int64_t i, const Chunk& chunk, int64_t length) const {
    return request_.start + (*this)[i].tokens - chunk.number * length;
  }

 private:
  int64_t snapshots() const { return plan_.snapshot_start[request_.index + 1] - first_; }

  const StatePlanArgs& plan_;
  const Request& request_;
  const int64_t first_;
};

// save(number, block, chunk, first, end) for every target inside a chunk: rows [first, end) of its
// tokens have to become pending there; earlier rows already are.
template <class Save>
VLLM_INLINE void for_each_pending(const ChunkArgs& args, const Request& request, int64_t length,
                                  const Save& save) {
  const Targets targets(args.plan, request);
  for (int64_t i = 0; i < targets.count(); ++i) {
    const int64_t end = request.start % length + targets[i].tokens;
    if (end % length == 0) continue;
    const Chunk chunk = request.chunk(end / length, length);
    const int64_t block = targets[i].block, first = block == request.block ? chunk.first : 0;
    save(targets.number(i), block, chunk, first, end % length);
  }
}

}  // namespace vllm
