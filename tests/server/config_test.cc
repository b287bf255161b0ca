#include "server/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <algorithm>
#include <cctype>
#include <fstream>
#include <optional>
#include <vector>

#include "tests/temp_dir.h"

namespace attendant::server {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

ParsedConfig Parse(std::vector<const char*> arguments) {
  arguments.insert(arguments.begin(), "attendant");
  return ParseConfig(static_cast<int>(arguments.size()), arguments.data());
}

// An environment variable for the length of a test.
class ScopedVariable {
 public:
  ScopedVariable(const char* name, const char* value) : name_(name) { setenv(name, value, 1); }
  ~ScopedVariable() { unsetenv(name_); }

 private:
  const char* const name_;
};

std::string WriteFile(const std::string& name, const std::string& text) {
  static const TempDir folder;
  const std::string path = folder.PathOf(name);
  std::ofstream(path) << text;
  return path;
}

TEST(ConfigTest, DefaultsAreThoseOfTheDocumentation) {
  const ParsedConfig parsed = Parse({});
  ASSERT_FALSE(parsed.exit_code.has_value());
  EXPECT_THAT(parsed.config.listen, ElementsAre("0.0.0.0:50051"));
  EXPECT_EQ(parsed.config.metrics_listen, "0.0.0.0:9464");
  EXPECT_EQ(parsed.config.compute_threads, 0);
  EXPECT_EQ(parsed.config.max_running, 8);
  EXPECT_EQ(parsed.config.max_queue, 256);
  EXPECT_EQ(parsed.config.max_queue_wait, absl::Seconds(10));
  EXPECT_EQ(parsed.config.max_compute_time, absl::Hours(1));
  EXPECT_EQ(parsed.config.memory_budget, 0);
  EXPECT_EQ(parsed.config.max_message_bytes, 0);
  EXPECT_EQ(parsed.config.max_connection_age, absl::ZeroDuration());
  EXPECT_EQ(parsed.config.drain_delay, absl::Seconds(5));
  EXPECT_EQ(parsed.config.drain_timeout, absl::Seconds(20));
  EXPECT_TRUE(parsed.config.measure_peak);
}

TEST(ConfigTest, EveryFlagIsRead) {
  const ParsedConfig parsed =
      Parse({"--listen=127.0.0.1:1", "--metrics_listen", "[::1]:2", "--compute_threads=3",
             "--max_message_bytes=1MiB", "--drain_delay=250ms", "--drain_timeout=1m30s",
             "--measure_peak=false", "--kernel=onednn", "--max_running=4", "--max_queue=0",
             "--max_queue_wait=2s", "--memory_budget=2mb", "--max_connection_age=5m",
             "--max_compute_time=90m"});
  ASSERT_FALSE(parsed.exit_code.has_value());
  EXPECT_THAT(parsed.config.listen, ElementsAre("127.0.0.1:1"));
  EXPECT_EQ(parsed.config.metrics_listen, "[::1]:2");
  EXPECT_EQ(parsed.config.compute_threads, 3);
  EXPECT_EQ(parsed.config.max_message_bytes, 1048576);
  EXPECT_EQ(parsed.config.max_running, 4);
  EXPECT_EQ(parsed.config.max_queue, 0);
  EXPECT_EQ(parsed.config.max_queue_wait, absl::Seconds(2));
  EXPECT_EQ(parsed.config.max_compute_time, absl::Minutes(90));
  EXPECT_EQ(parsed.config.memory_budget, 2 << 20);
  EXPECT_EQ(parsed.config.max_connection_age, absl::Minutes(5));
  EXPECT_EQ(parsed.config.drain_delay, absl::Milliseconds(250));
  EXPECT_EQ(parsed.config.drain_timeout, absl::Seconds(90));
  EXPECT_FALSE(parsed.config.measure_peak);
  EXPECT_EQ(parsed.config.kernel, core::Kernel::kOneDnn);
}

TEST(ConfigTest, AutoLeavesItToTheMachine) {
  EXPECT_EQ(Parse({"--compute_threads=3", "--compute_threads=auto"}).config.compute_threads, 0);
  EXPECT_EQ(Parse({"--memory_budget=3", "--memory_budget=auto"}).config.memory_budget, 0);
  EXPECT_EQ(Parse({"--max_message_bytes=auto"}).config.max_message_bytes, 0);
}

TEST(ConfigTest, AddressesAreManyByFlagsByCommasAndInTheFile) {
  EXPECT_THAT(Parse({"--listen=127.0.0.1:1", "--listen", "unix:/run/a"}).config.listen,
              ElementsAre("127.0.0.1:1", "unix:/run/a"));
  EXPECT_THAT(Parse({"--listen=unix:/run/a,[::1]:2"}).config.listen,
              ElementsAre("unix:/run/a", "[::1]:2"));
  const std::string file =
      "--config=" + WriteFile("addresses.conf", "listen=[\"127.0.0.1:1\", \"unix:/run/a\"]\n");
  EXPECT_THAT(Parse({file.c_str()}).config.listen, ElementsAre("127.0.0.1:1", "unix:/run/a"));
  const ScopedVariable listen("ATTENDANT_LISTEN", "127.0.0.1:3,127.0.0.1:4");
  EXPECT_THAT(Parse({file.c_str()}).config.listen, ElementsAre("127.0.0.1:3", "127.0.0.1:4"));
  // The command line's replace them.
  EXPECT_THAT(Parse({"--listen=127.0.0.1:5"}).config.listen, ElementsAre("127.0.0.1:5"));
}

TEST(ConfigTest, FlagWinsOverEnvironmentOverFile) {
  const std::string file = WriteFile(
      "precedence.conf", "listen=\"127.0.0.1:1\"\ncompute_threads=1\ndrain_delay=\"1s\"\n");
  const ScopedVariable config("ATTENDANT_CONFIG", file.c_str());
  const ScopedVariable threads("ATTENDANT_COMPUTE_THREADS", "2");
  const ScopedVariable delay("ATTENDANT_DRAIN_DELAY", "2s");
  const ParsedConfig parsed = Parse({"--drain_delay=3s"});
  ASSERT_FALSE(parsed.exit_code.has_value());
  EXPECT_THAT(parsed.config.listen, ElementsAre("127.0.0.1:1"));
  EXPECT_EQ(parsed.config.compute_threads, 2);
  EXPECT_EQ(parsed.config.drain_delay, absl::Seconds(3));
}

struct BadCase {
  const char* argument;
  const char* message;  // what standard error must say
};

class BadConfigTest : public testing::TestWithParam<BadCase> {};

TEST_P(BadConfigTest, ExitsWith2AndSaysWhy) {
  testing::internal::CaptureStderr();
  const ParsedConfig parsed = Parse({GetParam().argument});
  const std::string error = testing::internal::GetCapturedStderr();
  EXPECT_EQ(parsed.exit_code, 2);
  EXPECT_THAT(error, HasSubstr(GetParam().message));
}

INSTANTIATE_TEST_SUITE_P(
    Arguments, BadConfigTest,
    testing::Values(BadCase{"--max_que=1", "--max_que: is no flag; the nearest is --max_queue\n"},
                    BadCase{"-max_queue=1", "the nearest is --max_queue\n"},
                    BadCase{"extra", "extra: is no flag"}, BadCase{"--listen=50051", "'50051'"},
                    BadCase{"--listen=host:99999", "'host:99999'"},
                    BadCase{"--listen=127.0.0.1:1,unix:run", "'unix:run'"},
                    BadCase{"--listen=unix:/"
                            "0123456789012345678901234567890123456789012345678901234567890123456789"
                            "01234567890123456789012345678901234567",
                            "at most 107 bytes"},
                    BadCase{"--metrics_listen=unix:/run/a", "'unix:/run/a'"},
                    BadCase{"--listen=-a:1", "listen: '-a:1' is no HOST:PORT"},
                    BadCase{"--listen=\"a\":1", "listen: '\"a\":1' is no HOST:PORT"},
                    BadCase{"--listen='a:1", "listen: ''a:1' is no HOST:PORT"},
                    BadCase{"--listen=::1:1", "listen: '::1:1' is no HOST:PORT"},
                    BadCase{"--listen=[::1:1", "listen: '[::1:1' is no HOST:PORT"},
                    BadCase{"--listen=[]:1", "listen: '[]:1' is no HOST:PORT"},
                    BadCase{"--metrics_listen=-a:1", "listen: '-a:1' is no HOST:PORT"},
                    BadCase{"--metrics_listen=a b:1", "listen: 'a b:1' is no HOST:PORT"},
                    BadCase{"--listen=a:1,b:1,a:1", "listen: 'a:1' is given twice"},
                    BadCase{"--listen=unix:/a,unix:/a", "listen: 'unix:/a' is given twice"},
                    BadCase{"--listen=0.0.0.0:9464",
                            "listen: '0.0.0.0:9464' is given in --listen, too"},
                    BadCase{"--compute_threads=1025", "1025"},
                    BadCase{"--compute_threads=-1", "-1"}, BadCase{"--compute_threads=0", "'0'"},
                    BadCase{"--compute_threads=two", "two"},
                    BadCase{"--max_running=0", "'0' is no number from 1"},
                    BadCase{"--max_queue=-1", "'-1' is no number from 0"},
                    BadCase{"--max_message_bytes=0", "'0' is neither auto nor a size"},
                    BadCase{"--max_message_bytes=3GiBB", "'3GiBB' is neither auto nor a size"},
                    BadCase{"--memory_budget=-1", "'-1' is neither auto nor a size"},
                    BadCase{"--memory_budget=99999999999GiB", "'99999999999GiB' is neither"},
                    BadCase{"--memory_budget=", "--memory_budget: has no value"},
                    BadCase{"--listen", "--listen: has no value"},
                    BadCase{"--config=", "--config: has no value"},
                    BadCase{"--max_queue_wait=ten", "'ten' is no duration"},
                    BadCase{"--max_connection_age=1", "'1' is no duration"},
                    BadCase{"--max_compute_time=25h", "'25h' is no duration"},
                    BadCase{"--drain_delay=5", "'5' is no duration"},
                    BadCase{"--drain_timeout=-1s", "'-1s' is no duration"},
                    BadCase{"--measure_peak=maybe", "'maybe' is neither"},
                    BadCase{"--kernel=fast", "'fast' is neither"},
                    BadCase{"--config=/no/such/file", "--config=/no/such/file: is no file"},
                    BadCase{"--config=/", "--config=/: is no file"}));

TEST(ConfigTest, AMissingValueDoesNotSwallowTheNextFlag) {
  for (const char* const flag : {"--listen=", "--listen", "--metrics_listen=", "--max_queue"}) {
    testing::internal::CaptureStderr();
    EXPECT_EQ(Parse({flag, "--metrics_listen=127.0.0.1:1"}).exit_code, 2) << flag;
    EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr(": has no value")) << flag;
  }
}

