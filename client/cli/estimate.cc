#include "client/cli/estimate.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "client/cli/plot.h"

namespace attendant::cli {
namespace {

using v1::EstimateRequest;
using v1::EstimateResponse;

double ToDouble(int64_t value) { return static_cast<double>(value); }
std::string Flops(int64_t flops) { return Scaled(ToDouble(flops), Unit::kOperations); }
std::string Bytes(int64_t bytes) { return Scaled(ToDouble(bytes), Unit::kBytes); }

std::string DTypeName(v1::DataType dtype) {
  if (dtype == v1::DATA_TYPE_UNSPECIFIED) dtype = v1::DATA_TYPE_FLOAT32;
  return absl::AsciiStrToLower(v1::DataType_Name(dtype).substr(std::strlen("DATA_TYPE_")));
}

bool IsSquare(const EstimateRequest& request) { return request.queries() == request.keys(); }

// "batch 1, heads 8, tokens 2048, width 64, d_model 512, float32, causal".
std::string Describe(const EstimateRequest& r) {
  std::string text = absl::StrCat("batch ", r.batch(), ", heads ", r.heads());
  if (r.has_kv_heads()) absl::StrAppend(&text, " over ", r.kv_heads());
  if (IsSquare(r)) {
    absl::StrAppend(&text, ", tokens ", r.queries());
  } else {
    absl::StrAppend(&text, ", queries ", r.queries(), ", keys ", r.keys());
  }
  absl::StrAppend(&text, ", width ", r.width());
  if (r.has_value_width()) absl::StrAppend(&text, ", value width ", r.value_width());
  if (r.has_d_model()) absl::StrAppend(&text, ", d_model ", r.d_model());
  absl::StrAppend(&text, ", ", DTypeName(r.dtype()));
  const v1::AttendOptions& options = r.options();
  if (options.causal() > v1::CAUSAL_NONE) absl::StrAppend(&text, ", causal");
  if (options.has_window()) absl::StrAppend(&text, ", window");
  if (options.has_mask()) absl::StrAppend(&text, ", mask");
  return text;
}

// The same problem with another number of tokens: of keys alone where queries are another number.
// A mask grows along; lengths are left out.
EstimateRequest AtTokens(const EstimateRequest& request, int64_t tokens) {
  EstimateRequest other = request;
  const bool square = IsSquare(request);
  other.set_keys(tokens);
  if (square) other.set_queries(tokens);
  v1::AttendOptions& options = *other.mutable_options();
  options.clear_key_lengths();
  auto& shape = *options.mutable_mask()->mutable_shape();
  const int rank = shape.size();
  if (rank > 0 && shape[rank - 1] != 1) shape[rank - 1] = tokens;
  if (rank > 1 && square && shape[rank - 2] != 1) shape[rank - 2] = tokens;
  if (!request.options().has_mask()) options.clear_mask();
  return other;
}

// An answer for a number of tokens.
struct Rung {
  double tokens = 0;
  EstimateResponse cost;
};

// Powers of two, from well below the tokens that were asked for and the crossover to well above
// both.
absl::StatusOr<std::vector<Rung>> Climb(Client& client, const EstimateRequest& request,
                                        double crossover) {
  constexpr double kBeyond = 16;
  const double asked = std::max(ToDouble(request.keys()), 1.0);
  const double low = crossover > 0 ? std::min(asked, crossover) : asked;
  const double high = std::max(asked, crossover);
  const int first = std::max(static_cast<int>(std::floor(std::log2(low / kBeyond))), 0);
  const int last = std::min(static_cast<int>(std::ceil(std::log2(high * kBeyond))), 30);
  std::vector<Rung> rungs;
  for (int exponent = first; exponent <= last; ++exponent) {
    const int64_t tokens = int64_t{1} << exponent;
    auto cost = client.Estimate(AtTokens(request, tokens));
    // Sizes that no call could have end the curves.
    if (absl::IsInvalidArgument(cost.status())) break;
    if (!cost.ok()) return cost.status();
    rungs.push_back({ToDouble(tokens), *std::move(cost)});
  }
  return rungs;
}

// Operations of the steps of these names.
double StepFlops(const EstimateResponse& cost, std::initializer_list<absl::string_view> names) {
  double flops = 0;
  for (const v1::Step& step : cost.chunked_path().steps()) {
    if (std::find(names.begin(), names.end(), step.name()) != names.end()) {
      flops += ToDouble(step.flops());
    }
  }
  return flops;
}
double ProjectionFlops(const EstimateResponse& cost) {
  return StepFlops(cost, {"projections", "output_projection"});
}
double ProductFlops(const EstimateResponse& cost) { return StepFlops(cost, {"scores", "values"}); }

// Draws the curves of the same problem, asked for at some numbers of tokens.
class Plots {
 public:
  Plots(const EstimateRequest& request, const EstimateResponse& asked, std::vector<Rung> rungs)
      : rungs_(std::move(rungs)),
        here_{ToDouble(request.keys()), asked},
        x_name_(IsSquare(request) ? "tokens" : "keys") {
    // With lengths the problem is on none of the curves.
    if (request.options().key_lengths_size() > 0) here_.tokens = 0;
    if (here_.tokens == 0) return;
    const auto above = std::find_if(rungs_.begin(), rungs_.end(), [this](const Rung& rung) {
      return rung.tokens >= here_.tokens;
    });
    if (above == rungs_.end() || above->tokens > here_.tokens) rungs_.insert(above, here_);
  }

