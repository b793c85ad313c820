// The gated delta rule in chunks of kChunk tokens that begin at absolute positions.
//
// With S the state [dk, dv] at the chunk's start, L_i the sum of the log decays of its
// tokens up to i, n_i and m_i the inverse norms of key and query (m_i with the scale):
//   w_i = n_i beta_i (v_i - n_i e^{L_i} S^T k_i - sum_{j<i} n_i e^{L_i-L_j} (k_i.k_j) w_j)
//   o_i =                   m_i e^{L_i} S^T q_i + sum_{j<=i} m_i e^{L_i-L_j} (q_i.k_j) w_j
// and, after the chunk's last token: S = e^L S + sum_j k_j (e^{L-L_j} w_j)^T.
//
// A chunk that is not complete leaves S as it was and the *pending* k_j, w_j and L_j of its
// tokens in the request's block; the next step goes on from them. Every element has one
// chain of operations, which only tokens before it enter, so no value depends on where
// steps end. With Math = DotMath the long products multiply pairs of bfloat16 (keys and
// queries as they came, S and w rounded); everything else is float32.
#include "delta_chunk.h"

namespace vllm {
namespace VLLM_ISA {
namespace {

// Where a request's state goes: after the step, or as a snapshot.
struct Target {
  int64_t block, tokens;  // of this step
};

// The targets of a request, in order of tokens; the last one is its own block, if it is kept.
class Targets {
 public:
  Targets(const StatePlanArgs& plan, const Request& request)
      : plan_(plan), request_(request), first_(plan.snapshot_start[request.index]) {}

  int64_t count() const { return snapshots() + plan_.keeps_state(request_.index); }
  Target operator[](int64_t i) const {
    if (i == snapshots()) return {request_.block, request_.tokens};
    return {plan_.snapshot_blocks[first_ + i], plan_.snapshot_tokens[first_ + i]};
  }
  // Among the targets of all requests.
  int64_t number(int64_t i) const {
    return first_ - plan_.snapshot_start[0] + request_.index + i;
  }

 private:
  int64_t snapshots() const { return plan_.snapshot_start[request_.index + 1] - first_; }

  const StatePlanArgs& plan_;
  const Request& request_;
  const int64_t first_;
};

// One request, one k-head and some blocks of columns of its v-heads, chunk after chunk.
template <class Math>
class DeltaTask {
 public:
  using T = typename Math::Element;
  static constexpr int kChunk = kChunkOf<T>;
  static constexpr bool kPacks = Math::kPerCell > 1;

  static int64_t cells(const DeltaRuleArgs& args, int64_t blocks) {
    const int64_t padded = round_up(args.dk, kWidth);
    return ChunkRows<Math>::cells(args) + (blocks + kPacks) * padded * kColumns + padded +
           4 * kChunk * kColumns;
  }

  // Column blocks [first_block, end_block) of the k-head's v-heads. decays: see run().
  DeltaTask(const DeltaRuleArgs& args, const Request& request, int64_t k_head,
            int64_t first_block, int64_t end_block, float* decays, Cell* memory)
      : args_(args), places_{args}, request_(request), targets_(args.plan, request),
        k_head_(k_head), first_block_(first_block), end_block_(end_block), decays_(decays),
        padded_(round_up(args.dk, kWidth)), rows_(args, memory) {
    scales_ = reinterpret_cast<float*>(memory + ChunkRows<Math>::cells(args));
    updates_ = scales_ + padded_;
    recalled_ = updates_ + kChunk * kColumns;
    answered_ = recalled_ + kChunk * kColumns;
    weighted_ = reinterpret_cast<Cell*>(answered_ + kChunk * kColumns);
    packed_ = weighted_ + kChunk * kColumns;
    states_ = reinterpret_cast<float*>(packed_ + kPacks * padded_ * kColumns);
  }

  void run() {
    const int64_t chunks = request_.chunks(kChunk);
    int64_t target = 0;  // first one that is not reached yet
    for (int64_t k = 0; k < chunks; ++k) {
      const Chunk chunk = request_.chunk(k, kChunk);
      int64_t next = target;
      while (next < targets_.count() && position(next, chunk) <= chunk.end) ++next;
      rows_.read(request_, chunk, k_head_);
      for (int64_t b = first_block_; b < end_block_; ++b) {
        enter_block(b, chunk);
        if (k == 0) load_block(b, chunk);
        compute(chunk);
        save_pending(chunk, target, next);
        if (chunk.end < kChunk || !is_read(target, next, chunk, k + 1 < chunks)) continue;
        advance(chunk);
        for (int64_t i = target; i < next; ++i) {
          if (position(i, chunk) == kChunk) save_state(targets_[i].block);
        }
      }
      target = next;
    }
  }

