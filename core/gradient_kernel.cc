#include "core/gradient_kernel.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/checked_math.h"
#include "core/simd_targets.h"
#include "core/softmax.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/gradient_kernel.cc"
#include <hwy/foreach_target.h>  // compiles the rest of this file once a target
#include <hwy/highway.h>

#include "core/fused_pack-inl.h"
#include "core/fused_panel-inl.h"
#include "core/fused_tiles-inl.h"

HWY_BEFORE_NAMESPACE();
namespace attendant::core::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// Keys whose weights and gradients are computed at a time: 12 KiB each for 32 queries. Half as many
// lost 0.02 of the peak, twice as many gained nothing.
constexpr int64_t kGradientKeys = 96;
// Panels whose weights are summed over together: so many queries pay for reading and writing the
// gradients of keys and values once. 2 panels lost 0.02 of the peak (AVX-512), nothing with AVX2.
constexpr int kTogether = 4;

// Register tile of the products that add to rows: rows x vectors of accumulators, beside the
// vectors they multiply and one broadcast.
constexpr int kProductRows = 6;
#if HWY_TARGET == HWY_AVX3
constexpr int kProductVectors = 4;
#else
constexpr int kProductVectors = 2;
#endif

// Rows are multiplied in strips of so many columns. Those that lie no further apart than this many
// bytes are read in place; others would share few sets of L1, and are packed. Measured at 512 bytes
// (Zen 3): 0.80 of the peak in place, 0.75 packed.
constexpr int64_t kNearStride = 1024;
template <typename T>
constexpr int64_t StripColumns() {
  return kProductVectors * LanesOf<T>();
}

template <typename T>
constexpr int64_t RowsTogether() {
  return kTogether * kMostVectors * LanesOf<T>();
}

// The second factor of a product: rows in place, or packed as [strip][row][column of the strip],
// the last strip's missing columns 0.
template <typename T>
struct RowStrips {
  const T* data = nullptr;
  int64_t strip_stride = 0;
  int64_t row_stride = 0;

  const T* Strip(int64_t strip) const { return data + strip * strip_stride; }
  RowStrips From(int64_t row) const { return {data + row * row_stride, strip_stride, row_stride}; }
};

template <typename S>
struct PackedRows {
  RowStrips<Wide<S>> strips;
  MatrixView<const S> left_out;  // the same rows, where packed ones have 0 for what is not finite

  // REQUIRES: first + count <= the number of rows.
  PackedRows From(int64_t first, int64_t count) const {
    return {strips.From(first), left_out.rows == 0 ? left_out : left_out.Rows(first, count)};
  }
};
template <typename T>
int64_t PackedElements(int64_t rows, int64_t columns) {
  return SaturatingProduct({CeilDiv(columns, StripColumns<T>()), StripColumns<T>(), rows});
}

// hides: some pair that the rows are multiplied for may be hidden, and then what is not finite is
// left out.
template <typename S, typename T = Wide<S>>
PackedRows<S> PackStrips(const MatrixView<const S>& rows, bool hides, T* to) {
  constexpr int64_t kColumns = StripColumns<T>();
  PackedRows<S> packed{{to, rows.rows * kColumns, kColumns}, {}};
  if (hides && !AllRowsFinite(rows)) packed.left_out = rows;
  if constexpr (!kIsHalf<S>) {
    const bool near = rows.stride * static_cast<int64_t>(sizeof(T)) <= kNearStride;
    if (near && rows.columns % kColumns == 0 && packed.left_out.rows == 0) {
      return {{rows.data, kColumns, rows.stride}, {}};
    }
  }
  for (int64_t x = 0; x < rows.columns; x += kColumns) {
    const int64_t columns = std::min(kColumns, rows.columns - x);
    for (int64_t row = 0; row < rows.rows; ++row, to += kColumns) {
      WidenRow(rows.Row(row) + x, columns, to);
      std::fill_n(to + columns, kColumns - columns, T{0});
      for (int64_t i = 0; packed.left_out.rows > 0 && i < columns; ++i) {
        if (!std::isfinite(to[i])) to[i] = 0;
      }
    }
  }
  return packed;
}

