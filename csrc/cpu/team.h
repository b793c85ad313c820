// Threads that work together.
//
// The kernels run on the OpenMP threads that torch already has: they call libgomp's own entry
// point, which is resolved from the copy torch loaded, and link no runtime (two of them, both
// spinning, would cost more than the kernels save).
//
// A region of OpenMP ends when all its threads have arrived, also those that the system has
// taken off their cores before they did anything. A step has hundreds of regions, and beside
// one other busy process it took ten times as long as on a single thread. A team is one region
// for a whole list of operations: its leader runs them, the others help where they find work,
// and the leader waits for nobody but those who are in the middle of some.
#pragma once

#include <cstdint>

namespace vllm {

// Does shares of some work until none is left, on as many threads as call it.
using Work = void (*)(void* data);

// 1 when the process has an OpenMP runtime whose threads can be used, 0: there is one thread.
int has_threads();

// Calls work(data) on this thread and on others, `threads` in all at most; returns when all
// that was begun is done. On a thread that leads a team it is the team that works.
void run_together(Work work, void* data, int64_t threads);

// Calls lead(data) on this thread, as the leader of a team of `threads`.
void with_team(Work lead, void* data, int64_t threads);

}  // namespace vllm
