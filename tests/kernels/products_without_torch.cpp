// Products of csrc/cpu against their documented order of sums, term by term and bit by bit, and
// rows among few and many others. No call of it reaches torch, so that it runs under an emulator
// of another CPU: prints a line a weight and returns whether all are right.
#include "product.h"

#undef VLLM_OPERATION
#define VLLM_OPERATION(name)
#include "linear.cpp"
#include "packed_linear.cpp"

#include <cmath>
#include <cstdio>
#include <random>

namespace vllm {
namespace {

constexpr int64_t kRowsOfAll = 64, kWidths[] = {70, 600, 1030}, kOutputs = 130, kGroup = 40;

std::mt19937 generator(1);
float random_float() { return std::normal_distribution<float>()(generator); }

template <class T>
T stored(float value);
template <>
float stored<float>(float value) { return value; }
template <>
BFloat16 stored<BFloat16>(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return {uint16_t((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
}
template <>
Float16 stored<Float16>(float value) { return {float_to_half(value)}; }

// As the vectors of the library round it.
template <class T>
float rounded(float value) { return to_float(stored<T>(value)); }

template <class T>
struct Inputs {
  int64_t n;
  std::vector<T> x;
  explicit Inputs(int64_t width) : n(width), x(size_t(kRowsOfAll * width)) {
    for (T& value : x) value = stored<T>(random_float());
  }
};

// multiply(args) of 1, 2, 7 and 64 rows, on one and two threads; expected(row, column) of each.
template <class T, class Multiply, class Expected>
bool is_right(const char* name, const Inputs<T>& inputs, int64_t dtype, const Multiply& multiply,
              const Expected& expected) {
  int64_t wrong = 0;
  std::vector<T> right(size_t(kRowsOfAll * kOutputs));
  for (int64_t i = 0; i < kRowsOfAll * kOutputs; ++i) {
    right[size_t(i)] = stored<T>(expected(i / kOutputs, i % kOutputs));
  }
  for (int64_t threads : {1, 2}) {
    for (int64_t rows : {1, 2, 7, 64}) {
      for (int64_t first : {int64_t(0), kRowsOfAll - rows}) {
        std::vector<T> out(size_t(rows * kOutputs));
        const ProductArgs args{dtype, threads, inputs.x.data() + first * inputs.n, rows, inputs.n,
                               inputs.n, kOutputs, nullptr, out.data(), kOutputs};
        if (multiply(args) != kOk) ++wrong;
        wrong += std::memcmp(out.data(), right.data() + first * kOutputs, out.size() * sizeof(T)) != 0;
      }
    }
  }
  std::printf("%s of %d terms: %s\n", name, int(inputs.n), wrong == 0 ? "right" : "WRONG");
  return wrong == 0;
}

template <class T>
bool floats_are_right(const char* name, int64_t dtype, int64_t n) {
  const Inputs<T> inputs(n);
  std::vector<T> weight(size_t(kOutputs * n));
  for (T& value : weight) value = stored<T>(random_float());
  const auto expected = [&](int64_t row, int64_t column) {
    const int64_t block = terms_of_a_block<FloatCells>(n);
    float total = 0.0f;
    for (int64_t begin = 0; begin < n; begin += block) {
      float sum = 0.0f;
      for (int64_t i = begin; i < std::min(begin + block, n); ++i) {
        sum = std::fma(to_float(inputs.x[size_t(row * n + i)]),
                       to_float(weight[size_t(column * n + i)]), sum);
      }
      total = begin == 0 ? sum : total + sum;
    }
    return total;
  };
  // As it is, and as panels.
  constexpr int kPairs = kPaired<T>;
  const int64_t padded = round_up(n, kPairs);
  std::vector<T> panels(size_t(round_up(kOutputs, kColumns) * padded));
  for (int64_t j = 0; j < kOutputs; ++j) {
    for (int64_t i = 0; i < n; ++i) {
      const int64_t pair = (j / kColumns * padded + i / kPairs * kPairs) * kColumns;
      panels[size_t(pair + j % kColumns * kPairs + i % kPairs)] = weight[size_t(j * n + i)];
    }
  }
  bool right = true;
  for (bool is_panels : {false, true}) {
    const FloatWeight floats{is_panels ? panels.data() : weight.data(), is_panels, n};
    right &= is_right<T>(name, inputs, dtype, [&](const ProductArgs& args) {
      using Math = FloatMath<T>;
      return Product<Math, FloatPanel<Math>, FloatWeight>(args, floats).run();
    }, expected);
  }
  return right;
}

// bits: of a code. Codes are whole numbers, 4 bits: less 8; scales are by group.
template <class T, class Source>
bool codes_are_right(const char* name, int64_t dtype, int64_t n, int bits) {
  const Inputs<T> inputs(n);
  const int64_t terms = Source::kTerms, chunks = (n + terms - 1) / terms;
  const int64_t groups = (n + kGroup - 1) / kGroup, blocks = (kOutputs + kColumns - 1) / kColumns;
  std::vector<uint8_t> codes(size_t(blocks * chunks * kColumns * Source::kBytes + 4096));
  std::vector<int> values(size_t(kOutputs * n));
  std::vector<float> scales(size_t(blocks * groups * kColumns));
  for (float& scale : scales) scale = random_float();
  float table[16];
  for (int i = 0; i < 16; ++i) table[i] = float(i - 8);
  for (int64_t j = 0; j < kOutputs; ++j) {
    for (int64_t i = 0; i < n; ++i) {
      const int value = int(generator() % (1u << bits)) - (1 << (bits - 1));
      values[size_t(j * n + i)] = value;
      const int64_t chunk = (j / kColumns * chunks + i / terms) * kColumns + j % kColumns;
      const int64_t term = i % terms;
      uint8_t* p = codes.data() + chunk * Source::kBytes;
      if (bits == 8) {
        p[term] = uint8_t(value);
      } else {
        p[term % 2 * 2 + term / 4] |= uint8_t((value + 8) << (term / 2 % 2 * 4));
      }
    }
  }
  const auto expected = [&](int64_t row, int64_t column) {
    float total = 0.0f;
    for (int64_t group = 0; group < groups; ++group) {
      float sum = 0.0f;
      for (int64_t i = group * kGroup; i < std::min((group + 1) * kGroup, n); ++i) {
        sum = std::fma(to_float(inputs.x[size_t(row * n + i)]), float(values[size_t(column * n + i)]),
                       sum);
      }
      const int64_t at = (column / kColumns * groups + group) * kColumns + column % kColumns;
      total = std::fma(sum, scales[size_t(at)], total);
    }
    return total;
  };
  const PackedWeight weight{codes.data(), table, scales.data(), kFloatScale,
                            nullptr, nullptr, kGroup, groups, nullptr, 0};
  return is_right<T>(name, inputs, dtype, [&](const ProductArgs& args) {
    return multiply<FloatMath<T>, Source>(args, weight);
  }, expected);
}

template <class T>
bool all_are_right(const char* name, int64_t dtype) {
  bool right = true;
  for (int64_t n : kWidths) {
    std::printf("%s inputs: ", name);
    right &= floats_are_right<T>("float weights", dtype, n);
    right &= codes_are_right<T, Int8Codes<FloatCells, false>>("int8 weights", dtype, n, 8);
    right &= codes_are_right<T, Table4Codes<FloatCells, false>>("int4 weights", dtype, n, 4);
  }
  return right;
}

}  // namespace
}  // namespace vllm

int main() {
  using namespace vllm;
  bool right = all_are_right<float>("float32", kFloat32);
  right &= all_are_right<BFloat16>("bfloat16", kBFloat16);
  right &= all_are_right<Float16>("float16", kFloat16);
  return right ? 0 : 1;
}