// A first factor: element (row, step) at data[row * row_stride + step * step_stride].
template <typename T>
struct Factor {
  const T* data = nullptr;
  int64_t row_stride = 0;
  int64_t step_stride = 0;
  int64_t steps = 0;
};

// sums[r][0 .. columns) += the chains over the factors' steps, one factor after the other, of their
// row `row` + r and the strip's rows.
template <typename T, int kRows>
HWY_INLINE void ProductTile(const Factor<T>* factors, int count, int64_t row,
                            const T* HWY_RESTRICT strip, int64_t strip_stride, T* const* sums,
                            int64_t columns) {
  const Tag<T> d;
  constexpr int64_t kLanes = LanesOf<T>();
  constexpr int64_t kColumns = StripColumns<T>();
  Vec<T> chains[kRows][kProductVectors];
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kProductVectors; ++c) chains[r][c] = hn::Zero(d);
  }
  for (int r = 0; r < kRows; ++r) __builtin_prefetch(sums[r], /*rw=*/1, /*locality=*/3);
  for (int f = 0; f < count; ++f) {
    const Factor<T>& factor = factors[f];
    const T* HWY_RESTRICT at[kRows];
    for (int r = 0; r < kRows; ++r) at[r] = factor.data + (row + r) * factor.row_stride;
    const int64_t stride = factor.step_stride;
#pragma GCC unroll 2
    for (int64_t step = 0, i = 0; step < factor.steps; ++step, i += stride, strip += strip_stride) {
      Vec<T> b[kProductVectors];
      for (int c = 0; c < kProductVectors; ++c) b[c] = hn::LoadU(d, strip + c * kLanes);
      for (int r = 0; r < kRows; ++r) {
        const Vec<T> a = hn::Set(d, at[r][i]);
        for (int c = 0; c < kProductVectors; ++c) chains[r][c] = hn::MulAdd(a, b[c], chains[r][c]);
      }
    }
  }
  if (HWY_LIKELY(columns == kColumns)) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      for (int c = 0; c < kProductVectors; ++c) {
        T* const to = sums[r] + c * kLanes;
        hn::StoreU(hn::Add(hn::LoadU(d, to), chains[r][c]), d, to);
      }
    }
  } else {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      HWY_ALIGN T elements[kColumns];
      for (int c = 0; c < kProductVectors; ++c) hn::Store(chains[r][c], d, elements + c * kLanes);
      for (int64_t x = 0; x < columns; ++x) sums[r][x] += elements[x];
    }
  }
}

// What PackStrips left out, for the pairs that take part: a hidden one's factor is 0.
template <typename S, typename T = Wide<S>>
HWY_NOINLINE void AddLeftOut(const Factor<T>* factors, int count, const MatrixView<const S>& rows,
                             const MatrixView<T>& sums) {
  for (int64_t f = 0, first = 0; f < count; first += factors[f++].steps) {
    const Factor<T>& factor = factors[f];
    for (int64_t step = 0; step < factor.steps; ++step) {
      const S* const from = rows.Row(first + step);
      if (AllFinite(from, rows.columns)) continue;
      for (int64_t row = 0; row < sums.rows; ++row) {
        const T a = factor.data[row * factor.row_stride + step * factor.step_stride];
        for (int64_t x = 0; a != 0 && x < rows.columns; ++x) {
          const T b = Widened(from[x]);
          if (!std::isfinite(b)) sums.Row(row)[x] += a * b;
        }
      }
    }
  }
}

// sums += factors * strips.
template <typename T>
HWY_NOINLINE void AddStrips(const Factor<T>* factors, int count, const RowStrips<T>& strips,
                            const MatrixView<T>& sums) {
  constexpr int64_t kColumns = StripColumns<T>();
  for (int64_t x = 0; x < sums.columns; x += kColumns) {
    const T* const strip = strips.Strip(x / kColumns);
    const int64_t columns = std::min(kColumns, sums.columns - x);
    const auto tile = [&]<int kRows>(int64_t row) HWY_ATTR {
      T* to[kRows];
      for (int r = 0; r < kRows; ++r) to[r] = sums.Row(row + r) + x;
      ProductTile<T, kRows>(factors, count, row, strip, strips.row_stride, to, columns);
    };
    int64_t row = 0;
    for (; row + kProductRows <= sums.rows; row += kProductRows) {
      tile.template operator()<kProductRows>(row);
    }
    for (; row < sums.rows; ++row) tile.template operator()<1>(row);
  }
}

