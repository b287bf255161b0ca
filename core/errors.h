// Errors that name a field of the request.
//
// The message starts with the field, and the field alone travels as a payload, so that a server can
// tell its callers which field was wrong without reading prose.
#ifndef ATTENDANT_CORE_ERRORS_H_
#define ATTENDANT_CORE_ERRORS_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace attendant::core {

// INVALID_ARGUMENT. field: as it stands in the request, such as "key.shape[2]". description: what
// it holds and what would be right.
absl::Status InvalidField(absl::string_view field, absl::string_view description);

// A limit that waiting cannot lift: RESOURCE_EXHAUSTED. subject: the limit's stable name.
absl::Status OverLimit(absl::string_view subject, absl::string_view description);

// The field or the limit's name, and the description, if the status was made by the functions
// above.
std::optional<std::string> FieldOf(const absl::Status& status);
std::optional<std::string> LimitOf(const absl::Status& status);
std::string DescriptionOf(const absl::Status& status);

}  // namespace attendant::core

#endif  // ATTENDANT_CORE_ERRORS_H_
