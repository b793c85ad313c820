// Taking a request's chunks through the states of some heads: the code that all rules share.
//
// An incomplete chunk leaves its states as they were, and stores what its tokens contribute in the
// request's block as *pending*; the next step continues from there. Every element has one chain of
// operations, which only earlier tokens enter, so no value depends on where steps end. With Math =
// DotMath, and by tiles with TileMath, the long products multiply pairs of bfloat16 (keys and
// queries unchanged, the state and its updates rounded); everything else is float32.
#pragma once

#include <algorithm>
#include <concepts>
#include <optional>

#include "chunk_rows.h"

namespace vllm {

// A block: columns [column, column + n) of a head's state.
struct Columns {
  int64_t head, column, n;
};

// The rule of a recurrence; each task makes one.
template <class R>
concept ChunkRule = requires(R rule, const R& entered, const typename R::Args& args,
                             const Request& request, const Chunk& chunk, const Columns& columns,
                             const float* answers, Cell* scratch, typename R::Rows::Tiles& tiles,
                             int64_t n, bool passes) {
  { R::kAsked } -> std::convertible_to<int>;  // as for ChunkRows
  { R::cells(args) } -> std::convertible_to<int64_t>;  // cells of scratch memory
  R(args, request, n, scratch, tiles);  // n: the k-head
  rule.read(chunk);  // reads the k-head's inputs of a chunk
  entered.rows();  // these inputs, as ChunkRows
  rule.enter_head(chunk, n);  // reads a v-head's inputs of the chunk
  rule.load_pending(chunk, columns);  // for a request's first chunk, unless a token passes
  entered.prefetch_pending(chunk, columns);
  // Writes the outputs of tokens [first, end). answers [kAsked][kChunk, kColumns]: the products
  // with the state.
  rule.compute(chunk, columns, answers, passes);
  // After the chunk: S = total S + sum over j of k_j (to_end(j) update(j))^T.
  { entered.update(chunk, n) } -> std::convertible_to<const float*>;
  { entered.to_end(n) } -> std::convertible_to<float>;
  { entered.total() } -> std::convertible_to<float>;
  rule.save_pending(n, n, n, n, columns);  // target, block, begin, end
};

// One request, one k-head and some blocks of columns of its v-heads, chunk after chunk.
template <class Math, ChunkRule Rule>
class ChunkTask {
 public:
  using T = typename Math::Element;
  using Rows = ChunkRows<Math, Rule::kAsked>;
  static constexpr int kChunk = kChunkOf<T>;
  static constexpr int kAsked = Rule::kAsked;
  static constexpr bool kPacks = Math::kPerCell > 1;

  static int64_t cells(const typename Rule::Args& args, int64_t blocks) {
    return Rule::cells(args) +
           (blocks * (Rows::own_rows(args) + kAsked) + (kAsked + 1) * kChunk) * kColumns;
  }

  // Column blocks [first_block, end_block) of the k-head's v-heads.
  ChunkTask(const typename Rule::Args& args, const Request& request, int64_t k_head,
            int64_t first_block, int64_t end_block, Cell* memory, typename Rows::Tiles& tiles)
      : args_(args), request_(request), targets_(args.plan, request), k_head_(k_head),
        first_block_(first_block), end_block_(end_block), own_rows_(Rows::own_rows(args)),
        rule_(args, request, k_head, memory, tiles) {
    answers_ = reinterpret_cast<float*>(memory + Rule::cells(args));
    passing_ = answers_ + kAsked * kChunk * kColumns;
    weighted_ = reinterpret_cast<Cell*>(passing_ + kAsked * (end_block - first_block) * kColumns);
    states_ = reinterpret_cast<float*>(weighted_ + kChunk * kColumns);
    if constexpr (Math::kIsOfTiles) fill_tiles();
  }

  // Takes chunk k, the first one that was not taken yet.
  void take(int64_t k) {
    const Chunk chunk = request_.chunk(k, kChunk);
    const bool goes_on = k + 1 < request_.chunks(kChunk);
    int64_t next = target_;
    while (next < targets_.count() && position(next, chunk) <= chunk.end) ++next;
    rule_.read(chunk);
    passes_ = k == 0 && passes(target_, next, chunk);
    for (int64_t b = first_block_; b < end_block_; ++b) {
      enter_block(b, chunk);
      if (k == 0) load_block(b, chunk);
      compute(b, chunk);
      save_pending(chunk, target_, next);
      if (chunk.end < kChunk || !is_read(target_, next, chunk, goes_on)) continue;
      if (passes_) {
        add_updates(chunk, pool_rows(request_.block));
        continue;
      }
      add_updates(chunk, own_state());
      for (int64_t i = target_; i < next; ++i) {
        if (position(i, chunk) == kChunk) save_state(targets_[i].block);
      }
    }
    target_ = next;
  }

