// What the tests of whole problems share: what they run with, and the comparison of both paths with
// the oracle.
#ifndef ATTENDANT_TESTS_CORE_ATTEND_TESTING_H_
#define ATTENDANT_TESTS_CORE_ATTEND_TESTING_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/scheduler.h"
#include "tests/core/flags.h"
#include "tests/core/oracle.h"
#include "tests/core/random_problems.h"
#include "tests/core/testing.h"

namespace attendant::core {

inline Problem On(Path path, Problem problem) {
  problem.path = path;
  return problem;
}

// What is returned is the oracle's.
template <typename T>
void ExpectNear(const Problem& p, const Inputs<T>& inputs, const Results<T>& actual,
                const OracleResult& oracle, const Tolerance& tolerance) {
  EXPECT_TRUE(Near(actual.output, oracle.output, tolerance.output)) << "output";
  if (p.return_weights) {
    EXPECT_TRUE(Near(actual.weights, oracle.weights, tolerance.tiny, tolerance.weight))
        << "weights";
    EXPECT_TRUE(HiddenWeightsAreZero(p, actual.weights, inputs.mask));
  }
  if (p.return_logsumexp) {
    EXPECT_TRUE(Near(actual.logsumexp, oracle.logsumexp, tolerance.logsumexp)) << "logsumexp";
  }
  if (p.return_key_sums) {
    EXPECT_TRUE(Near(actual.key_sums, oracle.key_sums, tolerance.tiny, tolerance.key_sum))
        << "key_sums";
  }
}

// Both paths compute what the oracle does, and what the other does.
template <typename T>
void ExpectOracle(const Problem& p, const Inputs<T>& inputs, Scheduler& scheduler) {
  SCOPED_TRACE(Describe(p));
  const OracleResult oracle = OracleOf(p, inputs);
  const Tolerance tolerance = ToleranceOf<T>(p, MagnitudesOf(p, inputs));
  const Results<T> explicit_path = Compute(On(Path::kExplicit, p), inputs, scheduler);
  const Results<T> chunked = Compute(On(Path::kChunked, p), inputs, scheduler);
  {
    SCOPED_TRACE("explicit path");
    ExpectNear(p, inputs, explicit_path, oracle, tolerance);
  }
  {
    SCOPED_TRACE("chunked path");
    ExpectNear(p, inputs, chunked, oracle, tolerance);
  }
  if constexpr (kIsHalf<T>) return;  // both are rounded: the difference may be a unit
  SCOPED_TRACE("chunked path against the explicit one");
  ExpectNear(p, inputs, chunked,
             {ToDouble(explicit_path.output), ToDouble(explicit_path.weights),
              ToDouble(explicit_path.logsumexp), ToDouble(explicit_path.key_sums)},
             tolerance);
}

// What a test runs with: a type and the chunked path's kernel.
template <typename T, Kernel kKernel>
struct Run {
  using Type = T;
  static constexpr Kernel kernel = kKernel;
};

template <typename Param>
class AttendTest : public ::testing::Test {
 protected:
  using Real = typename Param::Type;

  AttendTest() { KernelUnderTest() = Param::kernel; }
  ~AttendTest() override { KernelUnderTest() = Kernel::kFused; }

  void ExpectOracleOnRandom(const Sizes& sizes, const AttendOptions& options) {
    const Problem problem = ProblemOf<Real>(sizes, options);
    ExpectOracle(problem, RandomInputs<Real>(problem, 1), scheduler_);
  }

  Scheduler scheduler_{2};
};

// The oracle on random problems of every option, as many as --problems says. core_test --problems=N
// --seed=S runs others.
template <typename T>
void ExpectOracleOnRandomProblems(Scheduler& scheduler) {
  const testing::TestInfo& test = *testing::UnitTest::GetInstance()->current_test_info();
  uint32_t seed = TheFlags().seed;
  for (int64_t n = 0; n < TheFlags().problems && !testing::Test::HasFailure(); ++n, ++seed) {
    SCOPED_TRACE(absl::StrCat("core_test --gtest_filter=", test.test_suite_name(), ".", test.name(),
                              " --problems=1 --seed=", seed));
    TensorSpec mask;
    const auto problem = RandomProblems(seed).Next<T>(mask);
    auto inputs = RandomInputs<T>(problem, seed);
    inputs.mask = RandomMask(mask, seed);
    ExpectOracle(problem, inputs, scheduler);
  }
}

using Runs = ::testing::Types<Run<float, Kernel::kFused>, Run<double, Kernel::kFused>,
                              Run<float, Kernel::kOneDnn>, Run<double, Kernel::kOneDnn>>;
// Quiet and signalling, of both signs, with and without a payload.
template <typename T>
std::vector<T> NaNs() {
  if constexpr (sizeof(T) == sizeof(float)) {
    return {std::bit_cast<float>(0x7fc00000u), std::bit_cast<float>(0x7fc00001u),
            std::bit_cast<float>(0xffc00000u), std::bit_cast<float>(0x7f800001u),
            std::bit_cast<float>(0x7fffffffu), std::bit_cast<float>(0xffffffffu)};
  } else {
    return {std::bit_cast<double>(0x7ff8000000000000u), std::bit_cast<double>(0x7ff8000000000001u),
            std::bit_cast<double>(0xfff8000000000000u), std::bit_cast<double>(0x7ff0000000000001u),
            std::bit_cast<double>(0x7fffffffffffffffu), std::bit_cast<double>(0xffffffffffffffffu)};
  }
}

template <typename T>
std::vector<T> Poisons() {
  constexpr T kInfinity = std::numeric_limits<T>::infinity();
  return {NaNs<T>()[1], kInfinity, -kInfinity};
}

// Row `row` of a (rows, width) tensor becomes `poison`.
template <typename T>
void FillRow(std::vector<T>& tensor, int64_t row, int64_t width, T poison) {
  std::fill_n(tensor.begin() + row * width, width, poison);
}

}  // namespace attendant::core

#endif  // ATTENDANT_TESTS_CORE_ATTEND_TESTING_H_
