// 2^x on SIMD lanes. Included inside a Highway target, compiled once for each.
//
//   n = rint(x), r = x - n in [-1/2, 1/2] (exact), 2^x = 2^n p(r)
//
// p has p(0) = 1. For float it has degree 5 and is the best in relative error, 1.7e-7 with its
// rounding; for double degree 11, interpolating 2^r at Chebyshev nodes, 1e-17 before rounding.
// 2^n is made of bits. On a CPU with FMA every step is exact or rounded once, so the bits do not
// depend on the width of the vectors.

// Per-target include guard.
#if defined(ATTENDANT_CORE_EXP2_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ATTENDANT_CORE_EXP2_INL_H_
#undef ATTENDANT_CORE_EXP2_INL_H_
#else
#define ATTENDANT_CORE_EXP2_INL_H_
#endif

#include <hwy/highway.h>

#include <limits>
#include <numbers>

HWY_BEFORE_NAMESPACE();
namespace attendant::core::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// What differs between the two types.
template <typename T>
struct Exp2Constants;

template <>
struct Exp2Constants<float> {
  // Adding it leaves rint(x) in the low bits: 1.5 * 2^23.
  static constexpr float kMagic = 12582912.0f;
  static constexpr int kMantissaBits = 23;
  // Below it 2^x is 0 here: 2^-126 is the least normal number, and n = -126 needs p >= 1.
  static constexpr float kZeroBelow = -125.0f;

  template <class D, class V = hn::Vec<D>>
  static HWY_INLINE V Poly(D d, V r) {
    return hn::MulAdd(Slope(d, r), r, hn::Set(d, 1.0f));
  }
  // p(r) - 1, as exact where it is small.
  template <class D, class V = hn::Vec<D>>
  static HWY_INLINE V PolyMinusOne(D d, V r) {
    return hn::Mul(Slope(d, r), r);
  }

 private:
  // (p(r) - 1) / r.
  template <class D, class V = hn::Vec<D>>
  static HWY_INLINE V Slope(D d, V r) {
    auto p = hn::Set(d, 0.001326472712f);
    p = hn::MulAdd(p, r, hn::Set(d, 0.009671512645f));
    p = hn::MulAdd(p, r, hn::Set(d, 0.05550733743f));
    p = hn::MulAdd(p, r, hn::Set(d, 0.2402224209f));
    return hn::MulAdd(p, r, hn::Set(d, 0.6931469776f));
  }
};

template <>
struct Exp2Constants<double> {
  static constexpr double kMagic = 6755399441055744.0;  // 1.5 * 2^52
  static constexpr int kMantissaBits = 52;
  static constexpr double kZeroBelow = -1021.0;

  // Even and odd powers apart: half as long a chain for one more product.
  template <class D, class V = hn::Vec<D>>
  static HWY_INLINE V Poly(D d, V r) {
    const V r2 = hn::Mul(r, r);
    const V even = hn::MulAdd(Even(d, r2), r2, hn::Set(d, 1.0));
    return hn::MulAdd(Odd(d, r2), r, even);
  }
  // p(r) - 1, as exact where it is small.
  template <class D, class V = hn::Vec<D>>
  static HWY_INLINE V PolyMinusOne(D d, V r) {
    const V r2 = hn::Mul(r, r);
    return hn::MulAdd(Odd(d, r2), r, hn::Mul(Even(d, r2), r2));
  }

 private:
  // The odd powers' part of p, over r; and the even powers' without the constant, over r^2.
  template <class D, class V = hn::Vec<D>>
  static HWY_INLINE V Odd(D d, V r2) {
    auto odd = hn::Set(d, 4.4549605981865183938e-10);
    odd = hn::MulAdd(odd, r2, hn::Set(d, 1.0178062445845773521e-7));
    odd = hn::MulAdd(odd, r2, hn::Set(d, 0.000015252733829836118394));
    odd = hn::MulAdd(odd, r2, hn::Set(d, 0.001333355814641693531));
    odd = hn::MulAdd(odd, r2, hn::Set(d, 0.055504108664821594339));
    return hn::MulAdd(odd, r2, hn::Set(d, 0.69314718055994530942));
  }
  template <class D, class V = hn::Vec<D>>
  static HWY_INLINE V Even(D d, V r2) {
    auto even = hn::Set(d, 7.0725859492692236999e-9);
    even = hn::MulAdd(even, r2, hn::Set(d, 1.3215442587921689653e-6));
    even = hn::MulAdd(even, r2, hn::Set(d, 0.00015403530441736050155));
    even = hn::MulAdd(even, r2, hn::Set(d, 0.0096181291076068885273));
    return hn::MulAdd(even, r2, hn::Set(d, 0.2402265069591009822));
  }
};

// 2^e of whole numbers e for which that is a normal number; otherwise anything.
template <class D, class V = hn::Vec<D>, typename T = hn::TFromD<D>>
HWY_INLINE V NormalPowerOfTwo(D d, V e) {
  using Constants = Exp2Constants<T>;
  constexpr int kBias = std::numeric_limits<T>::max_exponent - 1;
  const hn::RebindToSigned<D> di;
  const auto field = hn::BitCast(di, hn::Add(e, hn::Set(d, Constants::kMagic + kBias)));
  return hn::BitCast(d, hn::ShiftLeft<Constants::kMantissaBits>(field));
}

// 2^(x - reference), reference a whole number and x - reference <= 32; exactly 0 where rint(x) -
// reference < kZeroBelow, -infinity included; NaN where x is NaN or +infinity. 2^n is multiplied
// in: as exact as an addition to the exponent's bits, and a NaN stays one whatever of its payload
// the shift leaves.
template <class D, class V = hn::Vec<D>, typename T = hn::TFromD<D>>
HWY_INLINE V Exp2(D d, V x, V reference) {
  using Constants = Exp2Constants<T>;
  const V n = hn::Round(x);
  const V e = hn::Sub(n, reference);
  const V y = hn::Mul(Constants::Poly(d, hn::Sub(x, n)), NormalPowerOfTwo(d, e));
  return hn::IfThenZeroElse(hn::Lt(e, hn::Set(d, Constants::kZeroBelow)), y);
}

// tanh x = (e^2x - 1) / (e^2x + 1), by |x|: with 2^n p(r) - 1 = 2^n (p(r) - 1) + (2^n - 1) it is as
// exact near 0 as elsewhere. NaN where x is NaN.
template <class D, class V = hn::Vec<D>, typename T = hn::TFromD<D>>
HWY_INLINE V Tanh(D d, V x) {
  using Constants = Exp2Constants<T>;
  // From here on tanh is 1 to the last bit. Min returns its second operand on NaN.
  const V most = hn::Set(d, T{sizeof(T) == 4 ? 32 : 64});
  const V two_log2e = hn::Set(d, T(2 * std::numbers::log2e));
  const V u = hn::Min(most, hn::Mul(hn::Abs(x), two_log2e));
  const V n = hn::Round(u);
  const V power = NormalPowerOfTwo(d, n);
  const V less = hn::MulAdd(power, Constants::PolyMinusOne(d, hn::Sub(u, n)),
                            hn::Sub(power, hn::Set(d, T{1})));
  return hn::CopySign(hn::Div(less, hn::Add(less, hn::Set(d, T{2}))), x);
}

}  // namespace attendant::core::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
