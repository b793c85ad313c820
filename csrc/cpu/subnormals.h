// Zeros in place of subnormal numbers, in operations whose values decay.
//
// What decays by a factor a token soon has values below 1e-38, and so do the weights of keys with
// low scores. Many CPUs take a hundred cycles for one of them (docs/journal/cpu.md). Added to
// numbers of usual size they change no bit. All paths of an operation do this, so its values do not
// depend on where steps end.
#pragma once

#include <cstdint>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace vllm {

// While it lives, subnormal operands and results of this thread's arithmetic are zeros.
class WithoutSubnormals {
 public:
  WithoutSubnormals() : before_(read()) { write(before_ | kZeros); }
  ~WithoutSubnormals() { write(before_); }
  WithoutSubnormals(const WithoutSubnormals&) = delete;

 private:
  // The barriers keep loads, and so the arithmetic on what they load, between the two.
#if defined(__SSE2__)
  using Control = uint32_t;
  static constexpr Control kZeros = 0x8040;  // flush to zero, denormals are zeros
  static Control read() { return _mm_getcsr(); }
  static void write(Control control) {
    asm volatile("" : : : "memory");
    _mm_setcsr(control);
    asm volatile("" : : : "memory");
  }
#elif defined(__aarch64__)
  using Control = uint64_t;
  static constexpr Control kZeros = uint64_t(1) << 24;  // FZ
  static Control read() {
    Control control;
    asm volatile("mrs %0, fpcr" : "=r"(control));
    return control;
  }
  static void write(Control control) { asm volatile("msr fpcr, %0" : : "r"(control) : "memory"); }
#else
  using Control = int;
  static constexpr Control kZeros = 0;
  static Control read() { return 0; }
  static void write(Control) {}
#endif

  const Control before_;
};

}  // namespace vllm
