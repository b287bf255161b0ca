#include "core/workspace.h"

#include <algorithm>
#include <new>

#include "absl/strings/str_cat.h"
#include "core/errors.h"
#include "core/faults.h"

namespace attendant::core {
namespace {

constexpr std::align_val_t kAlignment{64};  // a cache line, and the widest vector

}  // namespace

Workspace& Workspace::Process() {
  static auto* const process = new Workspace(nullptr);
  return *process;
}

absl::Status Workspace::Take(int64_t bytes) {
  const int64_t limit = limit_.load(std::memory_order_relaxed);
  int64_t held = current_.load(std::memory_order_relaxed);
  do {
    if (bytes > limit) {
      return OverLimit("workspace_bytes",
                       absl::StrCat("the call needs ", bytes, " bytes of workspace at once, ",
                                    limit, " are allowed"));
    }
    if (bytes > limit - held) {
      return absl::ResourceExhaustedError(absl::StrCat("workspace: ", bytes, " bytes needed, ",
                                                       std::max<int64_t>(limit - held, 0), " of ",
                                                       limit, " free at the moment"));
    }
  } while (!current_.compare_exchange_weak(held, held + bytes, std::memory_order_relaxed));
  if (parent_ != nullptr) {
    if (absl::Status status = parent_->Take(bytes); !status.ok()) {
      current_.fetch_sub(bytes, std::memory_order_relaxed);
      return status;
    }
  }
  return absl::OkStatus();
}

void Workspace::RecordPeak() {
  const int64_t held = current_.load(std::memory_order_relaxed);
  int64_t peak = peak_.load(std::memory_order_relaxed);
  while (peak < held && !peak_.compare_exchange_weak(peak, held, std::memory_order_relaxed)) {
  }
  if (parent_ != nullptr) parent_->RecordPeak();
}

void Workspace::GiveBack(int64_t bytes) {
  current_.fetch_sub(bytes, std::memory_order_relaxed);
  if (parent_ != nullptr) parent_->GiveBack(bytes);
}

absl::StatusOr<void*> Workspace::AllocateBytes(int64_t count, int64_t element_bytes) {
  if (count == 0) return nullptr;
  int64_t bytes = 0;
  if (__builtin_mul_overflow(count, element_bytes, &bytes)) {
    return OverLimit("workspace_bytes",
                     absl::StrCat("the call needs ", count, " elements of workspace at once"));
  }
  if constexpr (faults::kCompiledIn) {
    if (faults::Fires(faults::Point::kAllocation)) {
      return absl::ResourceExhaustedError("workspace: a fault was asked for");
    }
  }
  if (absl::Status status = Take(bytes); !status.ok()) return status;
  void* const data = ::operator new(static_cast<size_t>(bytes), kAlignment, std::nothrow);
  if (data == nullptr) {
    GiveBack(bytes);
    return absl::ResourceExhaustedError(
        absl::StrCat("workspace: the machine has no ", bytes, " bytes left"));
  }
  RecordPeak();
  return data;
}

void Workspace::Free(void* data, int64_t bytes) {
  ::operator delete(data, kAlignment);
  GiveBack(bytes);
}

}  // namespace attendant::core
