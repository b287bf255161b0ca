// The fused kernel for a panel of queries and a block of keys: lanes are queries. The arithmetic is
// fused_kernel.h's contract.

// Per-target include guard.
#if defined(ATTENDANT_CORE_FUSED_PANEL_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ATTENDANT_CORE_FUSED_PANEL_INL_H_
#undef ATTENDANT_CORE_FUSED_PANEL_INL_H_
#else
#define ATTENDANT_CORE_FUSED_PANEL_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <cstdint>
#include <limits>

#include "core/checked_math.h"
#include "core/fused_tiles-inl.h"
#include "core/mask.h"
#include "core/tensor_view.h"

HWY_BEFORE_NAMESPACE();
namespace attendant::core::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// Whether a tile is exponentiated beside the next one's multiply-adds or right after its own.
// Measured: 0.93 against 0.88 of the peak on AVX-512 (Zen 5), but 0.82 against 0.85 on AVX2 (Zen
// 3), whose 16 registers the tile fills.
constexpr bool kExponentiateBeside = HWY_TARGET == HWY_AVX3;
// Otherwise so many keys wait for each other: what an exponential waits for is hidden by others,
// and at the end of a row of them nothing is. Measured: 1 to 2 % over 4 keys (Zen 3), flat beyond.
constexpr int64_t kExponentiateKeys = 16;

// A panel's state: arrays of [index][vector][lane].
template <typename T>
struct Panel {
  int64_t first = 0;  // query, within the head
  int64_t rows = 0;
  int vectors = 0;
  T* query = nullptr;   // [d], scale_log2 included
  T* output = nullptr;  // [dimension, rounded up to a strip], of the segment at hand
  T* reference = nullptr;
  T* sum = nullptr;
  T* total_output = nullptr;  // of the segments before, merged
  T* total_reference = nullptr;
  T* total_sum = nullptr;
  T* shift = nullptr;  // HeadMask::Shift of each row; null where no mask is added
};

template <typename T>
int64_t LanesOfPanel(const Panel<T>& panel) {
  return panel.vectors * LanesOf<T>();
}

inline int64_t StripsOf(int64_t value_width) { return CeilDiv(value_width, kStrip); }

// A block of keys, seen from a panel.
template <typename T>
struct Block {
  int64_t first = 0;        // of its rows, within what was packed
  MatrixView<const T> key;  // the rows that some lane sees
  Strips<T> values;         // the same rows
  // [vector][lane]: the first of the rows that a lane sees, and the end of them. Null where every
  // lane sees all.
  const T* begins = nullptr;
  const T* ends = nullptr;
  // What the mask adds, [row][vector][lane]; or a byte for each row and lane, 0 where it hides it,
  // [row / sizeof(T)][vector][lane][row % sizeof(T)]. Null where it neither adds nor hides.
  const T* bias = nullptr;
  const T* flags = nullptr;
  bool bias_hides = false;  // some of what is added is -infinity
  bool select = false;      // a hidden value may not be finite
  // What is done to the scores, null where nothing is; [vector][lane] where the queries stand,
  // counted from the first key of the kFusedBlock that the rows belong to; and which key of that
  // the first row is.
  const ScoreChange<T>* change = nullptr;
  const T* positions = nullptr;
  int64_t first_in_block = 0;
};

template <typename T>
HWY_INLINE bool ChangesScores(const Block<T>& block) {
  return block.change != nullptr || block.bias != nullptr;
}

// Set in a packed flag that hides.
constexpr unsigned kHiddenBit = 0x80;

template <typename T>
HWY_INLINE bool HidesSome(const Block<T>& block) {
  return block.ends != nullptr || block.flags != nullptr || block.bias_hides;
}

