// The fused kernel's pieces in registers: score tile, value tile, weight, transposes. Included
// inside a Highway target, compiled once for each. The arithmetic is fused_kernel.h's contract.
//
// A panel is a few vectors of queries, one query a lane; its arrays are [index][vector][lane]. Keys
// are read as they lie, one broadcast an element; values from where PackValues put them.

// Per-target include guard.
#if defined(ATTENDANT_CORE_FUSED_TILES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ATTENDANT_CORE_FUSED_TILES_INL_H_
#undef ATTENDANT_CORE_FUSED_TILES_INL_H_
#else
#define ATTENDANT_CORE_FUSED_TILES_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numbers>
#include <type_traits>

#include "core/checked_math.h"
#include "core/exp2-inl.h"
#include "core/fused_kernel.h"
#include "core/half-inl.h"
#include "core/problem.h"
#include "core/tensor_view.h"

HWY_BEFORE_NAMESPACE();
namespace attendant::core::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// Register tiles are keys (or dimensions) x vectors of accumulators, beside the vectors they
// multiply and one broadcast. 8 x 2 of AVX-512's 32 registers leave room for the exponential, 4 x 3
// fill AVX2's 16. A block of 192 keys of a panel's weights stays in L1 with either: 24 or 18 KiB.
// Fewer vectors take a tile that still has the 8 chains that hide the latency of a multiply-add.
#if HWY_TARGET == HWY_AVX3
constexpr int kMostVectors = 2;
constexpr int TileKeys(int /*vectors*/) { return 8; }
constexpr int TileStrips(int /*vectors*/) { return 2; }
#else
constexpr int kMostVectors = 3;
constexpr int TileKeys(int vectors) { return vectors == 1 ? 8 : 4; }
constexpr int TileStrips(int vectors) { return vectors == 1 ? 2 : 1; }
#endif

// Values are packed in strips of so many dimensions: a tile takes one or two of them.
constexpr int kStrip = 4;

// The reference is decided for this many keys at a time: part of the contract, as is how far a
// score may pass it.
constexpr int kDecision = 4;
constexpr int kThreshold = 32;

// 'No key yet'.
template <typename T>
constexpr T NoReference() {
  return sizeof(T) == 4 ? T(-0x1p127) : T(-0x1p1023);
}

template <typename T>
using Tag = hn::ScalableTag<T>;
template <typename T>
using Vec = hn::Vec<Tag<T>>;

template <typename T>
constexpr int64_t LanesOf() {
  return static_cast<int64_t>(hn::MaxLanes(Tag<T>()));
}

// A row, widened.
template <typename S>
HWY_INLINE void WidenRow(const S* from, int64_t n, Wide<S>* to) {
  const Tag<Wide<S>> d;
  int64_t i = 0;
  for (; i + LanesOf<Wide<S>>() <= n; i += LanesOf<Wide<S>>()) {
    hn::StoreU(LoadWide(d, from + i), d, to + i);
  }
  for (; i < n; ++i) to[i] = Widened(from[i]);
}

// The reverse.
template <typename S>
HWY_INLINE void NarrowRow(const Wide<S>* from, int64_t n, S* to) {
  const Tag<Wide<S>> d;
  const hn::CappedTag<Wide<S>, 1> one;
  int64_t i = 0;
  for (; i + LanesOf<Wide<S>>() <= n; i += LanesOf<Wide<S>>()) {
    StoreNarrow(d, hn::LoadU(d, from + i), to + i);
  }
  for (; i < n; ++i) StoreNarrow(one, hn::LoadU(one, from + i), to + i);
}

// Elements from one strip of a block to the next. One cache line more than the block holds: a
// stride of 3 KiB would put a row's strips into few sets of the cache.
template <typename T>
constexpr int64_t StripStride() {
  return kFusedBlock * kStrip + 64 / static_cast<int64_t>(sizeof(T));
}

// 2^e of whole numbers e <= 0; exactly 0 below the normal numbers.
template <class D, typename T = hn::TFromD<D>>
HWY_INLINE hn::Vec<D> PowerOfTwo(D d, hn::Vec<D> e) {
  constexpr int kBias = std::numeric_limits<T>::max_exponent - 1;
  const auto power = NormalPowerOfTwo(d, hn::Max(e, hn::Set(d, T{-kBias})));
  return hn::IfThenZeroElse(hn::Lt(e, hn::Set(d, T{1 - kBias})), power);
}

