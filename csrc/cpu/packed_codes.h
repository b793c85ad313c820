// Unpacking codes of 8 and 4 bits into the cells of a product.
//
// Codes lie in panels, chunk of terms by chunk, with the chunks of 64 outputs side by side. A chunk
// of 8-bit codes is two terms of one byte each. A chunk of 4-bit codes is eight terms in a word:
// term 2i in bits 4i to 4i + 3 of the low half, term 2i + 1 in those of the high half. So a word
// shifted by 4i has a pair of terms in the lowest bits of its halves.
//
// Every cell is exact in bfloat16, even the product of a table's value and an 8-bit scale.
#pragma once

#include "product.h"

namespace vllm {

typedef uint8_t Bytes __attribute__((vector_size(kWidth)));

VLLM_INLINE Words widen_bytes(const void* p) {
  Bytes bytes;
  std::memcpy(&bytes, p, sizeof bytes);
#if defined(__AVX512F__)
  return (Words)_mm512_cvtepu8_epi32((__m128i)bytes);
#elif defined(__AVX2__)
  return (Words)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)bytes));
#else
  return __builtin_convertvector(bytes, Words);
#endif
}

VLLM_INLINE Words load_pairs(const uint8_t* p) {
  Shorts pairs;
  std::memcpy(&pairs, p, sizeof pairs);
  return widen(pairs);
}

VLLM_INLINE Words load_words(const uint8_t* p) {
  Words words;
  std::memcpy(&words, p, sizeof words);
  return words;
}

VLLM_INLINE Floats to_floats(Ints v) {
#if defined(__AVX512F__)
  return _mm512_cvtepi32_ps((__m512i)v);
#elif defined(__AVX2__)
  return _mm256_cvtepi32_ps((__m256i)v);
#else
  return __builtin_convertvector(v, Floats);
#endif
}

VLLM_INLINE Ints sign_extended(const int8_t* p) { return (Ints)(widen_bytes(p) << 24) >> 24; }

// E4M3 is the upper half of a float16 except for one bit of the exponent: 2^-8 of its value.
constexpr float kOfFloat8 = 256.0f;

VLLM_INLINE Shorts half_of_float8(Words low_bytes) {
  return __builtin_convertvector(((low_bytes & 0x80u) << 8) | ((low_bytes & 0x7fu) << 7), Shorts);
}

// 8-bit scales.
struct Float8 { uint8_t bits; };
struct PowerOfTwo { uint8_t bits; };

VLLM_INLINE Floats load(const Float8* p) {
  return from_float16(half_of_float8(widen_bytes(p))) * splat(kOfFloat8);
}
VLLM_INLINE Floats load(const PowerOfTwo* p) {
  const Words bytes = widen_bytes(p);
  return (Floats)(bytes == 0 ? Words{} + 0x00400000u : bytes << 23);  // 2^(byte - 127)
}

// Each of these classes is a source of cells for columns of up to kMostVectors vectors. kTerms:
// terms of a chunk; kBytes: bytes of a chunk for one column; kFactor: factor of its values;
// kScalesCells: whether the cells contain this factor and their scales. start<V>(zeros, scales),
// for V vectors, comes before the cells of a group. cells(hold(codes), k, v) returns the cells of
// step k of vector v, whose part of the chunk is at `codes`. kUnpackingRows: up to so many rows,
// products unpack the cells again for every group of kUnpackedGroup rows, which is faster than
// storing them. Measured on Zen 5, 1,024 x 3,584, one thread, INT4: 8 rows 209 -> 139 us, 16 rows
// 328 -> 280, 64 rows 1,060 -> 1,090; FP8: 6 rows 258 -> 208, 8 rows 286 -> 324.

