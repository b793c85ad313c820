// Functions of single elements, or of an element and a later one of its row.
#pragma once

#include "operation.h"
#include "vec_math.h"

namespace vllm {

// out[rows, n] = f(x, x from column `second` on) by rows; x strided. work: operations per vector.
template <class F>
void map_rows(const Tensor& x, int64_t second, const Tensor& out, int64_t work,
              const char* operation, const F& f) {
  const int64_t rows = out.size(0), n = out.size(1), stride = x.stride(0);
  const auto run = [&](auto type) {
    using T = decltype(type);
    parallel_ranges(num_threads(), rows, work * n / kWidth + 1, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const T* in = data_of<const T>(x) + row * stride;
        map(in, in + second, data_of<T>(out) + row * n, n, {stride, stride, n}, f);
      }
    });
    return kOk;
  };
  check(with_dtype(dtype_of(x), run), operation);
}

}  // namespace vllm
