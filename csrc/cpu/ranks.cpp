// Meetings of the processes of one machine, in memory that they share.
#include <algorithm>
#include <chrono>
#include <thread>

#include "operation.h"

namespace vllm {
namespace {

constexpr int64_t kAllThere = 0, kLeft = 1, kTimedOut = 2;
constexpr int kSpins = 4096;       // some ten microseconds, before the core is offered to others
constexpr int kReadsOfClock = 64;  // a read of the clock after as many offers

inline void rest() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void meet_ranks(const Tensor& flags, int64_t rank, int64_t turn, int64_t microseconds,
                const Tensor& state) {
  int64_t* const cells = data_of<int64_t>(flags);
  const int64_t ranks = flags.size(0) - 1, stride = flags.size(1);
  const auto read = [&](int64_t row) {
    return __atomic_load_n(cells + row * stride, __ATOMIC_ACQUIRE);
  };
  __atomic_store_n(cells + rank * stride, turn, __ATOMIC_RELEASE);
  const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(microseconds);
  int64_t next = 0, result = kAllThere;
  for (int tries = 0; next < ranks;) {
    if (read(next) >= turn) {
      ++next;
    } else if (read(ranks) >= turn) {
      result = kLeft;
      break;
    } else if (++tries < kSpins) {
      rest();
    } else {
      std::this_thread::yield();
      if (tries % kReadsOfClock == 0 && std::chrono::steady_clock::now() >= end) {
        result = kTimedOut;
        break;
      }
    }
  }
  *data_of<int64_t>(state) = result;
}

}  // namespace

VLLM_OPERATION(meet_ranks)

}  // namespace vllm
