// Dividing work among threads, and scratch memory.
#pragma once

#include <cstdint>
#include <cstdlib>

#include "team.h"

namespace vllm {

// Work units (about one vector operation each, so some 20 microseconds) below which a second
// thread costs more than it gains.
constexpr int64_t kSerialWork = 32768;


template <class Body>
struct ParallelTask {
  const Body& body;
  int64_t count;
  int64_t next;

  static void run(void* data) {
    auto* task = static_cast<ParallelTask*>(data);
    for (;;) {
      int64_t index = __atomic_fetch_add(&task->next, 1, __ATOMIC_RELAXED);
      if (index >= task->count) return;
      task->body(index);
    }
  }
};

// body(i) for i in [0, count), handed out in order to `threads` threads.
template <class Body>
void parallel_for(int64_t threads, int64_t count, const Body& body) {
  ParallelTask<Body> task{body, count, 0};
  run_together(&ParallelTask<Body>::run, &task, count > 1 ? threads : 1);
}

template <class Body>
struct RunsTask {
  static constexpr int64_t kMaxRuns = 64;
  struct alignas(64) Run {
    uint64_t left;  // first << 32 | end
  };

  const Body& body;
  int64_t runs;
  int64_t next;
  Run run[kMaxRuns];

  // An index of the run that has not been taken yet, or -1.
  static int64_t take(Run& run, bool last) {
    uint64_t left = __atomic_load_n(&run.left, __ATOMIC_RELAXED);
    for (;;) {
      const uint64_t first = left >> 32, end = left & UINT32_MAX;
      if (first >= end) return -1;
      const uint64_t rest = last ? left - 1 : left + (uint64_t(1) << 32);
      if (__atomic_compare_exchange_n(&run.left, &left, rest, false, __ATOMIC_RELAXED,
                                      __ATOMIC_RELAXED)) {
        return int64_t(last ? end - 1 : first);
      }
    }
  }

  static void work(void* data) {
    auto* task = static_cast<RunsTask*>(data);
    const int64_t mine = __atomic_fetch_add(&task->next, 1, __ATOMIC_RELAXED);
    for (int64_t r = 0; r < task->runs; ++r) {
      Run& run = task->run[(mine + r) % task->runs];
      for (int64_t i; (i = take(run, r > 0)) >= 0;) task->body(i);
    }
  }
};

// body(i) for i in [0, count), count < 2^32. Every thread walks over neighbours, so that it
// continues to read where it stopped. When its run is done it takes from the ends of other runs.
template <class Body>
void parallel_runs(int64_t threads, int64_t count, const Body& body) {
  using Task = RunsTask<Body>;
  if (count <= 1) threads = 1;
  Task task{body, threads < Task::kMaxRuns ? threads : Task::kMaxRuns, 0, {}};
  for (int64_t r = 0; r < task.runs; ++r) {
    task.run[r].left = uint64_t(count * r / task.runs) << 32 | uint64_t(count * (r + 1) / task.runs);
  }
  run_together(&Task::work, &task, threads);
}

// body(begin, end) over a partition of [0, count); `work` is the work of one element.
template <class Body>
void parallel_ranges(int64_t threads, int64_t count, int64_t work, const Body& body) {
  int64_t pieces = count * work / kSerialWork + 1;
  if (pieces > 4 * threads) pieces = 4 * threads;
  if (pieces > count) pieces = count;
  if (threads <= 1 || pieces <= 1) {
    if (count > 0) body(int64_t(0), count);
    return;
  }
  parallel_for(threads, pieces, [&](int64_t i) {
    body(count * i / pieces, count * (i + 1) / pieces);
  });
}

// The first error that any thread met.
struct SharedStatus {
  int value = 0;
  void fail(int status) { __atomic_store_n(&value, status, __ATOMIC_RELAXED); }
  bool failed() const { return __atomic_load_n(&value, __ATOMIC_RELAXED) != 0; }
};

// Memory that grows and is kept, one object per thread and use.
class Scratch {
 public:
  ~Scratch() { std::free(data_); }

  // At least `bytes` bytes, aligned to 64; null when there is no memory.
  void* reserve(int64_t bytes) {
    if (bytes > size_) {
      std::free(data_);
      size_ = (bytes + 4095) / 4096 * 4096;
      data_ = std::aligned_alloc(64, size_t(size_));
      if (data_ == nullptr) size_ = 0;
    }
    return data_;
  }

 private:
  void* data_ = nullptr;
  int64_t size_ = 0;
};


}  // namespace vllm
