// Calls to a server, whatever they are of: over several connections, by a deadline, made again
// where that helps.
#ifndef ATTENDANT_CLIENT_CPP_CALLS_H_
#define ATTENDANT_CLIENT_CPP_CALLS_H_

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/message_lite.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "client/cpp/call_group.h"
#include "client/cpp/client.h"
#include "client/cpp/wire.h"

namespace attendant {

inline constexpr char kAttend[] = "/attendant.v1.Attention/Attend";
inline constexpr char kAttendStream[] = "/attendant.v1.Attention/AttendStream";
inline constexpr char kHead[] = "/attendant.v1.Attention/Head";
inline constexpr char kBackward[] = "/attendant.v1.Attention/Backward";
inline constexpr char kCheck[] = "/attendant.v1.Attention/Check";
inline constexpr char kEstimate[] = "/attendant.v1.Attention/Estimate";
inline constexpr char kMerge[] = "/attendant.v1.Attention/Merge";
inline constexpr char kInfo[] = "/attendant.v1.Attention/Info";
inline constexpr char kHealth[] = "/grpc.health.v1.Health/Check";

// A tensor that is sent in pieces.
struct PieceSource {
  v1::PieceTensor tensor = v1::PIECE_TENSOR_UNSPECIFIED;
  absl::string_view bytes;
};

// A tensor that comes in pieces.
struct PieceSink {
  v1::PieceTensor tensor = v1::PIECE_TENSOR_UNSPECIFIED;
  TensorSink* sink = nullptr;
  int64_t bytes = 0;  // that the tensor must have, where there is one
};

// A call of AttendStream.
struct StreamCall {
  OutMessage header;  // an AttendRequest whose tensors have no data
  std::vector<PieceSource> sent;
  std::vector<InField> answer;  // of AttendResponse
  std::vector<PieceSink> received;
  int64_t limit = 0;  // of a message: none is longer
};

// Thread-safe.
class Calls {
 public:
  // Returns UNAVAILABLE where no server answers in time.
  static absl::StatusOr<std::unique_ptr<Calls>> Connect(const std::string& target,
                                                        const ClientOptions& options);
  ~Calls();
  Calls(const Calls&) = delete;
  Calls& operator=(const Calls&) = delete;

  using Reader = std::function<absl::Status(google::protobuf::io::CodedInputStream&)>;

  // Sends the request, and reads the answer once there is one. When it returns, nobody reads the
  // request's memory any more. Returns RESOURCE_EXHAUSTED, without sending it, for a request above
  // the server's limit.
  absl::Status Unary(const char* method, const OutMessage& request, const Reader& read,
                     CallGroup& group);
  // The same of whole messages. most_attempts: fewer than the options say.
  absl::Status Unary(const char* method, const OutMessage& request,
                     google::protobuf::MessageLite* response, CallGroup& group,
                     std::optional<int> most_attempts = std::nullopt);

  absl::Status Stream(const StreamCall& call, CallGroup& group);

  // The largest message that may be sent and received, for a call whose larger message has `bytes`:
  // what every server takes needs no question, and what a server took before is not asked again.
  // For more than that it is, as the limit may be a higher one by now.
  absl::StatusOr<int64_t> MessageLimit(int64_t bytes, CallGroup& group);

 private:
  struct State;
  absl::Status Send(const char* method, const OutMessage& request, const Reader& read,
                    int most_attempts, CallGroup& group);
  explicit Calls(std::unique_ptr<State> state);

  const std::unique_ptr<State> state_;
};

}  // namespace attendant

#endif  // ATTENDANT_CLIENT_CPP_CALLS_H_
