#include "server/settings.h"

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <memory>
#include <numeric>
#include <regex>
#include <sstream>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace attendant::server {
namespace {

constexpr char kDescription[] =
    "Attendant: scaled dot-product attention as a gRPC service.\n"
    "Speaks plain text to whoever reaches its addresses: keep them inside a network you trust.\n"
    "Needs no privileges and writes no files. SIGTERM or SIGINT drains and exits 0; a second one\n"
    "exits at once.\n"
    "Each flag with a value is also an environment variable (--listen is ATTENDANT_LISTEN) and a\n"
    "line of the file that --config names (listen=\"127.0.0.1:50051\"). A flag wins over the\n"
    "environment, the environment over the file. What is unknown or out of range ends the start\n"
    "with exit code 2.";

constexpr char kPrefix[] = "ATTENDANT_";
constexpr char kConfig[] = "config";
// Flags without a value, which are nobody's variable or line of a file.
constexpr std::pair<const char*, const char*> kActions[] = {
    {"--version", "Print the version and exit"},
    {"--print_config",
     "Print every setting, and where it comes from, as a file for --config; and exit"},
    {"--check_config",
     "Check all that a start checks before it serves, say what is wrong with exit\n"
     "code 2, and exit"},
};
// What the command line and attend_load read.
constexpr absl::string_view kVariablesOfClients[] = {"ATTENDANT_SERVER"};

std::string VariableOf(absl::string_view name) {
  return absl::StrCat(kPrefix, absl::AsciiStrToUpper(name));
}

// Kubernetes makes such for every Service of a namespace whose name starts with ours:
// ATTENDANT_SERVICE_HOST, ATTENDANT_PORT=tcp://10.0.0.1:50051, ATTENDANT_PORT_50051_TCP_ADDR.
bool IsMadeByKubernetes(const std::string& variable, absl::string_view value) {
  static const std::regex& service = *new std::regex(
      "ATTENDANT_([A-Z0-9_]+_)?(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|"
      "PORT_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)");
  static const std::regex& port = *new std::regex("ATTENDANT_([A-Z0-9_]+_)?PORT");
  return std::regex_match(variable, service) ||
         (std::regex_match(variable, port) && absl::StrContains(value, "://"));
}

// Levenshtein: how many characters to insert, delete or replace.
size_t EditDistance(absl::string_view a, absl::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 0; i < a.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i + 1);
    for (size_t j = 0; j < b.size(); ++j) {
      const size_t replaced = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({row[j] + 1, row[j + 1] + 1, replaced});
    }
  }
  return row.back();
}

// The line less its comment: what follows a # that is not in quotes.
std::string WithoutComment(const std::string& line) {
  char quote = 0;
  for (size_t i = 0; i < line.size(); ++i) {
    if (quote != 0) {
      if (line[i] == quote) quote = 0;
    } else if (line[i] == '"' || line[i] == '\'') {
      quote = line[i];
    } else if (line[i] == '#') {
      return std::string(absl::StripAsciiWhitespace(line.substr(0, i)));
    }
  }
  return std::string(absl::StripAsciiWhitespace(line));
}

bool OpensAnArray(absl::string_view line) {
  const size_t equals = line.find('=');
  return equals != absl::string_view::npos &&
         absl::StartsWith(absl::StripLeadingAsciiWhitespace(line.substr(equals + 1)), "[") &&
         !absl::EndsWith(line, "]");
}

// CLI11 reads the line; what it would pass over, or make something else of, is wrong.
bool ReadLine(const std::string& text, FileLine& line) {
  const absl::string_view name = absl::StripTrailingAsciiWhitespace(
      absl::string_view(text).substr(0, std::min(text.find('='), text.size())));
  std::istringstream stream(text);
  CLI::ConfigTOML format;
  format.comment('\0');
  const std::vector<CLI::ConfigItem> items = format.from_config(stream);
  if (items.size() != 1 || !items[0].parents.empty() || items[0].name != name) return false;
  line.name = std::string(name);
  line.value = absl::StrJoin(items[0].inputs, ",");
  return true;
}

// A value in quotes, such that --config reads it back.
std::string Quoted(const std::string& text) {
  const char quote = absl::StrContains(text, "\"") || absl::StrContains(text, "\\") ? '\'' : '"';
  return absl::StrCat(std::string(1, quote), text, std::string(1, quote));
}

