// SPDX-License-Identifier: Apache-2.0
// Attention over ranks that have their pages on a GPU: several ranks on one GPU, each with a stream of its own. The
// checks of threads and MPI, with the bits of one rank on a GPU as what all must have.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <limits>

#include "decode_loop.h"
#include "device_case.h"
#include "expect_on_ranks.h"
#include "parallel_checks.h"
#include "prefill_checks.h"
#include "temporary_directory.h"
#include "thinning.h"
#include "treeattn/cuda.h"
#include "treeattn/error.h"

namespace treeattn {
namespace {

using testing_parallel::expect_on_ranks;
using testing_parallel::Failures;
using testing_parallel::Loop;
using testing_parallel::Output;
using testing_parallel::PreparedCase;

constexpr int kGpu = 0;
int on_gpu(int) { return kGpu; }

// The whole list, prepared once: the oracle takes longer than the GPU.
const std::vector<std::unique_ptr<PreparedCase>>& all_cases() {
  static const auto kCases = testing_parallel::prepared_cases(1, 0, kGpu);
  return kCases;
}

class VirtualRanks : public testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    if (!cuda_problem().empty()) GTEST_SKIP() << "*** SKIPPED: " << cuda_problem() << " ***";
  }
};
INSTANTIATE_TEST_SUITE_P(Ranks, VirtualRanks, testing::Values(1, 2, 3, 4, 8), testing::PrintToStringParamName());

class OneGpu : public VirtualRanks {};
INSTANTIATE_TEST_SUITE_P(One, OneGpu, testing::Values(1), testing::PrintToStringParamName());

TEST_P(OneGpu, OneRankIsWithinTheBound) {
  double worst = 0;
  for (const auto& prepared : all_cases()) {
    const double error = prepared->error(prepared->single, Strategy::kMerge);
    EXPECT_LE(error, 1) << prepared->data.shape().name;
    worst = std::max(worst, error);
  }
  std::printf("largest error %.3f of its bound\n", worst);
}

TEST_P(VirtualRanks, EveryStrategyOnTheCaseList) {
  const auto& cases = all_cases();
  expect_on_ranks(GetParam(),
                  [&](const auto& world) { return testing_parallel::check_strategies(world, cases, {}, on_gpu); });
}

TEST_P(VirtualRanks, UnequalSharesAndRanksThatCarryNothing) {
  const auto cases = testing_parallel::prepared_cases(13 * thinning(), 3, kGpu);
  const std::vector<double> weights = testing_parallel::uneven_weights(GetParam());
  expect_on_ranks(GetParam(),
                  [&](const auto& world) { return testing_parallel::check_strategies(world, cases, weights, on_gpu); });
}

TEST_P(VirtualRanks, BytesSentAreThoseOfTheFormulas) {
  const std::vector<double> weights = testing_parallel::uneven_weights(GetParam());
  expect_on_ranks(GetParam(), [&](const auto& world) { return testing_parallel::check_bytes(world, {}, on_gpu); });
  expect_on_ranks(GetParam(), [&](const auto& world) { return testing_parallel::check_bytes(world, weights, on_gpu); });
}

TEST_P(VirtualRanks, PrefillByRingAndByCollecting) {
  const std::vector<double> weights = testing_parallel::uneven_weights(GetParam());
  for (const kernels::Case& shape : testing_parallel::prefill_cases()) {
    const testing_parallel::PreparedPrefill prefill(shape, kGpu);
    EXPECT_LE(prefill.error(), 1) << shape.name;
    expect_on_ranks(GetParam(),
                    [&](const auto& world) { return testing_parallel::check_prefill(world, prefill, {}, on_gpu); });
    expect_on_ranks(GetParam(), [&](const auto& world) {
      return testing_parallel::check_prefill(world, prefill, weights, on_gpu);
    });
  }
}

// Queries and results on the GPU, no lse.
TEST_P(VirtualRanks, PrefillOnTheDevice) {
  for (const kernels::Case& shape : testing_parallel::prefill_cases()) {
    const testing_parallel::PreparedPrefill prefill(shape, kGpu);
    const PreparedCase& prepared = prefill.prepared;
    Output got = prefill.one;
    std::fill(got.out.begin(), got.out.end(), std::numeric_limits<float>::quiet_NaN());
    const std::size_t row = static_cast<std::size_t>(shape.heads * shape.v_dim) * sizeof(float);
    run_ranks(GetParam(), [&](std::shared_ptr<Communicator> world) {
      KvCache cache(world, prepared.config(), {}, kGpu);
      const SequenceId id = prepared.fill(cache).front();
      const testing_parallel::PrefillShare share(prepared, cache, id);
      const kernels::DeviceMemory q(share.q.data(), share.q.size()), out(static_cast<std::size_t>(share.tokens) * row);
      ParallelAttention attention(world);
      attention.prefill_on_device(cache, 0, id, share.first, shape.queries, share.queries(prepared, q.as<void>()),
                                  prepared.data.options(), out.as<float>(), nullptr);
      world->barrier();  // so that no rank waits for the GPU while another still has to start what it waits for
      std::size_t from = 0;
      for (const TokenRange& range : share.ranges) {
        const std::size_t bytes = static_cast<std::size_t>(range.count) * row;
        kernels::cuda_check(cudaMemcpy(&got.out[static_cast<std::size_t>(range.first - share.first) * row / 4],
                                       out.as<std::byte>() + from, bytes, cudaMemcpyDeviceToHost),
                            "results");
        from += bytes;
      }
    });
    EXPECT_LE(prepared.error(got, Strategy::kRing), 1) << shape.name;
  }
}

