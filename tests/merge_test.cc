// SPDX-License-Identifier: Apache-2.0
// The laws of the merge operator, on fresh random states each run. TREEATTN_SEED repeats a run.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>

#include "exact_merge.h"
#include "merge/operator.h"
#include "thinning.h"
#include "treeattn/state.h"

namespace treeattn {
namespace {

using namespace testing_states;

// Quiet and signalling, of either sign, with payloads: bit tricks that keep the usual NaN can lose these.
const float kNans[] = {kNan,
                       from_bits(0xffffffffu),
                       from_bits(0x7fc00155u),
                       from_bits(0xffc00000u),
                       from_bits(0x7f800001u),
                       from_bits(0x7fbfffffu)};

TEST(MergeTest, IdentityOnEitherSideKeepsEveryBit) {
  Random random;
  for (int round = 0; round < 1000; ++round) {
    Row s = random.state(-100, 100);
    for (std::size_t i = 2; i < s.size(); i += 3) {  // what a multiplication by 1 or an addition of 0 would not keep
      const float odd[] = {-0.0f, 0.0f, from_bits(1), from_bits(0x807fffffu), kInf, -kInf};
      s[i] = odd[static_cast<std::size_t>(random.integer(0, 5))];
    }
    s[4] = kNans[static_cast<std::size_t>(random.integer(0, 5))];
    EXPECT_TRUE(same_bits(merged(identity(), s), s));
    EXPECT_TRUE(same_bits(merged(s, identity()), s));
    Row garbage = s;  // an empty row is known by its maximum alone
    garbage[0] = -kInf;
    garbage[1] = kNan;
    EXPECT_TRUE(same_bits(merged(garbage, s), s));
    EXPECT_TRUE(same_bits(merged(s, garbage), s));
  }
}

TEST(MergeTest, EmptyWithEmptyIsEmpty) {
  const Row empty = identity();
  EXPECT_EQ(empty[0], -kInf);
  for (std::size_t i = 1; i < empty.size(); ++i) EXPECT_EQ(std::bit_cast<std::uint32_t>(empty[i]), 0u);
  EXPECT_TRUE(same_bits(merged(empty, empty), empty));
  Row spoiled(empty.size(), kNan);
  spoiled[0] = -kInf;
  const Row garbage = spoiled;
  for (const Row* lower : {&empty, &garbage}) {
    for (const Row* higher : {&empty, &garbage}) {
      const Row both = merged(*lower, *higher);
      EXPECT_EQ(both[0], -kInf);
      const Final result = finalized(both);
      EXPECT_EQ(result.lse, -kInf);
      EXPECT_EQ(std::count(result.out.begin(), result.out.end(), 0.0f), kDim);
    }
  }
}

TEST(MergeTest, AssociativeWithinRounding) {
  Random random;
  for (int round = 0; round < 3000; ++round) {
    const double spread = std::exp2(random.uniform(-4, 9));
    Row s[3];
    for (Row& row : s) row = random.integer(0, 9) == 0 ? identity() : random.state(-spread, spread);
    const Row left = merged(merged(s[0], s[1]), s[2]), right = merged(s[0], merged(s[1], s[2]));
    const Exact a(s[0]), b(s[1]), c(s[2]);
    const Exact exact_left = merged(merged(a, b), c), exact_right = merged(a, merged(b, c));
    expect_near(left, exact_left);
    expect_near(right, exact_right);
    // In double the two trees are one value, so the float32 results are as near to each other as the bounds together.
    EXPECT_EQ(left[0], right[0]);
    for (std::size_t i = 0; i < exact_left.x.size(); ++i) {
      const double bound = exact_left.off[i] + exact_right.off[i];
      EXPECT_LE(std::fabs(static_cast<double>(left[i + 1]) - right[i + 1]), bound);
    }
    if (testing::Test::HasFailure()) return;
  }
}

TEST(MergeTest, SwappedSidesGiveTheSameValueButNotTheSameBits) {
  Random random;
  int different = 0;
  for (int round = 0; round < 1000; ++round) {
    const Row a = random.state(-5, 5), b = random.state(-5, 5);
    const Row ab = merged(a, b), ba = merged(b, a);
    const Exact want = merged(Exact(a), Exact(b));
    expect_near(ab, want);
    expect_near(ba, want);
    EXPECT_TRUE(same_bits(ab, merged(a, b)));
    if (!same_bits(ab, ba)) ++different;
  }
  // No promise broken if this were 0, but then who swaps two partners of a butterfly would not be found out by tests.
  std::printf("%d of 1000 pairs differ in bits when swapped\n", different);
  EXPECT_GT(different, 0);
}

TEST(MergeTest, RowsDoNotMix) {
  Random random;
  for (const std::size_t rows : {1u, 2u, 7u}) {
    Row lower, higher, want;
    for (std::size_t r = 0; r < rows; ++r) {
      const Row a = random.integer(0, 3) == 0 ? identity() : random.state(-9, 9);
      const Row b = random.integer(0, 3) == 0 ? identity() : random.state(-9, 9);
      const Row both = merged(a, b);
      lower.insert(lower.end(), a.begin(), a.end());
      higher.insert(higher.end(), b.begin(), b.end());
      want.insert(want.end(), both.begin(), both.end());
    }
    merge_states(lower, higher, kDim);
    EXPECT_TRUE(same_bits(lower, want));
  }
}

TEST(MergeTest, HugeMaximaAndDifferencesStayFinite) {
  Random random;
  const float centers[] = {1e5f, -1e5f, 1e30f, -1e30f, 0.0f};
  const float gaps[] = {0, 0.5f, 1, 125.5f, 126, 126.5f, 127, 149, 150, 1000, 2e5f, 3e38f};
  for (const float center : centers) {
    for (const float gap : gaps) {
      for (const float sign : {1.0f, -1.0f}) {
        Row a = random.state(0, 1), b = random.state(0, 1);
        a[0] = center;
        b[0] = center + sign * gap;
        ASSERT_TRUE(std::isfinite(b[0]));
        for (const bool swap : {false, true}) {
          const Row got = swap ? merged(b, a) : merged(a, b);
          expect_near(got, swap ? merged(Exact(b), Exact(a)) : merged(Exact(a), Exact(b)));
          EXPECT_TRUE(std::all_of(got.begin(), got.end(), is_finite)) << center << " and " << b[0];
          EXPECT_GE(got[1], std::max(a[0] >= b[0] ? a[1] : 0.0f, b[0] >= a[0] ? b[1] : 0.0f));
          const Final result = finalized(got);
          EXPECT_TRUE(std::all_of(result.out.begin(), result.out.end(), is_finite));
          EXPECT_TRUE(std::isfinite(result.lse));
        }
      }
    }
  }
  // The difference of these two overflows to -inf, and still the weight is 2^-126.
  Row low = {-3e38f, 1, 1}, high = {3e38f, 1, 0};
  EXPECT_TRUE(same_bits(merged(low, high), {3e38f, 1, 0x1p-126f}));
  EXPECT_TRUE(same_bits(merged(high, low), {3e38f, 1, 0x1p-126f}));
}

// Half a unit for the sum of both terms, and for ln f, which is 0.41 at most, its polynomial and eight roundings.
TEST(MergeTest, LogOfASumIsWithinItsBound) {
  constexpr double kU = 0x1p-24;
  Random random;
  for (int i = 0; i < 200'000; ++i) {
    const auto l = static_cast<float>(std::exp2(random.uniform(i % 2 == 0 ? -126 : -1, i % 2 == 0 ? 127 : 1)));
    const auto m = static_cast<float>(i % 3 == 0 ? 0.0 : random.uniform(-1e5, 1e5));
    const double exact = m * std::log(2.0) + std::log(static_cast<double>(l));
    ASSERT_LE(std::fabs(merge::row_lse(m, l) - exact), kU * (std::fabs(exact) + 0.7)) << "m " << m << ", l " << l;
  }
  EXPECT_EQ(merge::row_lse(0.0f, 1.0f), 0.0f);
  EXPECT_EQ(merge::row_lse(0.0f, kInf), kInf);
  EXPECT_EQ(merge::row_lse(0.0f, 0.0f), -kInf);
  EXPECT_NEAR(merge::row_lse(0.0f, 0x1p-140f), -140 * std::log(2.0), 1e-5);
  EXPECT_TRUE(std::isnan(merge::row_lse(0.0f, kNans[0])));
}

TEST(MergeTest, NanAndPlusInfinityAreNeverLost) {
  Random random;
  for (const float nan : kNans) {
    for (const double gap : {-300.0, -3.0, 0.0, 3.0, 300.0}) {  // also where the spoiled side weighs next to nothing
      for (const bool spoil_lower : {false, true}) {
        for (std::size_t at = 0; at < state_floats(kDim); ++at) {
          Row spoiled = random.state(gap, gap), other = random.state(0, 0);
          spoiled[at] = nan;
          const Row got = spoil_lower ? merged(spoiled, other) : merged(other, spoiled);
          const Final result = finalized(got);
          const auto nans = std::count_if(result.out.begin(), result.out.end(), is_nan);
          EXPECT_EQ(nans, at < 2 ? kDim : 1) << "element " << at << ", gap " << gap;
          EXPECT_EQ(std::isnan(result.lse), at < 2) << "element " << at << ", gap " << gap;
          if (at >= 2) {
            EXPECT_TRUE(std::isnan(result.out[at - 2]));
          }
          // One more merge, on either side, with a state that outweighs it: still there.
          const Row heavy = random.state(500, 500);
          for (const Row& later : {merged(got, heavy), merged(heavy, got)}) {
            const Row out = finalized(later).out;
            EXPECT_EQ(std::count_if(out.begin(), out.end(), is_nan), nans) << "element " << at << ", gap " << gap;
          }
        }
      }
    }
  }
  for (const float other : {0.0f, kInf}) {  // a maximum of +inf has no exact meaning; it must not look like an answer
    Row infinite = random.state(0, 0), second = random.state(0, 0);
    infinite[0] = kInf;
    second[0] = other;
    for (const Row& got : {merged(infinite, second), merged(second, infinite)}) {
      const Row out = finalized(got).out;
      EXPECT_EQ(std::count_if(out.begin(), out.end(), is_nan), kDim);
    }
  }
}

TEST(Exp2WeightTest, RelativeErrorIsBelowTwoToMinus22) {
  double worst = 0;
  const auto check = [&](float x) {
    const double want = std::exp2(static_cast<double>(x));
    const double error = std::fabs(merge::exp2_weight<merge::ScalarOps>(x) - want) / want;
    worst = std::max(worst, error);
    ASSERT_LT(error, 0x1p-22) << "x = " << x;
  };
  const std::uint32_t last = std::bit_cast<std::uint32_t>(-126.0f), step = static_cast<std::uint32_t>(thinning());
  for (std::uint32_t bits = 0x80000000u; bits <= last; bits += 97 * step) {
    check(from_bits(bits));
    if (HasFatalFailure()) return;
  }
  for (float x = -126.0f; x <= 0.0f; x += 0.5f) {  // where the rounding to an integer changes over
    for (const float y : {x, std::nextafter(x, 0.0f), std::nextafter(x, -126.0f)}) check(y);
  }
  std::printf("largest relative error of exp2_weight: 2^%.2f\n", std::log2(worst));
}

TEST(Exp2WeightTest, ExactAtZeroClampedBelowAndNanStaysNan) {
  const auto weight = [](float x) { return merge::exp2_weight<merge::ScalarOps>(x); };
  EXPECT_EQ(weight(0.0f), 1.0f);
  EXPECT_EQ(weight(-0.0f), 1.0f);
  EXPECT_EQ(weight(-from_bits(1)), 1.0f);
  for (int n = 0; n <= 126; ++n) EXPECT_EQ(weight(static_cast<float>(-n)), std::exp2(static_cast<float>(-n)));
  for (const float x : {-126.0f, -126.5f, -149.0f, -1e5f, -3e38f, -kInf}) EXPECT_EQ(weight(x), 0x1p-126f) << x;
  for (const float nan : kNans) EXPECT_TRUE(std::isnan(weight(nan)));
  for (std::uint32_t payload = 1; payload < 0x800000u; payload += 4099) {
    EXPECT_TRUE(std::isnan(weight(from_bits(0x7f800000u | payload))));
    EXPECT_TRUE(std::isnan(weight(from_bits(0xff800000u | payload))));
  }
}

}  // namespace
}  // namespace treeattn
