// A vector of floats of the width of the instruction set that this file is compiled for.
//
// Compiled with -ffp-contract=off: multiply-adds are fused only where fma() is written.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

// Also for functions that only prefetch: GCC sees no effect in them and drops their calls.
#define VLLM_INLINE inline __attribute__((always_inline))
#define VLLM_LAMBDA __attribute__((always_inline))

namespace vllm {

#if defined(__AVX512F__)
constexpr int kWidth = 16;
#elif defined(__AVX2__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * kWidth)));
typedef uint32_t Words __attribute__((vector_size(4 * kWidth)));
typedef int32_t Ints __attribute__((vector_size(4 * kWidth)));
typedef uint16_t Shorts __attribute__((vector_size(2 * kWidth)));

struct BFloat16 { uint16_t bits; };
struct Float16 { uint16_t bits; };

VLLM_INLINE int64_t round_up(int64_t n, int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

VLLM_INLINE Floats splat(float x) {
#if defined(__AVX512F__)
  return _mm512_set1_ps(x);
#elif defined(__AVX2__)
  return _mm256_set1_ps(x);
#else
  return Floats{x, x, x, x};
#endif
}

// a * b + c, fused if the instruction set can; the same for a lone float.
VLLM_INLINE Floats fma(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
  return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

// The second operand if neither is greater, so max(limit, NaN) is NaN.
VLLM_INLINE Floats max(Floats a, Floats b) {
#if defined(__AVX512F__)
  return _mm512_max_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}
VLLM_INLINE Floats min(Floats a, Floats b) {
#if defined(__AVX512F__)
  return _mm512_min_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_min_ps(a, b);
#else
  return a < b ? a : b;
#endif
}

// 1 / v for |v| in [2^-125, 2^125]; within 2^-23 if a division would cost more than everything
// else.
VLLM_INLINE Floats reciprocal(Floats v) {
#if defined(__AVX512F__)
  const Floats guess = _mm512_rcp14_ps(v);
  return guess * _mm512_fnmadd_ps(v, guess, splat(2.0f));
#else
  return splat(1.0f) / v;
#endif
}

VLLM_INLINE Words widen(Shorts s) {
#if defined(__AVX512F__)  // GCC 12 turns __builtin_convertvector into five instructions
  return (Words)_mm512_cvtepu16_epi32((__m256i)s);
#elif defined(__AVX2__)
  return (Words)_mm256_cvtepu16_epi32((__m128i)s);
#else
  return __builtin_convertvector(s, Words);
#endif
}

VLLM_INLINE Floats from_bfloat16(Shorts s) { return (Floats)(widen(s) << 16); }

// Rounds to nearest, ties to even; NaN stays NaN. AVX512-BF16 treats subnormal numbers as zeros.
VLLM_INLINE Shorts to_bfloat16(Floats v) {
#if defined(__AVX512BF16__)
  return (Shorts)_mm512_cvtneps_pbh(v);
#else
  Words w = (Words)v;
  Words rounded = (w + 0x7fffu + ((w >> 16) & 1u)) >> 16;
  rounded = v == v ? rounded : (Words{} | 0x7fc0u);
  return __builtin_convertvector(rounded, Shorts);
#endif
}

inline float half_to_float(uint16_t half) {
  uint32_t sign = uint32_t(half & 0x8000u) << 16, magnitude = half & 0x7fffu, bits;
  float value;
  if (magnitude >= 0x7c00u) {
    bits = sign | 0x7f800000u | (magnitude << 13);
  } else if (magnitude >= 0x0400u) {
    bits = sign | ((magnitude << 13) + 0x38000000u);
  } else {  // subnormal: magnitude * 2^-24, exact
    value = float(magnitude) * 0x1p-24f;
    std::memcpy(&bits, &value, 4);
    bits |= sign;
  }
  std::memcpy(&value, &bits, 4);
  return value;
}

inline uint16_t float_to_half(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  uint16_t sign = uint16_t((bits >> 16) & 0x8000u);
  uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return sign | 0x7e00u;
  if (magnitude >= 0x477ff000u) return sign | 0x7c00u;  // rounds to 2^16 or above
  if (magnitude < 0x38800000u) {  // subnormal: let float addition round to 2^-24
    float absolute;
    std::memcpy(&absolute, &magnitude, 4);
    absolute += 0.5f;
    std::memcpy(&bits, &absolute, 4);
    return uint16_t(sign | (bits - 0x3f000000u));
  }
  magnitude += 0xfffu + ((magnitude >> 13) & 1u);
  return uint16_t(sign | ((magnitude - 0x38000000u) >> 13));
}

VLLM_INLINE Floats from_float16(Shorts s) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps((__m256i)s);
#elif defined(__AVX2__)
  return _mm256_cvtph_ps((__m128i)s);
#elif defined(__aarch64__)
  return (Floats)vcvt_f32_f16((float16x4_t)s);
#else
  Floats v;
  for (int i = 0; i < kWidth; ++i) v[i] = half_to_float(s[i]);
  return v;
#endif
}

VLLM_INLINE Shorts to_float16(Floats v) {
#if defined(__AVX512F__)
  return (Shorts)_mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__AVX2__)
  return (Shorts)_mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__aarch64__)
  return (Shorts)vcvt_f16_f32((float32x4_t)v);
#else
  Shorts s;
  for (int i = 0; i < kWidth; ++i) s[i] = float_to_half(v[i]);
  return s;
#endif
}

