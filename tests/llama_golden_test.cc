// SPDX-License-Identifier: Apache-2.0
// Two small models as transformers saved them, and the logits it computed in float64
// (tests/peers/llama_transformers.py --golden; its live comparison covers many more).
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
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

namespace treeattn::model {
namespace {

class LlamaGolden : public testing::TestWithParam<const char*> {};

TEST_P(LlamaGolden, HasTheLogitsOfTransformers) {
  const std::filesystem::path directory = std::filesystem::path(TREEATTN_GOLDEN_DIR) / "llama" / GetParam();
  const auto expected = nlohmann::json::parse(std::ifstream(directory / "expected.json"));
  const auto tokens = expected["tokens"].get<std::vector<std::int32_t>>();
  const auto prompt = expected["prompt"].get<std::size_t>();
  const auto want = expected["logits"].get<std::vector<std::vector<double>>>();
  ASSERT_EQ(want.size(), tokens.size() - prompt + 1);

  ThreadPool pool(2);
  const auto ops = kernels::cpu_model_ops(pool);
  const LlamaConfig config = read_config(directory / "config.json");
  const auto weights = std::make_shared<Weights>(config, open_checkpoint(directory), *ops, pool);
  LlamaOptions options;
  options.kv_type = DType::kFloat32;
  options.order.chunk_tokens = 64;
  Llama llama(weights, self_communicator(), *ops, pool, options);
  const SequenceId id = llama.add_sequence();
  std::vector<float> logits(static_cast<std::size_t>(config.vocab));
  double largest = 0;
  for (const auto& row : want) {
    for (const double x : row) largest = std::max(largest, std::fabs(x));
  }
  // As in llama_transformers.py: float32 is off by the angles of the judge, bfloat16 weights by the activations that
  // are rounded to meet them.
  const bool wide = weights->head().dtype == DType::kFloat32;
  const double tolerance = (wide ? 0x1p-11 : 0x1p-3) * largest;
  for (std::size_t i = 0; i < want.size(); ++i) {
    if (i == 0) {
      llama.prefill(id, std::span(tokens).first(prompt), logits);
    } else {
      llama.decode({&id, 1}, {&tokens[prompt + i - 1], 1}, logits);
    }
    ASSERT_EQ(want[i].size(), logits.size());
    for (std::size_t t = 0; t < logits.size(); ++t) EXPECT_NEAR(logits[t], want[i][t], tolerance) << i << ", " << t;
  }
}

INSTANTIATE_TEST_SUITE_P(Models, LlamaGolden, testing::Values("tied_scaled_bf16", "untied_scaled_f32"),
                         [](const auto& param) { return std::string(param.param); });

}  // namespace
}  // namespace treeattn::model
