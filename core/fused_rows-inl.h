// The fused kernel for few queries: lanes are keys, then dimensions of the value. It reads keys and
// values once, in long runs, and is bound by memory. The arithmetic is fused_kernel.h's contract.

// Per-target include guard.
#if defined(ATTENDANT_CORE_FUSED_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ATTENDANT_CORE_FUSED_ROWS_INL_H_
#undef ATTENDANT_CORE_FUSED_ROWS_INL_H_
#else
#define ATTENDANT_CORE_FUSED_ROWS_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>
#include <utility>

#include "core/fused_tiles-inl.h"
#include "core/mask.h"
#include "core/softmax.h"

HWY_BEFORE_NAMESPACE();
namespace attendant::core::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// Blocks of keys that are read before the same blocks of values: shorter runs restart the stream
// from memory too often. A third of a segment.
constexpr int64_t kRunKeys = 7 * kFusedBlock;
// So far ahead of the reader, in bytes, memory is asked for.
constexpr int64_t kReadAhead = 8 << 10;
// Vectors of keys and rows of queries in a register tile.
constexpr int kKeyVectors = 1;
constexpr int kScoreRows = 4;
constexpr int kValueRows = 2;

// A row's state of a segment, and what its next block adds.
template <typename T>
struct RowState {
  T* reference = nullptr;
  T* sum = nullptr;
  T* output = nullptr;  // [dimension]
  T* block = nullptr;   // [dimension]: the block's own sums
  T* scores = nullptr;  // [key of a run]; weights once the row was absorbed
  KeyRange visible;     // keys it sees
  ScoreChange<T> change;
  int64_t query = 0;     // within its head
  int64_t position = 0;  // where it stands among the keys
  HeadMask<T> mask;
  T shift = 0;
};

// scores[row][key] of kKeyVectors vectors of keys: chains of fma over d. queries: scaled. ahead:
// whether these rows are the ones that ask for what comes next.
template <typename T, int kRows, typename S>
HWY_INLINE void RowScores(const T* const* queries, const S* const* keys, int64_t width,
                          T* const* scores, bool ahead, PrefetcherToL1& next) {
  const Tag<T> d;
  constexpr int64_t kLanes = LanesOf<T>();
  // Lines of the keys' rows that a step over kColumns dimensions reads.
  constexpr int64_t kStepLines =
      std::max<int64_t>(kKeyVectors * kLanes * kColumns<S> * sizeof(S) / 64, 1);
  Vec<T> sums[kRows][kKeyVectors];
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kKeyVectors; ++c) sums[r][c] = hn::Zero(d);
  }
  int64_t x = 0;
#pragma GCC unroll 2
  for (; x + kColumns<S> <= width; x += kColumns<S>) {
    if (ahead) next.Step(kStepLines);
    for (int c = 0; c < kKeyVectors; ++c) {
      Vec<T> columns[kColumns<S>];
      LoadWideColumns(d, keys + c * kLanes, x, columns);
      for (int i = 0; i < kColumns<S>; ++i) {
        for (int r = 0; r < kRows; ++r) {
          sums[r][c] = hn::MulAdd(columns[i], hn::Set(d, queries[r][x + i]), sums[r][c]);
        }
      }
    }
  }
  for (; x < width; ++x) {
    for (int c = 0; c < kKeyVectors; ++c) {
      const Vec<T> column = LoadColumn(d, keys + c * kLanes, x);
      for (int r = 0; r < kRows; ++r) {
        sums[r][c] = hn::MulAdd(column, hn::Set(d, queries[r][x]), sums[r][c]);
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kKeyVectors; ++c) hn::StoreU(sums[r][c], d, scores[r] + c * kLanes);
  }
}

// array *= factor.
template <typename T>
HWY_INLINE void ScaleArray(T* array, int64_t count, T factor) {
  for (int64_t i = 0; i < count; ++i) array[i] *= factor;
}

// first: the block's first key; seen: which of the block's keys the row sees, a mask left aside.
// Returns whether the mask hides some of those.
template <typename T>
HWY_INLINE bool ChangeRow(const RowState<T>& row, int64_t first, KeyRange seen, T* scores) {
  const T position = static_cast<T>(row.position - first);
  T bias[kFusedBlock];
  const bool masked = row.mask.present() && seen.size() > 0;
  if (masked) row.mask.Read(row.query, {first + seen.begin, first + seen.end}, bias + seen.begin);
  const auto step = [&](auto d, int64_t j) HWY_ATTR {
    auto score = hn::LoadU(d, scores + j);
    if (row.change.softcap != 0) score = Capped(d, row.change, score);
    if (masked) {
      score = Masked(d, Shifted(d, hn::LoadU(d, bias + j), hn::Set(d, row.shift)), score);
    }
    if (row.change.slope != 0) {
      const auto key = hn::Iota(d, static_cast<T>(j));
      score = Sloped(d, row.change, hn::Abs(hn::Sub(hn::Set(d, position), key)), score);
    }
    hn::StoreU(score, d, scores + j);
  };
  int64_t j = seen.begin;
  for (; j + LanesOf<T>() <= seen.end; j += LanesOf<T>()) step(Tag<T>(), j);
  for (; j < seen.end; ++j) step(hn::CappedTag<T, 1>(), j);
  return masked && std::find(bias + seen.begin, bias + seen.end, kHiddenBias<T>) != bias + seen.end;
}

