// Threads that work together.
//
// A step is hundreds of pieces of work, a few microseconds apart. The team keeps its helpers
// between them: they look for the next piece for some microseconds, then let others have the
// core, then sleep. Whoever leads a piece waits for nobody but those who are in the middle of
// it, so a helper whose core does something else costs no more than that core.
#pragma once

#include <cstdint>

namespace vllm {

// Does shares of some work until none is left, on as many threads as call it.
using Work = void (*)(void* data);

// Calls work(data) on this thread and on others, `threads` in all at most; returns when all
// that was begun is done. Of several threads that call it at once one leads the team, the
// others work alone.
void run_together(Work work, void* data, int64_t threads);

}  // namespace vllm