constexpr int64_t kUnpackedGroup = kWidth == 16 ? 6 : 4;  // more sums leave no register
constexpr int kPanelVectors = int(kColumns / kWidth);
// Eight multiply-adds begin in the time that one takes, so a lone row needs eight sums: of two
// panels if one has fewer.
constexpr int kMostVectors = kWidth == 4 ? kTileVectors : 8;
constexpr int64_t kMostPanels = std::max(kMostVectors / kPanelVectors, 1);

template <class Math, bool has_zeros>
class Int8Codes {
 public:
  static constexpr int64_t kTerms = 2, kBytes = 2;
  static constexpr float kFactor = 1.0f;
  static constexpr int64_t kUnpackingRows = kWidth == 4 ? kUnpackedGroup : 16;
  static constexpr bool kScalesCells = false;
  explicit Int8Codes(const float*) {}

  template <int V>
  VLLM_INLINE void start(const int8_t* zeros, const float*) {
    if constexpr (has_zeros) {
      for (int v = 0; v < V; ++v) {
        const Ints zero = sign_extended(zeros + v * kWidth);
        if constexpr (Math::kIsWhole) {
          zeros_[v] = (Floats)(((Words)zero & 0xffffu) | (Words)zero << 16);
        } else {
          zeros_[v] = to_floats(zero);
        }
      }
    }
  }

  static VLLM_INLINE const uint8_t* hold(const uint8_t* codes) { return codes; }

  VLLM_INLINE Floats cells(const uint8_t* p, int k, int v) const {
#if defined(__AVX512VNNI__)
    if constexpr (Math::kIsWhole) {
      const __m512i codes = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p));
      if constexpr (has_zeros) return (Floats)_mm512_sub_epi16(codes, (__m512i)zeros_[v]);
      return (Floats)codes;
    }
#endif
#if defined(__AVX512BF16__)
    if constexpr (Math::kPerCell == 2 && !has_zeros) {
      const __m512i low = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p));
      const __m512i high = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(p + kWidth)));
      return (Floats)_mm512_cvtne2ps_pbh(_mm512_cvtepi32_ps(high), _mm512_cvtepi32_ps(low));
    }
#endif
    if constexpr (!Math::kIsWhole) {
      const Ints pairs = (Ints)load_pairs(p);
      if constexpr (Math::kPerCell == 2) {
        return Math::stacked_cells(value(pairs << 24, v), value(pairs << 16, v));
      }
      return value(k == 0 ? pairs << 24 : pairs << 16, v);
    }
  }

 private:
  VLLM_INLINE Floats value(Ints in_high_byte, int v) const {
    const Floats code = to_floats(in_high_byte >> 24);
    if constexpr (has_zeros) return code - zeros_[v];
    return code;
  }

  Floats zeros_[has_zeros ? kMostVectors : 1];
};

template <class Math>
class Float8Codes {
 public:
  static constexpr int64_t kTerms = 2, kBytes = 2;
  static constexpr float kFactor = kOfFloat8;
  static constexpr int64_t kUnpackingRows = kUnpackedGroup;
  static constexpr bool kScalesCells = false;
  explicit Float8Codes(const float*) {}

  template <int V>
  VLLM_INLINE void start(const int8_t*, const float*) {}

  static VLLM_INLINE const uint8_t* hold(const uint8_t* codes) { return codes; }

  VLLM_INLINE Floats cells(const uint8_t* p, int k, int) const {
#if defined(__AVX512BF16__)
    if constexpr (Math::kPerCell == 2) {
      const __m512i bytes = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p));
      const __m512i halves =
          _mm512_and_si512(_mm512_slli_epi16(bytes, 7), _mm512_set1_epi16(short(0xbf80)));
      const __m512 low = _mm512_cvtph_ps(_mm512_castsi512_si256(halves));
      const __m512 high = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1));
      return (Floats)_mm512_cvtne2ps_pbh(high, low);
    }
