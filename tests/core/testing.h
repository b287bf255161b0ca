// What the tests of attention share: problems, random tensors, a run on a scheduler, comparisons.
#ifndef ATTENDANT_TESTS_CORE_TESTING_H_
#define ATTENDANT_TESTS_CORE_TESTING_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "core/attend.h"
#include "core/cost.h"
#include "core/half.h"
#include "core/mask.h"
#include "core/problem.h"
#include "core/scheduler.h"
#include "core/tolerance.h"
#include "core/workspace.h"
#include "tests/core/oracle.h"

namespace attendant::core {

inline constexpr Path kBothPaths[] = {Path::kExplicit, Path::kChunked};
inline constexpr Causal kBothCausal[] = {Causal::kNone, Causal::kTopLeft};
inline constexpr Layout kBothLayouts[] = {Layout::kBhtd, Layout::kBthd};

inline AttendOptions Options(Causal causal, Layout layout = Layout::kBhtd) {
  AttendOptions options;
  options.causal = causal;
  options.layout = layout;
  return options;
}

inline AttendOptions ReturningAll(Causal causal = Causal::kNone, Layout layout = Layout::kBhtd) {
  AttendOptions options = Options(causal, layout);
  options.return_weights = options.return_logsumexp = options.return_key_sums = true;
  return options;
}

struct Sizes {
  int64_t batch = 1;
  int64_t heads = 1;
  int64_t kv_heads = 1;
  int64_t queries = 1;
  int64_t keys = 1;
  int64_t width = 1;
  int64_t value_width = 1;
};

// Throws where the library refuses the problem.
template <typename T>
Problem ProblemOf(const Sizes& s, const AttendOptions& options) {
  const auto spec = [&](int64_t heads, int64_t tokens, int64_t width) -> TensorSpec {
    if (options.layout == Layout::kBhtd) return {DTypeOf<T>(), {s.batch, heads, tokens, width}};
    return {DTypeOf<T>(), {s.batch, tokens, heads, width}};
  };
  return MakeProblem(spec(s.heads, s.queries, s.width), spec(s.kv_heads, s.keys, s.width),
                     spec(s.kv_heads, s.keys, s.value_width), options)
      .value();
}

// One line from which the problem can be made again.
inline std::string Describe(const Problem& p) {
  return absl::StrCat(
      NameOf(p.dtype), " B=", p.batch, " H=", p.heads, " Hkv=", p.kv_heads, " Tq=", p.queries,
      " Tk=", p.keys, " D=", p.width, " Dv=", p.value_width, " scale=", p.scale,
      p.layout == Layout::kBhtd ? " BHTD" : " BTHD",
      p.causal == Causal::kNone      ? ""
      : p.causal == Causal::kTopLeft ? " causal"
                                     : " causal from the bottom right",
      p.window.left.has_value() ? absl::StrCat(" left=", *p.window.left) : "",
      p.window.right.has_value() ? absl::StrCat(" right=", *p.window.right) : "",
      p.key_lengths.empty() ? "" : absl::StrCat(" lengths=", absl::StrJoin(p.key_lengths, ",")),
      p.mask.has_value()
          ? absl::StrCat(" ", NameOf(p.mask->dtype), " mask of strides ", p.mask->batch_stride, ",",
                         p.mask->head_stride, ",", p.mask->query_stride, ",", p.mask->key_stride)
          : "",
      p.softcap != 0 ? absl::StrCat(" softcap=", p.softcap) : "",
      p.alibi_slopes.empty() ? "" : absl::StrCat(" slopes=", absl::StrJoin(p.alibi_slopes, ",")),
      p.sinks.empty() ? "" : absl::StrCat(" sinks=", absl::StrJoin(p.sinks, ",")),
      p.return_weights ? " weights" : "", p.return_logsumexp ? " logsumexp" : "",
      p.return_key_sums ? " key_sums" : "");
}

// `count` numbers of the normal distribution with standard deviation `spread`.
template <typename T>
std::vector<T> RandomVector(int64_t count, std::mt19937& rng, double spread = 1) {
  std::normal_distribution<double> normal(0, spread);
  std::vector<T> numbers(count);
  for (T& number : numbers) number = static_cast<T>(normal(rng));
  return numbers;
}

// Numbers as they are stored, and what was stored as numbers.
template <typename S>
std::vector<S> Stored(const std::vector<Wide<S>>& numbers) {
  std::vector<S> stored(numbers.size());
  Store(numbers.data(), static_cast<int64_t>(numbers.size()), stored.data());
  return stored;
}
template <typename S>
std::vector<Wide<S>> Widened(const std::vector<S>& stored) {
  if constexpr (kIsHalf<S>) {
    std::vector<float> wide(stored.size());
    Widen(stored.data(), static_cast<int64_t>(stored.size()), wide.data());
    return wide;
  } else {
    return stored;
  }
}
template <typename S>
std::vector<double> ToDouble(const std::vector<S>& stored) {
  const std::vector<Wide<S>> numbers = Widened(stored);
  return {numbers.begin(), numbers.end()};
}

template <typename T>
struct Inputs {
  std::vector<T> query;
  std::vector<T> key;
  std::vector<T> value;
  std::vector<unsigned char> mask = {};  // as the problem's mask says
};

// A mask's bytes, and back to what is added: -infinity where a key is hidden.
template <typename T>
std::vector<unsigned char> MaskBytes(const std::vector<T>& elements) {
  std::vector<unsigned char> bytes(elements.size() * sizeof(T));
  if (!bytes.empty()) std::memcpy(bytes.data(), elements.data(), bytes.size());
  return bytes;
}

template <typename S>
std::vector<double> MaskNumbers(const std::vector<unsigned char>& bytes) {
  std::vector<S> elements(bytes.size() / sizeof(S));
  if (!bytes.empty()) std::memcpy(elements.data(), bytes.data(), bytes.size());
  return ToDouble(elements);
}

// What is added, as a mask of that dtype; -infinity hides.
inline std::vector<unsigned char> MaskOf(DType dtype, const std::vector<double>& numbers) {
  if (dtype != DType::kBool) {
    return WithStored(dtype, [&]<typename S>() {
      return MaskBytes(Stored<S>(std::vector<Wide<S>>(numbers.begin(), numbers.end())));
    });
  }
  std::vector<unsigned char> flags;
  for (const double number : numbers) flags.push_back(std::isinf(number) ? 0 : 1);
  return flags;
}

inline std::vector<double> MaskNumbers(const Problem& p, const std::vector<unsigned char>& bytes) {
  if (!p.mask.has_value()) return {};
  if (p.mask->dtype != DType::kBool) {
    return WithStored(p.mask->dtype, [&]<typename S>() { return MaskNumbers<S>(bytes); });
  }
  std::vector<double> numbers;
  for (const unsigned char seen : bytes) {
    numbers.push_back(seen != 0 ? 0 : -std::numeric_limits<double>::infinity());
  }
  return numbers;
}

// A mask of random numbers, many of them hidden.
inline std::vector<unsigned char> RandomMask(const TensorSpec& spec, uint32_t seed) {
  std::mt19937 rng(seed);
  std::normal_distribution<double> normal(0, 2);
  size_t count = 1;
  for (const int64_t size : spec.shape) count *= static_cast<size_t>(size);
  const size_t row = spec.shape.empty() ? 1 : static_cast<size_t>(spec.shape.back());
  std::vector<double> numbers(count);
  // Some rows are all hidden, some have a hidden half, most hide one key or another.
  for (size_t i = 0; i < count; ++i) {
    std::mt19937 of_row(seed + static_cast<uint32_t>(i / std::max<size_t>(row, 1)));
    const uint32_t kind = of_row() % 6;
    const bool hidden = kind == 0   ? rng() % 8 != 0
                        : kind == 1 ? i % row < row / 2
                        : kind == 2 ? true
                        : kind == 3 ? false
                                    : rng() % 3 == 0;
    const double number = normal(rng);
    numbers[i] = hidden ? -std::numeric_limits<double>::infinity() : number;
  }
  return MaskOf(spec.dtype, numbers);
}

template <typename S>
Inputs<S> RandomInputs(const Problem& p, uint32_t seed) {
  std::mt19937 rng(seed);
  const auto tensor = [&](int64_t count) { return Stored<S>(RandomVector<Wide<S>>(count, rng)); };
  Inputs<S> inputs;
  inputs.query = tensor(p.batch * p.heads * p.queries * p.width);
  inputs.key = tensor(p.batch * p.kv_heads * p.keys * p.width);
  inputs.value = tensor(p.batch * p.kv_heads * p.keys * p.value_width);
  return inputs;
}

// What no result holds: it shows an element that was not written.
inline constexpr int kUnwritten = -7777;

// `count` elements; data() is not null, whatever the count is.
template <typename S>
std::vector<S> Unwritten(int64_t count) {
  std::vector<S> numbers;
  numbers.reserve(std::max<int64_t>(count, 1));
  numbers.resize(count, Stored<S>({Wide<S>{kUnwritten}})[0]);
  return numbers;
}

// Tensors that are not returned are empty.
template <typename S>
struct Results {
  std::vector<S> output;
  std::vector<S> weights;
  std::vector<Wide<S>> logsumexp;
  std::vector<Wide<S>> key_sums;
  int64_t peak_workspace_bytes = 0;
};

// All tensors of a problem.
template <typename T>
struct Memory {
  Memory(const Problem& p, Inputs<T> tensors) : problem(p), inputs(std::move(tensors)) {
    results.output = Unwritten<T>(p.batch * p.heads * p.queries * p.value_width);
    const auto rows = p.batch * p.heads * p.queries;
    if (p.return_weights) results.weights = Unwritten<T>(rows * p.keys);
    if (p.return_logsumexp) results.logsumexp = Unwritten<Wide<T>>(rows);
    if (p.return_key_sums) results.key_sums = Unwritten<Wide<T>>(p.batch * p.heads * p.keys);
  }

