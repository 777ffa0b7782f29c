// SPDX-License-Identifier: Apache-2.0
// A whole file as memory, read from the disk when touched.
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>

namespace treeattn::base {

// Read only, movable. The file must not be cut while it is mapped: touching what is gone ends the process (SIGBUS).
class MappedFile {
 public:
  // Throws BadFile, naming the file and the system's reason.
  explicit MappedFile(const std::filesystem::path& path);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&&) = delete;

  // Starts on a page of the kernel; empty when the file is.
  std::span<const std::byte> bytes() const { return bytes_; }

 private:
  std::span<const std::byte> bytes_;
};

}  // namespace treeattn::base
