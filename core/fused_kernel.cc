#include "core/fused_kernel.h"

#include <algorithm>
#include <limits>

#include "core/checked_math.h"
#include "core/simd_targets.h"
#include "core/softmax.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/fused_kernel.cc"
#include <hwy/foreach_target.h>  // compiles the rest of this file once a target
#include <hwy/highway.h>

#include "core/fused_pack-inl.h"
#include "core/fused_panel-inl.h"
#include "core/fused_rows-inl.h"
#include "core/fused_tiles-inl.h"

HWY_BEFORE_NAMESPACE();
namespace attendant::core::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// Most queries of a group: its panels share a block of keys and values in L2, and what it costs to
// bring it there. Twice as many gain nothing more.
constexpr int64_t kMostQueries = 192;
constexpr int64_t kMostPanels = kMostQueries / (kMostVectors * LanesOf<double>());
// Fewer where queries and outputs are wide: so much of them stays in L2 beside the block.
constexpr int64_t kGroupBytes = 400 << 10;
// Values of rows that lie further apart are packed, where enough panels share them: a tile reads
// one cache line of each row, and such rows fall into few sets of L1.
constexpr int64_t kPackedStride = 512;
constexpr int kPackedPanels = 3;

template <typename T>
int64_t GroupRows(const Problem& problem) {
  constexpr int64_t kPanelLanes = kMostVectors * LanesOf<T>();
  const int64_t panel_bytes =
      SaturatingProduct({SaturatingSum({problem.width, problem.value_width}), kPanelLanes,
                         static_cast<int64_t>(sizeof(T))});
  const int64_t panels = std::clamp<int64_t>(kGroupBytes / std::max<int64_t>(panel_bytes, 1), 2,
                                             kMostQueries / kPanelLanes);
  return panels * kPanelLanes;
}

template <typename T>
struct Scratch {
  T* weights;  // [key of a block, rounded up to a tile][vector][lane]
  T* values;   // a block's, packed; or a panel's outputs on their way
  T* keys;     // a block's, row by row; null where they are read in place
  SeenScratch<T> seen;
  Panel<T> panels[kMostPanels];
  int count = 0;  // of panels

  Scratch(Arena<T>& arena, const Problem& problem, int64_t rows)
      : seen(arena, problem, WidestPanel<T>(rows)) {
    const int64_t widest = WidestPanel<T>(rows);
    const int64_t dimensions = SaturatingProduct({StripsOf(problem.value_width), kStrip});
    weights = arena.Take((kFusedBlock + TileKeys(1)) * widest);
    values = arena.Take(SaturatingProduct({StripsOf(problem.value_width), StripStride<T>()}));
    keys = LieApart(problem) || IsHalf(problem.dtype)
               ? arena.Take(SaturatingProduct({kFusedBlock, problem.width}))
               : nullptr;
    for (int64_t done = 0; done < rows;) {
      Panel<T>& panel = panels[count++];
      panel.vectors = VectorsOfNextPanel<T>(rows - done);
      const int64_t lanes = LanesOfPanel(panel);
      panel.rows = std::min(rows - done, lanes);
      panel.query = arena.Take(SaturatingProduct({problem.width, lanes}));
      panel.output = arena.Take(SaturatingProduct({dimensions, lanes}));
      panel.total_output = arena.Take(SaturatingProduct({dimensions, lanes}));
      for (T** const array :
           {&panel.reference, &panel.sum, &panel.total_reference, &panel.total_sum}) {
        *array = arena.Take(lanes);
      }
      panel.shift = problem.AddsMask() ? arena.Take(lanes) : nullptr;
      done += panel.rows;
    }
  }
};

template <typename T>
int64_t ScratchElements(const Problem& problem) {
  Arena<T> arena(nullptr);
  Scratch<T>(arena, problem, std::min(problem.queries, GroupRows<T>(problem)));
  return arena.used();
}

// Gives each panel its queries, with the scale folded in.
template <typename S, typename T = Wide<S>>
void PackQueries(const FusedGroup<S>& group, Scratch<T>& scratch) {
  int64_t done = 0;
  for (int i = 0; i < scratch.count; ++i) {
    Panel<T>& panel = scratch.panels[i];
    panel.first = group.first_query + done;
    PackColumns(group.query.Rows(done, panel.rows), panel.vectors,
                static_cast<T>(group.problem->ScaleLog2()), panel.query);
    done += panel.rows;
  }
}

