// attend_bench: how close attention comes to what this machine can do.
#include <sys/resource.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "bench/cases.h"
#include "bench/modes.h"
#include "bench/report.h"
#include "core/machine.h"
#include "core/version.h"

namespace attendant::bench {
namespace {

constexpr char kDescription[] =
    "attend_bench: how close attention comes to what this machine can do.\n"
    "Each figure is the best of many repetitions, taken in turn with those of its roof.";

constexpr int kExitFailed = 1;
constexpr int kExitUsage = 2;

const Mode* const kModes[] = {&kKernelMode, &kTilesMode, &kRpcMode, &kWireMode};

struct Arguments {
  const Mode* mode = &kKernelMode;
  Settings settings;
  std::vector<std::string> patterns;
  bool list = false;
  std::string json;
};

// A flag whose text `parse`, (const std::string&) -> bool, takes or refuses.
template <typename Parse>
CLI::Option* AddParsed(CLI::App& app, const std::string& flag, const std::string& allowed,
                       const std::string& help, const Parse& parse) {
  return app.add_option_function<std::string>(
      flag,
      [=](const std::string& text) {
        if (!parse(text)) throw CLI::ValidationError(flag, "'" + text + "' is not " + allowed);
      },
      help);
}

void AddMode(CLI::App& app, const Mode*& mode) {
  std::vector<std::string> names;
  std::string footer = "Modes:";
  for (const Mode* const m : kModes) {
    names.push_back(m->name);
    absl::StrAppend(&footer, "\n  ", m->name, ": ", m->help);
  }
  AddParsed(app, "--mode", absl::StrJoin(names, " or "), "What to measure, see below",
            [&mode](const std::string& text) {
              for (const Mode* const m : kModes) {
                if (text != m->name) continue;
                mode = m;
                return true;
              }
              return false;
            })
      ->type_name(absl::StrJoin(names, "|"))
      ->default_str(mode->name);
  app.footer(footer);
}

void AddSettings(CLI::App& app, Settings& settings) {
  settings.threads = core::AvailableCpus();
  app.add_option("--threads", settings.threads, "Threads that compute (one a CPU)")
      ->check(CLI::Range(1, 1024).description(""))
      ->type_name("N");
  AddParsed(app, "--seconds", "a number above 0, 3600 at most", "How long to measure each case",
            [&settings](const std::string& text) {
              return absl::SimpleAtod(text, &settings.seconds) && settings.seconds > 0 &&
                     settings.seconds <= 3600;
            })
      ->type_name("S")
      ->default_str(absl::StrCat(settings.seconds));
  AddParsed(app, "--kernel", "fused or onednn", "What computes the chunked path",
            [&settings](const std::string& text) {
              settings.kernel = text == "onednn" ? core::Kernel::kOneDnn : core::Kernel::kFused;
              return text == "fused" || text == "onednn";
            })
      ->type_name("fused|onednn")
      ->default_str("fused");
}

void AddTarget(CLI::App& app) {
  const std::vector<std::string> targets = core::SimdTargets();
  AddParsed(app, "--target", absl::StrCat("auto or one of ", absl::StrJoin(targets, ", ")),
            "The instruction set to use",
            [](const std::string& text) {
              return text == "auto" || core::ForceSimdTarget(absl::AsciiStrToUpper(text)).ok();
            })
      ->type_name("auto|avx3|avx2|...")
      ->default_str("auto");
}

int Measure(const Arguments& arguments, const std::vector<std::string>& names) {
  std::ofstream json;
  if (!arguments.json.empty()) {
    json.open(arguments.json);
    if (!json) {
      std::fprintf(stderr, "attend_bench: --json: cannot write '%s'\n", arguments.json.c_str());
      return kExitUsage;
    }
  }
  // Fewer interruptions; only where the system allows it. Before any thread, for all to have it.
  setpriority(PRIO_PROCESS, 0, -10);
  core::KeepFreedMemory();
  std::vector<CaseResult> results;
  const absl::Status status = arguments.mode->run(arguments.settings, names, results);
  if (!status.ok()) {
    std::fprintf(stderr, "attend_bench: %s\n", status.ToString().c_str());
    return kExitFailed;
  }
  if (json.is_open() && !(json << ToJson(results)).flush()) {
    std::fprintf(stderr, "attend_bench: --json: '%s' was not written\n", arguments.json.c_str());
    return kExitFailed;
  }
  return 0;
}

int Main(int argc, char** argv) {
  Arguments arguments;
  CLI::App app(kDescription, "attend_bench");
  app.get_formatter()->column_width(36);
  app.set_version_flag("--version", absl::StrCat("attend_bench ", core::Version()));
  AddMode(app, arguments.mode);
  AddSettings(app, arguments.settings);
  AddTarget(app);
  app.add_option("--cases", arguments.patterns,
                 "Which cases, such as t2048_d64 or decode*, separated by commas (all)")
      ->delimiter(',')
      ->type_name("NAME,...");
  app.add_flag("--list", arguments.list, "Print the names of the mode's cases and exit");
  app.add_option("--json", arguments.json, "Where to write what was measured")->type_name("FILE");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kExitUsage;
  }
  const auto names = Select(arguments.mode->cases(), arguments.patterns);
  if (!names.ok()) {
    std::fprintf(stderr, "attend_bench: %s\n", std::string(names.status().message()).c_str());
    return kExitUsage;
  }
  if (arguments.list) {
    for (const std::string& name : *names) std::printf("%s\n", name.c_str());
    return 0;
  }
  return Measure(arguments, *names);
}

}  // namespace
}  // namespace attendant::bench

int main(int argc, char** argv) { return attendant::bench::Main(argc, argv); }
