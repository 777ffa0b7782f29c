// SPDX-License-Identifier: Apache-2.0
#include "base/mapped_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "base/file.h"
#include "treeattn/error.h"

namespace treeattn::base {
namespace {

// Closed at the end; the mapping stays.
struct Descriptor {
  int number;
  ~Descriptor() {
    if (number >= 0) ::close(number);
  }
};

}  // namespace

MappedFile::MappedFile(const std::filesystem::path& path) {
  const Descriptor file{::open(path.c_str(), O_RDONLY | O_CLOEXEC)};
  if (file.number < 0) throw_errno(path, "open");
  struct stat status {};
  if (::fstat(file.number, &status) != 0) throw_errno(path, "look at");
  if (!S_ISREG(status.st_mode)) throw_bad_file(path, "not a file; accepted: a regular file");
  if (status.st_size == 0) return;
  const auto size = static_cast<std::size_t>(status.st_size);
  void* mapping = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file.number, 0);
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
