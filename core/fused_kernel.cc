#include "core/fused_kernel.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <numbers>

#include "core/checked_math.h"
#include "core/simd_targets.h"
#include "core/softmax.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/fused_kernel.cc"
#include <hwy/foreach_target.h>  // compiles the rest of this file once a target
#include <hwy/highway.h>

#include "core/exp2-inl.h"

HWY_BEFORE_NAMESPACE();
namespace attendant::core::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// Register tiles: keys (or dimensions) x vectors of accumulators, beside the vectors they multiply
// and one broadcast. 8 x 2 of AVX-512's 32 registers leave room for the exponential, 4 x 3 fill
// AVX2's
// 16. A block of 192 keys of a panel's weights stays in L1 with either: 24 or 18 KiB.
#if HWY_TARGET == HWY_AVX3
constexpr int kMostVectors = 2;
#else
constexpr int kMostVectors = 3;
#endif
// Panels that share a block of keys and values in L2: 4 are within a hundredth of 6.
constexpr int kPanels = 4;
// The reference is decided for this many keys at a time: part of the contract.
constexpr int kDecision = 4;
constexpr int kThreshold = 32;

// Keys or dimensions of a tile that is `vectors` wide: at least 8 chains, to hide the latency of
// fma.
constexpr int TileHeight(int vectors) { return vectors == 3 ? 4 : 8; }

template <typename T>
using Tag = hn::ScalableTag<T>;
template <typename T>
using Vec = hn::Vec<Tag<T>>;

template <typename T>
HWY_INLINE size_t LanesOf() {
  return hn::Lanes(Tag<T>());
}

// 'No key yet'.
template <typename T>
constexpr T NoReference() {
  return sizeof(T) == 4 ? T(-0x1p127) : T(-0x1p1023);
}

// A panel's state: arrays of [index][lane].
template <typename T>
struct Panel {
  int64_t first = 0;  // query, within the head
  int64_t rows = 0;
  int vectors = 0;
  T* query = nullptr;   // [d], scale_log2 included
  T* output = nullptr;  // [dimension], of the segment at hand
  T* reference = nullptr;
  T* sum = nullptr;
  T* total_output = nullptr;  // of the segments before, merged
  T* total_reference = nullptr;
  T* total_sum = nullptr;
};

template <typename T>
int64_t LanesOfPanel(const Panel<T>& panel) {
  return panel.vectors * static_cast<int64_t>(LanesOf<T>());
}

// A block of keys, seen from a panel.
template <typename T>
struct Block {
  MatrixView<const T> key;    // the rows that some lane sees
  MatrixView<const T> value;  // the same rows
  const T* limits = nullptr;  // [lane]: how many of the rows it sees; null where all see all
  bool select = false;        // a hidden value is not finite
};

// 2^e of whole numbers e <= 0; exactly 0 below the normal numbers.
template <class D, typename T = hn::TFromD<D>>
HWY_INLINE hn::Vec<D> PowerOfTwo(D d, hn::Vec<D> e) {
  using Constants = Exp2Constants<T>;
  constexpr int kBias = std::numeric_limits<T>::max_exponent - 1;
  const hn::RebindToSigned<D> di;
  const auto field =
      hn::Add(hn::Max(e, hn::Set(d, T{-kBias})), hn::Set(d, Constants::kMagic + kBias));
  const auto power =
      hn::BitCast(d, hn::ShiftLeft<Constants::kMantissaBits>(hn::BitCast(di, field)));
  return hn::IfThenZeroElse(hn::Lt(e, hn::Set(d, T{1 - kBias})), power);
}

