#include "core/softmax.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numbers>
#include <type_traits>
#include <vector>

namespace attendant::core {
namespace {

constexpr int64_t kLongest = 70;  // several vectors of the widest kind, and every tail
constexpr int64_t kOffsets[] = {0, 1, 2, 3, 5, 7};

template <typename T>
using Bits = std::conditional_t<std::is_same_v<T, float>, uint32_t, uint64_t>;
template <typename T>
using Limits = std::numeric_limits<T>;

// n elements at some offset, between others that nobody may read or write.
template <typename T>
class Row {
 public:
  Row(int64_t n, int64_t offset, T guard, int seed = 0)
      : n_(n), first_(kGuard + offset), guard_(guard), elements_(first_ + n + kGuard, guard) {
    for (int64_t i = 0; i < n; ++i) {
      data()[i] = static_cast<T>((i * 37 + seed * 11) % 101 - 50) / T{7};
    }
  }
  T* data() { return elements_.data() + first_; }
  const T* data() const { return elements_.data() + first_; }
  T& operator[](int64_t i) { return data()[i]; }
  const T& operator[](int64_t i) const { return data()[i]; }

  bool GuardsAreUntouched() const {
    for (int64_t i = 0; i < static_cast<int64_t>(elements_.size()); ++i) {
      const bool inside = first_ <= i && i < first_ + n_;
      if (!inside && std::bit_cast<Bits<T>>(elements_[i]) != std::bit_cast<Bits<T>>(guard_)) {
        return false;
      }
    }
    return true;
  }

