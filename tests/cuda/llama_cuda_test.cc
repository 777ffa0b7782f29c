// SPDX-License-Identifier: Apache-2.0
// A Llama on a GPU, on one rank and on several that share it: the same bits on any number of them, recorded or not,
// and logits within the bound of what it rounds.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "cuda/gpu_llama.h"
#include "kernels/cuda/error_model.h"
#include "kernels/cuda/ranks/rank_device.h"
#include "model/llama.h"
#include "model_text.h"
#include "parallel/kv_store.h"
#include "rounded_llama.h"
#include "small_llama.h"
#include "temporary_directory.h"
#include "treeattn/cuda.h"
#include "treeattn/error.h"

namespace treeattn::model {
namespace {

using testing_gpu::Conversation;
using testing_gpu::generate;
using testing_gpu::GpuModel;
using testing_gpu::kGpu;
using testing_gpu::on_one;
using testing_gpu::wide_config;
using testing_model::Arithmetic;
using testing_model::difference;
using testing_model::random_tokens;
using testing_model::RoundedLlama;
using testing_model::same_bits;
using testing_model::small_config;
using testing_model::small_options;
using testing_model::SmallModel;
using testing_model::Text;

Text on_ranks(int ranks, const GpuModel& model, const LlamaOptions& options, std::int64_t prompt, std::size_t count,
              Way way = Way::kBlocks) {
  std::vector<Text> texts(static_cast<std::size_t>(ranks));
  run_ranks(ranks, [&](std::shared_ptr<Communicator> world) {
    ThreadPool pool(1);
    const auto ops = kernels::cuda_model_ops(kGpu);
    Llama llama(model.weights, world, *ops, pool, options);
    texts[static_cast<std::size_t>(world->rank())] = on_one(llama, prompt, count, way);
  });
  for (const Text& text : texts) EXPECT_EQ(difference(text, texts[0]), "");
  return texts[0];
}

class LlamaCuda : public testing::Test {
 protected:
  void SetUp() override {
    if (!cuda_problem().empty()) GTEST_SKIP() << "*** SKIPPED: " << cuda_problem() << " ***";
  }
};

TEST_F(LlamaCuda, SameTextOnAnyNumberOfRanks) {
  const GpuModel model(wide_config());
  const Text one = on_ranks(1, model, small_options(), 333, 200);
  for (const DeviceLink link : {DeviceLink::kHost, DeviceLink::kPeer}) {
    LlamaOptions options = small_options();
    options.attention.link = link;
    for (const int ranks : {2, 3, 4, 8}) {
      EXPECT_EQ(difference(one, on_ranks(ranks, model, options, 333, 200)), "")
          << ranks << " ranks, link " << static_cast<int>(link);
    }
  }
  std::vector<std::int32_t> kinds = one.tokens;
  std::sort(kinds.begin(), kinds.end());
  EXPECT_GT(std::unique(kinds.begin(), kinds.end()) - kinds.begin(), 10);
}

TEST_F(LlamaCuda, SameTextWithEveryTypeOfTheCacheAndOfTheWeights) {
  for (const DType stored : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
    for (const WeightFormat format : {WeightFormat::kAsStored, WeightFormat::kInt8}) {
      const GpuModel model(small_config(), stored, format);
      for (const DType type : kAllDTypes) {
        LlamaOptions options = small_options();
        options.kv_type = type;
        EXPECT_EQ(difference(on_ranks(1, model, options, 130, 12), on_ranks(3, model, options, 130, 12)), "")
            << dtype_name(stored) << ", cache " << dtype_name(type);
      }
    }
  }
}

// Of a type that is narrower than float32: by the kernel for many queries, where there is one, with the same bits on
// any number of ranks.
TEST_F(LlamaCuda, PromptsOfEveryNarrowCache) {
  const GpuModel model(wide_config());
  const CudaDevice gpu = cuda_devices().front();
  const bool hopper = gpu.compute_major == 9 && gpu.compute_minor == 0;
  for (const DType type : {DType::kBFloat16, DType::kFloat16, DType::kInt8, DType::kFp8E4M3}) {
    LlamaOptions options = small_options();
    options.kv_type = type;
    EXPECT_EQ(difference(on_ranks(1, model, options, 333, 12), on_ranks(3, model, options, 333, 12)), "")
        << "cache " << dtype_name(type);
    const auto ops = kernels::cuda_model_ops(kGpu);
    ThreadPool pool(1);
    Llama llama(model.weights, self_communicator(), *ops, pool, options);
    llama.prefill(llama.add_sequence(), random_tokens(128, wide_config().vocab, 7), {});
    EXPECT_EQ(llama.cache().store().device()->kernel() == "prefill", hopper) << "cache " << dtype_name(type);
  }
}

// The bits of decoding token by token: in blocks, on several ranks, and by decode itself.
TEST_F(LlamaCuda, OneByOneIsDecode) {
  for (const WeightFormat format : {WeightFormat::kAsStored, WeightFormat::kInt8}) {
    const GpuModel model(wide_config(), DType::kBFloat16, format);
    const std::vector<std::int32_t> prompt = random_tokens(150, wide_config().vocab, 7);
    const auto ops = kernels::cuda_model_ops(kGpu);
    ThreadPool pool(1);
    Llama llama(model.weights, self_communicator(), *ops, pool, small_options());
    const SequenceId id = llama.add_sequence();
    std::vector<float> logits(static_cast<std::size_t>(wide_config().vocab));
    for (const std::int32_t token : prompt) llama.decode({&id, 1}, {&token, 1}, logits);
    Text want;
    generate(llama, id, logits, 5, want);
    for (const int ranks : {1, 3}) {
      EXPECT_EQ(difference(want, on_ranks(ranks, model, small_options(), 150, 5, Way::kOneByOne)), "") << ranks;
    }
  }
}

// Steps that are recorded, with other sequences coming and going, against ranks that do not record.
TEST_F(LlamaCuda, BatchesForksAndRecordings) {
  const auto run = [](const GpuModel& model, int ranks, DeviceLink link = DeviceLink::kHost) {
    std::vector<std::vector<float>> all;
    LlamaOptions options = small_options();
    options.attention.link = link;
    run_ranks(ranks, [&](std::shared_ptr<Communicator> world) {
      const auto ops = kernels::cuda_model_ops(kGpu);
      ThreadPool pool(1);
      Llama llama(model.weights, world, *ops, pool, options);
      const auto vocab = static_cast<std::size_t>(wide_config().vocab);
      std::vector<SequenceId> ids;
      for (int i = 0; i < 17; ++i) {
        ids.push_back(llama.add_sequence());
        llama.prefill(ids.back(), random_tokens(40 + 7 * i, wide_config().vocab, static_cast<std::uint32_t>(i)), {});
      }
      ids.push_back(llama.fork(ids[3]));
      for (int step = 0; step < 24; ++step) {
        const std::size_t batch = step < 8 ? 18 : step < 16 ? 9 : 2;
        const std::vector<std::int32_t> tokens =
            random_tokens(static_cast<std::int64_t>(batch), wide_config().vocab, static_cast<std::uint32_t>(step));
        std::vector<float> logits(batch * vocab);
        llama.decode(std::span(ids).last(batch), tokens, logits);
        if (world->rank() == 0) all.push_back(logits);
        if (step == 19) llama.truncate(ids.back(), 45);
      }
    });
    return all;
  };
  for (const WeightFormat format : {WeightFormat::kAsStored, WeightFormat::kInt8}) {
    const GpuModel model(wide_config(), DType::kBFloat16, format);
    const auto one = run(model, 1), three = run(model, 3), on_gpu = run(model, 3, DeviceLink::kPeer);
    ASSERT_EQ(one.size(), three.size());
    ASSERT_EQ(one.size(), on_gpu.size());
    for (std::size_t i = 0; i < one.size(); ++i) {
      EXPECT_TRUE(same_bits(one[i], three[i])) << "step " << i;
      EXPECT_TRUE(same_bits(one[i], on_gpu[i])) << "step " << i << ", states on the GPU";
    }
  }
}

// One layer, a short prompt and a few tokens, on one rank, which records its steps, and on `ranks`: little enough for
// compute-sanitizer.
void expect_smallest_model(WeightFormat format, Way way, int ranks) {
  LlamaConfig config = wide_config();
  config.layers = 1;
  config.vocab = 48;
  LlamaOptions on_gpu = small_options();
  on_gpu.attention.link = DeviceLink::kPeer;
  const GpuModel model(config, DType::kBFloat16, format);
  const Text one = on_ranks(1, model, small_options(), 70, 6, way);
  EXPECT_EQ(difference(one, on_ranks(ranks, model, on_gpu, 70, 6, way)), "");
}

TEST_F(LlamaCuda, SmallestModel) {
  expect_smallest_model(WeightFormat::kAsStored, Way::kOneByOne, 1);
  expect_smallest_model(WeightFormat::kInt8, Way::kOneByOne, 1);
}

TEST_F(LlamaCuda, SmallestModelOnTwoRanks) {
  expect_smallest_model(WeightFormat::kAsStored, Way::kOneByOne, 2);
  expect_smallest_model(WeightFormat::kInt8, Way::kOneByOne, 2);
}

// The prompt's products of matrices by cuBLASLt.
TEST_F(LlamaCuda, SmallestModelWithProducts) {
  expect_smallest_model(WeightFormat::kAsStored, Way::kBlocks, 2);
  expect_smallest_model(WeightFormat::kInt8, Way::kBlocks, 2);
}

// What is rounded on a GPU (docs/llama.md), of a prompt: a decoded token loses less, of softmax and of int8 weights.
Arithmetic gpu_arithmetic(DType cache) {
  const bool narrow = cache != DType::kFloat32;
  kernels::Problem problem;
  problem.q.dtype = problem.k.dtype = problem.v.dtype = cache;
  Arithmetic result;
  result.linear = [](DType weights) { return kernels::cuda::linear_model(weights, kernels::Pass::kPrefill, 8, 8); };
  result.attention = kernels::cuda::error_model(narrow ? "prefill" : "mma32", problem);
  result.cached_bits = result.query_bits = testing_model::bits_of(cache);
  return result;
}

TEST_F(LlamaCuda, LogitsAreWithinTheBound) {
  const auto compare = [](DType weights, DType cache, WeightFormat format) {
    LlamaOptions options = small_options();
    options.kv_type = cache;
    const SmallModel here(wide_config(), weights, format);  // in memory that the reference can read
    const GpuModel gpu(wide_config(), weights, format);
    ThreadPool pool(1);
    const auto ops = kernels::cuda_model_ops(kGpu);
    Llama llama(gpu.weights, self_communicator(), *ops, pool, options);
    const std::vector<std::int32_t> next = random_tokens(9, wide_config().vocab, 8);
    const Text text = on_one(llama, 80, next.size(), Way::kBlocks, next);

    std::vector<std::int32_t> tokens = random_tokens(80, wide_config().vocab, 7);
    tokens.insert(tokens.end(), next.begin(), next.end() - 1);
    std::vector<float> got;
    for (const auto& row : text.logits) got.insert(got.end(), row.begin(), row.end());
    RoundedLlama want(*here.weights, tokens, 79, gpu_arithmetic(cache));
    const double off = want.deviations_off(std::span<const float>(got));
    std::printf("%s weights, %s cache: off by %.2f deviations\n",
                format == WeightFormat::kInt8 ? "int8" : std::string(dtype_name(weights)).c_str(),
                std::string(dtype_name(cache)).c_str(), off);
    EXPECT_LE(off, testing_model::kMostDeviations);
  };
  compare(DType::kFloat32, DType::kFloat32, WeightFormat::kAsStored);
  compare(DType::kFloat16, DType::kFloat32, WeightFormat::kAsStored);
  compare(DType::kBFloat16, DType::kBFloat16, WeightFormat::kAsStored);
  compare(DType::kFloat32, DType::kFloat16, WeightFormat::kAsStored);
  compare(DType::kFloat32, DType::kBFloat16, WeightFormat::kBFloat16);
  compare(DType::kFloat32, DType::kFloat32, WeightFormat::kInt8);
  compare(DType::kBFloat16, DType::kBFloat16, WeightFormat::kInt8);
}

TEST_F(LlamaCuda, SavedOnAGpuGoesOnOnRanks) {
  const GpuModel model(wide_config());
  const Text want = on_ranks(1, model, small_options(), 200, 30);
  const TemporaryDirectory directory;
  run_ranks(1, [&](std::shared_ptr<Communicator> world) {
    const auto ops = kernels::cuda_model_ops(kGpu);
    ThreadPool pool(1);
    Llama llama(model.weights, world, *ops, pool, small_options());
    const Text text = on_one(llama, 200, 20);
    llama.save(directory.path(), std::span(text.tokens).last(1));
  });
  run_ranks(3, [&](std::shared_ptr<Communicator> world) {
    const auto ops = kernels::cuda_model_ops(kGpu);
    ThreadPool pool(1);
    std::vector<std::int32_t> pending;
    const auto llama = Llama::load(directory.path(), model.weights, world, *ops, pool, {}, &pending);
    const SequenceId id = llama->sequences().front();
    Text text{{want.tokens.begin(), want.tokens.begin() + 20}, {want.logits.begin(), want.logits.begin() + 20}};
    std::vector<float> logits(want.logits[0].size());
    llama->decode({&id, 1}, pending, logits);
    generate(*llama, id, logits, 30, text);
    EXPECT_EQ(difference(text, want), "");
  });
}

// A rank is lost between a prompt, decoded tokens and another prompt: what it had is computed again, each token in the
// way it was first computed.
TEST_F(LlamaCuda, SurvivorsGoOnWithTheSameText) {
  const GpuModel model(wide_config());
  const Conversation conversation;
  Text want;
  run_ranks(1, [&](std::shared_ptr<Communicator> world) {
    const auto ops = kernels::cuda_model_ops(kGpu);
    ThreadPool pool(1);
    Llama llama(model.weights, world, *ops, pool, small_options());
    want = *conversation.run(llama, [](std::int64_t) { return false; });
  });
  RankOptions patience;
  patience.deadline = Seconds(20.0);
  for (const int ranks : {2, 3}) {
    std::atomic<int> finished = 0;
    run_ranks(
        ranks,
        [&](std::shared_ptr<Communicator> world) {
          const bool mortal = world->rank() == ranks - 1;
          const auto ops = kernels::cuda_model_ops(kGpu);
          ThreadPool pool(1);
          Llama llama(model.weights, world, *ops, pool, small_options());
          const auto text = conversation.run(llama, [&](std::int64_t said) { return mortal && said == 315; });
          if (!text) return;
          EXPECT_EQ(difference(*text, want), "") << ranks << " ranks";
          ++finished;
        },
        patience);
    EXPECT_EQ(finished, ranks - 1);
  }
}

}  // namespace
}  // namespace treeattn::model
