#include "server/tensor_data.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>
#include <utility>

#include "server/codec.h"

namespace attendant::server {
namespace {

std::atomic<int64_t> copied_bytes = 0;

// Where a tensor without bytes is.
alignas(64) unsigned char nothing[64];

// Room for the bytes, kept in `buffer`.
unsigned char* Allocate(core::Workspace& account, int64_t bytes, TensorBuffer& buffer,
                        absl::Status& status) {
  auto allocated = account.Allocate<unsigned char>(bytes);
  if (!allocated.ok()) {
    if (status.ok()) status = allocated.status();
    return nothing;
  }
  buffer = *std::move(allocated);
  return bytes > 0 ? buffer.data() : nothing;
}

// A slice that owns the buffer, and keeps the account that this is taken from.
grpc::Slice SliceOf(const std::shared_ptr<CallMemory>& memory, TensorBuffer buffer) {
  struct Owner {
    Owner(const std::shared_ptr<CallMemory>& of, TensorBuffer bytes)
        : memory(of), buffer(std::move(bytes)) {
      handed_over.store(true, std::memory_order_release);
    }
    // On another thread, which gRPC orders after this one; ThreadSanitizer is told here.
    ~Owner() { static_cast<void>(handed_over.load(std::memory_order_acquire)); }
    Owner(const Owner&) = delete;
    Owner& operator=(const Owner&) = delete;

    std::shared_ptr<CallMemory> memory;
    TensorBuffer buffer;
    std::atomic<bool> handed_over = false;
  };
  auto owner = std::make_unique<Owner>(memory, std::move(buffer));
  void* const bytes = owner->buffer.data();
  const auto size = static_cast<size_t>(owner->buffer.size());
  grpc::Slice slice(
      bytes, size, [](void* released) { delete static_cast<Owner*>(released); }, owner.get());
  owner.release();  // NOLINT(bugprone-unused-return-value): the slice has it
  return slice;
}

}  // namespace

int64_t CopiedTensorBytes() { return copied_bytes.load(std::memory_order_relaxed); }

MessageBytes::MessageBytes(const grpc::ByteBuffer& bytes) {
  // It fails where there is nothing to give alone.
  if (!bytes.Dump(&slices_).ok()) slices_.clear();
  begins_.reserve(slices_.size());
  int64_t begin = 0;
  for (const grpc::Slice& slice : slices_) {
    begins_.push_back(begin);
    begin += static_cast<int64_t>(slice.size());
  }
}

void MessageBytes::Copy(const DataPlace& place, unsigned char* to) const {
  copied_bytes.fetch_add(place.bytes, std::memory_order_relaxed);
  if (!place.held.empty()) {
    std::memcpy(to, place.held.data(), place.held.size());
    return;
  }
  // The slice in which it begins: the last that begins no later.
  const auto after = std::upper_bound(begins_.begin(), begins_.end(), place.offset);
  auto slice = static_cast<size_t>(after - begins_.begin() - 1);
  int64_t within = place.offset - begins_[slice];
  for (int64_t done = 0; done < place.bytes; ++slice) {
    const int64_t bytes =
        std::min(place.bytes - done, static_cast<int64_t>(slices_[slice].size()) - within);
    std::memcpy(to + done, slices_[slice].begin() + within, static_cast<size_t>(bytes));
    done += bytes;
    within = 0;
  }
}

void RequestData::SetMessage(grpc::ByteBuffer& bytes) {
  message_ = MessageBytes(bytes);
  bytes.Clear();
}

unsigned char* RequestData::Add(const v1::Tensor& tensor) {
  unsigned char* const to = Allocate(account_, BytesOf(tensor), buffers_.emplace_back(), status_);
  if (!status_.ok()) return to;
  const DataPlace place = PlaceOf(tensor.data());
  if (!place.held.empty()) {
    message_.Copy(place, to);
    return to;
  }
  for (int64_t first = 0; first < place.bytes; first += kCopyTile) {
    ranges_.push_back(
        {{std::min(kCopyTile, place.bytes - first), place.offset + first, {}}, to + first});
  }
  return to;
}

std::optional<core::Stage> RequestData::Copy() {
  int64_t bytes = 0;
  for (const Range& range : ranges_) bytes += range.from.bytes;
  if (bytes <= kCopiedAtOnce) {
    for (const Range& range : ranges_) message_.Copy(range.from, range.to);
    message_ = {};
    return std::nullopt;
  }
  ranges_left_ = static_cast<int64_t>(ranges_.size());
  return core::Stage{"receive", ranges_left_, [this](const core::TileContext& context) {
                       const Range& range = ranges_[static_cast<size_t>(context.tile)];
                       message_.Copy(range.from, range.to);
                       if (--ranges_left_ == 0) {
                         message_ = {};
                         copied_at_ = std::chrono::steady_clock::now();
                       }
                       return absl::OkStatus();
                     }};
}

void RequestData::Free() {
  message_ = {};
  buffers_.clear();
}

unsigned char* ResponseData::Add(int number, const v1::Tensor& head) {
  Tensor& tensor = tensors_.emplace_back(Tensor{number, head, {}});
  return Allocate(memory_->tensors, BytesOf(head), tensor.buffer, status_);
}

std::vector<ResponseData::Part> ResponseData::TakeParts() {
  std::vector<Part> parts;
  parts.reserve(tensors_.size());
  for (Tensor& tensor : tensors_) {
    grpc::Slice bytes;
    if (tensor.buffer.size() > 0) bytes = SliceOf(memory_, std::move(tensor.buffer));
    parts.push_back({tensor.number, std::move(tensor.head), std::move(bytes)});
  }
  tensors_.clear();
  return parts;
}

grpc::ByteBuffer ResponseData::TakeMessage(const google::protobuf::Message& rest) {
  std::vector<grpc::Slice> slices;
  for (Part& part : TakeParts()) {
    std::string head = part.head.SerializeAsString();
    const auto bytes = static_cast<int64_t>(part.bytes.size());
    if (bytes > 0) AppendLengthPrefix(v1::Tensor::kDataFieldNumber, bytes, head);
    std::string prefix;
    AppendLengthPrefix(part.number, static_cast<int64_t>(head.size()) + bytes, prefix);
    slices.emplace_back(prefix + head);
    if (bytes > 0) slices.push_back(std::move(part.bytes));
  }
  slices.emplace_back(rest.SerializeAsString());
  return grpc::ByteBuffer(slices.data(), slices.size());
}

}  // namespace attendant::server