// sums += factors * rows.
template <typename S, typename T = Wide<S>>
void AddProduct(const Factor<T>* factors, int count, const PackedRows<S>& rows,
                const MatrixView<T>& sums) {
  AddStrips(factors, count, rows.strips, sums);
  if (rows.left_out.rows > 0) AddLeftOut(factors, count, rows.left_out, sums);
}

// A panel of queries and what it makes of a block: [key][vector][lane].
template <typename T>
struct GradientPanel {
  Panel<T> panel;         // total_reference is m, total_sum 1 / l
  T* d_output = nullptr;  // scaled, [dimension][vector][lane]
  T* delta = nullptr;     // scaled, [vector][lane]
  T* weights = nullptr;
  T* d_scores = nullptr;
};

template <typename T>
struct GradientScratch {
  T* keys = nullptr;  // the tile's, row by row; null where they are read in place
  T* values = nullptr;
  T* key_strips;
  T* query_strips;
  T* d_output_strips;
  SeenScratch<T> seen;
  GradientPanel<T> panels[kTogether];

  GradientScratch(Arena<T>& arena, const Problem& problem)
      : seen(arena, problem, WidestPanel<T>(RowsTogether<T>())) {
    const int64_t lanes = WidestPanel<T>(RowsTogether<T>());
    if (LieApart(problem) || IsHalf(problem.dtype)) {
      keys = arena.Take(SaturatingProduct({kGradientTile, problem.width}));
      values = arena.Take(SaturatingProduct({kGradientTile, problem.value_width}));
    }
    key_strips = arena.Take(PackedElements<T>(kGradientTile, problem.width));
    query_strips = arena.Take(PackedElements<T>(RowsTogether<T>(), problem.width));
    d_output_strips = arena.Take(PackedElements<T>(RowsTogether<T>(), problem.value_width));
    for (GradientPanel<T>& each : panels) {
      each.panel.query = arena.Take(SaturatingProduct({problem.width, lanes}));
      each.d_output = arena.Take(SaturatingProduct({problem.value_width, lanes}));
      for (T** const array : {&each.panel.total_reference, &each.panel.total_sum, &each.delta}) {
        *array = arena.Take(lanes);
      }
      if (problem.AddsMask()) each.panel.shift = arena.Take(lanes);
      each.weights = arena.Take((kGradientKeys + TileKeys(1)) * lanes);
      each.d_scores = arena.Take((kGradientKeys + TileKeys(1)) * lanes);
    }
  }
};

template <typename T>
int64_t GradientScratchElementsImpl(const Problem& problem) {
  Arena<T> arena(nullptr);
  GradientScratch<T>(arena, problem);
  return arena.used();
}

// As many of the group's rows done .. end - 1 as a panel takes. scale: of d_output, and so of what
// comes of it.
template <typename S, typename T = Wide<S>>
void PackPanel(const GradientGroup<S>& group, int64_t done, int64_t end, T scale,
               GradientPanel<T>& to) {
  Panel<T>& panel = to.panel;
  panel.first = group.first_query + done;
  panel.vectors = VectorsOfNextPanel<T>(end - done);
  panel.rows = std::min(end - done, LanesOfPanel(panel));
  PackColumns(group.query.Rows(done, panel.rows), panel.vectors,
              static_cast<T>(group.problem->ScaleLog2()), panel.query);
  PackColumns(group.d_output.Rows(done, panel.rows), panel.vectors, scale, to.d_output);
  for (int64_t lane = 0; lane < LanesOfPanel(panel); ++lane) {
    const int64_t row = done + std::min(lane, panel.rows - 1);
    panel.total_reference[lane] = group.reference[row];
    panel.total_sum[lane] = group.inverse_sum[row];
    to.delta[lane] = scale * group.delta[row];
    if (panel.shift != nullptr) panel.shift[lane] = group.shift[row];
  }
}

