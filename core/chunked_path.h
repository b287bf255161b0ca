// The chunked path: online softmax over blocks of keys, in memory that does not grow with Tq * Tk.
//
// For one row and key blocks j = 1, 2, ... with scores s_j, values V_j:
//
//   m_j = max(m_{j-1}, max s_j)          running maximum, from -infinity
//   l_j = l_{j-1} e^(m_{j-1} - m_j) + sum e^(s_j - m_j)
//   O_j = O_{j-1} e^(m_{j-1} - m_j) + e^(s_j - m_j) V_j
//
// and at the end output = O / l, logsumexp = m + ln l (Milakov and Gimelshein 2018,
// arXiv:1805.02867; Rabe and Staats 2021, arXiv:2112.05682, section 3; Dao et al. 2022,
// arXiv:2205.14135, algorithm 1).
#ifndef ATTENDANT_CORE_CHUNKED_PATH_H_
#define ATTENDANT_CORE_CHUNKED_PATH_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "core/attend.h"

namespace attendant::core {

// Bytes of workspace on that many compute threads: one scratch for each that can have a tile, and,
// where weights or key sums are returned, two numbers a row for the second sweep (three where a
// mask is added). Independent of Tq * Tk. Of the fused kernel also the copy of keys and values that
// are not contiguous by head (fused_path.cc says when, and at most how large), and the states of a
// few rows' segments. Of oneDNN's tiles not the copy of a block of values that has a hidden NaN or
// infinity.
int64_t ChunkedWorkspaceBytes(const Problem& problem, int threads, Kernel kernel);

// See AttendStages. Weights and key sums come from a second sweep over the scores, which writes the
// weights straight to where they are returned.
template <typename S>
absl::StatusOr<std::vector<Stage>> ChunkedStages(const Problem& problem,
                                                 const AttendTensors<S>& tensors,
                                                 const Resources& resources);

}  // namespace attendant::core

#endif  // ATTENDANT_CORE_CHUNKED_PATH_H_
