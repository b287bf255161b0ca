#include "client/cli/lesson_claims.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "client/cli/lesson.h"

namespace attendant::cli {
namespace {

// A few roundings of numbers below 2, in double precision; and where a product with another matrix
// comes between.
constexpr double kRounding = 1e-15;
constexpr double kRoundingOfProducts = 1e-14;

// A row-major matrix of the lesson.
struct Matrix {
  std::vector<double> numbers;
  int64_t rows = 0;
  int64_t columns = 0;

  double& At(int64_t row, int64_t column) {
    return numbers[static_cast<size_t>(row * columns + column)];
  }
};

Matrix MatrixOf(const v1::Tensor& tensor) {
  const auto* const numbers = reinterpret_cast<const double*>(tensor.data().data());
  return {
      {numbers, numbers + tensor.data().size() / sizeof(double)}, tensor.shape(0), tensor.shape(1)};
}

// The arrays of the lesson's head.
struct Head {
  Matrix x, w_q, w_k, w_v, w_o;

  explicit Head(const golden::GoldenCase& lesson)
      : x(MatrixOf(lesson.head().x())),
        w_q(MatrixOf(lesson.head().w_q())),
        w_k(MatrixOf(lesson.head().w_k())),
        w_v(MatrixOf(lesson.head().w_v())),
        w_o(MatrixOf(lesson.head().w_o())) {}
};

// The head with all that lies between, computed in T.
template <typename T = double>
absl::StatusOr<HeadResult> Compute(Client& client, const Head& head,
                                   const v1::AttendOptions& options = {}) {
  std::vector<std::vector<T>> stored;
  stored.reserve(5);  // the refs point into it
  const auto ref = [&](const Matrix& matrix) {
    stored.emplace_back(matrix.numbers.begin(), matrix.numbers.end());
    return TensorRef(stored.back(), {matrix.rows, matrix.columns});
  };
  HeadInputs inputs{ref(head.x), ref(head.w_q), ref(head.w_k), ref(head.w_v), ref(head.w_o)};
  inputs.return_intermediates = true;
  return client.Head(inputs, options);
}

// Infinity where the numbers of elements differ, or there are none; NaN where one is.
template <typename A, typename B>
double LargestDifference(absl::Span<const A> a, absl::Span<const B> b) {
  if (a.empty() || a.size() != b.size()) return std::numeric_limits<double>::infinity();
  double largest = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double difference = std::abs(static_cast<double>(a[i]) - static_cast<double>(b[i]));
    if (!(difference <= largest)) largest = difference;
  }
  return largest;
}

// How far any row's weights are from a sum of 1.
template <typename T>
double LargestFromOne(const Tensor& weights) {
  const auto keys = static_cast<size_t>(weights.shape.back());
  const absl::Span<const T> numbers = weights.values<T>();
  if (numbers.empty()) return std::numeric_limits<double>::infinity();
  double largest = 0;
  for (size_t row = 0; row < numbers.size(); row += keys) {
    double sum = 0;
    for (const T weight : numbers.subspan(row, keys)) sum += static_cast<double>(weight);
    const double difference = std::abs(sum - 1);
    if (!(difference <= largest)) largest = difference;
  }
  return largest;
}

absl::StatusOr<Seen> AgreesWithLibTorch(Client& client, const golden::GoldenCase& lesson) {
  const auto result = Compute(client, Head(lesson));
  if (!result.ok()) return result.status();
  const Matrix output = MatrixOf(lesson.head_response().output());
  return Seen{
      LargestDifference(result->output.values<double>(), absl::MakeConstSpan(output.numbers)),
      kRounding};
}

absl::StatusOr<Seen> RowsSumToOne(Client& client, const golden::GoldenCase& lesson) {
  const auto result = Compute(client, Head(lesson));
  if (!result.ok()) return result.status();
  return Seen{LargestFromOne<double>(result->weights), kRounding};
}

absl::StatusOr<Seen> OneMatrixMakesSymmetricLogits(Client& client,
                                                   const golden::GoldenCase& lesson) {
  Head head(lesson);
  head.w_k = head.w_q;
  const auto result = Compute(client, head);
  if (!result.ok()) return result.status();
  const absl::Span<const double> logits = result->logits.values<double>();
  std::vector<double> transposed;
  const auto tokens = static_cast<size_t>(head.x.rows);
  if (logits.size() == tokens * tokens) {
    for (size_t i = 0; i < logits.size(); ++i) {
      transposed.push_back(logits[i % tokens * tokens + i / tokens]);
    }
  }
  return Seen{LargestDifference(logits, absl::MakeConstSpan(transposed)), kRounding};
}

// An invertible M of the head's width, as a product of shears I + factor e_from e_to^T, whose
// inverses are I - factor e_from e_to^T: nothing has to be inverted, and what M is applied to only
// has multiples of one column, or row, added to another.
struct Shear {
  int64_t from;
  int64_t to;
  double factor;
};
constexpr Shear kShears[] = {{0, 1, 0.5}, {2, 3, -1}, {1, 2, 2}, {3, 0, -0.5}, {1, 3, 0.75}};

// W M.
void TimesM(Matrix* w) {
  for (const Shear& shear : kShears) {
    for (int64_t row = 0; row < w->rows; ++row) {
      w->At(row, shear.to) += shear.factor * w->At(row, shear.from);
    }
  }
}

// W M^-T: the transpose of a shear's inverse is I - factor e_to e_from^T.
void TimesInverseTransposeOfM(Matrix* w) {
  for (const Shear& shear : kShears) {
    for (int64_t row = 0; row < w->rows; ++row) {
      w->At(row, shear.from) -= shear.factor * w->At(row, shear.to);
    }
  }
}

// M^-1 W: the first shear's inverse comes first.
void InverseOfMTimes(Matrix* w) {
  for (const Shear& shear : kShears) {
    for (int64_t column = 0; column < w->columns; ++column) {
      w->At(shear.from, column) -= shear.factor * w->At(shear.to, column);
    }
  }
}

// The largest difference of the output, which is of both heads.
absl::StatusOr<Seen> Unchanged(Client& client, const Head& head, const Head& other) {
  const auto before = Compute(client, head);
  if (!before.ok()) return before.status();
  const auto after = Compute(client, other);
  if (!after.ok()) return after.status();
  return Seen{LargestDifference(after->output.values<double>(), before->output.values<double>()),
              kRoundingOfProducts};
}

absl::StatusOr<Seen> QkCircuit(Client& client, const golden::GoldenCase& lesson) {
  Head other(lesson);
  TimesM(&other.w_q);
  TimesInverseTransposeOfM(&other.w_k);
  return Unchanged(client, Head(lesson), other);
}

absl::StatusOr<Seen> OvCircuit(Client& client, const golden::GoldenCase& lesson) {
  Head other(lesson);
  TimesM(&other.w_v);
  InverseOfMTimes(&other.w_o);
  return Unchanged(client, Head(lesson), other);
}

// By a mask of (T, 1): its own number for each row.
absl::StatusOr<Seen> RowConstantCancels(Client& client, const golden::GoldenCase& lesson) {
  const Head head(lesson);
  std::vector<double> constants;
  for (int64_t row = 0; row < head.x.rows; ++row) {
    constants.push_back(7 * static_cast<double>(row) - 10);
  }
  v1::AttendOptions options;
  options.mutable_mask()->set_dtype(v1::DATA_TYPE_FLOAT64);
  options.mutable_mask()->add_shape(head.x.rows);
  options.mutable_mask()->add_shape(1);
  options.mutable_mask()->set_data(constants.data(), constants.size() * sizeof(double));
  const auto plain = Compute(client, head);
  if (!plain.ok()) return plain.status();
  const auto shifted = Compute(client, head, options);
  if (!shifted.ok()) return shifted.status();
  return Seen{LargestDifference(shifted->output.values<double>(), plain->output.values<double>()),
              kRoundingOfProducts};
}

absl::StatusOr<Seen> PathsAgree(Client& client, const golden::GoldenCase& lesson) {
  v1::AttendOptions options;
  options.set_path(v1::PATH_EXPLICIT);
  const auto explicit_path = Compute(client, Head(lesson), options);
  if (!explicit_path.ok()) return explicit_path.status();
  options.set_path(v1::PATH_CHUNKED);
  const auto chunked = Compute(client, Head(lesson), options);
  if (!chunked.ok()) return chunked.status();
  return Seen{
      LargestDifference(chunked->output.values<double>(), explicit_path->output.values<double>()),
      kRounding};
}

// The lesson's 1e-7, to the rounding: one of float32's at the size of these values is 1.2e-7, and
// each kernel sums in its own order.
constexpr double kFloat32Rounding = 2e-7;

// The lesson's queries, keys and values as a call of Attend computes them in T. They are rounded to
// float32 for either: what differs is the arithmetic alone.
template <typename T>
absl::StatusOr<std::vector<T>> AttendInTypeOf(Client& client, const golden::GoldenCase& lesson) {
  const v1::HeadResponse& arrays = lesson.head_response();
  std::vector<std::vector<T>> stored;
  stored.reserve(3);  // the refs point into it
  const auto ref = [&](const v1::Tensor& tensor) {
    const auto* const numbers = reinterpret_cast<const double*>(tensor.data().data());
    stored.emplace_back();
    for (size_t i = 0; i < tensor.data().size() / sizeof(double); ++i) {
      stored.back().push_back(static_cast<T>(static_cast<float>(numbers[i])));
    }
    return TensorRef(stored.back(), {tensor.shape().begin(), tensor.shape().end()});
  };
  const auto result = client.Attend(ref(arrays.query()), ref(arrays.key()), ref(arrays.value()));
  if (!result.ok()) return result.status();
  const absl::Span<const T> output = result->output.template values<T>();
  return std::vector<T>(output.begin(), output.end());
}

absl::StatusOr<Seen> Float32Agrees(Client& client, const golden::GoldenCase& lesson) {
  const auto wide = AttendInTypeOf<double>(client, lesson);
  if (!wide.ok()) return wide.status();
  const auto narrow = AttendInTypeOf<float>(client, lesson);
  if (!narrow.ok()) return narrow.status();
  return Seen{LargestDifference(absl::MakeConstSpan(*narrow), absl::MakeConstSpan(*wide)),
              kFloat32Rounding};
}

// Scaled so that the largest logit is 1000. Without the row's maximum subtracted its exponential is
// infinite in float32, and the row's weights NaN.
absl::StatusOr<Seen> LargeLogitsStayFinite(Client& client, const golden::GoldenCase& lesson) {
  constexpr double kLargest = 1000;
  const Head head(lesson);
  v1::AttendOptions options;
  options.set_scale(1);
  const auto unscaled = Compute(client, head, options);
  if (!unscaled.ok()) return unscaled.status();
  const absl::Span<const double> scores = unscaled->logits.values<double>();
  if (scores.empty()) return absl::InternalError("the server returned no logits");
  options.set_scale(kLargest / *std::max_element(scores.begin(), scores.end()));
  const auto result = Compute<float>(client, head, options);
  if (!result.ok()) return result.status();
  Seen seen{LargestFromOne<float>(result->weights), 1e-6};
  const absl::Span<const float> logits = result->logits.values<float>();
  const absl::Span<const float> output = result->output.values<float>();
  const bool is_large =
      std::any_of(logits.begin(), logits.end(), [](float logit) { return logit > 999; });
  const bool is_finite =
      std::all_of(output.begin(), output.end(), [](float number) { return std::isfinite(number); });
  if (!is_large || !is_finite) seen.number = std::numeric_limits<double>::infinity();
  return seen;
}

// How much more workspace twice the tokens take on a path, as a factor.
absl::StatusOr<double> GrowthOfWorkspace(Client& client, v1::Path path) {
  // Enough for many threads to have work in either call.
  constexpr int64_t kHeads = 4;
  constexpr int64_t kTokens = 1024;
  constexpr int64_t kWidth = 8;
  const std::vector<float> numbers(2 * kHeads * kTokens * kWidth, 0.5f);
  v1::AttendOptions options;
  options.set_path(path);
  double bytes[2] = {};
  for (const int64_t doubled : {0, 1}) {
    const std::vector<int64_t> shape = {1, kHeads, kTokens << doubled, kWidth};
    const auto count = static_cast<size_t>(kHeads * shape[2] * kWidth);
    const TensorRef tensor(absl::MakeConstSpan(numbers).first(count), shape);
    const auto result = client.Attend(tensor, tensor, tensor, options);
    if (!result.ok()) return result.status();
    bytes[doubled] = static_cast<double>(result->stats.peak_workspace_bytes());
  }
  return bytes[1] / bytes[0];
}

absl::StatusOr<Seen> ExplicitMemoryIsQuadratic(Client& client, const golden::GoldenCase&) {
  const auto growth = GrowthOfWorkspace(client, v1::PATH_EXPLICIT);
  if (!growth.ok()) return growth.status();
  return Seen{std::abs(*growth - 4), 0.04};
}

absl::StatusOr<Seen> ChunkedMemoryIsConstant(Client& client, const golden::GoldenCase&) {
  const auto growth = GrowthOfWorkspace(client, v1::PATH_CHUNKED);
  if (!growth.ok()) return growth.status();
  return Seen{std::abs(*growth - 1), 0.01};
}

constexpr LessonClaim kClaims[] = {
    {"float64", "float64 agrees with LibTorch", AgreesWithLibTorch},
    {"rows", "each row of weights sums to 1", RowsSumToOne},
    {"symmetric", "W_k = W_q makes the logits symmetric", OneMatrixMakesSymmetricLogits},
    {"qk-circuit", "(W_q M, W_k M^-T) leaves the head unchanged", QkCircuit},
    {"ov-circuit", "(W_v M, M^-1 W_o) leaves the head unchanged", OvCircuit},
    {"row-constant", "a constant added to a row's logits cancels", RowConstantCancels},
    {"paths", "the chunked path is the explicit one", PathsAgree},
    {"float32", "attention in float32 agrees with float64", Float32Agrees},
    {"overflow", "logits of 1000 stay finite in float32, rows sum to 1", LargeLogitsStayFinite},
    {"explicit-memory", "explicit: 4 times the workspace for twice the tokens",
     ExplicitMemoryIsQuadratic},
    {"chunked-memory", "chunked: the same workspace for twice the tokens", ChunkedMemoryIsConstant},
};

}  // namespace

absl::Span<const LessonClaim> LessonClaims() { return kClaims; }

ExitCode RunLessonClaims(Client& client, const std::string& name) {
  golden::GoldenCase lesson;
  if (!lesson.ParseFromArray(LessonGolden().data(), static_cast<int>(LessonGolden().size()))) {
    return Fail(kFailure, "the stored lesson cannot be read");
  }
  ExitCode code = kSuccess;
  for (const LessonClaim& claim : kClaims) {
    if (!name.empty() && name != claim.name) continue;
    const auto seen = claim.check(client, lesson);
    if (!seen.ok()) return Fail(seen.status());
    const bool holds = seen->number <= seen->bound;
    std::printf("%-16s %-53s off by %-9.3g allowed %-6.3g %s\n", claim.name, claim.says,
                seen->number, seen->bound, holds ? "ok" : "FAILED");
    if (!holds) code = kFailure;
  }
  return code;
}

}  // namespace attendant::cli