VLLM_INLINE float to_float(float x) { return x; }
VLLM_INLINE float to_float(BFloat16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
VLLM_INLINE float to_float(Float16 x) { return half_to_float(x.bits); }

VLLM_INLINE Floats load(const float* p) {
  Floats v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
VLLM_INLINE Floats load(const BFloat16* p) {
  Shorts s;
  std::memcpy(&s, p, sizeof s);
  return from_bfloat16(s);
}
VLLM_INLINE Floats load(const Float16* p) {
  Shorts s;
  std::memcpy(&s, p, sizeof s);
  return from_float16(s);
}

VLLM_INLINE void store(float* p, Floats v) { std::memcpy(p, &v, sizeof v); }
VLLM_INLINE void store(BFloat16* p, Floats v) {
  Shorts s = to_bfloat16(v);
  std::memcpy(p, &s, sizeof s);
}
VLLM_INLINE void store(Float16* p, Floats v) {
  Shorts s = to_float16(v);
  std::memcpy(p, &s, sizeof s);
}

// A store that bypasses the caches, for data that is not read soon. Call stream_fence() before
// other threads may read it.
VLLM_INLINE void stream(float* p, Floats v) {
#if defined(__AVX512F__)
  if (reinterpret_cast<uintptr_t>(p) % sizeof v == 0) return _mm512_stream_ps(p, v);
#endif
  store(p, v);
}
VLLM_INLINE void stream_fence() {
#if defined(__AVX512F__)
  _mm_sfence();
#endif
}

// The first n (< kWidth) elements; the others are zeros.
template <class T>
VLLM_INLINE Floats load_first(const T* p, int64_t n) {
  T buffer[kWidth] = {};
  std::memcpy(buffer, p, size_t(n) * sizeof(T));
  return load(buffer);
}
// The first n elements for any n, even all of a vector or none.
template <class T>
VLLM_INLINE Floats load_up_to(const T* p, int64_t n) {
  return n >= kWidth ? load(p) : n > 0 ? load_first(p, n) : Floats{};
}
template <class T>
VLLM_INLINE void store_first(T* p, Floats v, int64_t n) {
  T buffer[kWidth];
  store(buffer, v);
  std::memcpy(p, buffer, size_t(n) * sizeof(T));
}

// The value after one rounding to T.
template <class T>
VLLM_INLINE Floats rounded_to(Floats v);
template <>
VLLM_INLINE Floats rounded_to<float>(Floats v) { return v; }
template <>
VLLM_INLINE Floats rounded_to<BFloat16>(Floats v) { return from_bfloat16(to_bfloat16(v)); }
template <>
VLLM_INLINE Floats rounded_to<Float16>(Floats v) { return from_float16(to_float16(v)); }

// Sum and maximum of the lanes, always in the same order.
VLLM_INLINE float reduce_add(Floats v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps(v);
#else
  float lanes[kWidth];
  store(lanes, v);
  for (int half = kWidth / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
#endif
}
VLLM_INLINE float reduce_max(Floats v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(v);
#else
  float lanes[kWidth];
  store(lanes, v);
  for (int half = kWidth / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) {
      lanes[i] = lanes[i] > lanes[i + half] ? lanes[i] : lanes[i + half];
    }
  }
  return lanes[0];
#endif
}

// Transposes the kWidth x kWidth matrix whose rows are given, in place.
VLLM_INLINE void transpose(Floats* rows) {
#if defined(__AVX512F__)
  __m512 t[16];
  for (int i = 0; i < 8; ++i) {  // pairs of rows
    t[2 * i] = _mm512_unpacklo_ps(rows[2 * i], rows[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_ps(rows[2 * i], rows[2 * i + 1]);
  }
  __m512 u[16];
  for (int i = 0; i < 4; ++i) {  // 4x4 blocks inside 128-bit lanes
    for (int j = 0; j < 2; ++j) {
      __m512d low = _mm512_castps_pd(t[4 * i + j]), high = _mm512_castps_pd(t[4 * i + j + 2]);
      u[4 * i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
      u[4 * i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
    }
  }
  for (int j = 0; j < 4; ++j) {  // 128-bit lanes between blocks
    __m512 a = _mm512_shuffle_f32x4(u[j], u[4 + j], 0x88);
    __m512 b = _mm512_shuffle_f32x4(u[j], u[4 + j], 0xdd);
    __m512 c = _mm512_shuffle_f32x4(u[8 + j], u[12 + j], 0x88);
    __m512 d = _mm512_shuffle_f32x4(u[8 + j], u[12 + j], 0xdd);
    rows[j] = _mm512_shuffle_f32x4(a, c, 0x88);
    rows[8 + j] = _mm512_shuffle_f32x4(a, c, 0xdd);
    rows[4 + j] = _mm512_shuffle_f32x4(b, d, 0x88);
    rows[12 + j] = _mm512_shuffle_f32x4(b, d, 0xdd);
  }
#elif defined(__AVX2__)
  __m256 t[8], u[8];
  for (int i = 0; i < 4; ++i) {
    t[2 * i] = _mm256_unpacklo_ps(rows[2 * i], rows[2 * i + 1]);
    t[2 * i + 1] = _mm256_unpackhi_ps(rows[2 * i], rows[2 * i + 1]);
  }
  for (int i = 0; i < 2; ++i) {
    for (int j = 0; j < 2; ++j) {
      u[4 * i + 2 * j] = _mm256_shuffle_ps(t[4 * i + j], t[4 * i + j + 2], 0x44);
      u[4 * i + 2 * j + 1] = _mm256_shuffle_ps(t[4 * i + j], t[4 * i + j + 2], 0xee);
    }
  }
  for (int j = 0; j < 4; ++j) {
    rows[j] = _mm256_permute2f128_ps(u[j], u[4 + j], 0x20);
    rows[4 + j] = _mm256_permute2f128_ps(u[j], u[4 + j], 0x31);
  }
#else
  float in[kWidth][kWidth], out[kWidth][kWidth];
  std::memcpy(in, rows, sizeof in);
  for (int i = 0; i < kWidth; ++i) {
    for (int j = 0; j < kWidth; ++j) out[j][i] = in[i][j];
  }
  std::memcpy(rows, out, sizeof out);
#endif
}

// out[i] = elements i, 4 + i, 8 + i, ... of p[4 * kWidth].
template <class T>
VLLM_INLINE void load_apart(const T* p, Floats (&out)[4]) {
#if defined(__AVX512F__)
  const __m512i fourths = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 0, 0, 0, 0, 0, 0, 0);
  const Floats in[] = {load(p), load(p + kWidth), load(p + 2 * kWidth), load(p + 3 * kWidth)};
  for (int i = 0; i < 4; ++i) {
    const __m512i pick = _mm512_add_epi32(fourths, _mm512_set1_epi32(i));
    const __m512 low = _mm512_permutex2var_ps(in[0], pick, in[1]);
    const __m512 high = _mm512_permutex2var_ps(in[2], pick, in[3]);
    out[i] = _mm512_shuffle_f32x4(low, high, 0x44);
  }
#else
  for (int i = 0; i < 4; ++i) {
    for (int lane = 0; lane < kWidth; ++lane) out[i][lane] = to_float(p[4 * lane + i]);
  }
#endif
}

// 0, 1, 2, ...
VLLM_INLINE Ints lane_numbers() {
  Ints v;
  for (int i = 0; i < kWidth; ++i) v[i] = i;
  return v;
}

}  // namespace vllm
