#include "core/softmax.h"

#include <cmath>
#include <limits>
#include <numbers>

#include "core/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/softmax.cc"
#include <hwy/foreach_target.h>  // compiles the rest of this file once a target
#include <hwy/highway.h>

#include "core/exp2-inl.h"
#include "core/half-inl.h"

HWY_BEFORE_NAMESPACE();
namespace attendant::core::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// Calls whole(index) for each whole vector, then tail(index, count) for the elements that are left.
template <typename T, class Whole, class Tail>
HWY_INLINE void ForEachVector(int64_t n, const Whole& whole, const Tail& tail) {
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(hn::ScalableTag<T>()));
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) whole(i);
  if (i < n) tail(i, static_cast<size_t>(n - i));
}

// The first `count` elements at `from`; the other lanes hold `fill`. Reads nothing beyond them.
template <class D, typename T = hn::TFromD<D>>
HWY_INLINE hn::Vec<D> LoadPart(D d, const T* from, size_t count, T fill) {
  HWY_ALIGN T lanes[HWY_MAX_BYTES / sizeof(T)];
  hn::Store(hn::Set(d, fill), d, lanes);
  for (size_t k = 0; k < count; ++k) lanes[k] = from[k];
  return hn::Load(d, lanes);
}

template <class D, typename T = hn::TFromD<D>>
HWY_INLINE void StorePart(D d, hn::Vec<D> v, T* to, size_t count) {
  HWY_ALIGN T lanes[HWY_MAX_BYTES / sizeof(T)];
  hn::Store(v, d, lanes);
  for (size_t k = 0; k < count; ++k) to[k] = lanes[k];
}

// Max and Min return their second operand where either is NaN: the running one stands there.
template <typename T>
T MaxImpl(const T* row, int64_t n) {
  const hn::ScalableTag<T> d;
  constexpr T kNone = -std::numeric_limits<T>::infinity();
  auto largest = hn::Set(d, kNone);
  ForEachVector<T>(
      n, [&](int64_t i) { largest = hn::Max(hn::LoadU(d, row + i), largest); },
      [&](int64_t i, size_t count) {
        largest = hn::Max(LoadPart(d, row + i, count, kNone), largest);
      });
  return hn::GetLane(hn::MaxOfLanes(d, largest));
}

template <typename T>
T MinImpl(const T* row, int64_t n) {
  const hn::ScalableTag<T> d;
  constexpr T kNone = std::numeric_limits<T>::infinity();
  auto smallest = hn::Set(d, kNone);
  ForEachVector<T>(
      n, [&](int64_t i) { smallest = hn::Min(hn::LoadU(d, row + i), smallest); },
      [&](int64_t i, size_t count) {
        smallest = hn::Min(LoadPart(d, row + i, count, kNone), smallest);
      });
  return hn::GetLane(hn::MinOfLanes(d, smallest));
}

template <typename T>
T Exp2OfDifferenceImpl(T* row, int64_t n, T scale, T reference) {
  const hn::ScalableTag<T> d;
  const auto factor = hn::Set(d, scale);
  const auto offset = hn::Set(d, reference);
  auto sum = hn::Zero(d);
  ForEachVector<T>(
      n,
      [&](int64_t i) {
        const auto p =
            Exp2(d, hn::Mul(hn::Sub(hn::LoadU(d, row + i), offset), factor), hn::Zero(d));
        hn::StoreU(p, d, row + i);
        sum = hn::Add(sum, p);
      },
      [&](int64_t i, size_t count) {
        const auto x = LoadPart(d, row + i, count, T{0});
        const auto p = Exp2(d, hn::Mul(hn::Sub(x, offset), factor), hn::Zero(d));
        StorePart(d, p, row + i, count);
        sum = hn::Add(sum, hn::IfThenElseZero(hn::FirstN(d, count), p));
      });
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

template <typename T>
void ScaleRowImpl(T* row, int64_t n, T factor) {
  const hn::ScalableTag<T> d;
  const auto f = hn::Set(d, factor);
  ForEachVector<T>(
      n, [&](int64_t i) { hn::StoreU(hn::Mul(hn::LoadU(d, row + i), f), d, row + i); },
      [&](int64_t i, size_t count) {
        for (size_t k = 0; k < count; ++k) row[i + k] *= factor;
      });
}

template <typename T>
void AddRowImpl(T* sum, const T* row, int64_t n) {
  const hn::ScalableTag<T> d;
  ForEachVector<T>(
      n,
      [&](int64_t i) {
        hn::StoreU(hn::Add(hn::LoadU(d, sum + i), hn::LoadU(d, row + i)), d, sum + i);
      },
      [&](int64_t i, size_t count) {
        for (size_t k = 0; k < count; ++k) sum[i + k] += row[i + k];
      });
}

template <typename S>
bool AllFiniteImpl(const S* row, int64_t n) {
  using T = Wide<S>;
  const hn::ScalableTag<T> d;
  // x - x is 0 for a finite x, and NaN for the others; NaN stays in a sum.
  auto sum = hn::Zero(d);
  T tail_sum = 0;
  ForEachVector<T>(
      n,
      [&](int64_t i) {
        const auto x = LoadWide(d, row + i);
        sum = hn::Add(sum, hn::Sub(x, x));
      },
      [&](int64_t i, size_t count) {
        for (size_t k = 0; k < count; ++k) {
          const T x = Widened(row[i + k]);
          tail_sum += x - x;
        }
      });
  return hn::GetLane(hn::SumOfLanes(d, sum)) == 0 && tail_sum == 0;
}

// HWY_EXPORT takes no template: each kernel by name, for float (F) and double (D), and AllFinite
// for float16 (H) and bfloat16 (B).
float MaxF(const float* row, int64_t n) { return MaxImpl(row, n); }
double MaxD(const double* row, int64_t n) { return MaxImpl(row, n); }
float MinF(const float* row, int64_t n) { return MinImpl(row, n); }
double MinD(const double* row, int64_t n) { return MinImpl(row, n); }
float Exp2OfDifferenceF(float* row, int64_t n, float s, float r) {
  return Exp2OfDifferenceImpl(row, n, s, r);
}
double Exp2OfDifferenceD(double* row, int64_t n, double s, double r) {
  return Exp2OfDifferenceImpl(row, n, s, r);
}
void ScaleRowF(float* row, int64_t n, float f) { ScaleRowImpl(row, n, f); }
void ScaleRowD(double* row, int64_t n, double f) { ScaleRowImpl(row, n, f); }
void AddRowF(float* sum, const float* row, int64_t n) { AddRowImpl(sum, row, n); }
void AddRowD(double* sum, const double* row, int64_t n) { AddRowImpl(sum, row, n); }
bool AllFiniteF(const float* row, int64_t n) { return AllFiniteImpl(row, n); }
bool AllFiniteD(const double* row, int64_t n) { return AllFiniteImpl(row, n); }
bool AllFiniteH(const Float16* row, int64_t n) { return AllFiniteImpl(row, n); }
bool AllFiniteB(const BFloat16* row, int64_t n) { return AllFiniteImpl(row, n); }

}  // namespace attendant::core::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace attendant::core {

