#include "core/value_product.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "core/gemm.h"

namespace attendant::core {
namespace {

constexpr int64_t kQueries = 20;
constexpr int64_t kKeys = 24;
constexpr int64_t kWidth = 7;
constexpr int64_t kStride = kWidth + 2;

template <typename T>
class ValueProductTest : public testing::Test {
 protected:
  ValueProductTest() {
    PrepareThreadForGemm();
    problem_.batch = problem_.heads = problem_.kv_heads = 1;
    problem_.queries = kQueries;
    problem_.keys = kKeys;
    problem_.value_width = kWidth;
    problem_.causal = Causal::kTopLeft;
    value_.resize(kKeys * kStride);
    for (size_t i = 0; i < value_.size(); ++i) value_[i] = static_cast<T>(i % 13) - 6;
    output_.assign(kQueries * kStride, kBefore);
  }

  static constexpr T kBefore = T{100};

  bool Sees(int64_t query, int64_t key) const {
    return problem_.causal == Causal::kNone || key <= query;
  }

  static T Weight(int64_t query, int64_t key) {
    return static_cast<T>(1 + (query * 3 + key * 5) % 4);
  }

  T& ValueAt(int64_t key, int64_t column) { return value_[key * kStride + column]; }
  void FillValue(int64_t key, T value) {
    for (int64_t column = 0; column < kWidth; ++column) ValueAt(key, column) = value;
  }

  // Queries first .. first + rows - 1 against `keys`.
  void Multiply(int64_t first, int64_t rows, KeyRange keys, bool accumulate) {
    std::vector<T> weights(rows * keys.size());
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t key = keys.begin; key < keys.end; ++key) {
        weights[i * keys.size() + key - keys.begin] =
            Sees(first + i, key) ? Weight(first + i, key) : T{0};
      }
    }
    const absl::Status status = ValueProduct<T>(
        problem_, {0, first, keys}, {weights.data(), rows, keys.size(), keys.size()},
        {value_.data() + keys.begin * kStride, keys.size(), kWidth, kStride},
        {output_.data() + first * kStride, rows, kWidth, kStride}, accumulate, workspace_);
    ASSERT_TRUE(status.ok()) << status;
  }

  // The sum over the keys that the query sees.
  T Expected(int64_t query, KeyRange keys, int64_t column, bool accumulate) {
    T sum = accumulate ? kBefore : T{0};
    for (int64_t key = keys.begin; key < keys.end; ++key) {
      if (Sees(query, key)) sum += Weight(query, key) * ValueAt(key, column);
    }
    return sum;
  }

  void ExpectProduct(int64_t first, int64_t rows, KeyRange keys, bool accumulate) {
    SCOPED_TRACE(testing::Message()
                 << "queries " << first << " + " << rows << ", keys " << keys.begin << " .. "
                 << keys.end << (accumulate ? " accumulated" : ""));
    output_.assign(output_.size(), kBefore);
    Multiply(first, rows, keys, accumulate);
    for (int64_t query = 0; query < kQueries; ++query) {
      for (int64_t column = 0; column < kStride; ++column) {
        const bool written = first <= query && query < first + rows && column < kWidth;
        const T expected = written ? Expected(query, keys, column, accumulate) : kBefore;
        const T actual = output_[query * kStride + column];
        if (std::isnan(expected)) {
          ASSERT_TRUE(std::isnan(actual)) << query << ", " << column << ": " << actual;
        } else {
          ASSERT_EQ(actual, expected) << query << ", " << column;
        }
      }
    }
  }

  void ExpectProductsOfAllRanges() {
    for (const int64_t first : {0, 1, 7, 16}) {
      for (const int64_t rows : {1, 4}) {
        for (const KeyRange keys : {KeyRange{0, 1}, KeyRange{0, 8}, KeyRange{0, kKeys},
                                    KeyRange{3, 9}, KeyRange{8, 20}}) {
          for (const bool accumulate : {false, true}) {
            this->ExpectProduct(first, rows, keys, accumulate);
          }
        }
      }
    }
  }

  Problem problem_;
  Workspace workspace_;
  std::vector<T> value_;
  std::vector<T> output_;
};

using Types = testing::Types<float, double>;
TYPED_TEST_SUITE(ValueProductTest, Types);

template <typename T>
std::vector<T> NotFinite() {
  return {std::numeric_limits<T>::quiet_NaN(), std::numeric_limits<T>::infinity(),
          -std::numeric_limits<T>::infinity()};
}

TYPED_TEST(ValueProductTest, SumsOverTheVisibleKeys) { this->ExpectProductsOfAllRanges(); }

TYPED_TEST(ValueProductTest, SumsOverAllKeysWithoutAMask) {
  this->problem_.causal = Causal::kNone;
  this->ExpectProductsOfAllRanges();
}

TYPED_TEST(ValueProductTest, WhatIsHiddenDoesNotTakePart) {
  // Queries 4 .. 7 see keys 0 .. 7 at most.
  for (const TypeParam hidden : NotFinite<TypeParam>()) {
    this->FillValue(8, hidden);
    this->FillValue(11, hidden);
    for (const bool accumulate : {false, true}) {
      this->ExpectProduct(4, 4, {0, 12}, accumulate);
      this->ExpectProduct(4, 4, {6, 12}, accumulate);
    }
  }
}

TYPED_TEST(ValueProductTest, WhatIsHiddenDoesNotTakePartWhereNothingElseIsThere) {
  for (const TypeParam hidden : NotFinite<TypeParam>()) {
    this->FillValue(9, hidden);
    for (const bool accumulate : {false, true}) this->ExpectProduct(4, 4, {8, 12}, accumulate);
  }
}

TYPED_TEST(ValueProductTest, WhatIsNotFiniteReachesThoseWhoSeeIt) {
  for (const TypeParam value : NotFinite<TypeParam>()) {
    this->FillValue(5, value);
    for (const bool accumulate : {false, true}) {
      this->ExpectProduct(4, 4, {0, 12}, accumulate);   // some of the rows
      this->ExpectProduct(8, 4, {0, 8}, accumulate);    // all of them, no key hidden
      this->ExpectProduct(0, 12, {0, 12}, accumulate);  // rows without it as well
    }
  }
}

TYPED_TEST(ValueProductTest, OneElementThatIsNotFiniteSpoilsItsColumnOnly) {
  this->ValueAt(5, 3) = std::numeric_limits<TypeParam>::quiet_NaN();
  this->ExpectProduct(0, 12, {0, 12}, /*accumulate=*/false);
  ASSERT_TRUE(std::isnan(this->output_[6 * kStride + 3]));
  EXPECT_FALSE(std::isnan(this->output_[6 * kStride + 2]));
}

TYPED_TEST(ValueProductTest, NoKeysMakeZero) {
  this->ExpectProduct(4, 4, {0, 0}, /*accumulate=*/false);
  this->ExpectProduct(4, 4, {0, 0}, /*accumulate=*/true);
}

TYPED_TEST(ValueProductTest, NoQueriesDoNothing) {
  this->ExpectProduct(4, 0, {0, 8}, /*accumulate=*/false);
}

}  // namespace
}  // namespace attendant::core
