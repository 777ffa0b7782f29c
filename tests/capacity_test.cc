// SPDX-License-Identifier: Apache-2.0
// Bytes and time of a decoding step against figures made by hand, and the searches against their own predicate.
#include "plan/capacity.h"

#include <gtest/gtest.h>

#include <optional>
#include <random>

#include "treeattn/error.h"

namespace treeattn::plan {
namespace {

// Sizes of a model of 8 billion weights in bfloat16.
ModelSize large_model() {
  ModelSize model{.layers = 32, .hidden = 4096, .heads = 32, .kv_heads = 8, .head_dim = 128, .feed_forward = 14336};
  model.vocab = 128256;
  model.weight_bytes = 16'060'522'496;
  model.read_weight_bytes = 15'009'849'344;
  model.read_weights = 7'504'924'672;
  model.kv_row_bytes = 256;
  return model;
}

// 4 devices a node, figures that divide well.
Cluster round_cluster() {
  return parse_cluster(R"(name = round
devices_per_node = 4
device_memory    = 100 GB
device_rate      = 1 TB/s
device_flops     = 100 TFLOP/s
launch           = 10 us
local_latency    = 2 us
local_bandwidth  = 100 GB/s
remote_latency   = 5 us
remote_bandwidth = 10 GB/s
)",
                       "round");
}

CapacityRequest request(std::int64_t context, std::int64_t batch = 1) {
  return {.model = large_model(), .context = context, .batch = batch, .cluster = round_cluster()};
}

TEST(CapacityTest, OneDeviceByHand) {
  const StrategyPlan plan = plan_strategy(request(131072), 1, Strategy::kMerge);
  EXPECT_EQ(plan.bytes.weights, 16'060'522'496u);
  EXPECT_EQ(plan.bytes.kv, 131072ull * 32 * 2 * 8 * 256);  // 16 GiB: no page is left half empty
  EXPECT_EQ(plan.bytes.states, (256u + 1) * 32 * 130 * 4);
  EXPECT_EQ(plan.bytes.workspace, (2u * 4096 + 2 * 40 * 128 + 3 * 14336 + 128256) * 4);
  EXPECT_TRUE(plan.fits);
  EXPECT_DOUBLE_EQ(plan.seconds.weights, 15'009'849'344 / 1e12);
  EXPECT_DOUBLE_EQ(plan.seconds.kv, 131072.0 * 32 * 4096 / 1e12 + 32 * 10e-6);
  EXPECT_NEAR(plan.seconds.exchange, 0, 1e-15);
  EXPECT_EQ(plan.seconds.split_weights, 0);
}

TEST(CapacityTest, SharesAndRoundsByHand) {
  // 4 devices of one node: 2 rounds up, 2 down; a state of 32 x 130 floats, merged on the way up.
  const StrategyPlan plan = plan_strategy(request(131072), 4, Strategy::kMerge);
  EXPECT_EQ(plan.bytes.kv, 131072ull / 4 * 32 * 4096);
  EXPECT_EQ(plan.bytes.states, (64u + 1 + 1) * 32 * 130 * 4);
  const double state = 32 * 130 * 4;
  EXPECT_NEAR(plan.seconds.exchange, 32 * (4 * (2e-6 + state / 100e9) + 2 * state / 1e12), 1e-12);
}

TEST(CapacityTest, APageIsTakenWhole) {
  EXPECT_EQ(plan_strategy(request(1), 1, Strategy::kMerge).bytes.kv, 256u * 32 * 4096);
  EXPECT_EQ(plan_strategy(request(257), 1, Strategy::kMerge).bytes.kv, 512u * 32 * 4096);
  // Time counts tokens: one launch a layer and one token to read.
  EXPECT_DOUBLE_EQ(plan_strategy(request(1), 1, Strategy::kMerge).seconds.kv, 32 * (4096 / 1e12 + 10e-6));
}

TEST(CapacityTest, TheRingHoldsAnotherShareOfALayer) {
  for (const int devices : {2, 3, 4, 8}) {
    const StrategyPlan tree = plan_strategy(request(131072), devices, Strategy::kMerge);
    const StrategyPlan ring = plan_strategy(request(131072), devices, Strategy::kRing);
    EXPECT_EQ(ring.bytes.workspace - tree.bytes.workspace, tree.bytes.kv / 32) << devices;
    EXPECT_GT(ring.seconds.total(), tree.seconds.total()) << devices;
  }
}

TEST(CapacityTest, SplitWeightsAreSharedByTheDevicesOfANode) {
  CapacityRequest split = request(131072);
  split.split_weights = true;
  EXPECT_EQ(plan_strategy(split, 1, Strategy::kMerge).bytes.weights, 16'060'522'496u);
  EXPECT_EQ(plan_strategy(split, 8, Strategy::kMerge).bytes.weights, 16'060'522'496u / 4);
  const StepTime time = plan_strategy(split, 8, Strategy::kMerge).seconds;
  EXPECT_DOUBLE_EQ(time.weights, 15'009'849'344 / 1e12 / 4);
  EXPECT_NEAR(time.split_weights, 2 * 32 * 2 * (2e-6 + 4096 * 4 / 100e9), 1e-12);
}

TEST(CapacityTest, SplitWeightsOfANodeThatIsNotFull) {
  CapacityRequest split = request(131072);
  split.split_weights = true;
  // The fifth device is alone on the second node, with all of the weights.
  EXPECT_EQ(plan_strategy(split, 5, Strategy::kMerge).bytes.weights, 16'060'522'496u);
  EXPECT_EQ(plan_strategy(split, 6, Strategy::kMerge).bytes.weights, 16'060'522'496u / 2);
  EXPECT_DOUBLE_EQ(plan_strategy(split, 5, Strategy::kMerge).seconds.weights, 15'009'849'344 / 1e12);
}

TEST(CapacityTest, FewestDevicesWithSplitWeightsAreTheFirstThatFit) {
  for (const std::int64_t context : {1'000, 500'000, 1'200'000, 1'500'000, 2'000'000, 3'000'000, 4'000'000}) {
    for (const int most_devices : {3, 8, 15, 64}) {
      CapacityRequest split = request(context);
      split.split_weights = true;
      split.model.weight_bytes = 200'000'000'000;
      split.most_devices = most_devices;
      std::optional<int> first;
      for (int devices = most_devices; devices > 0; --devices) {
        if (fits(split, devices)) first = devices;
      }
      EXPECT_EQ(fewest_devices(split), first) << context << " tokens, " << most_devices << " devices";
    }
  }
}

TEST(CapacityTest, ManySequencesAreLimitedByProducts) {
  const double one = plan_strategy(request(1024, 1), 1, Strategy::kMerge).seconds.weights;
  EXPECT_EQ(plan_strategy(request(1024, 100), 1, Strategy::kMerge).seconds.weights, one);
  EXPECT_DOUBLE_EQ(plan_strategy(request(1024, 1000), 1, Strategy::kMerge).seconds.weights,
                   2.0 * 7'504'924'672 * 1000 / 100e12);
}

TEST(CapacityTest, FewestDevicesAreJustEnough) {
  std::mt19937 random(1);
  for (int i = 0; i < 40; ++i) {
    const std::int64_t context = std::uniform_int_distribution<std::int64_t>(1, 40'000'000)(random);
    const std::int64_t batch = std::uniform_int_distribution<std::int64_t>(1, 4)(random);
    const CapacityRequest asked = request(context, batch);
    const auto devices = fewest_devices(asked);
    SCOPED_TRACE(testing::Message() << context << " tokens, " << batch << " sequences");
    ASSERT_TRUE(devices);
    EXPECT_TRUE(fits(asked, *devices));
    if (*devices > 1) {
      EXPECT_FALSE(fits(asked, *devices - 1));
    }
  }
}

TEST(CapacityTest, LongestContextIsJustShortEnough) {
  for (const int devices : {1, 2, 3, 5, 8, 64, 100, 300}) {
    for (const std::int64_t batch : {1, 3}) {
      SCOPED_TRACE(testing::Message() << devices << " devices, " << batch << " sequences");
      const std::int64_t longest = longest_context(request(1, batch), devices);
      ASSERT_GT(longest, 0);
      EXPECT_TRUE(fits(request(longest, batch), devices));
      EXPECT_FALSE(fits(request(longest + 1, batch), devices));
      EXPECT_LE(*fewest_devices(request(longest, batch)), devices);
    }
  }
}

TEST(CapacityTest, LongestContextOfMoreMemoryThanIsCounted) {
  CapacityRequest asked = request(1, 1024);
  asked.cluster.device_memory_bytes = 1e18;
  for (const int devices : {2, 64, 4096}) {
    SCOPED_TRACE(testing::Message() << devices << " devices");
    asked.context = longest_context(asked, devices);
    EXPECT_TRUE(fits(asked, devices));
    ++asked.context;
    EXPECT_THROW(fits(asked, devices), InvalidArgument);
    asked.context = 1;
  }
}

TEST(CapacityTest, WeightsThatDoNotFitNeverFit) {
  CapacityRequest asked = request(1024);
  asked.model.weight_bytes = 200'000'000'000;
  EXPECT_FALSE(fewest_devices(asked));
  EXPECT_EQ(longest_context(asked, 8), 0);
  asked.split_weights = true;
  EXPECT_EQ(fewest_devices(asked), 3);
}

TEST(CapacityTest, RankedByTimeAmongThoseThatFit) {
  for (const int devices : {1, 2, 6, 8, 16}) {
    const auto plans = plan_strategies(request(131072), devices);
    ASSERT_FALSE(plans.empty());
    for (std::size_t i = 1; i < plans.size(); ++i) {
      EXPECT_GE(plans[i - 1].fits, plans[i].fits);
      if (plans[i - 1].fits == plans[i].fits) {
        EXPECT_LE(plans[i - 1].seconds.total(), plans[i].seconds.total());
      }
    }
  }
}

TEST(CapacityTest, RefusesWhatItCannotPlan) {
  EXPECT_THROW(plan_strategy(request(0), 1, Strategy::kMerge), InvalidArgument);
  EXPECT_THROW(plan_strategy(request(1, 0), 1, Strategy::kMerge), InvalidArgument);
  EXPECT_THROW(plan_strategy(request(1), 0, Strategy::kMerge), InvalidArgument);
  EXPECT_THROW(plan_strategy(request(1), kMostDevices + 1, Strategy::kMerge), InvalidArgument);
  EXPECT_THROW(plan_strategy(request(1), 1, Strategy::kAuto), InvalidArgument);
  EXPECT_THROW(fits(request(std::int64_t{1} << 40, 1 << 20), 8), InvalidArgument);
  CapacityRequest no_memory = request(1);
  no_memory.usable = 0;
  EXPECT_THROW(fits(no_memory, 1), InvalidArgument);
}

}  // namespace
}  // namespace treeattn::plan
