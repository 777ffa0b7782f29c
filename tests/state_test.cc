// SPDX-License-Identifier: Apache-2.0
// The public calls on packed states: finalize, sinks, refusals, and a whole tree of merges against softmax.
#include "treeattn/state.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "exact_merge.h"
#include "plan/tree_order.h"
#include "treeattn/error.h"

namespace treeattn {
namespace {

using namespace testing_states;

constexpr float kLog2E = 0x1.715476p+0f;

// out = o / l: the errors of o and l, and the rounding of the division. lse is computed in double and rounded once; the
// last term is for numbers near zero, where ln l cancels against m.
void expect_final(const Final& got, const Exact& want) {
  const double l = want.x[0], l_off = want.off[0];
  for (std::size_t i = 0; i < got.out.size(); ++i) {
    const double out = want.x[i + 1] / l;
    const double bound = (want.off[i + 1] + std::fabs(out) * l_off) / (l - l_off) + 0x1p-23 * std::fabs(out) + 0x1p-149;
    EXPECT_LE(std::fabs(got.out[i] - out), bound) << "out[" << i << "]";
  }
  const double lse = want.m * kLn2 + std::log(l);
  EXPECT_LE(std::fabs(got.lse - lse), l_off / (l - l_off) + 0x1p-23 * std::fabs(lse) + 0x1p-50 * std::fabs(want.m));
}

TEST(FinalizeTest, SinkCountsOnceAsAKeyWithoutValue) {
  Random random;
  for (int round = 0; round < 500; ++round) {
    const float sink = static_cast<float>(random.uniform(-40, 40));
    const Row s = random.state(-60, 60);
    Row key = identity();
    key[0] = sink * kLog2E;
    key[1] = 1.0f;
    const Final got = finalized(s, {sink}), as_key = finalized(merged(s, key));
    EXPECT_TRUE(same_bits(got.out, as_key.out));
    EXPECT_EQ(got.lse, as_key.lse);
    expect_final(got, merged(Exact(s), Exact(key)));
    // The conversion to log2 units rounds twice (the constant, the product): 2^-23 of the logit.
    EXPECT_NEAR(finalized(identity(), {sink}).lse, sink, 0x1p-22 * std::fabs(sink));
    EXPECT_EQ(finalized(identity(), {sink}).out, Row(kDim, 0.0f));
    const Final none = finalized(s), minus_inf = finalized(s, {-kInf});
    EXPECT_TRUE(same_bits(none.out, minus_inf.out));
    EXPECT_EQ(none.lse, minus_inf.lse);
  }
  EXPECT_EQ(finalized(identity(), {-kInf}).lse, -kInf);
  EXPECT_EQ(finalized(identity(), {-kInf}).out, Row(kDim, 0.0f));
}

TEST(FinalizeTest, SinkThatIsNoNumberShowsWithKeysAndWithout) {
  Random random;
  for (const float sink : {std::numeric_limits<float>::quiet_NaN(), kInf}) {
    for (const Row& state : {identity(), random.state(-60, 60)}) {
      const Final got = finalized(state, {sink});
      EXPECT_TRUE(std::isnan(got.lse));
      EXPECT_TRUE(std::all_of(got.out.begin(), got.out.end(), [](float x) { return std::isnan(x); }));
    }
  }
}

TEST(FinalizeTest, RowsTakeTheSinksInTurn) {
  Random random;
  const std::vector<float> sinks = {3.0f, -kInf, -2.0f};
  Row states, out(6 * kDim, kNan), lse(6, kNan);
  for (int r = 0; r < 6; ++r) {
    const Row s = random.state(-4, 4);
    states.insert(states.end(), s.begin(), s.end());
  }
  const Row before = states;
  finalize_states(states, kDim, sinks, out, lse);
  EXPECT_TRUE(same_bits(states, before));
  for (std::size_t r = 0; r < 6; ++r) {
    const auto row = states.begin() + static_cast<std::ptrdiff_t>(r * state_floats(kDim));
    const Final want = finalized(Row(row, row + static_cast<std::ptrdiff_t>(state_floats(kDim))), {sinks[r % 3]});
    EXPECT_EQ(lse[r], want.lse);
    EXPECT_EQ(std::memcmp(out.data() + r * kDim, want.out.data(), sizeof(float) * kDim), 0);
  }
  Row again(6 * kDim, kNan);
  finalize_states(states, kDim, sinks, again, {});
  EXPECT_TRUE(same_bits(out, again));
}

template <typename Call>
std::string refusal(Call call) {
  try {
    call();
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "accepted";
}

TEST(StateTest, BadSizesAreRefusedNamingTheValue) {
  Row row(3 * 10, 7.0f), other(3 * 10 + 1, 7.0f), out(24, 7.0f), lse(3, 7.0f), sinks(2);
  const std::span<float> all(row);
  const auto says = [](const std::string& text, std::initializer_list<const char*> words) {
    for (const char* word : words) EXPECT_NE(text.find(word), std::string::npos) << word << " not in: " << text;
  };
  says(refusal([&] { identity_states(all, 0); }), {"v_dim = 0", "1 or more"});
  says(refusal([&] { identity_states(all, -2); }), {"v_dim = -2"});
  says(refusal([&] { identity_states(all, 7); }), {"30", "multiple", "9"});
  says(refusal([&] { merge_states(all, other, 8); }), {"30", "31", "equal"});
  says(refusal([&] { merge_states(all.first(29), all.first(29), 8); }), {"29", "multiple", "10"});
  says(refusal([&] { merge_states(all, all, 0); }), {"v_dim = 0"});
  says(refusal([&] { finalize_states(all.first(29), 8, {}, out, {}); }), {"29", "multiple", "10"});
  says(refusal([&] { finalize_states(all, 8, {}, std::span(out).first(23), {}); }), {"out", "23", "24"});
  says(refusal([&] { finalize_states(all, 8, {}, out, std::span(lse).first(2)); }), {"lse", "2", "3"});
  says(refusal([&] { finalize_states(all, 8, sinks, out, lse); }), {"sinks", "2", "3"});
  float* const nowhere = nullptr;
  says(refusal([&] { identity_states({nowhere, 30}, 8); }), {"states = 0x0 with 30"});
  says(refusal([&] { merge_states(all, {nowhere, 30}, 8); }), {"higher = 0x0 with 30"});
  says(refusal([&] { finalize_states(all, 8, {}, {nowhere, 24}, lse); }), {"out = 0x0 with 24"});
  says(refusal([&] { finalize_states(all, 8, {}, all.last(24), lse); }), {"out and states overlap"});
  says(refusal([&] { finalize_states(all, 8, {}, out, all.first(3)); }), {"lse and states overlap"});
  says(refusal([&] { finalize_states(all, 8, {}, out, std::span(out).last(3)); }), {"out and lse overlap"});
  says(refusal([&] { finalize_states(all, 8, std::span(out).first(3), out, lse); }), {"out and sinks overlap"});
  says(refusal([&] { finalize_states(all, 8, lse, out, lse); }), {"lse and sinks overlap"});
  says(refusal([&] { merge_states(all.first(20), all.last(20), 8); }), {"lower and higher overlap"});
  for (const Row* buffer : {&row, &other, &out, &lse}) {
    EXPECT_EQ(std::count(buffer->begin(), buffer->end(), 7.0f), std::ssize(*buffer)) << "written to before the check";
  }
  EXPECT_EQ(refusal([&] { merge_states({}, {}, 8); }), "accepted");
  EXPECT_EQ(refusal([&] { finalize_states({}, 8, {}, {}, {}); }), "accepted");
  EXPECT_EQ(refusal([&] { finalize_states({}, std::int64_t{1} << 62, {}, {}, {}); }), "accepted");
}

// Keys, each exactly the state (logit, 1, v), gathered into 64 blocks one after another, and the blocks by the
// canonical tree. The bound is the running one of Exact along the same tree; the answer is softmax over all keys at
// once.
TEST(StateTest, BlocksInTreeOrderMakeTheSoftmax) {
  Random random;
  constexpr int kBlocks = 64;
  for (const double spread : {0.5, 4.0, 60.0, 2000.0}) {
    for (const double shift : {0.0, 1e5, -1e5}) {
      std::vector<Row> keys, blocks(kBlocks, identity());
      std::vector<Exact> bounds(kBlocks);
      float largest = 0;
      for (int b = 0; b < kBlocks; ++b) {
        for (int n = random.integer(0, 12); n > 0; --n) {  // some blocks have no key
          Row key(state_floats(kDim), 1.0f);
          key[0] = static_cast<float>(shift + spread * random.normal());
          for (std::size_t i = 2; i < key.size(); ++i) largest = std::max(largest, std::fabs(key[i] = random.normal()));
          const auto at = static_cast<std::size_t>(b);
          blocks[at] = merged(blocks[at], key);
          bounds[at] = merged(bounds[at], Exact(key));
          keys.push_back(key);
        }
      }
      std::vector<Row> level;
      std::vector<Exact> level_bounds;
      for (int leaf = 0; leaf < kBlocks; ++leaf) {
        const auto branch = static_cast<std::size_t>(plan::reverse_bits(leaf, kBlocks));
        level.push_back(blocks[branch]);
        level_bounds.push_back(bounds[branch]);
      }
      for (std::size_t width = kBlocks; width > 1; width /= 2) {
        for (std::size_t i = 0; i < width / 2; ++i) {
          level[i] = merged(level[2 * i], level[2 * i + 1]);
          level_bounds[i] = merged(level_bounds[2 * i], level_bounds[2 * i + 1]);
        }
      }
      Exact direct = level_bounds[0];  // its bound, but the value by one pass in double
      std::fill(direct.x.begin(), direct.x.end(), 0.0);
      for (const Row& key : keys) {
        const double w = std::exp2(static_cast<double>(key[0]) - direct.m);
        for (std::size_t i = 0; i < direct.x.size(); ++i) direct.x[i] += w * key[i + 1];
      }
      SCOPED_TRACE("spread " + std::to_string(spread) + ", shift " + std::to_string(shift));
      expect_near(level[0], direct);
      expect_final(finalized(level[0]), direct);
      // So that the bound means something: at most 12 + 6 merges of about 2^-21 each.
      for (const double off : direct.off) EXPECT_LE(off, 18 * 0x1p-21 * direct.x[0] * std::max(1.0f, largest));
    }
  }
}

}  // namespace
}  // namespace treeattn
