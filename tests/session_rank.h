// SPDX-License-Identifier: Apache-2.0
// One rank of a session with a small model, and what it is asked for.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "model/session.h"
#include "small_llama.h"

namespace treeattn::testing_model {

// What one rank needs.
struct SessionRank {
  SessionRank(const SmallModel& small, const std::shared_ptr<Communicator>& world, const model::Tokenizer* tokenizer)
      : pool(1),
        ops(kernels::cpu_model_ops(pool)),
        session(std::make_unique<model::Llama>(small.weights, world, *ops, pool, small_options()), tokenizer) {}

  ThreadPool pool;
  std::unique_ptr<kernels::ModelOps> ops;
  model::Session session;
};

inline SamplerOptions warm(std::uint64_t seed = 3) {
  SamplerOptions options;
  options.temperature = 0.8;
  options.top_p = 0.95;
  options.repetition_penalty = 1.1;
  options.seed = seed;
  return options;
}

inline GenerateOptions tokens_of(std::int64_t count) {
  GenerateOptions options;
  options.max_tokens = count;
  options.sampler = warm();
  return options;
}

// The text on so many ranks, which all have the same.
inline std::vector<std::int32_t> generate_on(int ranks, const SmallModel& small, const GenerateOptions& options,
                                             std::int64_t prompt) {
  std::mutex mutex;
  std::vector<std::int32_t> said;
  run_ranks(ranks, [&](std::shared_ptr<Communicator> world) {
    SessionRank rank(small, world, nullptr);
    const auto result = rank.session.generate(random_tokens(prompt, 301, 7), options);
    const std::lock_guard lock(mutex);
    if (said.empty()) said = result.tokens;
    EXPECT_EQ(said, result.tokens);
    EXPECT_EQ(result.stats.token_seconds.size() + 1, result.tokens.size());
  });
  return said;
}

}  // namespace treeattn::testing_model
