#include "core/half.h"

#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "tests/core/fused_testing.h"

namespace attendant::core {
namespace {

// The value of half precision with so many bits of exponent and fraction, by its definition.
double ValueOf(uint16_t bits, int exponent_bits, int fraction_bits) {
  const int fraction = bits & ((1 << fraction_bits) - 1);
  const int exponent = bits >> fraction_bits & ((1 << exponent_bits) - 1);
  const double sign = (bits & 0x8000) != 0 ? -1 : 1;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  if (exponent == (1 << exponent_bits) - 1) {
    return fraction == 0 ? sign * std::numeric_limits<double>::infinity()
                         : std::numeric_limits<double>::quiet_NaN();
  }
  const int significand = exponent == 0 ? fraction : fraction | 1 << fraction_bits;
  return sign * std::ldexp(significand, std::max(exponent, 1) - bias - fraction_bits);
}

double ValueOf(Float16 half) { return ValueOf(half.bits, 5, 10); }
double ValueOf(BFloat16 half) { return ValueOf(half.bits, 8, 7); }

template <typename Param>
class HalfTest : public TargetTest<Param> {};
TYPED_TEST_SUITE(HalfTest, FloatTargets, NameOnTarget);

template <typename Half>
std::vector<Half> EveryHalf() {
  std::vector<Half> all;
  for (int bits = 0; bits <= 0xffff; ++bits) all.push_back({static_cast<uint16_t>(bits)});
  return all;
}

template <typename Half>
void ExpectEveryHalfWidens() {
  const std::vector<Half> all = EveryHalf<Half>();
  std::vector<float> wide(all.size());
  Widen(all.data(), static_cast<int64_t>(all.size()), wide.data());
  for (size_t i = 0; i < all.size(); ++i) {
    const double value = ValueOf(all[i]);
    if (std::isnan(value)) {
      ASSERT_TRUE(std::isnan(wide[i])) << i;
    } else {
      ASSERT_EQ(static_cast<double>(wide[i]), value) << i;
      ASSERT_EQ(std::signbit(wide[i]), (i & 0x8000) != 0) << i;
    }
  }
}

TYPED_TEST(HalfTest, EveryNumberWidensToItself) {
  ExpectEveryHalfWidens<Float16>();
  ExpectEveryHalfWidens<BFloat16>();
}

// Every number of half precision, what lies halfway to the next one, and what lies beside that.
template <typename Half>
void ExpectNearest(double beyond_the_largest) {
  std::vector<float> inputs;
  std::vector<uint16_t> expected;
  const auto add = [&](double value, int bits) {
    for (const bool negative : {false, true}) {
      inputs.push_back(static_cast<float>(negative ? -value : value));
      expected.push_back(static_cast<uint16_t>(bits | (negative ? 0x8000 : 0)));
    }
  };
  for (int bits = 0; std::isfinite(ValueOf(Half{static_cast<uint16_t>(bits)})); ++bits) {
    const double value = ValueOf(Half{static_cast<uint16_t>(bits)});
    const double next = ValueOf(Half{static_cast<uint16_t>(bits + 1)});
    const double tie = (value + (std::isfinite(next) ? next : beyond_the_largest)) / 2;
    add(value, bits);
    add(tie, bits % 2 == 0 ? bits : bits + 1);
    add(std::nextafter(static_cast<float>(tie), 0.0f), bits);
    add(std::nextafter(static_cast<float>(tie), std::numeric_limits<float>::infinity()), bits + 1);
  }
  add(std::numeric_limits<double>::infinity(), expected.back() & 0x7fff);
  std::vector<Half> narrow(inputs.size());
  Narrow(inputs.data(), static_cast<int64_t>(inputs.size()), narrow.data());
  for (size_t i = 0; i < inputs.size(); ++i) {
    ASSERT_EQ(narrow[i].bits, expected[i]) << "of " << std::bit_cast<uint32_t>(inputs[i]);
  }
}

TYPED_TEST(HalfTest, NarrowsToTheNearestAndTiesToEven) {
  ExpectNearest<Float16>(0x1p16);
  ExpectNearest<BFloat16>(0x1p128);
}

TYPED_TEST(HalfTest, NaNStaysNaNWhateverItsPayload) {
  for (const uint32_t bits : {0x7fc00000u, 0x7f800001u, 0xffffffffu, 0x7fffffffu, 0xff800001u}) {
    const std::vector<float> nans(9, std::bit_cast<float>(bits));
    Float16 half[9];
    BFloat16 brain[9];
    Narrow(nans.data(), 9, half);
    Narrow(nans.data(), 9, brain);
    EXPECT_TRUE(std::isnan(ValueOf(half[0])) && std::isnan(ValueOf(half[8])));
    EXPECT_TRUE(std::isnan(ValueOf(brain[0])) && std::isnan(ValueOf(brain[8])));
  }
}

}  // namespace
}  // namespace attendant::core