// Turns a row's scores of a block into weights, and moves its reference and sums. seen: which of
// the block's keys the row sees.
template <typename T>
HWY_INLINE void AbsorbRow(const RowState<T>& row, T* scores, KeyRange seen, int64_t value_width) {
  const hn::CappedTag<T, kDecision> d;
  constexpr int kStep = static_cast<int>(hn::MaxLanes(d));
  const hn::CappedTag<T, 1> one;
  const int64_t begin = seen.begin / kDecision * kDecision;
  const int64_t end = seen.end;
  std::fill(scores + begin, scores + seen.begin, -std::numeric_limits<T>::infinity());
  for (int64_t j = end; j % kDecision != 0; ++j) scores[j] = -std::numeric_limits<T>::infinity();
  T reference = *row.reference;
  T block_sum = 0;
  for (int64_t j = begin; j < end; j += kDecision) {
    T largest = -std::numeric_limits<T>::infinity();
    for (int i = 0; i < kDecision; ++i) largest = std::max(largest, scores[j + i]);
    if (HWY_UNLIKELY(largest - reference > kThreshold)) {
      const T moved = hn::GetLane(hn::Round(hn::Set(one, largest))) + kThreshold;
      const T factor = hn::GetLane(PowerOfTwo(one, hn::Set(one, reference - moved)));
      reference = moved;
      *row.sum *= factor;
      block_sum *= factor;
      ScaleArray(row.output, value_width, factor);
      ScaleArray(scores + begin, j - begin, factor);
    }
    for (int i = 0; i < kDecision; i += kStep) {
      const auto w = Exp2(d, hn::LoadU(d, scores + j + i), hn::Set(d, reference));
      hn::StoreU(w, d, scores + j + i);
    }
    for (int i = 0; i < kDecision; ++i) block_sum += scores[j + i];
  }
  *row.reference = reference;
  *row.sum += block_sum;
}

// sums[r][dimension] continue their chains over kKeys keys.
template <typename T, int kRows, int kKeys, typename S>
HWY_INLINE void RowValues(const T* const* weights, const S* const* values, int64_t value_width,
                          T* const* sums) {
  const auto step = [&](auto d, int64_t x) HWY_ATTR {
    for (int r = 0; r < kRows; ++r) {
      auto sum = hn::LoadU(d, sums[r] + x);
      for (int i = 0; i < kKeys; ++i) {
        sum = hn::MulAdd(LoadWide(d, values[i] + x), hn::Set(d, weights[r][i]), sum);
      }
      hn::StoreU(sum, d, sums[r] + x);
    }
  };
  int64_t x = 0;
  for (; x + LanesOf<T>() <= value_width; x += LanesOf<T>()) step(Tag<T>(), x);
  for (; x < value_width; ++x) step(hn::CappedTag<T, 1>(), x);
}

// Calls function.template operator()<n>(first) for the rows, kMost at a time, then one at a time.
template <int kMost, typename Function>
HWY_INLINE void ForRows(int64_t count, const Function& function) {
  int64_t first = 0;
  for (; first + kMost <= count; first += kMost) function.template operator()<kMost>(first);
  for (; first < count; ++first) function.template operator()<1>(first);
}

// kKeys keys of a block, from its key j on, for `count` rows that see them.
template <typename T, int kKeys, typename S>
HWY_INLINE void KeyValues(const RowState<T>* rows, int64_t count, const MatrixView<const S>& value,
                          int64_t j, int64_t in_run) {
  const S* values[kKeys];
  for (int i = 0; i < kKeys; ++i) values[i] = value.Row(j + i);
  ForRows<kValueRows>(count, [&]<int kRows>(int64_t first) HWY_ATTR {
    T* sums[kRows];
    const T* weights[kRows];
    for (int r = 0; r < kRows; ++r) {
      sums[r] = rows[first + r].block;
      weights[r] = rows[first + r].scores + in_run + j;
    }
    RowValues<T, kRows, kKeys>(weights, values, value.columns, sums);
  });
}

