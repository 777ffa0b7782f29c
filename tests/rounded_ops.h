// SPDX-License-Identifier: Apache-2.0
// The operations of a Llama on a RoundingTape, with the errors of an arithmetic. What each of them loses is derived in
// src/kernels/reference/model_reference.cc, attention in docs/exactness.md.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <numeric>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/model_ops.h"
#include "kernels/reference/model_reference.h"
#include "llama_arithmetic.h"
#include "model/config.h"
#include "rounding_tape.h"

namespace treeattn::testing_model {

class RoundedOps {
 public:
  using Index = std::int64_t;

  RoundedOps(RoundingTape& tape, const Arithmetic& arithmetic, const model::LlamaConfig& config)
      : tape_(tape), arithmetic_(arithmetic), c_(config) {}

  Value& rounded(Value& x, int bits) {
    return tape_.with_errors_of(x, [bits](double value) { return half_spacing(value, bits); });
  }
  // x as one operation hands it to the next.
  Value& kept(Value& x) { return rounded(x, arithmetic_.kept_bits); }
  // What was kept, in fewer bits.
  Value& narrowed(Value& x, int bits) { return bits < arithmetic_.kept_bits ? rounded(x, bits) : x; }

  // x as it meets weights of a type.
  Value& activations(Value& x, DType weights) {
    const kernels::Activations kind = arithmetic_.linear(weights).activations;
    if (kind == kernels::Activations::kFloat32) return x;
    if (kind == kernels::Activations::kBFloat16) return narrowed(x, 8);
    std::vector<double> off(x.size());  // half a step of the group
    for (std::size_t i = 0; i < off.size(); ++i) {
      const double* group = x.at.data() + i / kernels::kWeightGroup * kernels::kWeightGroup;
      double largest = 0;
      for (Index j = 0; j < kernels::kWeightGroup; ++j) largest = std::max(largest, std::fabs(group[j]));
      off[i] = largest / 254;
    }
    return tape_.with_errors(x, std::move(off));
  }

  // x w^T.
  Value& linear(const kernels::WeightMatrix& w, Value& x) {
    Value& y = tape_.make(x.rows, w.rows);
    std::vector<std::int32_t> all(index(w.rows));
    std::iota(all.begin(), all.end(), 0);
    const auto weight = std::make_shared<std::vector<double>>(kernels::reference_embed(w, all).value);
    const kernels::LinearModel model = arithmetic_.linear(w.dtype);
    std::vector<double> off(y.size()), off_by_weights(y.size());
    for (Index row = 0; row < x.rows; ++row) {
      for (Index n = 0; n < w.rows; ++n) {
        const double *a = x.row(row), *b = weight->data() + n * w.cols;
        double sum = 0, size = 0, squares = 0;
        for (Index i = 0; i < w.cols; ++i) {
          sum += a[i] * b[i];
          size += std::fabs(a[i] * b[i]);
          squares += a[i] * b[i] * a[i] * b[i];
        }
        y.at[index(row * w.rows + n)] = sum;
        off[index(row * w.rows + n)] = model.unit_roundoff * size;
        off_by_weights[index(row * w.rows + n)] = 0x1p-8 * std::sqrt(squares);  // one rounding of each
      }
    }
    tape_.back([&x, &y, weight] {
      for (Index row = 0; row < x.rows; ++row) {
        double* to = x.gradient_row(row);
        for (Index n = 0; n < y.cols; ++n) {
          const double g = y.gradient_row(row)[n];
          if (g == 0) continue;
          const double* b = weight->data() + n * x.cols;
          for (Index i = 0; i < x.cols; ++i) to[i] += g * b[i];
        }
      }
    });
    Value& summed = tape_.with_errors(y, std::move(off), kernels::linear_roundings(w, model));
    return kept(model.weights_in_bfloat16 ? tape_.with_errors(summed, std::move(off_by_weights)) : summed);
  }

