// The blocks of the pool that hold the recurrent states of a step's requests.
#pragma once

#include "operation.h"
#include "subnormals.h"

namespace vllm {

// StatePlan of vllm/ops/layout.py.
struct StatePlanArgs {
  const int32_t* query_start;
  int64_t requests;
  const int32_t* block_ids;
  const uint8_t* has_state;
  const int32_t* snapshot_start;
  const int32_t* snapshot_tokens;
  const int32_t* snapshot_blocks;
  const uint8_t* is_final;  // the state after the last token is not read; may be null

  StatePlanArgs(const Tensor& query_start, const Tensor& block_ids, const Tensor& has_state,
                const Tensor& snapshot_start, const Tensor& snapshot_tokens,
                const Tensor& snapshot_blocks, const MaybeTensor& is_final)
      : query_start(data_of<int32_t>(query_start)),
        requests(block_ids.size(0)),
        block_ids(data_of<int32_t>(block_ids)),
        has_state(data_of<uint8_t>(has_state)),
        snapshot_start(data_of<int32_t>(snapshot_start)),
        snapshot_tokens(data_of<int32_t>(snapshot_tokens)),
        snapshot_blocks(data_of<int32_t>(snapshot_blocks)),
        is_final(static_cast<const uint8_t*>(data_of(is_final))) {}

  bool keeps_state(int64_t request) const { return is_final == nullptr || !is_final[request]; }

  // Whether every block that the plan reads or writes is one of `blocks`.
  bool blocks_in_range(int64_t blocks) const {
    for (int64_t r = 0; r < requests; ++r) {
      if (block_ids[r] < 0 || block_ids[r] >= blocks) return false;
    }
    for (int64_t i = snapshot_start[0]; i < snapshot_start[requests]; ++i) {
      if (snapshot_blocks[i] < 0 || snapshot_blocks[i] >= blocks) return false;
    }
    return true;
  }
};

// Calls advance(token) for the tokens of a request in turn, and save(block) when its state is kept.
template <class Advance, class Save>
VLLM_INLINE void walk_tokens(const StatePlanArgs& plan, int64_t request, const Advance& advance,
                             const Save& save) {
  const int64_t begin = plan.query_start[request], end = plan.query_start[request + 1];
  int snapshot = plan.snapshot_start[request];
  for (int64_t token = begin; token < end; ++token) {
    advance(token);
    for (; snapshot < plan.snapshot_start[request + 1] &&
           plan.snapshot_tokens[snapshot] == token + 1 - begin;
         ++snapshot) {
      save(plan.snapshot_blocks[snapshot]);
    }
  }
  if (begin < end && plan.keeps_state(request)) save(plan.block_ids[request]);
}

// Calls walk(args, request, first channel, channels) for every request and vector of channels, in
// parallel. args: threads, channels, state_blocks and plan are read here.
template <class Args, class Walk>
Status walk_channels(const Args& args, int64_t work_of_a_token, const Walk& walk) {
  if (!args.plan.blocks_in_range(args.state_blocks)) return kBadIndex;
  const int64_t requests = args.plan.requests, tokens = args.plan.query_start[requests];
  const int64_t vectors = (args.channels + kWidth - 1) / kWidth;
  if (tokens == 0) return kOk;
  const int64_t work = tokens * work_of_a_token / requests + 1;
  parallel_ranges(args.threads, requests * vectors, work, [&](int64_t first, int64_t last) {
    const WithoutSubnormals zeros;
    for (int64_t i = first; i < last; ++i) {
      const int64_t channel = i % vectors * kWidth, left = args.channels - channel;
      walk(args, i / vectors, channel, left < kWidth ? left : kWidth);
    }
  });
  return kOk;
}

}  // namespace vllm
