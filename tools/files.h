// SPDX-License-Identifier: Apache-2.0
// Files that the command is told to read or to write: pipes and devices as well. What cannot be done is a BadFile that
// names the file and the system's reason.
#pragma once

#include <cstdio>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "base/file.h"

namespace treeattn::tools {

std::string read_text(const std::filesystem::path& path);
std::string read_stdin();

struct CloseStream {
  void operator()(std::FILE* file) const { std::fclose(file); }
};
using Stream = std::unique_ptr<std::FILE, CloseStream>;

// What a command has found out. A file that is there stays as it is until the new one is whole, and so it does where
// that does not come to an end. Into a pipe or a device it goes at once.
class ResultFile {
 public:
  explicit ResultFile(const std::filesystem::path& path);
  void write(std::string_view bytes);
  // Without it nothing has been written.
  void finish();

 private:
  std::filesystem::path path_;
  std::optional<base::Replacement> file_;
  Stream stream_;  // for what cannot be replaced
};

// All of it at once.
void write_text(const std::filesystem::path& path, std::string_view text);

// With those above it; one that is there, and can be written into, is fine.
void make_directory(const std::filesystem::path& path);

}  // namespace treeattn::tools