#endif
    Shorts pairs;
    std::memcpy(&pairs, p, sizeof pairs);
    const Shorts first = ((pairs & uint16_t(0x80)) << 8) | ((pairs & uint16_t(0x7f)) << 7);
    const Shorts second = (pairs & uint16_t(0x8000)) | ((pairs & uint16_t(0x7f00)) >> 1);
    if constexpr (Math::kPerCell == 2) {
      return Math::stacked_cells(from_float16(first), from_float16(second));
    }
    return from_float16(k == 0 ? first : second);
  }
};

// Entries of a table of 16 values. With zeros, which are integers, the values are consecutive
// integers from table[0] on, and their differences from the zeros are -16 to 15.
template <class Math, bool has_zeros>
class Table4Codes {
 public:
  static constexpr int64_t kTerms = 8, kBytes = 4;
  static constexpr float kFactor = 1.0f;
  static constexpr int64_t kUnpackingRows = kWidth < 16 ? kUnpackedGroup : has_zeros ? 8 : 16;
  static constexpr bool kScalesCells = false;

  explicit Table4Codes(const float* table) : first_(int(table[0])) {
#if defined(__AVX512BF16__)
    if constexpr (Math::kPerCell == 2) {
      uint16_t values[2 * kWidth];
      for (int i = 0; i < 2 * kWidth; ++i) {
        const float value = has_zeros ? float(i < 16 ? i : i - 32) : table[i % 16];
        uint32_t bits;
        std::memcpy(&bits, &value, sizeof bits);
        values[i] = uint16_t(bits >> 16);
      }
      std::memcpy(&pairs_, values, sizeof pairs_);
      return;
    }
#endif
    for (int i = 0; i < kParts; ++i) parts_[i] = load(table + i * kWidth);
  }

  template <int V>
  VLLM_INLINE void start(const int8_t* zeros, const float*) {
    if constexpr (has_zeros) {
      for (int v = 0; v < V; ++v) {
        const Ints zero = sign_extended(zeros + v * kWidth);
        if constexpr (Math::kPerCell == 2) {
          const Words low = (Words)(zero - first_) & 0xffffu;
          zeros_[v] = (Floats)(low | low << 16);
        } else {
          zeros_[v] = to_floats(zero);
        }
      }
    }
  }

  static VLLM_INLINE Words hold(const uint8_t* codes) {
    Words words = load_words(codes);
#if defined(__AVX512F__)
    asm("" : "+v"(words));  // otherwise GCC loads them again for every shift
#endif
    return words;
  }

  VLLM_INLINE Floats cells(Words words, int k, int v) const {
#if defined(__AVX512BF16__)
    if constexpr (Math::kPerCell == 2) {
      Words index = words >> (4 * k);
      if constexpr (has_zeros) {
        index = (Words)_mm512_sub_epi16((__m512i)(index & 0x000f000fu), (__m512i)zeros_[v]);
      }
      return (Floats)_mm512_permutexvar_epi16((__m512i)index, (__m512i)pairs_);
    }
#endif
    const Floats entry = look_up(words >> (4 * (k / 2) + 16 * (k % 2)));
    if constexpr (has_zeros) return entry - zeros_[v];
    return entry;
  }

 private:
  static constexpr int kParts = 16 / kWidth;

  VLLM_INLINE Floats look_up(Words code) const {  // uses the four lowest bits
#if defined(__AVX512F__)
    return _mm512_permutexvar_ps((__m512i)code, parts_[0]);
#elif defined(__AVX2__)
    const __m256 low = _mm256_permutevar8x32_ps(parts_[0], (__m256i)code);
    const __m256 high = _mm256_permutevar8x32_ps(parts_[1], (__m256i)code);
    return _mm256_blendv_ps(low, high, (__m256)(code << 28));
#elif defined(__aarch64__)
    uint8x16x4_t bytes;
    for (int i = 0; i < kParts; ++i) bytes.val[i] = (uint8x16_t)parts_[i];
    const Words places = (code & 15u) * 0x04040404u + 0x03020100u;  // an entry's four bytes
    return (Floats)vqtbl4q_u8(bytes, (uint8x16_t)places);
#else
    Floats v;
    for (int i = 0; i < kWidth; ++i) v[i] = parts_[(code[i] & 15u) / kWidth][(code[i] & 15u) % kWidth];
    return v;
#endif
  }

