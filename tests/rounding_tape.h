// SPDX-License-Identifier: Apache-2.0
// What many small errors do to one result. A tape computes in double precision and remembers, beside every step, how
// far off the result of whoever computes it in fewer bits may be. A sweep back from one number gives its derivative by
// each of these errors (reverse differentiation), and so, to first order, how far off that number may be.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <ranges>
#include <span>
#include <utility>
#include <vector>

namespace treeattn::testing_model {

struct Value {
  std::int64_t rows = 0, cols = 0;
  std::vector<double> at;
  std::vector<double> gradient;  // of the number that was swept back from

  std::size_t size() const { return at.size(); }
  const double* row(std::int64_t i) const { return at.data() + i * cols; }
  double* gradient_row(std::int64_t i) { return gradient.data() + i * cols; }
};

// Of a number x = f(errors) with |error_i| <= c_i and derivatives g_i.
struct Spread {
  double deviation = 0;  // sqrt(sum (g_i c_i)^2 / 3): of errors that are independent and uniform
  double worst = 0;      // sum |g_i| c_i: all of them as large as can be, with the worst signs
};

class RoundingTape {
 public:
  Value& make(std::int64_t rows, std::int64_t cols) {
    const auto count = static_cast<std::size_t>(rows * cols);
    return values_.emplace_back(Value{rows, cols, std::vector<double>(count), {}});
  }
  Value& given(std::int64_t rows, std::int64_t cols, std::vector<double> values) {
    return values_.emplace_back(Value{rows, cols, std::move(values), {}});
  }
  // What a value's gradient means for the gradients of what it was made of.
  void back(std::function<void()> step) { steps_.push_back(std::move(step)); }
  // Inside such a step: `count` errors of at most c each, by whose sum the result has derivative g.
  void error(double g, double c, double count = 1) {
    squares_ += g * g * c * c * count / 3;
    worst_ += std::fabs(g) * c * count;
  }

  // x, with `count` errors of at most c in each element.
  Value& with_errors(Value& x, std::vector<double> c, double count = 1) {
    Value& y = given(x.rows, x.cols, x.at);
    back([this, &x, &y, c = std::move(c), count] {
      for (std::size_t i = 0; i < c.size(); ++i) {
        error(y.gradient[i], c[i], count);
        x.gradient[i] += y.gradient[i];
      }
    });
    return y;
  }
  // One in each, but those of a column may all go the same way: one error, of what they can do together.
  Value& with_common_errors(Value& x, std::vector<double> c) {
    Value& y = given(x.rows, x.cols, x.at);
    back([this, &x, &y, c = std::move(c)] {
      const auto cols = static_cast<std::size_t>(x.cols);
      std::vector<double> together(cols);
      for (std::size_t i = 0; i < c.size(); ++i) {
        together[i % cols] += std::fabs(y.gradient[i]) * c[i];
        x.gradient[i] += y.gradient[i];
      }
      for (const double sum : together) error(1, sum);
    });
    return y;
  }
  // One in each, of a size that follows from the element.
  template <class SizeOf>
  Value& with_errors_of(Value& x, SizeOf size_of) {
    std::vector<double> c(x.size());
    for (std::size_t i = 0; i < c.size(); ++i) c[i] = size_of(x.at[i]);
    return with_errors(x, std::move(c));
  }

  Value& map(Value& x, double (*f)(double), double (*derivative)(double)) {
    Value& y = make(x.rows, x.cols);
    for (std::size_t i = 0; i < x.size(); ++i) y.at[i] = f(x.at[i]);
    back([&x, &y, derivative] {
      for (std::size_t i = 0; i < x.size(); ++i) x.gradient[i] += y.gradient[i] * derivative(x.at[i]);
    });
    return y;
  }
  Value& times(Value& a, Value& b) {
    Value& y = make(a.rows, a.cols);
    for (std::size_t i = 0; i < a.size(); ++i) y.at[i] = a.at[i] * b.at[i];
    back([&a, &b, &y] {
      for (std::size_t i = 0; i < a.size(); ++i) {
        a.gradient[i] += y.gradient[i] * b.at[i];
        b.gradient[i] += y.gradient[i] * a.at[i];
      }
    });
    return y;
  }
  Value& plus(Value& a, Value& b) {
    Value& y = make(a.rows, a.cols);
    for (std::size_t i = 0; i < a.size(); ++i) y.at[i] = a.at[i] + b.at[i];
    back([&a, &b, &y] {
      for (std::size_t i = 0; i < a.size(); ++i) {
        a.gradient[i] += y.gradient[i];
        b.gradient[i] += y.gradient[i];
      }
    });
    return y;
  }

  // y: row i is row `rows[i]` of x.
  Value& gather(Value& x, std::vector<std::size_t> rows) {
    Value& y = make(static_cast<std::int64_t>(rows.size()), x.cols);
    const auto cols = static_cast<std::size_t>(x.cols);
    const auto from = [rows = std::move(rows), cols](std::size_t i) { return rows[i / cols] * cols + i % cols; };
    for (std::size_t i = 0; i < y.size(); ++i) y.at[i] = x.at[from(i)];
    back([&x, &y, from] {
      for (std::size_t i = 0; i < y.size(); ++i) x.gradient[from(i)] += y.gradient[i];
    });
    return y;
  }

  // Of the number sum_i direction_i x_i. Leaves its gradient in every value.
  Spread spread(Value& x, std::span<const double> direction) {
    for (Value& value : values_) value.gradient.assign(value.size(), 0.0);
    x.gradient.assign(direction.begin(), direction.end());
    squares_ = worst_ = 0;
    for (const auto& step : std::views::reverse(steps_)) step();
    return {std::sqrt(squares_), worst_};
  }

 private:
  std::deque<Value> values_;  // which stay where they are
  std::vector<std::function<void()>> steps_;
  double squares_ = 0, worst_ = 0;
};

}  // namespace treeattn::testing_model