  AttendTensors<T> Tensors() {
    const Problem& p = problem;
    AttendTensors<T> tensors;
    tensors.query = {inputs.query.data(), p.layout, p.heads, p.queries, p.width};
    tensors.key = {inputs.key.data(), p.layout, p.kv_heads, p.keys, p.width};
    tensors.value = {inputs.value.data(), p.layout, p.kv_heads, p.keys, p.value_width};
    if (p.mask.has_value()) tensors.mask = inputs.mask.data();
    tensors.output = {results.output.data(), p.layout, p.heads, p.queries, p.value_width};
    if (p.return_weights) tensors.weights = results.weights.data();
    if (p.return_logsumexp) tensors.logsumexp = results.logsumexp.data();
    if (p.return_key_sums) tensors.key_sums = results.key_sums.data();
    return tensors;
  }

  Problem problem;
  Inputs<T> inputs;
  Results<T> results;
};

// The kernel that Compute uses on the chunked path.
inline Kernel& KernelUnderTest() {
  static Kernel kernel = Kernel::kFused;
  return kernel;
}

template <typename T>
Results<T> Compute(const Problem& problem, const Inputs<T>& inputs, Scheduler& scheduler) {
  Memory<T> memory(problem, inputs);
  Workspace workspace;
  auto stages = AttendStages<T>(problem, memory.Tensors(),
                                {&workspace, scheduler.threads(), KernelUnderTest()});
  const absl::Status status = stages.ok() ? scheduler.Run(*std::move(stages)) : stages.status();
  EXPECT_EQ(status, absl::OkStatus());
  memory.results.peak_workspace_bytes = workspace.peak_bytes();
  // What is reserved for a call is by this figure.
  EXPECT_LE(workspace.peak_bytes(),
            CostOf(problem, scheduler.threads(), KernelUnderTest()).workspace_bytes +
                CopyBytes(problem, scheduler.threads(), KernelUnderTest()));
  return std::move(memory.results);
}

// The oracle on the inputs as T holds them.
template <typename T>
OracleResult OracleOf(const Problem& problem, const Inputs<T>& inputs) {
  return Oracle(problem, ToDouble(inputs.query), ToDouble(inputs.key), ToDouble(inputs.value),
                MaskNumbers(problem, inputs.mask));
}

// The largest Euclidean norm of a row of `width` numbers.
template <typename S>
double LargestNorm(const std::vector<S>& stored, int64_t width) {
  const std::vector<double> rows = ToDouble(stored);
  double largest = 0;
  for (size_t begin = 0; begin < rows.size(); begin += static_cast<size_t>(width)) {
    double squares = 0;
    for (int64_t d = 0; d < width; ++d) {
      const double x = rows[begin + static_cast<size_t>(d)];
      if (std::isfinite(x)) squares += x * x;
    }
    largest = std::max(largest, squares);
  }
  return std::sqrt(largest);
}

// By Cauchy and Schwarz, sum |q_d k_d| is at most the product of the norms.
template <typename T>
Magnitudes MagnitudesOf(const Problem& p, const Inputs<T>& inputs) {
  double score =
      std::abs(p.scale) * LargestNorm(inputs.query, p.width) * LargestNorm(inputs.key, p.width);
  const auto largest = [](const std::vector<double>& numbers) {
    double most = 0;
    for (const double x : numbers) most = std::isfinite(x) ? std::max(most, std::abs(x)) : most;
    return most;
  };
  score += largest(p.alibi_slopes) * static_cast<double>(std::max(p.queries, p.keys));
  score += largest(p.sinks) + largest(MaskNumbers(p, inputs.mask));
  return {.score = score, .value = LargestNorm(inputs.value, 1)};
}

template <typename T>
constexpr double UnitRoundoff() {
  return UnitRoundoff(DTypeOf<T>());
}

// Of what is computed for numbers of S.
template <typename S>
Tolerance ToleranceOf(const Problem& p, const Magnitudes& magnitudes) {
  return ToleranceOf(DTypeOf<S>(), p, magnitudes);
}

// True where every element is within absolute + relative * |expected|; NaN is near NaN alone, an
// infinity near itself.
template <typename S>
::testing::AssertionResult Near(const std::vector<S>& stored, const std::vector<double>& expected,
                                double absolute, double relative = 0) {
  const std::vector<double> actual = ToDouble(stored);
  if (actual.size() != expected.size()) {
    return ::testing::AssertionFailure() << actual.size() << " elements, not " << expected.size();
  }
  int64_t bad = 0;
  size_t first = 0;
  for (size_t i = 0; i < actual.size(); ++i) {
    const double a = actual[i];
    const double e = expected[i];
    const bool near = std::isnan(e)   ? std::isnan(a)
                      : std::isinf(e) ? a == e
                                      : std::abs(a - e) <= absolute + relative * std::abs(e);
    if (near) continue;
    if (bad++ == 0) first = i;
  }
  if (bad == 0) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure()
         << bad << " of " << actual.size() << " elements, first [" << first
         << "]: " << absl::StrCat(actual[first]) << ", expected " << absl::StrCat(expected[first])
         << ", apart " << std::abs(actual[first] - expected[first]) << ", allowed "
         << absolute + relative * std::abs(expected[first]);
}

template <typename T>
::testing::AssertionResult SameBits(const std::vector<T>& a, const std::vector<T>& b) {
  if (a.size() != b.size()) {
    return ::testing::AssertionFailure() << a.size() << " and " << b.size() << " elements";
  }
  int64_t different = 0;
  size_t first = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    if (std::memcmp(&a[i], &b[i], sizeof(T)) == 0) continue;
    if (different++ == 0) first = i;
  }
  if (different == 0) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure()
         << different << " of " << a.size() << " differ, first [" << first
         << "]: " << ToDouble(a)[first] << " and " << ToDouble(b)[first] << ", apart "
         << ToDouble(a)[first] - ToDouble(b)[first];
}