// What is done to a head's scores beside scaling them, in base 2.
template <typename T>
struct ScoreChange {
  T softcap = 0;  // 0: none
  T inverse_softcap = 0;
  T slope = 0;
};

inline bool ChangesScores(const Problem& problem) {
  return problem.softcap != 0 || !problem.alibi_slopes.empty();
}
template <typename T>
ScoreChange<T> ScoreChangeOf(const Problem& problem, int64_t head) {
  ScoreChange<T> change;
  change.softcap = static_cast<T>(problem.SoftcapLog2());
  if (change.softcap != 0) change.inverse_softcap = 1 / change.softcap;
  change.slope = static_cast<T>(problem.SlopeLog2(head));
  return change;
}

// The steps of the change, in their order. A hidden key's number is -infinity, whatever its score:
// Added is Masked where no key is hidden.
template <class D, typename T = hn::TFromD<D>>
HWY_INLINE hn::Vec<D> Capped(D d, const ScoreChange<T>& change, hn::Vec<D> score) {
  const auto capped = Tanh(d, hn::Mul(score, hn::Set(d, change.inverse_softcap)));
  return hn::Mul(capped, hn::Set(d, change.softcap));
}
// A mask's number less its row's shift: -infinity only where that is what it says, and not by
// overflow, since a key that is seen is not hidden.
template <class D, typename T = hn::TFromD<D>>
HWY_INLINE hn::Vec<D> Shifted(D d, hn::Vec<D> bias, hn::Vec<D> shift) {
  const auto lowest = hn::Set(d, std::numeric_limits<T>::lowest());
  const auto hidden = hn::Eq(bias, hn::Set(d, -std::numeric_limits<T>::infinity()));
  const auto less = hn::Sub(bias, shift);
  return hn::IfThenElse(hidden, bias, hn::IfThenElse(hn::Lt(less, lowest), lowest, less));
}
template <class D, typename T = hn::TFromD<D>>
HWY_INLINE hn::Vec<D> Added(D d, hn::Vec<D> bias, hn::Vec<D> score) {
  return hn::MulAdd(bias, hn::Set(d, T(std::numbers::log2e)), score);
}
template <class D, typename T = hn::TFromD<D>>
HWY_INLINE hn::Vec<D> Masked(D d, hn::Vec<D> bias, hn::Vec<D> score) {
  const auto hidden = hn::Set(d, -std::numeric_limits<T>::infinity());
  return hn::IfThenElse(hn::Eq(bias, hidden), hidden, Added(d, bias, score));
}
// distance: between a query and a key.
template <class D, typename T = hn::TFromD<D>>
HWY_INLINE hn::Vec<D> Sloped(D d, const ScoreChange<T>& change, hn::Vec<D> distance,
                             hn::Vec<D> score) {
  return hn::NegMulAdd(hn::Set(d, change.slope), distance, score);
}

// A head's sink as the state of a segment: m, and l = 2^(sink - m); no output. l is 0 where there
// is no sink. shift: what was subtracted from the row's mask.
template <typename T>
struct SinkState {
  T reference = 0;
  T sum = 0;
};
template <typename T>
SinkState<T> SinkStateOf(const Problem& problem, int64_t head, T shift) {
  const hn::CappedTag<T, 1> one;
  const auto sink =
      hn::Set(one, static_cast<T>(problem.SinkLog2(head, static_cast<double>(shift))));
  if (std::isinf(hn::GetLane(sink))) return {};
  const auto reference = hn::Add(hn::Round(sink), hn::Set(one, T{kThreshold}));
  return {hn::GetLane(reference), hn::GetLane(Exp2(one, sink, reference))};
}

