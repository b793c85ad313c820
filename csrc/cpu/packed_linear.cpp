// Products with weights of 8 and 4 bits, which are unpacked on the way.
//
// A weight is (value(code) - zero) * scale, with one scale for a group of terms. The difference is
// exact in every type of input. Products and their sums are formed with it, block of terms by
// block; a block's sum is multiplied by the scale in float32 and added to the earlier ones with one
// rounding. A block is a group, or 512 or 1,024 terms of a longer group. So no weight is rounded,
// and unpacking costs one look-up. 4-bit codes with 8-bit scales are exact together with their
// scales, and their blocks are as long as a dense weight's.
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "packed_codes.h"

namespace vllm {
namespace {

enum CodeKind : int64_t { kInt8, kFloat8, kTable4 };
enum ScaleKind : int64_t { kFloatScale, kBFloat16Scale, kFloat16Scale, kFloat8Scale, kPowerScale };

constexpr int64_t kFewestTerms = 8;  // fewest terms of a group
constexpr int64_t kFewestItems = 4;  // per thread, for items of several panels; else of one panel

// Whether this is AMD's Zen 5 or later, whose vectors of 512 bits are not computed in halves.
[[gnu::noinline]] bool is_zen5_or_later() {
#if defined(__x86_64__)
  static const bool found = [] {
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (__get_cpuid(0, &a, &b, &c, &d) == 0 || b != signature_AMD_ebx) return false;
    return __get_cpuid(1, &a, &b, &c, &d) != 0 && (a >> 8 & 0xf) + (a >> 20 & 0xff) >= 0x1a;
  }();
  return found;
#else
  return false;
#endif
}

struct PackedWeight {
  const uint8_t* codes;
  const float* table;  // 16 values, for 4-bit codes
  const void* scales;
  ScaleKind scale_kind;
  const float* factors;  // factors of each row's scales; may be null
  const int8_t* zeros;   // may be null
  int64_t group_size, groups;
  const float* x_scales;  // of the inputs, by row and group (or 1 group for all); may be null
  int64_t x_groups;
};

// Cells [begin, end) of one group and block, or the part of them that is in a round.
struct Segment {
  int64_t begin, end, group;
  bool starts, ends;  // whether the segment starts or ends its block
};

constexpr int64_t kMaxSegments = kMostSteps / (kFewestTerms / 2);

// The segments of one panel, or of several side by side: `columns` columns are multiplied together.
struct Segments {
  static constexpr int64_t kMostColumns = kMostPanels * kColumns;
  int64_t count = 0, columns;
  Segment segment[kMaxSegments];
  alignas(64) float scales[kMaxSegments * kMostColumns];
  alignas(64) float factors[kMostColumns];  // ones if the weight has none
  int8_t zeros[kMaxSegments * kMostColumns];  // not set if the weight has none

  // The factors of the sum of the block that ends with segment i.
  template <bool scales_cells>
  const float* of_sum(int64_t i) const { return scales_cells ? factors : scales + i * columns; }
};

// Sums of some rows: of the current block, and of all earlier ones.
struct RowSums {
  float *block, *total;
  const float* x_scales;  // of the first row, or null
  int64_t x_groups;
};

template <class Call>
VLLM_INLINE void with_scales(const PackedWeight& weight, const Call& call) {
  switch (weight.scale_kind) {
    case kFloatScale: return call(static_cast<const float*>(weight.scales));
    case kBFloat16Scale: return call(static_cast<const BFloat16*>(weight.scales));
    case kFloat16Scale: return call(static_cast<const Float16*>(weight.scales));
    case kFloat8Scale: return call(static_cast<const Float8*>(weight.scales));
    case kPowerScale: return call(static_cast<const PowerOfTwo*>(weight.scales));
  }
}

// c[R, V] += cells [begin, end) of R rows of x times the cells of `source` at `p`; the next panel
// is at p + p_stride. each_chunk(cells done, p) is called for each chunk.
template <class Math, int R, int V, class Source, class Data, class EachChunk>
VLLM_INLINE const Data* add_cells(Floats (&c)[R][V], const Cell* x, int64_t x_stride,
                                  const Source& source, const Data* p, int64_t p_stride,
                                  int64_t begin, int64_t end, const EachChunk& each_chunk) {
  constexpr int kAtOnce = std::max(int(Source::kTerms) / Math::kPerCell, 1);
  constexpr int64_t kChunk = kColumns * Source::kBytes / int64_t(sizeof(Data));
  // Two pointers and a stride address six rows; one pointer per row would leave no registers.
  const Cell *low = x + begin, *high = low + 3 * x_stride;
  decltype(Source::hold(p)) held[V];
  const auto hold = [&]() VLLM_LAMBDA {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      const Data* panel = v < kPanelVectors ? p : p + p_stride;
      held[v] = Source::hold(panel + v % kPanelVectors * (kChunk / kPanelVectors));
    }
  };
  const auto step = [&](int k) VLLM_LAMBDA {
    Floats cells[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) cells[v] = source.cells(held[v], k, v);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      float cell;
      std::memcpy(&cell, (r < 3 ? low + r * x_stride : high + (r - 3) * x_stride) + k, sizeof cell);
      const Floats left = splat(cell);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) c[r][v] = Math::step(left, cells[v], c[r][v]);
    }
  };
  int64_t left = end - begin;
  for (; left >= kAtOnce; left -= kAtOnce) {
    each_chunk(kAtOnce, p);
    hold();
#pragma GCC unroll 8
    for (int k = 0; k < kAtOnce; ++k) step(k);
    low += kAtOnce;
    high += kAtOnce;
    p += kChunk;
  }
  if (left > 0) hold();
  for (int k = 0; k < left; ++k) step(k);  // the last chunk of a row
  return p;
}

