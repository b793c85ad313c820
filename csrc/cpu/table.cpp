// The kernels of this instruction set, for dispatch.cpp.
#include "kernels.h"

namespace vllm {
namespace VLLM_ISA {

extern const KernelTable kernels;
const KernelTable kernels = {
#define X(name, Args) name,
    VLLM_CPU_OPERATIONS(X)
#undef X
};

}  // namespace VLLM_ISA
}  // namespace vllm