// Products of the block's keys and the panel's queries.
template <typename T, int kVectors>
HWY_INLINE void BlockProducts(const GradientPanel<T>& of, const Block<T>& block, T* products) {
  constexpr int kKeys = TileKeys(kVectors);
  constexpr int64_t kLanes = LanesOf<T>();
  const Tag<T> d;
  for (int64_t j = 0; j < block.key.rows; j += kKeys) {
    const T* keys[kKeys];
    KeyRows<T, kKeys>(block.key, j, keys);
    Vec<T> tile[kKeys][kVectors];
    ScoreTile<T, kVectors, kKeys, 0>(of.panel.query, keys, block.key.columns, tile, [](int) {});
    for (int i = 0; i < kKeys; ++i) {
      for (int c = 0; c < kVectors; ++c) {
        hn::Store(tile[i][c], d, products + ((j + i) * kVectors + c) * kLanes);
      }
    }
  }
}

// Turns products into scores; where they are capped, d_scores tells how much of a change of the
// product arrives at its score: 1 - tanh^2. Apart from the products, whose registers it would take.
template <typename T, int kVectors, bool kChange>
HWY_NOINLINE void BlockScores(const Block<T>& block, T* scores, T* d_scores) {
  constexpr int kKeys = TileKeys(kVectors);
  constexpr int64_t kLanes = LanesOf<T>();
  const Tag<T> d;
  const bool capped = kChange && block.change != nullptr && block.change->softcap != 0;
  for (int64_t j = 0; j < block.key.rows; j += kKeys) {
    Vec<T> tile[kKeys][kVectors];
    for (int i = 0; i < kKeys; ++i) {
      for (int c = 0; c < kVectors; ++c) {
        const int64_t at = ((j + i) * kVectors + c) * kLanes;
        tile[i][c] = hn::Load(d, scores + at);
        if (!capped) continue;
        const auto inverse = hn::Set(d, block.change->inverse_softcap);
        const auto tanh = Tanh(d, hn::Mul(tile[i][c], inverse));
        hn::Store(hn::NegMulAdd(tanh, tanh, hn::Set(d, T{1})), d, d_scores + at);
      }
    }
    FinishScores<T, kVectors, kKeys, kChange>(block, j, tile);
    for (int i = 0; i < kKeys; ++i) {
      for (int c = 0; c < kVectors; ++c) {
        hn::Store(tile[i][c], d, scores + ((j + i) * kVectors + c) * kLanes);
      }
    }
  }
}

// Turns scores into weights and their gradients ds, or dz where `of` is not scaled and nothing
// capped. What is hidden, and so has the score -infinity, weighs nothing whatever the row's sum is,
// and has no gradient whatever it is multiplied with; nothing is where `hides` is false. Not beside
// the products, as the forward does: that took 0.02 of the peak (AVX-512).
template <typename T, int kVectors>
HWY_INLINE void BlockGradients(const GradientPanel<T>& of, const MatrixView<const T>& value,
                               bool hides, bool capped, T* weights, T* d_scores) {
  constexpr int kKeys = TileKeys(kVectors);
  constexpr int64_t kLanes = LanesOf<T>();
  const Tag<T> d;
  const Vec<T> hidden = hn::Set(d, -std::numeric_limits<T>::infinity());
  for (int64_t j = 0; j < value.rows; j += kKeys) {
    const T* values[kKeys];
    KeyRows<T, kKeys>(value, j, values);
    Vec<T> products[kKeys][kVectors];
    ScoreTile<T, kVectors, kKeys, 0>(of.d_output, values, value.columns, products, [](int) {});
    for (int i = 0; i < kKeys; ++i) {
      for (int c = 0; c < kVectors; ++c) {
        const int64_t at = ((j + i) * kVectors + c) * kLanes;
        const Vec<T> score = hn::Load(d, weights + at);
        const Vec<T> reference = hn::Load(d, of.panel.total_reference + c * kLanes);
        const Vec<T> inverse = hn::Load(d, of.panel.total_sum + c * kLanes);
        Vec<T> w = hn::Mul(Exp2(d, score, reference), inverse);
        if (hides) w = hn::IfThenZeroElse(hn::Eq(score, hidden), w);
        Vec<T> change = hn::Mul(w, hn::Sub(products[i][c], hn::Load(d, of.delta + c * kLanes)));
        if (capped) change = hn::Mul(change, hn::Load(d, d_scores + at));
        hn::Store(w, d, weights + at);
        hn::Store(hn::IfThenZeroElse(hn::Eq(w, hn::Zero(d)), change), d, d_scores + at);
      }
    }
  }
}

