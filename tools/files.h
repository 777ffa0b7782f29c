// SPDX-License-Identifier: Apache-2.0
// Files that the command is told to read or to write: pipes and devices as well. What cannot be done is a BadFile that
// names the file and the system's reason.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

namespace treeattn::tools {

std::string read_text(const std::filesystem::path& path);
std::string read_stdin();
void write_text(const std::filesystem::path& path, std::string_view text);

// With those above it; one that is there, and can be written into, is fine.
void make_directory(const std::filesystem::path& path);

}  // namespace treeattn::tools
