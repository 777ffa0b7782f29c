// SPDX-License-Identifier: Apache-2.0
#include "base/file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

#include "treeattn/error.h"

namespace treeattn::base {

void throw_bad_file(const std::filesystem::path& path, std::string_view reason) {
  throw BadFile(fmt::format("{}: {}", path.string(), reason));
}

void throw_errno(const std::filesystem::path& path, std::string_view what) {
  throw_bad_file(path, fmt::format("cannot {}: {}", what, std::generic_category().message(errno)));
}

bool is_there(const std::filesystem::path& path) {
  struct stat status {};
  return ::lstat(path.c_str(), &status) == 0 || (errno != ENOENT && errno != ENOTDIR);
}

File::File(const std::filesystem::path& path, int flags)
    : path_(path), descriptor_(::open(path.c_str(), flags | O_CLOEXEC, 0666)) {}

File File::open(const std::filesystem::path& path) {
  File file(path, O_RDONLY | O_NONBLOCK);  // a pipe is refused, not waited for
  if (file.descriptor_ < 0) throw_errno(path, "open");
  struct stat status {};
  if (::fstat(file.descriptor_, &status) != 0) throw_errno(path, "look at");
  if (!S_ISREG(status.st_mode)) throw_bad_file(path, "not a file; accepted: a regular file");
  return file;
}

File File::create(const std::filesystem::path& path) { return create(path, path); }

File File::create(const std::filesystem::path& path, const std::filesystem::path& shown) {
  File file(path, O_WRONLY | O_CREAT | O_TRUNC | O_NONBLOCK);  // a pipe that nobody reads is refused, not waited for
  file.path_ = shown;
  if (file.descriptor_ < 0) throw_errno(shown, "create");
  ::fcntl(file.descriptor_, F_SETFL, ::fcntl(file.descriptor_, F_GETFL) & ~O_NONBLOCK);
  return file;
}

File::~File() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

File::File(File&& other) noexcept : path_(std::move(other.path_)), descriptor_(std::exchange(other.descriptor_, -1)) {}

std::uint64_t File::size() const {
  struct stat status {};
  if (::fstat(descriptor_, &status) != 0) throw_errno(path_, "look at");
  return static_cast<std::uint64_t>(status.st_size);
}

void File::read(std::span<std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t got = ::read(descriptor_, bytes.data(), bytes.size());
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw_errno(path_, "read");
    if (got == 0) throw_bad_file(path_, fmt::format("ends {} bytes too early", bytes.size()));
    bytes = bytes.subspan(static_cast<std::size_t>(got));
  }
}

void File::write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t put = ::write(descriptor_, bytes.data(), bytes.size());
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) throw_errno(path_, "write");
    bytes = bytes.subspan(static_cast<std::size_t>(put));
  }
}

void File::finish() {
  if (::fsync(descriptor_) != 0) throw_errno(path_, "write to the disk");
  if (::close(std::exchange(descriptor_, -1)) != 0) throw_errno(path_, "close");
}

Replacement::Replacement(std::filesystem::path target, std::filesystem::path draft, const std::filesystem::path& shown)
    : target_(std::move(target)), draft_(std::move(draft)), file_(File::create(draft_, shown)) {
  // Who may read the one that is there may read the new one.
  struct stat status {};
  if (::stat(target_.c_str(), &status) == 0) ::fchmod(file_.descriptor(), status.st_mode & 07777);
}

Replacement::~Replacement() {
  std::error_code ignored;
  if (!placed_) std::filesystem::remove(draft_, ignored);
}

void Replacement::finish() {
  file_.finish();
  std::error_code error;
  std::filesystem::rename(draft_, target_, error);
  if (error) throw_bad_file(target_, "cannot rename: " + error.message());
  placed_ = true;
}

std::vector<std::byte> read_bytes(const std::filesystem::path& path) {
  File file = File::open(path);
  std::vector<std::byte> bytes(static_cast<std::size_t>(file.size()));
  file.read(bytes);
  return bytes;
}

std::string read_text(const std::filesystem::path& path, std::uint64_t limit) {
  File file = File::open(path);
  const std::uint64_t size = file.size();
  if (size > limit) throw_bad_file(path, fmt::format("{} bytes; accepted: at most {}", size, limit));
  std::string text(static_cast<std::size_t>(size), '\0');
  file.read(std::as_writable_bytes(std::span(text)));
  return text;
}

void sync_directory(const std::filesystem::path& directory) {
  const int descriptor = ::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) throw_errno(directory, "open");
  const int status = ::fsync(descriptor);
  const int error = errno;
  ::close(descriptor);
  errno = error;
  // Some file systems have no such thing as syncing a directory.
  if (status != 0 && error != EINVAL && error != ENOTSUP) throw_errno(directory, "write to the disk");
}

bool DirectoryLock::try_take(const std::filesystem::path& directory) {
  if (descriptor_ < 0) descriptor_ = ::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor_ < 0) return true;  // whoever writes there finds out why
  while (::flock(descriptor_, LOCK_EX | LOCK_NB) != 0) {
    if (errno == EWOULDBLOCK) return false;
    if (errno != EINTR) break;
  }
  return true;
}

DirectoryLock::~DirectoryLock() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

}  // namespace treeattn::base