 private:
  // Whether anybody needs the state at the chunk's end.
  bool is_read(int64_t target, int64_t end, const Chunk& chunk, bool goes_on) const {
    for (int64_t i = target; i < end; ++i) goes_on |= position(i, chunk) == kChunk;
    return goes_on;
  }

  // Rows of the chunk that target i covers; 0 and less: an earlier chunk's.
  int64_t position(int64_t i, const Chunk& chunk) const {
    return request_.start + targets_[i].tokens - chunk.number * kChunk;
  }

  // Turns to block b; computes the coefficients of a new head.
  void enter_block(int64_t b, const Chunk& chunk) {
    const int64_t per_head = (args_.dv + kColumns - 1) / kColumns;
    column_ = b % per_head * kColumns;
    n_ = args_.dv - column_ < kColumns ? args_.dv - column_ : kColumns;
    state_ = states_ + (b - first_block_) * padded_ * kColumns;
    const int64_t head = k_head_ * places_.group() + b / per_head;
    if (b == first_block_ || head != head_) {
      head_ = head;
      rows_.write_coefficients(request_, chunk, head, by_);
    }
  }

  void load_block(int64_t b, const Chunk& chunk) {
    const bool starts_head = b == first_block_ || column_ == 0;
    if (starts_head) load_state(b, chunk.number > 0);
    for (int64_t i = 0; i < chunk.first; ++i) {
      float* row = updates_ + i * kColumns;
      std::memset(row, 0, kColumns * sizeof(float));
      std::memcpy(row, places_.pending_update(request_.block, i, head_) + column_,
                  size_t(n_) * sizeof(float));
    }
  }

  // The state of this head from column_ on, in the order in which it lies in memory.
  void load_state(int64_t b, bool kept) {
    constexpr int64_t kAhead = 12;  // rows from asking for memory to its use
    const int64_t blocks = (args_.dv - column_ + kColumns - 1) / kColumns;
    const int64_t mine = end_block_ - b < blocks ? end_block_ - b : blocks;
    const int64_t whole = mine * kColumns, left = args_.dv - column_;
    const int64_t n = whole < left ? whole : left;
    if (!kept) return;
    if (n < whole) std::memset(state_, 0, size_t(mine * padded_) * kColumns * sizeof(float));
    const float* row = places_.state(request_.block, head_) + column_;
    for (int64_t i = 0; i < args_.dk; ++i, row += args_.state_row_stride) {
      for (int64_t j = 0; j < n; j += kColumns) {
        const int64_t m = n - j < kColumns ? n - j : kColumns;
        float* out = state_ + (j / kColumns * padded_ + i) * kColumns;
        for (int64_t line = 0; line < m; line += 16) {
          __builtin_prefetch(row + kAhead * args_.state_row_stride + j + line);
        }
        std::memcpy(out, row + j, size_t(m) * sizeof(float));
      }
    }
  }

  // Snapshots go around the caches: they are read when a later request finds them, if ever.
  void save_state(int64_t block) const {
    float* out = places_.state(block, head_) + column_;
    const bool own = block == request_.block;
    for (int64_t i = 0; i < args_.dk; ++i, out += args_.state_row_stride) {
      const float* row = state_ + i * kColumns;
      for_each_vector(
          n_,
          [&](int64_t j) VLLM_LAMBDA {
            const Floats v = load(row + j);
            own ? store(out + j, v) : stream(out + j, v);
          },
          [&](int64_t j, int64_t m) VLLM_LAMBDA {
            store_first(out + j, load(row + j), m);
          });
    }
    if (!own) stream_fence();
  }

  // To the targets inside this chunk: the state at its start and the updates since.
  void save_pending(const Chunk& chunk, int64_t target, int64_t end) const {
    for (int64_t i = target; i < end; ++i) {
      const int64_t rows = position(i, chunk), block = targets_[i].block;
      if (rows == kChunk) continue;
      const bool there = block == request_.block && chunk.number * kChunk <= request_.start;
      if (chunk.number > 0 && !there) save_state(block);
      for (int64_t j = there ? chunk.first : 0; j < rows; ++j) {
        std::memcpy(places_.pending_update(block, j, head_) + column_, updates_ + j * kColumns,
                    size_t(n_) * sizeof(float));
      }
      if (column_ == 0) {
        float* decays = decays_ + (targets_.number(i) * args_.num_v_heads + head_) * kChunk;
        std::memcpy(decays, by_.log_decay, kChunk * sizeof(float));
      }
    }
  }

