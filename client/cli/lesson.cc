#include "client/cli/lesson.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "golden.pb.h"

namespace attendant::cli {
namespace {

constexpr const char* kWords[] = {"chai", "is", "very", "hot", "today"};
// Double precision's epsilon is 2.2e-16; every value here is below 2.
constexpr double kRounding = 1e-15;

struct Array {
  const char* name;
  Tensor ours;
  const v1::Tensor* libtorch;  // null for an input
};

TensorRef Ref(const v1::Tensor& tensor) {
  return {tensor.dtype(), {tensor.shape().begin(), tensor.shape().end()}, tensor.data()};
}

// Without the axes of one batch and one head.
std::string ShapeOf(const Tensor& tensor) {
  const size_t first = tensor.shape.size() - std::min<size_t>(tensor.shape.size(), 2);
  return absl::StrCat(
      "(",
      absl::StrJoin(tensor.shape.begin() + static_cast<int64_t>(first), tensor.shape.end(), ", "),
      ")");
}

// Infinity where the shapes differ; NaN where a value is NaN.
double LargestDifference(const Tensor& ours, const v1::Tensor& theirs) {
  const absl::Span<const double> a = ours.values<double>();
  const auto* const b = reinterpret_cast<const double*>(theirs.data().data());
  if (a.empty() || ours.bytes.size() != theirs.data().size()) {
    return std::numeric_limits<double>::infinity();
  }
  double largest = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double difference = std::abs(a[i] - b[i]);
    if (!(difference <= largest)) largest = difference;
  }
  return largest;
}

void PrintTable(const Tensor& weights) {
  const absl::Span<const double> values = weights.values<double>();
  const size_t words = std::size(kWords);
  std::printf("\nweights (a row for the word that looks, a column for the word it looks at):\n%8s",
              "");
  for (const char* const word : kWords) std::printf("%8s", word);
  std::printf("%10s\n", "row sum");
  for (size_t row = 0; row < words && (row + 1) * words <= values.size(); ++row) {
    std::printf("%8s", kWords[row]);
    double sum = 0;
    for (size_t column = 0; column < words; ++column) {
      const double weight = values[row * words + column];
      std::printf("%8.3f", weight);
      sum += weight;
    }
    std::printf("%10.6f\n", sum);
  }
}

}  // namespace

ExitCode RunLesson(Client& client) {
  golden::GoldenCase golden;
  if (!golden.ParseFromArray(LessonGolden().data(), static_cast<int>(LessonGolden().size()))) {
    return Fail(kFailure, "the stored lesson cannot be read");
  }
  const v1::HeadRequest& request = golden.head();
  const v1::HeadResponse& expected = golden.head_response();
  auto result = client.Head({Ref(request.x()), Ref(request.w_q()), Ref(request.w_k()),
                             Ref(request.w_v()), Ref(request.w_o()), 1,
                             /*return_intermediates=*/true});
  if (!result.ok()) return Fail(result.status());
  const Array arrays[] = {
      {"X", {v1::DATA_TYPE_FLOAT64, {request.x().shape(0), request.x().shape(1)}, ""}, nullptr},
      {"Q", std::move(result->query), &expected.query()},
      {"K", std::move(result->key), &expected.key()},
      {"V", std::move(result->value), &expected.value()},
      {"logits", std::move(result->logits), &expected.logits()},
      {"A", std::move(result->weights), &expected.weights()},
      {"context", std::move(result->context), &expected.context()},
      {"output", std::move(result->output), &expected.output()},
  };
  std::printf("%-8s %-8s %s\n", "array", "shape", "largest difference from LibTorch");
  double largest = 0;
  for (const Array& array : arrays) {
    std::printf("%-8s %-8s ", array.name, ShapeOf(array.ours).c_str());
    if (array.libtorch == nullptr) {
      std::printf("(input)\n");
      continue;
    }
    const double difference = LargestDifference(array.ours, *array.libtorch);
    std::printf("%.3g\n", difference);
    if (!(difference <= largest)) largest = difference;
  }
  PrintTable(arrays[5].ours);
  std::printf("\nlargest difference from %s: %.3g\n", golden.origin().c_str(), largest);
  if (largest <= kRounding) return kSuccess;
  return Fail(kFailure, absl::StrCat("the difference is more than rounding (", kRounding, ")"));
}

}  // namespace attendant::cli
