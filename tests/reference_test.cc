// SPDX-License-Identifier: Apache-2.0
// The oracle itself: against a second formulation, against numbers worked out by hand, and whether its bounds bite.
#include "kernels/reference/reference.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "base/half.h"
#include "kernels/case_list.h"
#include "thinning.h"

namespace treeattn::kernels {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr float kInfF = std::numeric_limits<float>::infinity();
constexpr float kNanF = std::numeric_limits<float>::quiet_NaN();

std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

// Element (b, t, h, d) of a view, by the formula in treeattn/views.h.
double element(const KvView& view, std::int64_t b, std::int64_t t, std::int64_t h, std::int64_t d) {
  std::int64_t row = h * view.head_stride, scale = h * view.scale_head_stride;
  if (view.page_tokens > 0) {
    const std::int64_t page = view.page_table[b * view.pages_per_sequence + t / view.page_tokens];
    row += page * view.page_stride + (t % view.page_tokens) * view.token_stride;
    scale += page * view.scale_page_stride + (t % view.page_tokens) * view.scale_token_stride;
  } else {
    row += b * view.batch_stride + t * view.token_stride;
    scale += b * view.scale_batch_stride + t * view.scale_token_stride;
  }
  const auto* bytes = static_cast<const std::byte*>(view.data);
  const double value = base::load_as_float(bytes + index(row + d) * dtype_size(view.dtype), view.dtype);
  return view.scales != nullptr ? value * static_cast<double>(view.scales[scale]) : value;
}

struct Answer {
  std::vector<double> out;
  double lse = 0;
};

// One row, key by key: no running maximum, no ranges, masks asked of every position.
Answer brute_force(const AttentionInput& in, const AttentionOptions& options, std::int64_t b, std::int64_t i,
                   std::int64_t h) {
  const QueryView& q = in.q;
  const std::int64_t kv_head = h / (q.heads / in.k.kv_heads);
  const std::int64_t length = in.lengths.empty() ? in.k.tokens : in.lengths[index(b)];
  const std::int64_t qi = (in.first_query.empty() ? in.first_key + length - q.queries : in.first_query[index(b)]) + i;
  const double scale = options.scale ? static_cast<double>(*options.scale)
                                     : static_cast<double>(static_cast<float>(1 / std::sqrt(double(q.head_dim))));
  std::vector<double> sum(index(in.v.head_dim), 0.0);
  double total = options.sinks.empty() ? 0.0 : std::exp(static_cast<double>(options.sinks[index(h)]));
  for (std::int64_t t = 0; t < length; ++t) {
    const std::int64_t kj = in.first_key + t;
    if (options.causal && kj > qi) continue;
    if (options.window > 0 && kj <= qi - options.window) continue;
    if (options.window > 0 && !options.causal && kj >= qi + options.window) continue;
    double logit = 0;
    for (std::int64_t d = q.head_dim - 1; d >= 0; --d) {
      const std::int64_t offset = b * q.batch_stride + i * q.query_stride + h * q.head_stride + d;
      const auto* bytes = static_cast<const std::byte*>(q.data);
      const double x = base::load_as_float(bytes + index(offset) * dtype_size(q.dtype), q.dtype);
      logit += scale * x * element(in.k, b, t, kv_head, d);
    }
    if (options.softcap > 0) logit = options.softcap * std::tanh(logit / options.softcap);
    if (!options.alibi_slopes.empty()) logit += options.alibi_slopes[index(h)] * static_cast<double>(kj - qi);
    const double weight = std::exp(logit);
    total += weight;
    for (std::size_t d = 0; d < sum.size(); ++d) {
      sum[d] += weight * element(in.v, b, t, kv_head, static_cast<std::int64_t>(d));
    }
  }
  if (total > 0) {
    for (double& x : sum) x /= total;
  }
  return {sum, std::log(total)};
}

TEST(ReferenceTest, AgreesWithBruteForce) {
  const std::vector<Case> cases = case_list();
  std::size_t compared = 0;
  for (std::size_t c = 0; c < cases.size(); c += thinning()) {
    const Case& shape = cases[c];
    if (shape.data == DataKind::kLargeLogits || shape.queries > 20) continue;  // exp would overflow; time
    if (!shape.first_query.empty() && shape.first_query[0] > 10000) continue;  // exp would underflow
    SCOPED_TRACE(shape.name);
    const CaseData data(shape, 11);
    const ReferenceResult result = reference_attention(make_problem(data.input(), data.options()), {});
    std::size_t row = 0;
    double worst = 0;
    for (std::int64_t b = 0; b < shape.batch; ++b) {
      for (std::int64_t i = 0; i < shape.queries; ++i) {
        for (std::int64_t h = 0; h < shape.heads; ++h, ++row) {
          const Answer want = brute_force(data.input(), data.options(), b, i, h);
          if (want.lse == -kInf) {
            EXPECT_EQ(result.lse[row], -kInf);
          } else {
            worst = std::max(worst, std::fabs(result.lse[row] - want.lse) / (1 + std::fabs(want.lse)));
          }
          for (std::size_t d = 0; d < want.out.size(); ++d) {
            const double error = std::fabs(result.out[row * want.out.size() + d] - want.out[d]);
            worst = std::isnan(error) ? kInf : std::max(worst, error);
          }
        }
      }
    }
    EXPECT_LT(worst, 1e-11);
    ++compared;
  }
  EXPECT_GT(compared, 200 / thinning());
}

// One query of one head with explicit keys, in float32: q = (1, 0, 0 ...), so that with scale 1 the logit of a key is
// its first element. The values are v[t] in every dimension.
struct Tiny {
  std::vector<float> q = std::vector<float>(16, 0.0f);
  std::vector<float> k, v;
  AttentionInput in;
  AttentionOptions options;