// p = 2^(score - reference); NaN where the score is NaN or +infinity.
template <class D, typename T = hn::TFromD<D>>
HWY_INLINE hn::Vec<D> Weight(D d, hn::Vec<D> score, hn::Vec<D> reference) {
  using Constants = Exp2Constants<T>;
  const hn::RebindToSigned<D> di;
  const auto n = hn::Round(score);
  const auto r = hn::Sub(score, n);
  const auto e = hn::Sub(n, reference);
  const auto p = Constants::Poly(d, r);
  const auto field = hn::BitCast(di, hn::Add(e, hn::Set(d, Constants::kMagic)));
  const auto y =
      hn::BitCast(d, hn::Add(hn::BitCast(di, p), hn::ShiftLeft<Constants::kMantissaBits>(field)));
  const auto kept = hn::IfThenElse(hn::Eq(r, r), y, r);
  return hn::IfThenZeroElse(hn::Lt(e, hn::Set(d, Constants::kZeroBelow)), kept);
}

// Raw scores of kKeys keys: chains of fma over d.
template <typename T, int kVectors, int kKeys>
HWY_INLINE void ScoreTile(const T* HWY_RESTRICT query, const T* const* keys, int64_t width,
                          Vec<T> (&scores)[kKeys][kVectors]) {
  const Tag<T> d;
  const size_t lanes = LanesOf<T>();
  for (int i = 0; i < kKeys; ++i) {
    for (int c = 0; c < kVectors; ++c) scores[i][c] = hn::Zero(d);
  }
  // Unrolled twice: fully it is slower on AVX2, by what the decoder can take.
#pragma GCC unroll 2
  for (int64_t x = 0; x < width; ++x) {
    Vec<T> q[kVectors];
    for (int c = 0; c < kVectors; ++c) q[c] = hn::Load(d, query + (x * kVectors + c) * lanes);
    for (int i = 0; i < kKeys; ++i) {
      const Vec<T> k = hn::Set(d, keys[i][x]);
      for (int c = 0; c < kVectors; ++c) scores[i][c] = hn::MulAdd(k, q[c], scores[i][c]);
    }
  }
}

// output[x] += the chain over the block's keys of weights and kDims dimensions of value.
template <typename T, int kVectors, int kDims, bool kSelect>
HWY_INLINE void ValueTile(const Block<T>& block, const T* HWY_RESTRICT weights, int64_t first_dim,
                          T* HWY_RESTRICT output) {
  const Tag<T> d;
  const size_t lanes = LanesOf<T>();
  Vec<T> sums[kDims][kVectors];
  for (int i = 0; i < kDims; ++i) {
    for (int c = 0; c < kVectors; ++c) sums[i][c] = hn::Zero(d);
  }
  const T* value = block.value.data + first_dim;
#pragma GCC unroll 2
  for (int64_t j = 0; j < block.value.rows; ++j, value += block.value.stride) {
    Vec<T> w[kVectors];
    for (int c = 0; c < kVectors; ++c) w[c] = hn::Load(d, weights + (j * kVectors + c) * lanes);
    for (int i = 0; i < kDims; ++i) {
      const Vec<T> v = hn::Set(d, value[i]);
      for (int c = 0; c < kVectors; ++c) {
        const Vec<T> next = hn::MulAdd(v, w[c], sums[i][c]);
        if constexpr (kSelect) {
          const auto seen =
              hn::Lt(hn::Set(d, static_cast<T>(j)), hn::Load(d, block.limits + c * lanes));
          sums[i][c] = hn::IfThenElse(seen, next, sums[i][c]);
        } else {
          sums[i][c] = next;
        }
      }
    }
  }
  for (int i = 0; i < kDims; ++i) {
    for (int c = 0; c < kVectors; ++c) {
      T* const to = output + ((first_dim + i) * kVectors + c) * lanes;
      hn::Store(hn::Add(hn::Load(d, to), sums[i][c]), d, to);
    }
  }
}

template <typename T, int kVectors, bool kSelect>
HWY_INLINE void ValueProduct(const Block<T>& block, const T* weights, T* output) {
  constexpr int kDims = TileHeight(kVectors);
  const int64_t width = block.value.columns;
  int64_t x = 0;
  for (; x + kDims <= width; x += kDims) {
    ValueTile<T, kVectors, kDims, kSelect>(block, weights, x, output);
  }
  for (; x < width; ++x) ValueTile<T, kVectors, 1, kSelect>(block, weights, x, output);
}