// totals += c * scales, also times the scales of the inputs, if there are any.
template <class Math, bool has_x_scales, int R, int V>
VLLM_INLINE void add_to_totals(const Floats (&c)[R][V], const float* scales,
                               const float* x_scales, int64_t x_groups, float* totals) {
  Floats scale[V];
  for (int v = 0; v < V; ++v) scale[v] = load(scales + v * kWidth);
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      float* total = totals + r * kColumns + v * kWidth;
      Floats sum = Math::value(c[r][v]);
      if (has_x_scales) sum = sum * splat(x_scales[r * x_groups]);
      store(total, fma(sum, scale[v], load(total)));
    }
  }
}

// While a round unpacks codes it prefetches the codes of the next one, line by line: into the
// second cache, because two panels' rounds are as large as the first cache. But if unpacking takes
// longer than memory, the latency of the first cache counts. Measured on Zen 4, from memory: INT4,
// a row of 2,048 x 2,048 170 -> 120 us, INT8 603 -> 530; MXFP4 476 -> 508, INT4 by AVX2 635 -> 713.
template <class Source>
constexpr int kAskedCache = kWidth == 16 && !Source::kScalesCells ? 2 : 3;  // 3: the first cache

template <class Source, int lines, int panels>
struct AskForCodes {
  int64_t distance, stride;

  VLLM_INLINE void operator()(int64_t, const uint8_t* p) {
#pragma GCC unroll 8
    for (int i = 0; i < panels * lines; ++i) {
      __builtin_prefetch(p + distance + i / lines * stride + i % lines * kLine, 0,
                         kAskedCache<Source>);
    }
  }
};

// While a round uses unpacked cells it prefetches lines [begin, end) of `ahead`, evenly over the
// steps.
struct AskEvenly {
  static constexpr int kPaceBits = 16;
  const char* next;
  int64_t pace, due = 0;

  AskEvenly(const Ahead& ahead, int64_t begin, int64_t end, int64_t steps)
      : next(ahead.line(uint64_t(ahead.first + begin))), pace(((end - begin) << kPaceBits) / steps) {}

  VLLM_INLINE void operator()(int64_t steps_done, const Cell*) {
    for (due += steps_done * pace; due >= 1 << kPaceBits; due -= 1 << kPaceBits, next += kLine) {
      __builtin_prefetch(next, 0, 3);
    }
  }
};

