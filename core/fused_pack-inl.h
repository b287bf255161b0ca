// What the fused kernels read, as they read it: queries by lane, keys and values row by row, and
// which of a block a panel sees. Included inside a Highway target, compiled once for each.

// Per-target include guard.
#if defined(ATTENDANT_CORE_FUSED_PACK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ATTENDANT_CORE_FUSED_PACK_INL_H_
#undef ATTENDANT_CORE_FUSED_PACK_INL_H_
#else
#define ATTENDANT_CORE_FUSED_PACK_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <cstdint>

#include "core/checked_math.h"
#include "core/fused_mask-inl.h"
#include "core/fused_panel-inl.h"
#include "core/fused_tiles-inl.h"
#include "core/mask.h"
#include "core/problem.h"
#include "core/tensor_view.h"

HWY_BEFORE_NAMESPACE();
namespace attendant::core::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

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

// Queries are divided among as few panels as they take, each as wide as the rest allows: two of 2
// vectors are faster than 3 and 1.
template <typename T>
int VectorsOfNextPanel(int64_t rows_left) {
  const int64_t vectors = CeilDiv(rows_left, LanesOf<T>());
  return static_cast<int>(CeilDiv(vectors, CeilDiv(vectors, kMostVectors)));
}
// Lanes of the widest of them.
template <typename T>
int64_t WidestPanel(int64_t rows) {
  return std::min(CeilDiv(rows, LanesOf<T>()), int64_t{kMostVectors}) * LanesOf<T>();
}

// Copies rows to `to`, one after the other, widened.
template <typename S>
MatrixView<const Wide<S>> Dense(const MatrixView<const S>& rows, Wide<S>* to) {
  for (int64_t row = 0; row < rows.rows; ++row) {
    WidenRow(rows.Row(row), rows.columns, to + row * rows.columns);
  }
  return {to, rows.rows, rows.columns, rows.columns};
}

// Rows as the tiles read them: half precision is copied to `to`, and so are others where `copy`.
template <typename S>
MatrixView<const Wide<S>> Readable(const MatrixView<const S>& rows, bool copy, Wide<S>* to) {
  if constexpr (!kIsHalf<S>) {
    if (!copy) return rows;
  }
  return Dense(rows, to);
}

// Rows, transposed for a panel of `vectors` vectors: to[x][vector][lane] = scale * rows[lane][x].
// Lanes beyond the rows hold the last one again.
template <typename S, typename T = Wide<S>>
void PackColumns(const MatrixView<const S>& rows, int vectors, T scale, T* to) {
  const Tag<T> d;
  constexpr int64_t kLanes = LanesOf<T>();
  const int64_t whole = rows.columns / kBlockLanes<T> * kBlockLanes<T>;
  const Vec<T> factor = hn::Set(d, scale);
  for (int c = 0; c < vectors; ++c) {
    const S* lanes[kLanes];
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      lanes[lane] = rows.Row(std::min(c * kLanes + lane, rows.rows - 1));
    }
    const auto store = [&](int64_t x, Vec<T> column) HWY_ATTR {
      hn::Store(hn::Mul(factor, column), d, to + (x * vectors + c) * kLanes);
    };
    for (int64_t x = 0; x < whole; x += kBlockLanes<T>) {
      Vec<T> columns[kBlockLanes<T>];
      LoadColumns(d, lanes, x, columns);
      for (int i = 0; i < kBlockLanes<T>; ++i) store(x + i, columns[i]);
    }
    for (int64_t x = whole; x < rows.columns; ++x) store(x, LoadColumn(d, lanes, x));
  }
}

// Keys and values that lie apart are copied: they would share the few sets of a cache.
inline bool LieApart(const Problem& problem) {
  return problem.layout == Layout::kBthd && problem.kv_heads > 1;
}

// A block of keys and values, as the kernel reads them.
template <typename T>
struct PackedBlock {
  KeyRange keys;
  MatrixView<const T> key;
  Strips<T> values;
  bool finite = true;  // the values, where somebody may not see them
};