// Multiplies `count` entries of [index][lane] by a factor a lane.
template <typename T, int kVectors>
HWY_INLINE void ScaleLanes(T* array, int64_t count, const Vec<T> (&factors)[kVectors]) {
  const Tag<T> d;
  const size_t lanes = LanesOf<T>();
  for (int64_t i = 0; i < count; ++i) {
    for (int c = 0; c < kVectors; ++c) {
      T* const at = array + (i * kVectors + c) * lanes;
      hn::Store(hn::Mul(hn::Load(d, at), factors[c]), d, at);
    }
  }
}

// The rare step: moves the reference of the lanes whose largest score passed it by more than the
// threshold, and takes what they summed so far along. `done`: finished weights of this block.
template <typename T, int kVectors>
HWY_NOINLINE void MoveReference(const Panel<T>& panel, const Vec<T> (&largest)[kVectors],
                                int64_t width, T* block_sum, T* weights, int64_t done) {
  const Tag<T> d;
  const size_t lanes = LanesOf<T>();
  const Vec<T> threshold = hn::Set(d, T{kThreshold});
  Vec<T> factors[kVectors];
  for (int c = 0; c < kVectors; ++c) {
    const Vec<T> before = hn::Load(d, panel.reference + c * lanes);
    const auto moves = hn::Gt(hn::Sub(largest[c], before), threshold);
    const Vec<T> after = hn::IfThenElse(moves, hn::Add(hn::Round(largest[c]), threshold), before);
    // Where nothing moves the factor is 1, also for 'no key yet' and after an infinite score.
    factors[c] = hn::IfThenElse(moves, PowerOfTwo(d, hn::Sub(before, after)), hn::Set(d, T{1}));
    hn::Store(after, d, panel.reference + c * lanes);
  }
  ScaleLanes<T, kVectors>(panel.sum, 1, factors);
  ScaleLanes<T, kVectors>(block_sum, 1, factors);
  ScaleLanes<T, kVectors>(panel.output, width, factors);
  ScaleLanes<T, kVectors>(weights, done, factors);
}

// Scores that a lane does not see become -infinity. first: the tile's first key within the block.
template <typename T, int kVectors, int kKeys>
HWY_INLINE void Hide(const T* limits, int64_t rows, int64_t first,
                     Vec<T> (&scores)[kKeys][kVectors]) {
  const Tag<T> d;
  const size_t lanes = LanesOf<T>();
  const Vec<T> hidden = hn::Set(d, -std::numeric_limits<T>::infinity());
  for (int c = 0; c < kVectors; ++c) {
    const Vec<T> end =
        limits == nullptr ? hn::Set(d, static_cast<T>(rows)) : hn::Load(d, limits + c * lanes);
    for (int i = 0; i < kKeys; ++i) {
      const auto seen = hn::Lt(hn::Set(d, static_cast<T>(first + i)), end);
      scores[i][c] = hn::IfThenElse(seen, scores[i][c], hidden);
    }
  }
}

// Turns 4 keys' scores into weights, from row `at` of `weights` on, and adds them to the block's
// sum.
template <typename T, int kVectors, int kKeys>
HWY_INLINE void Absorb(const Panel<T>& panel, const Vec<T> (&scores)[kKeys][kVectors], int first,
                       int64_t width, T* block_sum, T* weights, int64_t at) {
  const Tag<T> d;
  const size_t lanes = LanesOf<T>();
  const Vec<T> none = hn::Set(d, -std::numeric_limits<T>::infinity());
  const Vec<T> threshold = hn::Set(d, T{kThreshold});
  Vec<T> largest[kVectors];
  auto any = hn::Lt(none, none);
  for (int c = 0; c < kVectors; ++c) {
    // Max returns its second operand where either is NaN: the one that is no score stands there.
    largest[c] = none;
    for (int i = 0; i < kDecision; ++i) largest[c] = hn::Max(scores[first + i][c], largest[c]);
    const Vec<T> reference = hn::Load(d, panel.reference + c * lanes);
    any = hn::Or(any, hn::Gt(hn::Sub(largest[c], reference), threshold));
  }
  if (HWY_UNLIKELY(!hn::AllFalse(d, any))) {
    MoveReference<T, kVectors>(panel, largest, width, block_sum, weights, at);
  }
  for (int c = 0; c < kVectors; ++c) {
    const Vec<T> reference = hn::Load(d, panel.reference + c * lanes);
    Vec<T> sum = hn::Load(d, block_sum + c * lanes);
    for (int i = 0; i < kDecision; ++i) {
      const Vec<T> w = Weight(d, scores[first + i][c], reference);
      hn::Store(w, d, weights + ((at + i) * kVectors + c) * lanes);
      sum = hn::Add(sum, w);
    }
    hn::Store(sum, d, block_sum + c * lanes);
  }
}

