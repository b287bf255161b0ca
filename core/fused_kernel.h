// The fused kernel of the chunked path: scores, softmax and values of a panel of queries in one
// pass over the keys, in registers and L1. SIMD, chosen for the CPU at run time.
//
// Two layouts, one arithmetic. Where queries fill a vector, SIMD lanes are queries: a panel is a
// few vectors of them, a group is a few panels that share each block of keys while it is in L2;
// keys and values are broadcast an element at a time; scores are S[key][lane], outputs
// O[dimension][lane]. Where there are few, lanes are keys and then dimensions, and segments of one
// head may be computed apart.
//
// The arithmetic is a contract: a row's bits depend on that row's own inputs and nothing else. Not
// on the queries beside it, the vector width, the thread or the layout, on any CPU with AVX2 and
// FMA. It is defined by absolute key positions, never by tiles. For one row, in its type T:
//
//   score      s_j = one chain of fma over d = 0 .. D-1 from 0, of key_jd and
//              scale_log2 * query_d (rounded once). Then, where asked for, s_j = c tanh(s_j (1/c))
//              with c the softcap times log2(e) and tanh of exp2-inl.h; then s_j = fma(b, log2(e),
//              s_j) with b the mask's number less the row's shift, which is 0 at first, and at
//              least the lowest finite number; then s_j = fma(-a, x, s_j) with a the head's slope
//              times log2(e), and x = |p - k| the distance of the query's position and the key,
//              both counted from the block's first key and rounded to T. A hidden key has
//              -infinity.
//   reference  m, an integer, from -2^127 (double: -2^1023), 'no key yet'. For each group of
//              4 keys at multiples of 4, with gm its largest visible score: where gm - m > 32,
//              m' = rint(gm) + 32, and all that was summed so far is multiplied by 2^(m - m'),
//              exactly (0 below 2^-126; double: 2^-1022): l, this block's l, O, and this block's
//              weights.
//   weight     p_j = 2^(s_j - m): n = rint(s_j), r = s_j - n, the polynomial of exp2-inl.h
//              in r, times 2^(n - m); 0 where n - m < -125 (double: -1021).
//   sums       within each block of 192 keys at multiples of 192, from 0 and in key order:
//              l_b a chain of adds, O_b a chain of fma of p_j and value_j. At the block's end
//              l += l_b, O += O_b.
//   segments   of 4032 keys (21 blocks) at multiples of 4032 start from the empty state, and
//              are merged in order; one without a visible key is passed over. With
//              M' = max(M, m): L' = fma(l, 2^(m - M'), L * 2^(M - M')), O likewise.
//   sink       is one last segment, without an output: m = rint(sink log2(e)) + 32,
//              l = 2^(sink log2(e) - m) as a weight; a shift is subtracted from the sink.
//   shift      a row to whose scores a mask is added, and whose M is not between -2^99 and 2^99
//              (double: 2^995) by now, starts again, with the shift HeadMask::Shift says.
//   end        output = (O + 0) * (1 / L), 0 where L is 0: an O of -0 becomes 0;
//              logsumexp = (M + e) ln 2 + ln f + shift, L = 2^e f; weights 2^(s_j - M) * (1 / L).
//              What is NaN is the one quiet NaN, whatever NaN it came from.
//
// A weight's mantissa never depends on m, so when m moves matters where weights underflow alone.
// Range: |value| below 2^90, no visible score and no sink below -2^126. Weights are down to 2^-33
// of their final size while they are summed: values below 2^-93 (double: 2^-989) lose accuracy to
// the smallest numbers. A NaN score makes its row NaN.
#ifndef ATTENDANT_CORE_FUSED_KERNEL_H_
#define ATTENDANT_CORE_FUSED_KERNEL_H_

#include <algorithm>
#include <cstdint>

#include "core/checked_math.h"
#include "core/checkpoint.h"
#include "core/mask.h"
#include "core/problem.h"
#include "core/tensor_view.h"

