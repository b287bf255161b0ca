#ifndef ATTENDANT_CORE_VERSION_H_
#define ATTENDANT_CORE_VERSION_H_

namespace attendant::core {

// The project's version, such as "0.1.0".
const char* Version();

}  // namespace attendant::core

#endif  // ATTENDANT_CORE_VERSION_H_
