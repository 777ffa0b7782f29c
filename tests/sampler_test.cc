// SPDX-License-Identifier: Apache-2.0
// The choice of a token: what each option keeps, and that frequencies follow the weights.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <set>
#include <vector>

#include "model/sampler.h"
#include "treeattn/error.h"

namespace treeattn::model {
namespace {

std::vector<float> random_logits(std::size_t count, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, 2);
  std::vector<float> out(count);
  for (float& x : out) x = normal(random);
  return out;
}

std::vector<double> softmax(const std::vector<float>& logits, double temperature) {
  const double largest = *std::max_element(logits.begin(), logits.end());
  std::vector<double> out;
  for (const float x : logits) out.push_back(std::exp((x - largest) / temperature));
  const double sum = std::accumulate(out.begin(), out.end(), 0.0);
  for (double& p : out) p /= sum;
  return out;
}

// The tokens that come up in many draws.
std::set<std::int32_t> seen(const std::vector<float>& logits, SamplerOptions options, int draws = 3000) {
  std::set<std::int32_t> out;
  for (int i = 0; i < draws; ++i) out.insert(choose(logits, {}, i, options).token);
  return out;
}

// Tokens by probability, most likely first.
std::vector<std::int32_t> ranking(const std::vector<float>& logits) {
  std::vector<std::int32_t> out(logits.size());
  std::iota(out.begin(), out.end(), 0);
  std::stable_sort(out.begin(), out.end(), [&](std::int32_t a, std::int32_t b) {
    return logits[static_cast<std::size_t>(a)] > logits[static_cast<std::size_t>(b)];
  });
  return out;
}

TEST(Sampler, GreedyTakesTheLargestAndOfEqualOnesTheFirst) {
  for (std::uint32_t seed = 0; seed < 20; ++seed) {
    const std::vector<float> logits = random_logits(257, seed);
    EXPECT_EQ(choose(logits, {}, 5, {}).token, ranking(logits)[0]);
  }
  const std::vector<float> equal = {1, 3, 2, 3, 3};
  EXPECT_EQ(choose(equal, {}, 0, {}).token, 1);
}

TEST(Sampler, FrequenciesFollowTheWeights) {
  const std::vector<float> logits = random_logits(7, 3);
  for (const double temperature : {0.5, 1.0, 2.0}) {
    const std::vector<double> want = softmax(logits, temperature);
    SamplerOptions options;
    options.temperature = temperature;
    options.seed = 11;
    constexpr int kDraws = 40000;
    std::vector<int> counts(logits.size());
    for (int i = 0; i < kDraws; ++i) ++counts[static_cast<std::size_t>(choose(logits, {}, i, options).token)];
    for (std::size_t t = 0; t < counts.size(); ++t) {
      // Six standard deviations of a binomial.
      const double bound = 6 * std::sqrt(want[t] * (1 - want[t]) / kDraws);
      EXPECT_NEAR(counts[t] / double{kDraws}, want[t], bound) << t << " at " << temperature;
    }
  }
}

TEST(Sampler, TopKKeepsTheKMostLikely) {
  const std::vector<float> logits = random_logits(30, 4);
  SamplerOptions options;
  options.temperature = 50;  // nearly even
  for (const int k : {1, 2, 7, 30, 100}) {
    options.top_k = k;
    const std::vector<std::int32_t> order = ranking(logits);
    const auto kept = std::min<std::size_t>(static_cast<std::size_t>(k), order.size());
    EXPECT_EQ(seen(logits, options), std::set<std::int32_t>(order.begin(), order.begin() + std::ptrdiff_t(kept)));
  }
}

TEST(Sampler, TopPKeepsTheFewestThatHaveTheShare) {
  // 5000 tokens: more than are sorted at first.
  for (const std::size_t size : {12u, 5000u}) {
    const std::vector<float> logits = random_logits(size, 5);
    for (const double share : {0.05, 0.3, 0.8}) {
      SamplerOptions options;
      options.temperature = 1;
      options.top_p = share;
      const std::vector<double> p = softmax(logits, 1);
      std::set<std::int32_t> want;
      double sum = 0;
      for (const std::int32_t token : ranking(logits)) {
        if (sum >= share) break;
        want.insert(token);
        sum += p[static_cast<std::size_t>(token)];
      }
      for (const std::int32_t token : seen(logits, options, 100)) EXPECT_TRUE(want.contains(token)) << token;
      if (size == 12) {
        EXPECT_EQ(seen(logits, options), want);
      }
    }
  }
}

TEST(Sampler, MinPIsRelativeToTheMostLikely) {
  const std::vector<float> logits = {0, -1, -2, -3, -4};
  SamplerOptions options;
  options.temperature = 1;
  options.min_p = std::exp(-2.5);
  EXPECT_EQ(seen(logits, options), (std::set<std::int32_t>{0, 1, 2}));
  options.min_p = 1;
  EXPECT_EQ(seen(logits, options), (std::set<std::int32_t>{0}));
}

TEST(Sampler, PenaltyMovesWhatWasSaidDown) {
  const std::vector<float> logits = {4, 3, -1};
  SamplerOptions options;
  options.repetition_penalty = 1.5;
  const std::vector<std::int32_t> said = {0, 0, 0};
  EXPECT_EQ(choose(logits, said, 0, options).token, 1);  // 4 / 1.5 once, however often it was said
  const std::vector<float> negative = {-1, -1.2f};
  EXPECT_EQ(choose(negative, said, 0, options).token, 1);  // -1 * 1.5
}

TEST(Sampler, SameSeedAndPositionGiveTheSameDraw) {
  const std::vector<float> logits = random_logits(100, 6);
  SamplerOptions options;
  options.temperature = 3;
  int moved_by_seed = 0, moved_by_position = 0;
  for (int i = 0; i < 100; ++i) {
    options.seed = 1;
    const std::int32_t token = choose(logits, {}, i, options).token;
    EXPECT_EQ(choose(logits, {}, i, options).token, token);
    moved_by_position += choose(logits, {}, i + 1, options).token != token;
    options.seed = 2;
    moved_by_seed += choose(logits, {}, i, options).token != token;
  }
  EXPECT_GT(moved_by_seed, 50);
  EXPECT_GT(moved_by_position, 50);
}

TEST(Sampler, LogprobsAreOfTheModelItself) {
  const std::vector<float> logits = random_logits(50, 7);
  const std::vector<double> p = softmax(logits, 1);
  SamplerOptions options;
  options.temperature = 2;
  options.repetition_penalty = 1.3;
  options.logprobs = 5;
  const std::vector<std::int32_t> said = {1, 2, 3};
  const TokenChoice choice = choose(logits, said, 9, options);
  EXPECT_NEAR(choice.logprob, std::log(p[static_cast<std::size_t>(choice.token)]), 1e-9);
  ASSERT_EQ(choice.top.size(), 5u);
  for (std::size_t i = 0; i < 5; ++i) {
    EXPECT_EQ(choice.top[i].token, ranking(logits)[i]);
    EXPECT_NEAR(choice.top[i].logprob, std::log(p[static_cast<std::size_t>(choice.top[i].token)]), 1e-9);
  }
}

TEST(Sampler, TopKOfOneIsGreedyHoweverCloseTheLogits) {
  const std::vector<float> close = {1e-20f, 3e-20f, 2e-20f};  // all weights round to 1
  SamplerOptions options;
  options.temperature = 1;
  options.top_k = 1;
  EXPECT_EQ(seen(close, options, 10), (std::set<std::int32_t>{1}));
  options.top_k = 2;
  EXPECT_EQ(seen(close, options, 100), (std::set<std::int32_t>{1, 2}));
}

TEST(Sampler, PenaltyMakesNoLogitInfinite) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  const std::vector<std::int32_t> said = {0, 1};
  SamplerOptions options;
  options.temperature = 1;
  options.repetition_penalty = 2;
  const std::vector<float> low = {-3e38f, -kInf};  // the first is all there is
  for (int i = 0; i < 100; ++i) EXPECT_EQ(choose(low, said, i, options).token, 0);
  options.repetition_penalty = 1e-3;
  const std::vector<float> high = {1.0f, 3e38f, kInf};  // the last one is above all others
  for (int i = 0; i < 100; ++i) EXPECT_EQ(choose(high, said, i, options).token, 2);
}

