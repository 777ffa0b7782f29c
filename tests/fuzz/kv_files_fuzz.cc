// SPDX-License-Identifier: Apache-2.0
// For libFuzzer: -DTREEATTN_FUZZ=ON with clang. tests/kv_files_fuzz_test.cc does the same with its own mutations.
#include "fuzz/kv_files_fuzz.h"

#include <cstdint>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto given = std::as_bytes(std::span(data, size));
  treeattn::fuzz::parse_anything(given);
  std::vector<std::byte> repaired(given.begin(), given.end());
  treeattn::fuzz::repair_checksum(repaired);
  treeattn::fuzz::parse_anything(repaired);
  return 0;
}
