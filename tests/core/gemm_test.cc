#include "core/gemm.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <thread>
#include <utility>
#include <vector>

namespace attendant::core {
namespace {

constexpr int kGap = 3;  // elements between a row's end and the next row

// A matrix of small whole numbers, so that every product is exact, with a gap after each row.
template <typename T>
class Matrix {
 public:
  static constexpr T kUntouched = T{-777};

  Matrix(int64_t rows, int64_t columns, int seed, int64_t gap = kGap)
      : rows_(rows), columns_(columns), stride_(columns + gap) {
    elements_.assign(rows * stride_ + 1, kUntouched);
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t column = 0; column < columns; ++column) {
        At(row, column) = static_cast<T>((row * 7 + column * 5 + seed * 3) % 11 - 5);
      }
    }
  }

  T& At(int64_t row, int64_t column) { return elements_[row * stride_ + column]; }
  const T& At(int64_t row, int64_t column) const { return elements_[row * stride_ + column]; }
  int64_t rows() const { return rows_; }
  int64_t columns() const { return columns_; }
  MatrixView<T> View() { return {elements_.data(), rows_, columns_, stride_}; }
  MatrixView<const T> View() const { return {elements_.data(), rows_, columns_, stride_}; }

  // True where nothing was written between the rows and beyond them.
  bool GapsAreUntouched() const {
    for (int64_t row = 0; row < rows_; ++row) {
      for (int64_t i = columns_; i < stride_; ++i) {
        if (elements_[row * stride_ + i] != kUntouched) return false;
      }
    }
    return elements_.back() == kUntouched;
  }

 private:
  int64_t rows_;
  int64_t columns_;
  int64_t stride_;
  std::vector<T> elements_;
};

template <typename T>
class GemmTest : public testing::Test {
 protected:
  GemmTest() { PrepareThreadForGemm(); }

  // Multiplies and compares with the definition.
  static void ExpectProduct(int64_t m, int64_t n, int64_t k, Transpose transpose, bool accumulate,
                            int64_t gap) {
    SCOPED_TRACE(testing::Message() << m << " x " << n << " x " << k
                                    << (transpose == Transpose::kYes ? " transposed" : "")
                                    << (accumulate ? " accumulated" : "") << " gap " << gap);
    const Matrix<T> a(m, k, 1, gap);
    const Matrix<T> b =
        transpose == Transpose::kYes ? Matrix<T>(n, k, 2, gap) : Matrix<T>(k, n, 2, gap);
    Matrix<T> c(m, n, 3, gap);
    Matrix<T> expected(m, n, 3, gap);
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        T sum = accumulate ? c.At(i, j) : T{0};
        for (int64_t l = 0; l < k; ++l) {
          sum += a.At(i, l) * (transpose == Transpose::kYes ? b.At(j, l) : b.At(l, j));
        }
        expected.At(i, j) = sum;
      }
    }
    const absl::Status status = Gemm(a.View(), b.View(), transpose, c.View(), accumulate);
    ASSERT_TRUE(status.ok()) << status;
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        ASSERT_EQ(c.At(i, j), expected.At(i, j)) << i << ", " << j;
      }
    }
    EXPECT_TRUE(c.GapsAreUntouched());
  }

  static void ExpectProducts(int64_t m, int64_t n, int64_t k) {
    for (const Transpose transpose : {Transpose::kNo, Transpose::kYes}) {
      for (const bool accumulate : {false, true}) {
        for (const int64_t gap : {0, kGap}) ExpectProduct(m, n, k, transpose, accumulate, gap);
      }
    }
  }
};

using Types = testing::Types<float, double>;
TYPED_TEST_SUITE(GemmTest, Types);

TYPED_TEST(GemmTest, MultipliesAnySizes) {
  for (const int64_t m : {1, 2, 5, 17, 64}) {
    for (const int64_t n : {1, 3, 16, 33}) {
      for (const int64_t k : {1, 4, 31, 80}) this->ExpectProducts(m, n, k);
    }
  }
}

TYPED_TEST(GemmTest, MultipliesOneRow) {
  this->ExpectProducts(1, 257, 64);
  this->ExpectProducts(1, 64, 257);
}

