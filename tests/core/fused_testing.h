// What the tests of the fused kernel share: its targets, inputs that meet the branches of its rule,
// and what the scalar reference makes of a problem.
#ifndef ATTENDANT_TESTS_CORE_FUSED_TESTING_H_
#define ATTENDANT_TESTS_CORE_FUSED_TESTING_H_

#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "tests/core/fused_reference.h"
#include "tests/core/testing.h"

namespace attendant::core {

// Highway's bits of the targets we compile for. The promise of the same bits is about the first
// two; the baseline is SSE2, emulated or scalar: what this version of Highway has.
inline constexpr int64_t kAvx3 = int64_t{1} << 8;
inline constexpr int64_t kAvx2 = int64_t{1} << 9;
inline constexpr int64_t kBaseline = int64_t{1} << 14 | int64_t{1} << 61 | int64_t{1} << 62;

inline const char* NameOfTarget(int64_t target) {
  return target == kAvx3 ? "AVX-512" : target == kAvx2 ? "AVX2" : "Baseline";
}

// What a test runs with.
template <typename T, int64_t kTarget>
struct OnTarget {
  using Real = T;
  static constexpr int64_t target = kTarget;
};

using PromisedTargets = testing::Types<OnTarget<float, kAvx2>, OnTarget<double, kAvx2>,
                                       OnTarget<float, kAvx3>, OnTarget<double, kAvx3>>;
using AllTargets =
    testing::Types<OnTarget<float, kBaseline>, OnTarget<double, kBaseline>, OnTarget<float, kAvx2>,
                   OnTarget<double, kAvx2>, OnTarget<float, kAvx3>, OnTarget<double, kAvx3>>;

// For what has no other type.
using FloatTargets =
    testing::Types<OnTarget<float, kBaseline>, OnTarget<float, kAvx2>, OnTarget<float, kAvx3>>;

struct NameOnTarget {
  template <typename Param>
  static std::string GetName(int /*index*/) {
    const char* const type = sizeof(typename Param::Real) == 4 ? "Float" : "Double";
    return absl::StrCat(type, absl::StrReplaceAll(NameOfTarget(Param::target), {{"-", ""}}));
  }
};

// Tests that run on one target, and are skipped where this CPU has not got it.
template <typename Param>
class TargetTest : public testing::Test {
 protected:
  using Real = typename Param::Real;

  void SetUp() override {
    if ((hwy::SupportedTargets() & Param::target) == 0) {
      GTEST_SKIP() << "this CPU has no " << NameOfTarget(Param::target);
    }
    hwy::SetSupportedTargetsForTest(Param::target);
  }
  void TearDown() override { hwy::SetSupportedTargetsForTest(0); }
};

// Kinds of input that meet the rule's branches.
enum class Kind { kNormal, kClimbing, kFalling, kExtreme, kWide };
inline constexpr Kind kKinds[] = {Kind::kNormal, Kind::kClimbing, Kind::kFalling, Kind::kExtreme,
                                  Kind::kWide};

template <typename T>
Inputs<T> MakeInputs(const Problem& p, Kind kind, uint32_t seed) {
  Inputs<T> inputs = RandomInputs<T>(p, seed);
  std::mt19937 rng(seed + 1);
  for (size_t i = 0; i < inputs.key.size(); ++i) {
    T& k = inputs.key[i];
    const int64_t row = static_cast<int64_t>(i) / p.width;
    const int64_t key = (p.layout == Layout::kBhtd ? row : row / p.kv_heads) % p.keys;
    const T position = static_cast<T>(key) / 4;
    if (kind == Kind::kClimbing) k = k / 4 + position;
    if (kind == Kind::kFalling) k = k / 4 - position;
    if (kind == Kind::kExtreme) k = static_cast<T>(rng() % 2 == 0 ? 100 : -100);
  }
  for (T& q : inputs.query) {
    if (kind == Kind::kClimbing || kind == Kind::kFalling) q = std::abs(q);
    // As wide as it takes to underflow.
    if (kind == Kind::kWide) q *= sizeof(T) == 4 ? 64 : 512;
  }
  // Zeros among the values show what underflows in the others.
  for (T& v : inputs.value) {
    if (rng() % 4 != 0) v = 0;
  }
  return inputs;
}

template <typename T>
struct ReferenceAnswer {
  std::vector<T> output;        // in the problem's layout
  std::vector<T> references;    // (B, H, Tq)
  std::vector<T> inverse_sums;  // (B, H, Tq)
  std::set<int64_t> moves;      // where some row's reference moved
  int64_t shifted_rows = 0;
};

// The scalar program's rows.
template <typename T>
ReferenceAnswer<T> ReferenceOf(const Problem& p, const Inputs<T>& inputs,
                               const FusedRule& rule = {}) {
  Memory<T> memory(p, inputs);
  const AttendTensors<T> tensors = memory.Tensors();
  ReferenceAnswer<T> answer;
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t h = 0; h < p.heads; ++h) {
      for (int64_t i = 0; i < p.queries; ++i) {
        FusedScores<T> scores{.softcap = static_cast<T>(p.SoftcapLog2()),
                              .slope = static_cast<T>(p.SlopeLog2(h)),
                              .position = i + p.Offset(b),
                              .added = p.AddsMask()};
        if (!p.sinks.empty()) scores.natural_sink = p.sinks[h];
        if (p.mask.has_value()) {
          scores.bias.resize(p.keys);
          HeadMask<T>(p, inputs.mask.data(), b, h).Read(i, {0, p.keys}, scores.bias.data());
        }
        FusedRow<T> row =
            FusedReference<T>(tensors.query.Head(b, h).Row(i), tensors.key.Head(b, p.KvHead(h)),
                              tensors.value.Head(b, p.KvHead(h)), p.VisibleKeys(b, i),
                              static_cast<T>(p.ScaleLog2()), scores, rule)
                .Run();
        std::copy(row.output.begin(), row.output.end(), tensors.output.Head(b, h).Row(i));
        answer.references.push_back(row.reference);
        answer.inverse_sums.push_back(row.sum == 0 ? T{0} : 1 / row.sum);
        answer.moves.merge(row.moves);
        if (row.shift != 0) ++answer.shifted_rows;
      }
    }
  }
  answer.output = std::move(memory.results.output);
  return answer;
}

}  // namespace attendant::core

#endif  // ATTENDANT_TESTS_CORE_FUSED_TESTING_H_
