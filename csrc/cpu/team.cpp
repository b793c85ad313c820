#include "team.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <atomic>
#include <chrono>

namespace vllm {
namespace {

using Clock = std::chrono::steady_clock;

// A thread's wait for another one: first it spins, then it yields the core.
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

  // Whether the wait has lasted longer than the time between two pieces of work of one step, so
  // that it no longer pays to spin. The clock is read seldom, because it costs more than a turn.
  bool is_long() {
    if (++asked_ % kTurnsAClock != 0) return false;
    const Clock::time_point now = Clock::now();
    if (asked_ == kTurnsAClock) start_ = now;
    return now - start_ > kLongest;
  }

 private:
  static constexpr int kBusyTurns = 1000;  // some 10 to 50 microseconds
  static constexpr int64_t kTurnsAClock = 64;
  static constexpr std::chrono::microseconds kLongest{300};
  int turns_ = 0;
  int64_t asked_ = 0;
  Clock::time_point start_;
};

class Team {
 public:
  void run(Work work, void* data, int64_t helpers) {
    if (is_led_.test_and_set(std::memory_order_acquire)) return work(data);
    start_helpers(helpers);
    work_ = work;
    data_ = data;
    most_.store(uint64_t(helpers), std::memory_order_relaxed);
    const uint64_t number = (state_.load(std::memory_order_relaxed) >> kNumberShift) + 1;
    state_.store(number << kNumberShift | kOpen, std::memory_order_seq_cst);
    if (sleeping_.load(std::memory_order_seq_cst) > 0) {
      alarm_.fetch_add(1, std::memory_order_release);
      alarm_.notify_all();
    }
    work(data);
    state_.fetch_and(~kOpen, std::memory_order_relaxed);
    for (Wait wait; state_.load(std::memory_order_acquire) & kHelpers;) wait.turn();
    is_led_.clear(std::memory_order_release);
  }

  // For a forked process, which has the memory but none of the threads.
  void forget_helpers() {
    started_ = 0;
    sleeping_.store(0);
    state_.store(state_.load() & ~(kOpen | kHelpers));
    is_led_.clear();
  }

 private:
  void start_helpers(int64_t count) {
    if (started_ >= count) return;
    sigset_t all, before;  // other threads handle the signals
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const auto help = [](void* team) -> void* {
      static_cast<Team*>(team)->help();
      return nullptr;
    };
    pthread_t thread;
    for (; started_ < count; ++started_) {
      if (pthread_create(&thread, nullptr, help, this) != 0) break;  // fewer helpers suffice
      pthread_detach(thread);
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  // Takes part in every open piece of work that it sees, forever.
  void help() {
    uint64_t seen = 0;
    for (Wait wait;;) {
      uint64_t state = state_.load(std::memory_order_acquire);
      if (is_new(state, seen) && (state & kHelpers) < most_.load(std::memory_order_relaxed) &&
          state_.compare_exchange_weak(state, state + 1, std::memory_order_acquire)) {
        seen = state >> kNumberShift;
        work_(data_);
        state_.fetch_sub(1, std::memory_order_release);
        wait = Wait();
      } else if (wait.is_long()) {
        sleep(seen);
        wait = Wait();
      } else {
        wait.turn();
      }
    }
  }

  static bool is_new(uint64_t state, uint64_t seen) {
    return (state & kOpen) != 0 && state >> kNumberShift != seen;
  }

  void sleep(uint64_t seen) {
    const uint32_t heard = alarm_.load(std::memory_order_acquire);
    sleeping_.fetch_add(1, std::memory_order_seq_cst);
    // Work that was opened before the line above has raised no alarm.
    if (!is_new(state_.load(std::memory_order_seq_cst), seen)) alarm_.wait(heard);
    sleeping_.fetch_sub(1, std::memory_order_relaxed);
  }

  // The number of the work, whether it is open, and the number of helpers in it.
  static constexpr int kNumberShift = 32;
  static constexpr uint64_t kOpen = uint64_t(1) << 31, kHelpers = kOpen - 1;

  alignas(64) std::atomic<uint64_t> state_{0};
  alignas(64) Work work_ = nullptr;  // written while no helper works, like the next two
  void* data_ = nullptr;
  std::atomic<uint64_t> most_{0};
  std::atomic_flag is_led_;
  int64_t started_ = 0;
  alignas(64) std::atomic<uint32_t> alarm_{0};
  std::atomic<int> sleeping_{0};
};

// Never destroyed, because its helpers may still read it when the process ends.
Team& team() {
  static Team* const team = [] {
    auto* made = new Team;
    pthread_atfork(nullptr, nullptr, [] { vllm::team().forget_helpers(); });
    return made;
  }();
  return *team;
}

}  // namespace

void run_together(Work work, void* data, int64_t threads) {
  if (threads <= 1) return work(data);
  team().run(work, data, threads - 1);
}

}  // namespace vllm
