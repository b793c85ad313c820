// The walk of some query rows over the keys of a request.
//
// A *row* is one query head of one token; rows of a request and kv head are numbered
// token * group + head in group. Keys come in packed tiles, in partitions of kPartitionKeys
// that are also cut at absolute positions. A tile is multiplied with blocks of rows, and for each
// block only with the keys that the block sees.
//
// Inside a partition the softmax runs online (maximum, sum, weighted values); partitions are
// merged in order. A tile or partition that is masked for a row leaves the row as it was, bit by
// bit: its probabilities are exactly 0, its rescaling exactly 1 (and the sign of a zero is
// dropped at the end). The same holds for the masked keys of a tile. So bits do not depend on
// which rows share a tile or a block, nor on whether partitions run in parallel.
#pragma once

#include <cmath>

#include "attention_tiles.h"

namespace vllm {

constexpr int64_t kPartitionKeys = 1024;
constexpr int64_t kMaxRows = 384;   // rows of a range; more rows need less packing
constexpr int64_t kBlockRows = 48;  // rows of a block, whose scores stay in the nearest caches

constexpr float kNoMaximum = -__builtin_inff();
constexpr double kLog2E = 1.4426950408889634;

// The state of each row in one partition: maximum [rows], sums [rows, kWidth] (one per lane,
// added up at the end), values [rows, padded value size].
struct RowStates {
  float* maximum;
  float* sums;
  float* values;

  static int64_t floats(int64_t rows, int64_t padded) {
    return round_up(rows, kWidth) + rows * (kWidth + padded);
  }

  RowStates(float* memory, int64_t rows)
      : maximum(memory),
        sums(memory + round_up(rows, kWidth)),
        values(sums + rows * kWidth) {}

  void clear(int64_t rows, int64_t padded) {
    for (int64_t r = 0; r < round_up(rows, kWidth); ++r) maximum[r] = kNoMaximum;
    std::memset(sums, 0, size_t(rows * (kWidth + padded)) * sizeof(float));
  }
};

VLLM_INLINE float finite_maximum(float m) { return m == kNoMaximum ? 0.0f : m; }

// Merges part into total, for the same rows.
inline void merge(RowStates& total, const RowStates& part, int64_t rows, int64_t padded) {
  for (int64_t r = 0; r < rows; ++r) {
    const float most = total.maximum[r] > part.maximum[r] ? total.maximum[r] : part.maximum[r];
    const float base = finite_maximum(most);
    const Floats keep = exp2(splat(total.maximum[r] - base));
    const Floats add = exp2(splat(part.maximum[r] - base));
    total.maximum[r] = most;
    float* sums = total.sums + r * kWidth;
    store(sums, fma(load(part.sums + r * kWidth), add, load(sums) * keep));
    for (int64_t i = 0; i < padded; i += kWidth) {
      float* values = total.values + r * padded + i;
      store(values, fma(load(part.values + r * padded + i), add, load(values) * keep));
    }
  }
}

// A contiguous range of rows of one request and kv head.
struct RowRange {
  int64_t request, kv_head;
  int64_t first, rows;      // row numbers inside the request
  int64_t query_tokens;     // tokens of the request in this step
  int64_t first_position;   // absolute position of the request's first query
};

template <class Math>
class AttentionRows {
 public:
  using T = typename Math::Element;

  using Tiles = KeyTiles<Math>;

  static constexpr int64_t kGrain = Tiles::kGrain, kPanel = Tiles::kPanel;
  static constexpr int64_t kValueSteps = Tiles::kValueSteps;

  // next: the range that this thread will probably take next, or null.
  AttentionRows(const AttentionArgs& args, const RowRange& range, const SharedTiles& shared,
                const RowRange* next = nullptr)
      : args_(args),
        range_(range),
        shared_(shared),
        next_(next),
        group_(args.heads / args.cache.kv_heads),
        size_(args.value_size),
        padded_(round_up(size_, kWidth)),
        steps_(Tiles::steps(args)),
        step_stride_(Tiles::step_stride(args)),
        is_capped_(args.soft_cap > 0),
        before_cap_(is_capped_ ? float(args.scale / args.soft_cap) : 1.0f),
        log2_scale_(float((is_capped_ ? args.soft_cap : args.scale) * kLog2E)) {}

  int64_t padded() const { return padded_; }

