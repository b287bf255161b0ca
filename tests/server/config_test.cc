#include "server/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
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
    testing::Values(BadCase{"--bogus=1", "--bogus"}, BadCase{"--listen=50051", "'50051'"},
                    BadCase{"--listen=host:99999", "'host:99999'"},
                    BadCase{"--listen=127.0.0.1:1,unix:run", "'unix:run'"},
                    BadCase{"--listen=unix:/"
                            "0123456789012345678901234567890123456789012345678901234567890123456789"
                            "01234567890123456789012345678901234567",
                            "at most 107 bytes"},
                    BadCase{"--metrics_listen=unix:/run/a", "'unix:/run/a'"},
                    BadCase{"--listen=-a:1", "--listen: '-a:1' is no HOST:PORT"},
                    BadCase{"--listen=\"a\":1", "--listen: '\"a\":1' is no HOST:PORT"},
                    BadCase{"--listen='a:1", "--listen: ''a:1' is no HOST:PORT"},
                    BadCase{"--listen=::1:1", "--listen: '::1:1' is no HOST:PORT"},
                    BadCase{"--listen=[::1:1", "--listen: '[::1:1' is no HOST:PORT"},
                    BadCase{"--listen=[]:1", "--listen: '[]:1' is no HOST:PORT"},
                    BadCase{"--metrics_listen=-a:1", "--metrics_listen: '-a:1' is no HOST:PORT"},
                    BadCase{"--metrics_listen=a b:1", "--metrics_listen: 'a b:1' is no HOST:PORT"},
                    BadCase{"--listen=a:1,b:1,a:1", "--listen: 'a:1' is given twice"},
                    BadCase{"--listen=unix:/a,unix:/a", "--listen: 'unix:/a' is given twice"},
                    BadCase{"--listen=0.0.0.0:9464",
                            "--metrics_listen: '0.0.0.0:9464' is given in --listen, too"},
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
    testing::Values(BadCase{"liste=\"127.0.0.1:1\"", "bad.conf: 'liste' is no setting"},
                    BadCase{"listen=", "--listen: '' is no HOST:PORT"},
                    BadCase{"listen=\"\"", "--listen: '' is no HOST:PORT"},
                    BadCase{"listen=\"-a:1\"", "--listen: '-a:1' is no HOST:PORT"},
                    BadCase{"listen=\"'a':1\"", "--listen: ''a':1' is no HOST:PORT"},
                    BadCase{"metrics_listen=\"-a:1\"", "--metrics_listen: '-a:1' is no HOST:PORT"},
                    BadCase{"max_queue=", "--max_queue: '' is no number"},
                    BadCase{"metrics_listen=", "--metrics_listen: '' is no HOST:PORT"}));

TEST(ConfigTest, VariablesOfAKubernetesServiceAreNoSettings) {
  const ScopedVariable port("ATTENDANT_PORT", "tcp://10.0.0.1:50051");
  const ScopedVariable host("ATTENDANT_SERVICE_HOST", "10.0.0.1");
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
