// SPDX-License-Identifier: Apache-2.0
// A Llama whose ranks are processes on one GPU: steps in which states go from GPU to GPU by kernels alone, recorded and
// repeated, as with a GPU for each rank. They take turns on it, so a step takes long.
#include "cuda/gpu_llama.h"
#include "cuda/gpu_processes.h"
#include "model/activations.h"
#include "model/cache_attention.h"

namespace treeattn::model {
namespace {

using testing::run_tcp_processes;
using testing_gpu::all_but_the_last_return;
using testing_gpu::Conversation;
using testing_gpu::GpuModel;
using testing_gpu::kGpu;
using testing_gpu::on_one;
using testing_gpu::require;
using testing_gpu::wide_config;
using testing_model::difference;
using testing_model::random_tokens;
using testing_model::small_options;
using testing_model::Text;

LlamaOptions from_gpu_to_gpu(DType cache = DType::kBFloat16) {
  LlamaOptions options = small_options();
  options.kv_type = cache;
  options.attention.link = DeviceLink::kPeer;
  return options;
}

class LlamaProcesses : public testing_gpu::Processes {};
INSTANTIATE_TEST_SUITE_P(Ranks, LlamaProcesses, ::testing::Values(2, 3), ::testing::PrintToStringParamName());

// Through several chunks of the cache, so that recordings end and others begin; of a cache whose steps are recorded,
// and of one whose steps are not.
TEST_P(LlamaProcesses, SayWhatOneRankSays) {
  const int ranks = GetParam();
  const std::vector<int> statuses = run_tcp_processes(ranks, [&](std::shared_ptr<Communicator> world) {
    const GpuModel model(wide_config());
    ThreadPool pool(1);
    for (const DType cache : {DType::kBFloat16, DType::kFloat32, DType::kInt8}) {
      const auto text = [&](std::shared_ptr<Communicator> group) {
        const auto ops = kernels::cuda_model_ops(kGpu);
        Llama llama(model.weights, std::move(group), *ops, pool, from_gpu_to_gpu(cache));
        return on_one(llama, 150, 60);
      };
      const Text one = text(self_communicator());
      world->barrier(Seconds(60));
      const std::string differs = difference(text(world), one);
      require(differs.empty(), std::string(dtype_name(cache)) + ": " + differs);
    }
  });
  EXPECT_EQ(statuses, std::vector<int>(static_cast<std::size_t>(ranks), 0));
}

// Sequences that come and go: other sizes of states, so other mailboxes, and back again.
TEST_P(LlamaProcesses, BatchesOfEverySize) {
  const int ranks = GetParam();
  const std::vector<int> statuses = run_tcp_processes(ranks, [&](std::shared_ptr<Communicator> world) {
    const GpuModel model(wide_config());
    ThreadPool pool(1);
    const auto vocab = static_cast<std::size_t>(wide_config().vocab);
    const auto run = [&](std::shared_ptr<Communicator> group) {
      const auto ops = kernels::cuda_model_ops(kGpu);
      Llama llama(model.weights, std::move(group), *ops, pool, from_gpu_to_gpu());
      std::vector<SequenceId> ids;
      for (int i = 0; i < 4; ++i) {
        ids.push_back(llama.add_sequence());
        llama.prefill(ids.back(), random_tokens(40 + 9 * i, wide_config().vocab, static_cast<std::uint32_t>(i)), {});
      }
      ids.push_back(llama.fork(ids[2]));
      std::vector<std::vector<float>> all;
      for (int step = 0; step < 20; ++step) {
        const std::size_t batch = step < 6 ? 5 : step < 12 ? 2 : 5;
        const std::vector<std::int32_t> tokens =
            random_tokens(static_cast<std::int64_t>(batch), wide_config().vocab, static_cast<std::uint32_t>(step));
        all.emplace_back(batch * vocab);
        llama.decode(std::span(ids).last(batch), tokens, all.back());
        if (step == 15) llama.truncate(ids.back(), 30);
      }
      return all;
    };
    const auto one = run(self_communicator());
    world->barrier(Seconds(60));
    require(run(world) == one, "other logits");
  });
  EXPECT_EQ(statuses, std::vector<int>(static_cast<std::size_t>(ranks), 0));
}

// The first decode of a cache looks whether the ranks agree on it; from then on there is a step to record.
TEST_P(LlamaProcesses, RecordTheirSteps) {
  const int ranks = GetParam();
  const std::vector<int> statuses = run_tcp_processes(ranks, [&](std::shared_ptr<Communicator> world) {
    constexpr std::int64_t kHeads = 4, kDim = 64;
    const auto ops = kernels::cuda_model_ops(kGpu);
    ThreadPool pool(1);
    KvCache cache(world, {1, 2, kDim, kDim, DType::kBFloat16, DType::kBFloat16}, {}, kGpu);
    CacheAttention attention(cache, kHeads, {Strategy::kMerge, true, DeviceLink::kPeer}, *ops, pool);
    const SequenceId id = cache.add_sequence();
    cache.extend(id, 5);
    const std::vector<float> zeros(kHeads * kDim);
    const OpsArray q(*ops, kHeads * kDim), out(*ops, kHeads * kDim);
    ops->from_host(q.get(), zeros.data(), zeros.size() * sizeof(float));
    require(attention.prepare_step({&id, 1}).empty(), "a step before the ranks were compared");
    attention.last_tokens(0, {&id, 1}, q.get(), out.get());
    ops->finish();
    attention.confirm();
    const std::uint64_t sent = world->traffic().bytes;
    require(!attention.prepare_step({&id, 1}).empty(), "no step to record");
    const std::uint64_t states = kHeads * (kDim + 2) * 2 * sizeof(float);  // of one node, with turns
    require(world->traffic().bytes - sent >= states * static_cast<std::uint64_t>(ranks - 1), "bytes not counted");
  });
  EXPECT_EQ(statuses, std::vector<int>(static_cast<std::size_t>(ranks), 0));
}

// A process is killed between two steps. The loss is named, what it had is computed again, and the text goes on.
TEST_P(LlamaProcesses, SurvivorsGoOnWithTheSameText) {
  const int ranks = GetParam();
  RankOptions options;
  options.deadline = Seconds(16.0);
  const std::vector<int> statuses = run_tcp_processes(
      ranks,
      [&](std::shared_ptr<Communicator> world) {
        const GpuModel model(wide_config());
        ThreadPool pool(1);
        const Conversation conversation;
        const bool mortal = world->rank() == ranks - 1;
        const auto text = [&](std::shared_ptr<Communicator> group, bool killed) {
          const auto ops = kernels::cuda_model_ops(kGpu);
          Llama llama(model.weights, std::move(group), *ops, pool, from_gpu_to_gpu());
          return *conversation.run(llama, [&](std::int64_t said) {
            if (killed && said == 315) ::raise(SIGKILL);
            return false;
          });
        };
        const Text one = text(self_communicator(), false);
        world->barrier(Seconds(60));
        const std::string differs = difference(text(world, mortal), one);
        require(differs.empty(), differs);
      },
      options);
  EXPECT_EQ(statuses, all_but_the_last_return(ranks));
}

}  // namespace
}  // namespace treeattn::model