// The keys of a tile; rows beyond the block's last are that one again, and hidden.
template <typename T, int kKeys>
HWY_INLINE void KeyRows(const MatrixView<const T>& key, int64_t first, const T* (&rows)[kKeys]) {
  for (int i = 0; i < kKeys; ++i) rows[i] = key.Row(std::min(first + i, key.rows - 1));
}

// Folds a block of keys into a panel. weights: room for a block, rounded up to a tile.
template <typename T, int kVectors>
HWY_INLINE void PanelBlock(const Panel<T>& panel, const Block<T>& block, T* weights) {
  constexpr int kKeys = TileHeight(kVectors);
  const Tag<T> d;
  const size_t lanes = LanesOf<T>();
  const int64_t width = block.key.columns;
  HWY_ALIGN T block_sum[size_t{kVectors} * HWY_MAX_BYTES / sizeof(T)];
  for (int c = 0; c < kVectors; ++c) hn::Store(hn::Zero(d), d, block_sum + c * lanes);
  for (int64_t j = 0; j < block.key.rows; j += kKeys) {
    const T* keys[kKeys];
    KeyRows<T, kKeys>(block.key, j, keys);
    Vec<T> scores[kKeys][kVectors];
    ScoreTile<T, kVectors, kKeys>(panel.query, keys, width, scores);
    if (block.limits != nullptr || j + kKeys > block.key.rows) {
      Hide<T, kVectors, kKeys>(block.limits, block.key.rows, j, scores);
    }
    for (int first = 0; first < kKeys; first += kDecision) {
      Absorb<T, kVectors, kKeys>(panel, scores, first, block.value.columns, block_sum, weights,
                                 j + first);
    }
  }
  for (int c = 0; c < kVectors; ++c) {
    T* const sum = panel.sum + c * lanes;
    hn::Store(hn::Add(hn::Load(d, sum), hn::Load(d, block_sum + c * lanes)), d, sum);
  }
  if (block.select) {
    ValueProduct<T, kVectors, true>(block, weights, panel.output);
  } else {
    ValueProduct<T, kVectors, false>(block, weights, panel.output);
  }
}

// Merges the segment at hand into those before.
template <typename T, int kVectors>
HWY_INLINE void MergeSegment(const Panel<T>& panel, int64_t width) {
  const Tag<T> d;
  const size_t lanes = LanesOf<T>();
  for (int c = 0; c < kVectors; ++c) {
    const size_t at = c * lanes;
    const Vec<T> sum = hn::Load(d, panel.sum + at);
    const Vec<T> total_sum = hn::Load(d, panel.total_sum + at);
    const Vec<T> reference = hn::Load(d, panel.reference + at);
    const Vec<T> total_reference = hn::Load(d, panel.total_reference + at);
    const auto empty = hn::Eq(sum, hn::Zero(d));
    const Vec<T> merged =
        hn::IfThenElse(empty, total_reference, hn::Max(reference, total_reference));
    const Vec<T> factor = hn::IfThenZeroElse(empty, PowerOfTwo(d, hn::Sub(reference, merged)));
    const Vec<T> total_factor =
        hn::IfThenElse(empty, hn::Set(d, T{1}), PowerOfTwo(d, hn::Sub(total_reference, merged)));
    hn::Store(merged, d, panel.total_reference + at);
    hn::Store(hn::MulAdd(sum, factor, hn::Mul(total_sum, total_factor)), d, panel.total_sum + at);
    for (int64_t x = 0; x < width; ++x) {
      const size_t element = (static_cast<size_t>(x) * kVectors + c) * lanes;
      T* const total = panel.total_output + element;
      const Vec<T> scaled = hn::Mul(hn::Load(d, total), total_factor);
      const Vec<T> joined = hn::MulAdd(hn::Load(d, panel.output + element), factor, scaled);
      hn::Store(hn::IfThenElse(empty, hn::Load(d, total), joined), d, total);
    }
  }
}

