// What a head does to the products of its queries and keys before the softmax, for the paths whose
// products come from a library. The fused kernel does the same in registers.
#ifndef ATTENDANT_CORE_HEAD_SCORES_H_
#define ATTENDANT_CORE_HEAD_SCORES_H_

#include <cstdint>

#include "core/mask.h"
#include "core/problem.h"

namespace attendant::core {

// A row's, in the units that HeadScores::Apply leaves.
template <typename T>
struct RowScores {
  T shift = 0;  // HeadMask::Shift
  // The score that stands beside the row's own, weighs as they do and has no value; -infinity where
  // there is none.
  T sink = 0;
};

// What a softmax leaves beside the weights.
template <typename T>
struct RowSoftmax {
  T logsumexp = 0;    // natural; -infinity where no key is seen
  T sink_weight = 0;  // of the sink: with it the weights sum up to 1
};

// Thread-compatible.
template <typename T>
class HeadScores {
 public:
  // mask: of the problem's mask. REQUIRES: batch and head are the problem's; it outlives this.
  HeadScores(const Problem& problem, const void* mask, int64_t batch, int64_t head);

  // seen: the keys that the query sees, a mask left aside.
  RowScores<T> OfRow(int64_t query, KeyRange seen) const;

  // Turns a query's products with `keys` into what the softmax takes, to be multiplied by scale():
  // where there is more to do than to scale them, into exponents of 2. What the mask hides becomes
  // -infinity. shift: of the row.
  void Apply(int64_t query, KeyRange keys, T shift, T* row) const;
  // log2(e) in it.
  T scale() const { return changes_ ? T{1} : scale_; }

  // Turns a query's row of products with all keys, of which it sees `seen`, into softmax weights.
  RowSoftmax<T> Softmax(int64_t query, KeyRange seen, int64_t keys, T* row) const;

  // Sets what the mask hides of a row of weights to 0: in a row with a NaN it may not be.
  void ZeroMasked(int64_t query, KeyRange keys, T* row) const;

  const HeadMask<T>& mask() const { return mask_; }

 private:
  const bool changes_;
  const T scale_;
  const T softcap_;  // 0: none
  const T slope_;
  const int64_t offset_;
  const double sink_;  // in base e
  const HeadMask<T> mask_;
};

}  // namespace attendant::core

#endif  // ATTENDANT_CORE_HEAD_SCORES_H_
