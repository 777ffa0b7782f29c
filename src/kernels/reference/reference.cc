// SPDX-License-Identifier: Apache-2.0
// The oracle: attention in double, and its rounding-error bound as derived in docs/exactness.md.
#include "kernels/reference/reference.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>

#include "base/half.h"

namespace treeattn::kernels {

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kTiny = 0x1p-126;     // weights are clamped here; also what flushing a float32 denormal can lose
constexpr double kTooLarge = 0x1p126;  // intermediate sums of this size may overflow float32
constexpr double kLog2E = 1.4426950408889634;

std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

// Error of n roundings of relative size u, all orders included.
double gamma(double n, double u) { return n * u / (1.0 - n * u); }

// exp(log_value), large but finite when it overflows.
double exp_clamped(double log_value) { return std::exp(std::min(log_value, 600.0)); }

// The rows of one KV head of one sequence, as doubles; a value's scale is applied, a key's multiplies its logit.
struct HeadRows {
  std::int64_t first = 0;  // token of row 0
  std::int64_t dim = 0;
  std::vector<double> values;  // [tokens, dim]
  std::vector<double> scales;  // [tokens]
  std::vector<double> sizes;   // [tokens]: sum of the magnitudes of a row

  const double* row(std::int64_t token) const { return values.data() + (token - first) * dim; }
  double scale(std::int64_t token) const { return scales[index(token - first)]; }
  double size(std::int64_t token) const { return sizes[index(token - first)]; }
};

void load_rows(const KvView& view, std::int64_t batch, std::int64_t head, KeyRange tokens, bool apply_scales,
               HeadRows& out) {
  const std::size_t element = dtype_size(view.dtype);
  out.first = tokens.begin;
  out.dim = view.head_dim;
  out.values.resize(index((tokens.end - tokens.begin) * view.head_dim));
  out.scales.resize(index(tokens.end - tokens.begin));
  out.sizes.resize(index(tokens.end - tokens.begin));
  double* value = out.values.data();
  for (std::int64_t token = tokens.begin; token < tokens.end; ++token) {
    const std::byte* row = kv_row(view, batch, token, head);
    const double scale = kv_scale(view, batch, token, head);
    double size = 0;
    for (std::int64_t d = 0; d < view.head_dim; ++d) {
      const double stored = base::load_as_float(row + index(d) * element, view.dtype);
      *value = apply_scales ? scale * stored : stored;
      size += std::fabs(*value++);
    }
    out.scales[index(token - tokens.begin)] = scale;
    out.sizes[index(token - tokens.begin)] = size;
  }
}

struct Logit {
  double value = 0;  // natural units; -inf: masked
  double error = 0;  // what a float32 backend may be off by, before the maximum is subtracted
  bool comparable = true;
  bool sign_known = true;  // of one that is infinite
};

// Of the tanh of a number of size z. A backend computes small ones by their series, or as well as that.
double tanh_error(const ErrorModel& model, double z) {
  const double u = model.unit_roundoff;
  return z < 1.0 / 16 ? 8 * u * z : model.exp2_error + 8 * u;
}

// Sum of the magnitudes of those products that are finite.
double finite_magnitude(const double* q, const double* k, std::int64_t dims) {
  double sum = 0;
  for (std::int64_t d = 0; d < dims; ++d) {
    const double product = q[d] * k[d];
    if (std::isfinite(product)) sum += std::fabs(product);
  }
  return sum;
}

// docs/exactness.md, "The logit".
Logit make_logit(const Problem& problem, const ErrorModel& model, const double* q, double q_max, const HeadRows& keys,
                 std::int64_t token) {
  const double u = model.unit_roundoff;
  const auto dims = static_cast<double>(problem.q.head_dim);
  const double scale = problem.scale;
  const double* k = keys.row(token);
  const double k_scale = keys.scale(token);
  double k_sum = keys.size(token);
  // Four sums side by side, for the compiler to make SIMD of: a head_dim is a multiple of 8.
  double dots[4] = {}, magnitudes[4] = {};
  for (std::int64_t d = 0; d < problem.q.head_dim; d += 4) {
    for (std::int64_t i = 0; i < 4; ++i) {
      const double product = q[d + i] * k[d + i];
      dots[i] += product;
      magnitudes[i] += std::fabs(product);
    }
  }
  double dot = (dots[0] + dots[1]) + (dots[2] + dots[3]);
  double magnitude = (magnitudes[0] + magnitudes[1]) + (magnitudes[2] + magnitudes[3]);
  // All that an infinite scale leaves of a product is its sign. Roundings may change that, underflow make the product 0
  // and overflow of a part of it the other infinity.
  const double rounding = gamma(dims, u) * magnitude + model.query_error * q_max * k_sum + dims * kTiny;
  const bool sign_known = magnitude == 0 || (magnitude < kTooLarge && std::fabs(dot) > rounding);
  const double unscaled = magnitude;
  dot *= k_scale;
  magnitude *= std::fabs(k_scale);
  k_sum *= std::fabs(k_scale);
  Logit logit;
  logit.value = scale * dot;
  const double cap = problem.softcap;
  if (!std::isfinite(magnitude)) {  // infinite or NaN inputs: there is no rounding in those
    if (cap > 0) logit.value = cap * std::tanh(logit.value / cap);
    logit.sign_known = sign_known || !std::isinf(k_scale);
    // Else the other products may overflow to the other infinity.
    logit.comparable = finite_magnitude(q, k, problem.q.head_dim) < kTooLarge;
    return logit;
  }
  const double factor = std::max({1.0, kLog2E * std::fabs(scale), cap > 0 ? std::fabs(scale) / cap : 0.0});
  logit.comparable = !(std::max(unscaled, magnitude) * factor >= kTooLarge);
  const double underflow =
      kTiny * (k_sum + (dims + 4) * factor * std::max(1.0, std::fabs(k_scale)) * std::max(1.0, cap));
  logit.error = gamma(dims + 4, u) * std::fabs(scale) * magnitude + underflow;
  logit.error += model.query_error * q_max * k_sum * std::fabs(scale) + model.logit_floor;
  const double least = model.least_factor;
  logit.error += dims * u * std::fabs(scale) * least * (q_max + k_sum + least);
  if (cap > 0) {
    const double z = std::fabs(logit.value) / cap;
    const double moved = cap * (std::tanh(z) - std::tanh(z - logit.error / cap));
    logit.value = cap * std::tanh(logit.value / cap);
    logit.error = moved + cap * tanh_error(model, z) + 3 * u * std::fabs(logit.value);
  }
  return logit;
}

void add_alibi(Logit& logit, double slope, std::int64_t distance, double u) {
  const double bias = slope * static_cast<double>(distance);
  logit.error += 5 * u * std::fabs(bias) + u * (std::fabs(logit.value) + std::fabs(bias));
  logit.comparable = logit.comparable && std::fabs(bias) < kTooLarge;
  logit.value += bias;
}

// What happens to a key's weight between its tile and the root, at most.
struct Path {
  double rescales = 0;   // multiplications by 2^(old maximum - new maximum)
  double additions = 0;  // sums it passes through, those of the rescalings apart
};

// Of all keys of a chunk.
Path path_of(const Problem& problem, const ErrorModel& model, KeyRange range, std::int64_t own) {
  const ReductionOrder& order = problem.order;
  const std::int64_t first = plan::chunk_of(order, problem.first_key + range.begin);
  const std::int64_t last = plan::chunk_of(order, problem.first_key + range.end - 1);
  // Of its branch, and in sight.
  const auto chunks = static_cast<double>(plan::chunks_of_leaf(order, plan::leaf_of_chunk(order, own), first, last));
  const double keys =
      std::min(chunks * static_cast<double>(order.chunk_tokens), static_cast<double>(range.end - range.begin));
  const double tiles = std::ceil(keys / model.tile_tokens) + chunks;  // a chunk may begin and end inside a tile
  Path path;
  path.rescales =
      tiles + chunks + plan::log2_exact(order.branches) + 2 + model.extra_merges;  // 2: another shard, a sink
  const double terms = model.carried ? std::max<double>(keys, model.serial_terms) : model.serial_terms;
  path.additions = terms * model.additions_per_key;
  return path;
}

// One term of the softmax sum: a key, or the sink (token -1).
struct Term {
  std::int64_t token = -1;
  double logit = 0;
  double weight = 0;    // exp(logit - max)
  double common = 0;    // log of the largest factor by which its weight may be off in l and o alike
  double separate = 0;  // likewise, in l and o independently
};

// One query row, and where its results go.
struct Row {
  const double* q = nullptr;  // [q.head_dim]
  double q_max = 0;           // largest magnitude in it
  std::int64_t head = 0;
  std::int64_t position = 0;  // global
  KeyRange range;             // the keys it sees
  double* out = nullptr;      // [v.head_dim]
  double* out_bound = nullptr;
  double* lse = nullptr;
  double* lse_bound = nullptr;
};

class RowReference {
 public:
  RowReference(const Problem& problem, const ErrorModel& model) : problem_(problem), model_(model) {}

