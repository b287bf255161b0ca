// Half precision to and from float on SIMD lanes. Included inside a Highway target, compiled once
// for each.

// Per-target include guard.
#if defined(ATTENDANT_CORE_HALF_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ATTENDANT_CORE_HALF_INL_H_
#undef ATTENDANT_CORE_HALF_INL_H_
#else
#define ATTENDANT_CORE_HALF_INL_H_
#endif

#include <hwy/highway.h>

#include <cstdint>

#include "core/tensor_view.h"

HWY_BEFORE_NAMESPACE();
namespace attendant::core::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// A vector of T from where it is stored: as it is, or as half precision.
template <class D, typename T = hn::TFromD<D>>
HWY_INLINE hn::Vec<D> LoadWide(D d, const T* from) {
  return hn::LoadU(d, from);
}

template <class D>
HWY_INLINE hn::Vec<D> LoadWide(D d, const BFloat16* from) {
  const hn::Rebind<uint16_t, D> du16;
  const hn::RebindToUnsigned<D> du32;
  const auto bits = hn::LoadU(du16, reinterpret_cast<const uint16_t*>(from));
  return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(du32, bits)));
}

template <class D>
HWY_INLINE hn::Vec<D> LoadWide(D d, const Float16* from) {
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3
  const hn::Rebind<hwy::float16_t, D> df16;
  return hn::PromoteTo(d, hn::LoadU(df16, reinterpret_cast<const hwy::float16_t*>(from)));
#else
  // The exponent's bias is multiplied in, which makes numbers of subnormals. What has the largest
  // exponent keeps it.
  const hn::Rebind<uint16_t, D> du16;
  const hn::RebindToUnsigned<D> du32;
  const auto bits = hn::PromoteTo(du32, hn::LoadU(du16, reinterpret_cast<const uint16_t*>(from)));
  const auto magnitude = hn::And(bits, hn::Set(du32, 0x7fff));
  const auto number = hn::BitCast(
      du32, hn::Mul(hn::BitCast(d, hn::ShiftLeft<13>(magnitude)), hn::Set(d, 0x1p112f)));
  const hn::RebindToSigned<D> di32;
  const auto special = hn::BitCast(
      du32, hn::VecFromMask(di32, hn::Gt(hn::BitCast(di32, magnitude), hn::Set(di32, 0x7bff))));
  const auto sign = hn::ShiftLeft<16>(hn::And(bits, hn::Set(du32, 0x8000)));
  return hn::BitCast(d, hn::Or(hn::Or(number, sign), hn::And(special, hn::Set(du32, 0x7f800000u))));
#endif
}

// One element.
template <typename S>
HWY_INLINE Wide<S> Widened(S element) {
  return hn::GetLane(LoadWide(hn::CappedTag<Wide<S>, 1>(), &element));
}

// Whole numbers below 2^16, one a lane.
template <class D>
HWY_INLINE void StoreLowerHalves(D /*du32*/, hn::Vec<D> v, uint16_t* to) {
  const hn::Rebind<uint16_t, D> du16;
  hn::StoreU(hn::DemoteTo(du16, hn::BitCast(hn::RebindToSigned<D>(), v)), du16, to);
}

// The reverse of LoadWide, rounded to nearest, ties to even; NaN becomes a quiet one.
template <class D, typename T = hn::TFromD<D>>
HWY_INLINE void StoreNarrow(D d, hn::Vec<D> v, T* to) {
  hn::StoreU(v, d, to);
}

template <class D>
HWY_INLINE void StoreNarrow(D /*d*/, hn::Vec<D> v, BFloat16* to) {
  const hn::RebindToUnsigned<D> du32;
  const auto bits = hn::BitCast(du32, v);
  const auto upper = hn::ShiftRight<16>(bits);
  const auto odd = hn::And(upper, hn::Set(du32, 1));
  const auto rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, hn::Set(du32, 0x7fff))));
  const auto number = hn::RebindMask(du32, hn::Eq(v, v));
  StoreLowerHalves(du32, hn::IfThenElse(number, rounded, hn::Or(upper, hn::Set(du32, 0x40))),
                   reinterpret_cast<uint16_t*>(to));
}

template <class D>
HWY_INLINE void StoreNarrow(D d, hn::Vec<D> v, Float16* to) {
  const hn::RebindToUnsigned<D> du32;
  const hn::RebindToSigned<D> di32;
  const auto bits = hn::BitCast(du32, v);
  const auto magnitude = hn::And(bits, hn::Set(du32, 0x7fffffffu));
  const auto at_least = [&](uint32_t bound) HWY_ATTR {
    return hn::RebindMask(
        du32, hn::Gt(hn::BitCast(di32, magnitude), hn::Set(di32, static_cast<int32_t>(bound - 1))));
  };
  // A normal number: half a unit less a tie is added, and the bias changed.
  const auto odd = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(du32, 1));
  auto half = hn::ShiftRight<13>(
      hn::Sub(hn::Add(magnitude, hn::Add(odd, hn::Set(du32, 0xfff))), hn::Set(du32, 0x38000000)));
  // A subnormal one: beside 1/2 the addition rounds to a multiple of 2^-24.
  const auto sum = hn::BitCast(du32, hn::Add(hn::BitCast(d, magnitude), hn::Set(d, 0.5f)));
  half = hn::IfThenElse(at_least(0x38800000), half, hn::Sub(sum, hn::Set(du32, 0x3f000000)));
  half = hn::IfThenElse(at_least(0x477ff000), hn::Set(du32, 0x7c00), half);
  half = hn::IfThenElse(at_least(0x7f800001), hn::Set(du32, 0x7e00), half);
  const auto sign = hn::And(hn::ShiftRight<16>(bits), hn::Set(du32, 0x8000));
  StoreLowerHalves(du32, hn::Or(half, sign), reinterpret_cast<uint16_t*>(to));
}

}  // namespace attendant::core::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