// Which lanes of vector c, of `vectors`, see row `row` of a block.
template <typename T>
HWY_INLINE hn::Mask<Tag<T>> Seen(const Block<T>& block, int vectors, int c, int64_t row) {
  const Tag<T> d;
  constexpr int64_t kLanes = LanesOf<T>();
  constexpr int64_t kBytes = sizeof(T);
  auto seen = hn::Eq(hn::Zero(d), hn::Zero(d));
  if (block.ends != nullptr) {
    const Vec<T> at = hn::Set(d, static_cast<T>(row));
    seen = hn::And(hn::Ge(at, hn::Load(d, block.begins + c * kLanes)),
                   hn::Lt(at, hn::Load(d, block.ends + c * kLanes)));
  }
  if (block.bias_hides) {
    const Vec<T> bias = hn::Load(d, block.bias + (row * vectors + c) * kLanes);
    // Not Ne, which is false of NaN on some targets.
    const auto hidden = hn::Eq(bias, hn::Set(d, -std::numeric_limits<T>::infinity()));
    seen = hn::And(seen, hn::Not(hidden));
  }
  if (block.flags != nullptr) {
    using Unsigned = hwy::MakeUnsigned<T>;
    const hn::RebindToUnsigned<Tag<T>> du;
    const Vec<T> word = hn::Load(d, block.flags + (row / kBytes * vectors + c) * kLanes);
    const auto hidden = hn::Set(du, Unsigned{kHiddenBit} << (8 * (row % kBytes)));
    const auto flag = hn::And(hn::BitCast(du, word), hidden);
    seen = hn::And(seen, hn::RebindMask(d, hn::Eq(flag, hn::Zero(du))));
  }
  return seen;
}

// output += weights of the block times its values.
template <typename T, int kVectors, bool kSelect>
HWY_INLINE void ValueProduct(const Block<T>& block, const T* weights, T* output) {
  constexpr int kStrips = TileStrips(kVectors);
  const Strips<T>& values = block.values;
  const auto seen = [&](int c, int64_t row) HWY_ATTR {
    if constexpr (kSelect) {
      return Seen(block, kVectors, c, row);
    } else {
      return kEverySeen;
    }
  };
  int64_t strip = 0;
  for (; strip + kStrips <= values.count; strip += kStrips) {
    ValueTile<T, kVectors, kStrips>(values, strip, block.key.rows, weights, seen, output);
  }
  if constexpr (kStrips > 1) {
    for (; strip < values.count; ++strip) {
      ValueTile<T, kVectors, 1>(values, strip, block.key.rows, weights, seen, output);
    }
  }
}