  Tiny(const std::vector<float>& logits, const std::vector<float>& values) : k(logits.size() * 16), v(k.size()) {
    q[0] = 1.0f;
    for (std::size_t t = 0; t < logits.size(); ++t) {
      k[t * 16] = logits[t];
      std::fill_n(v.begin() + static_cast<std::ptrdiff_t>(t * 16), 16, values[t]);
    }
    const auto tokens = static_cast<std::int64_t>(logits.size());
    in.q = QueryView::dense(q.data(), DType::kFloat32, 1, 1, 1, 16);
    in.k = KvView::tokens_first(k.data(), DType::kFloat32, 1, tokens, 1, 16);
    in.v = KvView::tokens_first(v.data(), DType::kFloat32, 1, tokens, 1, 16);
    options.scale = 1.0f;
  }
  ReferenceResult run() const { return reference_attention(make_problem(in, options), {}); }
};

TEST(ReferenceTest, OneKeyIsItsValue) {
  const ReferenceResult result = Tiny({-7.5f}, {3.25f}).run();
  for (const double x : result.out) EXPECT_EQ(x, 3.25);
  EXPECT_EQ(result.lse[0], -7.5);
}

TEST(ReferenceTest, TwoKeysByHand) {
  const ReferenceResult result = Tiny({0.0f, std::log(3.0f)}, {8.0f, 4.0f}).run();
  EXPECT_NEAR(result.out[0], (8.0 + 3.0 * 4.0) / 4.0, 1e-6);
  EXPECT_NEAR(result.lse[0], std::log(4.0), 1e-6);
}

TEST(ReferenceTest, LogitsOfAHundredThousand) {
  for (const float base : {1e5f, -1e5f}) {
    const ReferenceResult result = Tiny({base, base - 1.0f, -base}, {1.0f, 0.0f, base > 0 ? 50.0f : 0.0f}).run();
    const double top = base > 0 ? 1 / (1 + std::exp(-1.0)) : 0.0;  // with -1e5 the third key, at +1e5, takes all
    EXPECT_NEAR(result.out[0], top, 1e-12);
    EXPECT_NEAR(result.lse[0], 1e5 + (base > 0 ? std::log1p(std::exp(-1.0)) : 0.0), 1e-9);
  }
}

TEST(ReferenceTest, ASinkTakesWeightAndGivesNothing) {
  Tiny tiny({0.0f}, {6.0f});
  std::vector<float> sink{0.0f};
  tiny.options.sinks = sink;
  EXPECT_NEAR(tiny.run().out[0], 3.0, 1e-12);
  EXPECT_NEAR(tiny.run().lse[0], std::log(2.0), 1e-12);
  sink[0] = -kInfF;
  EXPECT_EQ(tiny.run().out[0], 6.0);
  EXPECT_EQ(tiny.run().lse[0], 0.0);
}

TEST(ReferenceTest, NothingToSee) {
  Tiny tiny({1.0f}, {6.0f});
  const std::vector<std::int64_t> before{-1};
  tiny.in.first_query = before;
  tiny.options.causal = true;
  EXPECT_EQ(tiny.run().out[0], 0.0);
  EXPECT_EQ(tiny.run().lse[0], -kInf);
  EXPECT_EQ(tiny.run().out_bound[0], 0.0);
  const std::vector<float> sink{2.5f};
  tiny.options.sinks = sink;
  EXPECT_EQ(tiny.run().out[0], 0.0);
  EXPECT_EQ(tiny.run().lse[0], 2.5);
  EXPECT_LT(tiny.run().lse_bound[0], 1e-5);
}

TEST(ReferenceTest, SoftcapComesBeforeTheSoftmax) {
  Tiny tiny({1e6f, 0.0f}, {1.0f, 0.0f});
  tiny.options.softcap = 2.0f;
  EXPECT_NEAR(tiny.run().out[0], 1 / (1 + std::exp(-2.0)), 1e-12);
  EXPECT_NEAR(tiny.run().lse[0], std::log(1 + std::exp(2.0)), 1e-12);
}

TEST(ReferenceTest, AlibiSeesGlobalDistances) {
  Tiny tiny({0.0f, 0.0f, 0.0f}, {1.0f, 10.0f, 100.0f});
  const std::vector<float> slope{0.5f};
  const std::vector<std::int64_t> position{12};
  tiny.in.first_key = 11;  // distances -1, 0, 1
  tiny.in.first_query = position;
  tiny.options.alibi_slopes = slope;
  const double a = std::exp(-0.5), c = std::exp(0.5);
  EXPECT_NEAR(tiny.run().out[0], (a + 10 + 100 * c) / (a + 1 + c), 1e-12);
  EXPECT_NEAR(tiny.run().lse[0], std::log(a + 1 + c), 1e-12);
}

TEST(ReferenceTest, MasksByHand) {
  // Equal weights: the answer is the mean of what is seen. The query stands at position 2 of 0 ... 4.
  Tiny tiny({0, 0, 0, 0, 0}, {1.0f, 2.0f, 4.0f, 8.0f, 16.0f});
  const std::vector<std::int64_t> position{2};
  tiny.in.first_query = position;
  EXPECT_NEAR(tiny.run().out[0], 31.0 / 5, 1e-12);
  tiny.options.causal = true;
  EXPECT_NEAR(tiny.run().out[0], 7.0 / 3, 1e-12);
  tiny.options.window = 2;
  EXPECT_NEAR(tiny.run().out[0], 6.0 / 2, 1e-12);
  tiny.options.causal = false;
  EXPECT_NEAR(tiny.run().out[0], 14.0 / 3, 1e-12);
  const std::vector<std::int64_t> length{3};
  tiny.in.lengths = length;
  EXPECT_NEAR(tiny.run().out[0], 6.0 / 2, 1e-12);
}

TEST(ReferenceTest, NanAndInfinity) {
  const auto run = [](float logit, float value, float cap = 0.0f) {
    Tiny tiny({1.0f, logit}, {2.0f, value});
    tiny.options.softcap = cap;
    return tiny.run();
  };
  EXPECT_TRUE(std::isnan(run(kNanF, 1.0f).out[3]));
  EXPECT_TRUE(std::isnan(run(kNanF, 1.0f).lse[0]));
  EXPECT_EQ(run(kNanF, 1.0f).out_bound[3], 0.0);
  EXPECT_TRUE(std::isnan(run(kInfF, 1.0f).out[0]));
  EXPECT_EQ(run(-kInfF, kNanF).out[0], 2.0);  // masked: the value is not looked at
  EXPECT_EQ(run(-kInfF, kNanF).lse[0], 1.0);
  EXPECT_TRUE(std::isnan(run(0.0f, kNanF).out[0]));
  EXPECT_TRUE(std::isfinite(run(0.0f, kNanF).lse[0]));
  EXPECT_EQ(run(-1e4f, kInfF).out[0], kInf);  // however small the weight
  EXPECT_EQ(run(-1e4f, -kInfF).out_bound[0], 0.0);
  EXPECT_NEAR(run(kInfF, 1.0f, 3.0f).lse[0], std::log(std::exp(3 * std::tanh(1.0 / 3)) + std::exp(3.0)), 1e-12);
  EXPECT_TRUE(std::isfinite(run(-kInfF, 1.0f, 3.0f).out_bound[0]));
  const Tiny only_masked({-kInfF}, {1.0f});
  EXPECT_EQ(only_masked.run().out[0], 0.0);
  EXPECT_EQ(only_masked.run().lse[0], -kInf);
}

TEST(ReferenceTest, OverflowOfFloat32IsNotJudged) {
  Tiny tiny({3e38f, 1.0f}, {1.0f, 2.0f});
  EXPECT_EQ(tiny.run().out_bound[0], kInf);
  const ReferenceResult values = Tiny({1.0f, 1.0f}, {3e38f, 1.0f}).run();
  EXPECT_EQ(values.out_bound[0], kInf);
  EXPECT_LT(values.lse_bound[0], 1e-4);
  // An infinite value is judged, unless its logit may overflow to -inf, or the rest of the sum to the other infinity.
  EXPECT_EQ(Tiny({1.0f, 1.0f}, {kInfF, 1.0f}).run().out_bound[0], 0.0);
  EXPECT_EQ(Tiny({-3e38f, 1.0f}, {kInfF, 1.0f}).run().out_bound[0], kInf);
  EXPECT_EQ(Tiny({1.0f, 1.0f}, {kInfF, -3e38f}).run().out_bound[0], kInf);
  EXPECT_EQ(Tiny({1.0f, 1.0f}, {kNanF, -3e38f}).run().out_bound[0], 0.0);
  EXPECT_EQ(Tiny({-3e38f, 1.0f}, {kNanF, 1.0f}).run().out_bound[0], kInf);
}

// Of values whose mean is 0 all that rounding costs is additions to o, one for each key, or more where it says so.
TEST(ReferenceTest, TheBoundCountsTheAdditionsOfAKey) {
  constexpr std::size_t kKeys = 4096;
  std::vector<float> values(kKeys);
  for (std::size_t t = 0; t < kKeys; ++t) values[t] = t % 2 == 0 ? 1.0f : -1.0f;
  Tiny tiny(std::vector<float>(kKeys, 0.0f), values);
  tiny.in.order = {64, 1};
  ErrorModel model;
  const auto bound = [&] { return reference_attention(make_problem(tiny.in, tiny.options), model).out_bound[0]; };
  const double plain = bound();
  model.additions_per_key = 9.0 / 8;
  EXPECT_NEAR(bound() - plain, kKeys / 8.0 * 0x1p-24, 1e-6);
}

// Of a product with a smaller factor as much is cut off as of one with this.
TEST(ReferenceTest, TheBoundKnowsTheSmallestFactor) {
  const Tiny tiny({0.0f}, {1.0f});  // q has one element that is not 0
  ErrorModel model;
  const Problem problem = make_problem(tiny.in, tiny.options);
  const auto bound = [&] { return reference_attention(problem, model).lse_bound[0]; };
  const double plain = bound();
  model.least_factor = 0x1p-4;
  const double size = std::fabs(tiny.q[0]) + 0x1p-4;
  EXPECT_NEAR(bound() - plain, 16 * 0x1p-24 * std::fabs(problem.scale) * 0x1p-4 * size, 1e-12);
}

// The sign of the rest is all that counts, and what float32 may make of it.
TEST(ReferenceTest, AnInfiniteScaleIsJudgedUnlessTheSignMayChange) {
  const auto run = [](float first, float second) {
    Tiny tiny({1.0f, 1.0f}, {1.0f, 2.0f});
    std::vector<std::int8_t> keys(32, 0);
    keys[0] = keys[1] = 2;
    const float scales[2] = {-kInfF, 1.0f};
    tiny.q[0] = first;
    tiny.q[1] = second;
    tiny.in.k = KvView::tokens_first(keys.data(), DType::kInt8, 1, 2, 1, 16).with_scales(scales);
    return tiny.run();
  };
  EXPECT_EQ(run(1.0f, 1.0f).out[0], 2.0);  // hidden
  EXPECT_LT(run(1.0f, 1.0f).out_bound[0], 1e-4);
  EXPECT_LT(run(1e-30f, 0.0f).out_bound[0], 1e-4);
  EXPECT_TRUE(std::isnan(run(-1.0f, 0.0f).out[0]));
  EXPECT_EQ(run(-1.0f, 0.0f).out_bound[0], 0.0);
  EXPECT_EQ(run(1.0f, -0.9999999f).out_bound[0], kInf);  // roundings
  EXPECT_EQ(run(1e-40f, 0.0f).out_bound[0], kInf);       // a product that may vanish
  EXPECT_EQ(run(-3.2e38f, 3.0e38f).out_bound[0], kInf);  // the first product alone is infinite
}

TEST(ReferenceTest, ARowThatLosesItsOnlyKeyIsJudgedUnlessThatKeyMayOverflow) {
  Tiny tiny({1.0f}, {1.0f});
  tiny.q[0] = -kInfF;
  tiny.q[1] = 3e4f;
  const auto run = [&](float other) {
    tiny.k[1] = other;
    const ReferenceResult result = tiny.run();
    EXPECT_EQ(result.out[0], 0.0);  // -inf and something finite: the key is hidden
    EXPECT_EQ(result.lse[0], -kInf);
    EXPECT_EQ(result.out_bound[0], result.lse_bound[0]);
    return result.out_bound[0];
  };
  EXPECT_EQ(run(1.0f), 0.0);
  EXPECT_EQ(run(3e38f), kInf);  // in float32 that product is +inf, and the sum NaN
}

// A logit of 1e12 may be off by more than exp() has room for.
TEST(ReferenceTest, TheBoundOfLseGrowsWithTheLogits) {
  const ReferenceResult result = Tiny({1e12f, 0.0f}, {1.0f, 2.0f}).run();
  EXPECT_EQ(result.lse[0], static_cast<double>(1e12f));
  EXPECT_GT(result.lse_bound[0], 20 * 0x1p-24 * 1e12);
  EXPECT_LT(result.lse_bound[0], 40 * 0x1p-24 * 1e12);
  // Not with those of keys that do not count.
  EXPECT_LT(Tiny({0.0f, -1e12f}, {1.0f, 2.0f}).run().lse_bound[0], 1.0);
}

// A cap far above the logits changes nothing, and costs no digits.
TEST(ReferenceTest, ALargeSoftcapKeepsTheBoundSmall) {
  Tiny tiny({1.0f, -2.0f}, {1.0f, 0.0f});
  const ReferenceResult plain = tiny.run();
  tiny.options.softcap = 1e8f;
  const ReferenceResult capped = tiny.run();
  EXPECT_NEAR(capped.out[0], plain.out[0], 1e-12);
  EXPECT_LT(capped.out_bound[0], 2 * plain.out_bound[0]);
}

TEST(ReferenceTest, ErrorInBounds) {
  EXPECT_EQ(error_in_bounds(1.0, 1.5, 0.25), 2.0);
  EXPECT_EQ(error_in_bounds(1.5, 1.0, 1.0), 0.5);
  EXPECT_EQ(error_in_bounds(1.0, 1.0, 0.0), 0.0);
  EXPECT_EQ(error_in_bounds(1.0, 1.5, 0.0), kInf);
  EXPECT_EQ(error_in_bounds(kNan, kNan, 0.0), 0.0);
  EXPECT_EQ(error_in_bounds(kInf, kInf, 0.0), 0.0);
  EXPECT_EQ(error_in_bounds(kInf, -kInf, 0.0), kInf);
  EXPECT_EQ(error_in_bounds(kNan, 1.0, 1.0), kInf);
  EXPECT_EQ(error_in_bounds(1.0, kNan, 0.0), kInf);
  EXPECT_EQ(error_in_bounds(kNan, kInf, 0.0), kInf);
  EXPECT_EQ(error_in_bounds(kNan, 1.0, kInf), 0.0);
}

// A float32 backend in a few lines: one running state, one key at a time; `drop` leaves out one key.
void float_backend(const Problem& p, std::int64_t drop, std::vector<float>& out, std::vector<float>& lse) {
  const auto dim = index(p.v.head_dim);
  for (std::int64_t row = 0; row < p.rows(); ++row) {
    const std::int64_t h = row % p.q.heads, i = row / p.q.heads % p.q.queries, b = row / p.q.heads / p.q.queries;
    std::vector<float> q(index(p.q.head_dim)), k(q.size()), v(dim), o(dim, 0.0f);
    base::load_row_as_float(query_row(p.q, b, i, h), p.q.dtype, p.q.head_dim, q.data());
    float m = -kInfF, l = 0.0f;
    const KeyRange range = p.visible(b, i);
    for (std::int64_t t = range.begin; t < range.end; ++t) {
      if (t == drop) continue;
      base::load_row_as_float(kv_row(p.k, b, t, h / p.group()), p.k.dtype, p.k.head_dim, k.data());
      base::load_row_as_float(kv_row(p.v, b, t, h / p.group()), p.v.dtype, p.v.head_dim, v.data());
      float s = 0.0f;
      for (std::size_t d = 0; d < q.size(); ++d) s += q[d] * k[d];
      s *= p.scale * 1.44269504f * kv_scale(p.k, b, t, h / p.group());
      const float m_new = std::max(m, s);
      const float shrink = std::exp2(m - m_new), weight = std::exp2(s - m_new);
      l = l * shrink + weight;
      const float v_weight = weight * kv_scale(p.v, b, t, h / p.group());
      for (std::size_t d = 0; d < dim; ++d) o[d] = o[d] * shrink + v_weight * v[d];
      m = m_new;
    }
    for (std::size_t d = 0; d < dim; ++d) out[index(row) * dim + d] = o[d] / l;
    lse[index(row)] = m * 0.693147181f + std::log(l);
  }
}

double worst_error(const ReferenceResult& want, const std::vector<float>& out, const std::vector<float>& lse) {
  double worst = 0;
  for (std::size_t i = 0; i < out.size(); ++i) {
    worst = std::max(worst, error_in_bounds(out[i], want.out[i], want.out_bound[i]));
  }
  for (std::size_t i = 0; i < lse.size(); ++i) {
    worst = std::max(worst, error_in_bounds(lse[i], want.lse[i], want.lse_bound[i]));
  }
  return worst;
}

TEST(ReferenceTest, BoundsHoldForPlainFloat32AndCatchMistakes) {
  for (const DataKind kind : {DataKind::kNormal, DataKind::kPeaked, DataKind::kConstant, DataKind::kLargeLogits}) {
    for (const DType dtype : kAllDTypes) {
      Case shape;
      shape.k_type = shape.v_type = dtype;
      shape.data = kind;
      shape.queries = 2;
      shape.causal = true;
      shape.order.branches = 1;  // one running state is one branch
      const CaseData data(shape, 5);
      Problem problem = make_problem(data.input(), data.options());
      ErrorModel model;
      model.tile_tokens = 1;
      const ReferenceResult want = reference_attention(problem, model);
      SCOPED_TRACE(std::string(dtype_name(dtype)) + " data kind " + std::to_string(static_cast<int>(kind)));
      std::vector<float> out(want.out.size()), lse(want.lse.size());
      float_backend(problem, -1, out, lse);
      const double right = worst_error(want, out, lse);
      EXPECT_LE(right, 1.0);
      if (kind != DataKind::kNormal) continue;
      EXPECT_LT(*std::max_element(want.out_bound.begin(), want.out_bound.end()), 5e-4);

      float_backend(problem, 100, out, lse);
      EXPECT_GT(worst_error(want, out, lse), 10.0) << "a key left out";
      const float scale = problem.scale;
      problem.scale = scale * 1.01f;
      float_backend(problem, -1, out, lse);
      EXPECT_GT(worst_error(want, out, lse), 10.0) << "a scale off by one percent";
      problem.scale = scale;
      problem.causal = false;
      float_backend(problem, -1, out, lse);
      EXPECT_GT(worst_error(want, out, lse), 10.0) << "a mask forgotten";
    }
  }
}

TEST(CaseListTest, IsWhatItSays) {
  const std::vector<Case> cases = case_list();
  EXPECT_GE(cases.size(), 150u);
  EXPECT_LE(cases.size(), 300u);
  std::set<std::string> names;
  for (const Case& c : cases) EXPECT_TRUE(names.insert(c.name).second) << c.name;
  const std::vector<Case> again = case_list();
  for (std::size_t i = 0; i < cases.size(); ++i) EXPECT_EQ(cases[i].name, again[i].name);
  const auto some = random_cases(42, 20), same = random_cases(42, 20), other = random_cases(43, 20);
  int equal = 0;
  for (std::size_t i = 0; i < some.size(); ++i) {
    EXPECT_EQ(some[i].name, same[i].name);
    equal += some[i].tokens == other[i].tokens && some[i].head_dim == other[i].head_dim;
  }
  EXPECT_LT(equal, 5);
}

// Everything outside a case's rows is NaN, so finite answers mean that nothing outside was read.
TEST(CaseListTest, ValidAndFiniteEverywhere) {
  std::vector<Case> cases = case_list();
  for (Case& c : random_cases(7, 100)) cases.push_back(std::move(c));
  for (std::size_t c = 0; c < cases.size(); c += thinning()) {
    const Case& shape = cases[c];
    const CaseData data(shape, 3);
    const ReferenceResult result = reference_attention(make_problem(data.input(), data.options()), {});
    const auto finite = [](double x) { return std::isfinite(x); };
    EXPECT_TRUE(std::all_of(result.out.begin(), result.out.end(), finite)) << shape.name;
    EXPECT_TRUE(std::all_of(result.out_bound.begin(), result.out_bound.end(), finite)) << shape.name;
    EXPECT_TRUE(std::all_of(result.lse_bound.begin(), result.lse_bound.end(), finite)) << shape.name;
    EXPECT_TRUE(std::none_of(result.lse.begin(), result.lse.end(), [](double x) { return std::isnan(x); }))
        << shape.name;
  }
}

TEST(CaseListTest, ConstantValuesAreTheAnswer) {
  for (const Case& shape : case_list()) {
    if (shape.data != DataKind::kConstant || shape.sinks) continue;
    const CaseData data(shape, 9);
    const AttentionInput in = data.input();
    const ReferenceResult result = reference_attention(make_problem(in, data.options()), {});
    for (std::size_t i = 0; i < result.out.size(); ++i) {
      const auto d = static_cast<std::int64_t>(i) % shape.v_dim;
      EXPECT_NEAR(result.out[i], element(in.v, 0, 0, 0, d), 1e-12) << shape.name;
    }
  }
}

}  // namespace
}  // namespace treeattn::kernels
