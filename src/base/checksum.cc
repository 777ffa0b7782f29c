// SPDX-License-Identifier: Apache-2.0
// Eight bytes a step by eight tables ("slicing-by-8").
#include "base/checksum.h"

#include <array>
#include <bit>
#include <cstring>

namespace treeattn::base {
namespace {

static_assert(std::endian::native == std::endian::little, "the steps of eight bytes read them in this order");

constexpr std::uint32_t kPolynomial = 0x82f63b78u;  // bits reversed
constexpr std::size_t kSlices = 8;
using Tables = std::array<std::array<std::uint32_t, 256>, kSlices>;

// tables[s][b]: what byte b does to the checksum once s more bytes have followed it.
constexpr Tables make_tables() {
  Tables tables{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1u) != 0 ? kPolynomial : 0u);
    tables[0][byte] = crc;
  }
  for (std::size_t slice = 1; slice < kSlices; ++slice) {
    for (std::size_t byte = 0; byte < 256; ++byte) {
      const std::uint32_t crc = tables[slice - 1][byte];
      tables[slice][byte] = (crc >> 8) ^ tables[0][crc & 0xffu];
    }
  }
  return tables;
}

constexpr Tables kTables = make_tables();

}  // namespace

std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t before) {
  std::uint32_t crc = ~before;
  while (bytes.size() >= kSlices) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes.data(), sizeof word);
    word ^= crc;
    crc = 0;
    for (std::size_t i = 0; i < kSlices; ++i) crc ^= kTables[kSlices - 1 - i][(word >> (8 * i)) & 0xffu];
    bytes = bytes.subspan(kSlices);
  }
  for (const std::byte byte : bytes)
    crc = (crc >> 8) ^ kTables[0][(crc ^ std::to_integer<std::uint32_t>(byte)) & 0xffu];
  return ~crc;
}

std::uint32_t crc32c_of_texts(std::span<const std::string> texts) {
  std::uint32_t out = 0;
  for (const std::string& text : texts) out = crc32c(std::as_bytes(std::span(text.c_str(), text.size() + 1)), out);
  return out;
}

}  // namespace treeattn::base
