// SPDX-License-Identifier: Apache-2.0
// The logits of a Llama in double precision, and how far off from them those of an arithmetic may be
// (docs/exactness.md, "The logits of a Llama").
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
#include <random>
#include <span>
#include <vector>

#include "kernels/reference/model_reference.h"
#include "llama_arithmetic.h"
#include "model/rope.h"
#include "model/weights.h"
#include "rounded_ops.h"
#include "rounding_tape.h"

namespace treeattn::testing_model {

// What a logit may be off by, in deviations. Errors that are independent and uniform exceed that with a probability of
// 2 exp(-7^2 / 2) = 5e-11 or less.
inline constexpr double kMostDeviations = 7;

// What may be wrong with an implementation, to see that the bound notices.
struct Fault {
  enum class Kind { kNone, kQueriesOnePositionOn, kLostKey } kind = Kind::kNone;
  int layer = 0;
  std::int64_t key = 0;
};

class RoundedLlama {
 public:
  // Logits of the tokens from `first` on. The weights in host memory.
  RoundedLlama(const model::Weights& weights, std::span<const std::int32_t> tokens, std::size_t first,
               const Arithmetic& arithmetic, const Fault& fault = {})
      : weights_(weights), arithmetic_(arithmetic), fault_(fault), ops_(tape_, arithmetic, weights.config()) {
    make_angles(tokens.size() + 1);  // one more, for a fault
    // Equal tokens have equal errors until attention: computed once, so that they are not taken for independent.
    std::map<std::int32_t, std::size_t> places;
    std::vector<std::int32_t> distinct;
    for (const std::int32_t token : tokens) {
      if (places.try_emplace(token, distinct.size()).second) distinct.push_back(token);
      place_of_.push_back(places.at(token));
    }
    const auto hidden = weights.config().hidden;
    embedding_ = &tape_.given(static_cast<std::int64_t>(distinct.size()), hidden,
                              kernels::reference_embed(weights.embedding(), distinct).value);
    Value* x = embedding_;
    for (int layer = 0; layer < weights.config().layers; ++layer) x = &run_layer(layer, *x);
    std::vector<std::size_t> last;
    for (std::size_t i = first; i < tokens.size(); ++i) last.push_back(i);
    Value& normed = ops_.rms_norm(tape_.gather(*x, last), weights.final_norm());
    logits_ = &ops_.linear(weights.head(), ops_.activations(normed, weights.head().dtype));
  }
  RoundedLlama(const RoundedLlama&) = delete;

  std::span<const double> logits() const { return logits_->at; }  // [tokens - first, vocab]
  double largest_logit() const {
    double largest = 0;
    for (const double x : logits()) largest = std::max(largest, std::fabs(x));
    return largest;
  }

  // Of the number sum_i direction_i logit_i, and the gradient of that.
  Spread spread(std::span<const double> direction) { return tape_.spread(*logits_, direction); }
  const Value& embedding() const { return *embedding_; }  // of the tokens, each once, in order of appearance
  const Value& frequencies() const { return *frequencies_; }

  // How far off somebody's logits are, in deviations: the largest of those that are off most, and of sums of all of
  // them with random signs, to which every single one contributes.
  template <class T>
  double deviations_off(std::span<const T> got, int single = 2, int sums = 2) {
    std::vector<double> off(got.begin(), got.end());
    for (std::size_t i = 0; i < off.size(); ++i) off[i] -= logits_->at[i];
    std::vector<std::size_t> order(off.size());
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::partial_sort(order.begin(), order.begin() + single, order.end(),
                      [&](std::size_t a, std::size_t b) { return std::fabs(off[a]) > std::fabs(off[b]); });
    std::mt19937 random(1);
    double worst = 0;
    for (int probe = 0; probe < single + sums; ++probe) {
      std::vector<double> direction(off.size());
      if (probe < single) direction[order[static_cast<std::size_t>(probe)]] = 1;
      for (double& d : direction) d = probe < single ? d : random() % 2 == 0 ? 1 : -1;
      double sum = 0;
      for (std::size_t i = 0; i < off.size(); ++i) sum += direction[i] * off[i];
      const double deviations = std::fabs(sum) / spread(direction).deviation;
      worst = deviations > worst || std::isnan(deviations) ? deviations : worst;
    }
    return worst;
  }