template <typename T>
int64_t GroupRows() {
  return int64_t{kPanels} * kMostVectors * static_cast<int64_t>(LanesOf<T>());
}

// Hands out scratch, each array on a multiple of 64 bytes. Without memory it only counts, and
// saturates: a cost is asked for before anybody knows whether it can be paid.
template <typename T>
class Arena {
 public:
  explicit Arena(T* memory) : memory_(memory) {}
  T* Take(int64_t elements) {
    constexpr int64_t kAlignment = 64 / sizeof(T);
    T* const taken = memory_ == nullptr ? nullptr : memory_ + used_;
    used_ = SaturatingSum({used_, SaturatingProduct({CeilDiv(elements, kAlignment), kAlignment})});
    return taken;
  }
  int64_t used() const { return used_; }

 private:
  T* const memory_;
  int64_t used_ = 0;
};

template <typename T>
struct Scratch {
  T* weights;  // [key of a block, rounded up to a tile][lane]
  T* limits;   // [lane]
  Panel<T> panels[kPanels];
  int count = 0;  // of panels

  // As many panels as `rows` queries take, the last as narrow as it can be.
  Scratch(Arena<T>& arena, int64_t rows, int64_t width, int64_t value_width) {
    const auto vector = static_cast<int64_t>(LanesOf<T>());
    const int64_t widest = std::min(CeilDiv(rows, vector), int64_t{kMostVectors}) * vector;
    weights = arena.Take((kFusedBlock + TileHeight(1)) * widest);
    limits = arena.Take(widest);
    for (int64_t done = 0; done < rows;) {
      Panel<T>& panel = panels[count++];
      panel.rows = std::min(rows - done, widest);
      panel.vectors = static_cast<int>(CeilDiv(panel.rows, vector));
      const int64_t lanes = panel.vectors * vector;
      panel.query = arena.Take(SaturatingProduct({width, lanes}));
      panel.output = arena.Take(SaturatingProduct({value_width, lanes}));
      panel.total_output = arena.Take(SaturatingProduct({value_width, lanes}));
      for (T** const array :
           {&panel.reference, &panel.sum, &panel.total_reference, &panel.total_sum}) {
        *array = arena.Take(lanes);
      }
      done += panel.rows;
    }
  }
};

template <typename T>
int64_t ScratchElements(int64_t rows, int64_t width, int64_t value_width) {
  Arena<T> arena(nullptr);
  Scratch<T>(arena, std::min(rows, GroupRows<T>()), width, value_width);
  return arena.used();
}

// Q^T with the scale folded in; lanes beyond the panel's rows are 0.
template <typename T>
void PackQuery(const FusedGroup<T>& group, const Panel<T>& panel) {
  const int64_t lanes = LanesOfPanel(panel);
  const int64_t width = group.query.columns;
  const T scale = static_cast<T>(group.problem->ScaleLog2());
  const int64_t first = panel.first - group.first_query;
  std::fill_n(panel.query, width * lanes, T{0});
  for (int64_t lane = 0; lane < panel.rows; ++lane) {
    const T* const row = group.query.Row(first + lane);
    for (int64_t x = 0; x < width; ++x) panel.query[x * lanes + lane] = scale * row[x];
  }
}