// ln(2^reference * sum) + shift, the whole numbers added first, with a logarithm of our own: the C
// library's is not the same on every machine. sum = 2^e f with f in [sqrt(1/2), sqrt(2)), ln f = 2
// atanh((f - 1) / (f + 1)), whose series is cut where |t| <= 0.172 leaves 1e-18.
template <typename T>
T LogSumExp(T reference, T sum, T shift) {
  if (sum == 0) return -std::numeric_limits<T>::infinity();
  if (std::isnan(sum)) return std::numeric_limits<T>::quiet_NaN();
  int exponent = 0;
  double f = std::frexp(static_cast<double>(sum), &exponent);
  if (f < std::numbers::sqrt2 / 2) {
    f *= 2;
    --exponent;
  }
  const double t = (f - 1) / (f + 1);
  const double t2 = t * t;
  double series = 0;
  for (int k = 23; k >= 1; k -= 2) series = std::fma(series, t2, 1.0 / k);
  const double whole = static_cast<double>(reference) + exponent;
  return static_cast<T>(std::fma(whole, std::numbers::ln2, 2 * t * series) +
                        static_cast<double>(shift));
}

// Raw scores of kKeys keys: chains of fma over d. `beside` is called for 0 .. kBeside - 1, spread
// over the tile: what it does waits on other units than the multiply-adds, or on its own results.
// query: [d][vector][lane]. A chain starts with its first product, not from zero: the same but for
// the sign of a zero, which no weight shows, and 0.98 of the peak against 0.94 (4 x 3, Zen 3).
template <typename T, int kVectors, int kKeys, int kBeside, class Beside>
HWY_INLINE void ScoreTile(const T* HWY_RESTRICT query, const T* const* keys, int64_t width,
                          Vec<T> (&scores)[kKeys][kVectors], const Beside& beside) {
  const Tag<T> d;
  constexpr int64_t kLanes = LanesOf<T>();
  const auto step = [&]<bool kFirst>(int64_t x) HWY_ATTR {
    Vec<T> q[kVectors];
    for (int c = 0; c < kVectors; ++c) q[c] = hn::Load(d, query + (x * kVectors + c) * kLanes);
    for (int i = 0; i < kKeys; ++i) {
      const Vec<T> k = hn::Set(d, keys[i][x]);
      for (int c = 0; c < kVectors; ++c) {
        scores[i][c] = kFirst ? hn::Mul(k, q[c]) : hn::MulAdd(k, q[c], scores[i][c]);
      }
    }
  };
  if (HWY_UNLIKELY(width == 0)) {
    for (int i = 0; i < kKeys; ++i) {
      for (int c = 0; c < kVectors; ++c) scores[i][c] = hn::Zero(d);
    }
    for (int i = 0; i < kBeside; ++i) beside(i);
    return;
  }
  step.template operator()<true>(0);
  int64_t x = 1;
  if constexpr (kBeside > 0) {
    const int64_t steps = (width - 1) / kBeside;
    for (int i = 0; i < kBeside; ++i) {
      beside(i);
#pragma GCC unroll 2
      for (const int64_t end = x + steps; x < end; ++x) step.template operator()<false>(x);
    }
  }
  // Unrolled twice: fully it is slower on AVX2, by what the decoder can take.
#pragma GCC unroll 2
  for (; x < width; ++x) step.template operator()<false>(x);
}

// A block of values, in strips of kStrip dimensions: as they lie, or packed.
template <typename T>
struct Strips {
  const T* data = nullptr;
  int64_t count = 0;
  int64_t stride = 0;      // elements from one strip to the next
  int64_t key_stride = 0;  // elements from one key to the next
};

// Said by a ValueTile's `seen` where every lane sees every key.
struct EverySeen {};
inline constexpr EverySeen kEverySeen;