  void compute(const Chunk& chunk) {
    if (chunk.number > 0) {
      const Cell* state = pack_state();
      rows_.recall_keys(chunk, state, recalled_);
      rows_.recall_queries(chunk, state, answered_);
    } else {
      std::memset(recalled_, 0, 2 * kChunk * kColumns * sizeof(float));
    }
    for (int64_t i = chunk.first; i < chunk.end; ++i) {
      compute_row(chunk, i);
      const int64_t later = chunk.token_of(i) + kChunk;
      if (later < request_.token + request_.tokens) prefetch(later);
    }
  }

  const Cell* pack_state() const {
    if (!kPacks) return reinterpret_cast<const Cell*>(state_);
    const int64_t steps = (args_.dk + Math::kPerCell - 1) / Math::kPerCell;
    for (int64_t s = 0; s < steps; ++s) {
      const float* rows = state_ + s * Math::kPerCell * kColumns;
      const bool alone = (s + 1) * Math::kPerCell > args_.dk;  // the last of an odd number
      for (int64_t j = 0; j < kColumns; j += kWidth) {
        const Floats upper = load(rows + j);
        const Floats lower = alone ? Floats{} : load(rows + kColumns + j);
        store_cells(packed_ + s * kColumns + j, Math::stacked_cells(upper, lower));
      }
    }
    return packed_;
  }

  void compute_row(const Chunk& chunk, int64_t i) {
    const T* values = places_.value(chunk.token_of(i), head_) + column_;
    const Floats recall = splat(-by_.recall[i]), answer = splat(by_.answer[i]);
    Floats update[kVectors], out[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      const int64_t at = i * kColumns + v * kWidth, left = n_ - v * kWidth;
      const T* p = values + v * kWidth;
      const Floats value = left >= kWidth ? load(p) : left > 0 ? load_first(p, left) : Floats{};
      update[v] = fma(recall, load(recalled_ + at), value);
      out[v] = answer * load(answered_ + at);
    }
    for (int64_t j = 0; kChunk > 1 && j < i; ++j) {
      const Floats key = splat(-by_.among_keys[i][j]), query = splat(by_.with_query[i][j]);
      for (int v = 0; v < kVectors; ++v) {
        const Floats w = load(updates_ + j * kColumns + v * kWidth);
        update[v] = fma(key, w, update[v]);
        out[v] = fma(query, w, out[v]);
      }
    }
    T* result = places_.output(chunk.token_of(i), head_) + column_;
    const Floats gain = splat(by_.gain[i]), own = splat(by_.with_query[i][i]);
    for (int v = 0; v < kVectors; ++v) {
      const int64_t left = n_ - v * kWidth;
      const Floats w = gain * update[v];
      store(updates_ + i * kColumns + v * kWidth, w);
      const Floats o = fma(own, w, out[v]);
      if (left >= kWidth) {
        store(result + v * kWidth, o);
      } else if (left > 0) {
        store_first(result + v * kWidth, o, left);
      }
    }
  }

  // Asks the memory for a token of the next chunk: rows lie too far apart for the hardware
  // to guess, and a store that misses holds up those that follow.
  void prefetch(int64_t token) const {
    constexpr int64_t kLine = 64 / int64_t(sizeof(T));
    if (column_ == 0) {
      const T *q = places_.query(token, k_head_), *k = places_.key(token, k_head_);
      for (int64_t i = 0; i < args_.dk; i += kLine) {
        __builtin_prefetch(q + i);
        __builtin_prefetch(k + i);
      }
    }
    const T* v = places_.value(token, head_) + column_;
    T* out = places_.output(token, head_) + column_;
    for (int64_t i = 0; i < n_; i += kLine) {
      __builtin_prefetch(v + i);
      __builtin_prefetch(out + i, 1);
    }
  }

  // S = e^L S + sum_j k_j (e^{L-L_j} w_j)^T; a request's first chunk has no S yet.
  void advance(const Chunk& chunk) {
    constexpr int kPer = Math::kPerCell;
    for (int64_t i = 0; i < args_.dk; ++i) scales_[i] = by_.total;
    for (int64_t s = 0; s < kChunk; s += kPer) {
      const Floats upper = splat(by_.to_end[s]), lower = splat(by_.to_end[s + kPer - 1]);
      for (int64_t v = 0; v < kColumns; v += kWidth) {
        const float* row = updates_ + s * kColumns + v;
        store_cells(weighted_ + s / kPer * kColumns + v,
                    Math::stacked_cells(load(row) * upper,
                                        load(row + (kPer - 1) * kColumns) * lower));
      }
    }
    rows_.add_outer_products(weighted_, chunk.number > 0 ? scales_ : nullptr, state_);
  }

