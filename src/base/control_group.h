// SPDX-License-Identifier: Apache-2.0
// What the control groups of this process allow it, of both versions. A group and all above it have limits of their
// own. In a container the path may be that of the host, of which only the root is there.
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

namespace treeattn::base {

// The text of a file; empty when there is none.
using TextOf = std::function<std::string(const std::string& path)>;
std::string text_of_file(const std::string& path);

// The number after `key` in the first line that begins with it. None where another word stands there.
std::optional<std::size_t> number_after(std::string_view key, const std::string& text);

// Bytes that can still be had, as these files of /proc and /sys have it; without a limit more than there are.
std::size_t control_group_room(const TextOf& text_of);

// So many processors' time may be used at once, rounded up; without a limit more than there are.
int control_group_processors(const TextOf& text_of);

}  // namespace treeattn::base