// Gives each panel its queries.
template <typename T>
void PackQueries(const FusedGroup<T>& group, Scratch<T>& scratch) {
  int64_t first = group.first_query;
  for (int i = 0; i < scratch.count; ++i) {
    Panel<T>& panel = scratch.panels[i];
    panel.first = first;
    PackQuery(group, panel);
    first += panel.rows;
  }
}

// The empty state: no key yet.
template <typename T>
void Empty(int64_t lanes, int64_t value_width, T* reference, T* sum, T* output) {
  std::fill_n(reference, lanes, NoReference<T>());
  std::fill_n(sum, lanes, T{0});
  std::fill_n(output, value_width * lanes, T{0});
}

// The block as the panel sees it; without a row where it sees none. limits: scratch for lanes.
template <typename T>
Block<T> SeenBlock(const FusedGroup<T>& group, const Panel<T>& panel, KeyRange keys, T* limits) {
  const Problem& problem = *group.problem;
  Block<T> block;
  const int64_t end = std::min(keys.end, problem.VisibleKeysOfAny(panel.first, panel.rows).end);
  const int64_t rows = std::max<int64_t>(end - keys.begin, 0);
  block.key = group.key.Rows(keys.begin, rows);
  block.value = group.value.Rows(keys.begin, rows);
  if (rows == 0 || problem.Ask(panel.first, panel.rows, {keys.begin, end}) != Visibility::kMixed) {
    return block;
  }
  const int64_t lanes = LanesOfPanel(panel);
  for (int64_t lane = 0; lane < lanes; ++lane) {
    const int64_t query = panel.first + std::min(lane, panel.rows - 1);
    limits[lane] =
        static_cast<T>(std::clamp<int64_t>(problem.VisibleKeys(query).end - keys.begin, 0, rows));
  }
  block.limits = limits;
  for (int64_t row = 0; row < rows && !block.select; ++row) {
    block.select = !AllFinite(block.value.Row(row), block.value.columns);
  }
  return block;
}

// Calls function.template operator()<vectors>() for the panel's number of them.
template <typename Function>
HWY_INLINE void WithVectors(int vectors, const Function& function) {
  if (vectors == 1) {
    function.template operator()<1>();
  } else if (vectors == 2) {
    function.template operator()<2>();
  } else if constexpr (kMostVectors > 2) {
    function.template operator()<3>();
  }
}

// ln(2^reference * sum), the whole numbers added first, with a logarithm of our own: the C
// library's is not the same on every machine. sum = 2^e f with f in [sqrt(1/2), sqrt(2)), ln f = 2
// atanh((f - 1) / (f + 1)), whose series is cut where |t| <= 0.172 leaves 1e-18.
template <typename T>
T LogSumExp(T reference, T sum) {
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
  return static_cast<T>(std::fma(whole, std::numbers::ln2, 2 * t * series));
}

// Writes a panel's rows: O^T / L, and what else is wanted.
template <typename T>
void FinishPanel(const FusedGroup<T>& group, const Panel<T>& panel) {
  const int64_t lanes = LanesOfPanel(panel);
  const int64_t first = panel.first - group.first_query;
  for (int64_t row = 0; row < panel.rows; ++row) {
    const T sum = panel.total_sum[row];
    const T inverse = sum == 0 ? T{0} : 1 / sum;
    T* const out = group.output.Row(first + row);
    for (int64_t x = 0; x < group.output.columns; ++x) {
      const T element = panel.total_output[x * lanes + row] * inverse;
      out[x] = std::isnan(element) ? std::numeric_limits<T>::quiet_NaN() : element;
    }
    if (group.reference != nullptr) group.reference[first + row] = panel.total_reference[row];
    if (group.inverse_sum != nullptr) group.inverse_sum[first + row] = inverse;
    if (group.logsumexp != nullptr) {
      group.logsumexp[first + row] = LogSumExp(panel.total_reference[row], sum);
    }
  }
}