  // Always in float32, whatever is kept: one rounding more for that. Kept before the weight and after.
  Value& rms_norm(Value& x, const float* weight) {
    Value& y = tape_.make(x.rows, x.cols);
    std::vector<double> scale(index(x.rows)), off(x.size()), off_once(x.size());
    for (Index row = 0; row < x.rows; ++row) {
      const double* from = x.row(row);
      const double squares = std::inner_product(from, from + x.cols, from, 0.0);
      scale[index(row)] = 1 / std::sqrt(squares / static_cast<double>(x.cols) + c_.rms_eps);
      for (Index i = 0; i < x.cols; ++i) {
        const std::size_t at = index(row * x.cols + i);
        const double normed = from[i] * scale[index(row)];
        y.at[at] = normed * weight[i];
        off[at] = 0x1p-24 * std::fabs(y.at[at]);
        off_once[at] = arithmetic_.kept(normed) * std::fabs(weight[i]);
      }
    }
    tape_.back([&x, &y, weight, scale] {
      for (Index row = 0; row < x.rows; ++row) {
        const double *from = x.row(row), *g = y.gradient_row(row), s = scale[index(row)];
        double along = 0;
        for (Index i = 0; i < x.cols; ++i) along += g[i] * weight[i] * from[i];
        along *= s * s / static_cast<double>(x.cols);
        for (Index i = 0; i < x.cols; ++i) x.gradient_row(row)[i] += s * (g[i] * weight[i] - along * from[i]);
      }
    });
    Value& summed = tape_.with_errors(y, std::move(off), kernels::rms_norm_roundings(x.cols) + 1);
    return kept(tape_.with_errors(summed, std::move(off_once)));
  }

  // gate / (1 + exp(-gate)) * up
  Value& swiglu(Value& gate, Value& up) {
    Value& y = tape_.map(
        gate, [](double x) { return x / (1 + std::exp(-x)); },
        [](double x) {
          const double sigmoid = 1 / (1 + std::exp(-x));
          return sigmoid * (1 + x * (1 - sigmoid));
        });
    std::vector<double> off(y.size());
    for (std::size_t i = 0; i < off.size(); ++i) {
      off[i] = kernels::swiglu_relative_error(gate.at[i]) * std::fabs(y.at[i]);
    }
    return kept(tape_.times(kept(tape_.with_errors(y, std::move(off))), up));
  }

  // Every head of x turned by the angles of its row, `further` rows on. Both products are kept, and their sum.
  Value& rope(Value& x, Value& cosine, Value& sine, Index further) {
    Value& y = tape_.make(x.rows, x.cols);
    std::vector<double> off(x.size());
    // Of element i: the other of its pair, the place of its angle, the sign of its sine.
    const auto place = [half = c_.head_dim / 2, further](Index row, Index i) {
      const bool low = i % (2 * half) < half;
      return std::tuple(low ? i + half : i - half, index((row + further) * half + i % half), low ? -1.0 : 1.0);
    };
    for (Index row = 0; row < x.rows; ++row) {
      for (Index i = 0; i < x.cols; ++i) {
        const auto [pair, angle, sign] = place(row, i);
        const double a = x.row(row)[i] * cosine.at[angle], b = sign * x.row(row)[pair] * sine.at[angle];
        y.at[index(row * x.cols + i)] = a + b;
        off[index(row * x.cols + i)] = arithmetic_.kept(a) + arithmetic_.kept(b);
      }
    }
    tape_.back([&x, &cosine, &sine, &y, place] {
      for (Index row = 0; row < x.rows; ++row) {
        for (Index i = 0; i < x.cols; ++i) {
          const double g = y.gradient_row(row)[i];
          if (g == 0) continue;
          const auto [pair, angle, sign] = place(row, i);
          x.gradient_row(row)[i] += g * cosine.at[angle];
          x.gradient_row(row)[pair] += g * sign * sine.at[angle];
          cosine.gradient[angle] += g * x.row(row)[i];
          sine.gradient[angle] += g * sign * x.row(row)[pair];
        }
      }
    });
    return kept(tape_.with_errors(y, std::move(off)));
  }

  // Causal, of rows that are the keys' too. lost: a key that is left out; -1: none.
  Value& attention(Value& q, Value& k, Value& v, Index lost) {
    Value& out = tape_.make(q.rows, q.cols);
    const kernels::ErrorModel& model = arithmetic_.attention;
    std::vector<double> off(out.size()), off_by_products(out.size());
    for (Index row = 0; row < q.rows; ++row) {
      for (Index head = 0; head < c_.heads; ++head) {
        const Softmax softmax = weigh(q, k, row, head, lost);
        for (Index d = 0; d < c_.head_dim; ++d) {
          double sum = 0, size = 0;
          for (Index t = 0; t <= row; ++t) {
            const double term = softmax.weight[index(t)] * v.row(t)[kv_head(head) + d];
            sum += term;
            size += std::fabs(term);
          }
          const std::size_t at = index(row * q.cols + head * c_.head_dim + d);
          out.at[at] = sum;
          off[at] = model.unit_roundoff * (size + std::fabs(sum));
          off_by_products[at] = model.product_floor * softmax.largest_weight;
        }
      }
    }
    tape_.back([this, &q, &k, &v, &out, lost] {
      for (Index row = 0; row < q.rows; ++row) {
        for (Index head = 0; head < c_.heads; ++head) attention_back(q, k, v, out, row, head, lost);
      }
    });
    // What o and l lose to their sums: (6).
    const double keys = static_cast<double>(q.rows);
    const double roundings = keys * model.additions_per_key + 2 * rescalings(q.rows) + 3;
    Value& summed = tape_.with_errors(out, std::move(off), roundings);
    return kept(tape_.with_errors(summed, std::move(off_by_products), keys));
  }

