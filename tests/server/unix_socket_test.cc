#include "server/unix_socket.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>

#include "tests/temp_dir.h"

namespace attendant::server {
namespace {

using ::testing::HasSubstr;

// Listens on a path; closing it leaves the file behind, as a process that is killed does.
class Listener {
 public:
  explicit Listener(const std::string& path) : descriptor_(socket(AF_UNIX, SOCK_STREAM, 0)) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, path.data(), path.size());
    EXPECT_EQ(bind(descriptor_, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    EXPECT_EQ(listen(descriptor_, 1), 0);
  }
  ~Listener() { close(descriptor_); }

 private:
  const int descriptor_;
};

class UnixSocketTest : public testing::Test {
 protected:
  TempDir folder_;
  const std::string path_ = folder_.PathOf("socket");
};

TEST_F(UnixSocketTest, NothingThereIsFine) { EXPECT_TRUE(MakeWayForSocket(path_).ok()); }

TEST_F(UnixSocketTest, AStaleSocketIsRemoved) {
  { Listener listener(path_); }
  ASSERT_TRUE(std::filesystem::exists(path_));
  EXPECT_TRUE(MakeWayForSocket(path_).ok());
  EXPECT_FALSE(std::filesystem::exists(path_));
}

TEST_F(UnixSocketTest, ALivingServerKeepsItsSocket) {
  const Listener listener(path_);
  // Its queue holds a few; the error of a full one says the same.
  for (int i = 0; i < 5; ++i) {
    const absl::Status status = MakeWayForSocket(path_);
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
    EXPECT_THAT(std::string(status.message()), HasSubstr("a server listens on " + path_));
  }
  EXPECT_TRUE(std::filesystem::exists(path_));
}

TEST_F(UnixSocketTest, AFileIsLeftAlone) {
  std::ofstream(path_) << "precious";
  const absl::Status status = MakeWayForSocket(path_);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), HasSubstr("no socket"));
  EXPECT_TRUE(std::filesystem::exists(path_));
}

TEST_F(UnixSocketTest, AFolderThatIsMissingIsNamed) {
  const absl::Status status = MakeWayForSocket(folder_.PathOf("nowhere") + "/socket");
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("the folder " + folder_.PathOf("nowhere") + " does not exist"));
}

TEST_F(UnixSocketTest, AFolderOfNothingIsAnError) {
  std::ofstream(path_) << "";
  EXPECT_FALSE(MakeWayForSocket(path_ + "/below").ok());
}

}  // namespace
}  // namespace attendant::server
