// Products with weights of 8 and 4 bits, unpacked round by round.
//
// A weight is (value(code) - zero) * scale in float32, rounded to the type of the inputs: what a
// product then takes is bit for bit the dequantised weight. Codes lie in panels, pair of terms by
// pair: of 8 bits two bytes side by side for every output, of 4 bits one byte, the first term in
// its low half. Scales and zeros lie in panels too, group by group. A pair has one group.
#include "product.h"

namespace vllm {
namespace {

enum CodeKind : int64_t { kInt8, kFloat8, kTable4 };

struct PackedWeight {
  const uint8_t* codes;
  const float* table;  // of 16 values, for codes of 4 bits
  const void* scales;
  int64_t scale_dtype;
  const int8_t* zeros;  // may be null
  int64_t group_size, groups;
};

typedef uint8_t Bytes __attribute__((vector_size(kWidth)));
typedef int8_t SignedBytes __attribute__((vector_size(kWidth)));

VLLM_INLINE Words widen_bytes(const uint8_t* p) {
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

VLLM_INLINE Floats to_floats(Ints v) {
#if defined(__AVX512F__)
  return _mm512_cvtepi32_ps((__m512i)v);
#elif defined(__AVX2__)
  return _mm256_cvtepi32_ps((__m256i)v);
#else
  return __builtin_convertvector(v, Floats);
#endif
}

// The two values of every pair of codes; what they are multiplied with besides their scale.
struct Int8Codes {
  static constexpr int64_t kBytes = 2;
  static constexpr float kFactor = 1.0f;
  explicit Int8Codes(const float*) {}

  VLLM_INLINE void values(const uint8_t* p, Floats& first, Floats& second) const {
    const Ints pairs = (Ints)load_pairs(p);
    first = to_floats(pairs << 24 >> 24);
    second = to_floats(pairs << 16 >> 24);
  }
};

// E4M3 is the upper half of a float16 but for one bit of the exponent: 2^-8 of its value.
struct Float8Codes {
  static constexpr int64_t kBytes = 2;
  static constexpr float kFactor = 256.0f;
  explicit Float8Codes(const float*) {}

  VLLM_INLINE void values(const uint8_t* p, Floats& first, Floats& second) const {
    Shorts pairs;
    std::memcpy(&pairs, p, sizeof pairs);
    first = from_float16(((pairs & uint16_t(0x80)) << 8) | ((pairs & uint16_t(0x7f)) << 7));
    second = from_float16((pairs & uint16_t(0x8000)) | ((pairs & uint16_t(0x7f00)) >> 1));
  }
};

struct Table4Codes {
  static constexpr int64_t kBytes = 1;
  static constexpr float kFactor = 1.0f;

#if defined(__AVX512F__)
  explicit Table4Codes(const float* table) : table_(load(table)) {}

  VLLM_INLINE Floats value(Words code) const {  // of the four lowest bits
    return _mm512_permutexvar_ps((__m512i)code, table_);
  }
  const Floats table_;
#elif defined(__AVX2__)
  explicit Table4Codes(const float* table) : low_(load(table)), high_(load(table + 8)) {}

  VLLM_INLINE Floats value(Words code) const {
    const __m256 low = _mm256_permutevar8x32_ps(low_, (__m256i)code);
    const __m256 high = _mm256_permutevar8x32_ps(high_, (__m256i)code);
    return _mm256_blendv_ps(low, high, (__m256)(code << 28));
  }
  const Floats low_, high_;
#else
  explicit Table4Codes(const float* table) : table_(table) {}

  VLLM_INLINE Floats value(Words code) const {
    Floats v;
    for (int i = 0; i < kWidth; ++i) v[i] = table_[code[i] & 15u];
    return v;
  }
  const float* const table_;
#endif

  VLLM_INLINE void values(const uint8_t* p, Floats& first, Floats& second) const {
    const Words pairs = widen_bytes(p);
    first = value(pairs);
    second = value(pairs >> 4);
  }
};

VLLM_INLINE Floats load_scales(const void* scales, int64_t dtype, int64_t i) {
  if (dtype == kFloat32) return load(static_cast<const float*>(scales) + i);
  if (dtype == kBFloat16) return load(static_cast<const BFloat16*>(scales) + i);
  return load(static_cast<const Float16*>(scales) + i);
}

VLLM_INLINE Floats load_zeros(const int8_t* zeros) {
  return to_floats((Ints)(widen_bytes(reinterpret_cast<const uint8_t*>(zeros)) << 24) >> 24);
}

template <class Math, class Codes>
class PackedPanel {
 public:
  using T = typename Math::Element;
  static constexpr int kPer = Math::kPerCell;

  PackedPanel(const PackedWeight& weight, int64_t number, const ProductArgs& args)
      : weight_(weight),
        columns_(std::min(args.columns - number * kColumns, kColumns)),
        groups_(number * weight.groups * kColumns),
        codes_(weight.codes + number * ((args.n + 1) / 2) * kRowBytes),
        unpack_(weight.table) {}

  int64_t columns() const { return columns_; }

  // Cells [first, first + steps) as [steps][kColumns]; first is even where cells are terms.
  const Cell* round(int64_t first, int64_t steps, Cell* buffer) const {
    const int64_t begin = first * kPer / 2, end = ((first + steps) * kPer + 1) / 2;
    for (int64_t at = begin; at < end;) {
      const int64_t group = 2 * at / weight_.group_size;
      const int64_t until = std::min(end, (group + 1) * weight_.group_size / 2);
      const int64_t stop = group + 1 >= weight_.groups ? end : until;
      const uint8_t* codes = codes_ + at * kRowBytes;
      Cell* cells = buffer + (at - begin) * (2 / kPer) * kColumns;
      for (int64_t j = 0; j < kColumns; j += kAtOnce * kWidth) {
        const int64_t i = groups_ + group * kColumns + j;
        if (weight_.zeros == nullptr) {
          unpack<false>(codes + j * Codes::kBytes, stop - at, i, cells + j);
        } else {
          unpack<true>(codes + j * Codes::kBytes, stop - at, i, cells + j);
        }
      }
      at = stop;
    }
    return buffer;
  }

  // What the round of `steps` cells after cell `end` reads, this panel's or the next one's.
  Ahead ahead(int64_t end, int64_t steps, int64_t) const {
    const int64_t lines = steps * kPer / 2 * kRowBytes / kLine;
    const uint8_t* next = codes_ + (end * kPer + 1) / 2 * kRowBytes;
    return {reinterpret_cast<const char*>(next), lines, 0, uint64_t(lines), 0};
  }

 private:
  static constexpr int64_t kRowBytes = kColumns * Codes::kBytes;  // of a pair of terms

  // Vectors whose scales and zeros stay in registers.
  static constexpr int kAtOnce = kWidth == 16 ? 4 : 2;

  template <bool has_zeros>
  VLLM_INLINE void unpack(const uint8_t* codes, int64_t pairs, int64_t group, Cell* cells) const {
    const Codes unpacked = unpack_;  // no store can change it
    Floats scale[kAtOnce], zero[kAtOnce];
    for (int v = 0; v < kAtOnce; ++v) {
      const int64_t i = group + v * kWidth;
      scale[v] = load_scales(weight_.scales, weight_.scale_dtype, i) * splat(Codes::kFactor);
      zero[v] = has_zeros ? load_zeros(weight_.zeros + i) : Floats{};
    }
    for (int64_t s = 0; s < pairs; ++s, codes += kRowBytes, cells += 2 / kPer * kColumns) {
#pragma GCC unroll 4
      for (int v = 0; v < kAtOnce; ++v) {
        Floats first, second;
        unpacked.values(codes + v * kWidth * Codes::kBytes, first, second);
        if constexpr (has_zeros) first = first - zero[v], second = second - zero[v];
        first = first * scale[v];
        second = second * scale[v];
        if constexpr (kPer == 2) {
          store_cells(cells + v * kWidth, Math::stacked_cells(first, second));
        } else {
          store_cells(cells + v * kWidth, rounded_to<T>(first));
          store_cells(cells + kColumns + v * kWidth, rounded_to<T>(second));
        }
      }
    }
  }

  const PackedWeight& weight_;
  const int64_t columns_, groups_;
  const uint8_t* const codes_;
  const Codes unpack_;
};

CodeKind kind_of(const Tensor& codes) {
  using torch::headeronly::ScalarType;
  switch (codes.scalar_type()) {
    case ScalarType::Char: return kInt8;
    case ScalarType::Float8_e4m3fn: return kFloat8;
    default: return kTable4;
  }
}

template <class Math, class Codes>
Status multiply(const ProductArgs& args, const PackedWeight& weight) {
  return Product<Math, PackedPanel<Math, Codes>, PackedWeight>(args, weight).run();
}

void packed_linear(const Tensor& x, const Tensor& codes, const MaybeTensor& table,
                   const Tensor& scales, const MaybeTensor& zeros, int64_t group_size,
                   const MaybeTensor& bias, const Tensor& out) {
  const PackedWeight weight{static_cast<const uint8_t*>(codes.data_ptr()),
                            static_cast<const float*>(data_of(table)),
                            scales.data_ptr(),
                            dtype_of(scales),
                            static_cast<const int8_t*>(data_of(zeros)),
                            group_size,
                            scales.size(1)};
  const ProductArgs args = product_args(x, bias, out);
  const CodeKind kind = kind_of(codes);
  check(with_math(args.dtype,
                  [&](auto math) {
                    using Math = decltype(math);
                    if (kind == kInt8) return multiply<Math, Int8Codes>(args, weight);
                    if (kind == kFloat8) return multiply<Math, Float8Codes>(args, weight);
                    return multiply<Math, Table4Codes>(args, weight);
                  }),
        "packed_linear");
}

}  // namespace

VLLM_OPERATION(packed_linear)

}  // namespace vllm
