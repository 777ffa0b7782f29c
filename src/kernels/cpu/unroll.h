// SPDX-License-Identifier: Apache-2.0
// What the compiler has to be told about hot loops.
#pragma once

// Loops over register arrays must be unrolled before the compiler decides where the arrays live: one index it cannot
// see through puts all of them on the stack, which on these hot loops cost a factor of two.
#define TREEATTN_UNROLL _Pragma("GCC unroll 16")

// For functions in headers of files that are compiled with flags of their own: the linker could give a copy of one to
// code that must run without them. And GCC 12 takes a function that only prefetches for one without effect and drops
// its calls.
#define TREEATTN_FORCE_INLINE __attribute__((always_inline))