  const DeltaRuleArgs& args_;
  const Places<T> places_;
  const Request& request_;
  const Targets targets_;
  const int64_t k_head_, first_block_, end_block_;
  float* decays_;
  const int64_t padded_;
  ChunkRows<Math> rows_;
  typename ChunkRows<Math>::Coefficients by_;
  int64_t head_ = -1, column_ = 0, n_ = 0;
  float *state_ = nullptr, *states_, *scales_, *updates_, *recalled_, *answered_;
  Cell *weighted_, *packed_;
};

// What the tasks share of incomplete chunks, to the pool; they may all have read from there.
template <class T>
void save_keys_and_decays(const DeltaRuleArgs& args, const Request& request, const float* decays) {
  constexpr int kChunk = kChunkOf<T>;
  const Places<T> places{args};
  const Targets targets(args.plan, request);
  for (int64_t i = 0; i < targets.count(); ++i) {
    const int64_t block = targets[i].block, end = request.start % kChunk + targets[i].tokens;
    if (end % kChunk == 0) continue;
    const Chunk chunk = request.chunk(end / kChunk, kChunk);
    for (int64_t j = block == request.block ? chunk.first : 0; j < end % kChunk; ++j) {
      for (int64_t h = 0; h < args.num_k_heads; ++h) {
        std::memcpy(places.pending_key(block, j, h), places.chunk_key(request, chunk, j, h),
                    size_t(args.dk) * sizeof(T));
      }
    }
    const float* rows = decays + targets.number(i) * args.num_v_heads * kChunk;
    for (int64_t h = 0; h < args.num_v_heads; ++h) {
      std::memcpy(places.pending_decays(block, h), rows + h * kChunk,
                  size_t(end % kChunk) * sizeof(float));
    }
  }
}

struct Memory {
  Scratch task, decays;
  static Memory& of_thread() {
    static thread_local Memory memory;
    return memory;
  }
};

template <class Math>
Status run(const DeltaRuleArgs& args) {
  if (!blocks_in_range(args.plan, args.state_blocks)) return kBadIndex;
  constexpr int kChunk = kChunkOf<typename Math::Element>;
  const StatePlanArgs& plan = args.plan;
  const int64_t targets =
      plan.requests + plan.snapshot_start[plan.requests] - plan.snapshot_start[0];
  auto* decays = static_cast<float*>(Memory::of_thread().decays.reserve(
      targets * args.num_v_heads * kChunk * int64_t(sizeof(float))));
  if (decays == nullptr) return kOutOfMemory;
  const int64_t work = (args.tokens + plan.requests) * args.num_v_heads * args.dk * args.dv;
  const int64_t threads = work / kWidth < kSerialWork ? 1 : args.threads;
  const int64_t blocks =
      args.num_v_heads / args.num_k_heads * ((args.dv + kColumns - 1) / kColumns);
  int64_t parts = 1;  // of a k-head's columns: each forms the inner products again
  while (parts < blocks && plan.requests * args.num_k_heads * parts < 2 * threads) ++parts;
  SharedStatus status;
  parallel_for(threads, plan.requests * args.num_k_heads * parts, [&](int64_t i) {
    const int64_t part = i % parts, k_head = i / parts % args.num_k_heads;
    const Request request(args, i / parts / args.num_k_heads);
    if (request.tokens == 0) return;
    const int64_t first = blocks * part / parts, end = blocks * (part + 1) / parts;
    const int64_t cells = DeltaTask<Math>::cells(args, end - first);
    auto* memory = static_cast<Cell*>(
        Memory::of_thread().task.reserve(cells * int64_t(sizeof(Cell))));
    if (memory == nullptr) return status.fail(kOutOfMemory);
    DeltaTask<Math>(args, request, k_head, first, end, decays, memory).run();
  });
  if (status.failed()) return Status(status.value);
  for (int64_t r = 0; r < plan.requests; ++r) {
    const Request request(args, r);
    if (request.tokens > 0) {
      save_keys_and_decays<typename Math::Element>(args, request, decays);
    }
  }
  return kOk;
}

}  // namespace

Status gated_delta_rule(const DeltaRuleArgs& args) {
  return with_math(args.dtype, [&](auto math) { return run<decltype(math)>(args); });
}

}  // namespace VLLM_ISA
}  // namespace vllm