// The empty state: no key yet.
template <typename T>
void Empty(int64_t lanes, int64_t dimensions, T* reference, T* sum, T* output) {
  std::fill_n(reference, lanes, NoReference<T>());
  std::fill_n(sum, lanes, T{0});
  std::fill_n(output, dimensions * lanes, T{0});
}

// The part of `keys` that some query of the group sees. Keys that are far apart from each other
// are copied: they would share the few sets of a cache. So is half precision, to be widened.
template <typename S, typename T = Wide<S>>
PackedBlock<T> PackBlock(const FusedGroup<S>& group, KeyRange keys, const Scratch<T>& scratch) {
  const Problem& problem = *group.problem;
  PackedBlock<T> block;
  block.keys = SeenPart(problem, group.batch, group.first_query, group.query.rows, keys);
  const int64_t rows = block.keys.size();
  if (rows == 0) return block;
  const MatrixView<const S> key = group.key.Rows(block.keys.begin, rows);
  const bool shared = scratch.count >= kPackedPanels;
  const bool apart = shared && scratch.keys != nullptr && key.stride != key.columns;
  block.key = Readable(key, apart, scratch.keys);
  const MatrixView<const S> value = group.value.Rows(block.keys.begin, rows);
  const bool mixed = group.mask.present() ||
                     problem.Ask(group.batch, group.first_query, group.query.rows, block.keys) ==
                         Visibility::kMixed;
  // As the tiles would read them.
  const int64_t stride = kIsHalf<S> ? value.columns : value.stride;
  const bool near = stride * static_cast<int64_t>(sizeof(T)) <= kPackedStride;
  if (value.columns % kStrip == 0 && (near || !shared)) {
    const T* const from = Readable(value, /*copy=*/false, scratch.values).data;
    block.values = {from, value.columns / kStrip, kStrip, stride};
    block.finite = !mixed || AllRowsFinite(value);
  } else {
    block.values = {scratch.values, StripsOf(value.columns), StripStride<T>(), kStrip};
    block.finite =
        mixed ? PackValues<true>(value, scratch.values) : PackValues<false>(value, scratch.values);
  }
  return block;
}

// What is read after the block of keys that ends at `end`: the next one, or what the next group
// begins with.
template <typename S>
PrefetcherToL2 ReadNext(const FusedGroup<S>& group, int64_t end, int64_t visible) {
  PrefetcherToL2 next;
  const auto add_block = [&](const MatrixView<const S>& rows, int64_t first) {
    next.Add(rows.Rows(first, std::min(kFusedBlock, rows.rows - first)));
  };
  if (end < visible) {
    add_block(group.key, end);
    add_block(group.value, end);
  } else {
    if (group.output.data != nullptr) {
      next.Add(MatrixView<const S>{group.output.data, group.output.rows, group.output.columns,
                                   group.output.stride});
    }
    next.Add(group.next_query);
    add_block(group.next_key, 0);
    add_block(group.next_value, 0);
  }
  return next;
}

// The sum of output * d_output over a row of `width`.
template <typename S, typename T = Wide<S>>
T Dot(const T* output, const S* d_output, int64_t width) {
  const Tag<T> d;
  Vec<T> sums = hn::Zero(d);
  int64_t x = 0;
  for (; x + LanesOf<T>() <= width; x += LanesOf<T>()) {
    sums = hn::MulAdd(hn::LoadU(d, output + x), LoadWide(d, d_output + x), sums);
  }
  T sum = hn::GetLane(hn::SumOfLanes(d, sums));
  for (; x < width; ++x) sum += output[x] * Widened(d_output[x]);
  return sum;
}