  // Reserves this thread's memory and reads the queries. False: there is no memory.
  bool prepare() {
    const int64_t rows = round_up(range_.rows, kWidth);
    const int64_t scores = kBlockRows * kTileKeys;
    const int64_t cells =
        rows * step_stride_ + Tiles::cells(args_) + 2 * scores + 4 * rows;
    auto* memory = static_cast<Cell*>(buffer().reserve((cells + args_.content()) * 4));
    if (memory == nullptr) return false;
    queries_ = memory;
    own_tile_ = queries_ + rows * step_stride_;
    scores_ = reinterpret_cast<float*>(own_tile_ + Tiles::cells(args_));
    probabilities_ = reinterpret_cast<Cell*>(scores_ + scores);
    rescale_ = reinterpret_cast<float*>(probabilities_ + scores);
    next_maximum_ = rescale_ + rows;
    ends_ = reinterpret_cast<int64_t*>(next_maximum_ + rows);
    zeros_ = reinterpret_cast<T*>(ends_ + rows);
    std::memset(zeros_, 0, size_t(args_.content()) * sizeof(T));
    for (int64_t r = 0; r < range_.rows; ++r) {
      read_query(r);
      ends_[r] = end_of(r);
    }
    return true;
  }

  // Keys that any row attends to.
  KeyRange all_keys() const { return {begin_for(end_of(0)), end_of(range_.rows - 1)}; }

  // Walks the tiles of one partition. Returns kBadIndex for a block that does not exist.
  Status run_partition(int64_t partition, RowStates& states) {
    states.clear(range_.rows, padded_);
    const KeyRange keys = all_keys();
    const int64_t first = partition * kPartitionKeys;
    for (int64_t tile = first; tile < first + kPartitionKeys; tile += kTileKeys) {
      if (tile + kTileKeys <= keys.begin || tile >= keys.end) continue;
      const Status status = run_tile(tile, states);
      if (status != kOk) return status;
    }
    return kOk;
  }

  // Writes the output rows from their merged states.
  void finish(const RowStates& states) const {
    if (args_.part != nullptr) return finish_part(states);
    for (int64_t r = 0; r < range_.rows; ++r) {
      const Floats inverse = splat(inverse_sum(r, states));
      const float* values = states.values + r * padded_;
      T* out = static_cast<T*>(args_.out) + (token(r) * args_.heads + head(r)) * size_;
      for_each_vector(
          size_,
          [&](int64_t i) VLLM_LAMBDA { store(out + i, load(values + i) * inverse + Floats{}); },
          [&](int64_t i, int64_t m) VLLM_LAMBDA {
            store_first(out + i, load(values + i) * inverse + Floats{}, m);
          });
    }
  }

 private:
  static Scratch& buffer() {
    static thread_local Scratch scratch;
    return scratch;
  }

  // The keys that row r (inside the range) attends to end after its own position. They begin a
  // sliding window before that end, or where its chunk begins. Of a part of the tokens it may see
  // none.
  int64_t end_of(int64_t r) const {
    return args_.keys_of(range_.first_position + (range_.first + r) / group_ + 1);
  }
  int64_t begin_for(int64_t end) const {
    const int64_t window = args_.sliding_window, chunk = args_.chunk_size;
    if (chunk > 0) return (end - 1) / chunk * chunk;
    return window > 0 && end > window ? end - window : 0;
  }
  KeyRange keys_of(int64_t r) const { return {begin_for(ends_[r]), ends_[r]}; }

  int64_t token(int64_t r) const {
    return args_.query_start[range_.request] + (range_.first + r) / group_;
  }
  int64_t head(int64_t r) const { return range_.kv_head * group_ + (range_.first + r) % group_; }

  // Writes the merged states: the weighted values, their maximum, the sum of their weights.
  void finish_part(const RowStates& states) const {
    for (int64_t r = 0; r < range_.rows; ++r) {
      float* out = args_.part + (token(r) * args_.heads + head(r)) * (size_ + 2);
      std::memcpy(out, states.values + r * padded_, size_t(size_) * sizeof(float));
      out[size_] = states.maximum[r];
      out[size_ + 1] = reduce_add(load(states.sums + r * kWidth));
    }
  }

  // One over the sum of row r's weights, including the sink's.
  float inverse_sum(int64_t r, const RowStates& states) const {
    const float sum = reduce_add(load(states.sums + r * kWidth));
    if (args_.sinks == nullptr) return 1.0f / sum;
    const float sink = float(entry(args_.sinks, args_.sinks_dtype, head(r)) * kLog2E);
    const float maximum = states.maximum[r];
    const float base = finite_maximum(maximum > sink ? maximum : sink);
    const Floats keep = exp2(splat(maximum - base)), add = exp2(splat(sink - base));
    return (keep / fma(splat(sum), keep, add))[0];
  }

