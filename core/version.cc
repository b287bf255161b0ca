#include "core/version.h"

namespace attendant::core {

const char* Version() { return ATTENDANT_VERSION; }

}  // namespace attendant::core
