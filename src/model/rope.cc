// SPDX-License-Identifier: Apache-2.0
#include "model/rope.h"

#include <cmath>
#include <cstddef>
#include <numbers>

namespace treeattn::model {
namespace {

// Waves longer than the trained context / low_freq_factor are slowed by `factor`, those shorter than it /
// high_freq_factor are left, and those between get a mean of the two.
double scaled(double frequency, const RopeScaling& scaling) {
  const double wave = 2 * std::numbers::pi / frequency;
  const double waves_in_context = static_cast<double>(scaling.original_context) / wave;
  if (waves_in_context < scaling.low_freq_factor) return frequency / scaling.factor;
  if (waves_in_context > scaling.high_freq_factor) return frequency;
  const double kept =
      (waves_in_context - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor);
  return (1 - kept) * frequency / scaling.factor + kept * frequency;
}

}  // namespace

std::vector<double> rope_frequencies(const LlamaConfig& config) {
  std::vector<double> out(static_cast<std::size_t>(config.head_dim / 2));
  for (std::size_t i = 0; i < out.size(); ++i) {
    const double exponent = 2.0 * static_cast<double>(i) / static_cast<double>(config.head_dim);
    out[i] = std::pow(config.rope_theta, -exponent);
    if (config.rope_scaling) out[i] = scaled(out[i], *config.rope_scaling);
  }
  return out;
}

}  // namespace treeattn::model