  void run(const Row& row, const HeadRows& k, const HeadRows& v) {
    const std::int64_t dims = problem_.v.head_dim;
    std::fill(row.out, row.out + dims, 0.0);
    std::fill(row.out_bound, row.out_bound + dims, 0.0);
    *row.lse = -kInfinity;
    *row.lse_bound = 0.0;
    collect(row, k);
    // Where no key is left, that too may be the doing of a logit which float32 cannot have.
    if (!sign_known_ || (terms_.empty() && !comparable_)) {
      std::fill(row.out_bound, row.out_bound + dims, kInfinity);
      *row.lse_bound = kInfinity;
      return;
    }
    if (terms_.empty()) return;
    if (poisoned_) {
      std::fill(row.out, row.out + dims, kNan);
      *row.lse = kNan;
      return;
    }
    normalise(row.range);
    average(v, row.out);
    *row.lse = max_ + log_sum_;
    bound_lse(*row.lse, row.lse_bound);
    bound_out(v, row.out, row.out_bound);
  }

 private:
  void collect(const Row& row, const HeadRows& k) {
    const double u = model_.unit_roundoff;
    terms_.clear();
    poisoned_ = false;
    comparable_ = sign_known_ = true;
    for (std::int64_t token = row.range.begin; token < row.range.end; ++token) {
      Logit logit = make_logit(problem_, model_, row.q, row.q_max, k, token);
      if (!problem_.alibi_slopes.empty()) {
        add_alibi(logit, problem_.alibi_slopes[index(row.head)], problem_.first_key + token - row.position, u);
      }
      sign_known_ = sign_known_ && logit.sign_known;
      comparable_ = comparable_ && logit.comparable;
      if (logit.value == -kInfinity) continue;
      poisoned_ = poisoned_ || std::isnan(logit.value) || logit.value == kInfinity;
      terms_.push_back({token, logit.value, 0, logit.error, 0});
    }
    if (problem_.sinks.empty()) return;
    const double sink = problem_.sinks[index(row.head)];
    if (sink != -kInfinity) terms_.push_back({-1, sink, 0, 3 * u * std::fabs(sink), 0});
  }