// output += the chains over `rows` keys of weights and kStrips strips of values, from strip `first`
// on. weights: [key][vector][lane], output: [dimension][vector][lane]. seen(vector, key): the mask
// of the lanes for which a key counts, or kEverySeen; the others' values may be NaN.
template <typename T, int kVectors, int kStrips, class Seen>
HWY_INLINE void ValueTile(const Strips<T>& strips, int64_t first, int64_t rows,
                          const T* HWY_RESTRICT weights, const Seen& seen, T* HWY_RESTRICT output) {
  constexpr bool kSelect = !std::is_same_v<decltype(seen(0, 0)), EverySeen>;
  constexpr int kDims = kStrips * kStrip;
  const Tag<T> d;
  constexpr int64_t kLanes = LanesOf<T>();
  Vec<T> sums[kDims][kVectors];
  for (int i = 0; i < kDims; ++i) {
    for (int c = 0; c < kVectors; ++c) sums[i][c] = hn::Zero(d);
  }
  const T* values[kStrips];
  for (int s = 0; s < kStrips; ++s) values[s] = strips.data + (first + s) * strips.stride;
#pragma GCC unroll 2
  for (int64_t j = 0; j < rows; ++j) {
    Vec<T> w[kVectors];
    for (int c = 0; c < kVectors; ++c) w[c] = hn::Load(d, weights + (j * kVectors + c) * kLanes);
    for (int i = 0; i < kDims; ++i) {
      const Vec<T> v = hn::Set(d, values[i / kStrip][i % kStrip]);
      for (int c = 0; c < kVectors; ++c) {
        const Vec<T> next = hn::MulAdd(v, w[c], sums[i][c]);
        if constexpr (kSelect) {
          sums[i][c] = hn::IfThenElse(seen(c, j), next, sums[i][c]);
        } else {
          sums[i][c] = next;
        }
      }
    }
    for (int s = 0; s < kStrips; ++s) values[s] += strips.key_stride;
  }
  output += first * kStrip * kVectors * kLanes;
  for (int i = 0; i < kDims; ++i) {
    for (int c = 0; c < kVectors; ++c) {
      T* const to = output + (i * kVectors + c) * kLanes;
      hn::Store(hn::Add(hn::Load(d, to), sums[i][c]), d, to);
    }
  }
}

// Transposes work on 128-bit blocks: they are the same for every vector, and cost half an
// instruction an element.
template <typename T>
constexpr int kBlockLanes = 16 / static_cast<int>(sizeof(T));

#if HWY_TARGET == HWY_SCALAR
// One lane: a column is one element.
template <class D, typename S, typename T = hn::TFromD<D>>
HWY_INLINE void LoadColumns(D d, const S* const* rows, int64_t x,
                            hn::Vec<D> (&columns)[kBlockLanes<T>]) {
  for (int i = 0; i < kBlockLanes<T>; ++i) {
    S element;
    hwy::CopyBytes<sizeof(S)>(rows[0] + x + i, &element);
    columns[i] = LoadWide(d, &element);
  }
}
template <class D, typename T = hn::TFromD<D>>
HWY_INLINE void StoreColumns(D d, hn::Vec<D> (&columns)[kBlockLanes<T>], T* const* rows,
                             int64_t x) {
  for (int i = 0; i < kBlockLanes<T>; ++i) hn::StoreU(columns[i], d, rows[0] + x + i);
}
#else
// Block b of the vector is rows[b * kBlockLanes][x ...].
template <class D, typename S, typename T = hn::TFromD<D>>
HWY_INLINE hn::Vec<D> LoadBlocks(D d, const S* const* rows, int64_t x) {
  if constexpr (hn::MaxLanes(d) == size_t{kBlockLanes<T>}) {
    return LoadWide(d, rows[0] + x);
  } else {
    const hn::Half<D> half;
    return hn::Combine(d, LoadBlocks(half, rows + hn::MaxLanes(half), x),
                       LoadBlocks(half, rows, x));
  }
}
template <class D, typename T = hn::TFromD<D>>
HWY_INLINE void StoreBlocks(D d, hn::Vec<D> v, T* const* rows, int64_t x) {
  if constexpr (hn::MaxLanes(d) == size_t{kBlockLanes<T>}) {
    hn::StoreU(v, d, rows[0] + x);
  } else {
    const hn::Half<D> half;
    StoreBlocks(half, hn::LowerHalf(half, v), rows, x);
    StoreBlocks(half, hn::UpperHalf(half, v), rows + hn::MaxLanes(half), x);
  }
}

