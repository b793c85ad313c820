// Packing keys and values of one request and kv head from the pool's blocks into tiles.
//
// Keys come in tiles of kTileKeys, cut at absolute positions. A packed tile has the keys as
// [panels of kPanel keys, steps, kPanel], then the values as [panels of kPanel elements,
// kTileKeys / kPerCell, kPanel], in cells, so that a product reads both in order.
#pragma once

#include <algorithm>

#include "tile_blocks.h"
#include "paged_cache.h"

namespace vllm {

struct AttentionArgs {
  int64_t dtype, threads;
  const void* query;
  int64_t query_token_stride, query_head_stride, heads;
  PagedCache cache;
  int64_t key_size, value_size;  // elements; a key begins at the start of a token's content
  int64_t value_offset;          // the element at which the value begins
  const int32_t* block_table;
  int64_t table_stride, max_blocks;
  const int32_t* query_start;
  const int32_t* seq_lens;
  int64_t requests;
  int64_t sliding_window;  // 0: none
  int64_t chunk_size;      // 0: none; only one of the two
  const void* sinks;       // [heads] scores without values; may be null
  int64_t sinks_dtype;
  void* out;  // [tokens, heads, value_size] dense
  double scale;
  double soft_cap;  // 0: none
  // Runs of `interleave` tokens lie on the ranks in turn; the cache has those of `rank`.
  int64_t ranks = 1, rank = 0, interleave = 1;
  float* part = nullptr;  // [tokens, heads, value_size + 2] dense: written instead of out

  // Number of keys in the cache among those of the first `tokens` tokens.
  int64_t keys_of(int64_t tokens) const {
    if (ranks == 1) return tokens;
    const int64_t turn = ranks * interleave, rest = tokens % turn - rank * interleave;
    return tokens / turn * interleave + (rest < 0 ? 0 : rest < interleave ? rest : interleave);
  }

  // Elements that replace a key and its value when neither is needed.
  int64_t content() const {
    const int64_t end = value_offset + value_size;
    return end > key_size ? end : key_size;
  }
};

constexpr int64_t kTileKeys = 256;
constexpr int64_t kAheadKeys = 64;  // distance from the packing to the prefetched keys

struct KeyRange {
  int64_t begin, end;
  bool empty() const { return begin >= end; }
};

template <class Math>
class KeyTiles {
 public:
  using T = typename Math::Element;

  static constexpr int64_t kGrain = kWidth * Math::kPerCell;  // keys of a vector of cells
  static constexpr int64_t kPanel = kTileVectors * kWidth;    // columns that are packed together
  static constexpr int64_t kValueSteps = kTileKeys / Math::kPerCell;

  // Addresses of the keys of a tile, and of those ahead.
  struct Rows {
    const T* key[kTileKeys + kAheadKeys];
  };

  // zeros: args.content() elements for keys that are not needed; null: nothing is packed.
  KeyTiles(const AttentionArgs& args, int64_t request, int64_t kv_head, const T* zeros)
      : cache_(args.cache),
        key_size_(args.key_size),
        value_size_(args.value_size),
        value_offset_(args.value_offset),
        table_(args.block_table + request * args.table_stride),
        max_blocks_(args.max_blocks),
        head_(kv_head),
        zeros_(zeros) {}

  // Steps of a key's product, and the stride between the rows of a query's cells.
  static int64_t steps(const AttentionArgs& args) {
    return (args.key_size + Math::kPerCell - 1) / Math::kPerCell;
  }
  static int64_t step_stride(const AttentionArgs& args) { return round_up(steps(args), kWidth); }
  static int64_t key_cells(const AttentionArgs& args) { return kTileKeys * step_stride(args); }
  static int64_t cells(const AttentionArgs& args) {
    return key_cells(args) + kValueSteps * round_up(args.value_size, kPanel);
  }

  // The keys of a tile, numbered from its first one, that are in [wanted.begin, wanted.end).
  static KeyRange part_of(int64_t tile, KeyRange wanted) {
    const int64_t begin = wanted.begin > tile ? wanted.begin - tile : 0;
    const int64_t end = wanted.end - tile;
    return {begin / kGrain * kGrain, end < kTileKeys ? end : kTileKeys};
  }

  // Finds the addresses of the keys of a tile and of those ahead; keys outside `wanted` get the
  // zeros. Returns kBadIndex for a block that does not exist.
  Status find(int64_t tile, KeyRange wanted, Rows* rows) const {
    const int64_t end = tile + kTileKeys + kAheadKeys;
    const int64_t first = wanted.begin > tile ? wanted.begin : tile;
    const int64_t last = wanted.end < end ? wanted.end : end;
    std::fill(rows->key, rows->key + (first - tile), zeros_);
    std::fill(rows->key + (last - tile), rows->key + (end - tile), zeros_);
    return locate(first, last, rows->key + (first - tile));
  }

  // Makes the packing of a tile with `keys` keys prefetch the first of the `wanted` ones, as far
  // as their blocks exist. A block that does not exist is reported when it is read.
  void find_next(int64_t keys, KeyRange wanted, Rows* rows) const {
    const int64_t first = round_up(keys, kGrain), most = kTileKeys + kAheadKeys - first;
    const int64_t end = wanted.end - wanted.begin < most ? wanted.end : wanted.begin + most;
    locate(wanted.begin, end, rows->key + first);
  }

