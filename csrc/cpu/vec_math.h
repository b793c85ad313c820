// Elementary functions of Floats: exact to about one unit in the last place; NaN gives NaN.
#pragma once

#include "vec.h"

namespace vllm {

VLLM_INLINE Floats round_to_integer(Floats v) {
#if defined(__AVX512F__)
  return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__AVX2__)
  return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  const Floats shift = splat(0x1.8p23f);  // |v| is far below 2^22
  return (v + shift) - shift;
#endif
}

// v * 2^n for integral n in [-200, 200], with correct underflow and overflow.
VLLM_INLINE Floats scale_by_power(Floats v, Floats n) {
#if defined(__AVX512F__)
  return _mm512_scalef_ps(v, n);
#else
  Ints whole = __builtin_convertvector(n, Ints);
  Ints half = whole >> 1;  // two steps: one power of two would leave the exponent's range
  Floats first = (Floats)((half + 127) << 23), second = (Floats)((whole - half + 127) << 23);
  return v * first * second;
#endif
}

// e^r - 1 for |r| <= ln(2) / 2 (coefficients: Cephes expf).
VLLM_INLINE Floats expm1_reduced(Floats r) {
  Floats p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  return fma(p, r * r, r);
}

// 2^f for |f| <= 1/2 (minimax, with 2^0 exactly 1): relative error 2e-9, then rounding.
VLLM_INLINE Floats exp2_reduced(Floats f) {
  Floats p = splat(1.5353362e-4f);
  p = fma(p, f, splat(1.3398875e-3f));
  p = fma(p, f, splat(9.618437e-3f));
  p = fma(p, f, splat(5.5503324e-2f));
  p = fma(p, f, splat(2.4022648e-1f));
  p = fma(p, f, splat(6.931472e-1f));
  return fma(p, f, splat(1.0f));
}

// The same with a relative error of 3e-6, for values that are rounded to bfloat16.
VLLM_INLINE Floats exp2_reduced_coarse(Floats f) {
  Floats p = splat(9.582852e-3f);
  p = fma(p, f, splat(5.590643e-2f));
  p = fma(p, f, splat(2.4024099e-1f));
  p = fma(p, f, splat(6.931242e-1f));
  return fma(p, f, splat(1.0f));
}

// The same for 0 <= f < 1.
VLLM_INLINE Floats exp2_fraction_coarse(Floats f) {
  Floats p = splat(1.34260161e-2f);
  p = fma(p, f, splat(5.2243799e-2f));
  p = fma(p, f, splat(2.4127938e-1f));
  p = fma(p, f, splat(6.9304502e-1f));
  return fma(p, f, splat(1.0f));
}