template <typename T>
void ExpectSameBits(const Results<T>& a, const Results<T>& b) {
  EXPECT_TRUE(SameBits(a.output, b.output)) << "output";
  EXPECT_TRUE(SameBits(a.weights, b.weights)) << "weights";
  EXPECT_TRUE(SameBits(a.logsumexp, b.logsumexp)) << "logsumexp";
  EXPECT_TRUE(SameBits(a.key_sums, b.key_sums)) << "key_sums";
}

// mask: its bytes.
template <typename T>
::testing::AssertionResult HiddenWeightsAreZero(const Problem& p, const std::vector<T>& weights,
                                                const std::vector<unsigned char>& mask = {}) {
  const std::vector<double> numbers = ToDouble(weights);
  for (int64_t row = 0; row < p.batch * p.heads * p.queries; ++row) {
    const int64_t batch = row / (p.heads * p.queries);
    const HeadMask<Wide<T>> head_mask(p, mask.data(), batch, row / p.queries % p.heads);
    for (int64_t j = 0; j < p.keys; ++j) {
      if (OracleSees(p, batch, row % p.queries, j) && !head_mask.Hides(row % p.queries, j)) {
        continue;
      }
      const double weight = numbers[static_cast<size_t>(row * p.keys + j)];
      if (weight != 0) {
        return ::testing::AssertionFailure()
               << "row " << row << " gives key " << j << " the weight " << weight;
      }
    }
  }
  return ::testing::AssertionSuccess();
}

}  // namespace attendant::core

#endif  // ATTENDANT_TESTS_CORE_TESTING_H_
