// SPDX-License-Identifier: Apache-2.0
// The shapes of the tile registers of AMX.
#pragma once

#include <cstddef>
#include <cstdint>

namespace treeattn::kernels::amx {

inline constexpr int kRows = 16;
inline constexpr int kRowBytes = 64;
inline constexpr std::int64_t kTileBytes = kRows * kRowBytes;

// What LDTILECFG reads.
struct alignas(64) TileShapes {
  std::uint8_t palette = 1;
  std::uint8_t start_row = 0;
  std::uint8_t reserved[14] = {};
  std::uint16_t row_bytes[16] = {};
  std::uint8_t rows[16] = {};

  static TileShapes whole() {  // all registers, all of each
    TileShapes shapes;
    for (int tile = 0; tile < 8; ++tile) shapes.set(tile, kRows, kRowBytes);
    return shapes;
  }
  void set(int tile, std::int64_t count, std::int64_t bytes) {
    rows[tile] = static_cast<std::uint8_t>(count);
    row_bytes[tile] = static_cast<std::uint16_t>(bytes);
  }
};

}  // namespace treeattn::kernels::amx
