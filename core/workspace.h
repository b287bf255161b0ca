// Scratch memory that is counted.
//
// A Workspace is an account: bytes held now, and the most held at one time. Each job has its own;
// all of them draw on one account of the process, which may have a limit.
#ifndef ATTENDANT_CORE_WORKSPACE_H_
#define ATTENDANT_CORE_WORKSPACE_H_

#include <atomic>
#include <cstdint>
#include <initializer_list>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "core/tensor_view.h"

namespace attendant::core {

class Workspace;

// Elements of T on a 64-byte boundary, not initialised, given back to their account when destroyed.
// Thread-compatible. The Workspace must outlive it.
template <typename T>
class Buffer {
 public:
  Buffer() = default;
  Buffer(Buffer&& other) noexcept { *this = std::move(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(workspace_, other.workspace_);
    std::swap(data_, other.data_);
    std::swap(count_, other.count_);
    return *this;
  }
  ~Buffer();

  T* data() const { return data_; }
  int64_t size() const { return count_; }

 private:
  friend class Workspace;
  Buffer(Workspace* workspace, T* data, int64_t count)
      : workspace_(workspace), data_(data), count_(count) {}

  Workspace* workspace_ = nullptr;
  T* data_ = nullptr;
  int64_t count_ = 0;
};

// Thread-safe.
class Workspace {
 public:
  // An account that draws on `parent`, which must outlive it.
  explicit Workspace(Workspace* parent = &Process()) : parent_(parent) {}
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  // The account of the whole process. Without a limit until SetLimit.
  static Workspace& Process();

  // Bytes this account may hold at one time. Affects later allocations.
  void SetLimit(int64_t bytes) { limit_.store(bytes, std::memory_order_relaxed); }

  // REQUIRES: count >= 0. Returns RESOURCE_EXHAUSTED where an account's limit or the machine's
  // memory does not allow it. A count of 0 gives an empty buffer.
  template <typename T>
  absl::StatusOr<Buffer<T>> Allocate(int64_t count) {
    absl::StatusOr<void*> data = AllocateBytes(count, sizeof(T));
    if (!data.ok()) return data.status();
    return Buffer<T>(this, static_cast<T*>(*data), count);
  }

  // Several at once: each buffer with its count. Stops at the first that is refused.
  template <typename T>
  absl::Status AllocateAll(std::initializer_list<std::pair<Buffer<T>*, int64_t>> parts) {
    for (const auto& [buffer, count] : parts) {
      absl::StatusOr<Buffer<T>> allocated = Allocate<T>(count);
      if (!allocated.ok()) return allocated.status();
      *buffer = *std::move(allocated);
    }
    return absl::OkStatus();
  }

  int64_t limit_bytes() const { return limit_.load(std::memory_order_relaxed); }
  int64_t current_bytes() const { return current_.load(std::memory_order_relaxed); }
  int64_t peak_bytes() const { return peak_.load(std::memory_order_relaxed); }

 private:
  template <typename T>
  friend class Buffer;

  absl::StatusOr<void*> AllocateBytes(int64_t count, int64_t element_bytes);
  void Free(void* data, int64_t bytes);
  // Takes the bytes from this account and those above it, or from none.
  absl::Status Take(int64_t bytes);
  void GiveBack(int64_t bytes);
  // After what was taken was allocated: raises the peaks of this account and those above it.
  void RecordPeak();

  Workspace* const parent_;
  std::atomic<int64_t> limit_ = INT64_MAX;
  std::atomic<int64_t> current_ = 0;
  std::atomic<int64_t> peak_ = 0;
};

template <typename T>
Buffer<T>::~Buffer() {
  if (data_ != nullptr) workspace_->Free(data_, count_ * static_cast<int64_t>(sizeof(T)));
}

}  // namespace attendant::core

#endif  // ATTENDANT_CORE_WORKSPACE_H_
