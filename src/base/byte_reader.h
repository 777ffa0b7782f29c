// SPDX-License-Identifier: Apache-2.0
// Bytes that somebody else has written, taken out one value after the other and never past their end. Who reads says
// what is wrong with them: it knows whose they are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>
#include <vector>

namespace treeattn::base {

class ByteReader {
 public:
  explicit ByteReader(std::span<const std::byte> bytes) : left_(bytes) {}

  std::span<const std::byte> left() const { return left_; }
  // False where fewer bytes are left than that takes; they stay.
  template <class T>
  [[nodiscard]] bool take(T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    if (left_.size() < sizeof(T)) return false;
    std::memcpy(&value, left_.data(), sizeof(T));
    left_ = left_.subspan(sizeof(T));
    return true;
  }
  // The same with so many values. Nothing is allocated for a count that there are no bytes for.
  template <class T>
  [[nodiscard]] bool take(std::vector<T>& values, std::uint64_t count) {
    static_assert(std::is_trivially_copyable_v<T>);
    if (count > left_.size() / sizeof(T)) return false;
    values.resize(static_cast<std::size_t>(count));
    const std::size_t bytes = values.size() * sizeof(T);
    if (bytes > 0) std::memcpy(values.data(), left_.data(), bytes);
    left_ = left_.subspan(bytes);
    return true;
  }

 private:
  std::span<const std::byte> left_;
};

}  // namespace treeattn::base