// Transposes each 128-bit block of the kBlockLanes vectors; its own inverse.
template <class D, typename T = hn::TFromD<D>>
HWY_INLINE void TransposeInBlocks(D d, hn::Vec<D> (&v)[kBlockLanes<T>]) {
  if constexpr (sizeof(T) == 8) {
    const auto a = hn::InterleaveLower(d, v[0], v[1]);
    v[1] = hn::InterleaveUpper(d, v[0], v[1]);
    v[0] = a;
  } else {
    const hn::Repartition<double, D> dd;
    const auto pairs = [&](auto lower, auto upper, int to) HWY_ATTR {
      const auto a = hn::BitCast(dd, lower);
      const auto b = hn::BitCast(dd, upper);
      v[to] = hn::BitCast(d, hn::InterleaveLower(dd, a, b));
      v[to + 1] = hn::BitCast(d, hn::InterleaveUpper(dd, a, b));
    };
    const auto a = hn::InterleaveLower(d, v[0], v[1]);
    const auto b = hn::InterleaveUpper(d, v[0], v[1]);
    const auto e = hn::InterleaveLower(d, v[2], v[3]);
    const auto f = hn::InterleaveUpper(d, v[2], v[3]);
    pairs(a, e, 0);
    pairs(b, f, 2);
  }
}

// columns[i] = element x + i of each of the rows, one row a lane. i < kBlockLanes. Rows may be
// unaligned.
template <class D, typename S, typename T = hn::TFromD<D>>
HWY_INLINE void LoadColumns(D d, const S* const* rows, int64_t x,
                            hn::Vec<D> (&columns)[kBlockLanes<T>]) {
  for (int i = 0; i < kBlockLanes<T>; ++i) columns[i] = LoadBlocks(d, rows + i, x);
  TransposeInBlocks(d, columns);
}
// The reverse. Leaves the columns as they lie in the rows.
template <class D, typename T = hn::TFromD<D>>
HWY_INLINE void StoreColumns(D d, hn::Vec<D> (&columns)[kBlockLanes<T>], T* const* rows,
                             int64_t x) {
  TransposeInBlocks(d, columns);
  for (int i = 0; i < kBlockLanes<T>; ++i) StoreBlocks(d, columns[i], rows + i, x);
}
#endif

// Columns that are loaded at a time from rows of S.
template <typename S>
constexpr int kColumns = kBlockLanes<Wide<S>>*(std::is_same_v<S, BFloat16> ? 2 : 1);

// As LoadColumns, for kColumns. Two columns of bfloat16 go through the transpose as one: the upper
// half of a float is the number already.
template <class D, typename S>
HWY_INLINE void LoadWideColumns(D d, const S* const* rows, int64_t x,
                                hn::Vec<D> (&columns)[kColumns<S>]) {
  if constexpr (std::is_same_v<S, BFloat16>) {
    const float* pairs[LanesOf<float>()];
    for (int64_t lane = 0; lane < LanesOf<float>(); ++lane) {
      pairs[lane] = reinterpret_cast<const float*>(rows[lane] + x);
    }
    const hn::RebindToUnsigned<D> du;
    hn::Vec<D> words[kBlockLanes<float>];
    LoadColumns(d, pairs, 0, words);
    for (int i = 0; i < kBlockLanes<float>; ++i) {
      const auto bits = hn::BitCast(du, words[i]);
      columns[2 * i] = hn::BitCast(d, hn::ShiftLeft<16>(bits));
      columns[2 * i + 1] = hn::BitCast(d, hn::And(bits, hn::Set(du, 0xffff0000u)));
    }
  } else {
    LoadColumns(d, rows, x, columns);
  }
}

// One column of rows: the end of a width that no block covers.
template <class D, typename S, typename T = hn::TFromD<D>>
HWY_INLINE hn::Vec<D> LoadColumn(D d, const S* const* rows, int64_t x) {
  HWY_ALIGN T lanes[LanesOf<T>()];
  for (int64_t i = 0; i < LanesOf<T>(); ++i) lanes[i] = Widened(rows[i][x]);
  return hn::Load(d, lanes);
}

// Rows that will be read, in order, asked for a few cache lines at a time ahead of the reader.
// kLocality: 3 brings them to L1, 2 to L2.
template <int kLocality>
class Prefetcher {
 public:
  // Cache lines of so many elements of T.
  template <typename T>
  static constexpr int64_t Lines(int64_t elements) {
    return CeilDiv(elements * static_cast<int64_t>(sizeof(T)), kLine);
  }