// Forms the blocks' sums of R rows with the cells that `source` makes of `data`; the next panel is
// p_stride later. Meanwhile `ahead` is prefetched.
template <class Math, bool scales_cells, int R, int panels, class Source, class Data>
void add_segments(const Cell* x, int64_t x_stride, Source source, const Data* data,
                  int64_t p_stride, const Segments& segments, const RowSums& sums,
                  const Ahead& ahead, int64_t steps) {
  constexpr int kFew = std::min(std::max(kMostVectors / R, kTileVectors), kPanelVectors);
  constexpr int kV = panels > 1 ? panels * kPanelVectors : kFew;
  constexpr int kParts = panels * kPanelVectors / kV;
  constexpr int64_t kVectorData = kWidth * Source::kBytes / int64_t(sizeof(Data));
  for (int part = 0; part < kParts; ++part) {
    const int64_t column = part * kV * kWidth;
    const Data* p = data + part * kV * kVectorData;
    auto ask = [&] {
      if constexpr (std::is_same_v<Data, Cell>) {
        return AskEvenly(ahead, ahead.lines * part / kParts, ahead.lines * (part + 1) / kParts, steps);
      } else {
        constexpr int kBytes = kV / panels * kWidth * int(Source::kBytes);
        return AskForCodes<Source, std::max(kBytes / int(kLine), 1), panels>{
            ahead.data - reinterpret_cast<const char*>(data), p_stride};
      }
    }();
    const auto each_chunk = [&](int64_t steps_done, const Data* at) VLLM_LAMBDA { ask(steps_done, at); };
    Floats c[R][kV];
    start_sums<Start::kSums>(c, sums.block + column, kColumns, nullptr);
    for (int64_t i = 0; i < segments.count; ++i) {
      const Segment& segment = segments.segment[i];
      if constexpr (!std::is_same_v<Data, Cell>) {
        const int64_t at = i * segments.columns + column;
        source.template start<kV>(segments.zeros + at, segments.scales + at);
      }
      if (segment.starts) start_sums<Start::kZeros>(c, sums.block, kColumns, nullptr);
      p = add_cells<Math>(c, x, x_stride, source, p, p_stride, segment.begin, segment.end, each_chunk);
      if (!segment.ends) continue;
      const float* scales = segments.of_sum<scales_cells>(i) + column;
      if (sums.x_scales == nullptr) {
        add_to_totals<Math, false>(c, scales, nullptr, 0, sums.total + column);
      } else {
        const float* x_scales = sums.x_scales + (sums.x_groups == 1 ? 0 : segment.group);
        add_to_totals<Math, true>(c, scales, x_scales, sums.x_groups, sums.total + column);
      }
    }
    store_sums(c, sums.block + column, kColumns);
  }
}

template <class Math, class Source>
class PackedPanel {
 public:
  static constexpr int kPer = Math::kPerCell;
  static constexpr bool kScalesCells = Source::kScalesCells;
  static constexpr bool kByTiles = Math::kIsOfTiles;
  static constexpr int64_t kChunkSteps = Source::kTerms / kPer;
  static constexpr int64_t kChunkBytes = Source::kBytes * kColumns;

  // Number of panels that are multiplied together. Several for a lone row give the unpacking of one
  // something to overlap with (measured on Zen 4). Zen 5 is faster without: INT4 of 1,024 x 6,144, two
  // threads, 110 -> 88 us; a step of a model of 0.5 billion parameters 12.9 -> 11.3 ms.
  static int64_t at_once(int64_t rows, int64_t panels, int64_t threads) {
    const bool can_be = !kByTiles && rows == 1 && panels >= kMostPanels * kFewestItems * threads;
    return can_be && !(kWidth == 16 && is_zen5_or_later()) ? kMostPanels : 1;
  }

  // `panels` panels from panel `number` on.
  PackedPanel(const PackedWeight& weight, int64_t number, int64_t panels, const ProductArgs& args)
      : weight_(weight),
        number_(number),
        panels_(panels),
        columns_(std::min(args.columns - number * kColumns, panels * kColumns)),
        cells_((args.n + kPer - 1) / kPer),
        group_cells_(std::max<int64_t>(std::min(weight.group_size, args.n) / kPer, 1)),
        block_cells_(terms_of_a_block<Math>(args.n) / kPer),
        panel_bytes_((args.n + Source::kTerms - 1) / Source::kTerms * kChunkBytes),
        codes_(weight.codes + number * panel_bytes_),
        source_(weight.table) {}

  int64_t columns() const { return columns_; }