  std::vector<Plot> Make() const {
    const EstimateResponse& asked = here_.cost;
    Plot operations = NewPlot("operations", Unit::kOperations);
    operations.crossover = asked.crossover_tokens();
    operations.curves = {NewCurve("scores and values", 'a', "d", ProductFlops)};
    if (ProjectionFlops(asked) > 0) {
      operations.curves.push_back(NewCurve("projections", 'p', "c", ProjectionFlops));
    }
    Plot seconds = NewPlot("time", Unit::kSeconds);
    seconds.crossover = asked.crossover_tokens();
    seconds.curves = OfPaths(&v1::PathCost::seconds);
    Plot workspace = NewPlot("workspace", Unit::kBytes);
    workspace.curves = OfPaths(&v1::PathCost::workspace_bytes);
    return {operations, seconds, workspace};
  }

 private:
  Plot NewPlot(const char* title, Unit unit) const {
    Plot plot;
    plot.title = title;
    plot.x_name = x_name_;
    plot.unit = unit;
    return plot;
  }

  // value: (const EstimateResponse&) -> double.
  template <typename Value>
  Curve NewCurve(const char* name, char mark, const char* tone, const Value& value) const {
    Curve curve;
    curve.name = name;
    curve.mark = mark;
    curve.tone = tone;
    for (const Rung& rung : rungs_) curve.points.push_back({rung.tokens, value(rung.cost)});
    curve.here = {here_.tokens, value(here_.cost)};
    return curve;
  }

  template <typename Field>
  std::vector<Curve> OfPaths(Field field) const {
    return {NewCurve("explicit path", 'e', "a",
                     [field](const EstimateResponse& cost) {
                       return static_cast<double>((cost.explicit_path().*field)());
                     }),
            NewCurve("chunked path", 'c', "b", [field](const EstimateResponse& cost) {
              return static_cast<double>((cost.chunked_path().*field)());
            })};
  }