 private:
  static std::size_t index(Index i) { return static_cast<std::size_t>(i); }

  // Where the key of a query head begins in its row.
  Index kv_head(Index head) const { return head / (c_.heads / c_.kv_heads) * c_.head_dim; }

  // Of one row of one head, over the keys it sees.
  struct Softmax {
    std::vector<double> score, weight;
    double largest_score = 0, largest_weight = 0;
  };

  Softmax weigh(const Value& q, const Value& k, Index row, Index head, Index lost) const {
    const Index dim = c_.head_dim;
    const double* query = q.row(row) + head * dim;
    Softmax result;
    result.score.reserve(index(row + 1));
    result.weight.reserve(index(row + 1));
    for (Index t = 0; t <= row; ++t) {
      const double dot = std::inner_product(query, query + dim, k.row(t) + kv_head(head), 0.0);
      result.score.push_back(t == lost ? -1e300 : dot / std::sqrt(static_cast<double>(dim)));
    }
    result.largest_score = *std::max_element(result.score.begin(), result.score.end());
    double sum = 0;
    for (const double s : result.score) {
      result.weight.push_back(std::exp(s - result.largest_score));
      sum += result.weight.back();
    }
    for (double& weight : result.weight) weight /= sum;
    result.largest_weight = 1 / sum;
    return result;
  }

  // (4), with the smallest chunks there are and the branches there are unless said otherwise.
  double rescalings(Index keys) const {
    return 3 * std::ceil(static_cast<double>(keys) / 64) + 10 + arithmetic_.attention.extra_merges;
  }

  void attention_back(Value& q, Value& k, Value& v, Value& out, Index row, Index head, Index lost) {
    const kernels::ErrorModel& model = arithmetic_.attention;
    const Index dim = c_.head_dim, kv = kv_head(head);
    const double scale = 1 / std::sqrt(static_cast<double>(dim));
    const double *g = out.gradient_row(row) + head * dim, *query = q.row(row) + head * dim;
    if (std::all_of(g, g + dim, [](double x) { return x == 0; })) return;
    const Softmax softmax = weigh(q, k, row, head, lost);
    const double mean = std::inner_product(g, g + dim, out.row(row) + head * dim, 0.0);
    double largest_query = 0;
    for (Index d = 0; d < dim; ++d) largest_query = std::max(largest_query, std::fabs(query[d]));
    for (Index t = 0; t <= row; ++t) {
      if (t == lost) continue;
      const double *key = k.row(t) + kv, *value = v.row(t) + kv;
      const double weight = softmax.weight[index(t)], score = softmax.score[index(t)];
      const double by_weight = std::inner_product(g, g + dim, value, 0.0);
      const double by_score = weight * (by_weight - mean);
      double products = 0, keys = 0;
      for (Index d = 0; d < dim; ++d) {
        q.gradient_row(row)[head * dim + d] += scale * by_score * key[d];
        k.gradient_row(t)[kv + d] += scale * by_score * query[d];
        v.gradient_row(t)[kv + d] += weight * g[d];
        products += std::fabs(query[d] * key[d]);
        keys += std::fabs(key[d]);
      }
      // (1), (3) and what (5) has of rescalings. Whoever keeps scores does so before the scale and after.
      tape_.error(by_score, scale * model.unit_roundoff * products, static_cast<double>(dim + 4));
      tape_.error(by_score, scale * model.query_error * largest_query * keys + model.logit_floor +
                                model.unit_roundoff * (softmax.largest_score - score) +
                                scale * arithmetic_.kept(score / scale) + arithmetic_.kept(score));
      tape_.error(by_score, model.exp2_error, rescalings(row + 1));
      tape_.error(by_weight,
                  weight * model.weight_error + softmax.largest_weight * model.weight_floor + arithmetic_.kept(weight));
    }
  }

  RoundingTape& tape_;
  const Arithmetic arithmetic_;
  const model::LlamaConfig c_;
};

}  // namespace treeattn::testing_model