TEST(ConfigTest, FreePortsAndOtherHostsAreNoRepetition) {
  const ParsedConfig parsed = Parse({"--listen=127.0.0.1:0,127.0.0.1:0,[fe80::1%eth0]:1,a-b.c_d:1",
                                     "--metrics_listen=127.0.0.1:0"});
  EXPECT_FALSE(parsed.exit_code.has_value());
  EXPECT_EQ(parsed.config.listen.size(), 4u);
}

class BadFileTest : public testing::TestWithParam<BadCase> {};

TEST_P(BadFileTest, ExitsWith2AndSaysWhy) {
  const std::string argument =
      "--config=" + WriteFile("bad.conf", std::string(GetParam().argument) + "\n");
  testing::internal::CaptureStderr();
  const ParsedConfig parsed = Parse({argument.c_str()});
  const std::string error = testing::internal::GetCapturedStderr();
  EXPECT_EQ(parsed.exit_code, 2);
  EXPECT_THAT(error, HasSubstr(GetParam().message));
}

INSTANTIATE_TEST_SUITE_P(
    Lines, BadFileTest,
    testing::Values(
        BadCase{"\n# a comment\nmax_que=1",
                "bad.conf:3: max_que: is no setting; the nearest "
                "is max_queue\n"},
        BadCase{"\nmax_queue=1\nmax_queue=2", "bad.conf:3: max_queue: was set before, on line 2"},
        BadCase{"listen=[\"127.0.0.1:1\",\n\"127.0.0.1:2\"]\nmax_running=0",
                "bad.conf:3: max_running: '0' is no number from 1 to 1000000"},
        BadCase{"[attendant]\nmax_queue=1", "bad.conf:1: is no line such as"},
        BadCase{"a.max_queue=1", "bad.conf:1: "}, BadCase{"x", "bad.conf:1: "},
        BadCase{"max_queue", "bad.conf:1: max_queue: 'true' is no number"},
        BadCase{"config=\"other.conf\"", "bad.conf:1: config: is no setting"},
        BadCase{"liste=\"127.0.0.1:1\"", "bad.conf:1: liste: is no setting; the nearest is listen"},
        BadCase{"listen=", "listen: '' is no HOST:PORT"},
        BadCase{"listen=\"\"", "listen: '' is no HOST:PORT"},
        BadCase{"listen=\"-a:1\"", "listen: '-a:1' is no HOST:PORT"},
        BadCase{"listen=\"'a':1\"", "listen: ''a':1' is no HOST:PORT"},
        BadCase{"metrics_listen=\"-a:1\"", "listen: '-a:1' is no HOST:PORT"},
        BadCase{"max_queue=", "bad.conf:1: max_queue: '' is no number"},
        BadCase{"metrics_listen=", "listen: '' is no HOST:PORT"}));