  void read_query(int64_t r) {
    const T* query = static_cast<const T*>(args_.query) + token(r) * args_.query_token_stride +
                     head(r) * args_.query_head_stride;
    for (int64_t i = 0; i < step_stride_; i += kWidth) {
      store_cells(queries_ + r * step_stride_ + i, Math::row_cells(query, i, args_.key_size));
    }
  }

  Status run_tile(int64_t tile, RowStates& states) {
    int64_t begin = 0, end = range_.rows;  // rows that see any key of the tile
    while (begin < end && keys_of(begin).end <= tile) ++begin;
    while (begin < end && keys_of(end - 1).begin >= tile + kTileKeys) --end;
    const KeyRange wanted{keys_of(begin).begin, keys_of(end - 1).end};
    const bool masked = keys_of(begin).end < tile + kTileKeys || keys_of(end - 1).begin > tile;
    const bool one_token = keys_of(begin).end == keys_of(end - 1).end;
    const Cell* shared = shared_.tile(tile, Tiles::cells(args_));
    if (shared == nullptr || masked) {
      const Tiles tiles(args_, range_.request, range_.kv_head, zeros_);
      typename Tiles::Rows rows;
      const KeyRange seen{wanted.begin, ends_[range_.rows - 1]};
      const Status status = tiles.find(tile, shared == nullptr ? seen : shared_.keys, &rows);
      if (status != kOk) return status;
      const bool has_others = !one_token || shared != nullptr;
      if (masked && has_others && !tiles.values_finite(rows)) {
        return run_tile_by_token(tile, begin, end, states);
      }
      if (shared == nullptr) {
        if (next_ != nullptr && seen.end <= tile + kTileKeys) {
          Tiles(args_, next_->request, next_->kv_head, zeros_)
              .find_next(seen.end - tile, AttentionRows(args_, *next_, {}).all_keys(), &rows);
        }
        tiles.pack(rows, Tiles::part_of(tile, wanted), own_tile_);
      }
    }
    attend(tile, shared == nullptr ? own_tile_ : shared, begin, end, states);
    return kOk;
  }

  // A value that is not finite must not reach rows for which it is masked (0 * NaN is NaN). So
  // each token is done by itself, with zeros for the values that it does not see.
  Status run_tile_by_token(int64_t tile, int64_t begin, int64_t end, RowStates& states) {
    const Tiles tiles(args_, range_.request, range_.kv_head, zeros_);
    typename Tiles::Rows rows;
    for (int64_t r = begin, next; r < end; r = next) {
      const KeyRange wanted = keys_of(r);
      next = r + 1;
      while (next < end && keys_of(next).end == wanted.end) ++next;
      const Status status = tiles.find(tile, wanted, &rows);
      if (status != kOk) return status;
      tiles.pack(rows, Tiles::part_of(tile, wanted), own_tile_);
      attend(tile, own_tile_, r, next, states);
    }
    return kOk;
  }

  // Attends rows [begin, end) to the packed tile, block by block.
  void attend(int64_t tile, const Cell* packed, int64_t begin, int64_t end, RowStates& states) {
    keys_ = packed;
    values_ = packed + Tiles::key_cells(args_);
    for (int64_t first = begin; first < end; first += kBlockRows) {
      const int64_t last = first + kBlockRows < end ? first + kBlockRows : end;
      const KeyRange part = Tiles::part_of(tile, {keys_of(first).begin, keys_of(last - 1).end});
      score(tile, part, first, last);
      if (is_capped_) cap(tile, part, first, last);
      for (int64_t r = first; r < last; ++r) {
        raise_maximum(r, tile, part, scores_ + (r - first) * kTileKeys, states);
      }
      rescale(first, last, states);
      for (int64_t r = first; r < last; ++r) {
        weigh(r, part, scores_ + (r - first) * kTileKeys,
              probabilities_ + (r - first) * kValueSteps, states);
      }
      add_values(part, first, last, states);
    }
  }

  // Writes scores_ of the block's rows and a part of the tile. Scores of rows that see nothing
  // of a panel are left as they were.
  void score(int64_t tile, KeyRange part, int64_t first, int64_t last) {
    for (int64_t i = part.begin / kPanel * kPanel; i < part.end; i += kPanel) {
      const int64_t columns = part.end - i < kPanel ? round_up(part.end - i, kWidth) : kPanel;
      int64_t r = first;
      while (ends_[r] <= tile + i) ++r;
      block_product<typename Math::Cells, Start::kZeros>(queries_ + r * step_stride_, step_stride_,
                                         keys_ + i * step_stride_, kPanel, steps_,
                                         scores_ + (r - first) * kTileKeys + i, kTileKeys,
                                         last - r, columns, nullptr);
    }
  }