 private:
  // Fills the ends of incomplete tiles with zeros.
  void fill_tiles() const {
    const int64_t pairs = own_rows_ / 2, cells = (args_.dk + 1) / 2;
    for (int64_t i = 0; i < 2 * (end_block_ - first_block_); ++i) {
      std::memset(states_ + (i * pairs + cells) * kColumns, 0,
                  size_t((pairs - cells) * kColumns) * sizeof(float));
    }
    std::memset(weighted_ + kChunk / 2 * kColumns, 0, kChunk / 2 * kColumns * sizeof(Cell));
  }

  // Whether the state at the chunk's end is needed.
  bool is_read(int64_t target, int64_t end, const Chunk& chunk, bool goes_on) const {
    for (int64_t i = target; i < end; ++i) goes_on |= position(i, chunk) == kChunk;
    return goes_on;
  }

  // Whether a lone token uses and updates the state in the pool, without a copy.
  bool passes(int64_t target, int64_t end, const Chunk& chunk) const {
    const bool alone = request_.tokens == 1 && chunk.number > 0;
    if (!alone || args_.dv % kColumns != 0) return false;
    for (int64_t i = target; i < end; ++i) {
      if (targets_[i].block != request_.block) return false;
    }
    return true;
  }

  int64_t position(int64_t i, const Chunk& chunk) const {
    return targets_.position(i, chunk, kChunk);
  }

  // Makes b the current block, and enters its head if it is a new one.
  void enter_block(int64_t b, const Chunk& chunk) {
    const int64_t per_head = (args_.dv + kColumns - 1) / kColumns;
    const int64_t column = b % per_head * kColumns, left = args_.dv - column;
    const int64_t head = k_head_ * args_.group() + b / per_head;
    state_ = states_ + (b - first_block_) * own_rows_ * kColumns;
    const bool is_new = b == first_block_ || head != at_.head;
    at_ = {head, column, left < kColumns ? left : kColumns};
    if (is_new) rule_.enter_head(chunk, head);
  }

  void load_block(int64_t b, const Chunk& chunk) {
    const bool starts_head = b == first_block_ || at_.column == 0;
    if (chunk.number == 0) std::memset(state_, 0, size_t(own_rows_ * kColumns) * sizeof(float));
    if (starts_head && chunk.number > 0) passes_ ? ask_state(b, chunk) : load_state(b);
    if (!passes_) rule_.load_pending(chunk, at_);
  }

  typename Rows::OwnRows own_state() const { return {{state_, kColumns, own_rows_}}; }

  // The place of this head's state in a block of the pool, from the current columns on.
  typename Rows::StateRows pool_rows(int64_t block) const {
    return {args_.state_of(block, at_.head) + at_.column, args_.state_row_stride, args_.dk};
  }

  // Copies the state of this head from the current columns on, in the order of memory.
  void load_state(int64_t b) {
    constexpr int64_t kAhead = 12;  // rows from a prefetch to its use
    const int64_t blocks = (args_.dv - at_.column + kColumns - 1) / kColumns;
    const int64_t mine = end_block_ - b < blocks ? end_block_ - b : blocks;
    const int64_t left = args_.dv - at_.column, n = left < mine * kColumns ? left : mine * kColumns;
    const auto rows = pool_rows(request_.block);
    const auto load_row = [&](const float* row, int64_t j) VLLM_LAMBDA {
      if (j % 16 == 0) __builtin_prefetch(row + kAhead * rows.stride + j);
      return load_up_to(row + j, n - j);
    };
    const auto own = [&](int64_t j) VLLM_LAMBDA {  // from column j on
      float* block = state_ + j / kColumns * own_rows_ * kColumns;
      return typename Rows::OwnRows{{block + j % kColumns, kColumns, own_rows_}};
    };
    for (int64_t s = 0; s < rows.pairs(); ++s) {
      for (int64_t j = 0; j < mine * kColumns; j += kWidth) {
        const Floats rounded = load_row(rows.rounded(s), j), low = load_row(rows.low(s), j);
        if constexpr (kPacks) {
          store(own(j).rounded(s), rounded);
          store(own(j).low(s), low);
        } else {
          store(own(j).plain(2 * s), join_upper(rounded, low));
          store(own(j).plain(2 * s + 1), join_lower(rounded, low));
        }
      }
    }
    for (int64_t i = 2 * rows.pairs(); i < args_.dk; ++i) {
      for (int64_t j = 0; j < mine * kColumns; j += kWidth) {
        const Floats row = load_row(rows.plain(i), j);
        if constexpr (kPacks) {
          store(own(j).rounded(i / 2), rounded_halves(row, Floats{}));
          store(own(j).low(i / 2), low_halves(row, Floats{}));
        } else {
          store(own(j).plain(i), row);
        }
      }
    }
  }