// Blocks begin at keys that every target's tiles begin at: what is decided for a group of keys
// stays together.
constexpr int64_t kFirstKeys = 8;
static_assert(kFirstKeys % TileKeys(1) == 0 && kFusedBlock % kFirstKeys == 0);

// The part of `keys` that the queries first .. first + count - 1 see.
inline KeyRange SeenPart(const Problem& problem, int64_t batch, int64_t first, int64_t count,
                         KeyRange keys) {
  const KeyRange seen = problem.VisibleKeysOfAny(batch, first, count);
  if (problem.Ask(batch, first, count, keys) == Visibility::kNone) return {keys.begin, keys.begin};
  const int64_t begin = std::max(keys.begin, seen.begin / kFirstKeys * kFirstKeys);
  return {begin, std::max(begin, std::min(keys.end, seen.end))};
}

// Where SeenBlock puts what it says of a block.
template <typename T>
struct SeenScratch {
  T* begins = nullptr;  // [vector][lane], as in Block
  T* ends = nullptr;
  T* positions = nullptr;
  T* mask = nullptr;  // PackedMaskElements and MaskRowElements; null where there is no mask
  T* mask_rows = nullptr;

  // lanes: of the widest panel.
  SeenScratch(Arena<T>& arena, const Problem& problem, int64_t lanes)
      : begins(arena.Take(lanes)), ends(arena.Take(lanes)), positions(arena.Take(lanes)) {
    if (!problem.mask.has_value()) return;
    mask = arena.Take(PackedMaskElements<T>(lanes));
    mask_rows = arena.Take(MaskRowElements<T>(lanes));
  }
};

// The queries of a head that a block is seen by.
template <typename T>
struct Seer {
  const Problem& problem;
  int64_t batch;
  const HeadMask<T>& mask;
  const ScoreChange<T>& change;
};

// The block as the panel sees it; without a row where it sees none. scores: where the panel's
// scores of the block will be.
template <typename T>
Block<T> SeenBlock(const Seer<T>& seer, const Panel<T>& panel, const PackedBlock<T>& packed,
                   T* scores, const SeenScratch<T>& scratch) {
  const Problem& problem = seer.problem;
  Block<T> block;
  const KeyRange keys = SeenPart(problem, seer.batch, panel.first, panel.rows, packed.keys);
  const int64_t rows = keys.size();
  if (rows == 0) return block;
  block.first = keys.begin - packed.keys.begin;
  block.key = packed.key.Rows(block.first, rows);
  block.values = packed.values;
  block.values.data += block.first * packed.values.key_stride;
  block.select = !packed.finite;
  if (seer.mask.present()) {
    // Numbers lie where the scores they are added to will: they have been read by then, and both
    // together would not stay in L1 (1.02x the speed at T512 D32, Zen 3). A value product that
    // selects asks for them again.
    T* const packed_mask = seer.mask.added() && !block.select ? scores : scratch.mask;
    PackMask(seer.mask, panel, keys, packed_mask, scratch.mask_rows, block);
    if (block.key.rows == 0) return block;
  }
  const int64_t lanes = LanesOfPanel(panel);
  if (ChangesScores(problem)) {
    block.change = &seer.change;
    block.positions = scratch.positions;
    block.first_in_block = keys.begin % kFusedBlock;
    const int64_t origin = problem.Offset(seer.batch) - (keys.begin - block.first_in_block);
    for (int64_t lane = 0; lane < lanes; ++lane) {
      scratch.positions[lane] = static_cast<T>(panel.first + lane + origin);
    }
  }
  if (problem.Ask(seer.batch, panel.first, panel.rows, keys) != Visibility::kMixed) return block;
  for (int64_t lane = 0; lane < lanes; ++lane) {
    const int64_t query = panel.first + std::min(lane, panel.rows - 1);
    const KeyRange seen = problem.VisibleKeys(seer.batch, query);
    const auto row = [&](int64_t key) {
      return static_cast<T>(std::clamp<int64_t>(key - keys.begin, 0, rows));
    };
    scratch.begins[lane] = row(seen.begin);
    scratch.ends[lane] = row(seen.end);
  }
  block.begins = scratch.begins;
  block.ends = scratch.ends;
  return block;
}

}  // namespace attendant::core::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
