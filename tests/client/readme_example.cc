// The C++ examples of README.md and docs/, compiled: they link the target attendant_client alone.
#include <cstdio>

#include "client/cpp/client.h"
#include "client/cpp/sharded.h"

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

  // docs/gradient.md
  std::vector<float> d_output(query.size());
  absl::StatusOr<attendant::BackwardResult> gradient =
      (*client)->Backward({.query = {query, shape},
                           .key = {key, shape},
                           .value = {value, shape},
                           .d_output = {d_output, shape},
                           .output = result->output.ref(),
                           .logsumexp = result->logsumexp->ref()},
                          options);
  if (!gradient.ok()) return gradient.status();
  absl::Span<const float> d_query = gradient->d_query.values<float>();

  std::printf("%zu numbers\n", output.size() + d_query.size());
  return absl::OkStatus();
}

// docs/client.md
absl::Status RunInto(const std::vector<float>& query, const std::vector<float>& key,
                     const std::vector<float>& value, const std::vector<int64_t>& shape,
                     const attendant::v1::AttendOptions& attend_options) {
  attendant::ClientOptions options;
  options.call_timeout = absl::Seconds(10);
  auto client = attendant::Client::Connect("ipv4:10.0.0.1:50051,10.0.0.2:50051", options);
  if (!client.ok()) return client.status();
  std::vector<float> output(query.size());
  auto result = (*client)->AttendInto({query, shape}, {key, shape}, {value, shape}, attend_options,
                                      {.output = output});
  return result.status();
}

absl::Status RunSharded(const std::vector<float>& query, const std::vector<float>& key,
                        const std::vector<float>& value, const std::vector<int64_t>& shape,
                        const attendant::v1::AttendOptions& options) {
  absl::StatusOr<std::unique_ptr<attendant::ShardedClient>> servers =
      attendant::ShardedClient::Connect({"10.0.0.1:50051", "10.0.0.2:50051", "10.0.0.3:50051"});
  if (!servers.ok()) return servers.status();
  absl::StatusOr<attendant::ShardedResult> result = (*servers)->AttendSharded(
      {query, shape}, {key, shape}, {value, shape}, options, attendant::ShardBy::kHeads);
  return result.status();
}

}  // namespace

int main() {
  const std::vector<float> one = {1};
  const bool into = RunInto(one, one, one, {1, 1, 1, 1}, {}).ok();
  return into && Run().ok() && RunSharded(one, one, one, {1, 1, 1, 1}, {}).ok() ? 0 : 1;
}
