// The floor below which no server on this library gets: as many bytes each way, read by nobody.
#ifndef ATTENDANT_BENCH_ECHO_H_
#define ATTENDANT_BENCH_ECHO_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace attendant::bench {

// Serves Attend as an echo: takes a message as it comes, and answers with as many bytes as its
// first eight say. Thread-safe.
class EchoServer {
 public:
  // listen: host:port or unix:/path, each. largest: bytes of an answer.
  static absl::StatusOr<std::unique_ptr<EchoServer>> Start(const std::vector<std::string>& listen,
                                                           int64_t largest);
  ~EchoServer();
  EchoServer(const EchoServer&) = delete;
  EchoServer& operator=(const EchoServer&) = delete;

  // With the ports that were taken.
  const std::vector<std::string>& addresses() const { return addresses_; }

 private:
  struct Grpc;
  EchoServer(std::unique_ptr<Grpc> grpc, std::vector<std::string> addresses);

  const std::unique_ptr<Grpc> grpc_;
  const std::vector<std::string> addresses_;
};

// Calls an echo with a number of bytes each way. Thread-compatible.
class EchoClient {
 public:
  // REQUIRES: request_bytes >= 8.
  EchoClient(const std::string& address, int64_t request_bytes, int64_t response_bytes);
  ~EchoClient();
  EchoClient(const EchoClient&) = delete;
  EchoClient& operator=(const EchoClient&) = delete;

  absl::Status Call();

 private:
  struct Grpc;
  const std::unique_ptr<Grpc> grpc_;
};

}  // namespace attendant::bench

#endif  // ATTENDANT_BENCH_ECHO_H_