HWY_EXPORT(MaxF);
HWY_EXPORT(MaxD);
HWY_EXPORT(MinF);
HWY_EXPORT(MinD);
HWY_EXPORT(Exp2OfDifferenceF);
HWY_EXPORT(Exp2OfDifferenceD);
HWY_EXPORT(ScaleRowF);
HWY_EXPORT(ScaleRowD);
HWY_EXPORT(AddRowF);
HWY_EXPORT(AddRowD);
HWY_EXPORT(AllFiniteF);
HWY_EXPORT(AllFiniteD);
HWY_EXPORT(AllFiniteH);
HWY_EXPORT(AllFiniteB);

template <>
float DominantScore(const float* row, int64_t n, float scale) {
  return scale < 0 ? HWY_DYNAMIC_DISPATCH(MinF)(row, n) : HWY_DYNAMIC_DISPATCH(MaxF)(row, n);
}
template <>
double DominantScore(const double* row, int64_t n, double scale) {
  return scale < 0 ? HWY_DYNAMIC_DISPATCH(MinD)(row, n) : HWY_DYNAMIC_DISPATCH(MaxD)(row, n);
}
template <>
float Exp2OfDifference(float* row, int64_t n, float scale, float reference) {
  if (reference == NoScore(scale)) reference = 0;
  return HWY_DYNAMIC_DISPATCH(Exp2OfDifferenceF)(row, n, scale, reference);
}
template <>
double Exp2OfDifference(double* row, int64_t n, double scale, double reference) {
  if (reference == NoScore(scale)) reference = 0;
  return HWY_DYNAMIC_DISPATCH(Exp2OfDifferenceD)(row, n, scale, reference);
}
template <>
void ScaleRow(float* row, int64_t n, float factor) {
  HWY_DYNAMIC_DISPATCH(ScaleRowF)(row, n, factor);
}
template <>
void ScaleRow(double* row, int64_t n, double factor) {
  HWY_DYNAMIC_DISPATCH(ScaleRowD)(row, n, factor);
}
template <>
void AddRow(float* sum, const float* row, int64_t n) {
  HWY_DYNAMIC_DISPATCH(AddRowF)(sum, row, n);
}
template <>
void AddRow(double* sum, const double* row, int64_t n) {
  HWY_DYNAMIC_DISPATCH(AddRowD)(sum, row, n);
}
template <>
bool AllFinite(const float* row, int64_t n) {
  return HWY_DYNAMIC_DISPATCH(AllFiniteF)(row, n);
}
template <>
bool AllFinite(const double* row, int64_t n) {
  return HWY_DYNAMIC_DISPATCH(AllFiniteD)(row, n);
}
template <>
bool AllFinite(const Float16* row, int64_t n) {
  return HWY_DYNAMIC_DISPATCH(AllFiniteH)(row, n);
}
template <>
bool AllFinite(const BFloat16* row, int64_t n) {
  return HWY_DYNAMIC_DISPATCH(AllFiniteB)(row, n);
}

template <typename T>
T NaturalLogSumExp(T reference, T scale, T sum, T shift) {
  if (sum == 0) return -std::numeric_limits<T>::infinity();
  // In double: a float sum of the two would lose what is small beside the reference. The scale is
  // taken back to base e first, which keeps the largest scores from overflowing.
  const double base_e = static_cast<double>(scale) * std::numbers::ln2;
  return static_cast<T>(static_cast<double>(reference) * base_e +
                        std::log(static_cast<double>(sum)) + static_cast<double>(shift));
}

template float NaturalLogSumExp(float, float, float, float);
template double NaturalLogSumExp(double, double, double, double);

}  // namespace attendant::core
#endif  // HWY_ONCE
