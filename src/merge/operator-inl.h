// SPDX-License-Identifier: Apache-2.0
// The merge formula, once. No include guard: merge/operator.h includes it for scalars and CUDA, and every SIMD target
// includes it again inside its own namespace, because code for a target must be compiled inside that target's region.
//
// Needs TREEATTN_MERGE_FN (the function specifiers) and merge/exp2_polynomial.h. `Ops` gives the arithmetic on V: a
// float, a SIMD vector of floats, or a float in a CUDA thread.

// 2^x for -126 <= x < 127. Exact (1) at x = 0; NaN stays NaN. Relative error below 2^-22 (tests/merge_test.cc).
template <class Ops, class V>
TREEATTN_MERGE_FN V exp2_in_range(V x) {
  // x = n + f with |f| <= 1/2: adding 1.5 * 2^23 rounds to an integer and leaves n in the low mantissa bits.
  const V shifter = Ops::set(merge::kExp2Shifter);
  const V shifted = Ops::add(x, shifter);
  const V f = Ops::sub(x, Ops::sub(shifted, shifter));
  V p = Ops::set(merge::kExp2A5);
  p = Ops::fma(p, f, Ops::set(merge::kExp2A4));
  p = Ops::fma(p, f, Ops::set(merge::kExp2A3));
  p = Ops::fma(p, f, Ops::set(merge::kExp2A2));
  p = Ops::fma(p, f, Ops::set(merge::kExp2A1));
  p = Ops::fma(p, f, Ops::set(1.0f));
  return Ops::times_power_of_two(p, shifted);
}

// 2^x for x <= 0: what a key, or a whole state, weighs against the largest logit of its union. x below -126 counts as
// -126, so that a weight vanishes only where a mask says so: 0 * inf would invent a NaN. As it is exact at x = 0, a
// state whose max does not move keeps its bits.
template <class Ops, class V>
TREEATTN_MERGE_FN V exp2_weight(V x) {
  return exp2_in_range<Ops>(Ops::max(Ops::set(-126.0f), x));  // this argument order keeps NaN on every target
}

// The l or o component of merge(lower, higher), w_lower and w_higher being exp2_weight(m_side - m_merged). Not bitwise
// commutative because of the fused multiply-add: the side that comes first in the tree goes first.
template <class Ops, class V>
TREEATTN_MERGE_FN V merge_component(V lower, V w_lower, V higher, V w_higher) {
  return Ops::fma(lower, w_lower, Ops::mul(higher, w_higher));
}