// Writes a panel's rows: O^T / L, and what else is wanted. merged: whether segments were merged;
// otherwise there was but one.
template <typename S, typename T = Wide<S>>
void FinishPanel(const FusedGroup<S>& group, const Panel<T>& panel, bool merged,
                 const Scratch<T>& scratch) {
  const Tag<T> d;
  constexpr int64_t kLanes = LanesOf<T>();
  const T* const output = merged ? panel.total_output : panel.output;
  const T* const sums = merged ? panel.total_sum : panel.sum;
  const T* const references = merged ? panel.total_reference : panel.reference;
  const int64_t first = panel.first - group.first_query;
  const int64_t width = group.value.columns;
  const int64_t whole = width / kBlockLanes<T> * kBlockLanes<T>;
  for (int c = 0; c < panel.vectors; ++c) {
    const int64_t rows = std::min(kLanes, panel.rows - c * kLanes);
    const Vec<T> sum = hn::Load(d, sums + c * kLanes);
    const auto empty = hn::Eq(sum, hn::Zero(d));
    const Vec<T> inverse = hn::IfThenZeroElse(empty, hn::Div(hn::Set(d, T{1}), sum));
    HWY_ALIGN T inverses[kLanes];
    hn::Store(inverse, d, inverses);
    const auto column = [&](int64_t x) HWY_ATTR {
      // An empty segment is passed over. The sum makes 0 of -0, which is what a hidden key can make
      // 0 of as well.
      Vec<T> o = hn::Load(d, output + (x * panel.vectors + c) * kLanes);
      if (!merged) o = hn::IfThenZeroElse(empty, o);
      const Vec<T> element = hn::Mul(hn::Add(o, hn::Zero(d)), inverse);
      return hn::IfThenElse(hn::Eq(element, element), element,
                            hn::Set(d, std::numeric_limits<T>::quiet_NaN()));
    };
    T* out[kLanes];
    for (int64_t lane = 0; lane < rows; ++lane) {
      const int64_t row = first + c * kLanes + lane;
      if constexpr (kIsHalf<S>) {
        out[lane] = scratch.values + lane * width;
      } else {
        out[lane] =
            group.output.data == nullptr ? scratch.values + lane * width : group.output.Row(row);
      }
      const T reference = references[c * kLanes + lane];
      if (group.reference != nullptr) group.reference[row] = reference;
      if (group.inverse_sum != nullptr) group.inverse_sum[row] = inverses[lane];
      const T shift = panel.shift == nullptr ? T{0} : panel.shift[c * kLanes + lane];
      if (group.shift != nullptr) group.shift[row] = shift;
      if (group.logsumexp != nullptr) {
        group.logsumexp[row] = LogSumExp(reference, sums[c * kLanes + lane], shift);
      }
    }
    int64_t x = 0;
    if (rows == kLanes) {
      for (; x < whole; x += kBlockLanes<T>) {
        Vec<T> columns[kBlockLanes<T>];
        for (int i = 0; i < kBlockLanes<T>; ++i) columns[i] = column(x + i);
        StoreColumns(d, columns, out, x);
      }
    }
    for (; x < width; ++x) {
      HWY_ALIGN T elements[kLanes];
      hn::Store(column(x), d, elements);
      for (int64_t lane = 0; lane < rows; ++lane) out[lane][x] = elements[lane];
    }
    for (int64_t lane = 0; lane < rows; ++lane) {
      const int64_t row = first + c * kLanes + lane;
      if (group.delta != nullptr) group.delta[row] = Dot(out[lane], group.d_output.Row(row), width);
      if (kIsHalf<S> && group.output.data != nullptr) {
        NarrowRow(out[lane], width, group.output.Row(row));
      }
    }
  }
}

// What one sweep over the keys takes beside the group.
template <typename T>
struct Sweep {
  KeyRange seen;       // keys that some query sees
  bool merge = false;  // segments are merged; otherwise there is but one
  int64_t dimensions;  // of an output in scratch
  ScoreChange<T> change;
};

template <typename T>
void MergePanel(const Panel<T>& panel, int64_t dimensions) {
  WithVectors(panel.vectors, [&]<int kVectors>() { MergeSegment<T, kVectors>(panel, dimensions); });
}

// What of the mask is read after panel i's part of `keys`.
template <typename S, typename T = Wide<S>>
PrefetcherToL2 NextMask(const FusedGroup<S>& group, const Scratch<T>& scratch, int i, KeyRange keys,
                        int64_t end) {
  PrefetcherToL2 next;
  const bool last = i + 1 == scratch.count;
  const KeyRange following{keys.end, std::min(keys.end + kFusedBlock, std::max(end, keys.end))};
  next.Add(MaskBytes(*group.problem, group.mask, scratch.panels[last ? 0 : i + 1],
                     last ? following : keys));
  return next;
}

// What is asked for beside a panel's work, a few lines a tile.
struct Ahead {
  PrefetcherToL2 next;
  int64_t lines = 0;
  PrefetcherToL2 next_mask;
  int64_t mask_lines = 0;

  HWY_INLINE void operator()() {
    next.Step(lines);
    next_mask.Step(mask_lines);
  }
};

