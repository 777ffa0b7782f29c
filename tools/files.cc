// SPDX-License-Identifier: Apache-2.0
#include "files.h"

#include <fmt/format.h>
#include <unistd.h>

#include <atomic>
#include <span>
#include <string>
#include <system_error>

namespace treeattn::tools {

namespace fs = std::filesystem;

namespace {

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

fs::path folder_of(const fs::path& path) { return path.has_parent_path() ? path.parent_path() : fs::path("."); }

// The file that another can take the place of: one that is there, or none yet, in a directory that may be changed.
// Links stay and are followed, except into /proc, whose files stand for what is open already, as /dev/stdout does.
std::optional<fs::path> replaceable(fs::path path) {
  std::error_code error;
  constexpr int kMostLinks = 40;  // as many as Linux follows
  for (int links = 0; fs::is_symlink(fs::symlink_status(path, error)); ++links) {
    const std::string where = fs::canonical(folder_of(path), error).string();
    if (error || where.starts_with("/proc/") || links == kMostLinks) return {};
    path = folder_of(path) / fs::read_symlink(path, error);
  }
  const fs::file_status status = fs::status(path, error);
  if (!path.has_filename()) return {};
  if (fs::is_regular_file(status)) {
    const bool may_change = ::access(folder_of(path).c_str(), W_OK | X_OK) == 0 && ::access(path.c_str(), W_OK) == 0;
    return may_change ? std::optional(path) : std::nullopt;
  }
  return status.type() == fs::file_type::not_found ? std::optional(path) : std::nullopt;
}

// Whatever the name of the file is, this is not too long.
fs::path draft_beside(const fs::path& path) {
  static std::atomic<int> drafts = 0;
  return path.parent_path() / fmt::format(".treeattn-{}-{}.draft", ::getpid(), ++drafts);
}

}  // namespace

std::string read_text(const std::filesystem::path& path) {
  const Stream file(std::fopen(path.c_str(), "rb"));
  if (!file) base::throw_errno(path, "open");
  return read_all(file.get(), path);
}

std::string read_stdin() { return read_all(stdin, "standard input"); }

ResultFile::ResultFile(const fs::path& path) : path_(path) {
  if (const std::optional<fs::path> target = replaceable(path)) {
    file_.emplace(*target, draft_beside(*target), path);
  } else {
    stream_.reset(std::fopen(path.c_str(), "wb"));
    if (!stream_) base::throw_errno(path, "create");
  }
}

void ResultFile::write(std::string_view bytes) {
  if (file_) {
    file_->write(std::as_bytes(std::span(bytes)));
  } else if (std::fwrite(bytes.data(), 1, bytes.size(), stream_.get()) != bytes.size()) {
    base::throw_errno(path_, "write");
  }
}

void ResultFile::finish() {
  if (file_) {
    file_->finish();
  } else if (std::fclose(stream_.release()) != 0) {  // which writes what is still in the buffer
    base::throw_errno(path_, "write");
  }
}

void write_text(const fs::path& path, std::string_view text) {
  ResultFile file(path);
  file.write(text);
  file.finish();
}

void make_directory(const std::filesystem::path& path) {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (error) base::throw_bad_file(path, "cannot make this directory: " + error.message());
  if (::access(path.c_str(), W_OK | X_OK) != 0) base::throw_errno(path, "write into this directory");
}

}  // namespace treeattn::tools
