// Some query rows on their way through the keys of a request.
//
// A *row* is one query head of one token; rows of a request and kv head are numbered
// token * group + head in group. Keys come in tiles of kTileKeys, in partitions of
// kPartitionKeys, both cut at absolute positions. Inside a partition the softmax runs
// online (maximum, sum, weighted values); partitions are merged in order. A tile or
// partition that is masked for a row leaves it as it was, bit by bit: its probabilities
// are exactly 0, its rescaling exactly 1 (and the sign of a zero is dropped at the end).
// So it does not matter which rows share a tile, nor whether partitions run in parallel.
#pragma once

#include <cmath>

#include "cells.h"
#include "kernels.h"

namespace vllm {
namespace VLLM_ISA {

constexpr int64_t kTileKeys = 64;
constexpr int64_t kPartitionKeys = 1024;
constexpr int64_t kMaxRows = 96;

constexpr float kNoMaximum = -__builtin_inff();

// What one partition knows of each row: maximum [rows], sums [rows, kWidth] (one a lane,
// added up at the end), values [rows, padded head size].
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

// total = total and part, for the same rows.
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
  int64_t query_tokens;     // of the request in this step
  int64_t first_position;   // absolute position of the request's first query
};

struct KeyRange {
  int64_t begin, end;
  bool empty() const { return begin >= end; }
};

template <class Math>
class AttentionRows {
 public:
  using T = typename Math::Element;

  AttentionRows(const AttentionArgs& args, const RowRange& range)
      : args_(args),
        range_(range),
        group_(args.heads / args.cache.kv_heads),
        size_(args.cache.head_size),
        padded_(round_up(size_, kWidth)),
        steps_((size_ + Math::kPerCell - 1) / Math::kPerCell),
        step_stride_(round_up(steps_, kWidth)),
        log2_scale_(float(args.scale * 1.4426950408889634)) {}

  int64_t padded() const { return padded_; }

