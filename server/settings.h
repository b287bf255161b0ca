// Settings by name: flag > environment > file > default, and where each value came from.
#ifndef ATTENDANT_SERVER_SETTINGS_H_
#define ATTENDANT_SERVER_SETTINGS_H_

#include <functional>
#include <istream>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace attendant::server {

struct Setting {
  std::string name;  // "max_queue": --max_queue, ATTENDANT_MAX_QUEUE, max_queue=...
  std::string type;  // what --help calls its value
  std::string default_text;
  std::string help;
  std::string expected;  // what a text is that cannot be read: "no number from 0 to 9"
  // Takes the value from the text, or returns false.
  std::function<bool(const std::string& text)> read;
  // Of a list, else null: empties it. Several flags, lines or elements of an array are one text
  // with commas between, and `read` takes what is between these one after the other.
  std::function<void()> clear = nullptr;

  bool is_list() const { return clear != nullptr; }
};

// One line of a file of settings, or several where an array goes over them.
struct FileLine {
  int number = 0;  // of the first
  std::string name;
  std::string value;
};

// The lines 'name=value' of a file: a value may be in quotes, or an array of such; # starts a
// comment. Returns INVALID_ARGUMENT naming the line where one is none of that.
absl::StatusOr<std::vector<FileLine>> ReadFileLines(std::istream& file);

// Thread-compatible.
class Settings {
 public:
  void Add(Setting setting);

  // What a command line asks for beside its settings.
  enum class Action { kServe, kHelp, kVersion, kPrint, kCheck };

  // Reads the file that --config or ATTENDANT_CONFIG names, then the environment, then the command
  // line, so that the last of them wins; what is overruled is checked too. Returns INVALID_ARGUMENT
  // where a name is unknown, with the nearest one that is known, or a value is not what it should
  // be, with its file and line, variable or flag.
  absl::StatusOr<Action> Read(int argc, const char* const* argv);

  std::string Help() const;
  // Every value and where it came from, as lines that --config reads.
  std::string Print() const;
  std::vector<std::string> names() const;

 private:
  struct Value {
    std::string text;
    std::string origin;
  };

  absl::Status ReadFile(const std::string& path);
  absl::Status ReadEnvironment();
  // where: what an error starts with.
  absl::Status Take(const Setting& setting, const std::string& where, const Value& value);
  const Setting* Find(absl::string_view name) const;
  std::string NearestTo(absl::string_view name) const;

  std::vector<Setting> settings_;
  std::map<std::string, Value> values_;  // those that were given
};

}  // namespace attendant::server

#endif  // ATTENDANT_SERVER_SETTINGS_H_
