// SPDX-License-Identifier: Apache-2.0
// Whole reads and writes of a file. Every failure is a BadFile that names the file and the system's reason.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace treeattn::base {

[[noreturn]] void throw_bad_file(const std::filesystem::path& path, std::string_view reason);
// "cannot <what>", and why, as the system's last call said.
[[noreturn]] void throw_errno(const std::filesystem::path& path, std::string_view what);

// Whether a name is taken. So it is by a link to nothing and by what may not be looked at, too: to open it says why
// not.
bool is_there(const std::filesystem::path& path);

// Movable, closed at the end.
class File {
 public:
  static File open(const std::filesystem::path& path);    // to read
  static File create(const std::filesystem::path& path);  // to write; empties one that is there
  // The same; failures name `shown`.
  static File create(const std::filesystem::path& path, const std::filesystem::path& shown);
  ~File();
  File(File&& other) noexcept;
  File& operator=(File&&) = delete;

  const std::filesystem::path& path() const { return path_; }
  int descriptor() const { return descriptor_; }
  std::uint64_t size() const;
  // The next bytes. read throws when the file ends before them.
  void read(std::span<std::byte> bytes);
  void write(std::span<const std::byte> bytes);
  // To the disk; then closed, so that a late error of the file system is not lost.
  void finish();

 private:
  File(const std::filesystem::path& path, int flags);
  std::filesystem::path path_;
  int descriptor_ = -1;
};

// A file that takes the place of `target` when it is whole, and not before. What goes wrong until then leaves what is
// there as it was, and nothing of this one.
class Replacement {
 public:
  // draft: what it is called until then, in the same directory. Failures to make or write it name `shown`.
  Replacement(std::filesystem::path target, std::filesystem::path draft, const std::filesystem::path& shown);
  ~Replacement();
  Replacement(const Replacement&) = delete;
  Replacement& operator=(const Replacement&) = delete;

  void write(std::span<const std::byte> bytes) { file_.write(bytes); }
  // To the disk, and to its place. That the place outlives a power cut takes sync_directory().
  void finish();

 private:
  std::filesystem::path target_, draft_;
  File file_;
  bool placed_ = false;
};

// All of a file.
std::vector<std::byte> read_bytes(const std::filesystem::path& path);
// The same as text; one of more than `limit` bytes is refused.
std::string read_text(const std::filesystem::path& path, std::uint64_t limit);

// Makes the names in a directory durable.
void sync_directory(const std::filesystem::path& directory);

// Of those who take it for the same directory only one has it at a time, until it is destroyed; in other processes,
// too. Where the file system has no locks everybody gets it.
class DirectoryLock {
 public:
  DirectoryLock() = default;
  ~DirectoryLock();
  DirectoryLock(const DirectoryLock&) = delete;
  DirectoryLock& operator=(const DirectoryLock&) = delete;
  // Never waits. False when another one has it.
  bool try_take(const std::filesystem::path& directory);

 private:
  int descriptor_ = -1;
};

}  // namespace treeattn::base