  // Sums rows [first, first + rows); x: their cells.
  template <class Finish>
  void sum(const CellRows& x, int64_t first, int64_t rows, Buffers& buffers, const Finish& finish) const {
    std::memset(buffers.totals, 0, size_t(rows * panels_ * kColumns) * sizeof(float));
    Segments segments;
    segments.columns = panels_ * kColumns;
    for (int64_t j = 0; j < segments.columns; j += kWidth) {
      const float* factors = weight_.factors == nullptr ? nullptr : weight_.factors + number_ * kColumns;
      store(segments.factors + j, factors == nullptr ? splat(1.0f) : load(factors + j));
    }
    // Stored cells should stay in the first cache until tiles read them.
    const int64_t steps = kByTiles && rows <= kFewRows ? kFewSteps : kSteps<Math>;
    for (int64_t begin = 0; begin < cells_;) {
      const int64_t end = std::min(begin + steps, cells_);
      cut(begin, end, segments);
      const Ahead ahead = next_round(end, steps);
      const RowSums sums{buffers.sums, buffers.totals, scales_of_row(first), weight_.x_groups};
#if defined(__AMX_BF16__)
      if constexpr (kByTiles) {
        unpack(begin, segments, buffers.weights);
        add_tile_groups(x, rows, begin, buffers.weights, segments, sums);
      } else
#endif
      if (rows <= Source::kUnpackingRows) {
        unpack_and_add(x, rows, chunk(begin), end - begin, segments, sums, ahead);
      } else {
        unpack(begin, segments, buffers.weights);
        add_groups(x, rows, buffers.weights, end - begin, segments, sums, ahead);
      }
      begin = end;
    }
    finish(0, rows);
  }

 private:
  template <int R, class From, class Data, int panels = 1>
  static constexpr auto kAddSegments = add_segments<Math, kScalesCells, R, panels, From, Data>;
  static constexpr auto kOfPanels = kAddSegments<1, Source, uint8_t, int(kMostPanels)>;
  static constexpr decltype(kAddSegments<1, Source, uint8_t>) kUnpackAndAdd[] = {
      kAddSegments<1, Source, uint8_t>, kAddSegments<2, Source, uint8_t>,
      kAddSegments<3, Source, uint8_t>, kAddSegments<4, Source, uint8_t>,
#if defined(__AVX512F__)
      kAddSegments<5, Source, uint8_t>, kAddSegments<6, Source, uint8_t>,
#endif
  };
  static_assert(sizeof kUnpackAndAdd / sizeof kUnpackAndAdd[0] == kUnpackedGroup, "one a number of rows");
  static constexpr decltype(kAddSegments<1, ReadyCells, Cell>) kAdd[] = {
      kAddSegments<1, ReadyCells, Cell>, kAddSegments<2, ReadyCells, Cell>,
      kAddSegments<3, ReadyCells, Cell>, kAddSegments<4, ReadyCells, Cell>,
#if defined(__AVX2__)
      kAddSegments<5, ReadyCells, Cell>, kAddSegments<6, ReadyCells, Cell>,
#endif
  };
  static_assert(sizeof kAdd / sizeof kAdd[0] == kGroupRows, "one a number of rows");

  const uint8_t* chunk(int64_t cell) const { return codes_ + cell / kChunkSteps * kChunkBytes; }

  const float* scales_of_row(int64_t row) const {
    return weight_.x_scales == nullptr ? nullptr : weight_.x_scales + row * weight_.x_groups;
  }

  // Cuts cells [begin, end) into segments, with their scales.
  void cut(int64_t begin, int64_t end, Segments& segments) const {
    segments.count = 0;
    while (begin < end) {
      const int64_t group = std::min(begin / group_cells_, weight_.groups - 1);
      const int64_t group_begin = group * group_cells_;
      const int64_t group_end = group + 1 == weight_.groups ? cells_ : group_begin + group_cells_;
      const int64_t block_begin = kScalesCells ? 0 : group_begin;
      const int64_t in_block = (begin - block_begin) % block_cells_;
      const int64_t block_end =
          std::min(begin - in_block + block_cells_, kScalesCells ? cells_ : group_end);
      const int64_t until = std::min({block_end, group_end, end});
      const int64_t i = segments.count++;
      segments.segment[i] = {begin, until, group, in_block == 0, until == block_end};
      take_scales(group, i, segments);
      begin = until;
    }
  }

  // Copies the scales and zeros of segment i, and prefetches those of the group in the next panels.
  void take_scales(int64_t group, int64_t i, Segments& segments) const {
    const int64_t next = panels_ * weight_.groups * kColumns;
    with_scales(weight_, [&](const auto* scales) VLLM_LAMBDA {
      for (int64_t panel = 0; panel < panels_; ++panel) {
        const int64_t from = ((number_ + panel) * weight_.groups + group) * kColumns;
        const int64_t column = panel * kColumns, to = i * segments.columns + column;
#pragma GCC unroll 4
        for (int64_t j = 0; j < kColumns; j += kWidth) {
          __builtin_prefetch(scales + from + j + next, 0, 2);
          Floats scale = load(scales + from + j) * splat(Source::kFactor);
          if (!kScalesCells) scale = scale * load(segments.factors + column + j);
          store(segments.scales + to + j, scale);
        }
        if (weight_.zeros == nullptr) continue;
        __builtin_prefetch(weight_.zeros + from + next, 0, 2);
        std::memcpy(segments.zeros + to, weight_.zeros + from, kColumns);
      }
    });
  }