  // Caps the scores that the block's rows see; they are then in units of the cap.
  __attribute__((noinline)) void cap(int64_t tile, KeyRange part, int64_t first, int64_t last) {
    const Floats factor = splat(before_cap_);
    for (int64_t r = first; r < last; ++r) {
      float* scores = scores_ + (r - first) * kTileKeys;
      const int64_t end = ends_[r] - tile < part.end ? ends_[r] - tile : part.end;
      for (int64_t i = part.begin; i < end; i += kWidth) {
        store(scores + i, tanh(load(scores + i) * factor));
      }
    }
  }

  // Rescales the rows' values and adds the weighted values of a part of the tile.
  void add_values(KeyRange part, int64_t first, int64_t last, RowStates& states) {
    const int64_t step = part.begin / Math::kPerCell;
    const int64_t steps = (part.end + Math::kPerCell - 1) / Math::kPerCell - step;
    for (int64_t c = 0; c < padded_; c += kPanel) {
      block_product<typename Math::Cells, Start::kScaled>(
          probabilities_ + step, kValueSteps, values_ + c * kValueSteps + step * kPanel, kPanel,
          steps, states.values + first * padded_ + c, padded_, last - first,
          padded_ - c < kPanel ? padded_ - c : kPanel, rescale_ + first);
    }
  }

  // Masks row r's scores and finds its new maximum, in units of log2.
  void raise_maximum(int64_t r, int64_t tile, KeyRange part, float* scores,
                     const RowStates& states) {
    const int64_t end = round_up(part.end, kGrain);
    const KeyRange keys{keys_of(r).begin - tile, keys_of(r).end - tile};
    for (int64_t i = part.begin; i < keys.begin; i += kWidth) {
      const Ints lane = lane_numbers() + int(i);
      store(scores + i, lane >= int(keys.begin) ? load(scores + i) : splat(kNoMaximum));
    }
    for (int64_t i = keys.end / kWidth * kWidth; i < end; i += kWidth) {
      const Ints lane = lane_numbers() + int(i);
      store(scores + i, lane < int(keys.end) ? load(scores + i) : splat(kNoMaximum));
    }
    Floats most = load(scores + part.begin);
    for (int64_t i = part.begin + kWidth; i < end; i += kWidth) most = max(most, load(scores + i));
    const float found = reduce_max(most) * log2_scale_;
    next_maximum_[r] = states.maximum[r] > found ? states.maximum[r] : found;
  }

  // Sets rescale_ = 2^(old maximum - new maximum) and stores the new maximum.
  void rescale(int64_t begin, int64_t end, RowStates& states) {
    for (int64_t r = begin; r < end; r += kWidth) {
      const int64_t m = end - r < kWidth ? end - r : kWidth;
      const Floats next = load_first_or_all(next_maximum_ + r, m);
      const Floats base = next == splat(kNoMaximum) ? Floats{} : next;
      const Floats factor = exp2(load_first_or_all(states.maximum + r, m) - base);
      std::memcpy(rescale_ + r, &factor, size_t(m) * sizeof(float));
      std::memcpy(states.maximum + r, &next, size_t(m) * sizeof(float));
    }
  }

  static VLLM_INLINE Floats load_first_or_all(const float* p, int64_t m) {
    return m == kWidth ? load(p) : load_first(p, m);
  }

  // Writes row r's probabilities and updates its sum.
  void weigh(int64_t r, KeyRange part, const float* scores, Cell* probabilities,
             RowStates& states) {
    const Floats factor = splat(log2_scale_);
    const Floats base = splat(-finite_maximum(states.maximum[r]));
    Floats sum = {};
    for (int64_t i = part.begin; i < part.end; i += kGrain) {
      sum = Math::weigh(scores + i, factor, base, probabilities + i / Math::kPerCell, sum);
    }
    float* sums = states.sums + r * kWidth;
    store(sums, fma(load(sums), splat(rescale_[r]), sum));
  }

  const AttentionArgs& args_;
  const RowRange range_;
  const SharedTiles shared_;
  const RowRange* const next_;
  const int64_t group_, size_, padded_, steps_, step_stride_;
  const bool is_capped_;
  const float before_cap_;  // factor of a score before its tanh is taken
  const float log2_scale_;  // factor after that, or the only one without a cap
  Cell *queries_, *own_tile_, *probabilities_;
  const Cell *keys_ = nullptr, *values_ = nullptr;  // of the current tile
  float *scores_, *rescale_, *next_maximum_;
  int64_t* ends_;
  T* zeros_;
};

}  // namespace vllm
