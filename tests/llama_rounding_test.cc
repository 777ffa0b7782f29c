// SPDX-License-Identifier: Apache-2.0
// The logits of this library are within the bound that rounded_llama.h derives, and the bound is one: it is of the size
// of the errors that are seen, and what is wrong exceeds it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "model/llama.h"
#include "rounded_llama.h"
#include "small_llama.h"

namespace treeattn::testing_model {
namespace {

constexpr std::size_t kPrompt = 65, kTokens = 80;

// Prefilled and then decoded: [kTokens - kPrompt + 1, vocab].
std::vector<float> logits_of(const SmallModel& model, std::span<const std::int32_t> tokens, DType cache) {
  LlamaOptions options = small_options();
  options.kv_type = cache;
  ThreadPool pool(1);
  const auto ops = kernels::cpu_model_ops(pool);
  model::Llama llama(model.weights, self_communicator(), *ops, pool, options);
  const SequenceId id = llama.add_sequence();
  const auto vocab = static_cast<std::size_t>(llama.config().vocab);
  std::vector<float> logits((kTokens - kPrompt + 1) * vocab);
  llama.prefill(id, tokens.first(kPrompt), std::span(logits).first(vocab));
  for (std::size_t i = kPrompt; i < kTokens; ++i) {
    llama.decode({&id, 1}, {&tokens[i], 1}, std::span(logits).subspan((i - kPrompt + 1) * vocab, vocab));
  }
  return logits;
}

struct Types {
  const char* name;
  DType weights, cache;
  WeightFormat format = WeightFormat::kAsStored;
};

class LlamaRounding : public testing::TestWithParam<Types> {};

TEST_P(LlamaRounding, LogitsAreWithinTheBoundAndFaultsAreNot) {
  const Types& types = GetParam();
  const SmallModel model(small_config(), types.weights, types.format);
  const std::vector<std::int32_t> tokens = random_tokens(kTokens, model.weights->config().vocab, 3);
  const std::vector<float> got = logits_of(model, tokens, types.cache);
  const Arithmetic arithmetic = our_arithmetic(types.cache);

  RoundedLlama right(*model.weights, tokens, kPrompt - 1, arithmetic);
  const double off = right.deviations_off(std::span(got));
  EXPECT_LE(off, kMostDeviations);
  std::vector<double> first(got.size());
  first[0] = 1;
  const Spread one = right.spread(first);
  std::printf("%s: off by %.2f deviations; of a logit one is %.1e, the worst case %.1e of the largest\n", types.name,
              off, one.deviation / right.largest_logit(), one.worst / right.largest_logit());

  const auto deviations_from = [&](const Fault& fault) {
    return RoundedLlama(*model.weights, tokens, kPrompt - 1, arithmetic, fault).deviations_off(std::span(got));
  };
  const int layers = static_cast<int>(model.weights->config().layers);
  for (int layer = 0; layer < layers; ++layer) {
    const double turned = deviations_from({Fault::Kind::kQueriesOnePositionOn, layer});
    std::printf("  layer %d: queries one position on: %.0f deviations\n", layer, turned);
    EXPECT_GT(turned, kMostDeviations) << "layer " << layer;
    // In the last layer a lost key shows in the rows that are judged alone, by its weight there: that may be nothing.
    if (layer == layers - 1) continue;
    const double lost = deviations_from({Fault::Kind::kLostKey, layer, 50});
    std::printf("  layer %d: a lost key: %.0f deviations\n", layer, lost);
    EXPECT_GT(lost, kMostDeviations) << "layer " << layer;
  }
}

INSTANTIATE_TEST_SUITE_P(, LlamaRounding,
                         testing::Values(Types{"f32", DType::kFloat32, DType::kFloat32},
                                         Types{"bf16", DType::kBFloat16, DType::kFloat32},
                                         Types{"bf16_cache", DType::kBFloat16, DType::kBFloat16},
                                         Types{"f16_cache", DType::kFloat32, DType::kFloat16},
                                         Types{"int8", DType::kBFloat16, DType::kFloat32, WeightFormat::kInt8}),
                         [](const auto& param) { return std::string(param.param.name); });

// One number of a checkpoint changed.
class NudgedCheckpoint : public RandomCheckpoint {
 public:
  NudgedCheckpoint(std::string name, std::size_t at, float by)
      : RandomCheckpoint(1, DType::kFloat32), name_(std::move(name)), at_(at), by_(by) {}
  model::Tensor tensor(const std::string& name, std::span<const std::int64_t> shape) const override {
    model::Tensor result = RandomCheckpoint::tensor(name, shape);
    if (name != name_) return result;
    const auto* from = static_cast<const float*>(result.data);
    changed_.assign(from, from + shape[0] * shape[1]);
    changed_[at_] += by_;
    return {changed_.data(), DType::kFloat32, result.shape};
  }

