// SPDX-License-Identifier: Apache-2.0
// What both fuzzers call.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <span>
#include <vector>

#include "base/checksum.h"
#include "parallel/kv_format.h"
#include "treeattn/error.h"

namespace treeattn::fuzz {

// So that damage reaches what lies behind the checksum.
inline void repair_checksum(std::vector<std::byte>& bytes) {
  if (bytes.size() < parallel::kChecksumBytes) return;
  const std::size_t end = bytes.size() - parallel::kChecksumBytes;
  const std::uint32_t checksum = base::crc32c(std::span(bytes).first(end));
  std::memcpy(&bytes[end], &checksum, sizeof checksum);
}

// Whether a parser takes the bytes. What it then returns must be what they say, to the byte. Anything thrown but
// BadFile gets out.
inline bool parse_anything(std::span<const std::byte> bytes) {
  const auto must_equal = [&](const std::vector<std::byte>& again) {
    if (!std::equal(again.begin(), again.end(), bytes.begin(), bytes.end())) std::abort();
  };
  bool taken = false;
  try {
    must_equal(parallel::encode(parallel::parse_manifest(bytes)));
    taken = true;
  } catch (const BadFile&) {
  }
  try {
    must_equal(parallel::encode(parallel::parse_branch_header(bytes)));
    taken = true;
  } catch (const BadFile&) {
  }
  return taken;
}

}  // namespace treeattn::fuzz
