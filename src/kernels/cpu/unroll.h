// SPDX-License-Identifier: Apache-2.0
// Loops over register arrays must be unrolled before the compiler decides where the arrays live: one index it cannot
// see through puts all of them on the stack, which on the hot loops of the NEON files cost a factor of two.
#pragma once

#define TREEATTN_UNROLL _Pragma("GCC unroll 16")
