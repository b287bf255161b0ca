#include "server/unix_socket.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "absl/strings/str_cat.h"

namespace attendant::server {
namespace {

// 0, or the error of a connection to the socket.
int ErrorOfConnecting(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.data(), path.size());
  // A full queue of connections is to be an answer as well, not something to wait for.
  const int descriptor = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (descriptor < 0) return errno;
  const int result =
      connect(descriptor, reinterpret_cast<const sockaddr*>(&address), sizeof(address));
  const int error = result == 0 ? 0 : errno;
  close(descriptor);
  return error;
}

}  // namespace

absl::Status MakeWayForSocket(const std::string& path) {
  struct stat status {};
  if (lstat(path.c_str(), &status) != 0) {
    const int error = errno;
    if (error != ENOENT) {
      return absl::UnavailableError(absl::StrCat(path, ": ", std::strerror(error)));
    }
    const std::filesystem::path folder = std::filesystem::path(path).parent_path();
    std::error_code unknown;
    if (folder.empty() || std::filesystem::exists(folder, unknown)) return absl::OkStatus();
    return absl::UnavailableError(absl::StrCat("the folder ", folder.string(), " does not exist"));
  }
  if (!S_ISSOCK(status.st_mode)) {
    return absl::UnavailableError(absl::StrCat(path, " is there and is no socket"));
  }
  const int error = ErrorOfConnecting(path);
  if (error == 0 || error == EAGAIN) {
    return absl::UnavailableError(absl::StrCat("a server listens on ", path, " already"));
  }
  if (error != ECONNREFUSED || unlink(path.c_str()) != 0) {
    return absl::UnavailableError(
        absl::StrCat("the socket ", path, " is there and cannot be replaced: ",
                     std::strerror(error == ECONNREFUSED ? errno : error)));
  }
  return absl::OkStatus();
}

}  // namespace attendant::server