  // Multiplies the token with the state in the pool, for this head's columns from the current ones
  // on. Result: passing_[block][kAsked].
  void ask_state(int64_t b, const Chunk& chunk) const {
    constexpr int kBlock = kAsked * kColumns;
    const int64_t blocks = (args_.dv - at_.column) / kColumns;
    const int64_t mine = end_block_ - b < blocks ? end_block_ - b : blocks;
    const float* state = args_.state_of(request_.block, at_.head) + at_.column;
    float* out = passing_ + (b - first_block_) * kBlock;
    rule_.prefetch_pending(chunk, at_);
    int64_t i = 0;
    for (; i + 2 <= mine; i += 2) {
      rule_.rows().template recall_row<2>(chunk, state + i * kColumns, out + i * kBlock);
    }
    if (i < mine) {
      rule_.rows().template recall_row<1>(chunk, state + i * kColumns, out + i * kBlock);
    }
  }

  // Snapshots bypass the caches: they are read when a later request finds them, if ever.
  __attribute__((noinline)) void save_state(int64_t block) const {
    const auto rows = pool_rows(block);
    const bool own = block == request_.block;
    const auto save_row = [&](float* row, int64_t j, Floats v) VLLM_LAMBDA {
      if (at_.n - j < kWidth) return store_first(row + j, v, at_.n - j);
      own ? store(row + j, v) : stream(row + j, v);
    };
    const auto state = own_state();
    for (int64_t s = 0; s < rows.pairs(); ++s) {
      for (int64_t j = 0; j < at_.n; j += kWidth) {
        if constexpr (kPacks) {
          save_row(rows.rounded(s), j, load(state.rounded(s) + j));
          save_row(rows.low(s), j, load(state.low(s) + j));
        } else {
          const Floats upper = load(state.plain(2 * s) + j);
          const Floats lower = load(state.plain(2 * s + 1) + j);
          save_row(rows.rounded(s), j, rounded_halves(upper, lower));
          save_row(rows.low(s), j, low_halves(upper, lower));
        }
      }
    }
    for (int64_t i = 2 * rows.pairs(); i < args_.dk; ++i) {
      for (int64_t j = 0; j < at_.n; j += kWidth) {
        Floats row;
        if constexpr (kPacks) {
          row = join_upper(load(state.rounded(i / 2) + j), load(state.low(i / 2) + j));
        } else {
          row = load(state.plain(i) + j);
        }
        save_row(rows.plain(i), j, row);
      }
    }
    if (!own) stream_fence();
  }

  // Saves the state at the chunk's start, and the tokens since, to the targets inside the chunk.
  void save_pending(const Chunk& chunk, int64_t target, int64_t end) {
    for (int64_t i = target; i < end; ++i) {
      const int64_t rows = position(i, chunk), block = targets_[i].block;
      if (rows == kChunk) continue;
      const bool there = block == request_.block && chunk.number * kChunk <= request_.start;
      if (chunk.number > 0 && !there) save_state(block);
      rule_.save_pending(targets_.number(i), block, there ? chunk.first : 0, rows, at_);
    }
  }

  void compute(int64_t b, const Chunk& chunk) {
    if (passes_) {
      const float* answers = passing_ + kAsked * (b - first_block_) * kColumns;
      for (int a = 0; a < kAsked; ++a) {
        std::memcpy(answers_ + (a * kChunk + chunk.first) * kColumns, answers + a * kColumns,
                    kColumns * sizeof(float));
      }
    } else if (chunk.number > 0) {
      rule_.rows().recall(chunk, reinterpret_cast<const Cell*>(state_), answers_);
    } else {
      std::memset(answers_, 0, kAsked * kChunk * kColumns * sizeof(float));
    }
    rule_.compute(chunk, at_, answers_, passes_);
  }