TEST(ConfigTest, AFileIsReadLineByLine) {
  const std::string file = "--config=" + WriteFile("lines.conf",
                                                   "# a comment\n"
                                                   "  max_queue = 7   # another\n"
                                                   "\n"
                                                   "drain_delay='2s'\n"
                                                   "listen=[\"127.0.0.1:1\",  # the first\n"
                                                   "        \"unix:/run/a#b\"]\n"
                                                   "listen=127.0.0.1:2\n"
                                                   "measure_peak=false\n");
  const ParsedConfig parsed = Parse({file.c_str()});
  ASSERT_FALSE(parsed.exit_code.has_value());
  EXPECT_EQ(parsed.config.max_queue, 7);
  EXPECT_EQ(parsed.config.drain_delay, absl::Seconds(2));
  EXPECT_THAT(parsed.config.listen, ElementsAre("127.0.0.1:1", "unix:/run/a#b", "127.0.0.1:2"));
  EXPECT_FALSE(parsed.config.measure_peak);
}

// For each setting three values that differ from each other and from the default.
struct ThreeValues {
  const char* name;
  const char* values[3];
};

constexpr ThreeValues kThreeValues[] = {
    {"listen", {"127.0.0.1:1", "127.0.0.1:2,[::1]:2", "unix:/run/a"}},
    {"metrics_listen", {"127.0.0.1:4", "127.0.0.1:5", "127.0.0.1:6"}},
    {"max_connection_age", {"1s", "2s", "3s"}},
    {"drain_delay", {"1s", "2s", "3s"}},
    {"drain_timeout", {"1s", "2s", "3s"}},
    {"compute_threads", {"1", "2", "3"}},
    {"max_running", {"1", "2", "3"}},
    {"max_queue", {"1", "2", "3"}},
    {"max_queue_wait", {"1s", "2s", "3s"}},
    {"max_compute_time", {"1s", "2s", "3s"}},
    {"memory_budget", {"1MiB", "2MiB", "3MiB"}},
    {"max_message_bytes", {"1MiB", "2MiB", "3MiB"}},
};

