#include "core/fused_kernel.h"

#include <algorithm>
#include <atomic>
#include <limits>

#include "core/checked_math.h"
#include "core/simd_targets.h"
#include "core/softmax.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/fused_kernel.cc"
#include <hwy/foreach_target.h>  // compiles the rest of this file once a target
#include <hwy/highway.h>

#include "core/fused_mask-inl.h"
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
  T* weights;  // [key of a block, rounded up to a tile][vector][lane]
  T* values;   // a block's, packed
  T* keys;     // a block's, row by row; null where heads are contiguous
  T* begins;   // [vector][lane], as in Block
  T* ends;
  T* positions;
  T* mask = nullptr;  // PackedMaskElements and MaskRowElements; null where there is no mask
  T* mask_rows = nullptr;
  Panel<T> panels[kMostPanels];
  int count = 0;  // of panels

  // As few panels as `rows` queries take, each as wide as the rest allows: two of 2 vectors are
  // faster than 3 and 1.
  Scratch(Arena<T>& arena, const Problem& problem, int64_t rows) {
    constexpr int64_t kLanes = LanesOf<T>();
    const int64_t widest = std::min(CeilDiv(rows, kLanes), int64_t{kMostVectors}) * kLanes;
    const int64_t dimensions = SaturatingProduct({StripsOf(problem.value_width), kStrip});
    weights = arena.Take((kFusedBlock + TileKeys(1)) * widest);
    values = arena.Take(SaturatingProduct({StripsOf(problem.value_width), StripStride<T>()}));
    keys = problem.layout == Layout::kBthd && problem.kv_heads > 1
               ? arena.Take(SaturatingProduct({kFusedBlock, problem.width}))
               : nullptr;
    begins = arena.Take(widest);
    ends = arena.Take(widest);
    positions = arena.Take(widest);
    if (problem.mask.has_value()) {
      mask = arena.Take(PackedMaskElements<T>(widest));
      mask_rows = arena.Take(MaskRowElements<T>(widest));
    }
    for (int64_t done = 0; done < rows;) {
      Panel<T>& panel = panels[count++];
      const int64_t vectors = CeilDiv(rows - done, kLanes);
      panel.vectors = static_cast<int>(CeilDiv(vectors, CeilDiv(vectors, kMostVectors)));
      const int64_t lanes = panel.vectors * kLanes;
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

// Q^T with the scale folded in; lanes beyond the panel's rows hold the last row again.
template <typename T>
void PackQuery(const FusedGroup<T>& group, const Panel<T>& panel) {
  const Tag<T> d;
  constexpr int64_t kLanes = LanesOf<T>();
  const int64_t width = group.query.columns;
  const int64_t whole = width / kBlockLanes<T> * kBlockLanes<T>;
  const Vec<T> scale = hn::Set(d, static_cast<T>(group.problem->ScaleLog2()));
  const int64_t first = panel.first - group.first_query;
  for (int c = 0; c < panel.vectors; ++c) {
    const T* rows[kLanes];
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      rows[lane] = group.query.Row(first + std::min(c * kLanes + lane, panel.rows - 1));
    }
    const auto store = [&](int64_t x, Vec<T> column) HWY_ATTR {
      hn::Store(hn::Mul(scale, column), d, panel.query + (x * panel.vectors + c) * kLanes);
    };
    for (int64_t x = 0; x < whole; x += kBlockLanes<T>) {
      Vec<T> columns[kBlockLanes<T>];
      LoadColumns(d, rows, x, columns);
      for (int i = 0; i < kBlockLanes<T>; ++i) store(x + i, columns[i]);
    }
    for (int64_t x = whole; x < width; ++x) store(x, LoadColumn(d, rows, x));
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
void Empty(int64_t lanes, int64_t dimensions, T* reference, T* sum, T* output) {
  std::fill_n(reference, lanes, NoReference<T>());
  std::fill_n(sum, lanes, T{0});
  std::fill_n(output, dimensions * lanes, T{0});
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
KeyRange SeenPart(const Problem& problem, int64_t batch, int64_t first, int64_t count,
                  KeyRange keys) {
  const KeyRange seen = problem.VisibleKeysOfAny(batch, first, count);
  if (problem.Ask(batch, first, count, keys) == Visibility::kNone) return {keys.begin, keys.begin};
  const int64_t begin = std::max(keys.begin, seen.begin / kFirstKeys * kFirstKeys);
  return {begin, std::max(begin, std::min(keys.end, seen.end))};
}

// The part of `keys` that some query of the group sees. Keys that are far apart from each other
// are copied: they would share the few sets of a cache.
template <typename T>
PackedBlock<T> PackBlock(const FusedGroup<T>& group, KeyRange keys, const Scratch<T>& scratch) {
  const Problem& problem = *group.problem;
  PackedBlock<T> block;
  block.keys = SeenPart(problem, group.batch, group.first_query, group.query.rows, keys);
  const int64_t rows = block.keys.size();
  if (rows == 0) return block;
  block.key = group.key.Rows(block.keys.begin, rows);
  const bool shared = scratch.count >= kPackedPanels;
  if (shared && scratch.keys != nullptr && block.key.stride != block.key.columns) {
    for (int64_t j = 0; j < rows; ++j) {
      std::copy_n(block.key.Row(j), block.key.columns, scratch.keys + j * block.key.columns);
    }
    block.key.data = scratch.keys;
    block.key.stride = block.key.columns;
  }
  const MatrixView<const T> value = group.value.Rows(block.keys.begin, rows);
  const bool mixed = group.mask.present() ||
                     problem.Ask(group.batch, group.first_query, group.query.rows, block.keys) ==
                         Visibility::kMixed;
  block.values.count = StripsOf(value.columns);
  const bool near = value.stride * static_cast<int64_t>(sizeof(T)) <= kPackedStride;
  if (value.columns % kStrip == 0 && (near || !shared)) {
    block.values = {value.data, value.columns / kStrip, kStrip, value.stride};
    for (int64_t row = 0; mixed && row < rows && block.finite; ++row) {
      block.finite = AllFinite(value.Row(row), value.columns);
    }
  } else {
    block.values = {scratch.values, StripsOf(value.columns), StripStride<T>(), kStrip};
    block.finite = mixed ? PackValues<T, true>(value, scratch.values)
                         : PackValues<T, false>(value, scratch.values);
  }
  return block;
}

// What is read after the block of keys that ends at `end`: the next one, or what the next group
// begins with.
template <typename T>
PrefetcherToL2<T> ReadNext(const FusedGroup<T>& group, int64_t end, int64_t visible) {
  PrefetcherToL2<T> next;
  const auto add_block = [&](const MatrixView<const T>& rows, int64_t first) {
    next.Add(rows.Rows(first, std::min(kFusedBlock, rows.rows - first)));
  };
  if (end < visible) {
    add_block(group.key, end);
    add_block(group.value, end);
  } else {
    next.Add({group.output.data, group.output.rows, group.output.columns, group.output.stride});
    next.Add(group.next_query);
    add_block(group.next_key, 0);
    add_block(group.next_value, 0);
  }
  return next;
}

// The block as the panel sees it; without a row where it sees none.
template <typename T>
Block<T> SeenBlock(const FusedGroup<T>& group, const ScoreChange<T>& change, const Panel<T>& panel,
                   const PackedBlock<T>& packed, const Scratch<T>& scratch) {
  const Problem& problem = *group.problem;
  Block<T> block;
  const KeyRange keys = SeenPart(problem, group.batch, panel.first, panel.rows, packed.keys);
  const int64_t rows = keys.size();
  if (rows == 0) return block;
  block.first = keys.begin - packed.keys.begin;
  block.key = packed.key.Rows(block.first, rows);
  block.values = packed.values;
  block.values.data += block.first * packed.values.key_stride;
  block.select = !packed.finite;
  if (group.mask.present()) {
    PackMask(group.mask, panel, keys, scratch.mask, scratch.mask_rows, block);
    if (block.key.rows == 0) return block;
  }
  const int64_t lanes = LanesOfPanel(panel);
  if (ChangesScores(problem)) {
    block.change = &change;
    block.positions = scratch.positions;
    block.first_in_block = keys.begin % kFusedBlock;
    const int64_t origin = problem.Offset(group.batch) - (keys.begin - block.first_in_block);
    for (int64_t lane = 0; lane < lanes; ++lane) {
      scratch.positions[lane] = static_cast<T>(panel.first + lane + origin);
    }
  }
  if (problem.Ask(group.batch, panel.first, panel.rows, keys) != Visibility::kMixed) return block;
  for (int64_t lane = 0; lane < lanes; ++lane) {
    const int64_t query = panel.first + std::min(lane, panel.rows - 1);
    const KeyRange seen = problem.VisibleKeys(group.batch, query);
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

// Writes a panel's rows: O^T / L, and what else is wanted. merged: whether segments were merged;
// otherwise there was but one.
template <typename T>
void FinishPanel(const FusedGroup<T>& group, const Panel<T>& panel, bool merged) {
  const Tag<T> d;
  constexpr int64_t kLanes = LanesOf<T>();
  const T* const output = merged ? panel.total_output : panel.output;
  const T* const sums = merged ? panel.total_sum : panel.sum;
  const T* const references = merged ? panel.total_reference : panel.reference;
  const int64_t first = panel.first - group.first_query;
  const int64_t width = group.output.columns;
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
      out[lane] = group.output.Row(row);
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
template <typename T>
PrefetcherToL2<unsigned char> NextMask(const FusedGroup<T>& group, const Scratch<T>& scratch, int i,
                                       KeyRange keys, int64_t end) {
  PrefetcherToL2<unsigned char> next;
  const bool last = i + 1 == scratch.count;
  const KeyRange following{keys.end, std::min(keys.end + kFusedBlock, std::max(end, keys.end))};
  next.Add(MaskBytes(*group.problem, group.mask, scratch.panels[last ? 0 : i + 1],
                     last ? following : keys));
  return next;
}

// Folds a block into every panel.
template <typename T>
void SweepBlock(const FusedGroup<T>& group, const Sweep<T>& sweep, KeyRange keys,
                const Scratch<T>& scratch) {
  const PackedBlock<T> packed = PackBlock(group, keys, scratch);
  PrefetcherToL2<T> next = ReadNext(group, keys.end, sweep.seen.end);
  const int64_t tiles = CeilDiv(packed.keys.size(), TileKeys(kMostVectors));
  const auto lines_of = [&](const auto& prefetcher, int64_t parts) {
    return parts == 0 ? 0 : CeilDiv(prefetcher.lines(), parts);
  };
  const int64_t lines = lines_of(next, scratch.count * tiles);
  for (int i = 0; i < scratch.count; ++i) {
    const Panel<T>& panel = scratch.panels[i];
    const Block<T> block = SeenBlock(group, sweep.change, panel, packed, scratch);
    if (block.key.rows == 0) continue;
    auto next_mask = NextMask(group, scratch, i, keys, sweep.seen.end);
    const int64_t mask_lines = lines_of(next_mask, tiles);
    const auto beside = [&] {
      next.Step(lines);
      next_mask.Step(mask_lines);
    };
    WithVectors(panel.vectors, [&]<int kVectors>() {
      if (block.change == nullptr && block.bias == nullptr) {
        PanelBlock<T, kVectors, false>(panel, block, scratch.weights, beside);
      } else {
        PanelBlock<T, kVectors, true>(panel, block, scratch.weights, beside);
      }
    });
  }
}

// All keys, and the sink. Returns false once *stop.
template <typename T>
bool SweepKeys(const FusedGroup<T>& group, const Sweep<T>& sweep, const Scratch<T>& scratch,
               const std::atomic<bool>& stop) {
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
      if (stop.load(std::memory_order_relaxed)) return false;
      SweepBlock(group, sweep, {first, std::min(first + kFusedBlock, segment_end)}, scratch);
    }
    if (!sweep.merge) continue;
    each_panel([&](const Panel<T>& panel) {
      MergePanel(panel, sweep.dimensions);
      empty_segment(panel);
    });
  }
  if (group.problem->sinks.empty()) return true;
  each_panel([&](const Panel<T>& panel) {
    // A last segment; its output is still the empty state's.
    for (int64_t lane = 0; lane < LanesOfPanel(panel); ++lane) {
      const SinkState<T> sink = SinkStateOf<T>(*group.problem, group.head,
                                               panel.shift == nullptr ? T{0} : panel.shift[lane]);
      panel.reference[lane] = sink.reference;
      panel.sum[lane] = sink.sum;
    }
    MergePanel(panel, sweep.dimensions);
  });
  return true;
}

// Sets the rows' shifts by what a first sweep found. Returns whether there is any.
template <typename T>
bool FindShifts(const FusedGroup<T>& group, const Sweep<T>& sweep, const Scratch<T>& scratch) {
  bool found = false;
  for (int i = 0; i < scratch.count; ++i) {
    const Panel<T>& panel = scratch.panels[i];
    const T* const references = sweep.merge ? panel.total_reference : panel.reference;
    for (int64_t lane = 0; lane < LanesOfPanel(panel); ++lane) {
      if (std::abs(references[lane]) < kFar<T>) continue;
      const int64_t query = panel.first + std::min(lane, panel.rows - 1);
      panel.shift[lane] = group.mask.Shift(query, group.problem->VisibleKeys(group.batch, query));
      found = found || panel.shift[lane] != 0;
    }
  }
  return found;
}

template <typename T>
void ForwardImpl(const FusedGroup<T>& group, T* memory, const std::atomic<bool>& stop) {
  const Problem& problem = *group.problem;
  Arena<T> arena(memory);
  const Scratch<T> scratch = [&] {
    Scratch<T> made(arena, problem, group.query.rows);
    PackQueries(group, made);
    return made;
  }();
  Sweep<T> sweep;
  sweep.seen = problem.VisibleKeysOfAny(group.batch, group.first_query, group.query.rows);
  sweep.merge = sweep.seen.end > kFusedSegment || !problem.sinks.empty();
  sweep.dimensions = StripsOf(problem.value_width) * kStrip;
  sweep.change = ScoreChangeOf<T>(problem, group.head);
  const bool shifts = group.mask.added();
  for (int i = 0; shifts && i < scratch.count; ++i) {
    std::fill_n(scratch.panels[i].shift, LanesOfPanel(scratch.panels[i]), T{0});
  }
  if (!SweepKeys(group, sweep, scratch, stop)) return;
  if (shifts && FindShifts(group, sweep, scratch) && !SweepKeys(group, sweep, scratch, stop)) {
    return;
  }
  for (int i = 0; i < scratch.count; ++i) FinishPanel(group, scratch.panels[i], sweep.merge);
}

template <typename T>
void WeightsImpl(const FusedGroup<T>& group, KeyRange keys, T* memory, T* weights, int64_t stride) {
  Arena<T> arena(memory);
  Scratch<T> scratch(arena, *group.problem, group.query.rows);
  PackQueries(group, scratch);
  PackedBlock<T> packed;
  packed.keys = {keys.begin, std::clamp(group.key.rows, keys.begin, keys.end)};
  packed.key = group.key.Rows(keys.begin, packed.keys.size());
  for (int64_t key = 0; key < keys.size(); ++key) {
    std::fill_n(weights + key * stride, group.query.rows, T{0});
  }
  const ScoreChange<T> change = ScoreChangeOf<T>(*group.problem, group.head);
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
    const Block<T> block = SeenBlock(group, change, panel, packed, scratch);
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

// HWY_EXPORT takes no template: each function by name, for float (F) and double (D).
int64_t GroupRowsF(const Problem& problem) { return GroupRows<float>(problem); }
int64_t GroupRowsD(const Problem& problem) { return GroupRows<double>(problem); }
int64_t ScratchElementsF(const Problem& problem) { return AnyScratchElements<float>(problem); }
int64_t ScratchElementsD(const Problem& problem) { return AnyScratchElements<double>(problem); }
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
bool FewQueriesF(const Problem& problem) { return FewQueries<float>(problem); }
bool FewQueriesD(const Problem& problem) { return FewQueries<double>(problem); }
void RowsSegmentF(const FusedRows<float>& rows, int64_t begin, float* memory,
                  const std::atomic<bool>& stop, float* states) {
  RowsSegmentImpl(rows, begin, memory, stop, states);
}
void RowsSegmentD(const FusedRows<double>& rows, int64_t begin, double* memory,
                  const std::atomic<bool>& stop, double* states) {
  RowsSegmentImpl(rows, begin, memory, stop, states);
}
void FinishRowF(const float* states, int64_t n, int64_t stride, const FusedRowResult<float>& to) {
  FinishRowImpl(states, n, stride, to);
}
void FinishRowD(const double* states, int64_t n, int64_t stride, const FusedRowResult<double>& to) {
  FinishRowImpl(states, n, stride, to);
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
HWY_EXPORT(FewQueriesF);
HWY_EXPORT(FewQueriesD);
HWY_EXPORT(RowsSegmentF);
HWY_EXPORT(RowsSegmentD);
HWY_EXPORT(FinishRowF);
HWY_EXPORT(FinishRowD);

template <>
int64_t FusedGroupRows<float>(const Problem& p) {
  return HWY_DYNAMIC_DISPATCH(GroupRowsF)(p);
}
template <>
int64_t FusedGroupRows<double>(const Problem& p) {
  return HWY_DYNAMIC_DISPATCH(GroupRowsD)(p);
}
template <>
int64_t FusedScratchElements<float>(const Problem& p) {
  return HWY_DYNAMIC_DISPATCH(ScratchElementsF)(p);
}
template <>
int64_t FusedScratchElements<double>(const Problem& p) {
  return HWY_DYNAMIC_DISPATCH(ScratchElementsD)(p);
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
template <>
bool FusedFewQueries<float>(const Problem& p) {
  return HWY_DYNAMIC_DISPATCH(FewQueriesF)(p);
}
template <>
bool FusedFewQueries<double>(const Problem& p) {
  return HWY_DYNAMIC_DISPATCH(FewQueriesD)(p);
}
template <>
void FusedRowsSegment(const FusedRows<float>& rows, int64_t begin, float* scratch,
                      const std::atomic<bool>& stop, float* states) {
  HWY_DYNAMIC_DISPATCH(RowsSegmentF)(rows, begin, scratch, stop, states);
}
template <>
void FusedRowsSegment(const FusedRows<double>& rows, int64_t begin, double* scratch,
                      const std::atomic<bool>& stop, double* states) {
  HWY_DYNAMIC_DISPATCH(RowsSegmentD)(rows, begin, scratch, stop, states);
}
template <>
void FusedFinishRow(const float* states, int64_t segments, int64_t stride,
                    const FusedRowResult<float>& to) {
  HWY_DYNAMIC_DISPATCH(FinishRowF)(states, segments, stride, to);
}
template <>
void FusedFinishRow(const double* states, int64_t segments, int64_t stride,
                    const FusedRowResult<double>& to) {
  HWY_DYNAMIC_DISPATCH(FinishRowD)(states, segments, stride, to);
}

}  // namespace attendant::core
#endif  // HWY_ONCE