template <typename T>
void ForwardImpl(const FusedGroup<T>& group, T* memory, const std::atomic<bool>& stop) {
  const int64_t value_width = group.value.columns;
  Arena<T> arena(memory);
  Scratch<T> scratch(arena, group.query.rows, group.query.columns, value_width);
  const int panels = scratch.count;
  PackQueries(group, scratch);
  for (int i = 0; i < panels; ++i) {
    const Panel<T>& panel = scratch.panels[i];
    Empty(LanesOfPanel(panel), value_width, panel.total_reference, panel.total_sum,
          panel.total_output);
  }
  const int64_t end = group.problem->VisibleKeysOfAny(group.first_query, group.query.rows).end;
  for (int64_t segment = 0; segment < end; segment += kFusedSegment) {
    const int64_t segment_end = std::min(segment + kFusedSegment, end);
    for (int i = 0; i < panels; ++i) {
      const Panel<T>& panel = scratch.panels[i];
      Empty(LanesOfPanel(panel), value_width, panel.reference, panel.sum, panel.output);
    }
    for (int64_t first = segment; first < segment_end; first += kFusedBlock) {
      if (stop.load(std::memory_order_relaxed)) return;
      const KeyRange keys{first, std::min(first + kFusedBlock, segment_end)};
      for (int i = 0; i < panels; ++i) {
        const Panel<T>& panel = scratch.panels[i];
        const Block<T> block = SeenBlock(group, panel, keys, scratch.limits);
        if (block.key.rows == 0) continue;
        WithVectors(panel.vectors, [&]<int kVectors>() {
          PanelBlock<T, kVectors>(panel, block, scratch.weights);
        });
      }
    }
    for (int i = 0; i < panels; ++i) {
      const Panel<T>& panel = scratch.panels[i];
      WithVectors(panel.vectors,
                  [&]<int kVectors>() { MergeSegment<T, kVectors>(panel, value_width); });
    }
  }
  for (int i = 0; i < panels; ++i) FinishPanel(group, scratch.panels[i]);
}

// A panel's softmax weights over a block: [key][lane] in `weights`.
template <typename T, int kVectors>
HWY_INLINE void PanelWeights(const Panel<T>& panel, const Block<T>& block, T* weights) {
  constexpr int kKeys = TileHeight(kVectors);
  const Tag<T> d;
  const size_t lanes = LanesOf<T>();
  for (int64_t j = 0; j < block.key.rows; j += kKeys) {
    const T* keys[kKeys];
    KeyRows<T, kKeys>(block.key, j, keys);
    Vec<T> scores[kKeys][kVectors];
    ScoreTile<T, kVectors, kKeys>(panel.query, keys, block.key.columns, scores);
    if (block.limits != nullptr || j + kKeys > block.key.rows) {
      Hide<T, kVectors, kKeys>(block.limits, block.key.rows, j, scores);
    }
    for (int c = 0; c < kVectors; ++c) {
      const Vec<T> reference = hn::Load(d, panel.total_reference + c * lanes);
      const Vec<T> inverse = hn::Load(d, panel.total_sum + c * lanes);
      for (int i = 0; i < kKeys; ++i) {
        Vec<T> w = hn::Mul(Weight(d, scores[i][c], reference), inverse);
        if (block.limits != nullptr) {
          // In a NaN row 0 times 1 / L is NaN: hidden stays 0.
          const auto seen =
              hn::Lt(hn::Set(d, static_cast<T>(j + i)), hn::Load(d, block.limits + c * lanes));
          w = hn::IfThenElseZero(seen, w);
        }
        hn::Store(w, d, weights + ((j + i) * kVectors + c) * lanes);
      }
    }
  }
}

