// Paged causal attention: cutting the batch into units of work.
//
// An item is some rows of one request and kv head. A thread takes an item and walks its
// partitions of keys. If there are too few items for the threads, single partitions are handed
// out and merged afterwards in the same order. Keys that several items read are packed
// beforehand, once for all of them.
#include "attention_rows.h"
#include "subnormals.h"

namespace vllm {
namespace {

// Most memory that handing out single partitions may take.
constexpr int64_t kMaxSplitBytes = int64_t(64) << 20;

// Most memory that keys packed beforehand may take; items pack the keys after them themselves.
constexpr int64_t kMaxSharedBytes = int64_t(64) << 20;

// Rows of a request and kv head from which keys are shared.
constexpr int64_t kSharingRows = 4096;

// With fewer items per thread than this, items get fewer rows than kMaxRows, but at least kMinRows.
constexpr int64_t kItemsPerThread = 4;
constexpr int64_t kMinRows = 2 * kBlockRows;

struct Item {
  RowRange range;
  int64_t first_partition, partitions;
  int64_t first_state;  // number of partitions of all earlier items
  SharedTiles shared;
};

Scratch& item_scratch() {
  static thread_local Scratch scratch;
  return scratch;
}
Scratch& tile_scratch() {
  static thread_local Scratch scratch;
  return scratch;
}
Scratch& state_scratch() {
  static thread_local Scratch scratch;
  return scratch;
}

int64_t rows_of_request(const AttentionArgs& args, int64_t request) {
  const int64_t group = args.heads / args.cache.kv_heads;
  return (args.query_start[request + 1] - args.query_start[request]) * group;
}

// Most rows of an item.
int64_t choose_item_rows(const AttentionArgs& args) {
  if (args.threads <= 1) return kMaxRows;
  int64_t rows = 0;
  for (int64_t r = 0; r < args.requests; ++r) rows += rows_of_request(args, r);
  rows = rows * args.cache.kv_heads / (kItemsPerThread * args.threads) / kBlockRows * kBlockRows;
  return rows < kMinRows ? kMinRows : rows < kMaxRows ? rows : kMaxRows;
}

// All rows of a request and kv head.
RowRange whole_range(const AttentionArgs& args, int64_t request, int64_t head) {
  const int64_t tokens = args.query_start[request + 1] - args.query_start[request];
  return {request, head, 0, rows_of_request(args, request), tokens,
          args.seq_lens[request] - tokens};
}

// The tiles that the items of a request share, if it has enough rows.
template <class Math>
SharedTiles shared_tiles(const AttentionArgs& args, int64_t request) {
  SharedTiles shared;
  const RowRange all = whole_range(args, request, 0);
  if (all.rows < kSharingRows) return shared;
  shared.keys = AttentionRows<Math>(args, all, shared).all_keys();
  shared.count = (shared.keys.end - 1) / kTileKeys + 1 - shared.first();
  return shared;
}

struct Sizes {
  int64_t items = 0, tiles = 0;
};

template <class Math>
Sizes measure(const AttentionArgs& args, int64_t item_rows) {
  Sizes sizes;
  for (int64_t r = 0; r < args.requests; ++r) {
    sizes.items += (rows_of_request(args, r) + item_rows - 1) / item_rows * args.cache.kv_heads;
    sizes.tiles += shared_tiles<Math>(args, r).count * args.cache.kv_heads;
  }
  return sizes;
}

// Makes the longest items of a request first, so that threads end at about the same time. Their
// shared tiles go to `memory`, as long as there are `tiles` left.
template <class Math>
void make_items(const AttentionArgs& args, int64_t item_rows, Item* item, Cell* memory,
                int64_t tiles) {
  const int64_t heads = args.cache.kv_heads, cells = KeyTiles<Math>::cells(args);
  for (int64_t request = 0; request < args.requests; ++request) {
    SharedTiles shared = shared_tiles<Math>(args, request);
    if (shared.count > tiles / heads) shared.count = tiles / heads;
    for (int64_t end = rows_of_request(args, request); end > 0; end -= item_rows) {
      for (int64_t head = 0; head < heads; ++head, ++item) {
        item->range = whole_range(args, request, head);
        item->range.first = end > item_rows ? end - item_rows : 0;
        item->range.rows = end - item->range.first;
        item->shared = shared;
        item->shared.data = memory + head * shared.count * cells;
        const KeyRange keys = AttentionRows<Math>(args, item->range, shared).all_keys();
        item->first_partition = keys.begin / kPartitionKeys;
        item->partitions = (keys.end - 1) / kPartitionKeys + 1 - item->first_partition;
      }
    }
    memory += heads * shared.count * cells;
    tiles -= heads * shared.count;
  }
}

// Packs the tiles that the items of a request share. items: its first ones, one per kv head.
template <class Math>
Status pack_tiles(const AttentionArgs& args, const Item* items,
                  const typename Math::Element* zeros) {
  using Tiles = KeyTiles<Math>;
  const SharedTiles& shared = items->shared;
  SharedStatus status;
  parallel_for(args.threads, args.cache.kv_heads * shared.count, [&](int64_t i) {
    const int64_t head = i / shared.count, number = i % shared.count;
    const int64_t tile = (shared.first() + number) * kTileKeys;
    const Tiles tiles(args, items->range.request, head, zeros);
    typename Tiles::Rows rows;
    const Status found = tiles.find(tile, shared.keys, &rows);
    if (found != kOk) return status.fail(found);
    tiles.pack(rows, Tiles::part_of(tile, shared.keys),
               items[head].shared.data + number * Tiles::cells(args));
  });
  return Status(status.value);
}

// Runs all partitions of an item on one thread.
template <class Math>
Status run_item(const AttentionArgs& args, const Item& item, const Item* next) {
  AttentionRows<Math> rows(args, item.range, item.shared, next == nullptr ? nullptr : &next->range);
  const int64_t floats = RowStates::floats(item.range.rows, rows.padded());
  auto* memory = static_cast<float*>(state_scratch().reserve(2 * floats * 4));
  if (memory == nullptr || !rows.prepare()) return kOutOfMemory;
  RowStates total(memory, item.range.rows), part(memory + floats, item.range.rows);
  for (int64_t p = 0; p < item.partitions; ++p) {
    RowStates& states = p == 0 ? total : part;  // the first partition needs no merge
    const Status status = rows.run_partition(item.first_partition + p, states);
    if (status != kOk) return status;
    if (p > 0) merge(total, part, item.range.rows, rows.padded());
  }
  rows.finish(total);
  return kOk;
}

// Runs partitions on different threads, then merges. memory: `floats` for each partition,
// then for each item.
template <class Math>
Status run_split(const AttentionArgs& args, const Item* items, int64_t count, int64_t partitions,
                 float* memory, int64_t floats) {
  SharedStatus shared;
  parallel_for(args.threads, partitions, [&](int64_t i) {
    const WithoutSubnormals zeros;
    const Item* item = items;
    while (item + 1 < items + count && (item + 1)->first_state <= i) ++item;
    AttentionRows<Math> rows(args, item->range, item->shared);
    if (!rows.prepare()) return shared.fail(kOutOfMemory);
    RowStates part(memory + i * floats, item->range.rows);
    const int64_t partition = item->first_partition + i - item->first_state;
    const Status status = rows.run_partition(partition, part);
    if (status != kOk) shared.fail(status);
  });
  if (shared.failed()) return Status(shared.value);
  parallel_for(args.threads, count, [&](int64_t i) {
    const WithoutSubnormals zeros;
    const Item& item = items[i];
    const AttentionRows<Math> rows(args, item.range, item.shared);
    RowStates total(memory + (partitions + i) * floats, item.range.rows);
    total.clear(item.range.rows, rows.padded());
    for (int64_t p = 0; p < item.partitions; ++p) {
      const RowStates part(memory + (item.first_state + p) * floats, item.range.rows);
      merge(total, part, item.range.rows, rows.padded());
    }
    rows.finish(total);
  });
  return kOk;
}

template <class Math>
Status run(const AttentionArgs& args) {
  using T = typename Math::Element;
  const int64_t item_rows = choose_item_rows(args);
  const Sizes sizes = measure<Math>(args, item_rows);
  const int64_t count = sizes.items;
  if (count == 0) return kOk;
  auto* items = static_cast<Item*>(item_scratch().reserve(count * int64_t(sizeof(Item))));
  if (items == nullptr) return kOutOfMemory;
  const int64_t tile_bytes = KeyTiles<Math>::cells(args) * int64_t(sizeof(Cell));
  const int64_t most = kMaxSharedBytes / tile_bytes, tiles = sizes.tiles < most ? sizes.tiles : most;
  const int64_t zero_bytes = args.content() * int64_t(sizeof(T));
  auto* memory = static_cast<Cell*>(tile_scratch().reserve(tiles * tile_bytes + zero_bytes));
  if (memory == nullptr) return kOutOfMemory;
  T* zeros = reinterpret_cast<T*>(memory + tiles * (tile_bytes / int64_t(sizeof(Cell))));
  std::memset(zeros, 0, size_t(zero_bytes));
  make_items<Math>(args, item_rows, items, memory, tiles);
  for (int64_t i = 0; i < count; ++i) {
    const bool is_first = i == 0 || items[i].range.request != items[i - 1].range.request;
    if (!is_first || items[i].shared.count == 0) continue;
    const Status status = pack_tiles<Math>(args, items + i, zeros);
    if (status != kOk) return status;
  }
  int64_t partitions = 0, most_rows = 0;
  for (int64_t i = 0; i < count; ++i) {
    items[i].first_state = partitions;
    partitions += items[i].partitions;
    if (items[i].range.rows > most_rows) most_rows = items[i].range.rows;
  }
  const int64_t floats = RowStates::floats(most_rows, round_up(args.value_size, kWidth));
  const int64_t split_bytes = (partitions + count) * floats * int64_t(sizeof(float));
  if (args.threads > 1 && count < 2 * args.threads && partitions > count &&
      split_bytes <= kMaxSplitBytes) {
    auto* memory = static_cast<float*>(state_scratch().reserve(split_bytes));
    if (memory == nullptr) return kOutOfMemory;
    return run_split<Math>(args, items, count, partitions, memory, floats);
  }
  SharedStatus shared;
  parallel_for(args.threads, count, [&](int64_t i) {
    const WithoutSubnormals zeros;
    const int64_t next = i + args.threads;
    const Status status =
        run_item<Math>(args, items[i], next < count ? &items[next] : nullptr);
    if (status != kOk) shared.fail(status);
  });
  return Status(shared.value);
}

void paged_attention(const Tensor& query, const Tensor& kv_cache, const Tensor& block_table,
                     const Tensor& query_start, const Tensor& seq_lens, double scale,
                     int64_t value_offset, std::optional<int64_t> sliding_window,
                     std::optional<int64_t> chunk_size, std::optional<double> soft_cap,
                     const MaybeTensor& sinks, const Tensor& out) {
  const AttentionArgs args{dtype_of(query),
                           num_threads(),
                           query.data_ptr(),
                           query.stride(0),
                           query.stride(1),
                           query.size(1),
                           PagedCache(kv_cache),
                           query.size(2),
                           out.size(2),
                           value_offset,
                           data_of<const int32_t>(block_table),
                           block_table.stride(0),
                           block_table.size(1),
                           data_of<const int32_t>(query_start),
                           data_of<const int32_t>(seq_lens),
                           seq_lens.size(0),
                           sliding_window.value_or(0),
                           chunk_size.value_or(0),
                           data_of(sinks),
                           sinks ? dtype_of(*sinks) : int64_t(kFloat32),
                           out.data_ptr(),
                           scale,
                           soft_cap.value_or(0.0)};
  check(with_tile_math(args.dtype, [&](auto math) { return run<decltype(math)>(args); }),
        "paged_attention");
}

void paged_attention_part(const Tensor& query, const Tensor& kv_cache, const Tensor& block_table,
                          const Tensor& query_start, const Tensor& seq_lens, double scale,
                          int64_t value_offset, std::optional<double> soft_cap, int64_t ranks,
                          int64_t rank, int64_t interleave, const Tensor& out) {
  AttentionArgs args{dtype_of(query),
                     num_threads(),
                     query.data_ptr(),
                     query.stride(0),
                     query.stride(1),
                     query.size(1),
                     PagedCache(kv_cache),
                     query.size(2),
                     out.size(2) - 2,
                     value_offset,
                     data_of<const int32_t>(block_table),
                     block_table.stride(0),
                     block_table.size(1),
                     data_of<const int32_t>(query_start),
                     data_of<const int32_t>(seq_lens),
                     seq_lens.size(0),
                     0,
                     0,
                     nullptr,
                     int64_t(kFloat32),
                     nullptr,
                     scale,
                     soft_cap.value_or(0.0)};
  args.ranks = ranks, args.rank = rank, args.interleave = interleave;
  args.part = data_of<float>(out);
  check(with_tile_math(args.dtype, [&](auto math) { return run<decltype(math)>(args); }),
        "paged_attention_part");
}

}  // namespace

VLLM_OPERATION(paged_attention)
VLLM_OPERATION(paged_attention_part)

}  // namespace vllm
