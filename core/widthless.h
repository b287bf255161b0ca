// Attention without widths: keys and values of no bytes, of which there may be any number. All
// scores are 0, so that a row's logsumexp is the logarithm of how many keys it sees.
#ifndef ATTENDANT_CORE_WIDTHLESS_H_
#define ATTENDANT_CORE_WIDTHLESS_H_

#include <vector>

#include "core/attend.h"

namespace attendant::core {

// Whether the problem is such on the chunked path, and the logsumexp is all that is asked for: then
// it needs no workspace.
bool IsWidthless(const Problem& problem);

// As ChunkedStages, in time linear in the queries. REQUIRES: IsWidthless.
template <typename S>
std::vector<Stage> WidthlessStages(const Problem& problem, const AttendTensors<S>& tensors);

}  // namespace attendant::core

#endif  // ATTENDANT_CORE_WIDTHLESS_H_