// Those of which there are two values alone: the default, and another.
constexpr ThreeValues kTwoValues[] = {
    {"kernel", {"onednn", "fused", "onednn"}},
    {"measure_peak", {"false", "true", "false"}},
};

std::string Upper(std::string text) {
  for (char& c : text) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  return text;
}

// A setting given in the file, in the environment and as a flag, each or not.
Config ConfigWith(const std::string& name, const char* in_file, const char* in_environment,
                  const char* as_flag) {
  const std::string line = in_file == nullptr ? "" : name + "=\"" + in_file + "\"\n";
  const std::string file = "--config=" + WriteFile("one.conf", line);
  const std::string flag = "--" + name + "=" + (as_flag == nullptr ? "" : as_flag);
  const std::string variable_name = "ATTENDANT_" + Upper(name);
  std::optional<ScopedVariable> variable;
  if (in_environment != nullptr) variable.emplace(variable_name.c_str(), in_environment);
  std::vector<const char*> arguments = {file.c_str()};
  if (as_flag != nullptr) arguments.push_back(flag.c_str());
  const ParsedConfig parsed = Parse(arguments);
  EXPECT_FALSE(parsed.exit_code.has_value()) << name;
  return parsed.config;
}

class PrecedenceTest : public testing::TestWithParam<ThreeValues> {};

