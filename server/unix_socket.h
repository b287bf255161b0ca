// Sockets in the file system.
#ifndef ATTENDANT_SERVER_UNIX_SOCKET_H_
#define ATTENDANT_SERVER_UNIX_SOCKET_H_

#include <string>

#include "absl/status/status.h"

namespace attendant::server {

// Makes way for a socket at this path: removes one that nobody listens on, as a process that was
// killed leaves behind. Returns UNAVAILABLE where somebody does, where something else is there, or
// where there is no such folder: gRPC itself would take the path from a living server. REQUIRES:
// path is shorter than 108 bytes.
absl::Status MakeWayForSocket(const std::string& path);

}  // namespace attendant::server

#endif  // ATTENDANT_SERVER_UNIX_SOCKET_H_
