#include "bench/load/summary.h"

#include <algorithm>
#include <cmath>
#include <functional>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

namespace attendant::load {
namespace {

using Chosen = std::function<bool(const Record&)>;

Group GroupOf(const std::string& name, double seconds, const std::vector<Record>& records,
              const Chosen& chosen) {
  Group group;
  group.name = name;
  group.seconds = seconds;
  std::vector<double> answered, refused;
  for (const Record& record : records) {
    if (!chosen(record)) continue;
    ++group.calls;
    ++group.statuses[NameOf(record.code)];
    auto& latencies = record.code == absl::StatusCode::kOk ? answered : refused;
    latencies.push_back(absl::ToDoubleSeconds(record.latency));
  }
  group.goodput = seconds > 0 ? static_cast<double>(answered.size()) / seconds : 0;
  group.answered = LatenciesOf(std::move(answered));
  group.refused = LatenciesOf(std::move(refused));
  return group;
}

std::vector<Second> TimelineOf(const std::vector<Record>& records) {
  std::vector<Second> timeline;
  std::vector<std::vector<double>> answered;
  for (const Record& record : records) {
    const auto second = static_cast<size_t>(absl::ToInt64Seconds(record.arrival.at));
    if (second >= timeline.size()) {
      timeline.resize(second + 1);
      answered.resize(second + 1);
    }
    ++timeline[second].calls;
    if (record.code != absl::StatusCode::kOk) continue;
    ++timeline[second].answered;
    answered[second].push_back(absl::ToDoubleSeconds(record.latency));
  }
  for (size_t i = 0; i < timeline.size(); ++i) {
    timeline[i].p50 = LatenciesOf(std::move(answered[i])).p50;
  }
  return timeline;
}

std::string RowOf(const std::string& name, const Latencies& l) {
  return absl::StrFormat("%-22s %9d %9.2f %9.2f %9.2f %9.2f %9.2f\n", name, l.count, l.p50 * 1e3,
                         l.p90 * 1e3, l.p99 * 1e3, l.p999 * 1e3, l.max * 1e3);
}

std::string JsonOf(const Latencies& l) {
  return absl::StrFormat(
      R"({"count": %d, "p50": %.9g, "p90": %.9g, "p99": %.9g, "p999": %.9g, "max": %.9g})", l.count,
      l.p50, l.p90, l.p99, l.p999, l.max);
}

std::string JsonOf(const Group& group) {
  const auto status = [](std::string* out, const std::pair<const std::string, int64_t>& entry) {
    absl::StrAppend(out, "\"", entry.first, "\": ", entry.second);
  };
  return absl::StrFormat(
      R"({"name": "%s", "seconds": %.9g, "calls": %d, "failed": %d, "goodput": %.9g, )"
      R"("answered": %s, "refused": %s, "statuses": {%s}})",
      group.name, group.seconds, group.calls, group.refused.count, group.goodput,
      JsonOf(group.answered), JsonOf(group.refused), absl::StrJoin(group.statuses, ", ", status));
}

std::string JsonOf(const std::vector<Group>& groups) {
  return absl::StrJoin(groups, ",\n    ", [](std::string* out, const Group& group) {
    absl::StrAppend(out, JsonOf(group));
  });
}

}  // namespace

double Percentile(const std::vector<double>& sorted, double q) {
  const auto count = static_cast<double>(sorted.size());
  const auto rank = static_cast<size_t>(std::ceil(std::clamp(q, 0.0, 1.0) * count));
  return sorted[std::clamp<size_t>(rank, 1, sorted.size()) - 1];
}

Latencies LatenciesOf(std::vector<double> seconds) {
  Latencies latencies;
  if (seconds.empty()) return latencies;
  std::sort(seconds.begin(), seconds.end());
  latencies.count = static_cast<int64_t>(seconds.size());
  latencies.p50 = Percentile(seconds, 0.5);
  latencies.p90 = Percentile(seconds, 0.9);
  latencies.p99 = Percentile(seconds, 0.99);
  latencies.p999 = Percentile(seconds, 0.999);
  latencies.max = seconds.back();
  return latencies;
}

std::string NameOf(absl::StatusCode code) { return absl::StatusCodeToString(code); }

Summary Summarize(const std::vector<Record>& records, const std::vector<Phase>& phases,
                  const std::vector<Size>& sizes, absl::Duration warmup, absl::Duration ran) {
  const auto counts = [warmup](const Record& record) { return record.arrival.at >= warmup; };
  const auto seconds_of = [&](absl::Duration begin, absl::Duration end) {
    return std::max(0.0, absl::ToDoubleSeconds(std::min(end, ran) - std::max(begin, warmup)));
  };
  Summary summary;
  summary.all = GroupOf("all", seconds_of(absl::ZeroDuration(), ran), records, counts);
  absl::Duration begin;
  for (size_t i = 0; i < phases.size(); ++i) {
    const absl::Duration end = begin + phases[i].duration;
    summary.phases.push_back(GroupOf(
        absl::StrCat("phase ", i + 1, ": ", phases[i].rate, "/s"), seconds_of(begin, end), records,
        [&](const Record& record) { return counts(record) && record.arrival.phase == i; }));
    begin = end;
  }
  for (size_t i = 0; i < sizes.size(); ++i) {
    summary.sizes.push_back(
        GroupOf(sizes[i].name(), summary.all.seconds, records,
                [&](const Record& record) { return counts(record) && record.arrival.size == i; }));
  }
  summary.timeline = TimelineOf(records);
  return summary;
}

std::string ToText(const Summary& summary, const Health* health) {
  std::string text = absl::StrFormat(
      "milliseconds from when a call was to start\n\n%-22s %9s %9s "
      "%9s %9s %9s %9s\n",
      "", "calls", "p50", "p90", "p99", "p99.9", "max");
  absl::StrAppend(&text, RowOf("answered", summary.all.answered));
  if (summary.all.refused.count > 0) {
    absl::StrAppend(&text, RowOf("not answered", summary.all.refused));
  }
  for (const auto* const groups : {&summary.phases, &summary.sizes}) {
    if (groups->size() < 2) continue;
    for (const Group& group : *groups) absl::StrAppend(&text, RowOf(group.name, group.answered));
  }
  if (health != nullptr) absl::StrAppend(&text, RowOf("health checks", health->latencies));
  absl::StrAppend(&text, "\n");
  const auto goodput = [&text](const Group& group) {
    absl::StrAppendFormat(&text, "%-22s %.1f/s in %.1f s\n",
                          group.name == "all" ? "goodput" : "  " + group.name, group.goodput,
                          group.seconds);
  };
  goodput(summary.all);
  if (summary.phases.size() > 1) {
    for (const Group& phase : summary.phases) goodput(phase);
  }
  for (const auto& [status, count] : summary.all.statuses) {
    absl::StrAppendFormat(&text, "%-22s %d\n", status, count);
  }
  if (health != nullptr) {
    absl::StrAppendFormat(&text, "%-22s %d\n", "health checks failed", health->failed);
  }
  return text;
}

std::string ToJson(const Summary& summary, const Health* health) {
  const auto second = [](std::string* out, const Second& s) {
    absl::StrAppendFormat(out, R"({"calls": %d, "answered": %d, "p50": %.9g})", s.calls, s.answered,
                          s.p50);
  };
  std::string json =
      absl::StrCat("{\n  \"all\": ", JsonOf(summary.all), ",\n  \"phases\": [",
                   JsonOf(summary.phases), "],\n  \"sizes\": [", JsonOf(summary.sizes),
                   "],\n  \"timeline\": [", absl::StrJoin(summary.timeline, ", ", second), "]");
  if (health != nullptr) {
    absl::StrAppend(&json, ",\n  \"health\": {\"latencies\": ", JsonOf(health->latencies),
                    ", \"failed\": ", health->failed, "}");
  }
  return json + "\n}\n";
}

}  // namespace attendant::load
