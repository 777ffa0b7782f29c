// SPDX-License-Identifier: Apache-2.0
// attention(), the float32 leaves, against the gradient of the energy in double.
//
// The allowance is 1e-5 of sum_a P_a |v_a|, the size of what is summed (relative to the result alone it would mean
// nothing where values cancel). In float32, u = 2^-24: a logit of head_dim products of |q| <= 1/4 and |k| <= 1 over
// sqrt(head_dim) is at most sqrt(head_dim) / 4 < 1.6 here, so even if no two of its roundings cancelled its error, and
// with it the relative error of a weight, would be 42 u 1.6 = 4e-6, once in the numerator and once in the denominator;
// exp2 adds 2^-22 to each, and what is left, under 2e-6, is for the sums, whose roundings are random in sign.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <iostream>
#include <random>
#include <vector>

#include "treeattn/attention.h"
#include "treeattn/energy.h"

namespace treeattn {
namespace {

constexpr double kRelative = 1e-5;

std::mt19937_64 seeded() {
  const char* text = std::getenv("TREEATTN_SEED");
  const std::uint64_t seed = text ? std::strtoull(text, nullptr, 10) : std::random_device{}();
  std::cout << "TREEATTN_SEED=" << seed << std::endl;
  return std::mt19937_64(seed);
}

std::vector<float> uniform(std::mt19937_64& engine, std::int64_t size, float limit) {
  std::vector<float> x(static_cast<std::size_t>(size));
  for (float& x_i : x) x_i = std::uniform_real_distribution<float>(-limit, limit)(engine);
  return x;
}

// [tokens, heads, dim] of float32 to [heads, tokens, dim] of double.
std::vector<double> heads_first(const std::vector<float>& x, std::int64_t tokens, std::int64_t heads,
                                std::int64_t dim) {
  std::vector<double> out;
  out.reserve(x.size());
  for (std::int64_t h = 0; h < heads; ++h) {
    for (std::int64_t t = 0; t < tokens; ++t) {
      for (std::int64_t i = 0; i < dim; ++i) out.push_back(x[static_cast<std::size_t>((t * heads + h) * dim + i)]);
    }
  }
  return out;
}

std::vector<double> absolute(std::vector<double> x) {
  for (double& x_i : x) x_i = std::abs(x_i);
  return x;
}

AttentionInput attention_input(const std::vector<float>& q, const std::vector<float>& k, const std::vector<float>& v,
                               std::int64_t queries, std::int64_t tokens, std::int64_t heads, std::int64_t kv_heads) {
  AttentionInput in;
  in.q = QueryView::dense(q.data(), DType::kFloat32, 1, queries, heads,
                          static_cast<std::int64_t>(q.size()) / (queries * heads));
  in.k = KvView::tokens_first(k.data(), DType::kFloat32, 1, tokens, kv_heads,
                              static_cast<std::int64_t>(k.size()) / (tokens * kv_heads));
  in.v = KvView::tokens_first(v.data(), DType::kFloat32, 1, tokens, kv_heads,
                              static_cast<std::int64_t>(v.size()) / (tokens * kv_heads));
  return in;
}

TEST(EnergyAttention, DecodeIsTheGradient) {
  std::mt19937_64 engine = seeded();
  constexpr std::int64_t kHeads = 6, kKvHeads = 2, kDim = 40, kVDim = 24;
  ThreadPool pool(2);
  for (const std::int64_t tokens : {1, 65, 333, 1021}) {
    const auto q = uniform(engine, kHeads * kDim, 0.25f);
    const auto k = uniform(engine, tokens * kKvHeads * kDim, 1.0f),
               v = uniform(engine, tokens * kKvHeads * kVDim, 2.0f);
    std::vector<float> out(kHeads * kVDim), lse(kHeads);
    attention(attention_input(q, k, v, 1, tokens, kHeads, kKvHeads), {}, out, lse, pool);

    const auto q64 = heads_first(q, 1, kHeads, kDim), k64 = heads_first(k, tokens, kKvHeads, kDim);
    const auto v64 = heads_first(v, tokens, kKvHeads, kVDim), magnitude64 = absolute(v64);
    for (std::int64_t h = 0; h < kHeads; ++h) {
      const std::int64_t kv_head = h / (kHeads / kKvHeads);
      const auto part = [](const std::vector<double>& x, std::int64_t i, std::int64_t size) {
        return std::span(x).subspan(static_cast<std::size_t>(i * size), static_cast<std::size_t>(size));
      };
      EnergyInput in{part(q64, h, kDim),
                     part(k64, kv_head, tokens * kDim),
                     part(v64, kv_head, tokens * kVDim),
                     tokens,
                     kDim,
                     kVDim,
                     1.0 / std::sqrt(static_cast<double>(kDim))};
      const EnergyGradient want = energy_and_gradient(in);
      in.v = part(magnitude64, kv_head, tokens * kVDim);
      const EnergyGradient magnitude = energy_and_gradient(in);
      EXPECT_NEAR(lse[static_cast<std::size_t>(h)], want.energy, kRelative * (1.0 + std::abs(want.energy)));
      for (std::size_t i = 0; i < kVDim; ++i) {
        EXPECT_NEAR(out[static_cast<std::size_t>(h * kVDim) + i], want.gradient[i], kRelative * magnitude.gradient[i])
            << tokens << " tokens, head " << h << ", component " << i;
      }
    }
  }
}

TEST(EnergyAttention, CausalIsTheGradientOfTheTotal) {
  std::mt19937_64 engine = seeded();
  constexpr std::int64_t kHeads = 3, kDim = 24, kVDim = 40, kTokens = 77;
  ThreadPool pool(2);
  const auto q = uniform(engine, kTokens * kHeads * kDim, 0.25f), k = uniform(engine, kTokens * kHeads * kDim, 1.0f);
  const auto v = uniform(engine, kTokens * kHeads * kVDim, 2.0f);
  std::vector<float> out(kTokens * kHeads * kVDim), lse(kTokens * kHeads);
  AttentionOptions options;
  options.causal = true;
  attention(attention_input(q, k, v, kTokens, kTokens, kHeads, kHeads), options, out, lse, pool);

  const auto q64 = heads_first(q, kTokens, kHeads, kDim), k64 = heads_first(k, kTokens, kHeads, kDim);
  const auto v64 = heads_first(v, kTokens, kHeads, kVDim), magnitude64 = absolute(v64);
  CausalEnergyInput in{q64, k64, v64, kTokens, kDim, kVDim, 1.0 / std::sqrt(static_cast<double>(kDim)), kHeads};
  const EnergyGradient want = causal_energy_and_gradient(in);
  in.v = magnitude64;
  const EnergyGradient magnitude = causal_energy_and_gradient(in);

  double total = 0.0, total_allowance = 0.0;
  for (const float row : lse) {
    total += row;
    total_allowance += kRelative * (1.0 + std::abs(row));
  }
  EXPECT_NEAR(total, want.energy, total_allowance);
  const std::vector<double> got = heads_first(out, kTokens, kHeads, kVDim);
  for (std::size_t i = 0; i < got.size(); ++i) {
    EXPECT_NEAR(got[i], want.gradient[i], kRelative * magnitude.gradient[i]) << "element " << i;
  }
}

}  // namespace
}  // namespace treeattn
