// What the tests of the gradient share: its tensors, a run on a scheduler, and the gradient from
// its definition in double and plain loops.
#ifndef ATTENDANT_TESTS_CORE_GRADIENT_TESTING_H_
#define ATTENDANT_TESTS_CORE_GRADIENT_TESTING_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include "core/attend.h"
#include "core/gradient.h"
#include "core/problem.h"
#include "core/scheduler.h"
#include "core/workspace.h"
#include "tests/core/oracle.h"
#include "tests/core/testing.h"

namespace attendant::core {

inline GradientProblem GradientOf(Problem problem, bool given = false, bool return_d_mask = false) {
  problem.return_weights = problem.return_logsumexp = problem.return_key_sums = false;
  GradientProblem gradient;
  gradient.return_d_mask = return_d_mask && problem.AddsMask();
  gradient.given = given;
  gradient.attend = std::move(problem);
  return gradient;
}

// Gradients in the problem's layout; those that are not returned are empty.
template <typename S>
struct Gradients {
  std::vector<S> query;
  std::vector<S> key;
  std::vector<S> value;
  std::vector<unsigned char> mask;
  std::vector<double> sinks;
  int64_t peak_workspace_bytes = 0;
};

template <typename S>
std::vector<S> RandomDOutput(const Problem& p, uint32_t seed) {
  std::mt19937 rng(seed + 77);
  return Stored<S>(RandomVector<Wide<S>>(p.batch * p.heads * p.queries * p.value_width, rng));
}

// The results of the forward pass, where they are given.
template <typename S>
struct Given {
  std::vector<S> output;
  std::vector<Wide<S>> logsumexp;
};
template <typename S>
Given<S> Forward(Problem problem, const Inputs<S>& inputs, Scheduler& scheduler) {
  problem.return_weights = problem.return_key_sums = false;
  problem.return_logsumexp = true;
  Results<S> results = Compute(problem, inputs, scheduler);
  return {std::move(results.output), std::move(results.logsumexp)};
}

template <typename S>
StridedView<const S> Dense(const Problem& p, const std::vector<S>& d_output) {
  return TensorView<const S>(d_output.data(), p.layout, p.heads, p.queries, p.value_width)
      .Strided();
}

template <typename S>
Gradients<S> ComputeGradients(const GradientProblem& problem, const Inputs<S>& inputs,
                              const StridedView<const S>& d_output, Scheduler& scheduler,
                              const Given<S>& given = {}) {
  const Problem& p = problem.attend;
  Gradients<S> gradients;
  gradients.query = Unwritten<S>(p.batch * p.heads * p.queries * p.width);
  gradients.key = Unwritten<S>(p.batch * p.kv_heads * p.keys * p.width);
  gradients.value = Unwritten<S>(p.batch * p.kv_heads * p.keys * p.value_width);
  gradients.sinks = Unwritten<double>(static_cast<int64_t>(p.sinks.size()));
  GradientTensors<S> tensors;
  tensors.query = {inputs.query.data(), p.layout, p.heads, p.queries, p.width};
  tensors.key = {inputs.key.data(), p.layout, p.kv_heads, p.keys, p.width};
  tensors.value = {inputs.value.data(), p.layout, p.kv_heads, p.keys, p.value_width};
  if (p.mask.has_value()) tensors.mask = inputs.mask.data();
  tensors.d_output = d_output;
  tensors.output = {given.output.data(), p.layout, p.heads, p.queries, p.value_width};
  tensors.logsumexp = given.logsumexp.data();
  tensors.d_query = {gradients.query.data(), p.layout, p.heads, p.queries, p.width};
  tensors.d_key = {gradients.key.data(), p.layout, p.kv_heads, p.keys, p.width};
  tensors.d_value = {gradients.value.data(), p.layout, p.kv_heads, p.keys, p.value_width};
  tensors.d_sinks = gradients.sinks.data();
  if (problem.return_d_mask) {
    // A NaN of every type shows what was not written.
    gradients.mask.assign(p.mask->elements * SizeOf(p.mask->dtype), 0xff);
    tensors.d_mask = gradients.mask.data();
  }
  Workspace workspace;
  auto stages = GradientStages<S>(problem, tensors, {&workspace, scheduler.threads(), {}});
  const absl::Status status = stages.ok() ? scheduler.Run(*std::move(stages)) : stages.status();
  EXPECT_EQ(status, absl::OkStatus());
  gradients.peak_workspace_bytes = workspace.peak_bytes();
  return gradients;
}

// From the oracle's weights, by gradient.h's formulas pair by pair; and beside each gradient the
// largest sum of absolute values that an element of it is, to which its error is relative.
struct OracleGradients {
  std::vector<double> query;
  std::vector<double> key;
  std::vector<double> value;
  std::vector<double> mask;
  std::vector<double> sinks;
  struct Largest {
    double query = 0;
    double key = 0;
    double value = 0;
    double mask = 0;
    double sinks = 0;
  } largest;
};

inline OracleGradients GradientOracle(const Problem& p, const std::vector<double>& query,
                                      const std::vector<double>& key,
                                      const std::vector<double>& value,
                                      const std::vector<double>& mask,
                                      const std::vector<double>& d_output) {
  const OracleResult forward = Oracle(p, query, key, value, mask);
  const auto at = [&](int64_t heads, int64_t tokens, int64_t width, int64_t b, int64_t h,
                      int64_t t) {
    return p.layout == Layout::kBhtd ? ((b * heads + h) * tokens + t) * width
                                     : ((b * tokens + t) * heads + h) * width;
  };
  const auto dot = [](const double* a, const double* b, int64_t n) {
    double sum = 0;
    for (int64_t x = 0; x < n; ++x) sum += a[x] * b[x];
    return sum;
  };
  OracleGradients g;
  std::vector<double> sums[4];  // of absolute values: query, key, value, mask
  g.query.assign(query.size(), 0);
  g.key.assign(key.size(), 0);
  g.value.assign(value.size(), 0);
  g.mask.assign(mask.size(), 0);
  g.sinks.assign(p.sinks.size(), 0);
  sums[0] = g.query;
  sums[1] = g.key;
  sums[2] = g.value;
  sums[3] = g.mask;
  std::vector<double> sink_sums = g.sinks;
  const auto add = [](std::vector<double>& to, std::vector<double>& of, int64_t from, double factor,
                      const double* row, int64_t n, double size) {
    for (int64_t x = 0; x < n; ++x) {
      to[from + x] += factor * row[x];
      of[from + x] += size * std::abs(row[x]);
    }
  };
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t h = 0; h < p.heads; ++h) {
      const int64_t kv = h / (p.heads / p.kv_heads);
      for (int64_t i = 0; i < p.queries; ++i) {
        const int64_t row = (b * p.heads + h) * p.queries + i;
        const double* const weights = forward.weights.data() + row * p.keys;
        const int64_t q = at(p.heads, p.queries, p.width, b, h, i);
        const int64_t o = at(p.heads, p.queries, p.value_width, b, h, i);
        const double* const d_o = d_output.data() + o;
        double delta = 0;
        double most = 0;  // |d_P| of the row
        std::vector<double> d_weights(p.keys);
        for (int64_t j = 0; j < p.keys; ++j) {
          if (weights[j] == 0) continue;
          const int64_t v = at(p.kv_heads, p.keys, p.value_width, b, kv, j);
          d_weights[j] = dot(d_o, value.data() + v, p.value_width);
          delta += weights[j] * d_weights[j];
          for (int64_t x = 0; x < p.value_width; ++x) {
            most = std::max(most,
                            std::abs(d_o[x] * value[v + x]) * static_cast<double>(p.value_width));
          }
        }
        for (int64_t j = 0; j < p.keys; ++j) {
          if (weights[j] == 0) continue;
          const int64_t k = at(p.kv_heads, p.keys, p.width, b, kv, j);
          const int64_t v = at(p.kv_heads, p.keys, p.value_width, b, kv, j);
          const double d_z = weights[j] * (d_weights[j] - delta);
          const double size = 2 * weights[j] * most;
          double factor = p.scale;
          if (p.softcap != 0) {
            const double t =
                std::tanh(p.scale * dot(query.data() + q, key.data() + k, p.width) / p.softcap);
            factor *= 1 - t * t;
          }
          const double scale = std::abs(p.scale);
          add(g.query, sums[0], q, factor * d_z, key.data() + k, p.width, scale * size);
          add(g.key, sums[1], k, factor * d_z, query.data() + q, p.width, scale * size);
          add(g.value, sums[2], v, weights[j], d_o, p.value_width, weights[j]);
          if (!mask.empty()) {
            const int64_t m = b * p.mask->batch_stride + h * p.mask->head_stride +
                              i * p.mask->query_stride + j * p.mask->key_stride;
            g.mask[m] += d_z;
            sums[3][m] += size;
          }
        }
        if (!p.sinks.empty() && std::isfinite(forward.logsumexp[row])) {
          const double weight = std::exp(p.sinks[h] - forward.logsumexp[row]);
          g.sinks[h] -= weight * delta;
          sink_sums[h] += weight * most;
        }
      }
    }
  }
  const auto largest = [](const std::vector<double>& numbers) {
    double most = 0;
    for (const double number : numbers) most = std::max(most, number);
    return most;
  };
  g.largest = {largest(sums[0]), largest(sums[1]), largest(sums[2]), largest(sums[3]),
               largest(sink_sums)};
  return g;
}