// Multiplies `count` entries of [index][vector][lane] by a factor a lane.
template <typename T, int kVectors>
HWY_INLINE void ScaleLanes(T* array, int64_t count, const Vec<T> (&factors)[kVectors]) {
  const Tag<T> d;
  constexpr int64_t kLanes = LanesOf<T>();
  for (int64_t i = 0; i < count; ++i) {
    for (int c = 0; c < kVectors; ++c) {
      T* const at = array + (i * kVectors + c) * kLanes;
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
  constexpr int64_t kLanes = LanesOf<T>();
  const Vec<T> threshold = hn::Set(d, T{kThreshold});
  Vec<T> factors[kVectors];
  bool fresh = true;  // only lanes move that have seen no key: they have nothing to take along
  for (int c = 0; c < kVectors; ++c) {
    const Vec<T> before = hn::Load(d, panel.reference + c * kLanes);
    const auto moves = hn::Gt(hn::Sub(largest[c], before), threshold);
    const auto seen = hn::Gt(before, hn::Set(d, NoReference<T>()));
    fresh = fresh && hn::AllFalse(d, hn::And(moves, seen));
    const Vec<T> after = hn::IfThenElse(moves, hn::Add(hn::Round(largest[c]), threshold), before);
    // Where nothing moves the factor is 1, also for 'no key yet' and after an infinite score.
    factors[c] = hn::IfThenElse(moves, PowerOfTwo(d, hn::Sub(before, after)), hn::Set(d, T{1}));
    hn::Store(after, d, panel.reference + c * kLanes);
  }
  if (fresh) return;
  ScaleLanes<T, kVectors>(panel.sum, 1, factors);
  ScaleLanes<T, kVectors>(block_sum, 1, factors);
  ScaleLanes<T, kVectors>(panel.output, width, factors);
  ScaleLanes<T, kVectors>(weights, done, factors);
}

// first: the tile's first row.
template <typename T, int kVectors, int kKeys>
HWY_INLINE void ChangeScores(const Block<T>& block, int64_t first,
                             Vec<T> (&scores)[kKeys][kVectors]) {
  const Tag<T> d;
  constexpr int64_t kLanes = LanesOf<T>();
  const auto each = [&](const auto& change) HWY_ATTR {
    for (int i = 0; i < kKeys; ++i) {
      for (int c = 0; c < kVectors; ++c) scores[i][c] = change(i, c);
    }
  };
  const auto add_mask = [&]() HWY_ATTR {
    const T* const bias = block.bias + first * kVectors * kLanes;
    const auto number = [&](int i, int c)
                            HWY_ATTR { return hn::Load(d, bias + (i * kVectors + c) * kLanes); };
    if (block.bias_hides) {
      each([&](int i, int c) HWY_ATTR { return Masked(d, number(i, c), scores[i][c]); });
    } else {
      each([&](int i, int c) HWY_ATTR { return Added(d, number(i, c), scores[i][c]); });
    }
  };
  const ScoreChange<T>* const change = block.change;
  // Apart, so that a mask alone finds the scores in their registers still.
  if (change == nullptr) return add_mask();
  if (change->softcap != 0) {
    each([&](int i, int c) HWY_ATTR { return Capped(d, *change, scores[i][c]); });
  }
  if (block.bias != nullptr) add_mask();
  if (change->slope != 0) {
    each([&](int i, int c) HWY_ATTR {
      const Vec<T> key = hn::Set(d, static_cast<T>(block.first_in_block + first + i));
      const Vec<T> position = hn::Load(d, block.positions + c * kLanes);
      return Sloped(d, *change, hn::Abs(hn::Sub(position, key)), scores[i][c]);
    });
  }
}

// Hides kDecision keys of vector c, the first of them `first`, by their flags.
template <typename T, int kVectors, int kKeys>
HWY_INLINE void HideByFlags(const T* flags, int64_t first, int i, int c,
                            Vec<T> (&scores)[kKeys][kVectors]) {
  constexpr int64_t kBytes = sizeof(T);
  static_assert(kDecision == 4 && kBytes % kDecision == 0);
  const Tag<T> d;
  const hn::RebindToUnsigned<Tag<T>> du;
  const Vec<T> hidden = hn::Set(d, -std::numeric_limits<T>::infinity());
  const int64_t key = first + i;
  auto word = hn::BitCast(du, hn::Load(d, flags + (key / kBytes * kVectors + c) * LanesOf<T>()));
  if constexpr (kBytes > kDecision) {
    // To the upper half, where they lie in the lower.
    if (key % kBytes == 0) word = hn::ShiftLeft<8 * kDecision>(word);
  }
  const auto hide = [&](int key_of_word, auto flag) HWY_ATTR {
    Vec<T>& score = scores[i + key_of_word][c];
    score = hn::IfNegativeThenElse(hn::BitCast(d, flag), hidden, score);
  };
  hide(0, hn::ShiftLeft<24>(word));
  hide(1, hn::ShiftLeft<16>(word));
  hide(2, hn::ShiftLeft<8>(word));
  hide(3, word);
}

// Scores that a lane does not see become -infinity. first: the tile's first key within the block.
template <typename T, int kVectors, int kKeys>
HWY_INLINE void Hide(const Block<T>& block, int64_t first, Vec<T> (&scores)[kKeys][kVectors]) {
  const Tag<T> d;
  constexpr int64_t kLanes = LanesOf<T>();
  const Vec<T> hidden = hn::Set(d, -std::numeric_limits<T>::infinity());
  if (block.ends != nullptr) {
    for (int i = 0; i < kKeys; ++i) {
      const Vec<T> at = hn::Set(d, static_cast<T>(first + i));
      for (int c = 0; c < kVectors; ++c) {
        const auto seen = hn::And(hn::Ge(at, hn::Load(d, block.begins + c * kLanes)),
                                  hn::Lt(at, hn::Load(d, block.ends + c * kLanes)));
        scores[i][c] = hn::IfThenElse(seen, scores[i][c], hidden);
      }
    }
  }
  for (int i = 0; i < kKeys; ++i) {
    if (first + i < block.key.rows) continue;
    for (int c = 0; c < kVectors; ++c) scores[i][c] = hidden;
  }
}

// From a tile's products to its scores: what is added, and -infinity where a key is hidden.
template <typename T, int kVectors, int kKeys, bool kChange>
HWY_INLINE void FinishScores(const Block<T>& block, int64_t first,
                             Vec<T> (&scores)[kKeys][kVectors]) {
  if constexpr (kChange) ChangeScores(block, first, scores);
  if (block.flags != nullptr) {
    for (int i = 0; i < kKeys; i += kDecision) {
      for (int c = 0; c < kVectors; ++c) HideByFlags(block.flags, first, i, c, scores);
    }
  }
  if (block.ends != nullptr || first + kKeys > block.key.rows) Hide(block, first, scores);
}

// Turns a key's scores, row `row` of `weights`, into weights, and adds them to the block's sum.
template <typename T, int kVectors>
HWY_INLINE void Exponentiate(const T* reference, int64_t row, T* weights, T* block_sum) {
  const Tag<T> d;
  constexpr int64_t kLanes = LanesOf<T>();
  T* const at = weights + row * kVectors * kLanes;
  for (int c = 0; c < kVectors; ++c) {
    const Vec<T> w = Exp2(d, hn::Load(d, at + c * kLanes), hn::Load(d, reference + c * kLanes));
    hn::Store(w, d, at + c * kLanes);
    T* const sum = block_sum + c * kLanes;
    hn::Store(hn::Add(hn::Load(d, sum), w), d, sum);
  }
}

// The keys of a tile; rows beyond the block's last are that one again, and hidden.
template <typename T, int kKeys>
HWY_INLINE void KeyRows(const MatrixView<const T>& key, int64_t first, const T* (&rows)[kKeys]) {
  for (int i = 0; i < kKeys; ++i) rows[i] = key.Row(std::min(first + i, key.rows - 1));
}

// Folds a block of keys into a panel. weights: room for a block, rounded up to a tile. beside:
// called once a tile.
//
// A tile's scores are stored as they are, and exponentiated before or while a later tile's are
// computed.
template <typename T, int kVectors, bool kChange, class Beside>
HWY_INLINE void PanelBlock(const Panel<T>& panel, const Block<T>& block, T* weights,
                           Beside& beside) {
  constexpr int kKeys = TileKeys(kVectors);
  constexpr int64_t kLanes = LanesOf<T>();
  const Tag<T> d;
  const Vec<T> none = hn::Set(d, -std::numeric_limits<T>::infinity());
  const Vec<T> threshold = hn::Set(d, T{kThreshold});
  const int64_t width = block.key.columns;
  HWY_ALIGN T block_sum[kVectors * kLanes];
  for (int c = 0; c < kVectors; ++c) hn::Store(hn::Zero(d), d, block_sum + c * kLanes);
  int64_t finished = 0;  // rows of `weights`; the ones after it hold scores
  const auto finish = [&](int64_t end) HWY_ATTR {
    for (; finished < end; ++finished) {
      Exponentiate<T, kVectors>(panel.reference, finished, weights, block_sum);
    }
  };
  for (int64_t j = 0; j < block.key.rows; j += kKeys) {
    const T* keys[kKeys];
    KeyRows<T, kKeys>(block.key, j, keys);
    beside();
    Vec<T> scores[kKeys][kVectors];
    const int64_t waiting = j - finished;
    if (kExponentiateBeside && waiting == kKeys) {
      ScoreTile<T, kVectors, kKeys, kKeys>(panel.query, keys, width, scores, [&](int i) HWY_ATTR {
        Exponentiate<T, kVectors>(panel.reference, finished + i, weights, block_sum);
      });
      finished = j;
    } else {
      if (kExponentiateBeside || waiting >= kExponentiateKeys) finish(j);
      ScoreTile<T, kVectors, kKeys, 0>(panel.query, keys, width, scores, [](int) {});
    }
    FinishScores<T, kVectors, kKeys, kChange>(block, j, scores);
    for (int first = 0; first < kKeys; first += kDecision) {
      Vec<T> largest[kVectors];
      auto any = hn::Lt(none, none);
      for (int c = 0; c < kVectors; ++c) {
        // Max returns its second operand where either is NaN: the one that is no score stands
        // there.
        largest[c] = none;
        for (int i = first; i < first + kDecision; ++i) {
          largest[c] = hn::Max(scores[i][c], largest[c]);
          hn::Store(scores[i][c], d, weights + ((j + i) * kVectors + c) * kLanes);
        }
        const Vec<T> reference = hn::Load(d, panel.reference + c * kLanes);
        any = hn::Or(any, hn::Gt(hn::Sub(largest[c], reference), threshold));
      }
      if (HWY_UNLIKELY(!hn::AllFalse(d, any))) {
        finish(j + first);
        MoveReference<T, kVectors>(panel, largest, block.values.count * kStrip, block_sum, weights,
                                   finished);
      }
    }
  }
  finish(block.key.rows);
  for (int c = 0; c < kVectors; ++c) {
    T* const sum = panel.sum + c * kLanes;
    hn::Store(hn::Add(hn::Load(d, sum), hn::Load(d, block_sum + c * kLanes)), d, sum);
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
  constexpr int64_t kLanes = LanesOf<T>();
  for (int c = 0; c < kVectors; ++c) {
    const int64_t at = c * kLanes;
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
      const int64_t element = (x * kVectors + c) * kLanes;
      T* const total = panel.total_output + element;
      const Vec<T> scaled = hn::Mul(hn::Load(d, total), total_factor);
      const Vec<T> joined = hn::MulAdd(hn::Load(d, panel.output + element), factor, scaled);
      hn::Store(hn::IfThenElse(empty, hn::Load(d, total), joined), d, total);
    }
  }
}

// A panel's softmax weights over a block: [key][vector][lane] in `weights`.
template <typename T, int kVectors>
HWY_INLINE void PanelWeights(const Panel<T>& panel, const Block<T>& block, T* weights) {
  constexpr int kKeys = TileKeys(kVectors);
  constexpr int64_t kLanes = LanesOf<T>();
  const Tag<T> d;
  for (int64_t j = 0; j < block.key.rows; j += kKeys) {
    const T* keys[kKeys];
    KeyRows<T, kKeys>(block.key, j, keys);
    Vec<T> scores[kKeys][kVectors];
    ScoreTile<T, kVectors, kKeys, 0>(panel.query, keys, block.key.columns, scores, [](int) {});
    if (ChangesScores(block)) ChangeScores(block, j, scores);
    for (int c = 0; c < kVectors; ++c) {
      const Vec<T> reference = hn::Load(d, panel.total_reference + c * kLanes);
      const Vec<T> inverse = hn::Load(d, panel.total_sum + c * kLanes);
      for (int i = 0; i < kKeys; ++i) {
        Vec<T> w = hn::Mul(Exp2(d, scores[i][c], reference), inverse);
        w = hn::IfThenElse(hn::Eq(w, w), w, hn::Set(d, std::numeric_limits<T>::quiet_NaN()));
        if (HidesSome(block)) w = hn::IfThenElseZero(Seen(block, kVectors, c, j + i), w);
        hn::Store(w, d, weights + ((j + i) * kVectors + c) * kLanes);
      }
    }
  }
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

}  // namespace attendant::core::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
