// SPDX-License-Identifier: Apache-2.0
// One row of the energy: its logits, and the running sum over its keys that gives F and dF/dzeta in one pass.
//
// The running sum is the merge of src/merge/ once more, on purpose: in double and base e, sharing no line with it, so
// that a test of one against the other can fail.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "treeattn/energy.h"

namespace treeattn::energy_internal {

inline constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();

inline std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

// Row `row` of a dense [rows, width] array.
inline std::span<const double> row_of(std::span<const double> rows, std::int64_t row, std::int64_t width) {
  return rows.subspan(index(row * width), index(width));
}

inline double dot(std::span<const double> a, std::span<const double> b) {
  double sum = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

// scale * q . k_a + zeta . v_a; an empty zeta is not multiplied out. Throws InvalidArgument when it overflows.
double logit(const EnergyInput& in, std::span<const double> zeta, std::int64_t key);

// log(exp(a) + exp(b)); -inf is its identity.
inline double logaddexp(double a, double b) {
  const double high = std::max(a, b);
  if (high == kMinusInfinity) return high;  // (-inf) - (-inf) below would be NaN
  return high + std::log1p(std::exp(std::min(a, b) - high));
}

// (m, l, o) of the keys seen so far: the largest logit, sum exp(logit - m), sum exp(logit - m) * v.
class OnlineSoftmax {
 public:
  explicit OnlineSoftmax(std::int64_t v_dim) : o_(index(v_dim), 0.0) {}

  void reset() {
    m_ = kMinusInfinity;
    l_ = 0.0;
    std::fill(o_.begin(), o_.end(), 0.0);
  }

  // Requires a finite logit and v of v_dim elements.
  void add(double r, std::span<const double> v) {
    if (r > m_) {
      const double shrink = std::exp(m_ - r);  // exp(-inf) = 0 for the first key
      l_ *= shrink;
      for (double& o : o_) o *= shrink;
      m_ = r;
    }
    const double weight = std::exp(r - m_);
    l_ += weight;
    for (std::size_t i = 0; i < o_.size(); ++i) o_[i] += weight * v[i];
  }

  bool empty() const { return l_ == 0.0; }

  double energy() const { return m_ + std::log(l_); }  // no keys: -inf + -inf
  // Of logits that are all smaller by `shift`. Subtracted here and not from each of them: their differences, and so the
  // mean, would lose their digits to a large one. Requires !empty(). Throws InvalidArgument when it overflows.
  double energy_shifted_by(double shift) const;

  // Requires !empty().
  void mean(std::span<double> out) const {
    for (std::size_t i = 0; i < o_.size(); ++i) out[i] = o_[i] / l_;
  }

 private:
  double m_ = kMinusInfinity;
  double l_ = 0.0;
  std::vector<double> o_;
};

}  // namespace treeattn::energy_internal
