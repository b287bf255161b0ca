// The fused kernel of the chunked gradient: the scores of a block of keys are computed again from
// what the forward sweep left, and their gradients meet queries, keys and values while they are in
// L1 (Dao et al. 2022, arXiv:2205.14135, algorithm 4). SIMD, chosen for the CPU at run time.
//
// For query i and key j, in base 2 with m and 1/l kept apart (one logsumexp of float loses ln l
// beside a mask of -1e9):
//
//   p_ij  = 2^(s_ij - m_i) (1/l_i)          the weight, 0 where j is hidden
//   dz_ij = p_ij (d_output_i . v_j - delta_i),   delta_i = output_i . d_output_i
//   ds_ij = scale dz_ij (1 - (c_ij / softcap)^2),  c_ij the capped score, where there is a softcap
//   d_query_i += ds_ij k_j,  d_key_j += ds_ij q_i,  d_value_j += p_ij d_output_i
//
// A hidden pair takes no part, whatever its key, value, query or d_output holds. Sums are taken in
// T over the queries (or keys) of a tile and a block of it, in order, so that they have the same
// bits on any thread. They are not the same on every CPU: a tile's blocks follow its vectors.
#ifndef ATTENDANT_CORE_GRADIENT_KERNEL_H_
#define ATTENDANT_CORE_GRADIENT_KERNEL_H_

#include <cstdint>

#include "core/checkpoint.h"
#include "core/mask.h"
#include "core/problem.h"
#include "core/tensor_view.h"

namespace attendant::core {

// Most queries and keys of a tile. Queries are packed for each tile again, keys and their gradients
// come from L2 once for the queries that are summed over together: 768 reached 0.79 of the peak
// where 384 had 0.75 (AVX-512, 2 MiB of L2), 0.77 and 0.76 with AVX2; 1536 gained no more.
inline constexpr int64_t kGradientTile = 768;

// A tile: some queries of one head, and some of its keys. Stored as S.
template <typename S, typename T = Wide<S>>
struct GradientGroup {
  const Problem* problem = nullptr;
  int64_t batch = 0;
  int64_t head = 0;
  int64_t first_query = 0;       // of the group, within the head
  KeyRange keys;                 // at most kGradientTile
  MatrixView<const S> query;     // (rows, D), rows <= kGradientTile
  MatrixView<const S> key;       // (Tk, D)
  MatrixView<const S> value;     // (Tk, Dv)
  MatrixView<const S> d_output;  // (rows, Dv)
  HeadMask<T> mask;
  // Of each row: m, 1 / l (0 where no key is seen), delta, and the mask's shift, null where none is
  // added.
  const T* reference = nullptr;    // (rows)
  const T* inverse_sum = nullptr;  // (rows)
  const T* delta = nullptr;        // (rows)
  const T* shift = nullptr;        // (rows)
  // Added to; a null one is not wanted, keys' and values' only together.
  MatrixView<T> d_query;  // (rows, D)
  MatrixView<T> d_key;    // (keys.size(), D)
  MatrixView<T> d_value;  // (keys.size(), Dv)
};

// Elements of scratch, 64-byte aligned, that a call needs.
template <typename T>
int64_t GradientScratchElements(const Problem& problem);

// Adds the tile's part to d_query, d_key and d_value. Returns early once the checkpoint says so.
// Thread-safe.
template <typename S>
void FusedGradient(const GradientGroup<S>& group, Wide<S>* scratch, const Checkpoint& checkpoint);

// The gradients dz of the tile's masked scores: d_scores[key][row], `stride` elements from one key
// to the next.
template <typename S>
void FusedScoreGradients(const GradientGroup<S>& group, Wide<S>* scratch, Wide<S>* d_scores,
                         int64_t stride);

}  // namespace attendant::core

#endif  // ATTENDANT_CORE_GRADIENT_KERNEL_H_