 private:
  std::string name_;
  std::size_t at_;
  float by_;
  mutable std::vector<float> changed_;
};

// The derivatives, against central differences. Theirs are off by C h^2 with some C, so one with the step 2h is off by
// three times that from one with h. A number below 1 to which h was added in float32 is off by 2^-25: 2^-25 / h of the
// difference.
class LlamaDerivative : public testing::Test {
 protected:
  void expect_derivative(double got, const std::function<double(double)>& of, double h) {
    const auto difference = [&](double step) { return (of(step) - of(-step)) / (2 * step); };
    const double fine = difference(h), coarse = difference(2 * h);
    EXPECT_NEAR(got, fine, std::fabs(fine - coarse) + 0x1p-25 / h * std::fabs(fine));
    EXPECT_GT(std::fabs(got), 10 * std::fabs(fine - coarse)) << "the difference says nothing";
  }
  double logit_of(const model::LlamaConfig& config, const std::shared_ptr<model::Checkpoint>& checkpoint) {
    const model::Weights weights(config, checkpoint, *ops_, pool_);
    return RoundedLlama(weights, tokens_, tokens_.size() - 1, our_arithmetic(DType::kFloat32)).logits()[kLogit];
  }

  static constexpr std::size_t kLogit = 17;
  ThreadPool pool_{1};
  std::unique_ptr<kernels::ModelOps> ops_ = kernels::cpu_model_ops(pool_);
  std::vector<std::int32_t> tokens_ = random_tokens(20, small_config().vocab, 5);
};

TEST_F(LlamaDerivative, ByAnEmbeddingAndByThetaIsTheDifference) {
  const model::LlamaConfig config = small_config();
  const model::Weights weights(config, std::make_shared<RandomCheckpoint>(1, DType::kFloat32), *ops_, pool_);
  RoundedLlama llama(weights, tokens_, tokens_.size() - 1, our_arithmetic(DType::kFloat32));
  std::vector<double> direction(llama.logits().size());
  direction[kLogit] = 1;
  llama.spread(direction);

  for (const std::size_t element : {3, 40, 95}) {
    const std::size_t place = 7;  // of a token that comes once
    ASSERT_EQ(std::count(tokens_.begin(), tokens_.end(), tokens_[place]), 1);
    const auto at = static_cast<std::size_t>(tokens_[place] * config.hidden) + element;
    const auto nudged = [&](double by) {
      return logit_of(config,
                      std::make_shared<NudgedCheckpoint>("model.embed_tokens.weight", at, static_cast<float>(by)));
    };
    expect_derivative(llama.embedding().gradient[place * static_cast<std::size_t>(config.hidden) + element], nudged,
                      0x1p-12);
  }

  double by_theta = 0;
  for (std::size_t i = 0; i < llama.frequencies().size(); ++i) {
    const double exponent = static_cast<double>(i) / static_cast<double>(llama.frequencies().size());
    by_theta -= llama.frequencies().gradient[i] * exponent * llama.frequencies().at[i] / config.rope_theta;
  }
  const auto slower = [&](double by) {
    model::LlamaConfig other = config;
    other.rope_theta += by;
    return logit_of(other, std::make_shared<RandomCheckpoint>(1, DType::kFloat32));
  };
  expect_derivative(by_theta, slower, 16);
}

}  // namespace
}  // namespace treeattn::testing_model
