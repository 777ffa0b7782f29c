// SPDX-License-Identifier: Apache-2.0
#include "base/mapped_file.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include <cerrno>
#include <utility>

#include "base/file.h"
#include "treeattn/error.h"

namespace treeattn::base {

MappedFile::MappedFile(const std::filesystem::path& path) {
  const File file = File::open(path);  // closed at the end; the mapping stays
  const auto size = static_cast<std::size_t>(file.size());
  if (size == 0) return;
  void* mapping = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file.descriptor(), 0);
  if (mapping == MAP_FAILED && errno == ENOMEM) {  // nothing is wrong with the file
    throw Unavailable(
        fmt::format("{}: no room for {} bytes in the addresses of this process (ulimit -v)", path.string(), size));
  }
  if (mapping == MAP_FAILED) throw_errno(path, "map");
  bytes_ = {static_cast<const std::byte*>(mapping), size};
}

MappedFile::~MappedFile() {
  if (!bytes_.empty()) ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
}

MappedFile::MappedFile(MappedFile&& other) noexcept : bytes_(std::exchange(other.bytes_, {})) {}

}  // namespace treeattn::base
