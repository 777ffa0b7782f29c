// SPDX-License-Identifier: Apache-2.0
// Two small models as transformers saved them, and the logits it computed in float64
// (tests/peers/llama_transformers.py --golden; its live comparison covers many more).
#include <gtest/gtest.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "model/checkpoint.h"
#include "model/config.h"
#include "model/llama.h"
#include "model/weights.h"
#include "rounded_llama.h"

namespace treeattn::model {
namespace {

using testing_model::kMostDeviations;
using testing_model::RoundedLlama;

class LlamaGolden : public testing::TestWithParam<const char*> {};

TEST_P(LlamaGolden, HasTheLogitsOfTransformers) {
  const std::filesystem::path directory = std::filesystem::path(TREEATTN_GOLDEN_DIR) / "llama" / GetParam();
  const auto expected = nlohmann::json::parse(std::ifstream(directory / "expected.json"));
  const auto tokens = expected["tokens"].get<std::vector<std::int32_t>>();
  const auto prompt = expected["prompt"].get<std::size_t>();
  std::vector<double> want;
  for (const auto& row : expected["logits"]) {
    for (const double x : row) want.push_back(x);
  }

  ThreadPool pool(2);
  const auto ops = kernels::cpu_model_ops(pool);
  const LlamaConfig config = read_config(directory / "config.json");
  const auto weights = std::make_shared<Weights>(config, open_checkpoint(directory), *ops, pool);
  LlamaOptions options;
  options.kv_type = DType::kFloat32;
  options.order.chunk_tokens = 64;
  Llama llama(weights, self_communicator(), *ops, pool, options);
  const SequenceId id = llama.add_sequence();
  const auto vocab = static_cast<std::size_t>(config.vocab);
  std::vector<float> got((tokens.size() - prompt + 1) * vocab);
  ASSERT_EQ(want.size(), got.size());
  llama.prefill(id, std::span(tokens).first(prompt), std::span(got).first(vocab));
  for (std::size_t i = prompt; i < tokens.size(); ++i) {
    llama.decode({&id, 1}, {&tokens[i], 1}, std::span(got).subspan((i - prompt + 1) * vocab, vocab));
  }

  // Both against double precision, each within the bound of what it rounds.
  RoundedLlama theirs(*weights, tokens, prompt - 1, testing_model::transformers_arithmetic(53));
  const double off = theirs.deviations_off(std::span<const double>(want));
  EXPECT_LE(off, kMostDeviations);
  RoundedLlama ours(*weights, tokens, prompt - 1, testing_model::our_arithmetic(options.kv_type));
  const double our_off = ours.deviations_off(std::span<const float>(got));
  EXPECT_LE(our_off, kMostDeviations);
  std::printf("off by %.2f deviations of ours, transformers by %.2f of its own\n", our_off, off);
}

INSTANTIATE_TEST_SUITE_P(Models, LlamaGolden, testing::Values("tied_scaled_bf16", "untied_scaled_f32"),
                         [](const auto& param) { return std::string(param.param); });

}  // namespace
}  // namespace treeattn::model
