// Paged causal attention: cutting the batch into units of work.
//
// An item is some rows of one request and kv head. A thread takes an item and walks its
// partitions of keys, or, when there are too few items for the threads, single
// partitions are handed out and merged afterwards in the same order.
#include "attention_rows.h"

namespace vllm {
namespace VLLM_ISA {
namespace {

// Most memory that handing out single partitions may take.
constexpr int64_t kMaxSplitBytes = int64_t(64) << 20;

// Items a thread, at least, before items get fewer rows than kMaxRows; fewest rows then.
constexpr int64_t kItemsPerThread = 4;
constexpr int64_t kMinRows = 2 * kBlockRows;

struct Item {
  RowRange range;
  int64_t first_partition, partitions;
  int64_t first_state;  // partitions before this item's, over all items
};

Scratch& item_scratch() {
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

int64_t count_items(const AttentionArgs& args, int64_t item_rows) {
  int64_t count = 0;
  for (int64_t r = 0; r < args.requests; ++r) {
    count += (rows_of_request(args, r) + item_rows - 1) / item_rows * args.cache.kv_heads;
  }
  return count;
}

template <class Math>
void fill_item(const AttentionArgs& args, Item* item) {
  const KeyRange keys = AttentionRows<Math>(args, item->range).all_keys();
  item->first_partition = keys.begin / kPartitionKeys;
  item->partitions = (keys.end - 1) / kPartitionKeys + 1 - item->first_partition;
}

// The longest items of a request first, so that threads end at about the same time.
template <class Math>
void make_items(const AttentionArgs& args, int64_t item_rows, Item* item) {
  for (int64_t request = 0; request < args.requests; ++request) {
    const int64_t rows = rows_of_request(args, request);
    const int64_t tokens = args.query_start[request + 1] - args.query_start[request];
    for (int64_t end = rows; end > 0; end -= item_rows) {
      const int64_t first = end > item_rows ? end - item_rows : 0;
      for (int64_t head = 0; head < args.cache.kv_heads; ++head) {
        item->range = {request, head, first, end - first, tokens,
                       args.seq_lens[request] - tokens};
        fill_item<Math>(args, item++);
      }
    }
  }
}

// One thread, all partitions of an item.
template <class Math>
Status run_item(const AttentionArgs& args, const Item& item) {
  AttentionRows<Math> rows(args, item.range);
  const int64_t floats = RowStates::floats(item.range.rows, rows.padded());
  auto* memory = static_cast<float*>(state_scratch().reserve(2 * floats * 4));
  if (memory == nullptr || !rows.prepare()) return kOutOfMemory;
  RowStates total(memory, item.range.rows), part(memory + floats, item.range.rows);
  for (int64_t p = 0; p < item.partitions; ++p) {
    RowStates& states = p == 0 ? total : part;  // merging the first one with nothing: itself
    const Status status = rows.run_partition(item.first_partition + p, states);
    if (status != kOk) return status;
    if (p > 0) merge(total, part, item.range.rows, rows.padded());
  }
  rows.finish(total);
  return kOk;
}

// Partitions on different threads, then the merge. memory: `floats` for each partition,
// then for each item.
template <class Math>
Status run_split(const AttentionArgs& args, const Item* items, int64_t count, int64_t partitions,
                 float* memory, int64_t floats) {
  SharedStatus shared;
  parallel_for(args.threads, partitions, [&](int64_t i) {
    const Item* item = items;
    while (item + 1 < items + count && (item + 1)->first_state <= i) ++item;
    AttentionRows<Math> rows(args, item->range);
    if (!rows.prepare()) return shared.fail(kOutOfMemory);
    RowStates part(memory + i * floats, item->range.rows);
    const int64_t partition = item->first_partition + i - item->first_state;
    const Status status = rows.run_partition(partition, part);
    if (status != kOk) shared.fail(status);
  });
  if (shared.failed()) return Status(shared.value);
  parallel_for(args.threads, count, [&](int64_t i) {
    const Item& item = items[i];
    const AttentionRows<Math> rows(args, item.range);
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
  const int64_t item_rows = choose_item_rows(args);
  const int64_t count = count_items(args, item_rows);
  if (count == 0) return kOk;
  auto* items = static_cast<Item*>(item_scratch().reserve(count * int64_t(sizeof(Item))));
  if (items == nullptr) return kOutOfMemory;
  make_items<Math>(args, item_rows, items);
  int64_t partitions = 0, most_rows = 0;
  for (int64_t i = 0; i < count; ++i) {
    items[i].first_state = partitions;
    partitions += items[i].partitions;
    if (items[i].range.rows > most_rows) most_rows = items[i].range.rows;
  }
  const int64_t floats = RowStates::floats(most_rows, round_up(args.cache.head_size, kWidth));
  const int64_t split_bytes = (partitions + count) * floats * int64_t(sizeof(float));
  if (args.threads > 1 && count < 2 * args.threads && partitions > count &&
      split_bytes <= kMaxSplitBytes) {
    auto* memory = static_cast<float*>(state_scratch().reserve(split_bytes));
    if (memory == nullptr) return kOutOfMemory;
    return run_split<Math>(args, items, count, partitions, memory, floats);
  }
  SharedStatus shared;
  parallel_for(args.threads, count, [&](int64_t i) {
    const Status status = run_item<Math>(args, items[i]);
    if (status != kOk) shared.fail(status);
  });
  return Status(shared.value);
}

}  // namespace

Status paged_attention(const AttentionArgs& args) {
  if (args.sinks != nullptr && !is_dtype(args.sinks_dtype)) return kBadDtype;
  return with_math(args.dtype, [&](auto math) { return run<decltype(math)>(args); });
}

}  // namespace VLLM_ISA
}  // namespace vllm