// What of a tile's keys a block is.
template <typename T>
struct GradientBlock {
  PackedBlock<T> packed;      // keys, of which some query of the group sees some
  MatrixView<const T> value;  // the same rows
};

// The panel's weights and ds (or dz) over the block's keys, 0 where it sees none of them.
template <typename T>
HWY_NOINLINE void PanelGradients(const Seer<T>& seer, const GradientBlock<T>& of, bool of_products,
                                 const GradientPanel<T>& panel, const SeenScratch<T>& scratch) {
  const int64_t lanes = LanesOfPanel(panel.panel);
  const KeyRange keys =
      SeenPart(seer.problem, seer.batch, panel.panel.first, panel.panel.rows, of.packed.keys);
  const int64_t first = keys.begin - of.packed.keys.begin;
  T* const weights = panel.weights + first * lanes;
  T* const d_scores = panel.d_scores + first * lanes;
  const Block<T> block = SeenBlock(seer, panel.panel, of.packed, scratch.mask, scratch);
  const int64_t rows = block.key.rows;
  if (rows > 0) {
    const bool capped = of_products && seer.problem.softcap != 0;
    WithVectors(panel.panel.vectors, [&]<int kVectors>() {
      BlockProducts<T, kVectors>(panel, block, weights);
      const bool hides = ChangesScores(block) || HidesSome(block);
      if (ChangesScores(block)) {
        BlockScores<T, kVectors, true>(block, weights, d_scores);
      } else if (hides) {
        BlockScores<T, kVectors, false>(block, weights, d_scores);
      }
      BlockGradients<T, kVectors>(panel, of.value.Rows(first, rows), hides, capped, weights,
                                  d_scores);
    });
  }
  for (T* const array : {panel.weights, panel.d_scores}) {
    std::fill_n(array, first * lanes, T{0});
    std::fill(array + (first + rows) * lanes, array + of.packed.keys.size() * lanes, T{0});
  }
}

// The tile's keys that some query sees, as they are read.
template <typename S, typename T = Wide<S>>
struct GradientKeys {
  KeyRange keys;
  MatrixView<const T> key;
  MatrixView<const T> value;
  bool hides;  // some query may not see some of them

  GradientKeys(const GradientGroup<S>& group, const GradientScratch<T>& scratch) {
    const Problem& problem = *group.problem;
    const int64_t queries = group.query.rows;
    keys = SeenPart(problem, group.batch, group.first_query, queries, group.keys);
    const auto rows = [&](const MatrixView<const S>& of) {
      return of.Rows(keys.begin, keys.size());
    };
    key = Readable(rows(group.key), LieApart(problem), scratch.keys);
    value = Readable(rows(group.value), LieApart(problem), scratch.values);
    hides = group.mask.present() ||
            problem.Ask(group.batch, group.first_query, queries, keys) == Visibility::kMixed;
  }
  int64_t size() const { return keys.size(); }

  // kGradientKeys of them at most, from `first` on, where any of the queries sees them.
  GradientBlock<T> Block(const GradientGroup<S>& group, int64_t first, int64_t query,
                         int64_t queries) const {
    const KeyRange all{keys.begin + first, std::min(keys.begin + first + kGradientKeys, keys.end)};
    GradientBlock<T> block;
    block.packed.keys = SeenPart(*group.problem, group.batch, query, queries, all);
    const int64_t begin = block.packed.keys.begin - keys.begin;
    block.packed.key = key.Rows(begin, block.packed.keys.size());
    block.value = value.Rows(begin, block.packed.keys.size());
    return block;
  }
};

// The queries that are summed over together, and their rows of the group.
template <typename S, typename T = Wide<S>>
struct Together {
  int64_t first = 0;
  int64_t rows = 0;
  int panels = 0;
  PackedRows<S> query;
  PackedRows<S> d_output;
};