TEST_P(PrecedenceTest, FlagOverEnvironmentOverFileOverDefault) {
  const auto& [name, values] = GetParam();
  const Config first = ConfigWith(name, nullptr, nullptr, values[0]);
  const Config second = ConfigWith(name, nullptr, nullptr, values[1]);
  const Config third = ConfigWith(name, nullptr, nullptr, values[2]);
  EXPECT_FALSE(first == Config() && second == Config());
  EXPECT_FALSE(first == second);
  EXPECT_FALSE(second == third);
  EXPECT_EQ(ConfigWith(name, values[0], nullptr, nullptr), first);
  EXPECT_EQ(ConfigWith(name, nullptr, values[0], nullptr), first);
  EXPECT_EQ(ConfigWith(name, values[0], values[1], nullptr), second);
  EXPECT_EQ(ConfigWith(name, values[0], nullptr, values[1]), second);
  EXPECT_EQ(ConfigWith(name, nullptr, values[0], values[1]), second);
  EXPECT_EQ(ConfigWith(name, values[0], values[1], values[2]), third);
}

INSTANTIATE_TEST_SUITE_P(Settings, PrecedenceTest, testing::ValuesIn(kThreeValues),
                         [](const auto& test) { return std::string(test.param.name); });
INSTANTIATE_TEST_SUITE_P(Choices, PrecedenceTest, testing::ValuesIn(kTwoValues),
                         [](const auto& test) { return std::string(test.param.name); });

TEST(ConfigTest, EverySettingIsInTheTableOfPrecedence) {
  std::vector<std::string> tested;
  for (const ThreeValues& one : kThreeValues) tested.emplace_back(one.name);
  for (const ThreeValues& one : kTwoValues) tested.emplace_back(one.name);
  EXPECT_THAT(tested, testing::UnorderedElementsAreArray(SettingNames()));
}

TEST(ConfigTest, WhatIsOverruledIsCheckedToo) {
  const ScopedVariable queue("ATTENDANT_MAX_QUEUE", "many");
  testing::internal::CaptureStderr();
  EXPECT_EQ(Parse({"--max_queue=3"}).exit_code, 2);
  EXPECT_THAT(testing::internal::GetCapturedStderr(),
              HasSubstr("ATTENDANT_MAX_QUEUE: 'many' is no number from 0 to 1000000"));
}

std::string Printed(const std::vector<const char*>& arguments) {
  testing::internal::CaptureStdout();
  EXPECT_EQ(Parse(arguments).exit_code, 0);
  return testing::internal::GetCapturedStdout();
}

TEST(ConfigTest, PrintedSettingsSayWhereTheyComeFrom) {
  const std::string path = WriteFile("printed.conf", "\nmax_queue=1\nmax_running=2\n");
  const std::string file = "--config=" + path;
  const ScopedVariable running("ATTENDANT_MAX_RUNNING", "3");
  const std::string printed = Printed({file.c_str(), "--drain_delay=4s", "--print_config"});
  EXPECT_THAT(printed, HasSubstr("\nmax_queue=\"1\"  # file " + path + ", line 2\n"));
  EXPECT_THAT(printed, HasSubstr("\nmax_running=\"3\"  # environment ATTENDANT_MAX_RUNNING\n"));
  EXPECT_THAT(printed, HasSubstr("\ndrain_delay=\"4s\"  # flag\n"));
  EXPECT_THAT(printed, HasSubstr("\nmemory_budget=\"auto\"  # default\n"));
  EXPECT_EQ(std::count(printed.begin(), printed.end(), '\n'),
            static_cast<std::ptrdiff_t>(SettingNames().size()));
}