// Scores of a run of keys for every row.
template <typename T, typename S>
HWY_INLINE void RunScores(const RowState<T>* rows, int64_t count, const T* const* queries,
                          const MatrixView<const S>& key, PrefetcherToL1& next) {
  constexpr int64_t kKeys = kKeyVectors * LanesOf<T>();
  for (int64_t j = 0; j < key.rows; j += kKeys) {
    const S* keys[kKeys];
    for (int64_t i = 0; i < kKeys; ++i) keys[i] = key.Row(std::min(j + i, key.rows - 1));
    ForRows<kScoreRows>(count, [&]<int kRows>(int64_t first) HWY_ATTR {
      T* scores[kRows];
      for (int r = 0; r < kRows; ++r) scores[r] = rows[first + r].scores + j;
      RowScores<T, kRows>(queries + first, keys, key.columns, scores, first == 0, next);
    });
  }
}

// Folds a block of a run into every row. first: the block's first key; in_run: its place there.
template <typename T, typename S>
HWY_INLINE void RunValues(const RowState<T>* rows, int64_t count, const MatrixView<const S>& value,
                          int64_t first, int64_t in_run, bool change, PrefetcherToL1& next) {
  KeyRange seen[kFusedMostRows];
  KeyRange by_all = {0, value.rows};
  bool hides = false;
  for (int64_t r = 0; r < count; ++r) {
    const auto within = [&](int64_t key) {
      return std::clamp<int64_t>(key - first, 0, value.rows);
    };
    seen[r] = {within(rows[r].visible.begin), within(rows[r].visible.end)};
    by_all = {std::max(by_all.begin, seen[r].begin), std::min(by_all.end, seen[r].end)};
    if (change && ChangeRow(rows[r], first, seen[r], rows[r].scores + in_run)) hides = true;
    AbsorbRow(rows[r], rows[r].scores + in_run, seen[r], value.columns);
    std::fill_n(rows[r].block, value.columns, T{0});
  }
  constexpr int64_t kKeys = 4;
  const int64_t lines = PrefetcherToL1::Lines<S>(value.columns);
  int64_t j = 0;
  // A hidden key's weight is 0, which times a NaN would not be.
  const bool select = hides && !AllRowsFinite(value);
  if (select) by_all = {value.rows, value.rows};
  const auto one_by_one = [&](int64_t end) HWY_ATTR {
    for (; j < end; ++j) {
      next.Step(lines);
      for (int64_t r = 0; r < count; ++r) {
        if (j < seen[r].begin || j >= seen[r].end) continue;
        if (select && rows[r].mask.Hides(rows[r].query, first + j)) continue;
        KeyValues<T, 1>(rows + r, 1, value, j, in_run);
      }
    }
  };
  one_by_one(std::min(by_all.begin, value.rows));
  for (; j + kKeys <= by_all.end; j += kKeys) {
    next.Step(kKeys * lines);
    KeyValues<T, kKeys>(rows, count, value, j, in_run);
  }
  one_by_one(value.rows);
  for (int64_t r = 0; r < count; ++r) {
    for (int64_t x = 0; x < value.columns; ++x) rows[r].output[x] += rows[r].block[x];
  }
}

// Room for a run's scores of a row, rounded up to a register tile and to what is decided at a time.
template <typename T>
int64_t RunElements(const Problem& problem) {
  return std::min(kRunKeys, problem.keys) +
         std::max<int64_t>(kKeyVectors * LanesOf<T>(), kDecision);
}

template <typename T>
int64_t RowsScratchElements(const Problem& problem) {
  const int64_t row = SaturatingSum({problem.width, problem.value_width, RunElements<T>(problem)});
  return SaturatingProduct({FusedRowsOfTask(problem), row});
}

