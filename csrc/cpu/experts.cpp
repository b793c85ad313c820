// Mixtures of experts: the choice of experts, the order of pairs, and the sum of outputs.
#include <algorithm>
#include <utility>

#include "operation.h"
#include "vec_math.h"

namespace vllm {
namespace {

struct ChoiceArgs {
  int64_t tokens, experts, ranks;
  const float* logits;      // [tokens, experts]
  const float* correction;  // [experts], or null
  bool by_sigmoid, renormalise;
  int64_t groups, groups_kept, group_best;
  float scaling;
  float* weights;   // [tokens, ranks]
  int64_t* chosen;  // the same
};

// Softmax of a row, or the sigmoid of each logit.
void make_scores(const float* logits, int64_t n, bool by_sigmoid, float* scores) {
  if (by_sigmoid) {
    for_each_vector(
        n, [&](int64_t i) VLLM_LAMBDA { store(scores + i, sigmoid<float>(load(logits + i))); },
        [&](int64_t i, int64_t m) VLLM_LAMBDA {
          store_first(scores + i, sigmoid<float>(load_first(logits + i, m)), m);
        });
    return;
  }
  float most = logits[0], sum = 0.0f;
  for (int64_t i = 1; i < n; ++i) most = logits[i] > most ? logits[i] : most;
  for_each_vector(
      n, [&](int64_t i) VLLM_LAMBDA { store(scores + i, exp(load(logits + i) - splat(most))); },
      [&](int64_t i, int64_t m) VLLM_LAMBDA {
        store_first(scores + i, exp(load_first(logits + i, m) - splat(most)), m);
      });
  for (int64_t i = 0; i < n; ++i) sum += scores[i];
  for (int64_t i = 0; i < n; ++i) scores[i] /= sum;
}

// The best values so far, best first; the first of equal ones wins.
struct Best {
  float* values;
  int64_t* indices;
  int64_t most, count = 0;

