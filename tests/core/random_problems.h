// Random attention problems: every option at once.
#ifndef ATTENDANT_TESTS_CORE_RANDOM_PROBLEMS_H_
#define ATTENDANT_TESTS_CORE_RANDOM_PROBLEMS_H_

#include <cstdint>
#include <optional>
#include <random>

#include "core/problem.h"
#include "tests/core/testing.h"

namespace attendant::core {

class RandomProblems {
 public:
  // small: of a few tokens, for what computes a problem again for each of its numbers.
  explicit RandomProblems(uint32_t seed, bool small = false) : rng_(seed), small_(small) {}

  // Small enough that hundreds take a second. mask: what is in the options of the problem.
  template <typename T>
  Problem Next(TensorSpec& mask) {
    while (true) {
      Sizes s;
      s.batch = Below(3) + (Below(8) != 0 ? 1 : 0);
      s.kv_heads = 1 + Below(3);
      s.heads = s.kv_heads * (1 + Below(3));
      s.queries = Length();
      s.keys = Below(3) == 0 ? s.queries : Length();
      s.width = Width();
      s.value_width = Width();
      const int64_t pairs = s.batch * s.heads * s.queries * s.keys;
      if (pairs * (s.width + s.value_width + 8) > (small_ ? 3'000 : 1'500'000)) continue;
      constexpr Causal kCausal[] = {Causal::kNone, Causal::kTopLeft, Causal::kBottomRight};
      AttendOptions options = Options(kCausal[Below(3)], kBothLayouts[Below(2)]);
      if (Below(3) == 0) {
        options.window.emplace();
        if (Below(3) != 0) options.window->left = Below(s.keys + 2);
        if (Below(3) != 0) options.window->right = Below(s.keys + 2);
      }
      for (int64_t b = 0; b < s.batch && Below(3) == 0; ++b) {
        options.key_lengths.resize(s.batch, s.keys);
        options.key_lengths[b] = Below(s.keys + 1);
      }
      if (Below(4) == 0) options.softcap = 1 + static_cast<double>(Below(30));
      for (int64_t h = 0, slopes = Below(3), sinks = Below(3); h < s.heads; ++h) {
        if (slopes == 0) options.alibi_slopes.push_back(0.1 * static_cast<double>(Below(9)) - 0.2);
        if (sinks == 0) options.sinks.push_back(static_cast<double>(Below(12)) - 6);
      }
      if (Below(2) == 0) options.mask = Mask(DTypeOf<T>(), s);
      const std::optional<double> scales[] = {std::nullopt, std::nullopt, 0.0, -0.3, 1.0};
      options.scale = scales[Below(5)];
      options.return_weights = Below(2) == 0;
      options.return_logsumexp = Below(2) == 0;
      options.return_key_sums = Below(2) == 0;
      mask = options.mask.value_or(TensorSpec{DType::kBool, {0}});
      return ProblemOf<T>(s, options);
    }
  }

 private:
  int64_t Below(int64_t n) { return static_cast<int64_t>(rng_()) % n; }

  // Of four dimensions, or fewer where that says the same.
  TensorSpec Mask(DType dtype, const Sizes& s) {
    TensorSpec mask{Below(2) == 0 ? DType::kBool : dtype, {s.batch, s.heads, s.queries, s.keys}};
    for (int64_t& size : mask.shape) size = Below(3) == 0 ? 1 : size;
    const bool fewer = Below(2) == 0;
    while (fewer && !mask.shape.empty() && mask.shape[0] == 1) {
      mask.shape.erase(mask.shape.begin());
    }
    if (mask.shape.size() == 3 && s.batch == s.heads) mask.shape.insert(mask.shape.begin(), 1);
    return mask;
  }

  int64_t Length() {
    constexpr int64_t kEdges[] = {63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513};
    if (small_) return Below(9);
    switch (Below(3)) {
      case 0:
        return Below(10);
      case 1:
        return kEdges[Below(12)];
      default:
        return 1 + Below(600);
    }
  }

  int64_t Width() {
    constexpr int64_t kEdges[] = {32, 64, 80, 96, 128, 160, 256, 512};
    if (small_) return Below(5);
    return Below(3) == 0 ? kEdges[Below(8)] : Below(20);
  }

  std::mt19937 rng_;
  const bool small_;
};

}  // namespace attendant::core

#endif  // ATTENDANT_TESTS_CORE_RANDOM_PROBLEMS_H_