  std::vector<Rung> rungs_;
  Rung here_;
  std::string x_name_;
};

void PrintRow(absl::string_view name, absl::string_view a, absl::string_view b, absl::string_view c,
              absl::string_view d) {
  std::string line = absl::StrFormat("%-20s%12s%12s%14s%12s", name, a, b, c, d);
  line.erase(line.find_last_not_of(' ') + 1);
  std::printf("%s\n", line.c_str());
}

std::string Seconds(const v1::PathCost& cost) {
  if (cost.flops() == 0) return "0 s";
  return cost.seconds() > 0 ? Scaled(cost.seconds(), Unit::kSeconds) : "not measured";
}

void PrintTable(const EstimateResponse& e) {
  const v1::PathCost& a = e.explicit_path();
  const v1::PathCost& b = e.chunked_path();
  PrintRow("", "", "explicit", "", "chunked");
  PrintRow("step", "FLOPs", "bytes", "FLOPs", "bytes");
  for (int i = 0; i < std::min(a.steps_size(), b.steps_size()); ++i) {
    PrintRow(a.steps(i).name(), Flops(a.steps(i).flops()), Bytes(a.steps(i).bytes()),
             Flops(b.steps(i).flops()), Bytes(b.steps(i).bytes()));
  }
  PrintRow("all steps", Flops(a.flops()), "", Flops(b.flops()), "");
  PrintRow("workspace", "", Bytes(a.workspace_bytes()), "", Bytes(b.workspace_bytes()));
  PrintRow("time", "", Seconds(a), "", Seconds(b));
  std::printf("\n");
}

void PrintRest(const EstimateRequest& request, const EstimateResponse& e,
               const v1::InfoResponse& info) {
  std::printf("request    %s of tensors\n", Bytes(e.request_bytes()).c_str());
  std::printf("response   %s of tensors\n", Bytes(e.response_bytes()).c_str());
  if (e.crossover_tokens() > 0) {
    std::printf(
        "crossover  %.0f tokens: from there on scores and values outweigh the projections\n",
        e.crossover_tokens());
  } else if (request.has_d_model()) {
    std::printf("crossover  none: scores and values never outweigh the projections\n");
  }
  if (e.chunked_path().seconds() > 0) {
    absl::PrintF(
        "time       of compute on %d idle threads (%s, %s): by what small problems took\n"
        "           when the server started, and calls since; softcap, slopes and masks add to "
        "it\n",
        info.compute_threads(), info.cpu(), info.kernel());
  } else if (e.chunked_path().flops() > 0) {
    std::printf("time       not measured by this server (--measure_peak=false)\n");
  }
}

std::string StepsJson(const v1::PathCost& cost) {
  return absl::StrJoin(cost.steps(), ",", [](std::string* out, const v1::Step& step) {
    absl::StrAppendFormat(out, "{\"name\":\"%s\",\"flops\":%d,\"bytes\":%d}", step.name(),
                          step.flops(), step.bytes());
  });
}

std::string PathJson(const v1::PathCost& cost) {
  return absl::StrFormat("{\"steps\":[%s],\"flops\":%d,\"workspace_bytes\":%d,\"seconds\":%.9g}",
                         StepsJson(cost), cost.flops(), cost.workspace_bytes(), cost.seconds());
}

// The contract's fields by their own names, in FLOPs, bytes, seconds and tokens.
std::string ToJson(const EstimateResponse& e) {
  return absl::StrFormat(
      "{\"explicit_path\":%s,\"chunked_path\":%s,\"crossover_tokens\":%.17g,"
      "\"request_bytes\":%d,\"response_bytes\":%d}\n",
      PathJson(e.explicit_path()), PathJson(e.chunked_path()), e.crossover_tokens(),
      e.request_bytes(), e.response_bytes());
}

ExitCode WriteSvg(const std::string& path, const std::string& svg) {
  std::ofstream file(path, std::ios::binary);
  file << svg;
  file.close();
  if (file) return kSuccess;
  return Fail(kBadFile, absl::StrCat(path, ": cannot be written: ", std::strerror(errno)));
}

}  // namespace

ExitCode RunEstimate(Client& client, const EstimateArguments& arguments) {
  const EstimateRequest& request = arguments.request;
  const auto estimate = client.Estimate(request);
  if (!estimate.ok()) return Fail(estimate.status());
  std::vector<Plot> plots;
  if (!arguments.json || !arguments.svg.empty()) {
    auto rungs = Climb(client, request, estimate->crossover_tokens());
    if (!rungs.ok()) return Fail(rungs.status());
    plots = Plots(request, *estimate, *std::move(rungs)).Make();
  }
  if (arguments.json) {
    std::printf("%s", ToJson(*estimate).c_str());
  } else {
    const auto info = client.Info();
    if (!info.ok()) return Fail(info.status());
    std::printf("%s\n\n", Describe(request).c_str());
    PrintTable(*estimate);
    PrintRest(request, *estimate, *info);
    for (const Plot& plot : plots) {
      const std::string text = DrawText(plot);
      if (!text.empty()) std::printf("\n%s", text.c_str());
    }
  }
  if (arguments.svg.empty()) return kSuccess;
  return WriteSvg(arguments.svg, DrawSvg(Describe(request), plots));
}

}  // namespace attendant::cli
