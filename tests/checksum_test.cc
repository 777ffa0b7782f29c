// SPDX-License-Identifier: Apache-2.0
// CRC-32C: published values, pieces, every single flipped bit.
#include "base/checksum.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string_view>
#include <vector>

namespace treeattn::base {
namespace {

std::span<const std::byte> bytes_of(std::string_view text) { return std::as_bytes(std::span(text)); }

// One bit at a time.
std::uint32_t plain_crc32c(std::span<const std::byte> bytes) {
  std::uint32_t crc = ~0u;
  for (const std::byte byte : bytes) {
    crc ^= std::to_integer<std::uint32_t>(byte);
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1u) != 0 ? 0x82f63b78u : 0u);
  }
  return ~crc;
}

TEST(Checksum, PublishedValues) {
  EXPECT_EQ(crc32c(bytes_of("123456789")), 0xe3069283u);
  EXPECT_EQ(crc32c({}), 0u);
  // RFC 3720, appendix B.4.
  std::vector<std::byte> block(32, std::byte{0});
  EXPECT_EQ(crc32c(block), 0x8a9136aau);
  block.assign(32, std::byte{0xff});
  EXPECT_EQ(crc32c(block), 0x62a8ab43u);
  for (std::size_t i = 0; i < 32; ++i) block[i] = static_cast<std::byte>(i);
  EXPECT_EQ(crc32c(block), 0x46dd794eu);
}

TEST(Checksum, AnyLengthStartAndCut) {
  std::vector<std::byte> bytes(100);
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i * 37 + 11);
  for (std::size_t first = 0; first < 9; ++first) {
    for (std::size_t count = 0; first + count <= bytes.size(); ++count) {
      const auto part = std::span(bytes).subspan(first, count);
      const std::uint32_t whole = crc32c(part);
      ASSERT_EQ(whole, plain_crc32c(part));
      ASSERT_EQ(whole, crc32c(part.subspan(count / 3), crc32c(part.first(count / 3))));
    }
  }
}

TEST(Checksum, NoticesEveryFlippedBit) {
  std::vector<std::byte> bytes(333, std::byte{0x5a});
  const std::uint32_t whole = crc32c(bytes);
  for (std::size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
    bytes[bit / 8] ^= std::byte{1} << (bit % 8);
    ASSERT_NE(crc32c(bytes), whole);
    bytes[bit / 8] ^= std::byte{1} << (bit % 8);
  }
}

}  // namespace
}  // namespace treeattn::base