 private:
  static constexpr int64_t kGuard = 16;
  int64_t n_;
  int64_t first_;
  T guard_;
  std::vector<T> elements_;
};

// NaNs of many kinds: quiet and signalling, of both signs, with low and high payloads.
template <typename T>
std::vector<T> NotNumbers() {
  if constexpr (std::is_same_v<T, float>) {
    std::vector<float> nans;
    for (const uint32_t bits : {0x7fc00000u, 0x7fc00001u, 0x7f800001u, 0x7fa00000u, 0x7fffffffu,
                                0xffc00000u, 0xffc00001u, 0xff800001u, 0xffffffffu}) {
      nans.push_back(std::bit_cast<float>(bits));
    }
    return nans;
  } else {
    std::vector<double> nans;
    for (const uint64_t bits : {0x7ff8000000000000u, 0x7ff8000000000001u, 0x7ff0000000000001u,
                                0x7ff4000000000000u, 0x7fffffffffffffffu, 0xfff8000000000000u,
                                0xfff8000000000001u, 0xfff0000000000001u, 0xffffffffffffffffu}) {
      nans.push_back(std::bit_cast<double>(bits));
    }
    return nans;
  }
}

template <typename T>
constexpr double kExp2Error = std::is_same_v<T, float> ? 3e-7 : 5e-16;

template <typename T>
class SoftmaxTest : public testing::Test {
 protected:
  // Calls check(n, offset) for each length, at aligned and other starts.
  template <typename Check>
  static void ForEachRow(const Check& check) {
    for (int64_t n = 0; n <= kLongest; ++n) {
      for (const int64_t offset : kOffsets) {
        SCOPED_TRACE(testing::Message() << n << " elements at offset " << offset);
        check(n, offset);
        if (testing::Test::HasFatalFailure()) return;
      }
    }
  }
};

using Types = testing::Types<float, double>;
TYPED_TEST_SUITE(SoftmaxTest, Types);

TYPED_TEST(SoftmaxTest, TheDominantScoreHasTheLargestProduct) {
  using T = TypeParam;
  for (const T scale : {T{1}, T(0.37), T(-2.5), T{0}}) {
    // A guard that would dominate, were it read.
    const T guard = scale < 0 ? T(-1e30) : T(1e30);
    this->ForEachRow([&](int64_t n, int64_t offset) {
      const Row<T> row(n, offset, guard, static_cast<int>(n));
      T expected = NoScore(scale);
      for (int64_t i = 0; i < n; ++i) expected = StrongerScore(expected, row[i], scale);
      EXPECT_EQ(DominantScore(row.data(), n, scale), expected);
    });
  }
}

TYPED_TEST(SoftmaxTest, TheDominantScoreIsFoundAnywhere) {
  using T = TypeParam;
  for (int64_t n = 1; n <= kLongest; ++n) {
    for (int64_t i = 0; i < n; ++i) {
      Row<T> row(n, 0, T(1e30));
      row[i] = T{1000};
      EXPECT_EQ(DominantScore(row.data(), n, T{2}), T{1000}) << i << " of " << n;
      row[i] = T{-1000};
      EXPECT_EQ(DominantScore(row.data(), n, T{-2}), T{-1000}) << i << " of " << n;
    }
  }
}

TYPED_TEST(SoftmaxTest, TheDominantScorePassesOverNaN) {
  using T = TypeParam;
  for (const T scale : {T{2}, T{-2}}) {
    for (const T nan : NotNumbers<T>()) {
      for (const int64_t n : {1, 2, 5, 16, 19, 37}) {
        for (int64_t i = 0; i < n; ++i) {
          std::vector<T> row(n, T{-3});
          row[i] = nan;
          EXPECT_EQ(DominantScore(row.data(), n, scale), n == 1 ? NoScore(scale) : T{-3});
        }
        const std::vector<T> all(n, nan);
        EXPECT_EQ(DominantScore(all.data(), n, scale), NoScore(scale));
      }
    }
  }
}

TYPED_TEST(SoftmaxTest, TheDominantScoreKnowsInfinities) {
  using T = TypeParam;
  std::vector<T> row(19, -Limits<T>::infinity());
  EXPECT_EQ(DominantScore(row.data(), 19, T{1}), NoScore(T{1}));
  EXPECT_EQ(DominantScore(row.data(), 19, T{-1}), -Limits<T>::infinity());
  row[4] = T{-5};
  EXPECT_EQ(DominantScore(row.data(), 19, T{1}), T{-5});
  row[18] = Limits<T>::infinity();
  EXPECT_EQ(DominantScore(row.data(), 19, T{1}), Limits<T>::infinity());
}

TYPED_TEST(SoftmaxTest, Exp2OfDifferenceIsTheExponentialAndReturnsTheSum) {
  using T = TypeParam;
  for (const T scale : {T(1.4426950408889634), T(-0.8), T{0}}) {
    for (const T reference : {T{0}, T(8), T(-8)}) {
      this->ForEachRow([&](int64_t n, int64_t offset) {
        Row<T> row(n, offset, Limits<T>::quiet_NaN(), 3);
        const Row<T> before = row;
        const T sum = Exp2OfDifference(row.data(), n, scale, reference);
        long double expected_sum = 0;
        for (int64_t i = 0; i < n; ++i) {
          const long double exponent =
              static_cast<long double>(scale) * (static_cast<long double>(before[i]) - reference);
          const long double expected = std::exp2(exponent);
          // The difference and the product are rounded once each.
          const long double argument_error = Limits<T>::epsilon() * std::abs(exponent);
          ASSERT_NEAR(row[i], expected, expected * (kExp2Error<T> + argument_error)) << i;
          expected_sum += row[i];
        }
        EXPECT_NEAR(sum, expected_sum, expected_sum * n * Limits<T>::epsilon());
        EXPECT_TRUE(row.GuardsAreUntouched());
      });
    }
  }
}

TYPED_TEST(SoftmaxTest, Exp2OfDifferenceKeepsNaNInPlaceAndInTheSum) {
  using T = TypeParam;
  for (const T nan : NotNumbers<T>()) {
    for (const int64_t n : {1, 2, 5, 16, 19, 37}) {
      for (int64_t i = 0; i < n; ++i) {
        std::vector<T> row(n, T{3});
        row[i] = nan;
        EXPECT_TRUE(std::isnan(Exp2OfDifference(row.data(), n, T{1}, T{1})));
        for (int64_t j = 0; j < n; ++j) {
          if (j == i) {
            EXPECT_TRUE(std::isnan(row[j])) << row[j] << " at " << j << " of " << n;
          } else {
            EXPECT_EQ(row[j], T{4}) << j << " of " << n;
          }
        }
      }
    }
  }
}

TYPED_TEST(SoftmaxTest, Exp2OfDifferenceOfMinusInfinityIsExactlyZero) {
  using T = TypeParam;
  for (const T low : {-Limits<T>::infinity(), T(-1e30), -Limits<T>::max(), T(-1e4)}) {
    for (const int64_t n : {1, 7, 16, 37}) {
      std::vector<T> row(n, low);
      EXPECT_EQ(Exp2OfDifference(row.data(), n, T{1}, T{0}), T{0}) << low;
      for (const T element : row) {
        EXPECT_EQ(std::bit_cast<Bits<T>>(element), Bits<T>{0}) << low << " gave " << element;
      }
    }
  }
}

TYPED_TEST(SoftmaxTest, Exp2OfDifferenceOfAWholeNumberIsExact) {
  using T = TypeParam;
  const int lowest = std::is_same_v<T, float> ? -124 : -1020;
  std::vector<T> row;
  for (int n = lowest; n <= 32; ++n) row.push_back(static_cast<T>(n));
  Exp2OfDifference(row.data(), static_cast<int64_t>(row.size()), T{1}, T{0});
  for (int n = lowest; n <= 32; ++n) EXPECT_EQ(row[n - lowest], std::ldexp(T{1}, n)) << n;
}

TYPED_TEST(SoftmaxTest, Exp2OfDifferenceIsZeroBelowTheCut) {
  using T = TypeParam;
  // What rounds to less than -125 or -1021.
  const T cut = std::is_same_v<T, float> ? T(-125.5) : T(-1021.5);
  for (T below : {cut, std::nextafter(cut, -Limits<T>::infinity()), cut - 1}) {
    Exp2OfDifference(&below, 1, T{1}, T{0});
    EXPECT_EQ(std::bit_cast<Bits<T>>(below), Bits<T>{0});
  }
  for (T above : {std::nextafter(cut, T{0}), cut + T(0.5)}) {
    const T expected = std::exp2(above);
    Exp2OfDifference(&above, 1, T{1}, T{0});
    EXPECT_NEAR(above, expected, (sizeof(T) == 4 ? 3e-7 : 5e-16) * expected);
  }
}

// The largest relative error over `xs`.
template <typename T>
double Exp2ErrorOver(const std::vector<T>& xs) {
  std::vector<T> row = xs;
  Exp2OfDifference(row.data(), static_cast<int64_t>(row.size()), T{1}, T{0});
  long double worst = 0;
  for (size_t i = 0; i < xs.size(); ++i) {
    const long double expected = std::exp2(static_cast<long double>(xs[i]));
    const long double error = std::abs(row[i] - expected) / expected;
    worst = error <= worst ? worst : error;  // a NaN is the worst
  }
  return static_cast<double>(worst);
}

TYPED_TEST(SoftmaxTest, Exp2OfDifferenceIsAccurateOverTheWholeRange) {
  using T = TypeParam;
  const double lowest = std::is_same_v<T, float> ? -125 : -1021;
  constexpr int kSamples = 400'000;
  std::vector<T> xs;
  for (int i = 1; i <= kSamples; ++i) {
    xs.push_back(static_cast<T>(lowest + (32 - lowest) * (i / double{kSamples})));
  }
  EXPECT_LE(Exp2ErrorOver(xs), kExp2Error<T>);
}

TYPED_TEST(SoftmaxTest, Exp2OfDifferenceIsAccurateWhereTheExponentChanges) {
  using T = TypeParam;
  const T lowest = std::is_same_v<T, float> ? T{-125} : T{-1021};
  std::vector<T> xs;
  for (T half = lowest; half <= T{32}; half += T(0.5)) {
    T below = half;
    T above = half;
    for (int step = 0; step < 4; ++step) {
      if (below > lowest) xs.push_back(below);
      if (above > lowest && above <= T{32}) xs.push_back(above);
      below = std::nextafter(below, -Limits<T>::infinity());
      above = std::nextafter(above, Limits<T>::infinity());
    }
  }
  EXPECT_LE(Exp2ErrorOver(xs), kExp2Error<T>);
}

TYPED_TEST(SoftmaxTest, ASoftmaxRowSumsToOne) {
  using T = TypeParam;
  for (const T size : {T(1e-3), T{1}, T{100}, T(1e6)}) {
    Row<T> row(kLongest, 1, Limits<T>::quiet_NaN());
    for (int64_t i = 0; i < kLongest; ++i) row[i] *= size;
    const T scale = T(std::numbers::log2e);
    const T reference = DominantScore(row.data(), kLongest, scale);
    const T sum = Exp2OfDifference(row.data(), kLongest, scale, reference);
    EXPECT_GE(sum, 1) << size;
    ScaleRow(row.data(), kLongest, 1 / sum);
    long double total = 0;
    for (int64_t i = 0; i < kLongest; ++i) total += row[i];
    EXPECT_NEAR(total, 1.0L, kLongest * Limits<T>::epsilon()) << size;
  }
}

TYPED_TEST(SoftmaxTest, TheLargestTermIsOneAtAnySize) {
  using T = TypeParam;
  for (T size = 1; size < Limits<T>::max() / 100; size *= 10) {
    for (const T score : {size, -size, T(1.7) * size, T(-3.3) * size}) {
      for (const T scale : {T(std::numbers::log2e), T(-0.1), T{1000}}) {
        T element = score;
        const T reference = DominantScore(&element, 1, scale);
        ASSERT_EQ(Exp2OfDifference(&element, 1, scale, reference), T{1}) << score;
      }
    }
  }
}

TYPED_TEST(SoftmaxTest, ScoresOfMinusInfinityAloneWeighNothing) {
  using T = TypeParam;
  std::vector<T> row(9, -Limits<T>::infinity());
  const T reference = DominantScore(row.data(), 9, T{1});
  EXPECT_EQ(Exp2OfDifference(row.data(), 9, T{1}, reference), T{0});
  EXPECT_THAT(row, testing::Each(T{0}));
}

TYPED_TEST(SoftmaxTest, ScaleRowScalesEachElement) {
  using T = TypeParam;
  this->ForEachRow([](int64_t n, int64_t offset) {
    Row<T> row(n, offset, Limits<T>::quiet_NaN());
    const Row<T> before = row;
    ScaleRow(row.data(), n, T(-0.3));
    for (int64_t i = 0; i < n; ++i) ASSERT_EQ(row[i], before[i] * T(-0.3)) << i;
    EXPECT_TRUE(row.GuardsAreUntouched());
  });
}

TYPED_TEST(SoftmaxTest, AddRowAddsEachElement) {
  using T = TypeParam;
  this->ForEachRow([](int64_t n, int64_t offset) {
    Row<T> sum(n, offset, Limits<T>::quiet_NaN(), 1);
    const Row<T> before = sum;
    const Row<T> row(n, 2 * offset + 1, Limits<T>::quiet_NaN(), 2);
    AddRow(sum.data(), row.data(), n);
    for (int64_t i = 0; i < n; ++i) ASSERT_EQ(sum[i], before[i] + row[i]) << i;
    EXPECT_TRUE(sum.GuardsAreUntouched());
  });
}

TYPED_TEST(SoftmaxTest, AllFiniteWhereEachElementIs) {
  using T = TypeParam;
  this->ForEachRow([](int64_t n, int64_t offset) {
    const Row<T> row(n, offset, Limits<T>::quiet_NaN());
    EXPECT_TRUE(AllFinite(row.data(), n));
  });
  const std::vector<T> extremes(37, Limits<T>::max());
  EXPECT_TRUE(AllFinite(extremes.data(), 37));
  const std::vector<T> tiny(37, Limits<T>::denorm_min());
  EXPECT_TRUE(AllFinite(tiny.data(), 37));
}

TYPED_TEST(SoftmaxTest, NotAllFiniteWhereOneElementIsNot) {
  using T = TypeParam;
  std::vector<T> bad = NotNumbers<T>();
  bad.push_back(Limits<T>::infinity());
  bad.push_back(-Limits<T>::infinity());
  for (const T element : bad) {
    for (const int64_t n : {1, 2, 5, 16, 19, 37}) {
      for (int64_t i = 0; i < n; ++i) {
        std::vector<T> row(n, T{3});
        row[i] = element;
        EXPECT_FALSE(AllFinite(row.data(), n)) << element << " at " << i << " of " << n;
      }
    }
  }
}

TYPED_TEST(SoftmaxTest, NaturalLogSumExpIsTheLogarithmOfTheSum) {
  using T = TypeParam;
  const auto log2e = std::numbers::log2e_v<long double>;
  for (const T scale : {T(0.25), T{-1}}) {
    for (const T reference : {T{-1000}, T(-0.25), T{0}, T{3}, T{5000}}) {
      for (const T sum : {T{1}, T(1.5), T{7}, T{1000}}) {
        const long double max = static_cast<long double>(scale) * reference / log2e;
        const long double log = std::log(static_cast<long double>(sum));
        EXPECT_NEAR(NaturalLogSumExp(reference, scale, sum), max + log,
                    2 * Limits<T>::epsilon() * (std::abs(max) + log))
            << scale << " * " << reference << ", " << sum;
      }
    }
  }
}

TYPED_TEST(SoftmaxTest, NaturalLogSumExpOfNothingIsMinusInfinity) {
  using T = TypeParam;
  for (const T scale : {T{1}, T{0}, T{-1}}) {
    EXPECT_EQ(NaturalLogSumExp(NoScore(scale), scale, T{0}), -Limits<T>::infinity());
  }
}

TYPED_TEST(SoftmaxTest, NaturalLogSumExpKeepsNaN) {
  using T = TypeParam;
  EXPECT_TRUE(std::isnan(NaturalLogSumExp(T{1}, T{1}, Limits<T>::quiet_NaN())));
}

TEST(SoftmaxFloatTest, NaturalLogSumExpKeepsWhatIsSmallBesideTheReference) {
  // ln(3) beside 1e4: rounded once, to the nearest float.
  const float reference = 14427.0f;
  const double exact = (static_cast<double>(reference) + std::log2(3.0)) * std::numbers::ln2;
  EXPECT_EQ(NaturalLogSumExp(reference, 1.0f, 3.0f), static_cast<float>(exact));
}

}  // namespace
}  // namespace attendant::core