template <typename S>
OracleGradients GradientOracleOf(const Problem& p, const Inputs<S>& inputs,
                                 const std::vector<S>& d_output) {
  return GradientOracle(p, ToDouble(inputs.query), ToDouble(inputs.key), ToDouble(inputs.value),
                        MaskNumbers(p, inputs.mask), ToDouble(d_output));
}

// Relative to the sums of absolute values: a weight's error as in ToleranceOf, twice (in the
// score's gradient it is multiplied with a difference that has it as well), and those of the sums
// over the width, the keys or the queries. Half precision: one rounding more; the caller's output,
// where it is given, was rounded as well.
template <typename S>
double GradientTolerance(const Problem& p, const Tolerance& tolerance, bool given) {
  using T = Wide<S>;
  const double u = UnitRoundoff<T>();
  const int64_t longest =
      std::max({p.keys, p.queries * (p.heads / std::max<int64_t>(p.kv_heads, 1)), p.width,
                p.value_width, int64_t{1}});
  double relative = 2 * tolerance.weight + 3 * SumError(longest, u) + 16 * u;
  if (kIsHalf<S> && given) relative += std::is_same_v<S, BFloat16> ? 0x1p-8 : 0x1p-11;
  // A logsumexp of T, as large as the scores are.
  if (given) relative += 2 * tolerance.logsumexp;
  return relative;
}

