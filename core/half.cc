#include "core/half.h"

#include "core/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/half.cc"
#include <hwy/foreach_target.h>  // compiles the rest of this file once a target
#include <hwy/highway.h>

#include "core/half-inl.h"

HWY_BEFORE_NAMESPACE();
namespace attendant::core::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// Calls step(tag, index) for whole vectors and then single elements.
template <class Step>
HWY_INLINE void ForEach(int64_t n, const Step& step) {
  const hn::ScalableTag<float> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) step(d, i);
  for (; i < n; ++i) step(hn::CappedTag<float, 1>(), i);
}

template <typename Half>
void WidenImpl(const Half* from, int64_t n, float* to) {
  ForEach(n, [&](auto d, int64_t i) HWY_ATTR { hn::StoreU(LoadWide(d, from + i), d, to + i); });
}

template <typename Half>
void NarrowImpl(const float* from, int64_t n, Half* to) {
  ForEach(n, [&](auto d, int64_t i) HWY_ATTR { StoreNarrow(d, hn::LoadU(d, from + i), to + i); });
}

// HWY_EXPORT takes no template: float16 (H) and bfloat16 (B) by name.
void WidenH(const Float16* from, int64_t n, float* to) { WidenImpl(from, n, to); }
void WidenB(const BFloat16* from, int64_t n, float* to) { WidenImpl(from, n, to); }
void NarrowH(const float* from, int64_t n, Float16* to) { NarrowImpl(from, n, to); }
void NarrowB(const float* from, int64_t n, BFloat16* to) { NarrowImpl(from, n, to); }

}  // namespace attendant::core::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace attendant::core {

HWY_EXPORT(WidenH);
HWY_EXPORT(WidenB);
HWY_EXPORT(NarrowH);
HWY_EXPORT(NarrowB);

void Widen(const Float16* from, int64_t n, float* to) { HWY_DYNAMIC_DISPATCH(WidenH)(from, n, to); }
void Widen(const BFloat16* from, int64_t n, float* to) {
  HWY_DYNAMIC_DISPATCH(WidenB)(from, n, to);
}
void Narrow(const float* from, int64_t n, Float16* to) {
  HWY_DYNAMIC_DISPATCH(NarrowH)(from, n, to);
}
void Narrow(const float* from, int64_t n, BFloat16* to) {
  HWY_DYNAMIC_DISPATCH(NarrowB)(from, n, to);
}

}  // namespace attendant::core
#endif  // HWY_ONCE
