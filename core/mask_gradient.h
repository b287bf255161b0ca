// The gradient of an additive mask: that of the masked scores, summed over the axes along which the
// mask was broadcast.
#ifndef ATTENDANT_CORE_MASK_GRADIENT_H_
#define ATTENDANT_CORE_MASK_GRADIENT_H_

#include <algorithm>
#include <cstdint>

#include "core/checked_math.h"
#include "core/problem.h"

namespace attendant::core {

// A tile is a part of the mask, and everything that it was broadcast to: a tile owns its sums.
// Thread-compatible.
class MaskGradientTile {
 public:
  // Queries and keys of a part.
  static constexpr int64_t kBlock = 192;
  static constexpr int64_t kSums = kBlock * kBlock;

  // 0 where there is no pair of a query and a key. REQUIRES, here and below: problem.AddsMask(); it
  // outlives the tile.
  static int64_t Tiles(const Problem& problem);

  // sums: of kSums elements, cleared here. In double: a sum may be over all queries of all heads.
  MaskGradientTile(const Problem& problem, int64_t tile, double* sums);

  // Calls visit(batch, head, queries, keys) for each block of scores that the part was added to, in
  // one order, until one of them returns false.
  template <typename Visit>
  void ForScores(const Visit& visit) const {
    for (int64_t batch = batches_.begin; batch < batches_.end; ++batch) {
      for (int64_t head = heads_.begin; head < heads_.end; ++head) {
        for (int64_t i = query_blocks_.begin; i < query_blocks_.end; ++i) {
          for (int64_t j = key_blocks_.begin; j < key_blocks_.end; ++j) {
            const bool go_on =
                visit(batch, head, BlockOf(i, problem_.queries), BlockOf(j, problem_.keys));
            if (!go_on) return;
          }
        }
      }
    }
  }

  // Adds the gradients of a block of scores: d_scores[query * query_stride + key * key_stride].
  template <typename T>
  void Add(KeyRange queries, KeyRange keys, const T* d_scores, int64_t query_stride,
           int64_t key_stride) {
    for (int64_t i = 0; i < queries.size(); ++i) {
      for (int64_t j = 0; j < keys.size(); ++j) {
        sums_[(by_query_ ? i : 0) * kBlock + (by_key_ ? j : 0)] +=
            static_cast<double>(d_scores[i * query_stride + j * key_stride]);
      }
    }
  }

  // Writes the part to the mask's gradient, which has the mask's dtype and shape.
  void Store(void* d_mask) const;

 private:
  static int64_t Blocks(int64_t length) { return CeilDiv(length, kBlock); }
  static KeyRange BlockOf(int64_t index, int64_t length) {
    return {index * kBlock, std::min((index + 1) * kBlock, length)};
  }

  const Problem& problem_;
  double* const sums_;  // [query][key]
  const bool by_query_;
  const bool by_key_;
  KeyRange batches_;
  KeyRange heads_;
  KeyRange query_blocks_;
  KeyRange key_blocks_;
};

// Sets the gradient to 0, which is that of a mask that is added to no score.
void ClearMaskGradient(const Problem& problem, void* d_mask);

}  // namespace attendant::core

#endif  // ATTENDANT_CORE_MASK_GRADIENT_H_
