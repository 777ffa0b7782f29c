// SPDX-License-Identifier: Apache-2.0
// A program beside this one: what it is told on stdin, what it says on stdout, line by line.
#pragma once

#include <filesystem>
#include <functional>
#include <string>

namespace treeattn::tools {

// The folder this program was started from.
std::filesystem::path program_folder();

// Runs a program to its end: `input` is its stdin, on_line gets each line of its stdout as it comes; stderr is ours.
// Returns its exit status. Throws Unavailable when it cannot be loaded, Error when it cannot be started at all or is
// ended by a signal.
int run_child(const std::filesystem::path& program, const std::string& input,
              const std::function<void(const std::string&)>& on_line);

}  // namespace treeattn::tools