  void normalise(KeyRange range) {
    const double u = model_.unit_roundoff;
    double largest_error = 0;
    max_ = -kInfinity;
    for (const Term& term : terms_) {
      max_ = std::max(max_, term.logit);
      largest_error = std::max(largest_error, term.common);
    }
    sum_ = 0;
    const double largest_lse_gap = 126 * std::log(2.0) + std::log(static_cast<double>(terms_.size()) + 1);
    std::int64_t chunk = -1;
    Path of_chunk;
    for (Term& term : terms_) {
      // Clamped above zero, so that an infinite value counts whatever its weight.
      term.weight = std::max(std::exp(term.logit - max_), std::numeric_limits<double>::min());
      sum_ += term.weight;
      const bool sink = term.token < 0;
      if (!sink) {
        const std::int64_t own = plan::chunk_of(problem_.order, problem_.first_key + term.token);
        if (own != chunk) of_chunk = path_of(problem_, model_, range, own);
        chunk = own;
      }
      const Path path = sink ? Path{1, 0} : of_chunk;
      const double stored = sink ? 0 : model_.weight_error / (1 - model_.weight_error);
      term.common += u * (max_ - term.logit + 2 * largest_error) + gamma(path.rescales, model_.exp2_error);
      // A part that counts has an lse within 126 powers of two of the largest.
      term.common += model_.lse_error * (std::fabs(max_) + largest_lse_gap);
      term.separate = stored + gamma(path.additions + 2 * path.rescales + 3, u);
    }
    log_sum_ = std::log(sum_);
  }

  void average(const HeadRows& v, double* out) const {
    for (const Term& term : terms_) {
      if (term.token < 0) continue;
      const double* value = v.row(term.token);
      for (std::int64_t d = 0; d < v.dim; ++d) out[d] += term.weight * value[d];
    }
    for (std::int64_t d = 0; d < v.dim; ++d) out[d] /= sum_;
  }