 private:
  // transformers makes frequencies and angles in float32. A frequency is theta^-e; an exponent that is off by u e moves
  // it by u e ln(theta); beside that 4 roundings for the power and its reciprocal, and 12 for the scaling.
  void make_angles(std::size_t positions) {
    const model::LlamaConfig& c = weights_.config();
    const std::vector<double> exact = model::rope_frequencies(c);
    const std::size_t half = exact.size();
    std::vector<double> off(half);
    for (std::size_t i = 0; i < half && arithmetic_.float32_angles; ++i) {
      const double exponent = static_cast<double>(i) / static_cast<double>(half);
      off[i] = (std::log(c.rope_theta) * exponent + (c.rope_scaling ? 16 : 4)) * 0x1p-24 * exact[i];
    }
    frequencies_ = &tape_.with_errors(tape_.given(1, static_cast<std::int64_t>(half), exact), off);
    Value& f = *frequencies_;
    Value& angle = tape_.make(static_cast<std::int64_t>(positions), f.cols);
    for (std::size_t i = 0; i < angle.size(); ++i) angle.at[i] = static_cast<double>(i / half) * f.at[i % half];
    tape_.back([&f, &angle, half] {
      for (std::size_t i = 0; i < angle.size(); ++i) {
        f.gradient[i % half] += angle.gradient[i] * static_cast<double>(i / half);
      }
    });
    Value& rounded = ops_.rounded(angle, arithmetic_.float32_angles ? 24 : 53);
    cosine_ = &as_stored(tape_.map(
        rounded, [](double x) { return std::cos(x); }, [](double x) { return -std::sin(x); }));
    sine_ = &as_stored(tape_.map(
        rounded, [](double x) { return std::sin(x); }, [](double x) { return std::cos(x); }));
  }

  // In float32, and then in what is kept. From one position to the next a cosine of a low frequency hardly moves, nor
  // does its rounding.
  Value& as_stored(Value& x) {
    std::vector<double> off(x.size());
    for (std::size_t i = 0; i < off.size(); ++i) off[i] = half_spacing(x.at[i], 24) + arithmetic_.kept(x.at[i]);
    return tape_.with_common_errors(x, std::move(off));
  }

  Value& run_layer(int layer, Value& given) {
    const model::LayerWeights& w = weights_.layers()[static_cast<std::size_t>(layer)];
    const auto every_token = [&](Value& x) -> Value& { return layer == 0 ? tape_.gather(x, place_of_) : x; };
    Value& n = ops_.activations(ops_.rms_norm(given, w.attention_norm), w.q.dtype);
    const bool on = fault_.kind == Fault::Kind::kQueriesOnePositionOn && fault_.layer == layer;
    Value& q = ops_.rope(every_token(ops_.linear(w.q, n)), *cosine_, *sine_, on ? 1 : 0);
    Value& k = ops_.rope(every_token(ops_.linear(w.k, n)), *cosine_, *sine_, 0);
    Value& v = every_token(ops_.narrowed(ops_.linear(w.v, n), arithmetic_.cached_bits));
    const bool loses = fault_.kind == Fault::Kind::kLostKey && fault_.layer == layer;
    Value& attended = ops_.attention(ops_.narrowed(q, arithmetic_.query_bits),
                                     ops_.narrowed(k, arithmetic_.cached_bits), v, loses ? fault_.key : -1);
    Value& x = add(every_token(given), ops_.linear(w.o, ops_.activations(attended, w.o.dtype)));

    Value& m = ops_.activations(ops_.rms_norm(x, w.feed_forward_norm), w.gate.dtype);
    Value& activated = ops_.swiglu(ops_.linear(w.gate, m), ops_.linear(w.up, m));
    return add(x, ops_.linear(w.down, ops_.activations(activated, w.down.dtype)));
  }

  Value& add(Value& a, Value& b) { return ops_.kept(tape_.plus(a, b)); }

  const model::Weights& weights_;
  const Arithmetic arithmetic_;
  const Fault fault_;
  RoundingTape tape_;
  RoundedOps ops_;
  std::vector<std::size_t> place_of_;  // of each token among the distinct ones
  Value *embedding_ = nullptr, *frequencies_ = nullptr, *cosine_ = nullptr, *sine_ = nullptr, *logits_ = nullptr;
};

}  // namespace treeattn::testing_model
