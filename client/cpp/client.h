// Call an Attendant server from C++.
//
//   auto client = attendant::Client::Connect("127.0.0.1:50051");
//   const std::vector<int64_t> shape = {1, 8, 128, 64};
//   auto result = (*client)->Attend({query, shape}, {key, shape}, {value, shape});
//   absl::Span<const float> output = result->output.values<float>();
//
// Options are the contract's own message, attendant::v1::AttendOptions, whose fields say what they
// mean. Nothing throws; every error is an absl::Status with the server's code and message.
#ifndef ATTENDANT_CLIENT_CPP_CLIENT_H_
#define ATTENDANT_CLIENT_CPP_CLIENT_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "attendant/v1/attention.pb.h"

namespace attendant {

template <typename T>
constexpr v1::DataType DataTypeOf();
template <>
constexpr v1::DataType DataTypeOf<float>() {
  return v1::DATA_TYPE_FLOAT32;
}
template <>
constexpr v1::DataType DataTypeOf<double>() {
  return v1::DATA_TYPE_FLOAT64;
}

// A tensor of the caller's: row-major elements without gaps, which stay theirs and are read during
// the call only.
class TensorRef {
 public:
  // T is float or double.
  template <typename T>
  TensorRef(absl::Span<const T> values, std::vector<int64_t> shape)
      : TensorRef(DataTypeOf<T>(), std::move(shape),
                  {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)}) {}
  template <typename T>
  TensorRef(const std::vector<T>& values, std::vector<int64_t> shape)
      : TensorRef(absl::MakeConstSpan(values), std::move(shape)) {}
  // Any type of the contract, as bytes.
  TensorRef(v1::DataType dtype, std::vector<int64_t> shape, absl::string_view bytes)
      : dtype_(dtype), shape_(std::move(shape)), bytes_(bytes) {}

  v1::DataType dtype() const { return dtype_; }
  const std::vector<int64_t>& shape() const { return shape_; }
  absl::string_view bytes() const { return bytes_; }

 private:
  v1::DataType dtype_;
  std::vector<int64_t> shape_;
  absl::string_view bytes_;
};

// A tensor of an answer.
struct Tensor {
  v1::DataType dtype = v1::DATA_TYPE_UNSPECIFIED;
  std::vector<int64_t> shape;
  std::string bytes;

  // The elements, row-major. Empty where T is not the tensor's type.
  template <typename T>
  absl::Span<const T> values() const {
    if (dtype != DataTypeOf<T>()) return {};
    return {reinterpret_cast<const T*>(bytes.data()), bytes.size() / sizeof(T)};
  }
  TensorRef ref() const { return {dtype, shape, bytes}; }
};

// The answer to Attend; optional tensors are those that were asked for.
struct AttendResult {
  Tensor output;                    // (B, H, Tq, Dv) in the request's layout
  std::optional<Tensor> weights;    // (B, H, Tq, Tk)
  std::optional<Tensor> logsumexp;  // (B, H, Tq)
  std::optional<Tensor> key_sums;   // (B, H, Tk)
  v1::Stats stats;
};

// The inputs of Head; their shapes are those of the contract's HeadRequest.
struct HeadInputs {
  TensorRef x;    // (B, T, d_model) or (T, d_model)
  TensorRef w_q;  // (d_model, heads * d_k)
  TensorRef w_k;  // (d_model, heads * d_k)
  TensorRef w_v;  // (d_model, heads * d_v)
  TensorRef w_o;  // (heads * d_v, d_model)
  int64_t heads = 1;
  bool return_intermediates = false;
};

// The answer to Head; all but output are empty unless intermediates were asked for.
struct HeadResult {
  Tensor output;   // the shape of x
  Tensor query;    // (B, H, T, d_k)
  Tensor key;      // (B, H, T, d_k)
  Tensor value;    // (B, H, T, d_v)
  Tensor logits;   // (B, H, T, T)
  Tensor weights;  // (B, H, T, T)
  Tensor context;  // (B, H, T, d_v)
  v1::Stats stats;
};

// The inputs of Backward; their shapes are those of the contract's BackwardRequest.
struct BackwardInputs {
  TensorRef query;     // (B, H, Tq, D)
  TensorRef key;       // (B, Hkv, Tk, D)
  TensorRef value;     // (B, Hkv, Tk, Dv)
  TensorRef d_output;  // (B, H, Tq, Dv): the loss's gradient of the output
  // What Attend returned, both or neither: with both no forward pass runs.
  std::optional<TensorRef> output = std::nullopt;     // (B, H, Tq, Dv)
  std::optional<TensorRef> logsumexp = std::nullopt;  // (B, H, Tq)
  bool return_d_mask = false;
};