  // Unpacks all cells of the segments, as [steps][kColumns].
  void unpack(int64_t first, const Segments& segments, Cell* cells) const {
    Source source = source_;
    for (int64_t i = 0; i < segments.count; ++i) {
      const Segment& segment = segments.segment[i];
      for (int64_t j = 0; j < kColumns; j += kTileVectors * kWidth) {
        source.template start<kTileVectors>(segments.zeros + i * kColumns + j,
                                            segments.scales + i * kColumns + j);
        Cell* out = cells + (segment.begin - first) * kColumns + j;
        const uint8_t* p = chunk(segment.begin) + j * Source::kBytes;
        // The last chunk may be written beyond the end of the row, but inside the round.
        for (int64_t s = segment.begin; s < segment.end; s += kChunkSteps, p += kChunkBytes) {
#pragma GCC unroll 4
          for (int v = 0; v < kTileVectors; ++v) {
            const auto held = Source::hold(p + v * kWidth * Source::kBytes);
#pragma GCC unroll 8
            for (int k = 0; k < kChunkSteps; ++k) {
              store_cells(out + k * kColumns + v * kWidth, source.cells(held, k, v));
            }
          }
          out += kChunkSteps * kColumns;
        }
      }
    }
  }

  // Each group of rows unpacks all cells.
  void unpack_and_add(const CellRows& x, int64_t rows, const uint8_t* codes, int64_t steps,
                      const Segments& segments, const RowSums& sums, const Ahead& ahead) const {
    const int64_t groups = (rows + kUnpackedGroup - 1) / kUnpackedGroup;
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t begin = rows * g / groups, end = rows * (g + 1) / groups;
      const auto add = panels_ == 1 ? kUnpackAndAdd[end - begin - 1] : kOfPanels;
      add(x.data + begin * x.stride, x.stride, source_, codes, panel_bytes_, segments,
          rows_from(sums, begin), ahead, steps);
    }
  }

  static RowSums rows_from(const RowSums& sums, int64_t row) {
    return {sums.block + row * kColumns, sums.total + row * kColumns,
            sums.x_scales == nullptr ? nullptr : sums.x_scales + row * sums.x_groups,
            sums.x_groups};
  }

  void add_groups(const CellRows& x, int64_t rows, const Cell* cells, int64_t steps,
                  const Segments& segments, const RowSums& sums, const Ahead& ahead) const {
    const int64_t groups = (rows + kGroupRows - 1) / kGroupRows;
    Ahead share = ahead;
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t begin = rows * g / groups, end = rows * (g + 1) / groups;
      share.first = ahead.lines * begin / rows;
      share.lines = ahead.lines * end / rows - share.first;
      kAdd[end - begin - 1](x.data + begin * x.stride, x.stride, ReadyCells{}, cells, 0, segments,
                            rows_from(sums, begin), share, steps);
    }
  }

#if defined(__AMX_BF16__)
  // The same by tiles.
  void add_tile_groups(const CellRows& x, int64_t rows, int64_t first, const Cell* cells,
                       const Segments& segments, const RowSums& sums) const {
    for_groups_of_tiles(rows, [&](int64_t begin, int64_t count) {
      float* block = sums.block + begin * kColumns;
      for (int64_t i = 0; i < segments.count; ++i) {
        const Segment& segment = segments.segment[i];
        add_tiles(x.data + begin * x.stride + segment.begin, x.stride, count,
                  cells + (segment.begin - first) * kColumns, kColumns,
                  segment.end - segment.begin, segment.starts, block, kColumns, kColumns);
        if (!segment.ends) continue;
        const float* scales = segments.of_sum<kScalesCells>(i);
        const int64_t group = sums.x_groups == 1 ? 0 : segment.group;
        for (int64_t r = begin; r < begin + count; ++r) {
          Floats c[1][kPanelVectors];
          float* total = sums.total + r * kColumns;
          start_sums<Start::kSums>(c, sums.block + r * kColumns, kColumns, nullptr);
          if (sums.x_scales == nullptr) {
            add_to_totals<Math, false>(c, scales, nullptr, 0, total);
          } else {
            add_to_totals<Math, true>(c, scales, sums.x_scales + r * sums.x_groups + group, 0, total);
          }
        }
      }
    });
  }