  // Share of the term in the softmax, times e^grow.
  double share(const Term& term, double grow) const { return exp_clamped(term.logit - max_ - log_sum_ + grow); }

  // Logarithm of the sum of all shares, each times e^(sign * what its weight may be off by). No exp() here overflows.
  double log_sum_of_shares(double sign) const {
    const auto exponent = [&](const Term& term) {
      return term.logit - max_ - log_sum_ + sign * (term.common + term.separate);
    };
    double largest = -kInfinity, sum = 0;
    for (const Term& term : terms_) largest = std::max(largest, exponent(term));
    for (const Term& term : terms_) sum += std::exp(exponent(term) - largest);
    return largest + std::log(sum);
  }

  void bound_lse(double lse, double* bound) {
    const double most = log_sum_of_shares(1), least = log_sum_of_shares(-1);
    least_ = std::max(std::exp(least), std::numeric_limits<double>::min());
    const double u = model_.unit_roundoff;
    const double final_roundings = 4 * u * (std::fabs(max_) + std::fabs(log_sum_)) + 2 * u * std::fabs(lse) + 2 * u;
    *bound = std::max(most, -least) + final_roundings + clamped_weight();
    if (!comparable_) *bound = kInfinity;
  }

  void bound_out(const HeadRows& v, const double* out, double* bound) {
    largest_.assign(index(v.dim), 0.0);
    off_by_floor_.assign(index(v.dim), 0.0);
    double largest_separate = 0, all_rounded = 0;
    double heaviest = 0, largest_scale = 0;  // a weight with its value's scale; what that is at most for any weights
    if (model_.weight_floor > 0 || model_.product_floor > 0) {
      for (const Term& term : terms_) {
        if (term.token < 0) continue;
        const double scale = std::fabs(v.scale(term.token));
        heaviest = std::max(heaviest, share(term, term.common) * scale);
        largest_scale = std::max(largest_scale, scale);
      }
    }
    const double floor = model_.weight_floor * heaviest, floor_of_any = model_.weight_floor * largest_scale;
    const double lost_products = model_.product_floor * static_cast<double>(terms_.size());
    for (const Term& term : terms_) {
      // e^c - 1 for small c; the logarithmic form cannot overflow where c is large and the share is nothing.
      const double moved = term.common < 0.5 ? term.weight / sum_ * std::expm1(term.common) : share(term, term.common);
      const double rounded = share(term, term.common) * std::expm1(term.separate);
      largest_separate = std::max(largest_separate, term.separate);
      all_rounded += rounded;
      if (term.token < 0) {  // the value of a sink is 0
        for (std::int64_t d = 0; d < v.dim; ++d) bound[d] += moved * std::fabs(out[d]);
        continue;
      }
      const double* value = v.row(term.token);
      const double scale = std::fabs(v.scale(term.token));
      const double of_value = rounded + (scale == 0 ? 0 : floor / scale);  // a scale of 0 leaves nothing to lose
      for (std::int64_t d = 0; d < v.dim; ++d) {
        bound[d] += moved * std::fabs(value[d] - out[d]) + of_value * std::fabs(value[d]);
      }
      enlarge(value, std::isfinite(v.size(term.token)), largest_);
      if (model_.weight_floor == 0 || scale == 0) continue;
      for (std::int64_t d = 0; d < v.dim; ++d) off_by_floor_[index(d)] += floor_of_any / scale * std::fabs(value[d]);
    }
    for (std::int64_t d = 0; d < v.dim; ++d) {
      const double size = std::fabs(out[d]);
      const double largest = largest_[index(d)];
      const bool overflows = largest * static_cast<double>(terms_.size()) >= kTooLarge;
      bound[d] += all_rounded * size + lost_products * heaviest;
      if (!std::isfinite(out[d])) {
        // A logit that overflows to -inf hides its value; a sum that overflows may meet the other infinity.
        bound[d] = !comparable_ || (overflows && !std::isnan(out[d])) ? kInfinity : 0;
        continue;
      }
      // Whatever happened to the weights, they are positive: the result stays an average of the values and 0, but for
      // what limbs lose, which is no more than the weights themselves.
      const double lost = std::min(off_by_floor_[index(d)], largest) + lost_products * largest_scale;
      const double average_of_any = (largest + lost) * (1 + std::expm1(2 * largest_separate)) + size;
      bound[d] = std::min(bound[d] / least_, average_of_any);
      bound[d] += 2 * model_.unit_roundoff * size + clamped_weight() * (largest + size + 1);
      if (!comparable_ || overflows) bound[d] = kInfinity;
    }
  }

