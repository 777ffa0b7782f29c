// SPDX-License-Identifier: Apache-2.0
#include "files.h"

#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <memory>
#include <string>
#include <system_error>

#include "base/file.h"

namespace treeattn::tools {
namespace {

struct Close {
  void operator()(std::FILE* file) const { std::fclose(file); }
};
using Stream = std::unique_ptr<std::FILE, Close>;

// A device may have no end; no text is so long.
constexpr std::size_t kMostBytes = std::size_t{1} << 30;

std::string read_all(std::FILE* file, const std::filesystem::path& path) {
  std::string text;
  char piece[1 << 16];
  while (const std::size_t got = std::fread(piece, 1, sizeof piece, file)) {
    text.append(piece, got);
    if (text.size() > kMostBytes) base::throw_bad_file(path, "has more than 1 GiB");
  }
  if (std::ferror(file) != 0) base::throw_errno(path, "read");
  return text;
}

}  // namespace

std::string read_text(const std::filesystem::path& path) {
  const Stream file(std::fopen(path.c_str(), "rb"));
  if (!file) base::throw_errno(path, "open");
  return read_all(file.get(), path);
}

std::string read_stdin() { return read_all(stdin, "standard input"); }

void write_text(const std::filesystem::path& path, std::string_view text) {
  Stream file(std::fopen(path.c_str(), "wb"));
  if (!file) base::throw_errno(path, "create");
  const bool written = std::fwrite(text.data(), 1, text.size(), file.get()) == text.size();
  // Closing writes what is still in the buffer.
  if (written && std::fclose(file.release()) == 0) return;
  const int reason = errno;
  std::error_code ignored;
  // Nobody may take a part for the whole. Links stay, as /dev/stdout is one.
  if (std::filesystem::is_regular_file(std::filesystem::symlink_status(path, ignored))) {
    std::filesystem::remove(path, ignored);
  }
  errno = reason;
  base::throw_errno(path, "write");
}

void make_directory(const std::filesystem::path& path) {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (error) base::throw_bad_file(path, "cannot make this directory: " + error.message());
  if (::access(path.c_str(), W_OK | X_OK) != 0) base::throw_errno(path, "write into this directory");
}

}  // namespace treeattn::tools
