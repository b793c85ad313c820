// The layout of the state [dk, dv] of a v-head in the pool.
//
// A step that does not complete a chunk multiplies with the state and leaves it as it is, and the
// products of bfloat16 pairs need it rounded. So if tokens can be pending, rows 2s and 2s+1 are
// stored as pairs of halves: row s of the pool has the two elements rounded to bfloat16, one
// above the other as a product takes them, and row dk/2 + s has their low halves. Such a step
// reads only the first half of the rows. Both halves together restore every bit. The last of an
// odd number of rows is plain float32, and so is every row if nothing is ever pending.
#pragma once

#include "cells.h"

namespace vllm {

// Rounds to nearest, ties away from zero, so that the low half as a signed number is the rounding
// error. (A NaN of 0x7fff8000 and more rounds to a zero; joined again it is that NaN. No
// operation on bfloat16 makes one, and no other NaN rounds to a number.)
VLLM_INLINE Floats rounded_halves(Floats upper, Floats lower) {
  const Words half = Words{} + 0x8000u;
  return (Floats)((((Words)upper + half) >> 16) | (((Words)lower + half) & 0xffff0000u));
}

VLLM_INLINE Floats low_halves(Floats upper, Floats lower) {
  return (Floats)(((Words)upper & 0xffffu) | ((Words)lower << 16));
}

VLLM_INLINE Floats join_upper(Floats rounded, Floats low) {
  return (Floats)(((Words)rounded << 16) + (Words)((Ints)((Words)low << 16) >> 16));
}

VLLM_INLINE Floats join_lower(Floats rounded, Floats low) {
  return (Floats)(((Words)rounded & 0xffff0000u) + (Words)((Ints)low >> 16));
}

// Some columns of one head's state, in the pool or in a task's memory.
template <bool kInHalves, class F = float>
struct PoolRows {
  static constexpr bool kIsInHalves = kInHalves, kIsNear = false;
  F* first;
  int64_t stride, dk;

  int64_t pairs() const { return kInHalves ? dk / 2 : 0; }
  F* rounded(int64_t s) const { return first + s * stride; }
  F* low(int64_t s) const { return first + (pairs() + s) * stride; }
  F* plain(int64_t i) const { return first + i * stride; }  // i >= 2 * pairs()
};

}  // namespace vllm
