// SPDX-License-Identifier: Apache-2.0
// What the tests of the model's operations share, on whatever backend: random numbers, weights in the host's memory,
// and the comparison with double precision.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "base/half.h"
#include "kernels/model_ops.h"
#include "kernels/reference/model_reference.h"

namespace treeattn::kernels {

inline constexpr float kInf = std::numeric_limits<float>::infinity();
inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
inline constexpr DType kWeightTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kInt8};

inline std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

inline std::uint64_t seed() {
  static const std::uint64_t chosen = [] {
    const char* forced = std::getenv("TREEATTN_SEED");
    const std::uint64_t value = forced ? std::strtoull(forced, nullptr, 10) : std::random_device()();
    std::printf("TREEATTN_SEED=%llu\n", static_cast<unsigned long long>(value));
    return value;
  }();
  return chosen;
}

// Random numbers of one test.
class Noise {
 public:
  std::vector<float> normal(std::int64_t count, float size = 1.0f) {
    std::vector<float> result(index(count));
    std::normal_distribution<float> draw(0.0f, size);
    for (float& x : result) x = draw(engine_);
    return result;
  }
  std::int64_t below(std::int64_t end) { return std::uniform_int_distribution<std::int64_t>(0, end - 1)(engine_); }

 private:
  std::mt19937_64 engine_{seed()};
};

// A weight matrix and its memory.
struct HostWeights {
  std::vector<std::byte> data;
  std::vector<float> scales;
  WeightMatrix matrix;

  HostWeights(const std::vector<float>& values, DType dtype, std::int64_t rows, std::int64_t cols) {
    matrix = {nullptr, dtype, rows, cols, nullptr, 0};
    data.resize(values.size() * dtype_size(dtype));
    if (dtype == DType::kInt8) {
      static ThreadPool pool(2);
      scales.resize(values.size() / kWeightGroup);
      const WeightMatrix plain{values.data(), DType::kFloat32, rows, cols, nullptr, 0};
      quantize_weights(plain, reinterpret_cast<std::int8_t*>(data.data()), scales.data(), pool);
      matrix.scales = scales.data();
      matrix.group = kWeightGroup;
    } else {
      const std::size_t size = dtype_size(dtype);
      for (std::size_t i = 0; i < values.size(); ++i) base::store_from_float(&data[i * size], values[i], dtype);
    }
    matrix.data = data.data();
  }
  HostWeights(const HostWeights&) = delete;
};

// Columns a type accepts, near the number asked for.
inline std::int64_t accepted_cols(DType dtype, std::int64_t cols) {
  return dtype == DType::kInt8 ? (cols + kWeightGroup - 1) / kWeightGroup * kWeightGroup : cols;
}

inline void expect_within(const std::vector<float>& got, const BoundedValues& want, const std::string& what) {
  ASSERT_EQ(got.size(), want.value.size()) << what;
  double worst = 0;
  std::size_t at = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double error = error_in_bounds(got[i], want.value[i], want.bound[i]);
    if (!(error <= worst)) worst = error, at = i;
  }
  EXPECT_LE(worst, 1.0) << what << ": [" << at << "] = " << got[at] << ", wanted " << want.value[at] << " +- "
                        << want.bound[at];
}

inline bool same_bits(const float* a, const float* b, std::size_t count) {
  return std::memcmp(a, b, count * sizeof(float)) == 0;
}

}  // namespace treeattn::kernels
