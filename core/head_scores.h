// What a head does to the products of its queries and keys before the softmax, for the paths whose
// products come from a library. The fused kernel does the same in registers.
#ifndef ATTENDANT_CORE_HEAD_SCORES_H_
#define ATTENDANT_CORE_HEAD_SCORES_H_

#include <cstdint>

#include "core/problem.h"

namespace attendant::core {

// Thread-compatible.
template <typename T>
class HeadScores {
 public:
  // REQUIRES: batch and head are the problem's; it outlives this.
  HeadScores(const Problem& problem, int64_t batch, int64_t head);

  // Turns a query's products with `keys` into what the softmax takes, to be multiplied by scale():
  // where there is more to do than to scale them, into exponents of 2.
  void Apply(int64_t query, KeyRange keys, T* row) const;
  // log2(e) in it.
  T scale() const { return changes_ ? T{1} : scale_; }

  // The score that stands beside a row's own, weighs as they do and has no value; -infinity where
  // there is none. In the units that Apply leaves.
  T sink() const { return sink_; }

 private:
  const bool changes_;
  const T scale_;
  const T softcap_;  // 0: none
  const T slope_;
  const int64_t offset_;
  const T sink_;
};

}  // namespace attendant::core

#endif  // ATTENDANT_CORE_HEAD_SCORES_H_
