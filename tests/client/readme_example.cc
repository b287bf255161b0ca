// The C++ example of README.md, compiled: it links the target attendant_client alone.
#include <cstdio>

#include "client/cpp/client.h"

namespace {

absl::Status Run() {
  absl::StatusOr<std::unique_ptr<attendant::Client>> client =
      attendant::Client::Connect("127.0.0.1:50051");
  if (!client.ok()) return client.status();

  std::vector<float> query(1 * 8 * 128 * 64), key(query.size()), value(query.size());
  const std::vector<int64_t> shape = {1, 8, 128, 64};  // batch, heads, tokens, width
  attendant::v1::AttendOptions options;
  options.set_causal(attendant::v1::CAUSAL_TOP_LEFT);
  options.set_return_logsumexp(true);

  absl::StatusOr<attendant::AttendResult> result =
      (*client)->Attend({query, shape}, {key, shape}, {value, shape}, options);
  if (!result.ok()) return result.status();
  absl::Span<const float> output = result->output.values<float>();
  std::printf("%zu numbers\n", output.size());
  return absl::OkStatus();
}

}  // namespace

int main() { return Run().ok() ? 0 : 1; }