template <typename S, typename T = Wide<S>>
Together<S> PackTogether(const GradientGroup<S>& group, int64_t first, T scale, bool hides,
                         GradientScratch<T>& scratch) {
  Together<S> together;
  together.first = first;
  together.rows = std::min(RowsTogether<T>(), group.query.rows - first);
  const int64_t end = first + together.rows;
  for (int64_t done = first; done < end;) {
    GradientPanel<T>& panel = scratch.panels[together.panels++];
    PackPanel(group, done, end, scale, panel);
    done += panel.panel.rows;
  }
  if (group.d_key.data == nullptr && group.d_value.data == nullptr) return together;
  together.query = PackStrips(group.query.Rows(first, together.rows), hides, scratch.query_strips);
  together.d_output =
      PackStrips(group.d_output.Rows(first, together.rows), hides, scratch.d_output_strips);
  return together;
}

// The three products of a block.
template <typename S, typename T = Wide<S>>
void AddGradients(const GradientGroup<S>& group, const Together<S>& together, KeyRange keys,
                  KeyRange in_tile, const PackedRows<S>& key, const GradientScratch<T>& scratch) {
  Factor<T> weights[kTogether];
  Factor<T> d_scores[kTogether];
  int64_t done = together.first;
  for (int i = 0; i < together.panels; ++i) {
    const GradientPanel<T>& panel = scratch.panels[i];
    const int64_t lanes = LanesOfPanel(panel.panel);
    const int64_t rows = panel.panel.rows;
    weights[i] = {panel.weights, lanes, 1, rows};
    d_scores[i] = {panel.d_scores, lanes, 1, rows};
    if (group.d_query.data != nullptr) {
      const PackedRows<S> of_block = key.From(in_tile.begin, in_tile.size());
      const Factor<T> across{panel.d_scores, 1, lanes, in_tile.size()};
      AddProduct(&across, 1, of_block, group.d_query.Rows(done, rows));
    }
    done += rows;
  }
  if (group.d_value.data != nullptr) {
    AddProduct(weights, together.panels, together.d_output,
               group.d_value.Rows(keys.begin - group.keys.begin, keys.size()));
  }
  if (group.d_key.data != nullptr) {
    AddProduct(d_scores, together.panels, together.query,
               group.d_key.Rows(keys.begin - group.keys.begin, keys.size()));
  }
}

// Calls visit(together, block's keys, the same within the tile's) for each block, with the panels'
// weights and ds (dz unless of_products) in scratch.
template <typename S, typename T = Wide<S>, class Visit>
void ForBlocks(const GradientGroup<S>& group, const GradientKeys<S>& tile, bool of_products,
               GradientScratch<T>& scratch, const Visit& visit) {
  const ScoreChange<T> change = ScoreChangeOf<T>(*group.problem, group.head);
  const Seer<T> seer{*group.problem, group.batch, group.mask, change};
  const T scale = of_products ? static_cast<T>(group.problem->scale) : T{1};
  for (int64_t first = 0; first < group.query.rows; first += RowsTogether<T>()) {
    const Together<S> together = PackTogether(group, first, scale, tile.hides, scratch);
    for (int64_t key = 0; key < tile.size(); key += kGradientKeys) {
      const GradientBlock<T> block =
          tile.Block(group, key, group.first_query + first, together.rows);
      const KeyRange keys = block.packed.keys;
      if (keys.size() == 0) continue;
      for (int i = 0; i < together.panels; ++i) {
        PanelGradients(seer, block, of_products, scratch.panels[i], scratch.seen);
      }
      const KeyRange in_tile{keys.begin - tile.keys.begin, keys.end - tile.keys.begin};
      if (!visit(together, keys, in_tile)) return;
    }
  }
}

template <typename S, typename T = Wide<S>>
void GradientImpl(const GradientGroup<S>& group, T* memory, const Checkpoint& checkpoint) {
  Arena<T> arena(memory);
  GradientScratch<T> scratch(arena, *group.problem);
  const GradientKeys<S> tile(group, scratch);
  if (tile.size() == 0) return;
  PackedRows<S> key;
  if (group.d_query.data != nullptr) {
    key = PackStrips(group.key.Rows(tile.keys.begin, tile.size()), tile.hides, scratch.key_strips);
  }
  ForBlocks(group, tile, /*of_products=*/true, scratch,
            [&](const Together<S>& together, KeyRange keys, KeyRange in_tile) {
              AddGradients(group, together, keys, in_tile, key, scratch);
              return !checkpoint.ToStop();
            });
}

