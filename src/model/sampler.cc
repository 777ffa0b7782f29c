// SPDX-License-Identifier: Apache-2.0
#include "model/sampler.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <limits>
#include <numeric>

#include "base/check.h"
#include "base/mix.h"
#include "treeattn/error.h"

namespace treeattn::model {
namespace {

struct Candidate {
  std::int32_t token = 0;
  float logit = 0;
  double weight = 0;  // not normalised; 1 for the most likely
};

// Throws unless all are numbers and one is not -inf. On the bits of the numbers: loops of integers are vectorised, and
// a vocabulary is long.
void check_logits(std::span<const float> logits) {
  constexpr std::uint32_t kSign = 0x80000000u, kInfinity = 0x7f800000u;
  std::uint32_t nan = 0, possible = 0;
  for (const float logit : logits) {
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(logit);
    nan |= (bits & ~kSign) > kInfinity ? 1u : 0u;
    possible |= bits ^ (kSign | kInfinity);
  }
  if (nan != 0) {
    const auto at = std::ranges::find_if(logits, [](float logit) { return std::isnan(logit); });
    throw Error(
        fmt::format("the logit of token {} is NaN: weights that are not finite, or too large for a cache in "
                    "float16, which ends at 65504",
                    at - logits.begin()));
  }
  if (possible == 0) throw Error("all logits are -inf");
}

// The largest of numbers, likewise: floats in the order of integers.
float largest_of(std::span<const float> values) {
  std::int32_t largest = std::numeric_limits<std::int32_t>::min();
  const auto flipped = [](std::int32_t bits) { return bits < 0 ? bits ^ 0x7fffffff : bits; };
  for (const float value : values) largest = std::max(largest, flipped(std::bit_cast<std::int32_t>(value)));
  return std::bit_cast<float>(flipped(largest));
}

// How far a logit is below the largest. +inf - +inf: such a token is as likely as can be.
double below(float logit, float largest) { return logit == largest ? 0 : double{logit} - double{largest}; }

std::vector<float> penalized(std::span<const float> logits, std::span<const std::int32_t> said, double penalty) {
  std::vector<float> out(logits.begin(), logits.end());
  std::vector<bool> seen(out.size());  // a token counts once; a text may have a million
  for (const std::int32_t token : said) {
    const auto at = static_cast<std::size_t>(token);
    if (token < 0 || at >= out.size() || seen[at]) continue;
    seen[at] = true;
    float& logit = out[at];
    if (std::isinf(logit)) continue;
    // No finite logit becomes infinite: -inf is for tokens that must not come.
    constexpr double kMost = std::numeric_limits<float>::max();
    logit = static_cast<float>(std::clamp(logit > 0 ? logit / penalty : logit * penalty, -kMost, kMost));
  }
  return out;
}

// By the logits: weights that are nearly alike may round to the same number.
bool more_likely(const Candidate& a, const Candidate& b) {
  return a.logit > b.logit || (a.logit == b.logit && a.token < b.token);
}

// Leaves the `count` most likely, in order.
void keep_most_likely(std::vector<Candidate>& candidates, std::size_t count) {
  count = std::min(count, candidates.size());
  std::partial_sort(candidates.begin(), candidates.begin() + static_cast<std::ptrdiff_t>(count), candidates.end(),
                    more_likely);
  candidates.resize(count);
}

double sum_of(std::span<const Candidate> candidates) {
  return std::accumulate(candidates.begin(), candidates.end(), 0.0,
                         [](double sum, const Candidate& c) { return sum + c.weight; });
}

// The fewest of the most likely that have `share` of the whole.
void keep_share(std::vector<Candidate>& candidates, double share) {
  const double wanted = share * sum_of(candidates);
  // Mostly a few are enough; sorting a whole vocabulary takes longer than the rest of the choice.
  for (std::size_t count = 256;; count *= 16) {
    std::vector<Candidate> sorted = candidates;
    keep_most_likely(sorted, count);
    double sum = 0;
    for (std::size_t i = 0; i < sorted.size(); ++i) {
      sum += sorted[i].weight;
      if (sum < wanted && i + 1 < candidates.size()) continue;
      sorted.resize(i + 1);
      candidates = std::move(sorted);
      return;
    }
  }
}

std::int32_t draw(std::span<const Candidate> candidates, double uniform) {
  const double wanted = uniform * sum_of(candidates);
  double sum = 0;
  for (const Candidate& c : candidates) {
    sum += c.weight;
    if (sum > wanted) return c.token;
  }
  const auto last = std::find_if(candidates.rbegin(), candidates.rend(), [](const auto& c) { return c.weight > 0; });
  return last->token;
}

void add_logprobs(std::span<const float> logits, const SamplerOptions& options, TokenChoice& choice) {
  const float largest = largest_of(logits);
  double sum = 0;
  for (const float logit : logits) sum += std::exp(below(logit, largest));
  const auto logprob = [&](float logit) { return below(logit, largest) - std::log(sum); };
  std::vector<Candidate> all(logits.size());
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = {static_cast<std::int32_t>(i), logits[i]};
  keep_most_likely(all, static_cast<std::size_t>(options.logprobs));
  for (const Candidate& c : all) choice.top.push_back({c.token, logprob(c.logit)});
  choice.logprob = logprob(logits[static_cast<std::size_t>(choice.token)]);
}

}  // namespace

double uniform_draw(std::uint64_t seed, std::uint64_t counter) {
  constexpr std::uint64_t kGolden = 0x9e3779b97f4a7c15ull;
  const std::uint64_t bits = base::mix(base::mix(seed + kGolden) + (counter + 1) * kGolden);
  return static_cast<double>(bits >> 11) * 0x1p-53;
}

void check_sampler(const SamplerOptions& o) {
  base::require(o.temperature >= 0 && o.temperature <= 1000, "temperature = {}; accepted: 0 to 1000", o.temperature);
  base::require(o.top_k >= 0, "top_k = {}; accepted: 0 (all) or more", o.top_k);
  base::require(o.top_p > 0 && o.top_p <= 1, "top_p = {}; accepted: more than 0, up to 1", o.top_p);
  base::require(o.min_p >= 0 && o.min_p <= 1, "min_p = {}; accepted: 0 to 1", o.min_p);
  base::require(o.repetition_penalty > 0 && o.repetition_penalty <= 100,
                "repetition_penalty = {}; accepted: more than 0, up to 100", o.repetition_penalty);
  base::require(o.logprobs >= 0 && o.logprobs <= 100, "logprobs = {}; accepted: 0 to 100", o.logprobs);
}

TokenChoice choose(std::span<const float> logits, std::span<const std::int32_t> said, std::int64_t position,
                   const SamplerOptions& options) {
  check_sampler(options);
  check_logits(logits);
  std::vector<float> other;
  if (options.repetition_penalty != 1) other = penalized(logits, said, options.repetition_penalty);
  const std::span<const float> judged = options.repetition_penalty != 1 ? other : logits;
  const float best = largest_of(judged);
  TokenChoice choice;
  if (options.temperature == 0) {
    choice.token = static_cast<std::int32_t>(std::ranges::find(judged, best) - judged.begin());
  } else {
    std::vector<Candidate> candidates(judged.size());
    for (std::size_t i = 0; i < judged.size(); ++i) {
      candidates[i] = {static_cast<std::int32_t>(i), judged[i], std::exp(below(judged[i], best) / options.temperature)};
    }
    if (options.top_k > 0) keep_most_likely(candidates, static_cast<std::size_t>(options.top_k));
    if (options.top_p < 1) keep_share(candidates, options.top_p);
    if (options.min_p > 0) std::erase_if(candidates, [&](const Candidate& c) { return c.weight < options.min_p; });
    choice.token = draw(candidates, uniform_draw(options.seed, static_cast<std::uint64_t>(position)));
  }
  if (options.logprobs > 0) add_logprobs(logits, options, choice);
  return choice;
}

}  // namespace treeattn::model
