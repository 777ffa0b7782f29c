// SPDX-License-Identifier: Apache-2.0
// What a cache says where there is no GPU, and what ranks on CPUs answer to calls for GPUs. With one: tests/cuda.
#include <gtest/gtest.h>

#include <atomic>

#include "decode_loop.h"
#include "treeattn/cuda.h"
#include "treeattn/cuda_states.h"
#include "treeattn/error.h"

namespace treeattn {
namespace {

using testing_parallel::Loop;

TEST(DeviceCache, WhereThereIsNoGpuItSaysSo) {
  if (cuda_problem().empty()) GTEST_SKIP() << "there is a GPU: tests/cuda";
  try {
    KvCache(self_communicator(), Loop().config(), {}, 3);
    FAIL() << "a cache on a GPU that is not there";
  } catch (const Unavailable& error) {
    EXPECT_NE(std::string(error.what()).find("GPU 3"), std::string::npos) << error.what();
  }
  EXPECT_THROW(cuda_identity_states(nullptr, 1, 16, nullptr), Unavailable);
}

TEST(DeviceCache, RanksOnCpusRefuseCallsForGpus) {
  const Loop loop;
  std::atomic<int> refused = 0;
  run_ranks(3, [&](std::shared_ptr<Communicator> world) {
    ThreadPool pool(1);
    KvCache cache(world, loop.config());
    EXPECT_EQ(cache.gpu(), KvCache::kHost);
    const SequenceId id = cache.add_sequence();
    const KvView k = KvView::tokens_first(loop.k.data(), DType::kFloat32, 1, Loop::kPrompt, Loop::kKvHeads, Loop::kDim);
    EXPECT_THROW(cache.append_from_device(id, k, k, nullptr), InvalidArgument);
    EXPECT_EQ(cache.length(id), 0);
    loop.append(cache, id, 0, Loop::kPrompt + 1);
    EXPECT_THROW(cache.write_from_device(id, 0, 0, k, k, nullptr), InvalidArgument);
    for (const DeviceLink link : {DeviceLink::kPeer, DeviceLink::kNccl}) {
      ParallelAttention attention(world, {Strategy::kMerge, false, link});
      try {
        loop.decode(attention, cache, id, 0, pool);
      } catch (const InvalidArgument&) {
        ++refused;
      }
    }
    // And the next call works.
    ParallelAttention attention(world, {Strategy::kMerge});
    loop.decode(attention, cache, id, 0, pool);
  });
  EXPECT_EQ(refused, 6);
}

TEST(DeviceCache, WeightsByBandwidthAreTheSameOnAllRanks) {
  std::vector<double> seen[2];
  run_ranks(2, [&](std::shared_ptr<Communicator> world) {
    ThreadPool pool(1);
    seen[world->rank()] = bandwidth_weights(*world, KvCache::kHost, pool);
    KvCache cache(world, Loop().config(), seen[world->rank()]);
  });
  ASSERT_EQ(seen[0].size(), 2u);
  EXPECT_EQ(seen[0], seen[1]);
  for (const double weight : seen[0]) EXPECT_GT(weight, 0);
}

}  // namespace
}  // namespace treeattn