  // Packs a part of a tile, and meanwhile prefetches later keys.
  void pack(const Rows& rows, KeyRange part, Cell* tile) const {
    const int64_t size = key_size_;
    const int64_t steps = (size + Math::kPerCell - 1) / Math::kPerCell;
    const int64_t stride = round_up(steps, kWidth);
    // Keys and values take turns if that is a tenth faster (measured, one token per request). So
    // are functions that are not inlined.
    const int64_t most = Math::kPerCell > 1 && size > 64 ? kWidth : kTileKeys;
    for (int64_t first = part.begin, last; first < part.end; first = last) {
      last = first + most < part.end ? first + most : part.end;
      for (int64_t i = first; i < last; i += kWidth) {
        pack_keys(rows.key + i, steps, tile + i / kPanel * kPanel * stride + i % kPanel);
      }
      for (int64_t i = first; i < last; i += Math::kPerCell) {
        pack_values(rows.key + i, tile + kTileKeys * stride + i / Math::kPerCell * kPanel);
      }
    }
  }

  bool values_finite(const Rows& rows) const {
    Floats sums[4] = {};  // finite * 0 is 0, anything else NaN
    for (int64_t i = 0; i < kTileKeys; i += 4) {
      for_each_vector(
          value_size_,
          [&](int64_t c) VLLM_LAMBDA {
            for (int j = 0; j < 4; ++j) sums[j] += load(value(rows, i + j) + c) * Floats{};
          },
          [&](int64_t c, int64_t m) VLLM_LAMBDA {
            for (int j = 0; j < 4; ++j) {
              sums[j] += load_first(value(rows, i + j) + c, m) * Floats{};
            }
          });
    }
    return reduce_add(sums[0] + sums[1] + sums[2] + sums[3]) == 0.0f;
  }

 private:
  const T* value(const Rows& rows, int64_t i) const { return rows.key[i] + value_offset_; }

  // Writes the addresses of the keys [first, last), page by page.
  Status locate(int64_t first, int64_t last, const T** key) const {
    const int64_t block_tokens = cache_.pages * cache_.page_tokens;
    for (int64_t position = first; position < last;) {
      const int64_t index = position / block_tokens, offset = position % block_tokens;
      if (index >= max_blocks_) return kBadIndex;
      const int64_t block = table_[index];
      if (block < 0 || block >= cache_.blocks) return kBadIndex;
      const int64_t in_page = offset % cache_.page_tokens;
      const T* row = static_cast<const T*>(cache_.data) + block * cache_.block_stride +
                     offset / cache_.page_tokens * cache_.page_stride +
                     in_page * cache_.token_stride + head_ * cache_.head_stride;
      const int64_t left = cache_.page_tokens - in_page;
      const int64_t page_end = last - position < left ? last : position + left;
      for (; position < page_end; ++position, row += cache_.token_stride) *key++ = row;
    }
    return kOk;
  }

  __attribute__((noinline)) void pack_keys(const T* const* rows, int64_t steps,
                                           Cell* panel) const {
    for (int64_t s = 0; s < steps; s += kWidth) {
      Floats square[kWidth];
      for (int j = 0; j < kWidth; ++j) {
        square[j] = Math::row_cells(rows[j], s, key_size_);
        __builtin_prefetch(rows[j + kAheadKeys] + s * Math::kPerCell, 0, 2);
      }
      transpose(square);
      for (int j = 0; j < kWidth; ++j) store_cells(panel + (s + j) * kPanel, square[j]);
    }
  }

  __attribute__((noinline)) void pack_values(const T* const* rows, Cell* panel) const {
    constexpr int64_t kLine = 64 / int64_t(sizeof(T));  // elements of a cache line
    const int64_t size = value_size_;
    const T* values[Math::kPerCell];
    for (int j = 0; j < Math::kPerCell; ++j) {
      values[j] = rows[j] + value_offset_;
      for (int64_t c = 0; c < size; c += kLine) {
        __builtin_prefetch(rows[j + kAheadKeys] + value_offset_ + c, 0, 2);
      }
    }
    for (int64_t c = 0; c < size; c += kPanel, panel += kValueSteps * kPanel) {
      for (int64_t v = 0; v < kPanel && c + v < size; v += kWidth) {
        store_cells(panel + v, Math::column_cells(values, c + v, size));
      }
    }
  }

  const PagedCache cache_;
  const int64_t key_size_, value_size_, value_offset_;
  const int32_t* const table_;
  const int64_t max_blocks_, head_;
  const T* const zeros_;
};

// Tiles that several ranges of rows read, packed once. `keys` are all keys that rows of this
// request attend to; these are the first tiles that have any of them.
struct SharedTiles {
  Cell* data = nullptr;
  KeyRange keys{0, 0};
  int64_t count = 0;

  int64_t first() const { return keys.begin / kTileKeys; }

  // The packed tile at this position, or null; cells: number of cells of a tile.
  const Cell* tile(int64_t position, int64_t cells) const {
    const int64_t i = position / kTileKeys - first();
    return i >= 0 && i < count ? data + i * cells : nullptr;
  }
};

}  // namespace vllm
