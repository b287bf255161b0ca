#include "server/metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_split.h"

namespace attendant::server {
namespace {

using ::testing::HasSubstr;

// Series without the values that change by themselves.
size_t SeriesIn(const std::string& text) {
  const std::vector<std::string> lines = absl::StrSplit(text, '\n', absl::SkipEmpty());
  return static_cast<size_t>(
      std::count_if(lines.begin(), lines.end(), [](const auto& line) { return line[0] != '#'; }));
}

class MetricsTest : public testing::Test {
 protected:
  Metrics metrics_{{"1.2.3", "a/b", "c"}};
};

TEST_F(MetricsTest, EverySeriesIsThereAtZeroFromTheStart) {
  const std::string text = metrics_.Text();
  for (const char* const line :
       {"attendant_requests_total{code=\"OK\",method=\"Attend\",path=\"chunked\"} 0",
        "attendant_requests_total{code=\"RESOURCE_EXHAUSTED\",method=\"Head\",path=\"none\"} 0",
        "attendant_request_duration_seconds_count{method=\"Info\",path=\"none\"} 0",
        "attendant_queue_duration_seconds_count 0",
        "attendant_compute_duration_seconds_count{path=\"explicit\",tokens=\"64\"} 0",
        "attendant_compute_duration_seconds_count{path=\"chunked\",tokens=\"1048576\"} 0",
        "attendant_peak_workspace_bytes{path=\"chunked\",tokens=\"more\"} 0",
        "attendant_flops_total{path=\"explicit\"} 0",
        "attendant_inflight_requests 0",
        "attendant_inflight_flops 0",
        "attendant_shed_total{reason=\"draining\"} 0",
        "attendant_shed_total{reason=\"memory\"} 0",
        "attendant_shed_total{reason=\"queue_full\"} 0",
        "attendant_shed_total{reason=\"queue_wait\"} 0",
        "attendant_shed_total{reason=\"never_fits\"} 0",
        "attendant_queue_depth 0",
        "attendant_requests_total{code=\"UNIMPLEMENTED\",method=\"unknown\",path=\"none\"} 0",
        "attendant_requests_total{code=\"OK\",method=\"AttendStream\",path=\"chunked\"} 0",
        "attendant_cancelled_total{stage=\"receive\"} 0",
        "attendant_cancelled_total{stage=\"queue\"} 0",
        "attendant_cancelled_total{stage=\"compute\"} 0",
        "attendant_cancelled_total{stage=\"send\"} 0",
        "attendant_explicit_equivalent_bytes_total{tokens=\"128\"} 0",
        "attendant_machine_peak_flops{dtype=\"float32\"} 0",
        "attendant_memory_reserved_bytes ",
        "attendant_memory_budget_bytes ",
        "process_resident_memory_bytes ",
        "process_resident_memory_peak_bytes ",
        "process_open_fds ",
        "process_cpu_seconds_total ",
        "attendant_build_info{kernel=\"a/b\",simd=\"c\",version=\"1.2.3\"} 1"}) {
    EXPECT_THAT(text, HasSubstr(line));
  }
}

TEST_F(MetricsTest, NoCallAddsASeries) {
  const size_t before = SeriesIn(metrics_.Text());
  for (int64_t tokens = 0; tokens < 100'000; tokens += 97) {
    ComputeRecord record;
    record.tokens = tokens;
    metrics_.JobCompleted(record);
  }
  metrics_.RequestStarted();
  metrics_.RequestEnded(Method::kHead, PathLabel::kExplicit, static_cast<absl::StatusCode>(99), 1);
  EXPECT_EQ(SeriesIn(metrics_.Text()), before);
}

TEST_F(MetricsTest, TokensAreRoundedUpToAPowerOfTwo) {
  for (const int64_t tokens :
       {int64_t{0}, int64_t{64}, int64_t{65}, int64_t{128}, (int64_t{1} << 20) + 1}) {
    ComputeRecord record;
    record.path = core::Path::kExplicit;
    record.tokens = tokens;
    metrics_.JobCompleted(record);
  }
  const std::string text = metrics_.Text();
  const std::string series = "attendant_compute_duration_seconds_count{path=\"explicit\",tokens=";
  EXPECT_THAT(text, HasSubstr(series + "\"64\"} 2"));
  EXPECT_THAT(text, HasSubstr(series + "\"128\"} 2"));
  EXPECT_THAT(text, HasSubstr(series + "\"more\"} 1"));
}

TEST_F(MetricsTest, PeakWorkspaceKeepsTheLargest) {
  for (const int64_t bytes : {100, 300, 200}) {
    ComputeRecord record;
    record.tokens = 64;
    record.peak_workspace_bytes = bytes;
    metrics_.JobCompleted(record);
  }
  EXPECT_THAT(metrics_.Text(),
              HasSubstr("attendant_peak_workspace_bytes{path=\"chunked\",tokens=\"64\"} 300"));
}

TEST_F(MetricsTest, RequestsAndJobsInFlightComeBackToZero) {
  metrics_.RequestStarted();
  metrics_.JobStarted(1000);
  EXPECT_THAT(metrics_.Text(), HasSubstr("attendant_inflight_requests 1"));
  EXPECT_THAT(metrics_.Text(), HasSubstr("attendant_inflight_flops 1000"));
  metrics_.JobEnded(1000);
  metrics_.JobCancelled(CancelStage::kCompute);
  metrics_.Shed(ShedReason::kMemory);
  metrics_.RequestEnded(Method::kAttend, PathLabel::kChunked, absl::StatusCode::kCancelled, 0.5);
  const std::string text = metrics_.Text();
  EXPECT_THAT(text, HasSubstr("attendant_inflight_requests 0"));
  EXPECT_THAT(text, HasSubstr("attendant_inflight_flops 0"));
  EXPECT_THAT(text, HasSubstr("attendant_cancelled_total{stage=\"compute\"} 1"));
  EXPECT_THAT(text, HasSubstr("attendant_shed_total{reason=\"memory\"} 1"));
  EXPECT_THAT(
      text,
      HasSubstr(
          "attendant_requests_total{code=\"CANCELLED\",method=\"Attend\",path=\"chunked\"} 1"));
  EXPECT_THAT(text, HasSubstr("attendant_request_duration_seconds_sum{method=\"Attend\",path="
                              "\"chunked\"} 0.5"));
}

TEST_F(MetricsTest, TheQueueIsReadAtEachScrapeUntilItsSourceIsGone) {
  int64_t depth = 3;
  metrics_.SetQueueDepthSource([&depth] { return depth; });
  EXPECT_THAT(metrics_.Text(), HasSubstr("attendant_queue_depth 3\n"));
  depth = 4;
  EXPECT_THAT(metrics_.Text(), HasSubstr("attendant_queue_depth 4\n"));
  metrics_.SetQueueDepthSource(nullptr);
  EXPECT_THAT(metrics_.Text(), HasSubstr("attendant_queue_depth 0\n"));
}

TEST_F(MetricsTest, ActivityCountsWhatCameAndWhatRuns) {
  metrics_.RequestStarted();
  metrics_.RequestStarted();
  metrics_.RequestEnded(Method::kInfo, PathLabel::kNone, absl::StatusCode::kOk, 1);
  EXPECT_EQ(metrics_.activity().started, 2);
  EXPECT_EQ(metrics_.activity().running, 1);
}

// The rules of `promtool check metrics`.
TEST_F(MetricsTest, NamesAreAsPrometheusWantsThem) {
  std::map<std::string, std::string> types;
  std::set<std::string> helped;
  std::set<std::string> series;
  const std::string text = metrics_.Text();
  for (const absl::string_view line : absl::StrSplit(text, '\n', absl::SkipEmpty())) {
    const std::vector<std::string> words = absl::StrSplit(line, absl::MaxSplits(' ', 3));
    if (words[0] != "#") {
      EXPECT_TRUE(series.insert(std::string(line.substr(0, line.rfind(' ')))).second) << line;
      continue;
    }
    ASSERT_EQ(words.size(), 4u) << line;
    const std::string& name = words[2];
    if (words[1] == "HELP") {
      EXPECT_TRUE(helped.insert(name).second) << name << " twice";
      EXPECT_FALSE(words[3].empty()) << name;
    } else {
      EXPECT_TRUE(types.emplace(name, words[3]).second) << name << " twice";
    }
  }
  for (const auto& [name, type] : types) {
    EXPECT_THAT(name, testing::MatchesRegex("[a-z][a-z0-9_]*"));
    EXPECT_EQ(helped.count(name), 1u) << name;
    EXPECT_EQ(absl::EndsWith(name, "_total"), type == "counter") << name;
    for (const char* const unit :
         {"milliseconds", "microseconds", "minutes", "kilobytes", "megabytes", "_ms", "_mib"}) {
      EXPECT_THAT(name, testing::Not(HasSubstr(unit)));
    }
    for (const char* const suffix : {"_count", "_sum", "_bucket", "_gauge", "_counter"}) {
      EXPECT_FALSE(absl::EndsWith(name, suffix)) << name;
    }
  }
}

TEST_F(MetricsTest, ATakenPortIsAnErrorThatNamesTheAddress) {
  const auto port = metrics_.Listen("127.0.0.1:0");
  ASSERT_TRUE(port.ok()) << port.status();
  Metrics other({"", "", ""});
  const std::string address = absl::StrCat("127.0.0.1:", *port);
  const auto taken = other.Listen(address);
  EXPECT_EQ(taken.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(taken.status().message()), HasSubstr(address));
}

}  // namespace
}  // namespace attendant::server