// The answer to Backward.
struct BackwardResult {
  Tensor d_query;                // the shape of query
  Tensor d_key;                  // the shape of key
  Tensor d_value;                // the shape of value
  std::optional<Tensor> d_mask;  // the shape of an additive mask, where it was asked for
  std::vector<double> d_sinks;   // one a head, where there are sinks
  v1::Stats stats;
};

// The caller's own results for HeadInputs, as far as they are to be checked; shapes as those of
// HeadResult.
struct HeadCandidate {
  std::optional<TensorRef> output;
  std::optional<TensorRef> query;
  std::optional<TensorRef> key;
  std::optional<TensorRef> value;
  std::optional<TensorRef> logits;
  std::optional<TensorRef> weights;
  std::optional<TensorRef> context;
};

// Attention over one part of the keys, as Attend returned it with its logsumexp.
struct MergePart {
  TensorRef output;     // (B, H, Tq, Dv)
  TensorRef logsumexp;  // (B, H, Tq)
};

// Attention over all parts.
struct MergeResult {
  Tensor output;     // (B, H, Tq, Dv)
  Tensor logsumexp;  // (B, H, Tq)
};

class CallGroup;

// How calls are made again that failed because a server was gone, or was full and said when to come
// again. docs/client.md says what is and what is not.
struct RetryOptions {
  // Of one call, the first included. 1: none is made again.
  int max_attempts = 6;
  // Before the second attempt at least, longer where the server says so; twice as long before each
  // one after.
  absl::Duration initial_backoff = absl::Milliseconds(100);
  absl::Duration max_backoff = absl::Seconds(5);
};

struct ClientOptions {
  // How long Connect waits for the server.
  absl::Duration connect_timeout = absl::Seconds(5);
  // How long a call may take, its retries included: afterwards it is stopped on the server too.
  absl::Duration call_timeout = absl::Minutes(1);
  // Whether calls go in turn to all addresses that the target stands for, not to the first that
  // answers.
  bool round_robin = false;
  // Connections at most. A call takes the one with the fewest calls, so that calls one after the
  // other share one; a further one is opened when calls overlap. At least 1.
  int connections = 4;
  RetryOptions retry = {};
  // Attend goes by AttendStream where its request or response has more bytes than this. Nothing:
  // where the server's message limit asks for it.
  std::optional<int64_t> stream_above = std::nullopt;
  // How long a connection with calls may be silent before the server is asked for a sign of life,
  // and how long that may take before the connection is given up. It bounds, too, how far a call
  // can overrun its deadline while the kernel takes none of its bytes. Servers refuse to be asked
  // more often than every 10 s.
  absl::Duration keepalive_time = absl::Seconds(12);
  absl::Duration keepalive_timeout = absl::Seconds(6);
  // Calls of AttendAsync at one time; more wait their turn. Each takes a waiting thread.
  int async_calls = 64;
};

// Memory of the caller's that an answer's elements are written to: as many bytes as they have.
class MutableSpan {
 public:
  template <typename T>
  MutableSpan(absl::Span<T> values)  // NOLINT(google-explicit-constructor): as TensorRef's
      : bytes_(reinterpret_cast<char*>(values.data()), values.size() * sizeof(T)) {}
  template <typename T>
  MutableSpan(std::vector<T>& values)  // NOLINT(google-explicit-constructor)
      : MutableSpan(absl::MakeSpan(values)) {}

  absl::Span<char> bytes() const { return bytes_; }

 private:
  absl::Span<char> bytes_;
};

// Where AttendInto writes. What has no memory here comes as a tensor of its own.
struct AttendOutputs {
  MutableSpan output;
  std::optional<MutableSpan> weights = std::nullopt;
  std::optional<MutableSpan> logsumexp = std::nullopt;
  std::optional<MutableSpan> key_sums = std::nullopt;
};

// Called once, on a thread of the client's where AttendAsync does not say otherwise.
using AttendCallback = std::function<void(absl::StatusOr<AttendResult>)>;

class Calls;
class AsyncCalls;