template <typename T>
HWY_NOINLINE void FoldBlock(const Panel<T>& panel, const Block<T>& block, T* weights,
                            Ahead& ahead) {
  WithVectors(panel.vectors, [&]<int kVectors>() {
    if (ChangesScores(block)) {
      PanelBlock<T, kVectors, true>(panel, block, weights, ahead);
    } else {
      PanelBlock<T, kVectors, false>(panel, block, weights, ahead);
    }
  });
}

// Folds a block into every panel.
template <typename S, typename T = Wide<S>>
void SweepBlock(const FusedGroup<S>& group, const Sweep<T>& sweep, KeyRange keys,
                const Scratch<T>& scratch) {
  const PackedBlock<T> packed = PackBlock(group, keys, scratch);
  const int64_t tiles = CeilDiv(packed.keys.size(), TileKeys(kMostVectors));
  if (tiles == 0) return;
  Ahead ahead;
  ahead.next = ReadNext(group, keys.end, sweep.seen.end);
  ahead.lines = CeilDiv(ahead.next.lines(), scratch.count * tiles);
  const Seer<T> seer{*group.problem, group.batch, group.mask, sweep.change};
  for (int i = 0; i < scratch.count; ++i) {
    const Panel<T>& panel = scratch.panels[i];
    const Block<T> block = SeenBlock(seer, panel, packed, scratch.weights, scratch.seen);
    if (block.key.rows == 0) continue;
    ahead.next_mask = NextMask(group, scratch, i, keys, sweep.seen.end);
    ahead.mask_lines = CeilDiv(ahead.next_mask.lines(), tiles);
    FoldBlock(panel, block, scratch.weights, ahead);
  }
}

// All keys, and the sink. Returns false once the checkpoint says so.
template <typename S, typename T = Wide<S>>
bool SweepKeys(const FusedGroup<S>& group, const Sweep<T>& sweep, const Scratch<T>& scratch,
               const Checkpoint& checkpoint) {
  const auto each_panel = [&](const auto& act) {
    for (int i = 0; i < scratch.count; ++i) act(scratch.panels[i]);
  };
  const auto empty_segment = [&](const Panel<T>& panel) {
    Empty(LanesOfPanel(panel), sweep.dimensions, panel.reference, panel.sum, panel.output);
  };
  each_panel([&](const Panel<T>& panel) {
    empty_segment(panel);
    if (!sweep.merge) return;
    Empty(LanesOfPanel(panel), sweep.dimensions, panel.total_reference, panel.total_sum,
          panel.total_output);
  });
  for (int64_t segment = sweep.seen.begin / kFusedSegment * kFusedSegment; segment < sweep.seen.end;
       segment += kFusedSegment) {
    const int64_t segment_end = std::min(segment + kFusedSegment, sweep.seen.end);
    for (int64_t first = std::max(segment, sweep.seen.begin / kFusedBlock * kFusedBlock);
         first < segment_end; first += kFusedBlock) {
      if (checkpoint.ToStop()) return false;
      SweepBlock(group, sweep, {first, std::min(first + kFusedBlock, segment_end)}, scratch);
    }
    if (!sweep.merge) continue;
    each_panel([&](const Panel<T>& panel) {
      MergePanel(panel, sweep.dimensions);
      empty_segment(panel);
    });
  }
  if (group.problem->sinks.empty()) return true;
  const SinkState<T> plain = SinkStateOf<T>(*group.problem, group.head, T{0});
  each_panel([&](const Panel<T>& panel) {
    // A last segment; its output is still the empty state's.
    for (int64_t lane = 0; lane < LanesOfPanel(panel); ++lane) {
      const T shift = panel.shift == nullptr ? T{0} : panel.shift[lane];
      const SinkState<T> sink =
          shift == 0 ? plain : SinkStateOf<T>(*group.problem, group.head, shift);
      panel.reference[lane] = sink.reference;
      panel.sum[lane] = sink.sum;
    }
    MergePanel(panel, sweep.dimensions);
  });
  return true;
}

// Sets the rows' shifts by what a first sweep found. Returns the panels where there is any.
template <typename S, typename T = Wide<S>>
Scratch<T> FindShifts(const FusedGroup<S>& group, const Sweep<T>& sweep,
                      const Scratch<T>& scratch) {
  Scratch<T> shifted = scratch;
  shifted.count = 0;
  for (int i = 0; i < scratch.count; ++i) {
    const Panel<T>& panel = scratch.panels[i];
    bool found = false;
    const T* const references = sweep.merge ? panel.total_reference : panel.reference;
    for (int64_t lane = 0; lane < LanesOfPanel(panel); ++lane) {
      if (std::abs(references[lane]) < kFar<T>) continue;
      const int64_t query = panel.first + std::min(lane, panel.rows - 1);
      panel.shift[lane] = group.mask.Shift(query, group.problem->VisibleKeys(group.batch, query));
      found = found || panel.shift[lane] != 0;
    }
    if (found) shifted.panels[shifted.count++] = panel;
  }
  return shifted;
}

