#include "core/mask_gradient.h"

#include <cstring>

#include "core/half.h"
#include "core/tensor_view.h"

namespace attendant::core {
namespace {

// What an axis of the mask is divided into: all of it where it was broadcast.
int64_t Parts(int64_t stride, int64_t length) { return stride == 0 ? 1 : length; }
KeyRange PartOf(int64_t stride, int64_t index, int64_t length) {
  return stride == 0 ? KeyRange{0, length} : KeyRange{index, index + 1};
}

}  // namespace

int64_t MaskGradientTile::Tiles(const Problem& p) {
  const MaskLayout& mask = *p.mask;
  if (SaturatingProduct({p.batch, p.heads, p.queries, p.keys}) == 0) return 0;
  return SaturatingProduct({Parts(mask.batch_stride, p.batch), Parts(mask.head_stride, p.heads),
                            Parts(mask.query_stride, Blocks(p.queries)),
                            Parts(mask.key_stride, Blocks(p.keys))});
}

MaskGradientTile::MaskGradientTile(const Problem& p, int64_t tile, double* sums)
    : problem_(p),
      sums_(sums),
      by_query_(p.mask->query_stride != 0),
      by_key_(p.mask->key_stride != 0) {
  const MaskLayout& mask = *p.mask;
  const auto next = [&tile](int64_t stride, int64_t length) {
    const int64_t parts = Parts(stride, length);
    const KeyRange part = PartOf(stride, tile % parts, length);
    tile /= parts;
    return part;
  };
  key_blocks_ = next(mask.key_stride, Blocks(p.keys));
  query_blocks_ = next(mask.query_stride, Blocks(p.queries));
  heads_ = next(mask.head_stride, p.heads);
  batches_ = next(mask.batch_stride, p.batch);
  std::fill_n(sums_, kSums, 0.0);
}

void MaskGradientTile::Store(void* d_mask) const {
  const MaskLayout& mask = *problem_.mask;
  const KeyRange queries =
      by_query_ ? BlockOf(query_blocks_.begin, problem_.queries) : KeyRange{0, 1};
  const KeyRange keys = by_key_ ? BlockOf(key_blocks_.begin, problem_.keys) : KeyRange{0, 1};
  WithStored(mask.dtype, [&]<typename S>() {
    for (int64_t i = 0; i < queries.size(); ++i) {
      S* const row = static_cast<S*>(d_mask) + batches_.begin * mask.batch_stride +
                     heads_.begin * mask.head_stride + (queries.begin + i) * mask.query_stride;
      for (int64_t j = 0; j < keys.size(); ++j) {
        const auto sum = static_cast<Wide<S>>(sums_[i * kBlock + j]);
        core::Store(&sum, 1, row + (keys.begin + j) * mask.key_stride);
      }
    }
  });
}

void ClearMaskGradient(const Problem& p, void* d_mask) {
  std::memset(d_mask, 0, static_cast<size_t>(p.mask->elements * SizeOf(p.mask->dtype)));
}

}  // namespace attendant::core