  // Reserves this thread's memory and reads the queries. False: no memory.
  bool prepare() {
    const int64_t value_steps = kTileKeys / Math::kPerCell;
    const int64_t cells = kMaxRows * step_stride_ + step_stride_ * kTileKeys +
                          value_steps * padded_ + kMaxRows * kTileKeys * 2 + 4 * kMaxRows;
    auto* memory = static_cast<Cell*>(buffer().reserve((cells + 2 * size_ + 64) * 4));
    if (memory == nullptr) return false;
    queries_ = memory;
    keys_ = queries_ + kMaxRows * step_stride_;
    values_ = keys_ + step_stride_ * kTileKeys;
    scores_ = reinterpret_cast<float*>(values_ + value_steps * padded_);
    probabilities_ = reinterpret_cast<Cell*>(scores_ + kMaxRows * kTileKeys);
    rescale_ = reinterpret_cast<float*>(probabilities_ + kMaxRows * kTileKeys);
    next_maximum_ = rescale_ + kMaxRows;
    ends_ = reinterpret_cast<int64_t*>(next_maximum_ + kMaxRows);
    zeros_ = reinterpret_cast<T*>(ends_ + kMaxRows);
    std::memset(zeros_, 0, size_t(2 * size_) * sizeof(T));
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
    for (int64_t r = 0; r < range_.rows; ++r) {
      const Floats inverse = splat(1.0f / reduce_add(load(states.sums + r * kWidth)));
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

  // The keys that row r (inside the range) attends to end behind its own position, and
  // begin, with a sliding window, that many before.
  int64_t end_of(int64_t r) const {
    return range_.first_position + (range_.first + r) / group_ + 1;
  }
  int64_t begin_for(int64_t end) const {
    const int64_t window = args_.sliding_window;
    return window > 0 && end > window ? end - window : 0;
  }
  KeyRange keys_of(int64_t r) const { return {begin_for(ends_[r]), ends_[r]}; }

  int64_t token(int64_t r) const {
    return args_.query_start[range_.request] + (range_.first + r) / group_;
  }
  int64_t head(int64_t r) const { return range_.kv_head * group_ + (range_.first + r) % group_; }

  void read_query(int64_t r) {
    const T* query = static_cast<const T*>(args_.query) + token(r) * args_.query_token_stride +
                     head(r) * args_.query_head_stride;
    for (int64_t i = 0; i < step_stride_; i += kWidth) {
      store_cells(queries_ + r * step_stride_ + i, Math::row_cells(query, i, size_));
    }
  }

  // Addresses of the keys of a tile; a row of zeros for those outside `wanted`.
  Status find_keys(int64_t tile, KeyRange wanted, const T** rows) const {
    const PagedCache& cache = args_.cache;
    const int64_t block_tokens = cache.pages * cache.page_tokens;
    const int32_t* table = args_.block_table + range_.request * args_.table_stride;
    const int64_t first = wanted.begin > tile ? wanted.begin : tile;
    const int64_t last = wanted.end < tile + kTileKeys ? wanted.end : tile + kTileKeys;
    for (int64_t position = tile; position < first; ++position) rows[position - tile] = zeros_;
    for (int64_t position = first; position < last;) {  // page by page
      const int64_t index = position / block_tokens, offset = position % block_tokens;
      if (index >= args_.max_blocks) return kBadIndex;
      const int64_t block = table[index];
      if (block < 0 || block >= cache.blocks) return kBadIndex;
      const int64_t in_page = offset % cache.page_tokens;
      const T* row = static_cast<const T*>(cache.data) + block * cache.block_stride +
                     offset / cache.page_tokens * cache.page_stride +
                     in_page * cache.token_stride + range_.kv_head * cache.head_stride;
      const int64_t left = cache.page_tokens - in_page;
      const int64_t end = last - position < left ? last : position + left;
      for (; position < end; ++position, row += cache.token_stride) rows[position - tile] = row;
    }
    for (int64_t position = last; position < tile + kTileKeys; ++position) {
      rows[position - tile] = zeros_;
    }
    return kOk;
  }

  // Fills keys_ [steps, kTileKeys] and values_ [kTileKeys / kPerCell, padded]; meanwhile
  // asks the memory for the tile to come.
  void pack(const T* const* rows, const T* const* next_rows) {
    constexpr int64_t kLine = 64 / int64_t(sizeof(T));  // elements of a cache line
    for (int64_t i = 0; i < kTileKeys; i += kWidth) {
      for (int64_t s = 0; s < steps_; s += kWidth) {
        Floats square[kWidth];
        for (int j = 0; j < kWidth; ++j) {
          square[j] = Math::row_cells(rows[i + j], s, size_);
          __builtin_prefetch(next_rows[i + j] + s * Math::kPerCell, 0, 2);
        }
        transpose(square);
        for (int j = 0; j < kWidth; ++j) {
          store_cells(keys_ + (s + j) * kTileKeys + i, square[j]);
        }
      }
    }
    for (int64_t i = 0; i < kTileKeys; i += Math::kPerCell) {
      const T* values[Math::kPerCell];
      for (int j = 0; j < Math::kPerCell; ++j) {
        values[j] = rows[i + j] + size_;
        for (int64_t c = 0; c < size_; c += kLine) {
          __builtin_prefetch(next_rows[i + j] + size_ + c, 0, 2);
        }
      }
      Cell* out = values_ + i / Math::kPerCell * padded_;
      for (int64_t c = 0; c < padded_; c += kWidth) {
        store_cells(out + c, Math::column_cells(values, c, size_));
      }
    }
  }

  bool values_finite(const T* const* rows) const {
    Floats sum = {};  // finite * 0 is 0, anything else NaN
    for (int64_t i = 0; i < kTileKeys; ++i) {
      for_each_vector(
          size_,
          [&](int64_t c) VLLM_LAMBDA { sum = sum + load(rows[i] + size_ + c) * Floats{}; },
          [&](int64_t c, int64_t m) VLLM_LAMBDA {
            sum = sum + load_first(rows[i] + size_ + c, m) * Floats{};
          });
    }
    return reduce_add(sum) == 0.0f;
  }

  Status run_tile(int64_t tile, RowStates& states) {
    int64_t begin = 0, end = range_.rows;  // rows that see any key of the tile
    while (begin < end && keys_of(begin).end <= tile) ++begin;
    while (begin < end && keys_of(end - 1).begin >= tile + kTileKeys) --end;
    const KeyRange wanted{keys_of(begin).begin, keys_of(end - 1).end};
    const T* rows[kTileKeys];
    const Status status = find_keys(tile, wanted, rows);
    if (status != kOk) return status;
    const bool masked = keys_of(begin).end < tile + kTileKeys || keys_of(end - 1).begin > tile;
    const bool one_token = keys_of(begin).end == keys_of(end - 1).end;
    if (masked && !one_token && !values_finite(rows)) return run_tile_by_token(tile, begin, end, states);
    const T* next_rows[kTileKeys];
    const KeyRange to_come{wanted.begin, ends_[range_.rows - 1]};
    if (tile + kTileKeys >= to_come.end || find_keys(tile + kTileKeys, to_come, next_rows) != kOk) {
      for (int64_t i = 0; i < kTileKeys; ++i) next_rows[i] = zeros_;
    }
    pack(rows, next_rows);
    attend(tile, begin, end, states);
    return kOk;
  }

  // A value that is not finite must not reach rows it is masked for (0 * NaN is NaN): each
  // token on its own, the values it does not see replaced by zeros.
  Status run_tile_by_token(int64_t tile, int64_t begin, int64_t end, RowStates& states) {
    const T* rows[kTileKeys];
    for (int64_t r = begin, next; r < end; r = next) {
      const KeyRange wanted = keys_of(r);
      next = r + 1;
      while (next < end && keys_of(next).end == wanted.end) ++next;
      const Status status = find_keys(tile, wanted, rows);
      if (status != kOk) return status;
      pack(rows, rows);
      attend(tile, r, next, states);
    }
    return kOk;
  }

  // Rows [begin, end) meet the packed tile.
  void attend(int64_t tile, int64_t begin, int64_t end, RowStates& states) {
    block_product<Math, false>(queries_ + begin * step_stride_, step_stride_, 1, keys_, kTileKeys,
                               steps_, scores_ + begin * kTileKeys, kTileKeys, end - begin,
                               kTileKeys, nullptr);
    for (int64_t r = begin; r < end; ++r) raise_maximum(r, tile, states);
    rescale(begin, end, states);
    for (int64_t r = begin; r < end; ++r) weigh(r, states);
    block_product<Math, true>(probabilities_ + begin * kTileKeys, kTileKeys, 1, values_, padded_,
                              kTileKeys / Math::kPerCell, states.values + begin * padded_, padded_,
                              end - begin, padded_, rescale_ + begin);
  }

  // Masks row r's scores and finds its new maximum, in units of log2.
  void raise_maximum(int64_t r, int64_t tile, const RowStates& states) {
    float* scores = scores_ + r * kTileKeys;
    const KeyRange keys = keys_of(r);
    if (keys.begin > tile || keys.end < tile + kTileKeys) {
      const int low = int(keys.begin > tile ? keys.begin - tile : 0);
      const int high = int(keys.end < tile + kTileKeys ? keys.end - tile : kTileKeys);
      for (int i = 0; i < kTileKeys; i += kWidth) {
        const Ints lane = lane_numbers() + i;
        Floats v = load(scores + i);
        v = lane >= low ? v : splat(kNoMaximum);
        store(scores + i, lane < high ? v : splat(kNoMaximum));
      }
    }
    Floats most = load(scores);
    for (int i = kWidth; i < kTileKeys; i += kWidth) most = max(most, load(scores + i));
    const float found = reduce_max(most) * log2_scale_;
    next_maximum_[r] = states.maximum[r] > found ? states.maximum[r] : found;
  }

  // rescale_ = 2^(old maximum - new maximum); the new maximum becomes the rows'.
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

  // Row r's probabilities, and its sum.
  void weigh(int64_t r, RowStates& states) {
    const float* scores = scores_ + r * kTileKeys;
    const Floats factor = splat(log2_scale_);
    const Floats base = splat(-finite_maximum(states.maximum[r]));
    Floats sum = {};
    for (int i = 0; i < kTileKeys; i += kWidth) {
      const Floats t = fma(load(scores + i), factor, base);
      sum = sum + Math::store_probabilities(probabilities_ + r * kTileKeys, i, t);
    }
    float* sums = states.sums + r * kWidth;
    store(sums, fma(load(sums), splat(rescale_[r]), sum));
  }

  const AttentionArgs& args_;
  const RowRange range_;
  const int64_t group_, size_, padded_, steps_, step_stride_;
  const float log2_scale_;
  Cell *queries_, *keys_, *values_, *probabilities_;
  float *scores_, *rescale_, *next_maximum_;
  int64_t* ends_;
  T* zeros_;
};

}  // namespace VLLM_ISA
}  // namespace vllm