template <typename S, typename T = Wide<S>>
void ForwardImpl(const FusedGroup<S>& group, T* memory, const Checkpoint& checkpoint) {
  const Problem& problem = *group.problem;
  Arena<T> arena(memory);
  Scratch<T> scratch(arena, problem, group.query.rows);
  PackQueries(group, scratch);
  Sweep<T> sweep;
  sweep.seen = problem.VisibleKeysOfAny(group.batch, group.first_query, group.query.rows);
  sweep.merge = sweep.seen.end > kFusedSegment || !problem.sinks.empty();
  sweep.dimensions = StripsOf(problem.value_width) * kStrip;
  sweep.change = ScoreChangeOf<T>(problem, group.head);
  const bool shifts = problem.AddsMask();
  for (int i = 0; shifts && i < scratch.count; ++i) {
    std::fill_n(scratch.panels[i].shift, LanesOfPanel(scratch.panels[i]), T{0});
  }
  if (!SweepKeys(group, sweep, scratch, checkpoint)) return;
  if (shifts) {
    const Scratch<T> shifted = FindShifts(group, sweep, scratch);
    if (shifted.count > 0 && !SweepKeys(group, sweep, shifted, checkpoint)) return;
  }
  for (int i = 0; i < scratch.count; ++i) {
    FinishPanel(group, scratch.panels[i], sweep.merge, scratch);
  }
}

template <typename S, typename T = Wide<S>>
void WeightsImpl(const FusedGroup<S>& group, KeyRange keys, T* memory, T* weights, int64_t stride) {
  Arena<T> arena(memory);
  Scratch<T> scratch(arena, *group.problem, group.query.rows);
  PackQueries(group, scratch);
  PackedBlock<T> packed;
  packed.keys = {keys.begin, std::clamp(group.key.rows, keys.begin, keys.end)};
  packed.key =
      Readable(group.key.Rows(keys.begin, packed.keys.size()), /*copy=*/false, scratch.keys);
  for (int64_t key = 0; key < keys.size(); ++key) {
    std::fill_n(weights + key * stride, group.query.rows, T{0});
  }
  const ScoreChange<T> change = ScoreChangeOf<T>(*group.problem, group.head);
  const Seer<T> seer{*group.problem, group.batch, group.mask, change};
  for (int i = 0; i < scratch.count; ++i) {
    const Panel<T>& panel = scratch.panels[i];
    const int64_t lanes = LanesOfPanel(panel);
    const int64_t first = panel.first - group.first_query;
    for (int64_t lane = 0; lane < lanes; ++lane) {
      const int64_t row = first + std::min(lane, panel.rows - 1);
      panel.total_reference[lane] = group.reference[row];
      panel.total_sum[lane] = group.inverse_sum[row];
      if (panel.shift != nullptr) panel.shift[lane] = group.shift[row];
    }
    const Block<T> block = SeenBlock(seer, panel, packed, scratch.weights, scratch.seen);
    WithVectors(panel.vectors,
                [&]<int kVectors>() { PanelWeights<T, kVectors>(panel, block, scratch.weights); });
    for (int64_t key = 0; key < block.key.rows; ++key) {
      std::copy_n(scratch.weights + key * lanes, panel.rows,
                  weights + (block.first + key) * stride + first);
    }
  }
}

template <typename T>
bool FewQueries(const Problem& problem) {
  return problem.queries < LanesOf<T>();
}

template <typename T>
int64_t AnyScratchElements(const Problem& problem) {
  const int64_t panels = ScratchElements<T>(problem);
  return FewQueries<T>(problem) ? std::max(panels, RowsScratchElements<T>(problem)) : panels;
}

// HWY_EXPORT takes no template: each function by name, for float (F) and double (D), and for
// float16 (H) and bfloat16 (B) where it depends on how numbers are stored.
int64_t GroupRowsF(const Problem& problem) { return GroupRows<float>(problem); }
int64_t GroupRowsD(const Problem& problem) { return GroupRows<double>(problem); }
int64_t ScratchElementsF(const Problem& problem) { return AnyScratchElements<float>(problem); }
int64_t ScratchElementsD(const Problem& problem) { return AnyScratchElements<double>(problem); }
bool FewQueriesF(const Problem& problem) { return FewQueries<float>(problem); }
bool FewQueriesD(const Problem& problem) { return FewQueries<double>(problem); }

