// Threads that work together.
//
// A step is hundreds of pieces of work, a few microseconds apart. The team keeps its helpers
// between them: they look for the next piece for some microseconds, then yield the core, then
// sleep. The leader of a piece waits only for helpers that are working on it, so a helper whose
// core does something else costs no more than that core.
#pragma once

#include <cstdint>

namespace vllm {

// Does shares of some work until none is left; every thread of the team calls it.
using Work = void (*)(void* data);

// Calls work(data) on this thread and on others, at most `threads` in all. Returns when all shares
// that were begun are done. If several threads call it at once, one leads the team, and the others
// work alone.
void run_together(Work work, void* data, int64_t threads);

}  // namespace vllm