  VLLM_INLINE void offer(float value, int64_t index) {
    if (count == most && !(value > values[count - 1])) return;
    int64_t place = count < most ? count++ : count - 1;
    for (; place > 0 && value > values[place - 1]; --place) {
      values[place] = values[place - 1], indices[place] = indices[place - 1];
    }
    values[place] = value, indices[place] = index;
  }
};

// Memory of one thread.
struct ChoiceRows {
  std::vector<float> scores, ranked, values;
  std::vector<int64_t> groups;
};

void choose(const ChoiceArgs& args, int64_t token, ChoiceRows& rows) {
  const int64_t n = args.experts, size = n / args.groups;
  const float* logits = args.logits + token * n;
  make_scores(logits, n, args.by_sigmoid, rows.scores.data());
  const float* ranked = logits;
  if (args.correction != nullptr || args.groups > 1) {
    for (int64_t i = 0; i < n; ++i) {
      rows.ranked[i] = rows.scores[i] + (args.correction == nullptr ? 0.0f : args.correction[i]);
    }
    ranked = rows.ranked.data();
  }
  std::vector<int64_t>& groups = rows.groups;
  groups.assign(size_t(args.groups), 0);  // 1: the group takes part
  if (args.groups == 1) {
    groups[0] = 1;
  } else {
    std::vector<int64_t> kept(size_t(args.groups_kept), 0);
    std::vector<float> sums(size_t(args.groups_kept), 0.0f);
    Best best{sums.data(), kept.data(), args.groups_kept};
    std::vector<float> values(size_t(args.group_best), 0.0f);
    std::vector<int64_t> places(size_t(args.group_best), 0);
    for (int64_t g = 0; g < args.groups; ++g) {
      Best own{values.data(), places.data(), args.group_best};
      for (int64_t i = 0; i < size; ++i) own.offer(ranked[g * size + i], i);
      float sum = 0.0f;
      for (int64_t i = 0; i < own.count; ++i) sum += own.values[i];
      best.offer(sum, g);
    }
    for (const int64_t g : kept) groups[size_t(g)] = 1;
  }
  int64_t* chosen = args.chosen + token * args.ranks;
  float* weights = args.weights + token * args.ranks;
  Best best{rows.values.data(), chosen, args.ranks};
  for (int64_t i = 0; i < n; ++i) {
    if (groups[size_t(i / size)] != 0) best.offer(ranked[i], i);
  }
  float total = 0.0f;
  for (int64_t rank = 0; rank < args.ranks; ++rank) {
    weights[rank] = rows.scores[size_t(chosen[rank])];
    total += weights[rank];
  }
  for (int64_t rank = 0; rank < args.ranks; ++rank) {
    if (args.renormalise) weights[rank] /= total;
    weights[rank] *= args.scaling;
  }
}

void choose_experts(const Tensor& logits, const MaybeTensor& correction, bool by_sigmoid,
                    int64_t num_groups, int64_t num_groups_kept, int64_t group_best,
                    bool renormalise, double scaling, const Tensor& weights,
                    const Tensor& experts) {
  const ChoiceArgs args{logits.size(0),
                        logits.size(1),
                        experts.size(1),
                        data_of<const float>(logits),
                        static_cast<const float*>(data_of(correction)),
                        by_sigmoid,
                        renormalise,
                        num_groups,
                        num_groups_kept,
                        group_best,
                        float(scaling),
                        data_of<float>(weights),
                        data_of<int64_t>(experts)};
  const int64_t work = 4 * args.experts;
  parallel_ranges(num_threads(), args.tokens, work, [&](int64_t begin, int64_t end) {
    const auto n = size_t(args.experts);
    ChoiceRows rows{std::vector<float>(n), std::vector<float>(n),
                    std::vector<float>(size_t(args.ranks)), {}};
    for (int64_t token = begin; token < end; ++token) choose(args, token, rows);
  });
}

// A counting sort: pairs of one expert keep their order.
void sort_pairs(const Tensor& experts, const Tensor& tokens, const Tensor& starts,
                const Tensor& places) {
  const int64_t pairs = tokens.size(0), ranks = experts.size(1), bounds = starts.size(0);
  const auto* chosen = data_of<const int64_t>(experts);
  constexpr int64_t kMostExperts = 1 << 20;
  int64_t count = bounds;
  Status status = kOk;
  for (int64_t i = 0; i < pairs; ++i) {
    if (chosen[i] < 0 || chosen[i] >= kMostExperts) status = kBadIndex;
    count = std::max(count, chosen[i] + 1);
  }
  check(status, "sort_pairs");
  std::vector<int64_t> next(size_t(count), 0);  // the place of the next pair of each expert
  for (int64_t i = 0; i < pairs; ++i) ++next[size_t(chosen[i])];
  int64_t place = 0;
  for (int64_t& each : next) place += std::exchange(each, place);
  std::copy_n(next.begin(), bounds, data_of<int64_t>(starts));
  for (int64_t i = 0; i < pairs; ++i) {
    const int64_t here = next[size_t(chosen[i])]++;
    data_of<int64_t>(tokens)[here] = i / ranks;
    data_of<int64_t>(places)[i] = here;
  }
}

struct CombineArgs {
  int64_t tokens, ranks, n, pairs, stride;
  const int64_t* places;
  const float* weights;
  const void* outputs;
  const void* shared;  // may be null
  int64_t shared_stride;
  const float* shared_weights;  // may be null
  void* out;
};

// Sums elements [i, i + kWidth) of a token; `put` stores those that exist. The shared output comes
// first, then the ranks in order. Every product and every sum is rounded separately.
template <class T, class Get, class Put>
VLLM_INLINE void combine(const CombineArgs& args, int64_t token, int64_t i, const Get& get,
                         const Put& put) {
  Floats total{};
  if (args.shared != nullptr) {
    total = get(static_cast<const T*>(args.shared) + token * args.shared_stride + i);
    if (args.shared_weights != nullptr) total = total * splat(args.shared_weights[token]);
  }
  for (int64_t rank = token * args.ranks; rank < (token + 1) * args.ranks; ++rank) {
    const T* output = static_cast<const T*>(args.outputs) + args.places[rank] * args.stride;
    total = total + splat(args.weights[rank]) * get(output + i);
  }
  put(static_cast<T*>(args.out) + token * args.n + i, total);
}

template <class T>
Status run_combine(const CombineArgs& args) {
  for (int64_t rank = 0; rank < args.tokens * args.ranks; ++rank) {
    if (args.places[rank] < 0 || args.places[rank] >= args.pairs) return kBadIndex;
  }
  const int64_t work = 2 * (args.ranks + 1) * args.n / kWidth + 1;
  parallel_ranges(num_threads(), args.tokens, work, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      for_each_vector(
          args.n,
          [&](int64_t i) VLLM_LAMBDA {
            combine<T>(args, token, i, [](const T* p) VLLM_LAMBDA { return load(p); },
                       [](T* p, Floats v) VLLM_LAMBDA { store(p, v); });
          },
          [&](int64_t i, int64_t m) VLLM_LAMBDA {
            combine<T>(args, token, i, [m](const T* p) VLLM_LAMBDA { return load_first(p, m); },
                       [m](T* p, Floats v) VLLM_LAMBDA { store_first(p, v, m); });
          });
    }
  });
  return kOk;
}

void combine_experts(const Tensor& outputs, const Tensor& places, const Tensor& weights,
                     const MaybeTensor& shared, const MaybeTensor& shared_weights,
                     const Tensor& out) {
  const CombineArgs args{out.size(0),
                         places.size(1),
                         out.size(1),
                         outputs.size(0),
                         outputs.stride(0),
                         data_of<const int64_t>(places),
                         data_of<const float>(weights),
                         outputs.data_ptr(),
                         data_of(shared),
                         shared ? shared->stride(0) : 0,
                         static_cast<const float*>(data_of(shared_weights)),
                         out.data_ptr()};
  check(with_dtype(dtype_of(out), [&](auto type) { return run_combine<decltype(type)>(args); }),
        "combine_experts");
}

}  // namespace

VLLM_OPERATION(choose_experts)
VLLM_OPERATION(sort_pairs)
VLLM_OPERATION(combine_experts)

}  // namespace vllm
