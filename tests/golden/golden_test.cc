// Our answers against LibTorch's: in process on both paths and in both types, and over a server.
#include "tests/golden/golden.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "core/gradient.h"
#include "core/head.h"
#include "server/codec.h"
#include "tests/core/gradient_testing.h"
#include "tests/core/oracle.h"
#include "tests/core/testing.h"
#include "tests/server/testing.h"

namespace attendant::golden {
namespace {

using core::Near;
using server::ValuesOf;

constexpr v1::Path kPaths[] = {v1::PATH_EXPLICIT, v1::PATH_CHUNKED};

const std::vector<GoldenCase>& Cases() {
  static const auto* const cases = [] {
    auto loaded = LoadAll(ATTENDANT_GOLDEN_DIR);
    EXPECT_TRUE(loaded.ok()) << loaded.status();
    return new std::vector<GoldenCase>(loaded.ok() ? *std::move(loaded)
                                                   : std::vector<GoldenCase>());
  }();
  return *cases;
}

template <typename S>
core::Inputs<S> InputsOf(const v1::AttendRequest& request) {
  const std::string& mask = request.options().mask().data();
  return {ValuesOf<S>(request.query()),
          ValuesOf<S>(request.key()),
          ValuesOf<S>(request.value()),
          {mask.begin(), mask.end()}};
}

template <typename S>
constexpr v1::DataType ProtoType() {
  return std::is_same_v<S, core::Float16>    ? v1::DATA_TYPE_FLOAT16
         : std::is_same_v<S, core::BFloat16> ? v1::DATA_TYPE_BFLOAT16
         : std::is_same_v<S, float>          ? v1::DATA_TYPE_FLOAT32
                                             : v1::DATA_TYPE_FLOAT64;
}

template <typename S>
void Convert(v1::Tensor* tensor) {
  const std::vector<double> values = ValuesOf<double>(*tensor);
  const std::vector<core::Wide<S>> wide(values.begin(), values.end());
  server::SetTensor(ProtoType<S>(), {tensor->shape().begin(), tensor->shape().end()},
                    core::Stored<S>(wide), tensor);
}

// The request with its numbers stored as S.
template <typename S>
v1::AttendRequest Converted(v1::AttendRequest request) {
  Convert<S>(request.mutable_query());
  Convert<S>(request.mutable_key());
  Convert<S>(request.mutable_value());
  if (request.options().mask().dtype() == v1::DATA_TYPE_FLOAT64) {
    Convert<S>(request.mutable_options()->mutable_mask());
  }
  return request;
}

// LibTorch's answer has rounding errors of its own, as large as ours: twice the tolerance. Hers
// come from other places: she multiplies query and key by the root of the scale each.
void ExpectNear(const core::Problem& problem, const v1::AttendRequest& request,
                const v1::AttendResponse& expected, const v1::AttendResponse& actual) {
  const core::Tolerance t =
      core::ToleranceOf<double>(problem, core::MagnitudesOf(problem, InputsOf<double>(request)));
  const auto expect = [&](const char* name, const v1::Tensor& a, const v1::Tensor& e,
                          double absolute, double relative) {
    EXPECT_EQ(a.dtype(), e.dtype()) << name;
    EXPECT_TRUE(std::equal(a.shape().begin(), a.shape().end(), e.shape().begin(), e.shape().end()))
        << name;
    EXPECT_TRUE(Near(ValuesOf<double>(a), ValuesOf<double>(e), 2 * absolute, 2 * relative)) << name;
  };
  expect("output", actual.output(), expected.output(), t.output, 0);
  expect("weights", actual.weights(), expected.weights(), t.tiny, t.weight);
  expect("logsumexp", actual.logsumexp(), expected.logsumexp(), t.logsumexp, 0);
  expect("key_sums", actual.key_sums(), expected.key_sums(), t.tiny, t.key_sum);
}

template <typename T, typename Request, typename Response>
Response ComputeInProcess(const Request& request, core::Scheduler& scheduler) {
  Response response;
  server::CallData data;
  const Request arrived = server::Arrived(request, data);
  const auto problem = server::ProblemOf(arrived);
  EXPECT_TRUE(problem.ok()) << problem.status();
  const core::Resources resources{&data.memory->scratch, scheduler.threads()};
  absl::StatusOr<std::vector<core::Stage>> stages;
  if constexpr (std::is_same_v<Request, v1::HeadRequest>) {
    const auto tensors = *server::TensorsOf<T>(*problem, arrived, data);
    stages = core::HeadStages(*problem, tensors, resources);
  } else if constexpr (std::is_same_v<Request, v1::BackwardRequest>) {
    const auto tensors = *server::TensorsOf<T>(*problem, arrived, data, &response);
    stages = core::GradientStages(*problem, tensors, resources);
  } else {
    const auto tensors = *server::TensorsOf<T>(*problem, arrived, data);
    stages = core::AttendStages(*problem, tensors, resources);
  }
  EXPECT_TRUE(stages.ok()) << stages.status();
  if (auto copy = data.in.Copy()) stages->insert(stages->begin(), *std::move(copy));
  EXPECT_TRUE(scheduler.Run(*std::move(stages)).ok());
  return server::Parsed<Response>(data.out.TakeMessage(response));
}

// The arrays of a head, in the lesson's order.
std::vector<std::pair<std::string, const v1::Tensor*>> ArraysOf(const v1::HeadResponse& response) {
  return {{"query", &response.query()},     {"key", &response.key()},
          {"value", &response.value()},     {"logits", &response.logits()},
          {"weights", &response.weights()}, {"context", &response.context()},
          {"output", &response.output()}};
}

double Largest(const std::vector<double>& values) {
  double largest = 0;
  for (const double value : values) largest = std::max(largest, std::abs(value));
  return largest;
}

// Sums of at most a few dozen terms stand between the input and each array.
void ExpectNear(const v1::HeadResponse& expected, const v1::HeadResponse& actual) {
  const auto e = ArraysOf(expected);
  const auto a = ArraysOf(actual);
  for (size_t i = 0; i < e.size(); ++i) {
    const std::vector<double> values = ValuesOf<double>(*e[i].second);
    EXPECT_TRUE(Near(ValuesOf<double>(*a[i].second), values, 64 * 2.2e-16 * (1 + Largest(values))))
        << e[i].first;
  }
}

class GoldenTest : public testing::Test {
 protected:
  core::Scheduler scheduler_{2};
};

TEST_F(GoldenTest, TheSetIsThere) {
  EXPECT_GE(Cases().size(), 90u);
  for (const GoldenCase& golden : Cases()) {
    EXPECT_THAT(golden.origin(), testing::HasSubstr("LibTorch")) << golden.name();
  }
}

TEST_F(GoldenTest, Float64MeetsLibTorchOnBothPaths) {
  for (const GoldenCase& golden : Cases()) {
    for (const v1::Path path : kPaths) {
      SCOPED_TRACE(golden.name() + " " + v1::Path_Name(path));
      if (golden.has_attend()) {
        v1::AttendRequest request = golden.attend();
        request.mutable_options()->set_path(path);
        ExpectNear(
            *server::ProblemOf(server::HeadOf(request)), request, golden.attend_response(),
            ComputeInProcess<double, v1::AttendRequest, v1::AttendResponse>(request, scheduler_));
      } else if (golden.has_head()) {
        v1::HeadRequest request = golden.head();
        request.mutable_options()->set_path(path);
        ExpectNear(
            golden.head_response(),
            ComputeInProcess<double, v1::HeadRequest, v1::HeadResponse>(request, scheduler_));
      }
    }
  }
}

// In double; the inputs may be of another type.
core::Inputs<double> InputsOf(const v1::BackwardRequest& request) {
  const std::string& mask = request.options().mask().data();
  return {ValuesOf<double>(request.query()),
          ValuesOf<double>(request.key()),
          ValuesOf<double>(request.value()),
          {mask.begin(), mask.end()}};
}

// The request and its expected answer are in double; what computes it, in S.
template <typename S>
void ExpectGradients(const GoldenCase& golden, v1::Path path, core::Scheduler& scheduler) {
  SCOPED_TRACE(golden.name() + " " + v1::Path_Name(path));
  v1::BackwardRequest request = golden.backward();
  request.mutable_options()->set_path(path);
  const core::Inputs<double> inputs = InputsOf(request);
  const core::Problem exact = server::ProblemOf(server::HeadOf(request))->attend;
  const core::OracleGradients oracle =
      core::GradientOracleOf(exact, inputs, ValuesOf<double>(request.d_output()));
  for (v1::Tensor* const tensor : {request.mutable_query(), request.mutable_key(),
                                   request.mutable_value(), request.mutable_d_output()}) {
    Convert<S>(tensor);
  }
  if (request.options().mask().dtype() == v1::DATA_TYPE_FLOAT64) {
    Convert<S>(request.mutable_options()->mutable_mask());
  }
  const auto actual =
      ComputeInProcess<S, v1::BackwardRequest, v1::BackwardResponse>(request, scheduler);
  const v1::BackwardResponse& expected = golden.backward_response();
  // LibTorch's own rounding is as large as ours in double.
  const double relative =
      2 * core::GradientTolerance<S>(
              exact, core::ToleranceOf<S>(exact, core::MagnitudesOf(exact, inputs)), false);
  const auto expect = [&](const char* name, const v1::Tensor& a, const v1::Tensor& e,
                          double largest) {
    EXPECT_TRUE(std::equal(a.shape().begin(), a.shape().end(), e.shape().begin(), e.shape().end()))
        << name;
    EXPECT_TRUE(
        Near(ValuesOf<S>(a), ValuesOf<double>(e), relative * largest, core::GradientRounding<S>()))
        << name;
  };
  expect("d_query", actual.d_query(), expected.d_query(), oracle.largest.query);
  expect("d_key", actual.d_key(), expected.d_key(), oracle.largest.key);
  expect("d_value", actual.d_value(), expected.d_value(), oracle.largest.value);
  EXPECT_EQ(actual.has_d_mask(), expected.has_d_mask());
  if (expected.has_d_mask()) {
    expect("d_mask", actual.d_mask(), expected.d_mask(), oracle.largest.mask);
  }
  EXPECT_TRUE(Near(std::vector<double>(actual.d_sinks().begin(), actual.d_sinks().end()),
                   {expected.d_sinks().begin(), expected.d_sinks().end()},
                   relative * oracle.largest.sinks))
      << "d_sinks";
}

TEST_F(GoldenTest, GradientsMeetLibTorchsAutograd) {
  int cases = 0;
  for (const GoldenCase& golden : Cases()) {
    if (!golden.has_backward()) continue;
    ++cases;
    for (const v1::Path path : kPaths) {
      ExpectGradients<double>(golden, path, scheduler_);
      if (golden.name().rfind("backward_float16_", 0) == 0) {
        ExpectGradients<float>(golden, path, scheduler_);
        ExpectGradients<core::Float16>(golden, path, scheduler_);
      }
      if (golden.name().rfind("backward_bfloat16_", 0) == 0) {
        ExpectGradients<float>(golden, path, scheduler_);
        ExpectGradients<core::BFloat16>(golden, path, scheduler_);
      }
    }
  }
  EXPECT_GE(cases, 50);
}

TEST_F(GoldenTest, Float32MeetsTheFloat64AnswerToTheRoundedInputs) {
  for (const GoldenCase& golden : Cases()) {
    if (!golden.has_attend()) continue;
    v1::AttendRequest request = Converted<float>(golden.attend());
    for (const v1::Path path : kPaths) {
      SCOPED_TRACE(golden.name() + " " + v1::Path_Name(path));
      request.mutable_options()->set_path(path);
      const core::Problem problem = *server::ProblemOf(server::HeadOf(request));
      const core::Inputs<float> inputs = InputsOf<float>(request);
      const core::OracleResult oracle = core::OracleOf(problem, inputs);
      const core::Tolerance t =
          core::ToleranceOf<float>(problem, core::MagnitudesOf(problem, inputs));
      const auto actual =
          ComputeInProcess<float, v1::AttendRequest, v1::AttendResponse>(request, scheduler_);
      EXPECT_TRUE(Near(ValuesOf<float>(actual.output()), oracle.output, t.output));
      EXPECT_TRUE(Near(ValuesOf<float>(actual.logsumexp()), oracle.logsumexp, t.logsumexp));
      if (problem.return_weights) {
        EXPECT_TRUE(Near(ValuesOf<float>(actual.weights()), oracle.weights, t.tiny, t.weight));
      }
      if (problem.return_key_sums) {
        EXPECT_TRUE(Near(ValuesOf<float>(actual.key_sums()), oracle.key_sums, t.tiny, t.key_sum));
      }
    }
  }
}

// Cases whose inputs half precision holds exactly: LibTorch's float64 answer is to the same
// problem.
template <typename S>
int ExpectHalves(const std::string& prefix, core::Scheduler& scheduler) {
  int cases = 0;
  for (const GoldenCase& golden : Cases()) {
    if (golden.name().rfind(prefix, 0) != 0) continue;
    ++cases;
    v1::AttendRequest request = Converted<S>(golden.attend());
    for (const v1::Path path : kPaths) {
      SCOPED_TRACE(golden.name() + " " + v1::Path_Name(path));
      request.mutable_options()->set_path(path);
      const core::Problem problem = *server::ProblemOf(server::HeadOf(request));
      const core::Tolerance t =
          core::ToleranceOf<S>(problem, core::MagnitudesOf(problem, InputsOf<S>(request)));
      const auto actual =
          ComputeInProcess<S, v1::AttendRequest, v1::AttendResponse>(request, scheduler);
      const v1::AttendResponse& expected = golden.attend_response();
      EXPECT_TRUE(
          Near(ValuesOf<S>(actual.output()), ValuesOf<double>(expected.output()), t.output));
      EXPECT_TRUE(Near(ValuesOf<float>(actual.logsumexp()), ValuesOf<double>(expected.logsumexp()),
                       t.logsumexp));
      EXPECT_TRUE(Near(ValuesOf<S>(actual.weights()), ValuesOf<double>(expected.weights()), t.tiny,
                       t.weight));
      EXPECT_TRUE(Near(ValuesOf<float>(actual.key_sums()), ValuesOf<double>(expected.key_sums()),
                       t.tiny, t.key_sum));
    }
  }
  return cases;
}

TEST_F(GoldenTest, HalvesMeetTheFloat64Answer) {
  EXPECT_EQ(ExpectHalves<core::Float16>("float16_", scheduler_), 3);
  EXPECT_EQ(ExpectHalves<core::BFloat16>("bfloat16_", scheduler_), 3);
}

TEST_F(GoldenTest, AServerAnswersAsLibTorch) {
  const auto server = server::Server::Start(server::LoopbackConfig());
  ASSERT_TRUE(server.ok()) << server.status();
  const auto stub = v1::Attention::NewStub(server::ChannelTo(**server));
  for (const GoldenCase& golden : Cases()) {
    SCOPED_TRACE(golden.name());
    grpc::ClientContext context;
    server::SetTestDeadline(context);
    if (golden.has_attend()) {
      v1::AttendResponse response;
      const grpc::Status status = stub->Attend(&context, golden.attend(), &response);
      ASSERT_TRUE(status.ok()) << status.error_message();
      ExpectNear(*server::ProblemOf(server::HeadOf(golden.attend())), golden.attend(),
                 golden.attend_response(), response);
    } else if (golden.has_head()) {
      v1::HeadResponse response;
      const grpc::Status status = stub->Head(&context, golden.head(), &response);
      ASSERT_TRUE(status.ok()) << status.error_message();
      ExpectNear(golden.head_response(), response);
    }
  }
}

class LessonTest : public GoldenTest {
 protected:
  void SetUp() override {
    auto lesson = Load(ATTENDANT_GOLDEN_DIR "/lesson_head.golden");
    ASSERT_TRUE(lesson.ok()) << lesson.status();
    lesson_ = *std::move(lesson);
  }

