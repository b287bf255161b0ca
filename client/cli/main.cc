// attend: the command line.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "client/cli/call.h"
#include "client/cli/check.h"
#include "client/cli/estimate.h"
#include "client/cli/exit_code.h"
#include "client/cli/lesson.h"
#include "client/cli/lesson_claims.h"
#include "client/cpp/client.h"
#include "client/cpp/sharded.h"
#include "core/version.h"

namespace attendant::cli {
namespace {

constexpr char kFooter[] =
    "Exit codes: 0 done, 1 the answer is not right or something else failed, 2 wrong arguments,\n"
    "3 no server or not ready, 4 bad file, 5 refused by the server, 6 out of time.";

struct Global {
  std::string server = "127.0.0.1:50051";
  ClientOptions options;
};

// The servers that --server names. Commas are part of a gRPC name of several addresses, such as
// ipv4:10.0.0.1:50051,10.0.0.2:50051.
std::vector<std::string> AddressesOf(const std::string& server) {
  if (server.rfind("ipv4:", 0) == 0 || server.rfind("ipv6:", 0) == 0) return {server};
  return absl::StrSplit(server, ',', absl::SkipEmpty());
}

// The sub-commands of the lesson. claim: set to the name of the one that is given.
void AddClaims(CLI::App& lesson, bool& all, std::string& claim) {
  lesson.require_subcommand(0, 1);
  auto* const flag = lesson.add_flag("--all", all, "Every claim of the lesson, a line each");
  for (const LessonClaim& known : LessonClaims()) {
    lesson.add_subcommand(known.name, known.says)
        ->excludes(flag)
        ->callback([&claim, name = known.name] { claim = name; });
  }
}

ExitCode RunHealth(Client& client, const std::string& service) {
  const absl::Status status = client.CheckHealth(service);
  if (!status.ok()) return Fail(status);
  std::printf("SERVING\n");
  return kSuccess;
}

ExitCode RunInfo(Client& client) {
  const auto info = client.Info();
  if (!info.ok()) return Fail(info.status());
  std::printf("version          %s\n", info->version().c_str());
  std::printf("kernel           %s\n", info->kernel().c_str());
  std::printf("cpu              %s\n", info->cpu().c_str());
  std::printf("compute threads  %lld\n", static_cast<long long>(info->compute_threads()));
  std::printf("message limit    %lld bytes\n", static_cast<long long>(info->max_message_bytes()));
  std::printf("memory budget    %lld bytes\n", static_cast<long long>(info->memory_budget_bytes()));
  std::printf("calls at a time  %lld\n", static_cast<long long>(info->max_running()));
  std::printf("calls waiting    %lld at most\n", static_cast<long long>(info->max_queue()));
  std::printf("peak float32     %.1f GFLOP/s\n", info->peak_flops_float32() / 1e9);
  std::printf("peak float64     %.1f GFLOP/s\n", info->peak_flops_float64() / 1e9);
  return kSuccess;
}

void AddDuration(CLI::App& app, const std::string& flag, absl::Duration& duration,
                 const std::string& help) {
  app.add_option_function<std::string>(
         flag,
         [&duration, flag](const std::string& text) {
           if (!absl::ParseDuration(text, &duration) || duration <= absl::ZeroDuration()) {
             throw CLI::ValidationError(flag, "'" + text + "' is no duration, such as 5s or 250ms");
           }
         },
         help)
      ->type_name("DURATION")
      ->default_str(absl::FormatDuration(duration));
}

// An option whose values are an enumeration's, by the names users write.
template <typename Enum>
CLI::Option* AddChoice(CLI::App& app, const std::string& flag, const std::string& help,
                       const std::map<std::string, Enum>& values, std::function<void(Enum)> set) {
  std::string names;
  for (const auto& [name, value] : values) names += (names.empty() ? "" : "|") + name;
  return app
      .add_option_function<std::string>(
          flag,
          [=](const std::string& text) {
            const auto found = values.find(text);
            if (found == values.end()) {
              throw CLI::ValidationError(flag, "'" + text + "' is none of " + names);
            }
            set(found->second);
          },
          help)
      ->type_name(names);
}

// A number that its type holds. CLI11's own reading takes one that does not for the nearest that
// does.
template <typename Number>
Number ParseNumber(const std::string& flag, const std::string& text) {
  Number number = 0;
  if constexpr (std::is_integral_v<Number>) {
    if (absl::SimpleAtoi(text, &number)) return number;
    throw CLI::ValidationError(flag, "'" + text + "' is no whole number of 64 bits");
  } else {
    const bool is_zero = text.find_first_of("123456789") == std::string::npos;
    const bool is_number = absl::SimpleAtod(text, &number);
    const bool is_infinity = text.find_first_of("iI") != std::string::npos;
    if (is_number && (number != 0 || is_zero) && (std::isfinite(number) || is_infinity)) {
      return number;
    }
    throw CLI::ValidationError(
        flag, "'" + text + (is_number ? "' is no number that fits in 64 bits" : "' is no number"));
  }
}

template <typename Number>
CLI::Option* AddNumber(CLI::App& app, const std::string& flag, const std::string& help,
                       std::function<void(Number)> set) {
  return app
      .add_option_function<std::string>(
          flag, [=](const std::string& text) { set(ParseNumber<Number>(flag, text)); }, help)
      ->type_name(std::is_integral_v<Number> ? "N" : "X");
}

// Numbers separated by commas.
template <typename Number>
void AddList(CLI::App& app, const std::string& flag, const std::string& help,
             google::protobuf::RepeatedField<Number>* field) {
  app.add_option_function<std::vector<std::string>>(
         flag,
         [=](const std::vector<std::string>& texts) {
           for (const std::string& text : texts) field->Add(ParseNumber<Number>(flag, text));
         },
         help)
      ->delimiter(',')
      ->type_name(std::is_integral_v<Number> ? "N,..." : "X,...");
}

CLI::Option* AddDType(CLI::App& app, const std::string& help,
                      std::function<void(v1::DataType)> set) {
  return AddChoice<v1::DataType>(app, "--dtype", help,
                                 {{"float32", v1::DATA_TYPE_FLOAT32},
                                  {"float64", v1::DATA_TYPE_FLOAT64},
                                  {"float16", v1::DATA_TYPE_FLOAT16},
                                  {"bfloat16", v1::DATA_TYPE_BFLOAT16}},
                                 std::move(set));
}

void AddMask(CLI::App& app, std::string& mask) {
  app.add_option("--mask", mask,
                 "Which keys a query sees (bool), or what is added to a score: a .npy file that\n"
                 "broadcasts to (batch, heads, queries, keys) (none)");
}

// How to attend, as far as it takes no file; path and mask are left to the caller.
void AddAttendOptions(CLI::App& app, v1::AttendOptions& options) {
  AddChoice<v1::Layout>(app, "--layout", "Order of the axes (bhtd: batch, heads, tokens, width)",
                        {{"bhtd", v1::LAYOUT_BHTD}, {"bthd", v1::LAYOUT_BTHD}},
                        [&](v1::Layout layout) { options.set_layout(layout); });
  AddChoice<v1::Causal>(app, "--causal", "Which keys a query sees by position (none: all)",
                        {{"none", v1::CAUSAL_NONE},
                         {"top-left", v1::CAUSAL_TOP_LEFT},
                         {"bottom-right", v1::CAUSAL_BOTTOM_RIGHT}},
                        [&](v1::Causal causal) { options.set_causal(causal); });
  AddList<int64_t>(app, "--key_lengths", "How many keys of each batch are real (all)",
                   options.mutable_key_lengths());
  AddList<double>(app, "--alibi_slopes", "Each head's slope of attention with linear biases (none)",
                  options.mutable_alibi_slopes());
  AddList<double>(app, "--sinks", "Each head's logit that weighs and has no value (none)",
                  options.mutable_sinks());
  AddNumber<double>(app, "--softcap",
                    "Bound of the scores, softcap * tanh(score / softcap) (0: none)",
                    [&](double softcap) { options.set_softcap(softcap); });
  AddNumber<int64_t>(app, "--window_left", "Keys before its own that a query sees (all)",
                     [&](int64_t keys) { options.mutable_window()->set_left(keys); });
  AddNumber<int64_t>(app, "--window_right", "Keys after its own that a query sees (all)",
                     [&](int64_t keys) { options.mutable_window()->set_right(keys); });
  AddNumber<double>(app, "--scale", "Factor of the scores (1/sqrt(width))",
                    [&](double scale) { options.set_scale(scale); });
}

void AddCallOptions(CLI::App& call, CallArguments& arguments) {
  auto* const query = call.add_option("--query", arguments.query, "Query array, a .npy file");
  auto* const key = call.add_option("--key", arguments.key, "Key array, a .npy file");
  auto* const value = call.add_option("--value", arguments.value, "Value array, a .npy file");
  query->needs(key)->needs(value);
  key->needs(query);
  value->needs(query);
  auto* const shape =
      call.add_option("--shape", arguments.shape, "Shape of all three arrays, such as 1,8,2048,64")
          ->delimiter(',')
          ->type_name("SIZE,...");
  auto* const random =
      call.add_option("--random", arguments.random, "Normal values from this seed instead of files")
          ->type_name("SEED");
  shape->needs(random);
  random->needs(shape)->excludes(query);
  auto* const dtype = AddDType(call, "Type of the random values (float32)",
                               [&](v1::DataType choice) { arguments.random_dtype = choice; });
  dtype->needs(random);
  const std::tuple<const char*, const char*, std::string*> results[] = {
      {"--out", "output", &arguments.out},
      {"--out_weights", "softmax weights", &arguments.out_weights},
      {"--out_logsumexp", "logsumexp", &arguments.out_logsumexp},
      {"--out_key_sums", "sums of each key's weights", &arguments.out_key_sums}};
  for (const auto& [flag, what, path] : results) {
    call.add_option(
            flag, *path,
            absl::StrCat("Where to write the ", what, ", a .npy file (bfloat16 as float32)"))
        ->type_name("FILE");
  }
  call.add_option_function<std::vector<int64_t>>(
          "--print-weights",
          [&](const std::vector<int64_t>& heads) {
            arguments.print_weights = heads.empty() ? 0 : heads[0];
          },
          "Draw the softmax weights of a head of the first batch (0)")
      ->expected(0, 1)
      ->type_name("HEAD");
  AddChoice<v1::Path>(
      call, "--path", "How to compute (auto: chunked)",
      {{"auto", v1::PATH_AUTO}, {"explicit", v1::PATH_EXPLICIT}, {"chunked", v1::PATH_CHUNKED}},
      [&](v1::Path path) { arguments.options.set_path(path); });
  AddMask(call, arguments.mask);
  AddAttendOptions(call, arguments.options);
  AddChoice<ShardBy>(call, "--shard",
                     "What each of several servers gets a part of (auto: batch or heads where\n"
                     "there are enough, else keys)",
                     {{"auto", ShardBy::kAuto},
                      {"batch", ShardBy::kBatch},
                      {"heads", ShardBy::kHeads},
                      {"keys", ShardBy::kKeys}},
                     [&](ShardBy by) { arguments.shard = by; });
  AddNumber<int64_t>(call, "--shards",
                     "Parts, where --server is one name for several servers (1 a server)",
                     [&](int64_t shards) { arguments.shards = shards; });
  call.callback([query, random] {
    if (query->count() + random->count() == 0) {
      throw CLI::ValidationError("call",
                                 "give --query, --key and --value, or --shape and --random");
    }
  });
}

absl::StatusOr<std::unique_ptr<ShardedClient>> ConnectFor(const CallArguments& arguments,
                                                          const std::vector<std::string>& addresses,
                                                          const ClientOptions& options) {
  if (!arguments.shards.has_value()) return ShardedClient::Connect(addresses, options);
  return ShardedClient::ConnectBalanced(addresses[0], *arguments.shards, options);
}

void AddEstimateSizes(CLI::App& estimate, v1::EstimateRequest& request) {
  auto* const queries = AddNumber<int64_t>(estimate, "--queries", "Query tokens",
                                           [&](int64_t n) { request.set_queries(n); });
  auto* const keys =
      AddNumber<int64_t>(estimate, "--keys", "Key tokens", [&](int64_t n) { request.set_keys(n); });
  auto* const tokens =
      AddNumber<int64_t>(estimate, "--tokens", "Query and key tokens", [&](int64_t n) {
        // The server would speak of queries.
        if (n < 0) throw CLI::ValidationError("--tokens", "is less than 0");
        request.set_queries(n);
        request.set_keys(n);
      });
  queries->needs(keys);
  keys->needs(queries);
  tokens->excludes(queries)->excludes(keys);
  AddNumber<int64_t>(estimate, "--width", "Width of a query and a key", [&](int64_t n) {
    request.set_width(n);
  })->required();
  AddNumber<int64_t>(estimate, "--value_width", "Width of a value (width)",
                     [&](int64_t n) { request.set_value_width(n); });
  request.set_heads(1);
  AddNumber<int64_t>(estimate, "--heads", "Query heads (1)",
                     [&](int64_t n) { request.set_heads(n); });
  AddNumber<int64_t>(estimate, "--kv_heads", "Key and value heads (heads)",
                     [&](int64_t n) { request.set_kv_heads(n); });
  request.set_batch(1);
  AddNumber<int64_t>(estimate, "--batch", "Batch (1)", [&](int64_t n) { request.set_batch(n); });
  AddNumber<int64_t>(estimate, "--d_model",
                     "Model width: a whole head, its projections included (attention alone)",
                     [&](int64_t n) { request.set_d_model(n); });
  estimate.callback([queries, tokens] {
    if (queries->count() + tokens->count() == 0) {
      throw CLI::ValidationError("estimate", "give --tokens, or --queries and --keys");
    }
  });
}

void AddEstimateOptions(CLI::App& estimate, EstimateArguments& arguments) {
  AddEstimateSizes(estimate, arguments.request);
  v1::AttendOptions& options = *arguments.request.mutable_options();
  AddDType(estimate, "Type of the tensors (float32)",
           [&](v1::DataType dtype) { arguments.request.set_dtype(dtype); });
  AddAttendOptions(estimate, options);
  auto* const mask_shape = estimate.add_option_function<std::vector<std::string>>(
      "--mask_shape",
      [&](const std::vector<std::string>& sizes) {
        v1::Tensor& mask = *options.mutable_mask();
        for (const std::string& size : sizes) {
          mask.add_shape(ParseNumber<int64_t>("--mask_shape", size));
        }
        if (mask.dtype() == v1::DATA_TYPE_UNSPECIFIED) mask.set_dtype(v1::DATA_TYPE_BOOL);
      },
      "Shape of a mask that broadcasts to (batch, heads, queries, keys) (none)");
  mask_shape->delimiter(',')->type_name("SIZE,...");
  AddChoice<v1::DataType>(estimate, "--mask_dtype", "Type of the mask (bool)",
                          {{"bool", v1::DATA_TYPE_BOOL},
                           {"float32", v1::DATA_TYPE_FLOAT32},
                           {"float64", v1::DATA_TYPE_FLOAT64},
                           {"float16", v1::DATA_TYPE_FLOAT16},
                           {"bfloat16", v1::DATA_TYPE_BFLOAT16}},
                          [&](v1::DataType dtype) { options.mutable_mask()->set_dtype(dtype); })
      ->needs(mask_shape);
  estimate.add_flag_callback(
      "--return_weights", [&] { options.set_return_weights(true); },
      "The call returns the softmax weights");
  estimate.add_flag_callback(
      "--return_logsumexp", [&] { options.set_return_logsumexp(true); },
      "The call returns the logsumexp");
  estimate.add_flag_callback(
      "--return_key_sums", [&] { options.set_return_key_sums(true); },
      "The call returns the sums of each key's weights");
  estimate.add_flag("--json", arguments.json, "Print one JSON object, in base units, and no plots");
  estimate
      .add_option("--svg", arguments.svg, "Where to draw the cost against the tokens, an .svg file")
      ->type_name("FILE")
      ->check([](const std::string& path) {
        return absl::EndsWith(path, ".svg") ? "" : "'" + path + "' must end in .svg, which it is";
      });
}

// Flags of .npy files that are given all or not at all; returns the first.
CLI::Option* AddFiles(
    CLI::App& app, const std::vector<std::tuple<const char*, const char*, std::string*>>& files) {
  std::vector<CLI::Option*> options;
  options.reserve(files.size());
  for (const auto& [flag, help, path] : files) {
    options.push_back(app.add_option(flag, *path, help)->type_name("FILE"));
  }
  for (CLI::Option* const option : options) {
    for (CLI::Option* const other : options) {
      if (option != other) option->needs(other);
    }
  }
  return options.front();
}

void AddCheckOptions(CLI::App& check, CheckArguments& arguments) {
  auto* const query = AddFiles(check, {{"--query", "Query array, a .npy file", &arguments.query},
                                       {"--key", "Key array, a .npy file", &arguments.key},
                                       {"--value", "Value array, a .npy file", &arguments.value}});
  auto* const x = AddFiles(
      check,
      {{"--x", "Of a head: its input, (tokens, d_model) or with a batch before it", &arguments.x},
       {"--w_q", "Of a head: (d_model, heads * d_k)", &arguments.w_q},
       {"--w_k", "Of a head: (d_model, heads * d_k)", &arguments.w_k},
       {"--w_v", "Of a head: (d_model, heads * d_v)", &arguments.w_v},
       {"--w_o", "Of a head: (heads * d_v, d_model)", &arguments.w_o}});
  query->excludes(x);
  AddNumber<int64_t>(check, "--heads", "Of a head: how many there are (1)",
                     [&](int64_t heads) { arguments.heads = heads; });
  auto* const candidate =
      check.add_option("--candidate", arguments.candidate, "Your output, a .npy file of any type")
          ->type_name("FILE");
  query->needs(candidate);
  for (const char* const name : {"query", "key", "value", "logits", "weights", "context"}) {
    check
        .add_option_function<std::string>(
            absl::StrCat("--candidate_", name),
            [&arguments, name](const std::string& path) { arguments.intermediates[name] = path; },
            absl::StrCat("Of a head: your ", name,
                         ", (heads, tokens, ...), with or without a "
                         "batch"))
        ->needs(x)
        ->type_name("FILE");
  }
  check.add_flag("--json", arguments.json, "Print the answer as JSON");
  AddMask(check, arguments.mask);
  AddAttendOptions(check, arguments.options);
  check.callback([query, x, &arguments] {
    if (query->count() + x->count() == 0) {
      throw CLI::ValidationError("check",
                                 "give --query, --key, --value and --candidate, or --x and the "
                                 "other arrays of a head");
    }
    if (arguments.candidate.empty() && arguments.intermediates.empty()) {
      throw CLI::ValidationError("check", "give --candidate, or any --candidate_... of a head");
    }
  });
}

ExitCode Main(int argc, char** argv) {
  Global global;
  CallArguments arguments;
  CheckArguments check_arguments;
  std::string service;
  CLI::App app("attend: call an Attendant server.", "attend");
  app.require_subcommand(1);
  app.footer(kFooter);
  app.fallthrough();
  app.set_version_flag("--version", std::string("attend ") + core::Version());
  app.add_option("--server", global.server,
                 "Where the server is; for call also several, separated by commas")
      ->capture_default_str()
      ->type_name("HOST:PORT")
      ->envname("ATTENDANT_SERVER");
  AddDuration(app, "--timeout", global.options.call_timeout,
              "How long a call may take, and connecting before it");
  AddDuration(app, "--connect_timeout", global.options.connect_timeout,
              "How long to wait for the server");
  app.add_option("--attempts", global.options.retry.max_attempts,
                 "Of a call whose server is gone, or full for now; 1: none is made again")
      ->check(CLI::Range(1, 100).description(""))
      ->capture_default_str()
      ->type_name("N");
  CLI::App* const lesson = app.add_subcommand(
      "lesson", "One attention head over five words, every array checked against LibTorch");
  CLI::App* const call = app.add_subcommand("call", "Attend on your arrays, or on random ones");
  CLI::App* const estimate = app.add_subcommand(
      "estimate", "FLOPs, memory and time of a call on both paths, without making it");
  CLI::App* const check = app.add_subcommand(
      "check", "Your own attention against the server's, and the mistake that explains the rest");
  CLI::App* const health = app.add_subcommand("health", "Exit 0 where the server is ready");
  CLI::App* const info = app.add_subcommand("info", "The server's version, kernel and limits");
  AddCallOptions(*call, arguments);
  AddCheckOptions(*check, check_arguments);
  bool all_claims = false;
  std::string claim;
  AddClaims(*lesson, all_claims, claim);
  EstimateArguments estimate_arguments;
  AddEstimateOptions(*estimate, estimate_arguments);
  health->add_option("--service", service, "A service's full name (the server as a whole)");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? kSuccess : kUsage;
  }
  global.options.connect_timeout =
      std::min(global.options.connect_timeout, global.options.call_timeout);
  const std::vector<std::string> addresses = AddressesOf(global.server);
  if (call->parsed()) {
    const bool one = addresses.size() == 1;
    if (arguments.shards.has_value() && (!one || *arguments.shards < 1)) {
      return Fail(kUsage, "--shards must be 1 or more, and needs one name in --server");
    }
    return RunCall([&] { return ConnectFor(arguments, addresses, global.options); }, arguments);
  }
  if (addresses.size() > 1) {
    return Fail(kUsage, "--server has several addresses, and only call takes more than one");
  }
  const ClientConnector connect = [&] { return Client::Connect(global.server, global.options); };
  if (check->parsed()) return RunCheck(connect, check_arguments);
  const auto client = connect();
  if (!client.ok()) return Fail(client.status());
  if (lesson->parsed() && (all_claims || !claim.empty())) return RunLessonClaims(**client, claim);
  if (lesson->parsed()) return RunLesson(**client);
  if (estimate->parsed()) return RunEstimate(**client, estimate_arguments);
  if (health->parsed()) return RunHealth(**client, service);
  if (info->parsed()) return RunInfo(**client);
  return kUsage;
}

}  // namespace
}  // namespace attendant::cli

int main(int argc, char** argv) { return attendant::cli::Main(argc, argv); }