TEST(ConfigTest, PrintedSettingsAreReadBack) {
  std::vector<std::string> flags;
  for (const ThreeValues& one : kThreeValues) {
    flags.push_back(std::string("--") + one.name + "=" + one.values[1]);
  }
  for (const ThreeValues& one : kTwoValues) {
    flags.push_back(std::string("--") + one.name + "=" + one.values[0]);
  }
  flags.emplace_back("--listen=unix:/run/a \"b\" #c");
  std::vector<const char*> arguments;
  arguments.reserve(flags.size() + 1);
  for (const std::string& flag : flags) arguments.push_back(flag.c_str());
  const Config asked = Parse(arguments).config;
  arguments.push_back("--print_config");
  const std::string file = "--config=" + WriteFile("again.conf", Printed(arguments));
  EXPECT_EQ(Parse({file.c_str()}).config, asked);
  const std::string defaults =
      "--config=" + WriteFile("defaults.conf", Printed({"--print_config"}));
  EXPECT_EQ(Parse({defaults.c_str()}).config, Config());
}

TEST(ConfigTest, CheckConfigServesNothingAndStillRefuses) {
  EXPECT_TRUE(Parse({"--check_config"}).check_only);
  EXPECT_FALSE(Parse({}).check_only);
  testing::internal::CaptureStderr();
  EXPECT_EQ(Parse({"--check_config", "--max_running=0"}).exit_code, 2);
  testing::internal::GetCapturedStderr();
}

class UnknownVariableTest : public testing::TestWithParam<BadCase> {};

TEST_P(UnknownVariableTest, ExitsWith2AndNamesTheNearest) {
  const ScopedVariable variable(GetParam().argument, "3");
  testing::internal::CaptureStderr();
  EXPECT_EQ(Parse({}).exit_code, 2);
  EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr(GetParam().message));
}

INSTANTIATE_TEST_SUITE_P(
    Names, UnknownVariableTest,
    testing::Values(
        BadCase{"ATTENDANT_MAX_QEUE",
                "ATTENDANT_MAX_QEUE: is no setting; the nearest is ATTENDANT_MAX_QUEUE\n"},
        BadCase{"ATTENDANT_max_queue", "the nearest is ATTENDANT_MAX_QUEUE\n"},
        BadCase{"ATTENDANT_LISTEN_PORT", "the nearest is ATTENDANT_LISTEN\n"},
        BadCase{"ATTENDANT_PORT", "is no setting"}, BadCase{"ATTENDANT_", "is no setting"}));

TEST(ConfigTest, VariablesOfOthersAreNoSettings) {
  const ScopedVariable port("ATTENDANT_PORT", "tcp://10.0.0.1:50051");
  const ScopedVariable host("ATTENDANT_SERVICE_HOST", "10.0.0.1");
  const ScopedVariable service("ATTENDANT_SERVICE_PORT", "50051");
  const ScopedVariable named("ATTENDANT_SERVICE_PORT_GRPC", "50051");
  const ScopedVariable tcp("ATTENDANT_PORT_50051_TCP", "tcp://10.0.0.1:50051");
  const ScopedVariable address("ATTENDANT_PORT_50051_TCP_ADDR", "10.0.0.1");
  const ScopedVariable number("ATTENDANT_PORT_50051_TCP_PORT", "50051");
  const ScopedVariable other("ATTENDANT_METRICS_PORT_9464_TCP_PROTO", "tcp");
  const ScopedVariable client("ATTENDANT_SERVER", "127.0.0.1:50051");
  const ScopedVariable empty("ATTENDANT_MAX_QEUE", "");
  EXPECT_FALSE(Parse({}).exit_code.has_value());
}

TEST(ConfigTest, HelpAndVersionExitWith0) {
  testing::internal::CaptureStdout();
  EXPECT_EQ(Parse({"--help"}).exit_code, 0);
  EXPECT_THAT(testing::internal::GetCapturedStdout(), HasSubstr("ATTENDANT_DRAIN_TIMEOUT"));
  testing::internal::CaptureStdout();
  EXPECT_EQ(Parse({"--version"}).exit_code, 0);
  EXPECT_THAT(testing::internal::GetCapturedStdout(), HasSubstr("attendant "));
}

}  // namespace
}  // namespace attendant::server
