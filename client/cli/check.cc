#include "client/cli/check.h"

#include <google/protobuf/util/json_util.h>

#include <cstdio>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "client/cli/arrays.h"
#include "client/cli/npy.h"

namespace attendant::cli {
namespace {

// An array of the caller's results, and the axes that it lacked as a file.
struct Candidate {
  Tensor tensor;
  std::vector<int> added_axes;  // of four, in ascending order
};

struct Question {
  std::vector<Tensor> inputs;                   // query, key, value; or x, w_q, w_k, w_v, w_o
  std::map<std::string, Candidate> candidates;  // by name; "output" is the output
};

// FLOAT32 as users write it.
std::string TypeName(v1::DataType dtype) {
  return absl::AsciiStrToLower(core::NameOf(DTypeOf(dtype)));
}

// Four axes for a result that has fewer. of_batches: its first axis of three is the batch.
absl::Status MakeRank4(const std::string& path, v1::Layout layout, bool of_batches,
                       Candidate& candidate) {
  std::vector<int64_t>& shape = candidate.tensor.shape;
  const int heads = layout == v1::LAYOUT_BTHD ? 2 : 1;
  if (shape.size() == 3 && of_batches) {
    shape.insert(shape.begin() + heads, 1);
    candidate.added_axes = {heads};
    return absl::OkStatus();
  }
  if (shape.size() == 2) candidate.added_axes = {0, heads};
  if (shape.size() == 3) candidate.added_axes = {0};
  return cli::MakeRank4(path, layout, candidate.tensor);
}

absl::StatusOr<std::vector<Tensor>> ReadAll(const std::vector<std::string>& paths) {
  std::vector<Tensor> tensors;
  for (const std::string& path : paths) {
    auto read = ReadNpy(path);
    if (!read.ok()) return read.status();
    tensors.push_back(*std::move(read));
  }
  return tensors;
}

absl::StatusOr<Question> ReadAttention(const CheckArguments& arguments) {
  const v1::Layout layout = arguments.options.layout();
  const std::vector<std::string> paths = {arguments.query, arguments.key, arguments.value};
  auto inputs = ReadAll(paths);
  if (!inputs.ok()) return inputs.status();
  Question question{*std::move(inputs), {}};
  for (size_t i = 0; i < paths.size(); ++i) {
    absl::Status status = cli::MakeRank4(paths[i], layout, question.inputs[i]);
    if (!status.ok()) return status;
  }
  auto output = ReadNpy(arguments.candidate);
  if (!output.ok()) return output.status();
  Candidate& candidate = question.candidates["output"];
  candidate.tensor = *std::move(output);
  absl::Status status = MakeRank4(arguments.candidate, layout, /*of_batches=*/false, candidate);
  if (!status.ok()) return status;
  return question;
}

absl::StatusOr<Question> ReadHead(const CheckArguments& arguments) {
  auto inputs = ReadAll({arguments.x, arguments.w_q, arguments.w_k, arguments.w_v, arguments.w_o});
  if (!inputs.ok()) return inputs.status();
  Question question{*std::move(inputs), {}};
  const bool of_batches = question.inputs[0].shape.size() == 3 && arguments.heads == 1;
  for (const auto& [name, path] : arguments.intermediates) {
    auto read = ReadNpy(path);
    if (!read.ok()) return read.status();
    Candidate& candidate = question.candidates[name];
    candidate.tensor = *std::move(read);
    absl::Status status = MakeRank4(path, v1::LAYOUT_BHTD, of_batches, candidate);
    if (!status.ok()) return status;
  }
  if (!arguments.candidate.empty()) {
    auto read = ReadNpy(arguments.candidate);
    if (!read.ok()) return read.status();
    question.candidates["output"].tensor = *std::move(read);
  }
  return question;
}

absl::StatusOr<v1::CheckResponse> Ask(Client& client, const Question& question, int64_t heads,
                                      const v1::AttendOptions& options) {
  const std::vector<Tensor>& in = question.inputs;
  const auto ref = [&](const char* name) -> std::optional<TensorRef> {
    const auto found = question.candidates.find(name);
    if (found == question.candidates.end()) return std::nullopt;
    return found->second.tensor.ref();
  };
  if (in.size() == 3) {
    return client.Check(in[0].ref(), in[1].ref(), in[2].ref(), *ref("output"), options);
  }
  const HeadCandidate candidate{ref("output"), ref("query"),   ref("key"),    ref("value"),
                                ref("logits"), ref("weights"), ref("context")};
  return client.CheckHead({in[0].ref(), in[1].ref(), in[2].ref(), in[3].ref(), in[4].ref(), heads},
                          candidate, options);
}

// The candidate that the differences are of: what departs first, else what was computed last.
std::string NameOfWorst(const Question& question, const v1::CheckResponse& response) {
  if (!response.first_departure().empty()) return response.first_departure();
  std::string last;
  for (const char* const name :
       {"query", "key", "value", "logits", "weights", "context", "output"}) {
    if (question.candidates.count(name) > 0) last = name;
  }
  return last;
}

// Words in lines of at most 96 characters, each after an indent.
std::string Wrapped(const std::string& text, size_t indent) {
  std::string lines;
  size_t column = 96;
  for (const auto word : absl::StrSplit(text, ' ')) {
    if (column + 1 + word.size() > 96) {
      absl::StrAppend(&lines, lines.empty() ? "" : "\n", std::string(indent, ' '), word);
      column = indent + word.size();
    } else {
      absl::StrAppend(&lines, " ", word);
      column += 1 + word.size();
    }
  }
  return lines;
}

std::string UlpsOf(int64_t ulps, const std::string& type) {
  if (ulps == std::numeric_limits<int64_t>::max()) return "no number: one side is NaN";
  // Beyond it a count says nothing: numbers of either sign, or of other magnitudes.
  constexpr int64_t kTelling = 1'000'000;
  if (ulps > kTelling) return absl::StrCat("more than ", kTelling, " of ", type);
  return absl::StrCat("at most ", ulps, " of ", type);
}

void PrintDifference(const Question& question, const v1::CheckResponse& response) {
  const std::string name = NameOfWorst(question, response);
  const Candidate& candidate = question.candidates.at(name);
  std::string text = absl::StrFormat("%.3g", response.max_abs_difference());
  if (response.worst_index_size() > 0) {
    std::vector<int64_t> index(response.worst_index().begin(), response.worst_index().end());
    int64_t element = 0;
    for (size_t axis = 0; axis < index.size(); ++axis) {
      element = element * candidate.tensor.shape[axis] + index[axis];
    }
    for (size_t i = candidate.added_axes.size(); i-- > 0;) {
      index.erase(index.begin() + candidate.added_axes[i]);
    }
    absl::StrAppend(&text, " at ", name, "[", absl::StrJoin(index, ", "), "], where yours is ",
                    absl::StrFormat("%.9g", Numbers(candidate.tensor, element, 1)[0]));
  }
  std::printf("difference  %s\n", text.c_str());
  std::printf("in ulps     %s\n",
              UlpsOf(response.max_ulp_difference(), TypeName(candidate.tensor.dtype)).c_str());
}

void Print(const Question& question, const v1::CheckResponse& response) {
  const v1::Verdict verdict = response.verdict();
  const char* const meaning = verdict == v1::VERDICT_MATCH ? "the same as ours but for rounding"
                              : verdict == v1::VERDICT_ROUNDING_ONLY
                                  ? "as far from ours as rounding in a narrower type explains"
                                  : "further from ours than rounding explains";
  std::string name = v1::Verdict_Name(verdict);
  name = name.substr(std::string("VERDICT_").size());
  std::printf("verdict     %s: %s\n", name.c_str(), meaning);
  PrintDifference(question, response);
  const std::string type = verdict == v1::VERDICT_ROUNDING_ONLY
                               ? "the narrower type's"
                               : TypeName(question.inputs[0].dtype);
  std::printf("tolerance   %.3g: what %s rounding may add up to in these sums\n",
              response.tolerance(), type.c_str());
  if (!response.first_departure().empty()) {
    std::printf("departs at  %s\n", response.first_departure().c_str());
  }
  for (const v1::Finding& finding : response.findings()) {
    std::printf("\n%s (%s), which leaves a difference of %.3g\n%s\n", finding.code().c_str(),
                finding.field().c_str(), finding.residual(), Wrapped(finding.message(), 2).c_str());
  }
  if (response.findings_size() == 0 && verdict == v1::VERDICT_MISMATCH) {
    std::printf("\nno known mistake, nor two of them, makes our numbers into yours\n");
  }
  if (response.findings_size() > 1) {
    std::printf(
        "\neach of these alone explains your numbers: these inputs cannot tell them apart\n");
  }
}

void PrintJson(const v1::CheckResponse& response) {
  google::protobuf::util::JsonPrintOptions options;
  options.add_whitespace = true;
  options.always_print_primitive_fields = true;
  options.preserve_proto_field_names = true;
  std::string json;
  // A message of numbers and text that the server sent: it is always JSON.
  (void)google::protobuf::util::MessageToJsonString(response, &json, options);
  std::printf("%s", json.c_str());
}

}  // namespace

ExitCode RunCheck(const ClientConnector& connect, const CheckArguments& arguments) {
  v1::AttendOptions options = arguments.options;
  absl::Status mask = ReadMask(arguments.mask, options);
  if (!mask.ok()) return Fail(kBadFile, std::string(mask.message()));
  const auto question = arguments.x.empty() ? ReadAttention(arguments) : ReadHead(arguments);
  if (!question.ok()) return Fail(kBadFile, std::string(question.status().message()));
  const auto client = connect();
  if (!client.ok()) return Fail(client.status());
  const auto response = Ask(**client, *question, arguments.heads, options);
  if (!response.ok()) return Fail(response.status());
  if (arguments.json) {
    PrintJson(*response);
  } else {
    Print(*question, *response);
  }
  return response->verdict() == v1::VERDICT_MISMATCH ? kFailure : kSuccess;
}

}  // namespace attendant::cli