  GoldenCase lesson_;
};

TEST_F(LessonTest, Float64IsWithin1e15OfLibTorchInEveryArray) {
  for (const v1::Path path : kPaths) {
    v1::HeadRequest request = lesson_.head();
    request.mutable_options()->set_path(path);
    const auto actual =
        ComputeInProcess<double, v1::HeadRequest, v1::HeadResponse>(request, scheduler_);
    const auto ours = ArraysOf(actual);
    const auto theirs = ArraysOf(lesson_.head_response());
    for (size_t i = 0; i < ours.size(); ++i) {
      EXPECT_TRUE(
          Near(ValuesOf<double>(*ours[i].second), ValuesOf<double>(*theirs[i].second), 1e-15))
          << ours[i].first;
    }
  }
}

// The rounding of the inputs alone moves the projections by more: those are compared with the
// float64 answer to the rounded inputs, what attention makes of them with LibTorch's own as well.
TEST_F(LessonTest, Float32IsWithin2e7OfLibTorch) {
  for (const v1::Path path : kPaths) {
    v1::HeadRequest request = lesson_.head();
    v1::HeadRequest rounded = lesson_.head();
    request.mutable_options()->set_path(path);
    const std::pair<v1::Tensor*, v1::Tensor*> inputs[] = {
        {request.mutable_x(), rounded.mutable_x()},
        {request.mutable_w_q(), rounded.mutable_w_q()},
        {request.mutable_w_k(), rounded.mutable_w_k()},
        {request.mutable_w_v(), rounded.mutable_w_v()},
        {request.mutable_w_o(), rounded.mutable_w_o()}};
    for (const auto& [narrow, wide] : inputs) {
      Convert<float>(narrow);
      const std::vector<float> values = ValuesOf<float>(*narrow);
      server::SetTensor(v1::DATA_TYPE_FLOAT64, {wide->shape().begin(), wide->shape().end()},
                        std::vector<double>(values.begin(), values.end()), wide);
    }
    const auto actual =
        ComputeInProcess<float, v1::HeadRequest, v1::HeadResponse>(request, scheduler_);
    const auto reference =
        ComputeInProcess<double, v1::HeadRequest, v1::HeadResponse>(rounded, scheduler_);
    const auto ours = ArraysOf(actual);
    const auto exact = ArraysOf(reference);
    for (size_t i = 0; i < ours.size(); ++i) {
      EXPECT_TRUE(Near(ValuesOf<float>(*ours[i].second), ValuesOf<double>(*exact[i].second), 2e-7))
          << ours[i].first;
    }
    const v1::HeadResponse& libtorch = lesson_.head_response();
    EXPECT_TRUE(
        Near(ValuesOf<float>(actual.weights()), ValuesOf<double>(libtorch.weights()), 2e-7));
    EXPECT_TRUE(
        Near(ValuesOf<float>(actual.context()), ValuesOf<double>(libtorch.context()), 2e-7));
    EXPECT_TRUE(Near(ValuesOf<float>(actual.output()), ValuesOf<double>(libtorch.output()), 2e-7));
  }
}

TEST_F(LessonTest, TheTableIsTheLessons) {
  const std::vector<double> weights = ValuesOf<double>(lesson_.head_response().weights());
  const std::vector<double> table = {0.221, 0.248, 0.193, 0.155, 0.184, 0.190, 0.190, 0.197, 0.188,
                                     0.235, 0.260, 0.258, 0.197, 0.143, 0.142, 0.245, 0.234, 0.204,
                                     0.175, 0.141, 0.151, 0.202, 0.198, 0.184, 0.266};
  EXPECT_TRUE(Near(weights, table, 0.0005));
}

TEST(LoadTest, ErrorsNameTheFile) {
  EXPECT_THAT(Load("/no/such.golden").status().ToString(), testing::HasSubstr("/no/such.golden"));
  EXPECT_EQ(Load("/no/such.golden").status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(LoadAll("/no/such/folder").status().code(), absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace attendant::golden
