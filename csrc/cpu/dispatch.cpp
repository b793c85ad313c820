// What the library exports, and which instruction sets this CPU can run.
#include "abi.h"
#include "team.h"

namespace vllm {

namespace baseline { extern const KernelTable kernels; }
#ifdef VLLM_X86_KERNELS
namespace avx2 { extern const KernelTable kernels; }
namespace avx512 { extern const KernelTable kernels; }
namespace avx512_bf16 { extern const KernelTable kernels; }
#endif

namespace {

const KernelTable* table_of(int isa) {
  switch (isa) {
    case kBaseline: return &baseline::kernels;
#ifdef VLLM_X86_KERNELS
    case kAvx2: return &avx2::kernels;
    case kAvx512: return &avx512::kernels;
    case kAvx512Bf16: return &avx512_bf16::kernels;
#endif
    default: return nullptr;
  }
}

}  // namespace
}  // namespace vllm

#define VLLM_EXPORT extern "C" __attribute__((visibility("default")))

VLLM_EXPORT int64_t vllm_cpu_abi_version() { return vllm::kAbiVersion; }

// Highest instruction set that this CPU has and this build contains.
VLLM_EXPORT int vllm_cpu_best_isa() {
#ifdef VLLM_X86_KERNELS
  __builtin_cpu_init();
  if (!(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
        __builtin_cpu_supports("f16c"))) {
    return vllm::kBaseline;
  }
  if (!(__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))) {
    return vllm::kAvx2;
  }
  return __builtin_cpu_supports("avx512bf16") ? vllm::kAvx512Bf16 : vllm::kAvx512;
#else
  return vllm::kBaseline;
#endif
}

// 1 when the process has an OpenMP runtime that the kernels can share, 0: they run on one thread.
VLLM_EXPORT int vllm_cpu_has_threads() { return vllm::has_threads(); }

// Runs one operation. isa must not be above vllm_cpu_best_isa(). Returns a Status.
VLLM_EXPORT int vllm_cpu_run(int isa, int operation, const void* args, int64_t args_bytes) {
  const vllm::KernelTable* table = vllm::table_of(isa);
  if (table == nullptr) return vllm::kBadCall;
  switch (operation) {
#define X(name, Args)                                                      \
  case vllm::k_##name:                                                     \
    if (args_bytes != int64_t(sizeof(vllm::Args))) return vllm::kBadCall;  \
    return table->name(*static_cast<const vllm::Args*>(args));
    VLLM_CPU_OPERATIONS(X)
#undef X
    default: return vllm::kBadCall;
  }
}

namespace {

struct Calls {
  int isa;
  const char *next, *end;
  int64_t operation;
  int status;

  static void run(void* data) {
    auto* calls = static_cast<Calls*>(data);
    while (calls->next < calls->end && calls->status == vllm::kOk) {
      const auto* header = reinterpret_cast<const int64_t*>(calls->next);
      calls->operation = header[0];
      calls->status = vllm_cpu_run(calls->isa, int(header[0]), header + 2, header[1]);
      calls->next += 2 * sizeof(int64_t) + header[1];
    }
  }
};

}  // namespace

// Runs operations one after another, until one fails, on a team of `threads`. calls: for each
// one its number and the size of its arguments, int64_t both, then the arguments. Returns the
// Status of the last one that ran, whose number is left in *operation.
VLLM_EXPORT int vllm_cpu_run_all(int isa, int64_t threads, const char* calls, int64_t bytes,
                                 int64_t* operation) {
  Calls all{isa, calls, calls + bytes, 0, vllm::kOk};
  vllm::with_team(&Calls::run, &all, threads);
  *operation = all.operation;
  return all.status;
}