  // Of every column the largest number that is finite. Most rows have no other: a loop of its own, for SIMD.
  static void enlarge(const double* value, bool all_finite, std::vector<double>& largest) {
    double* most = largest.data();
    const std::size_t dims = largest.size();
    const auto larger = [](double a, double b) { return a < b ? b : a; };
    if (all_finite) {
      for (std::size_t d = 0; d < dims; ++d) most[d] = larger(most[d], std::fabs(value[d]));
      return;
    }
    for (std::size_t d = 0; d < dims; ++d) {
      if (std::isfinite(value[d])) most[d] = larger(most[d], std::fabs(value[d]));
    }
  }

  // No weight is below 2^-126, however small it should be, and a product smaller than that may be flushed to zero.
  double clamped_weight() const { return 2 * kTiny * static_cast<double>(terms_.size() + 1); }

  const Problem& problem_;
  const ErrorModel& model_;
  std::vector<Term> terms_;
  std::vector<double> largest_, off_by_floor_;  // of every column
  double max_ = 0;
  double sum_ = 0;
  double log_sum_ = 0;
  double least_ = 0;  // the smallest factor by which l may be off
  bool poisoned_ = false;
  bool comparable_ = true, sign_known_ = true;
};

}  // namespace

ReferenceResult reference_attention(const Problem& problem, const ErrorModel& model) {
  const QueryView& view = problem.q;
  const std::size_t rows = index(problem.rows());
  const std::size_t v_dim = index(problem.v.head_dim);
  const std::size_t q_size = dtype_size(view.dtype);
  ReferenceResult result{std::vector<double>(rows * v_dim), std::vector<double>(rows),
                         std::vector<double>(rows * v_dim), std::vector<double>(rows)};
  RowReference row_reference(problem, model);
  std::vector<double> q(index(view.head_dim));
  HeadRows k, v;
  for (std::int64_t b = 0; b < view.batch; ++b) {
    const KeyRange all = problem.visible_to_any(b);
    for (std::int64_t h = 0; h < view.heads; ++h) {
      if (h % problem.group() == 0) {
        load_rows(problem.k, b, h / problem.group(), all, false, k);
        load_rows(problem.v, b, h / problem.group(), all, true, v);
      }
      for (std::int64_t i = 0; i < view.queries; ++i) {
        const std::byte* q_row = query_row(view, b, i, h);
        double q_max = 0;
        for (std::size_t d = 0; d < q.size(); ++d) {
          q[d] = base::load_as_float(q_row + d * q_size, view.dtype);
          q_max = std::max(q_max, std::fabs(q[d]));
        }
        const std::size_t r = index((b * view.queries + i) * view.heads + h);
        row_reference.run({q.data(), q_max, h, problem.first_query[index(b)] + i, problem.visible(b, i),
                           &result.out[r * v_dim], &result.out_bound[r * v_dim], &result.lse[r], &result.lse_bound[r]},
                          k, v);
      }
    }
  }
  return result;
}

double error_in_bounds(double got, double want, double bound) {
  if (bound == kInfinity) return 0;
  if (std::isnan(got) && std::isnan(want)) return 0;
  if (got == want) return 0;
  if (!std::isfinite(got) || !std::isfinite(want)) return kInfinity;
  return std::fabs(got - want) / bound;
}

double worst_in_bounds(std::span<const float> out, std::span<const float> lse, const ReferenceResult& want) {
  double worst = 0;
  const auto look = [&](std::span<const float> got, const std::vector<double>& exact,
                        const std::vector<double>& bounds) {
    for (std::size_t i = 0; i < got.size(); ++i) {
      const double error = error_in_bounds(static_cast<double>(got[i]), exact[i], bounds[i]);
      if (!(error <= worst)) worst = std::isnan(error) ? kInfinity : error;
    }
  };
  look(out, want.out, want.out_bound);
  look(lse, want.lse, want.lse_bound);
  return worst;
}

}  // namespace treeattn::kernels