template <typename T>
void WeightsImpl(const FusedGroup<T>& group, KeyRange keys, T* memory, T* weights, int64_t stride) {
  Arena<T> arena(memory);
  Scratch<T> scratch(arena, group.query.rows, group.query.columns, group.value.columns);
  PackQueries(group, scratch);
  for (int64_t key = 0; key < keys.size(); ++key) {
    std::fill_n(weights + key * stride, group.query.rows, T{0});
  }
  for (int i = 0; i < scratch.count; ++i) {
    const Panel<T>& panel = scratch.panels[i];
    const int64_t lanes = LanesOfPanel(panel);
    const int64_t first = panel.first - group.first_query;
    for (int64_t lane = 0; lane < lanes; ++lane) {
      const int64_t row = first + std::min(lane, panel.rows - 1);
      panel.total_reference[lane] = group.reference[row];
      panel.total_sum[lane] = group.inverse_sum[row];
    }
    const Block<T> block = SeenBlock(group, panel, keys, scratch.limits);
    WithVectors(panel.vectors,
                [&]<int kVectors>() { PanelWeights<T, kVectors>(panel, block, scratch.weights); });
    for (int64_t key = 0; key < block.key.rows; ++key) {
      std::copy_n(scratch.weights + key * lanes, panel.rows, weights + key * stride + first);
    }
  }
}

// HWY_EXPORT takes no template: each function by name, for float (F) and double (D).
int64_t GroupRowsF() { return GroupRows<float>(); }
int64_t GroupRowsD() { return GroupRows<double>(); }
int64_t ScratchElementsF(int64_t n, int64_t d, int64_t dv) {
  return ScratchElements<float>(n, d, dv);
}
int64_t ScratchElementsD(int64_t n, int64_t d, int64_t dv) {
  return ScratchElements<double>(n, d, dv);
}
void ForwardF(const FusedGroup<float>& group, float* memory, const std::atomic<bool>& stop) {
  ForwardImpl(group, memory, stop);
}
void ForwardD(const FusedGroup<double>& group, double* memory, const std::atomic<bool>& stop) {
  ForwardImpl(group, memory, stop);
}
void WeightsF(const FusedGroup<float>& group, KeyRange keys, float* memory, float* weights,
              int64_t stride) {
  WeightsImpl(group, keys, memory, weights, stride);
}
void WeightsD(const FusedGroup<double>& group, KeyRange keys, double* memory, double* weights,
              int64_t stride) {
  WeightsImpl(group, keys, memory, weights, stride);
}

}  // namespace attendant::core::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace attendant::core {

HWY_EXPORT(GroupRowsF);
HWY_EXPORT(GroupRowsD);
HWY_EXPORT(ScratchElementsF);
HWY_EXPORT(ScratchElementsD);
HWY_EXPORT(ForwardF);
HWY_EXPORT(ForwardD);
HWY_EXPORT(WeightsF);
HWY_EXPORT(WeightsD);

template <>
int64_t FusedGroupRows<float>() {
  return HWY_DYNAMIC_DISPATCH(GroupRowsF)();
}
template <>
int64_t FusedGroupRows<double>() {
  return HWY_DYNAMIC_DISPATCH(GroupRowsD)();
}
template <>
int64_t FusedScratchElements<float>(const Problem& p) {
  return HWY_DYNAMIC_DISPATCH(ScratchElementsF)(p.queries, p.width, p.value_width);
}
template <>
int64_t FusedScratchElements<double>(const Problem& p) {
  return HWY_DYNAMIC_DISPATCH(ScratchElementsD)(p.queries, p.width, p.value_width);
}
template <>
void FusedForward(const FusedGroup<float>& group, float* scratch, const std::atomic<bool>& stop) {
  HWY_DYNAMIC_DISPATCH(ForwardF)(group, scratch, stop);
}
template <>
void FusedForward(const FusedGroup<double>& group, double* scratch, const std::atomic<bool>& stop) {
  HWY_DYNAMIC_DISPATCH(ForwardD)(group, scratch, stop);
}
template <>
void FusedWeights(const FusedGroup<float>& group, KeyRange keys, float* scratch, float* weights,
                  int64_t stride) {
  HWY_DYNAMIC_DISPATCH(WeightsF)(group, keys, scratch, weights, stride);
}
template <>
void FusedWeights(const FusedGroup<double>& group, KeyRange keys, double* scratch, double* weights,
                  int64_t stride) {
  HWY_DYNAMIC_DISPATCH(WeightsD)(group, keys, scratch, weights, stride);
}

}  // namespace attendant::core
#endif  // HWY_ONCE
