#include "team.h"

#include <sched.h>

extern "C" void GOMP_parallel(void (*body)(void*), void* data, unsigned threads, unsigned flags)
    __attribute__((weak));

namespace vllm {
namespace {

// A thread's wait for another: busy at first, then it lets others have the core.
class Wait {
 public:
  void turn() {
    if (++turns_ > kBusyTurns) {
      sched_yield();
      return;
    }
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

 private:
  static constexpr int kBusyTurns = 2000;  // some 20 to 60 microseconds
  int turns_ = 0;
};

class Team {
 public:
  // By the leader.
  void run(Work work, void* data) {
    work_ = work;
    data_ = data;
    const uint64_t number = (__atomic_load_n(&state_, __ATOMIC_RELAXED) >> kNumberShift) + 1;
    __atomic_store_n(&state_, number << kNumberShift | kOpen, __ATOMIC_RELEASE);
    work(data);
    __atomic_and_fetch(&state_, ~kOpen, __ATOMIC_RELAXED);
    for (Wait wait; __atomic_load_n(&state_, __ATOMIC_ACQUIRE) & kHelpers;) wait.turn();
  }

  void end() { __atomic_store_n(&state_, kEnd, __ATOMIC_RELEASE); }

  // By the others, until the end: takes part in every work that is open when they see it.
  void help() {
    uint64_t seen = 0;
    for (Wait wait;;) {
      uint64_t state = __atomic_load_n(&state_, __ATOMIC_ACQUIRE);
      if (state == kEnd) return;
      const bool is_new = (state & kOpen) != 0 && state >> kNumberShift != seen;
      if (is_new && __atomic_compare_exchange_n(&state_, &state, state + 1, false,
                                                __ATOMIC_ACQUIRE, __ATOMIC_RELAXED)) {
        seen = state >> kNumberShift;
        work_(data_);
        __atomic_sub_fetch(&state_, 1, __ATOMIC_RELEASE);
        wait = Wait();
      } else {
        wait.turn();
      }
    }
  }

 private:
  // The number of the work, whether it is open, and how many helpers are at it.
  static constexpr int kNumberShift = 32;
  static constexpr uint64_t kOpen = uint64_t(1) << 31, kHelpers = kOpen - 1, kEnd = kHelpers;

  alignas(64) uint64_t state_ = 0;
  alignas(64) Work work_ = nullptr;  // written while no helper is in
  void* data_ = nullptr;
};

thread_local Team* led = nullptr;  // by this thread

struct Region {
  Team team;
  Work lead;
  void* data;
  Team** leader;  // the leader's `led`

  static void enter(void* data) {
    auto* region = static_cast<Region*>(data);
    if (region->leader != &led) return region->team.help();
    led = &region->team;
    region->lead(region->data);
    led = nullptr;
    region->team.end();
  }
};

}  // namespace

int has_threads() { return GOMP_parallel != nullptr; }

void run_together(Work work, void* data, int64_t threads) {
  if (threads <= 1 || GOMP_parallel == nullptr) {
    work(data);
  } else if (led != nullptr) {
    led->run(work, data);
  } else {
    // The team always has its full size: libgomp ends and starts threads when it changes.
    GOMP_parallel(work, data, unsigned(threads), 0);
  }
}

void with_team(Work lead, void* data, int64_t threads) {
  if (threads <= 1 || GOMP_parallel == nullptr || led != nullptr) return lead(data);
  Region region{{}, lead, data, &led};
  GOMP_parallel(&Region::enter, &region, unsigned(threads), 0);
}

}  // namespace vllm