  const int first_;
  Floats parts_[kParts];
  Words pairs_;
  Floats zeros_[has_zeros ? kMostVectors : 1];
};

// The same for tables of consecutive integers, by arithmetic: a table of 16 floats takes two
// registers of eight, and a look-up takes two permutations and a selection.
template <class Math, bool has_zeros>
class Whole4Codes {
 public:
  static constexpr int64_t kTerms = 8, kBytes = 4;
  static constexpr float kFactor = 1.0f;
  static constexpr int64_t kUnpackingRows = 16;
  static constexpr bool kScalesCells = false;
  static constexpr float kMiddle = 8.0f;

  // Without zeros the table is -8 to 7.
  static bool takes(const float* table) {
    for (int i = 0; i < 16; ++i) {
      if (table[i] != (has_zeros ? table[0] : -kMiddle) + float(i)) return false;
    }
    return true;
  }

  explicit Whole4Codes(const float* table) : middle_(table[0] + kMiddle) {}

  template <int V>
  VLLM_INLINE void start(const int8_t* zeros, const float*) {
    if constexpr (has_zeros) {
      for (int v = 0; v < V; ++v) {
        zeros_[v] = to_floats(sign_extended(zeros + v * kWidth)) - splat(middle_);
      }
    }
  }

  static VLLM_INLINE Words hold(const uint8_t* codes) { return load_words(codes) ^ 0x88888888u; }

  VLLM_INLINE Floats cells(Words words, int k, int v) const {
    const Words in_high_bits = words << (28 - 4 * (k / 2) - 16 * (k % 2));
    const Floats code = to_floats((Ints)in_high_bits >> 28);  // minus the middle
    if constexpr (has_zeros) return code - zeros_[v];
    return code;
  }

 private:
  const float middle_;
  Floats zeros_[has_zeros ? kMostVectors : 1];
};

// Entries of a table times scales with four bits of precision.
template <class Math>
class ScaledTable4Codes {
 public:
  static constexpr int64_t kTerms = 8, kBytes = 4;
  static constexpr float kFactor = 1.0f;
  static constexpr int64_t kUnpackingRows = kUnpackedGroup;
  static constexpr bool kScalesCells = true;

  explicit ScaledTable4Codes(const float* table) : codes_(table) {}

  template <int V>
  VLLM_INLINE void start(const int8_t*, const float* scales) {
    for (int v = 0; v < V; ++v) scales_[v] = load(scales + v * kWidth);
  }

  static VLLM_INLINE Words hold(const uint8_t* codes) { return Table4Codes<Math, false>::hold(codes); }

  VLLM_INLINE Floats cells(Words words, int k, int v) const {
    const Floats values = codes_.cells(words, k, v);
    if constexpr (Math::kPerCell == 1) return values * scales_[v];
    const Floats first = (Floats)((Words)values << 16) * scales_[v];
    const Floats second = (Floats)((Words)values & 0xffff0000u) * scales_[v];
    return (Floats)((Words)first >> 16 | (Words)second);  // exact: the lower halves are zeros
  }

 private:
  const Table4Codes<Math, false> codes_;
  Floats scales_[kMostVectors];
};

// Cells that are already unpacked, as [steps][kColumns].
struct ReadyCells {
  static constexpr bool kScalesCells = false;
  static constexpr int64_t kTerms = 1, kBytes = sizeof(Cell);
  static VLLM_INLINE const Cell* hold(const Cell* cells) { return cells; }
  VLLM_INLINE Floats cells(const Cell* p, int, int) const { return load_cells(p); }
};

}  // namespace vllm
