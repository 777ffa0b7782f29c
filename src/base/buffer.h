// SPDX-License-Identifier: Apache-2.0
// Owned, aligned, uninitialised memory: 64 bytes for SIMD rows, 2 MiB and huge pages where the size earns it.
#pragma once

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <cstddef>
#include <new>
#include <type_traits>
#include <utility>

namespace treeattn::base {

// Movable, not copyable.
class Buffer {
 public:
  static constexpr std::size_t kLine = 64;
  static constexpr std::size_t kHugePage = std::size_t{2} << 20;
  static constexpr std::size_t kHugeFrom = std::size_t{4} << 20;

  Buffer() = default;
  // Throws std::bad_alloc.
  explicit Buffer(std::size_t bytes) : bytes_(bytes) {
    if (bytes == 0) return;
    // Through operator new, so that a program that replaces it to count allocations sees these too.
    data_ = ::operator new(bytes, alignment());
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    // With 4 KiB pages a stream over a gigabyte spends its time in the page walker. Advice only: refusal is harmless.
    if (bytes >= kHugeFrom) ::madvise(data_, bytes, MADV_HUGEPAGE);
#endif
  }
  ~Buffer() {
    if (data_ != nullptr) ::operator delete(data_, alignment());
  }

  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    Buffer taken(std::move(other));
    swap(taken);
    return *this;
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  std::size_t bytes() const { return bytes_; }

  // The storage as an array of T, which must be a plain type such as float or std::byte.
  template <class T>
  T* as() {
    static_assert(std::is_trivially_copyable_v<T> && alignof(T) <= kLine);
    return static_cast<T*>(data_);
  }
  template <class T>
  const T* as() const {
    static_assert(std::is_trivially_copyable_v<T> && alignof(T) <= kLine);
    return static_cast<const T*>(data_);
  }

 private:
  std::align_val_t alignment() const { return std::align_val_t{bytes_ >= kHugeFrom ? kHugePage : kLine}; }

  void swap(Buffer& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
  }

  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace treeattn::base