#endif

  // The codes that the round after cell `end` reads, of this panel or the next ones.
  Ahead next_round(int64_t end, int64_t steps) const {
    const int64_t lines = steps / kChunkSteps * kChunkBytes / kLine;
    const uint8_t* data = end < cells_ ? chunk(end) : codes_ + panels_ * panel_bytes_;
    return {reinterpret_cast<const char*>(data), lines};
  }

  const PackedWeight& weight_;
  const int64_t number_, panels_, columns_, cells_, group_cells_, block_cells_, panel_bytes_;
  const uint8_t* const codes_;
  const Source source_;
};

CodeKind kind_of(const Tensor& codes) {
  switch (codes.dtype()) {
    case kSigned8: return kInt8;
    case kFloat8E4M3: return kFloat8;
    default: return kTable4;
  }
}

ScaleKind scale_kind_of(const Tensor& scales) {
  switch (scales.dtype()) {
    case kFloat8E4M3: return kFloat8Scale;
    case kFloat8E8M0: return kPowerScale;
    default: return ScaleKind(dtype_of(scales));
  }
}

template <class Math, class Source>
Status multiply(const ProductArgs& args, const PackedWeight& weight) {
  return Product<Math, PackedPanel<typename Math::Cells, Source>, PackedWeight>(args, weight).run();
}

template <class Math>
Status multiply_int8(const ProductArgs& args, const PackedWeight& weight) {
  using Cells = typename Math::Cells;
  return weight.zeros == nullptr ? multiply<Math, Int8Codes<Cells, false>>(args, weight)
                                 : multiply<Math, Int8Codes<Cells, true>>(args, weight);
}

// Calls call(Math()) for the products of integer inputs with int8 codes.
template <class Call>
VLLM_INLINE Status with_whole_math(int64_t dtype, const Call& call) {
#if defined(__AVX512VNNI__)
  return with_dtype(dtype, [&](auto type) { return call(WholeMath<decltype(type)>()); });
#else
  return with_tile_math(dtype, call);
#endif
}

void packed_linear(const Tensor& x, const Tensor& codes, const MaybeTensor& table,
                   const Tensor& scales, const MaybeTensor& factors, const MaybeTensor& zeros,
                   int64_t group_size, const MaybeTensor& x_scales, bool x_is_whole,
                   const MaybeTensor& bias, const Tensor& out) {
  const PackedWeight weight{static_cast<const uint8_t*>(codes.data_ptr()),
                            static_cast<const float*>(data_of(table)),
                            scales.data_ptr(),
                            scale_kind_of(scales),
                            static_cast<const float*>(data_of(factors)),
                            static_cast<const int8_t*>(data_of(zeros)),
                            group_size,
                            scales.size(1),
                            static_cast<const float*>(data_of(x_scales)),
                            x_scales ? x_scales->size(1) : 0};
  const ProductArgs args = product_args(x, bias, out);
  if (group_size < std::min(kFewestTerms, args.n)) check(kBadCall, "packed_linear");
  const CodeKind kind = kind_of(codes);
  if (kind == kInt8) {
    const auto run = [&](auto math) { return multiply_int8<decltype(math)>(args, weight); };
    return check(x_is_whole ? with_whole_math(args.dtype, run) : with_tile_math(args.dtype, run),
                 "packed_linear");
  }
  const bool has_zeros = weight.zeros != nullptr;
  check(with_tile_math(args.dtype,
                  [&](auto math) {
                    using Math = decltype(math);
                    using Cells = typename Math::Cells;
                    if (kind == kFloat8) return multiply<Math, Float8Codes<Cells>>(args, weight);
                    if (!has_zeros && weight.scale_kind >= kFloat8Scale) {
                      return multiply<Math, ScaledTable4Codes<Cells>>(args, weight);
                    }
                    if constexpr (kWidth == 8) {
                      using Zeros = Whole4Codes<Cells, true>;
                      using NoZeros = Whole4Codes<Cells, false>;
                      if (has_zeros && Zeros::takes(weight.table)) return multiply<Math, Zeros>(args, weight);
                      if (!has_zeros && NoZeros::takes(weight.table)) return multiply<Math, NoZeros>(args, weight);
                    }
                    return has_zeros ? multiply<Math, Table4Codes<Cells, true>>(args, weight)
                                     : multiply<Math, Table4Codes<Cells, false>>(args, weight);
                  }),
        "packed_linear");
}

}  // namespace

VLLM_OPERATION(packed_linear)

}  // namespace vllm
