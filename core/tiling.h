// Which part of a problem a tile is: tiles are numbered batch by batch, head by head, and within a
// head block by block.
#ifndef ATTENDANT_CORE_TILING_H_
#define ATTENDANT_CORE_TILING_H_

#include <algorithm>
#include <cstdint>

#include "core/checked_math.h"
#include "core/problem.h"

namespace attendant::core {

class Tiling {
 public:
  struct Block {
    int64_t batch;
    int64_t head;
    int64_t flat_head;  // batch * heads + head
    int64_t first;      // first query or key
    int64_t count;      // 1 .. block size
  };

  // `length` queries or keys a head, in blocks of `block` of them.
  Tiling(const Problem& problem, int64_t length, int64_t block)
      : heads_(problem.heads),
        all_heads_(SaturatingProduct({problem.batch, problem.heads})),
        length_(length),
        block_(block) {}

  int64_t tiles() const { return SaturatingProduct({all_heads_, CeilDiv(length_, block_)}); }

  // REQUIRES: 0 <= tile < tiles().
  Block operator[](int64_t tile) const {
    const int64_t blocks = CeilDiv(length_, block_);
    const int64_t flat_head = tile / blocks;
    const int64_t first = tile % blocks * block_;
    return {flat_head / heads_, flat_head % heads_, flat_head, first,
            std::min(block_, length_ - first)};
  }

 private:
  int64_t heads_;
  int64_t all_heads_;
  int64_t length_;
  int64_t block_;
};

}  // namespace attendant::core

#endif  // ATTENDANT_CORE_TILING_H_