// Half precision's, of a result.
template <typename S>
constexpr double GradientRounding() {
  return !kIsHalf<S> ? 0 : std::is_same_v<S, BFloat16> ? 0x1p-8 : 0x1p-11;
}

template <typename S>
void ExpectGradients(const GradientProblem& problem, const Inputs<S>& inputs,
                     const Gradients<S>& actual, const OracleGradients& oracle) {
  const Problem& p = problem.attend;
  Tolerance of = ToleranceOf<S>(p, MagnitudesOf(p, inputs));
  const double relative = GradientTolerance<S>(p, of, problem.given);
  const double rounding = GradientRounding<S>();
  const double least = of.tiny + (sizeof(Wide<S>) == 4 ? 0x1p-80 : 0x1p-900);
  EXPECT_TRUE(Near(actual.query, oracle.query, least + relative * oracle.largest.query, rounding))
      << "d_query";
  EXPECT_TRUE(Near(actual.key, oracle.key, least + relative * oracle.largest.key, rounding))
      << "d_key";
  EXPECT_TRUE(Near(actual.value, oracle.value, least + relative * oracle.largest.value, rounding))
      << "d_value";
  EXPECT_TRUE(Near(actual.sinks, oracle.sinks, least + relative * oracle.largest.sinks))
      << "d_sinks";
  if (problem.return_d_mask) {
    EXPECT_TRUE(Near(MaskNumbers(p, actual.mask), oracle.mask,
                     least + relative * oracle.largest.mask, IsHalf(p.mask->dtype) ? rounding : 0))
        << "d_mask";
  }
}

}  // namespace attendant::core

#endif  // ATTENDANT_TESTS_CORE_GRADIENT_TESTING_H_