template <typename S, typename T = Wide<S>>
void ScoreGradientsImpl(const GradientGroup<S>& group, T* memory, T* d_scores, int64_t stride) {
  Arena<T> arena(memory);
  GradientScratch<T> scratch(arena, *group.problem);
  for (int64_t key = 0; key < group.keys.size(); ++key) {
    std::fill_n(d_scores + key * stride, group.query.rows, T{0});
  }
  const GradientKeys<S> tile(group, scratch);
  if (tile.size() == 0) return;
  ForBlocks(group, tile, /*of_products=*/false, scratch,
            [&](const Together<S>& together, KeyRange keys, KeyRange /*in_tile*/) {
              int64_t done = together.first;
              for (int i = 0; i < together.panels; ++i) {
                const GradientPanel<T>& panel = scratch.panels[i];
                const int64_t lanes = LanesOfPanel(panel.panel);
                for (int64_t j = 0; j < keys.size(); ++j) {
                  std::copy_n(panel.d_scores + j * lanes, panel.panel.rows,
                              d_scores + (keys.begin - group.keys.begin + j) * stride + done);
                }
                done += panel.panel.rows;
              }
              return true;
            });
}

// HWY_EXPORT takes no template: each function by name, for float (F) and double (D), and for
// float16 (H) and bfloat16 (B) where it depends on how numbers are stored.
int64_t GradientScratchF(const Problem& problem) {
  return GradientScratchElementsImpl<float>(problem);
}
int64_t GradientScratchD(const Problem& problem) {
  return GradientScratchElementsImpl<double>(problem);
}

#define ATTENDANT_DEFINE_STORED(S, Suffix)                                                       \
  void Gradient##Suffix(const GradientGroup<S>& group, Wide<S>* memory,                          \
                        const Checkpoint& checkpoint) {                                          \
    GradientImpl(group, memory, checkpoint);                                                     \
  }                                                                                              \
  void ScoreGradients##Suffix(const GradientGroup<S>& group, Wide<S>* memory, Wide<S>* d_scores, \
                              int64_t stride) {                                                  \
    ScoreGradientsImpl(group, memory, d_scores, stride);                                         \
  }
ATTENDANT_DEFINE_STORED(float, F)
ATTENDANT_DEFINE_STORED(double, D)
ATTENDANT_DEFINE_STORED(Float16, H)
ATTENDANT_DEFINE_STORED(BFloat16, B)
#undef ATTENDANT_DEFINE_STORED

}  // namespace attendant::core::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace attendant::core {

HWY_EXPORT(GradientScratchF);
HWY_EXPORT(GradientScratchD);
template <>
int64_t GradientScratchElements<float>(const Problem& problem) {
  return HWY_DYNAMIC_DISPATCH(GradientScratchF)(problem);
}
template <>
int64_t GradientScratchElements<double>(const Problem& problem) {
  return HWY_DYNAMIC_DISPATCH(GradientScratchD)(problem);
}

#define ATTENDANT_EXPORT_STORED(S, Suffix)                                                     \
  HWY_EXPORT(Gradient##Suffix);                                                                \
  HWY_EXPORT(ScoreGradients##Suffix);                                                          \
  template <>                                                                                  \
  void FusedGradient(const GradientGroup<S>& group, Wide<S>* scratch,                          \
                     const Checkpoint& checkpoint) {                                           \
    HWY_DYNAMIC_DISPATCH(Gradient##Suffix)(group, scratch, checkpoint);                        \
  }                                                                                            \
  template <>                                                                                  \
  void FusedScoreGradients(const GradientGroup<S>& group, Wide<S>* scratch, Wide<S>* d_scores, \
                           int64_t stride) {                                                   \
    HWY_DYNAMIC_DISPATCH(ScoreGradients##Suffix)(group, scratch, d_scores, stride);            \
  }
ATTENDANT_EXPORT_STORED(float, F)
ATTENDANT_EXPORT_STORED(double, D)
ATTENDANT_EXPORT_STORED(Float16, H)
ATTENDANT_EXPORT_STORED(BFloat16, B)
#undef ATTENDANT_EXPORT_STORED

}  // namespace attendant::core
#endif  // HWY_ONCE
