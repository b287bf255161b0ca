#include "server/unknown_service.h"

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "core/version.h"
#include "server/status.h"

namespace attendant::server {
namespace {

class UnknownCall final : public grpc::ServerGenericBidiReactor {
 public:
  explicit UnknownCall(const absl::Status& status) { Finish(ToGrpcStatus(status)); }

 private:
  void OnDone() override { delete this; }
};

}  // namespace

grpc::ServerGenericBidiReactor* UnknownService::CreateReactor(
    grpc::GenericCallbackServerContext* context) {
  metrics_.RequestStarted();
  metrics_.RequestEnded(Method::kUnknown, PathLabel::kNone, absl::StatusCode::kUnimplemented, 0);
  return new UnknownCall(absl::UnimplementedError(
      absl::StrCat(context->method(), " is not served by version ", core::Version())));
}

}  // namespace attendant::server
