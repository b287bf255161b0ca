// What every error has in common.
#ifndef ATTENDANT_CLIENT_CPP_STATUS_H_
#define ATTENDANT_CLIENT_CPP_STATUS_H_

#include "absl/status/status.h"
#include "absl/strings/cord.h"
#include "absl/strings/string_view.h"

namespace attendant {

// The status with another message, its details kept.
inline absl::Status Reworded(const absl::Status& status, absl::string_view message) {
  absl::Status reworded(status.code(), message);
  status.ForEachPayload([&reworded](absl::string_view url, const absl::Cord& payload) {
    reworded.SetPayload(url, payload);
  });
  return reworded;
}

}  // namespace attendant

#endif  // ATTENDANT_CLIENT_CPP_STATUS_H_
