// SPDX-License-Identifier: Apache-2.0
// 2^f for |f| <= 1/2 as 1 + f (a1 + f (a2 + ...)): minimax with the constant term pinned to 1, relative error 2^-23.4.
#pragma once

namespace treeattn::merge {

inline constexpr float kExp2Shifter = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
inline constexpr float kExp2A1 = 0x1.62e42ap-1f;
inline constexpr float kExp2A2 = 0x1.ebf9bcp-3f;
inline constexpr float kExp2A3 = 0x1.c6b752p-5f;
inline constexpr float kExp2A4 = 0x1.3cea88p-7f;
inline constexpr float kExp2A5 = 0x1.5bba12p-10f;

inline constexpr float kLog2E = 0x1.715476p+0f;  // log2(e): logits times this are in log2 units

}  // namespace treeattn::merge
