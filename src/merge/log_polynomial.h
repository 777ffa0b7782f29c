// SPDX-License-Identifier: Apache-2.0
// ln(1 + r) for |r| <= 1/3 as r + r^2 (b0 + r (b1 + ...)), b0 = -1/2: relative error 2^-27 before rounding.
#pragma once

namespace treeattn::merge {

inline constexpr float kLogB1 = 0x1.555506p-2f;
inline constexpr float kLogB2 = -0x1.fffef0p-3f;
inline constexpr float kLogB3 = 0x1.99d028p-3f;
inline constexpr float kLogB4 = -0x1.559dccp-3f;
inline constexpr float kLogB5 = 0x1.1ed70ap-3f;
inline constexpr float kLogB6 = -0x1.f3112ap-4f;
inline constexpr float kLogB7 = 0x1.1e66fcp-3f;
inline constexpr float kLogB8 = -0x1.0805c2p-3f;

}  // namespace treeattn::merge