  // Writes to_end(j) update(j) in cells.
  void weigh_updates(const Chunk& chunk) const {
    constexpr int kPer = Math::kPerCell;
    for (int64_t s = 0; s < kChunk; s += kPer) {
      const Floats upper = splat(rule_.to_end(s)), lower = splat(rule_.to_end(s + kPer - 1));
      const float *row = rule_.update(chunk, s), *next = rule_.update(chunk, s + kPer - 1);
      for (int64_t v = 0; v < kColumns; v += kWidth) {
        store_cells(weighted_ + s / kPer * kColumns + v,
                    Math::stacked_cells(load(row + v) * upper, load(next + v) * lower));
      }
    }
  }

  template <class State>
  void add_updates(const Chunk& chunk, const State& state) const {
    weigh_updates(chunk);
    rule_.rows().add_outer_products(weighted_, rule_.total(), state);
  }

  const typename Rule::Args& args_;
  const Request& request_;
  const Targets targets_;
  const int64_t k_head_, first_block_, end_block_, own_rows_;
  Rule rule_;
  Columns at_{-1, 0, 0};
  bool passes_ = false;  // for the current chunk
  int64_t target_ = 0;  // the first one that is not reached yet
  float *state_ = nullptr, *states_, *answers_, *passing_;
  Cell* weighted_;
};

// Most column blocks of a task, so that its states stay in the second cache from chunk to chunk.
constexpr int64_t kMostBlocks = 8;

// Most k-heads of a task. Their chunks are taken in turn, because their inputs lie side by side,
// and those of other tokens in other pages.
constexpr int64_t kMostHeads = 4;

// How the work of a request is divided.
struct ChunkTasks {
  int64_t blocks, parts = 1, heads = 1, groups;

  // Parts of a k-head's columns form its inner products again.
  ChunkTasks(const ChunkArgs& args, int64_t threads)
      : blocks(args.group() * ((args.dv + kColumns - 1) / kColumns)) {
    const int64_t requests = std::max<int64_t>(args.plan.requests, 1);
    const int64_t least = (2 * threads + requests - 1) / requests;  // tasks of a request
    parts = (blocks + kMostBlocks - 1) / kMostBlocks;
    while (parts < blocks && args.num_k_heads * parts < least) ++parts;
    if (parts == 1) heads = std::clamp<int64_t>(kMostBlocks / blocks, 1, kMostHeads);
    while (heads > 1 && args.num_k_heads / heads < least) --heads;
    groups = (args.num_k_heads + heads - 1) / heads;
  }
};

// Runs all requests of a step, then save(request) for the data of incomplete chunks that tasks
// share. It comes last because all tasks may read these places.
template <class Math, ChunkRule Rule, class Save>
Status run_chunks(const typename Rule::Args& args, const Save& save) {
  using Task = ChunkTask<Math, Rule>;
  const StatePlanArgs& plan = args.plan;
  const int64_t work = (args.tokens + plan.requests) * args.num_v_heads * args.dk * args.dv;
  const int64_t threads = work / kWidth < kSerialWork ? 1 : args.threads;
  const ChunkTasks of(args, threads);
  SharedStatus status;
  // Runs, because the states of neighbours lie side by side.
  parallel_runs(threads, plan.requests * of.groups * of.parts, [&](int64_t i) {
    const int64_t part = i % of.parts, group = i / of.parts % of.groups;
    const Request request(args, i / of.parts / of.groups);
    if (request.tokens == 0) return;
    const WithoutSubnormals zeros;
    static thread_local Scratch scratch;
    const int64_t first = of.blocks * part / of.parts, end = of.blocks * (part + 1) / of.parts;
    const int64_t first_head = group * of.heads;
    const int64_t heads = std::min(of.heads, args.num_k_heads - first_head);
    const int64_t cells = Task::cells(args, end - first);
    auto* memory = static_cast<Cell*>(scratch.reserve(heads * cells * int64_t(sizeof(Cell))));
    if (memory == nullptr) return status.fail(kOutOfMemory);
    typename Task::Rows::Tiles tiles;
    std::optional<Task> tasks[kMostHeads];
    for (int64_t h = 0; h < heads; ++h) {
      tasks[h].emplace(args, request, first_head + h, first, end, memory + h * cells, tiles);
    }
    for (int64_t k = 0; k < request.chunks(Task::kChunk); ++k) {
      for (int64_t h = 0; h < heads; ++h) tasks[h]->take(k);
    }
  });
  if (status.failed()) return Status(status.value);
  parallel_runs(threads, plan.requests, [&](int64_t r) {
    const Request request(args, r);
    if (request.tokens > 0) save(request);
  });
  return kOk;
}

}  // namespace vllm