// Thread-safe: calls may be made from several threads at once. Tensors are sent from the caller's
// memory, and must not change during a call.
//
// Every call ends by its deadline, call_timeout. Calls that failed because a server was gone or
// full are made again (RetryOptions). A message that is larger than the server takes is never sent:
// Attend then goes in pieces, Head and Backward in parts, other calls return RESOURCE_EXHAUSTED.
// A server's error keeps its code and message, and its google.rpc details are the status's payloads
// under their type's URL ("type.googleapis.com/google.rpc.BadRequest").
class Client {
 public:
  // target: "host:port", or any gRPC name. Returns UNAVAILABLE where no server answers in time.
  static absl::StatusOr<std::unique_ptr<Client>> Connect(const std::string& target,
                                                         const ClientOptions& options = {});
  ~Client();
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  // softmax(scale * query key^T) value. query (B, H, Tq, D), key (B, Hkv, Tk, D), value
  // (B, Hkv, Tk, Dv), or with heads and tokens exchanged by options.layout.
  // Returns the server's status: INVALID_ARGUMENT names the field that is wrong.
  // group: the calls that it ends with, by its deadline in place of call_timeout.
  absl::StatusOr<AttendResult> Attend(const TensorRef& query, const TensorRef& key,
                                      const TensorRef& value, const v1::AttendOptions& options = {},
                                      CallGroup* group = nullptr);

  // As Attend, its tensors written to the caller's memory without another copy: the result's have
  // no bytes then. After an error what that memory holds is not said. Returns INVALID_ARGUMENT
  // where it is not as large as the tensor.
  absl::StatusOr<AttendResult> AttendInto(const TensorRef& query, const TensorRef& key,
                                          const TensorRef& value, const v1::AttendOptions& options,
                                          const AttendOutputs& outputs, CallGroup* group = nullptr);

  // As Attend, at once: `done` has the result. The tensors must stay until then. The client's end
  // cancels what is not done, and waits for it: the client must not be destroyed inside a callback.
  // Before AttendAsync returns `done` is told of a call that does not start: CANCELLED where a
  // callback makes it while the client ends, RESOURCE_EXHAUSTED where the system has no thread.
  void AttendAsync(const TensorRef& query, const TensorRef& key, const TensorRef& value,
                   const v1::AttendOptions& options, const AttendCallback& done);

  // A whole attention layer. Above the server's message limit it is computed batch by batch; one
  // batch that is still too large gets RESOURCE_EXHAUSTED.
  absl::StatusOr<HeadResult> Head(const HeadInputs& inputs, const v1::AttendOptions& options = {});

  // The gradient of a scalar loss through Attend. Above the server's message limit it is computed
  // by batches and key heads; one of both that is still too large gets RESOURCE_EXHAUSTED.
  absl::StatusOr<BackwardResult> Backward(const BackwardInputs& inputs,
                                          const v1::AttendOptions& options = {});

  // Joins attention over disjoint ranges of keys into attention over all of them. A sink belongs
  // to one of the parts only.
  absl::StatusOr<MergeResult> Merge(absl::Span<const MergePart> parts, CallGroup* group = nullptr);

  // What a call of these sizes costs on each path, computed nowhere. Returns INVALID_ARGUMENT
  // naming the field for sizes that a call would be refused for.
  absl::StatusOr<v1::EstimateResponse> Estimate(const v1::EstimateRequest& request);

  // Compares the caller's own output for query, key and value with the server's, and names the
  // mistake that explains the difference. candidate: (B, H, Tq, Dv) in options.layout, of any
  // floating type.
  absl::StatusOr<v1::CheckResponse> Check(const TensorRef& query, const TensorRef& key,
                                          const TensorRef& value, const TensorRef& candidate,
                                          const v1::AttendOptions& options = {});

  // The same of a whole attention layer: its output, what is between, or both.
  absl::StatusOr<v1::CheckResponse> CheckHead(const HeadInputs& inputs,
                                              const HeadCandidate& candidate,
                                              const v1::AttendOptions& options = {});

  absl::StatusOr<v1::InfoResponse> Info();

  // OK where the service says SERVING; UNAVAILABLE where it says it does not; NOT_FOUND where the
  // server has no such service. "" is the server as a whole. Asked once, without retries.
  absl::Status CheckHealth(const std::string& service = "");

 private:
  Client(std::unique_ptr<Calls> calls, const ClientOptions& options);

  const std::unique_ptr<Calls> calls_;
  const ClientOptions options_;
  // Last, since its end waits for calls.
  const std::unique_ptr<AsyncCalls> async_;
};

}  // namespace attendant

#endif  // ATTENDANT_CLIENT_CPP_CLIENT_H_