namespace attendant::core {

// Keys whose sums are taken together, and keys after which the state starts afresh.
inline constexpr int64_t kFusedBlock = 192;
inline constexpr int64_t kFusedSegment = 21 * kFusedBlock;

// A group of queries of one head, and that head's keys, at least as far as some query sees them.
// Stored as S: half precision is widened block by block, and an output rounded once.
template <typename S, typename T = Wide<S>>
struct FusedGroup {
  const Problem* problem = nullptr;
  int64_t batch = 0;
  int64_t head = 0;
  int64_t first_query = 0;    // of the group, within the head
  MatrixView<const S> query;  // (rows, D), rows <= FusedGroupRows<T>(problem)
  MatrixView<const S> key;    // (Tk or fewer, D)
  MatrixView<const S> value;  // (Tk or fewer, Dv)
  HeadMask<T> mask;
  MatrixView<S> output;  // (rows, Dv); null where only delta is wanted
  // Each row's M, 1 / L (0 where L is 0) and shift, from which its weights follow; and its
  // logsumexp. Null where they are not wanted; the shift also where no mask is added.
  T* reference = nullptr;    // (rows)
  T* inverse_sum = nullptr;  // (rows)
  T* shift = nullptr;        // (rows)
  T* logsumexp = nullptr;    // (rows)
  // For a gradient: the sum of output * d_output over each row, the output not rounded.
  MatrixView<const S> d_output;  // (rows, Dv)
  T* delta = nullptr;            // (rows); null where it is not wanted
  // Those of the group that this thread will probably compute next, to be fetched in time. Empty
  // where there is none.
  MatrixView<const S> next_query;
  MatrixView<const S> next_key;
  MatrixView<const S> next_value;
};

// Most queries in a group on this CPU.
template <typename T>
int64_t FusedGroupRows(const Problem& problem);

// Elements of scratch, 64-byte aligned, that a call needs.
template <typename T>
int64_t FusedScratchElements(const Problem& problem);

// Computes the group. Returns early, with the output not written, once the checkpoint says so.
// Thread-safe.
template <typename S>
void FusedForward(const FusedGroup<S>& group, Wide<S>* scratch, const Checkpoint& checkpoint);

// The softmax weights of the group's queries over a block of at most kFusedBlock keys at a multiple
// of it, from what FusedForward found: weights[key][row], `stride` elements from one key to the
// next. REQUIRES: group.reference, group.inverse_sum and group.shift are as FusedForward left them.
template <typename S>
void FusedWeights(const FusedGroup<S>& group, KeyRange keys, Wide<S>* scratch, Wide<S>* weights,
                  int64_t stride);

// Whether the head's queries are too few to fill a vector on this CPU.
template <typename T>
bool FusedFewQueries(const Problem& problem);

// Most rows of a FusedRows.
inline constexpr int64_t kFusedMostRows = 16;
inline int64_t FusedRowsOfTask(const Problem& p) {
  if (p.kv_heads == 0) return 0;
  return std::min(kFusedMostRows, SaturatingProduct({p.heads / p.kv_heads, p.queries}));
}

// Queries of the heads that share a head of keys, and those keys.
template <typename S, typename T = Wide<S>>
struct FusedRows {
  const Problem* problem = nullptr;
  int64_t batch = 0;
  MatrixView<const S> key;    // (Tk, D)
  MatrixView<const S> value;  // (Tk, Dv)
  int64_t count = 0;
  const S* query[kFusedMostRows] = {};  // each (D)
  int64_t head[kFusedMostRows] = {};
  int64_t index[kFusedMostRows] = {};  // of the query, within its head
  HeadMask<T> mask[kFusedMostRows];    // of its head
  T shift[kFusedMostRows] = {};        // 0 at first
};

// A row's state of one segment: m, l, and O of Dv elements.
constexpr int64_t FusedStateElements(int64_t value_width) {
  return SaturatingSum({value_width, 2});
}

// Computes the rows' states of the segment of keys that begins at `begin`, a multiple of
// kFusedSegment: states[row][FusedStateElements]. Returns early once the checkpoint says so.
// Thread-safe.
template <typename S>
void FusedRowsSegment(const FusedRows<S>& rows, int64_t begin, Wide<S>* scratch,
                      const Checkpoint& checkpoint, Wide<S>* states);

// Where a row goes; null where it is not wanted, but for the output.
template <typename S, typename T = Wide<S>>
struct FusedRowResult {
  const Problem* problem = nullptr;
  int64_t head = 0;
  T shift = 0;          // with which the states were computed
  T* total = nullptr;   // (Dv), to work in; not null
  S* output = nullptr;  // (Dv)
  T* reference = nullptr;
  T* inverse_sum = nullptr;
  T* logsumexp = nullptr;
};

// Merges the states of a row's segments, `stride` elements from one to the next, and finishes it.
template <typename S>
void FusedFinishRow(const Wide<S>* states, int64_t segments, int64_t stride,
                    const FusedRowResult<S>& to);

}  // namespace attendant::core

#endif  // ATTENDANT_CORE_FUSED_KERNEL_H_