  // REQUIRES: at most kRanges calls.
  template <typename T>
  void Add(const MatrixView<const T>& rows) {
    constexpr int64_t kSize = sizeof(T);
    Range& range = ranges_[count_++];
    range = {reinterpret_cast<const char*>(rows.data), rows.rows, rows.columns * kSize,
             rows.stride * kSize};
    // Rows that follow each other are one: less to keep count of.
    if (range.stride == range.bytes) {
      range = {range.data, 1, range.rows * range.bytes, range.stride};
    }
    lines_ += range.rows * CeilDiv(range.bytes, kLine);
  }
  // Of what was added.
  int64_t lines() const { return lines_; }

  HWY_INLINE void Step(int64_t lines) {
    while (lines > 0) {
      if (at_ == row_end_ && !NextRow()) return;
      const int64_t here = std::min(lines, CeilDiv(row_end_ - at_, kLine));
      for (int64_t i = 0; i < here; ++i) {
        __builtin_prefetch(at_ + i * kLine, /*write=*/0, kLocality);
      }
      at_ += std::min(here * kLine, static_cast<int64_t>(row_end_ - at_));
      lines -= here;
    }
  }

 private:
  struct Range {
    const char* data = nullptr;
    int64_t rows = 0;
    int64_t bytes = 0;   // of a row
    int64_t stride = 0;  // bytes
  };
  static constexpr int kRanges = 2 * 3;  // keys and values of a segment's runs
  static constexpr int64_t kLine = 64;

  bool NextRow() {
    while (range_ < count_ && (row_ >= ranges_[range_].rows || ranges_[range_].bytes == 0)) {
      ++range_;
      row_ = 0;
    }
    if (range_ == count_) return false;
    const Range& range = ranges_[range_];
    at_ = range.data + row_++ * range.stride;
    row_end_ = at_ + range.bytes;
    return true;
  }

  Range ranges_[kRanges];
  int count_ = 0;
  int64_t lines_ = 0;
  int range_ = 0;
  int64_t row_ = 0;  // the next one of the range
  const char* at_ = nullptr;
  const char* row_end_ = nullptr;
};
using PrefetcherToL1 = Prefetcher<3>;
using PrefetcherToL2 = Prefetcher<2>;

// Copies a block of values to [strip][key][dimension of the strip]; the last strip's missing
// dimensions are 0. Returns whether all of them are finite, where kCheck asks; otherwise true.
template <bool kCheck, typename S, typename T = Wide<S>>
HWY_INLINE bool PackValues(const MatrixView<const S>& value, T* HWY_RESTRICT packed) {
  const hn::CappedTag<T, kStrip> d;
  constexpr int kStep = static_cast<int>(hn::MaxLanes(d));
  // Strips of a cache line go together: it is read once, and each strip is written in order.
  constexpr int64_t kTogether = std::max<int64_t>(64 / (kStrip * sizeof(T)), 1);
  const int64_t whole = value.columns / kStrip;
  const int64_t rest = value.columns % kStrip;
  // x - x is 0 for a finite x, and NaN for the others; NaN stays in a sum.
  auto check = hn::Zero(d);
  for (int64_t first = 0; first < whole; first += kTogether) {
    const int64_t strips = std::min(kTogether, whole - first);
    for (int64_t j = 0; j < value.rows; ++j) {
      const S* const row = value.Row(j) + first * kStrip;
      T* to = packed + first * StripStride<T>() + j * kStrip;
      for (int64_t s = 0; s < strips; ++s, to += StripStride<T>()) {
        for (int i = 0; i < kStrip; i += kStep) {
          const auto v = LoadWide(d, row + s * kStrip + i);
          hn::Store(v, d, to + i);
          if constexpr (kCheck) check = hn::Add(check, hn::Sub(v, v));
        }
      }
    }
  }
  for (int64_t j = 0; rest > 0 && j < value.rows; ++j) {
    T* const to = packed + whole * StripStride<T>() + j * kStrip;
    for (int64_t i = 0; i < rest; ++i) to[i] = Widened(value.Row(j)[whole * kStrip + i]);
    std::fill_n(to + rest, kStrip - rest, T{0});
    for (int i = 0; kCheck && i < kStrip; i += kStep) {
      const auto v = hn::Load(d, to + i);
      check = hn::Add(check, hn::Sub(v, v));
    }
  }
  return hn::AllTrue(d, hn::Eq(check, hn::Zero(d)));
}

}  // namespace attendant::core::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
