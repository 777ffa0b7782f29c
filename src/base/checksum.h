// SPDX-License-Identifier: Apache-2.0
// CRC-32C (Castagnoli), as in iSCSI and ext4: finds every burst of up to 32 damaged bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace treeattn::base {

// Of the bytes that gave `before`, followed by these. crc32c("123456789") is 0xe3069283.
std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t before = 0);
// Of texts, each with what ends it, so that they do not run together.
std::uint32_t crc32c_of_texts(std::span<const std::string> texts);

}  // namespace treeattn::base