TEST(Sampler, LogprobsOfHugeAndOfInfiniteLogitsAreNumbers) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  for (const float most : {1.0f, 1e17f, -1e30f, kInf}) {
    const std::vector<float> logits = {most, -kInf, most};
    SamplerOptions options;
    options.logprobs = 3;
    const TokenChoice choice = choose(logits, {}, 0, options);
    EXPECT_EQ(choice.token, 0);
    EXPECT_NEAR(choice.logprob, -std::log(2.0), 1e-15) << most;
    ASSERT_EQ(choice.top.size(), 3u);
    EXPECT_NEAR(choice.top[1].logprob, -std::log(2.0), 1e-15) << most;
    EXPECT_EQ(choice.top[2].logprob, -std::numeric_limits<double>::infinity());
  }
}

TEST(Sampler, RefusesWhatItCannotChooseFrom) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  const std::vector<float> nan = {0, std::numeric_limits<float>::quiet_NaN()}, none = {-kInf, -kInf};
  EXPECT_THROW(choose(nan, {}, 0, {}), Error);
  EXPECT_THROW(choose(none, {}, 0, {}), Error);
  const std::vector<float> certain = {-kInf, kInf};
  EXPECT_EQ(choose(certain, {}, 0, {}).token, 1);
  const std::vector<float> fine = {1, -kInf, 2};
  SamplerOptions hidden;
  hidden.temperature = 1;
  EXPECT_FALSE(seen(fine, hidden).contains(1));
  for (auto change : std::vector<void (*)(SamplerOptions&)>{
           [](SamplerOptions& o) { o.temperature = -1; }, [](SamplerOptions& o) { o.top_k = -1; },
           [](SamplerOptions& o) { o.top_p = 0; }, [](SamplerOptions& o) { o.top_p = 1.1; },
           [](SamplerOptions& o) { o.min_p = 2; }, [](SamplerOptions& o) { o.repetition_penalty = 0; },
           [](SamplerOptions& o) { o.logprobs = 101; },
           [](SamplerOptions& o) { o.temperature = std::numeric_limits<double>::quiet_NaN(); }}) {
    SamplerOptions options;
    change(options);
    EXPECT_THROW(choose(fine, {}, 0, options), InvalidArgument);
  }
}

}  // namespace
}  // namespace treeattn::model