// Step by step, lengths and tables change under a plan that is kept; every step has the bits of one rank.
TEST_P(VirtualRanks, DecodeLoopThroughRebalanceSaveAndLoad) {
  const int ranks = GetParam();
  const Loop loop;
  const auto want = loop.undisturbed(kGpu);
  const TemporaryDirectory directory;
  std::atomic<int> wrong = 0;
  const auto check = [&](const std::vector<float>& got, std::int64_t step) {
    const std::span<const float> expected = want[static_cast<std::size_t>(step)];
    if (!testing_parallel::same_bits(std::span<const float>(got), expected)) ++wrong;
  };
  run_ranks(ranks, [&](std::shared_ptr<Communicator> world) {
    ThreadPool pool(1);
    KvCache cache(world, loop.config(), {}, kGpu);
    ParallelAttention attention(world, {Strategy::kMerge});
    const SequenceId id = cache.add_sequence();
    loop.append(cache, id, 0, Loop::kPrompt);
    for (std::int64_t step = 0; step < Loop::kSteps; ++step) {
      if (step == 15) cache.rebalance(testing_parallel::uneven_weights(ranks));
      if (step == 30) {
        cache.save(directory.path());
        cache = KvCache::load(world, directory.path(), {}, kGpu);
      }
      loop.append(cache, id, Loop::kPrompt + step, 1);
      check(loop.decode(attention, cache, id, step, pool), step);
    }
  });
  EXPECT_EQ(wrong, 0);
}

class MixedRanks : public VirtualRanks {};
INSTANTIATE_TEST_SUITE_P(Ranks, MixedRanks, testing::Values(2, 3, 4), testing::PrintToStringParamName());

// One sequence whose branches are carried by the CPU and by the GPU together, in shares by measured bandwidth: within
// the bound of the coarser of the two, the same on all ranks, and refused where equal bits are asked for.
TEST_P(MixedRanks, CpuAndGpuCarryOneSequence) {
  const int ranks = GetParam();
  auto cases = testing_parallel::prepared_cases(3, 0, kGpu);
  for (auto& prepared : cases) {
    const kernels::Problem problem = kernels::make_problem(prepared->data.input(), prepared->data.options());
    kernels::ErrorModel model = kernels::error_model(kernels::active_target(), problem);
    for (const char* kernel : {"mma", "mma8", "mma32"}) {
      const kernels::ErrorModel other = kernels::cuda::error_model(kernel, problem);
      model.unit_roundoff = std::max(model.unit_roundoff, other.unit_roundoff);
      model.weight_error = std::max(model.weight_error, other.weight_error);
      model.query_error = std::max(model.query_error, other.query_error);
      model.weight_floor = std::max(model.weight_floor, other.weight_floor);
      model.serial_terms = std::max(model.serial_terms, other.serial_terms);
      model.carried = model.carried || other.carried;
      model.tile_tokens = std::min(model.tile_tokens, other.tile_tokens);
      model.exp2_error = std::max(model.exp2_error, other.exp2_error);
    }
    prepared->bound_by(model);
  }
  expect_on_ranks(ranks, [&](const std::shared_ptr<Communicator>& world) {
    Failures failures;
    ThreadPool pool(1);
    const int gpu = world->rank() % 2 == 0 ? kGpu : KvCache::kHost;
    const std::vector<double> weights = bandwidth_weights(*world, gpu, pool);
    for (const double weight : weights) {
      if (!(weight > 0)) failures.push_back("a rank that reads nothing");
    }
    for (const auto& prepared : cases) {
      KvCache cache(world, prepared->config(),
                    prepared->data.shape().order.branches < 8 ? std::vector<double>{} : weights, gpu);
      const auto ids = prepared->fill(cache);
      for (const Strategy strategy : kAllStrategies) {
        ParallelAttention attention(world, {strategy, false});
        const Output got = prepared->decode(attention, cache, ids, pool);
        if (!testing_parallel::all_ranks_agree(*world, got) && strategy != Strategy::kRing) {
          failures.push_back(prepared->data.shape().name + ": ranks disagree");
        }
        if (prepared->error(got, strategy) > 1) {
          failures.push_back(prepared->data.shape().name + " by " + std::string(strategy_name(strategy)) +
                             ": beyond its bound");
        }
      }
      ParallelAttention exact(world, {Strategy::kMerge, true});
      try {
        prepared->decode(exact, cache, ids, pool);
        failures.push_back("canonical order accepted on a mixture");
      } catch (const InvalidArgument&) {
      }
    }
    return failures;
  });
}

}  // namespace
}  // namespace treeattn