TYPED_TEST(GemmTest, MultipliesTheBlocksOfThePaths) {
  this->ExpectProducts(128, 256, 64);
  this->ExpectProducts(128, 64, 256);
}

TYPED_TEST(GemmTest, AnEmptySumIsZero) { this->ExpectProducts(3, 4, 0); }

TYPED_TEST(GemmTest, AProductWithoutElementsDoesNothing) {
  this->ExpectProducts(0, 4, 5);
  this->ExpectProducts(3, 0, 5);
  this->ExpectProducts(0, 0, 0);
}

TYPED_TEST(GemmTest, DoesNotReadWhatItOverwrites) {
  const Matrix<TypeParam> a(5, 7, 1);
  const Matrix<TypeParam> b(7, 6, 2);
  for (const TypeParam before :
       {std::numeric_limits<TypeParam>::quiet_NaN(), std::numeric_limits<TypeParam>::infinity()}) {
    Matrix<TypeParam> c(5, 6, 3);
    for (int64_t i = 0; i < 5; ++i) std::fill_n(&c.At(i, 0), 6, before);
    ASSERT_TRUE(Gemm(a.View(), b.View(), Transpose::kNo, c.View(), /*accumulate=*/false).ok());
    for (int64_t i = 0; i < 5; ++i) {
      for (int64_t j = 0; j < 6; ++j) EXPECT_TRUE(std::isfinite(c.At(i, j))) << i << ", " << j;
    }
  }
}

TYPED_TEST(GemmTest, NotANumberReachesItsRowOnly) {
  Matrix<TypeParam> a(9, 7, 1);
  a.At(4, 2) = std::numeric_limits<TypeParam>::quiet_NaN();
  const Matrix<TypeParam> b(20, 7, 2);
  Matrix<TypeParam> c(9, 20, 3);
  ASSERT_TRUE(Gemm(std::as_const(a).View(), b.View(), Transpose::kYes, c.View(),
                   /*accumulate=*/false)
                  .ok());
  for (int64_t i = 0; i < 9; ++i) {
    for (int64_t j = 0; j < 20; ++j) EXPECT_EQ(std::isnan(c.At(i, j)), i == 4) << i << ", " << j;
  }
}

TEST(GemmLibraryTest, NamesTheKernels) {
  EXPECT_THAT(GemmKernelName(DType::kFloat32), testing::MatchesRegex("onednn/.+"));
  EXPECT_THAT(GemmKernelName(DType::kFloat64), testing::MatchesRegex("openblas/.+"));
  EXPECT_THAT(GemmLibraryVersion(), testing::MatchesRegex("oneDNN [0-9]+\\.[0-9]+\\.[0-9]+"));
}

TEST(GemmLibraryTest, TheBlasIsSerial) { EXPECT_EQ(CheckBlas(), absl::OkStatus()); }

// Small products on several threads at once: a BLAS without locks mixes them up.
TEST(GemmThreadsTest, ProductsOnSeveralThreadsDoNotDisturbEachOther) {
  constexpr int64_t kRows = 65;
  constexpr int64_t kColumns = 66;
  constexpr int64_t kDepth = 5;
  constexpr int kThreads = 4;
  constexpr int kProducts = 20'000;
  std::vector<double> a(kRows * kDepth);
  std::vector<double> b(kColumns * kDepth);
  for (size_t i = 0; i < a.size(); ++i) a[i] = static_cast<double>(i * 7 % 13) - 6;
  for (size_t i = 0; i < b.size(); ++i) b[i] = static_cast<double>(i * 5 % 11) - 5;
  const auto product = [&](std::vector<double>& c) {
    return Gemm(MatrixView<const double>{a.data(), kRows, kDepth, kDepth},
                MatrixView<const double>{b.data(), kColumns, kDepth, kDepth}, Transpose::kYes,
                MatrixView<double>{c.data(), kRows, kColumns, kColumns}, /*accumulate=*/false);
  };
  PrepareThreadForGemm();
  std::vector<double> expected(kRows * kColumns);
  ASSERT_TRUE(product(expected).ok());
  std::atomic<int> wrong = 0;
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&] {
      PrepareThreadForGemm();
      std::vector<double> c(kRows * kColumns);
      for (int i = 0; i < kProducts; ++i) {
        if (!product(c).ok() || c != expected) ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

}  // namespace
}  // namespace attendant::core