#define ATTENDANT_DEFINE_STORED(S, Suffix)                                           \
  void Forward##Suffix(const FusedGroup<S>& group, Wide<S>* memory,                  \
                       const Checkpoint& checkpoint) {                               \
    ForwardImpl(group, memory, checkpoint);                                          \
  }                                                                                  \
  void Weights##Suffix(const FusedGroup<S>& group, KeyRange keys, Wide<S>* memory,   \
                       Wide<S>* weights, int64_t stride) {                           \
    WeightsImpl(group, keys, memory, weights, stride);                               \
  }                                                                                  \
  void RowsSegment##Suffix(const FusedRows<S>& rows, int64_t begin, Wide<S>* memory, \
                           const Checkpoint& checkpoint, Wide<S>* states) {          \
    RowsSegmentImpl(rows, begin, memory, checkpoint, states);                        \
  }                                                                                  \
  void FinishRow##Suffix(const Wide<S>* states, int64_t segments, int64_t stride,    \
                         const FusedRowResult<S>& to) {                              \
    FinishRowImpl(states, segments, stride, to);                                     \
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

#define ATTENDANT_EXPORT_COMPUTED(T, Suffix)                 \
  HWY_EXPORT(GroupRows##Suffix);                             \
  HWY_EXPORT(ScratchElements##Suffix);                       \
  HWY_EXPORT(FewQueries##Suffix);                            \
  template <>                                                \
  int64_t FusedGroupRows<T>(const Problem& p) {              \
    return HWY_DYNAMIC_DISPATCH(GroupRows##Suffix)(p);       \
  }                                                          \
  template <>                                                \
  int64_t FusedScratchElements<T>(const Problem& p) {        \
    return HWY_DYNAMIC_DISPATCH(ScratchElements##Suffix)(p); \
  }                                                          \
  template <>                                                \
  bool FusedFewQueries<T>(const Problem& p) {                \
    return HWY_DYNAMIC_DISPATCH(FewQueries##Suffix)(p);      \
  }
ATTENDANT_EXPORT_COMPUTED(float, F)
ATTENDANT_EXPORT_COMPUTED(double, D)
#undef ATTENDANT_EXPORT_COMPUTED

#define ATTENDANT_EXPORT_STORED(S, Suffix)                                                         \
  HWY_EXPORT(Forward##Suffix);                                                                     \
  HWY_EXPORT(Weights##Suffix);                                                                     \
  HWY_EXPORT(RowsSegment##Suffix);                                                                 \
  HWY_EXPORT(FinishRow##Suffix);                                                                   \
  template <>                                                                                      \
  void FusedForward(const FusedGroup<S>& group, Wide<S>* scratch, const Checkpoint& checkpoint) {  \
    HWY_DYNAMIC_DISPATCH(Forward##Suffix)(group, scratch, checkpoint);                             \
  }                                                                                                \
  template <>                                                                                      \
  void FusedWeights(const FusedGroup<S>& group, KeyRange keys, Wide<S>* scratch, Wide<S>* weights, \
                    int64_t stride) {                                                              \
    HWY_DYNAMIC_DISPATCH(Weights##Suffix)(group, keys, scratch, weights, stride);                  \
  }                                                                                                \
  template <>                                                                                      \
  void FusedRowsSegment(const FusedRows<S>& rows, int64_t begin, Wide<S>* scratch,                 \
                        const Checkpoint& checkpoint, Wide<S>* states) {                           \
    HWY_DYNAMIC_DISPATCH(RowsSegment##Suffix)(rows, begin, scratch, checkpoint, states);           \
  }                                                                                                \
  template <>                                                                                      \
  void FusedFinishRow(const Wide<S>* states, int64_t segments, int64_t stride,                     \
                      const FusedRowResult<S>& to) {                                               \
    HWY_DYNAMIC_DISPATCH(FinishRow##Suffix)(states, segments, stride, to);                         \
  }
ATTENDANT_EXPORT_STORED(float, F)
ATTENDANT_EXPORT_STORED(double, D)
ATTENDANT_EXPORT_STORED(Float16, H)
ATTENDANT_EXPORT_STORED(BFloat16, B)
#undef ATTENDANT_EXPORT_STORED

}  // namespace attendant::core
#endif  // HWY_ONCE
