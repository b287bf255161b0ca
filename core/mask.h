// One head's mask, read where it lies: never expanded.
#ifndef ATTENDANT_CORE_MASK_H_
#define ATTENDANT_CORE_MASK_H_

#include <cstdint>
#include <limits>

#include "core/problem.h"
#include "core/tensor_view.h"

namespace attendant::core {

// Numbers from here on, on either side of 0, are far: beside one, nothing of a score is left. Times
// log2(e) the largest of them overflow.
template <typename T>
constexpr T kFar = sizeof(T) == 4 ? T(0x1p99) : T(0x1p995);

// What a mask's number is where it hides a key.
template <typename T>
constexpr T kHiddenBias = -std::numeric_limits<T>::infinity();

// In the arithmetic of T, float or double. Thread-compatible; does not own data.
template <typename T>
class HeadMask {
 public:
  // No mask.
  HeadMask() = default;
  // data: of the problem's mask; may be null where that has no elements, or there is none.
  HeadMask(const Problem& problem, const void* data, int64_t batch, int64_t head);

  bool present() const { return present_; }
  // Whether its numbers are added; a BOOL mask only hides.
  bool added() const { return present() && dtype_ != DType::kBool; }

  // bias[j - keys.begin] = what is added to the score of the query and key j: -infinity where it is
  // hidden. REQUIRES: present().
  void Read(int64_t query, KeyRange keys, T* bias) const;
  // Whether the mask hides the key from the query.
  bool Hides(int64_t query, int64_t key) const;

  // The same row where it lies, from key `key` on: as numbers of T, or a byte a key, 0 where it is
  // hidden. Null where it is not in that form.
  const T* Numbers(int64_t query, int64_t key) const {
    return dtype_ == DTypeOf<T>() ? reinterpret_cast<const T*>(Row(query, key)) : nullptr;
  }
  const uint8_t* Flags(int64_t query, int64_t key) const {
    return dtype_ == DType::kBool ? Row(query, key) : nullptr;
  }

  // Where its bytes for them lie. REQUIRES: present().
  const unsigned char* At(int64_t query, int64_t key) const {
    return data_ + (query * query_stride_ + key * key_stride_) * SizeOf(dtype_);
  }

  // The largest of the numbers of a row that sees `keys`; -infinity where it hides them all.
  // REQUIRES: present().
  T Largest(int64_t query, KeyRange keys) const;

  // What is subtracted from the numbers of a row that sees `keys`, so that what decides between far
  // ones is their difference: the largest of those it sees if that is far, else 0. 0 as well where
  // a sink outweighs every key anyway.
  T Shift(int64_t query, KeyRange keys) const;

 private:
  // Null where the keys' numbers do not follow each other.
  const unsigned char* Row(int64_t query, int64_t key) const {
    return present() && key_stride_ == 1 ? At(query, key) : nullptr;
  }

  bool present_ = false;
  const unsigned char* data_ = nullptr;  // of the head
  DType dtype_ = DType::kUnspecified;
  int64_t query_stride_ = 0;
  int64_t key_stride_ = 0;
  double sink_ = 0;
};

}  // namespace attendant::core

#endif  // ATTENDANT_CORE_MASK_H_