// 2^t for t <= 120; exactly 0 for t <= -160, exactly 1 for 0. The order of max's operands
// preserves NaN.
VLLM_INLINE Floats exp2(Floats t) {
  t = max(splat(-160.0f), t);
  const Floats n = round_to_integer(t);
  return scale_by_power(exp2_reduced(t - n), n);
}
VLLM_INLINE Floats exp2_coarse(Floats t) {
#if defined(__AVX512F__)
  const Floats f = _mm512_reduce_ps(t, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  return _mm512_scalef_ps(exp2_fraction_coarse(f), t);  // takes 2 to the floor of t
#else
  t = max(splat(-160.0f), t);
  const Floats n = round_to_integer(t);
  return scale_by_power(exp2_reduced_coarse(t - n), n);
#endif
}

// The order of the operands preserves NaN.
VLLM_INLINE Floats clamp(Floats v, float low, float high) {
  return min(splat(high), max(splat(low), v));
}

// x - n ln(2), for the integral n that makes it smallest.
VLLM_INLINE Floats reduce_for_exp(Floats x, Floats* n) {
  *n = round_to_integer(x * splat(1.44269504f));
  const Floats r = fma(*n, splat(-0.693359375f), x);  // ln(2) in two parts
  return fma(*n, splat(2.12194440e-4f), r);
}

VLLM_INLINE Floats exp(Floats x) {
  Floats n;
  const Floats r = reduce_for_exp(clamp(x, -110.0f, 110.0f), &n);
  return scale_by_power(expm1_reduced(r) + splat(1.0f), n);
}

// (e^2x - 1) / (e^2x + 1), in a form that keeps the digits of a small x.
VLLM_INLINE Floats tanh(Floats x) {
  Floats n;
  const Floats r = reduce_for_exp(clamp(x + x, -20.0f, 20.0f), &n);  // beyond that it is 1
  const Floats power = scale_by_power(splat(1.0f), n);
  const Floats less_one = fma(expm1_reduced(r), power, power - splat(1.0f));
  return less_one * reciprocal(less_one + splat(2.0f));
}

// e^x - 1.
VLLM_INLINE Floats expm1(Floats x) {
  Floats n;
  const Floats r = reduce_for_exp(clamp(x, -110.0f, 110.0f), &n);
  const Floats power = scale_by_power(splat(1.0f), n);
  return fma(expm1_reduced(r), power, power - splat(1.0f));
}

// Horner's rule, the coefficient of the highest power first.
template <int N>
VLLM_INLINE Floats polynomial(Floats x, const float (&coefficients)[N]) {
  Floats sum = splat(coefficients[0]);
  for (int i = 1; i < N; ++i) sum = fma(sum, x, splat(coefficients[i]));
  return sum;
}

// 1 - erf(a) for a >= 0, exact to the last digits of small results (coefficients: Cephes ndtrf).
VLLM_INLINE Floats erfc_of_positive(Floats a) {
  constexpr float kBelowOne[] = {7.853861353153693e-5f,  -8.010193625184903e-4f,
                                 5.188327685732524e-3f,  -2.685381193529856e-2f,
                                 1.128358514861418e-1f,  -3.761262582423300e-1f,
                                 1.128379165726710e+0f};
  constexpr float kBelowTwo[] = {2.326819970068386e-2f,  -1.387039388740657e-1f,
                                 3.687424674597105e-1f,  -5.824733027278666e-1f,
                                 6.210004621745983e-1f,  -4.944515323274145e-1f,
                                 3.404879937665872e-1f,  -2.741127028184656e-1f,
                                 5.638259427386472e-1f};
  constexpr float kBeyond[] = {-1.047766399936249e+1f, 1.297719955372516e+1f,
                               -7.495518717768503e+0f, 2.921019019210786e+0f,
                               -1.015265279202700e+0f, 4.218463358204948e-1f,
                               -2.820767439740514e-1f, 5.641895067754075e-1f};
  const Floats square = a * a, inverse = splat(1.0f) / a, y = inverse * inverse;
  const Floats near = splat(1.0f) - a * polynomial(square, kBelowOne);
  const Floats tail = a < splat(2.0f) ? polynomial(y, kBelowTwo) : polynomial(y, kBeyond);
  return a < splat(1.0f) ? near : exp(-square) * inverse * tail;
}

// x / 2 (1 + erf(x / sqrt(2))).
VLLM_INLINE Floats gelu_erf(Floats x) {
  const Floats size = max(x, -x);
  const Floats tail = splat(0.5f) * x * erfc_of_positive(size * splat(0.70710678f));
  return x > splat(0.0f) ? x - tail : tail;
}

// x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))).
VLLM_INLINE Floats gelu_by_tanh(Floats x) {
  const Floats cubed = splat(0.044715f) * x * x * x;
  return splat(0.5f) * x * (splat(1.0f) + tanh(splat(0.7978845608f) * (x + cubed)));
}

// Natural logarithm of finite y >= 2^-126 (coefficients: Cephes logf).
VLLM_INLINE Floats log(Floats y) {
  Ints bits = (Ints)y - 0x3f3504f3;  // distance from sqrt(1/2)
  Floats e = __builtin_convertvector(bits >> 23, Floats);
  Floats m = (Floats)((bits & 0x007fffff) + 0x3f3504f3) - splat(1.0f);  // [-0.293, 0.414]
  Floats p = splat(7.0376836292e-2f);
  p = fma(p, m, splat(-1.1514610310e-1f));
  p = fma(p, m, splat(1.1676998740e-1f));
  p = fma(p, m, splat(-1.2420140846e-1f));
  p = fma(p, m, splat(1.4249322787e-1f));
  p = fma(p, m, splat(-1.6668057665e-1f));
  p = fma(p, m, splat(2.0000714765e-1f));
  p = fma(p, m, splat(-2.4999993993e-1f));
  p = fma(p, m, splat(3.3333331174e-1f));
  Floats square = m * m;
  Floats small = fma(e, splat(-2.12194440e-4f), p * m * square);
  small = fma(square, splat(-0.5f), small);
  return fma(e, splat(0.693359375f), m + small);
}

// 1 / (1 + e^-x) and x times that, for values that are rounded to T: for 16-bit types with
// a relative error of 3e-6.
template <class T>
VLLM_INLINE Floats sigmoid(Floats x) {
  if (sizeof(T) == 4) return splat(1.0f) / (splat(1.0f) + exp(-x));
  const Floats t = min(splat(120.0f), x * splat(-1.44269504f));
  return reciprocal(splat(1.0f) + exp2_coarse(t));
}
template <class T>
VLLM_INLINE Floats silu(Floats x) {
  if (sizeof(T) == 4) return x / (splat(1.0f) + exp(-x));
  return x * sigmoid<T>(x);
}

// log(1 + e^x); x itself above 20, as in torch.nn.functional.softplus.
VLLM_INLINE Floats softplus(Floats x) {
  Floats u = exp(x);
  Floats y = splat(1.0f) + u;
  Floats rounding = u - (y - splat(1.0f));  // what the sum lost
  Floats value = log(y) + rounding / y;
  return x <= splat(20.0f) ? value : x;
}

}  // namespace vllm