template <typename S, typename T = Wide<S>>
void RowsSegmentImpl(const FusedRows<S>& group, int64_t segment, T* scratch,
                     const Checkpoint& checkpoint, T* states) {
  const Problem& problem = *group.problem;
  const T scale = static_cast<T>(problem.ScaleLog2());
  const int64_t width = problem.width;
  const int64_t value_width = problem.value_width;
  RowState<T> rows[kFusedMostRows];
  const T* queries[kFusedMostRows];
  KeyRange keys{segment + kFusedSegment, segment};  // from the first that some row sees to the last
  for (int64_t r = 0; r < group.count; ++r) {
    T* const query = scratch;
    WidenRow(group.query[r], width, query);
    ScaleArray(query, width, scale);
    queries[r] = query;
    T* const state = states + r * FusedStateElements(value_width);
    rows[r].reference = state;
    rows[r].sum = state + 1;
    rows[r].output = state + 2;
    rows[r].block = query + width;
    rows[r].scores = rows[r].block + value_width;
    rows[r].visible = problem.VisibleKeys(group.batch, group.index[r]);
    rows[r].change = ScoreChangeOf<T>(problem, group.head[r]);
    rows[r].query = group.index[r];
    rows[r].position = group.index[r] + problem.Offset(group.batch);
    rows[r].mask = group.mask[r];
    rows[r].shift = group.shift[r];
    scratch = rows[r].scores + RunElements<T>(problem);
    *rows[r].reference = NoReference<T>();
    *rows[r].sum = 0;
    std::fill_n(rows[r].output, value_width, T{0});
    if (rows[r].visible.size() == 0) continue;
    keys = {std::min(keys.begin, rows[r].visible.begin), std::max(keys.end, rows[r].visible.end)};
  }
  // From whole blocks on: a block's sums are one chain.
  const int64_t begin = std::max(segment, keys.begin / kFusedBlock * kFusedBlock);
  const int64_t end = std::min(keys.end, segment + kFusedSegment);
  const bool change = problem.mask.has_value() || ChangesScores(problem);
  PrefetcherToL1 next;
  for (int64_t run = begin; run < end; run += kRunKeys) {
    const int64_t count = std::min(kRunKeys, end - run);
    next.Add(group.key.Rows(run, count));
    next.Add(group.value.Rows(run, count));
  }
  next.Step(kReadAhead / 64);
  for (int64_t run = begin; run < end; run += kRunKeys) {
    const int64_t run_end = std::min(run + kRunKeys, end);
    if (checkpoint.ToStop()) return;
    RunScores(rows, group.count, queries, group.key.Rows(run, run_end - run), next);
    for (int64_t first = run; first < run_end; first += kFusedBlock) {
      const int64_t in_block = std::min(kFusedBlock, run_end - first);
      RunValues(rows, group.count, group.value.Rows(first, in_block), first, first - run, change,
                next);
    }
  }
}

// Merges the states of a row's segments in order, and finishes it.
template <typename S, typename T = Wide<S>>
void FinishRowImpl(const T* states, int64_t segments, int64_t stride, const FusedRowResult<S>& to) {
  const hn::CappedTag<T, 1> one;
  const auto power = [&](T e) HWY_ATTR { return hn::GetLane(PowerOfTwo(one, hn::Set(one, e))); };
  const int64_t value_width = to.problem->value_width;
  T reference = NoReference<T>();
  T sum = 0;
  std::fill_n(to.total, value_width, T{0});
  const auto merge = [&](auto d, const T* output, T factor, T total_factor, int64_t x) HWY_ATTR {
    const auto scaled = hn::Mul(hn::LoadU(d, to.total + x), hn::Set(d, total_factor));
    hn::StoreU(hn::MulAdd(hn::LoadU(d, output + x), hn::Set(d, factor), scaled), d, to.total + x);
  };
  // Takes a segment's m and l in; the factors of its output and of the one so far.
  const auto take = [&](T segment_reference, T segment_sum) HWY_ATTR {
    const T merged = std::max(reference, segment_reference);
    const T factor = power(segment_reference - merged);
    const T total_factor = power(reference - merged);
    reference = merged;
    sum = hn::GetLane(hn::MulAdd(hn::Set(one, segment_sum), hn::Set(one, factor),
                                 hn::Set(one, sum * total_factor)));
    return std::pair(factor, total_factor);
  };
  for (int64_t s = 0; s < segments; ++s) {
    const T* const state = states + s * stride;
    if (state[1] == 0) continue;
    const auto [factor, total_factor] = take(state[0], state[1]);
    int64_t x = 0;
    for (; x + LanesOf<T>() <= value_width; x += LanesOf<T>()) {
      merge(Tag<T>(), state + 2, factor, total_factor, x);
    }
    for (; x < value_width; ++x) merge(one, state + 2, factor, total_factor, x);
  }
  const SinkState<T> sink = SinkStateOf<T>(*to.problem, to.head, to.shift);
  if (sink.sum != 0) {
    const T total_factor = take(sink.reference, sink.sum).second;
    ScaleArray(to.total, value_width, total_factor);
  }
  const T inverse = sum == 0 ? T{0} : 1 / sum;
  for (int64_t x = 0; x < value_width; ++x) {
    const T element = (to.total[x] + 0) * inverse;
    to.total[x] = element == element ? element : std::numeric_limits<T>::quiet_NaN();
  }
  NarrowRow(to.total, value_width, to.output);
  if (to.reference != nullptr) *to.reference = reference;
  if (to.inverse_sum != nullptr) *to.inverse_sum = inverse;
  if (to.logsumexp != nullptr) *to.logsumexp = LogSumExp(reference, sum, to.shift);
}

}  // namespace attendant::core::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