using Texts = std::map<std::string, std::vector<std::string>>;

// The command line's grammar. texts: gets what is given, by name.
std::unique_ptr<CLI::App> MakeApp(const std::vector<Setting>& settings, Texts& texts) {
  auto app = std::make_unique<CLI::App>(kDescription, "attendant");
  app->get_formatter()->column_width(36);
  app->allow_extras();
  for (const auto& [flag, help] : kActions) app->add_flag(flag)->description(help);
  app->add_option("--config", texts[kConfig], "File of settings, one 'name=value' a line")
      ->type_name("FILE")
      ->allow_extra_args(false);
  for (const Setting& setting : settings) {
    app->add_option("--" + setting.name, texts[setting.name], setting.help)
        ->type_name(setting.type)
        ->default_str(setting.default_text)
        ->allow_extra_args(false);
  }
  return app;
}

// CLI11 would take the argument that follows for a value that is missing, a flag too.
absl::Status CheckForValues(const Texts& texts, int argc, const char* const* argv) {
  for (int i = 1; i < argc; ++i) {
    absl::string_view name = argv[i];
    if (!absl::ConsumePrefix(&name, "--")) continue;
    const bool has_equals = absl::ConsumeSuffix(&name, "=");
    if (texts.count(std::string(name)) == 0) continue;
    if (has_equals || i + 1 == argc || absl::StartsWith(argv[i + 1], "--")) {
      return absl::InvalidArgumentError(absl::StrCat("--", name, ": has no value"));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<FileLine>> ReadFileLines(std::istream& file) {
  std::vector<FileLine> lines;
  int number = 0;
  for (std::string raw; std::getline(file, raw);) {
    FileLine line;
    line.number = ++number;
    std::string text = WithoutComment(raw);
    while (OpensAnArray(text) && std::getline(file, raw)) {
      ++number;
      text += WithoutComment(raw);
    }
    if (text.empty()) continue;
    if (!ReadLine(text, line)) {
      return absl::InvalidArgumentError(
          absl::StrCat(line.number, ": is no line such as name=\"value\""));
    }
    lines.push_back(std::move(line));
  }
  return lines;
}

void Settings::Add(Setting setting) { settings_.push_back(std::move(setting)); }

const Setting* Settings::Find(absl::string_view name) const {
  const auto found = std::find_if(settings_.begin(), settings_.end(),
                                  [name](const Setting& one) { return one.name == name; });
  return found == settings_.end() ? nullptr : &*found;
}

std::vector<std::string> Settings::names() const {
  std::vector<std::string> names;
  names.reserve(settings_.size());
  for (const Setting& setting : settings_) names.push_back(setting.name);
  return names;
}

std::string Settings::NearestTo(absl::string_view name) const {
  std::vector<std::string> known = names();
  known.emplace_back(kConfig);
  const std::string wanted = absl::AsciiStrToLower(name.substr(0, 64));
  return *std::min_element(known.begin(), known.end(), [&](const auto& a, const auto& b) {
    return EditDistance(a, wanted) < EditDistance(b, wanted);
  });
}

absl::Status Settings::Take(const Setting& setting, const std::string& where, const Value& value) {
  std::vector<std::string> texts = {value.text};
  if (setting.is_list()) {
    setting.clear();
    texts = absl::StrSplit(value.text, ',');
  }
  for (const std::string& text : texts) {
    if (!setting.read(text)) {
      return absl::InvalidArgumentError(
          absl::StrCat(where, ": '", text, "' is ", setting.expected));
    }
  }
  values_[setting.name] = value;
  return absl::OkStatus();
}

absl::Status Settings::ReadFile(const std::string& path) {
  std::error_code error;
  std::ifstream file(path);
  if (!file || std::filesystem::is_directory(path, error)) {
    return absl::InvalidArgumentError(
        absl::StrCat("--config=", path, ": is no file that can be read"));
  }
  const auto lines = ReadFileLines(file);
  if (!lines.ok()) {
    return absl::InvalidArgumentError(absl::StrCat(path, ":", lines.status().message()));
  }
  std::map<std::string, FileLine> before;
  for (const FileLine& line : *lines) {
    const std::string where = absl::StrCat(path, ":", line.number, ": ", line.name);
    const Setting* const setting = Find(line.name);
    if (setting == nullptr) {
      return absl::InvalidArgumentError(
          absl::StrCat(where, ": is no setting; the nearest is ", NearestTo(line.name)));
    }
    const auto [known, is_new] = before.emplace(line.name, line);
    if (!is_new && !setting->is_list()) {
      return absl::InvalidArgumentError(
          absl::StrCat(where, ": was set before, on line ", known->second.number));
    }
    if (!is_new) known->second.value += "," + line.value;
    const std::string origin = absl::StrCat("file ", path, ", line ", line.number);
    absl::Status status = Take(*setting, where, {known->second.value, origin});
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status Settings::ReadEnvironment() {
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const absl::string_view text = *entry;
    const std::string variable(text.substr(0, text.find('=')));
    absl::string_view name = variable;
    if (!absl::ConsumePrefix(&name, kPrefix) || text.size() <= variable.size() + 1) continue;
    const std::string value(text.substr(variable.size() + 1));
    const Setting* const setting = Find(absl::AsciiStrToLower(name));
    if (setting != nullptr && variable == VariableOf(setting->name)) {
      absl::Status status = Take(*setting, variable, {value, "environment " + variable});
      if (!status.ok()) return status;
      continue;
    }
    const bool is_of_others =
        std::count(std::begin(kVariablesOfClients), std::end(kVariablesOfClients), variable) > 0;
    if (variable == VariableOf(kConfig) || is_of_others || IsMadeByKubernetes(variable, value)) {
      continue;
    }
    return absl::InvalidArgumentError(
        absl::StrCat(variable, ": is no setting; the nearest is ", VariableOf(NearestTo(name))));
  }
  return absl::OkStatus();
}

absl::StatusOr<Settings::Action> Settings::Read(int argc, const char* const* argv) {
  Texts texts;
  const auto app = MakeApp(settings_, texts);
  if (absl::Status status = CheckForValues(texts, argc, argv); !status.ok()) return status;
  try {
    app->parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    return Action::kHelp;
  } catch (const CLI::ParseError& error) {
    return absl::InvalidArgumentError(error.what());
  }
  if (const auto extras = app->remaining(); !extras.empty()) {
    const size_t start = std::min(extras[0].find_first_not_of('-'), extras[0].size());
    const std::string name = extras[0].substr(start, extras[0].find('=') - start);
    return absl::InvalidArgumentError(absl::StrCat(extras[0].substr(0, start + name.size()),
                                                   ": is no flag; the nearest is --",
                                                   NearestTo(name)));
  }
  if (app->count("--version") > 0) return Action::kVersion;
  const char* const variable = std::getenv(VariableOf(kConfig).c_str());
  const std::string path = !texts[kConfig].empty() ? texts[kConfig].back()
                           : variable != nullptr   ? variable
                                                   : "";
  absl::Status status = path.empty() ? absl::OkStatus() : ReadFile(path);
  if (status.ok()) status = ReadEnvironment();
  for (const Setting& setting : settings_) {
    const std::vector<std::string>& given = texts[setting.name];
    if (!status.ok() || given.empty()) continue;
    const std::string text = setting.is_list() ? absl::StrJoin(given, ",") : given.back();
    status = Take(setting, "--" + setting.name, {text, "flag"});
  }
  if (!status.ok()) return status;
  if (app->count("--print_config") > 0) return Action::kPrint;
  return app->count("--check_config") > 0 ? Action::kCheck : Action::kServe;
}

std::string Settings::Help() const {
  Texts texts;
  const auto app = MakeApp(settings_, texts);
  // Not where it reads: CLI11 would take values from there by itself.
  for (const auto& [name, text] : texts) {
    CLI::Option* const option = app->get_option("--" + name)->envname(VariableOf(name));
    const Setting* const setting = Find(name);
    if (setting == nullptr || !setting->is_list()) option->expected(1);
  }
  return app->help();
}

std::string Settings::Print() const {
  std::string lines;
  for (const Setting& setting : settings_) {
    const auto given = values_.find(setting.name);
    const Value value =
        given == values_.end() ? Value{setting.default_text, "default"} : given->second;
    absl::StrAppend(&lines, setting.name, "=", Quoted(value.text), "  # ", value.origin, "\n");
  }
  return lines;
}

}  // namespace attendant::server
