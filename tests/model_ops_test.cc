// SPDX-License-Identifier: Apache-2.0
// The operations of a decoder layer on every instruction set this processor has, against double precision. The bounds
// are derived in src/kernels/reference/model_reference.cc.
#include "kernels/model_ops.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <deque>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "base/half.h"
#include "kernels/cpu/dispatch.h"
#include "kernels/cpu/row_parts.h"
#include "kernels/reference/model_reference.h"
#include "model_ops_data.h"
#include "thinning.h"
#include "treeattn/error.h"

namespace treeattn::kernels {
namespace {

ThreadPool& pool_of(int threads) {
  static ThreadPool one(1), two(2), three(3);
  return threads == 1 ? one : threads == 2 ? two : three;
}

using Weights = HostWeights;

class ModelOpsTest : public testing::TestWithParam<const CpuTarget*> {
 protected:
  const CpuTarget& target() const { return *GetParam(); }
  std::unique_ptr<ModelOps> ops(int threads = 2) const { return cpu_model_ops_on(target(), pool_of(threads)); }

  LinearModel linear_model(DType dtype) const {
    const LinearOps& linear = target().model->linear[static_cast<int>(dtype)];
    return {linear.activations, linear.unit_roundoff, linear.flushes_subnormals};
  }

  // Starts from NaN, which whatever is not written leaves in place.
  std::vector<float> linear(const Weights& w, const std::vector<float>& x, int threads = 2) const {
    const std::int64_t rows = static_cast<std::int64_t>(x.size()) / w.matrix.cols;
    std::vector<float> y(index(rows * w.matrix.rows), kNan);
    ops(threads)->linear(w.matrix, x.data(), rows, y.data(), false);
    return y;
  }

  Noise noise_;
};

// Every row of every map once, whoever comes first: one thread that does all, or all by turns.
TEST(RowPartsTest, EveryRowIsWorkedOnOnce) {
  const std::int64_t cols = 1 << 14;  // so that a few rows are enough for a thread
  const float nothing = 0;
  for (const int streams : {1, 4}) {
    for (const int threads : {1, 2, 3, 7}) {
      for (std::int64_t n = 1; n < 160; n += n < 40 ? 1 : 13) {
        const WeightMatrix a{&nothing, DType::kFloat32, n, cols}, b{&nothing, DType::kFloat32, 9, cols};
        const Projection maps[] = {{a, nullptr}, {b, nullptr}};
        for (const int first : {0, threads - 1}) {
          RowParts parts(maps, streams, threads);
          std::vector<std::vector<int>> done = {std::vector<int>(index(n)), std::vector<int>(9)};
          for (int i = 0; i < parts.seats(); ++i) {
            parts.work((first + i) % parts.seats(), [&](const Projection& map, const RowParts::Rows& rows) {
              std::vector<int>& counts = done[&map == &maps[0] ? 0 : 1];
              for (std::int64_t row = rows.begin; row < rows.end; ++row) {
                for (int s = 0; s < (rows.stream > 0 ? 4 : 1); ++s) ++counts.at(index(row + s * rows.stream));
              }
            });
          }
          for (const std::vector<int>& counts : done) {
            EXPECT_EQ(std::count(counts.begin(), counts.end(), 1), static_cast<std::ptrdiff_t>(counts.size()))
                << n << " rows, " << streams << " streams, " << threads << " threads";
          }
        }
      }
    }
  }
}

struct Shape {
  std::int64_t rows, cols;
};
// One element; odd sizes; more than one block of weights (64 rows) and of depth (1024 columns).
constexpr Shape kShapes[] = {{1, 1}, {3, 5}, {4, 8}, {7, 31}, {13, 100}, {66, 130}, {11, 1031}, {9, 2060}};
constexpr std::int64_t kRows[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 17, 18, 19, 24, 33};

std::string name_of(DType dtype, Shape shape, std::int64_t rows) {
  return std::string(dtype_name(dtype)) + " [" + std::to_string(shape.rows) + ", " + std::to_string(shape.cols) +
         "], " + std::to_string(rows) + " rows";
}

TEST_P(ModelOpsTest, LinearIsWithinItsBound) {
  std::size_t turn = 0;
  for (const DType dtype : kWeightTypes) {
    for (Shape shape : kShapes) {
      shape.cols = accepted_cols(dtype, shape.cols);
      const Weights w(noise_.normal(shape.rows * shape.cols, 0.1f), dtype, shape.rows, shape.cols);
      for (const std::int64_t rows : kRows) {
        if (rows > 9 && shape.cols > 1000) continue;
        if (thinning() > 1 && turn++ % 3 != 0) continue;
        const std::vector<float> x = noise_.normal(rows * shape.cols);
        const std::string what = name_of(dtype, shape, rows);
        expect_within(linear(w, x), reference_linear(w.matrix, x, {}, linear_model(dtype)), what);

        const std::vector<float> before = noise_.normal(rows * shape.rows);
        std::vector<float> y = before;
        ops()->linear(w.matrix, x.data(), rows, y.data(), true);
        expect_within(y, reference_linear(w.matrix, x, before, linear_model(dtype)), what + ", added");
      }
    }
  }
}

// The bound above is for activations rounded as documented. This one is for what that rounding does: half a unit of
// the last of 8 bits of bfloat16, 2^-8 of an element; half a step of 1/127 of the largest of a group, and a little for
// the rounding of the scale and of the quotient.
TEST_P(ModelOpsTest, RoundingOfActivationsIsWhatIsDocumented) {
  const std::int64_t cols = 160;
  const std::vector<float> x = noise_.normal(cols);
  for (const DType dtype : kWeightTypes) {
    const Activations activations = linear_model(dtype).activations;
    const std::string name = target().name;
    const bool narrow = name == "NEON_BF16" || name == "AVX512_BF16" || name == "AMX";
    EXPECT_EQ(activations, dtype == DType::kInt8                 ? Activations::kInt8Groups
                           : dtype == DType::kBFloat16 && narrow ? Activations::kBFloat16
                                                                 : Activations::kFloat32);
    const std::vector<double> rounded = rounded_activations(x, activations);
    // The identity shows the activations themselves.
    std::vector<float> identity(index(cols * cols), 0.0f);
    for (std::int64_t i = 0; i < cols; ++i) identity[index(i * cols + i)] = 1.0f;
    const std::vector<float> y = linear(Weights(identity, dtype, cols, cols), x);
    for (std::int64_t i = 0; i < cols; ++i) {
      double largest = 0;
      for (std::int64_t j = i / kWeightGroup * kWeightGroup; j < (i / kWeightGroup + 1) * kWeightGroup; ++j) {
        largest = std::max(largest, std::fabs(static_cast<double>(x[index(j)])));
      }
      const double size = std::fabs(static_cast<double>(x[index(i)]));
      const double bound = activations == Activations::kFloat32    ? 0.0
                           : activations == Activations::kBFloat16 ? size * 0x1p-8
                                                                   : largest / 127 * (0.5 + 127 * 0x1p-22);
      EXPECT_LE(std::fabs(rounded[index(i)] - static_cast<double>(x[index(i)])), bound);
      EXPECT_NEAR(y[index(i)], rounded[index(i)], size * 0x1p-20) << dtype_name(dtype) << " " << i;
    }
  }
}

// A row alone, and with others, on 1, 2 and 3 threads: the same bits.
TEST_P(ModelOpsTest, RowsOfALinearMapDependOnNothingElse) {
  for (const DType dtype : kWeightTypes) {
    for (Shape shape : {Shape{150, 70}, Shape{67, 1031}, Shape{5, 2060}}) {
      shape.cols = accepted_cols(dtype, shape.cols);
      const Weights w(noise_.normal(shape.rows * shape.cols), dtype, shape.rows, shape.cols);
      std::vector<float> x = noise_.normal(33 * shape.cols);
      // One row spoils itself only.
      x[index(7 * shape.cols + noise_.below(shape.cols))] = kNan;
      const std::vector<float> together = linear(w, x, 1);
      for (const int threads : {2, 3}) {
        EXPECT_TRUE(same_bits(linear(w, x, threads).data(), together.data(), together.size()))
            << name_of(dtype, shape, 33) << ", " << threads << " threads";
      }
      for (const std::int64_t rows : kRows) {
        const std::int64_t first = noise_.below(33 - rows + 1);
        const std::vector<float> part(x.begin() + first * shape.cols, x.begin() + (first + rows) * shape.cols);
        const std::vector<float> alone = linear(w, part, static_cast<int>(1 + noise_.below(3)));
        EXPECT_TRUE(same_bits(alone.data(), together.data() + first * shape.rows, alone.size()))
            << name_of(dtype, shape, rows) << " from row " << first;
      }
    }
  }
}

// Several maps of one x in one call, of several types: the bits of one call each.
TEST_P(ModelOpsTest, MapsTogetherAreMapsAlone) {
  const std::int64_t cols = 2048;
  // Enough for three threads, and so few that there is work for one.
  const std::vector<float> many = noise_.normal(401 * cols), some = noise_.normal(37 * cols),
                           few = noise_.normal(5 * cols), floats = noise_.normal(64 * cols);
  for (const DType dtype : kWeightTypes) {
    std::deque<Weights> weights;  // which do not move
    for (const auto* numbers : {&many, &some, &few}) {
      weights.emplace_back(*numbers, dtype, std::ssize(*numbers) / cols, cols);
    }
    weights.emplace_back(floats, DType::kFloat32, 64, cols);
    for (const std::int64_t rows : {1, 3}) {
      const std::vector<float> x = noise_.normal(rows * cols), norm = noise_.normal(cols);
      std::vector<float> normed(x.size());
      ops()->rms_norm(x.data(), norm.data(), 1e-5f, rows, cols, normed.data());
      std::vector<std::vector<float>> alone;
      for (const Weights& w : weights) alone.push_back(linear(w, normed, 1));
      for (const int threads : {1, 2, 3}) {
        std::vector<std::vector<float>> y;
        for (const Weights& w : weights) y.emplace_back(index(rows * w.matrix.rows), kNan);
        std::vector<Projection> maps;
        for (std::size_t i = 0; i < weights.size(); ++i) maps.push_back({weights[i].matrix, y[i].data()});
        std::vector<float> room(x.size());
        ops(threads)->norm_linear(x.data(), norm.data(), 1e-5f, rows, room.data(), maps);
        for (std::size_t i = 0; i < weights.size(); ++i) {
          EXPECT_TRUE(same_bits(y[i].data(), alone[i].data(), y[i].size()))
              << dtype_name(dtype) << ", map " << i << ", " << rows << " rows, " << threads << " threads";
        }
      }
    }
  }
}

// More rows than are packed at once.
TEST_P(ModelOpsTest, ManyRowsAreWorkedOnInPieces) {
  for (const DType dtype : kWeightTypes) {
    const Shape shape{70, 32};
    const Weights w(noise_.normal(shape.rows * shape.cols), dtype, shape.rows, shape.cols);
    const std::vector<float> x = noise_.normal(777 * shape.cols);
    const std::vector<float> together = linear(w, x);
    for (const std::int64_t row : {0, 255, 256, 511, 512, 519, 776}) {
      const std::vector<float> one(x.begin() + row * shape.cols, x.begin() + (row + 1) * shape.cols);
      EXPECT_TRUE(same_bits(linear(w, one).data(), together.data() + row * shape.rows, index(shape.rows)))
          << name_of(dtype, shape, 777) << ", row " << row;
    }
  }
}

TEST_P(ModelOpsTest, LinearPassesOnWhatIsNotFinite) {
  for (const DType dtype : kWeightTypes) {
    const Shape shape{6, 96};
    std::vector<float> values = noise_.normal(shape.rows * shape.cols);
    for (float& value : values) value = std::fabs(value) + 0.5f;  // nothing becomes 0, and 0 * inf is another matter
    const Weights w(values, dtype, shape.rows, shape.cols);
    for (const std::int64_t rows : {1, 2, 9, 17}) {
      for (const float bad : {kNan, kInf, -kInf}) {
        std::vector<float> x = noise_.normal(rows * shape.cols);
        x[index((rows - 1) * shape.cols + noise_.below(shape.cols))] = bad;
        const std::vector<float> y = linear(w, x);
        expect_within(y, reference_linear(w.matrix, x, {}, linear_model(dtype)), name_of(dtype, shape, rows));
        for (std::int64_t i = 0; i < shape.rows; ++i) {
          EXPECT_FALSE(std::isfinite(y[index((rows - 1) * shape.rows + i)]));
        }
      }
    }
    // In the weights: one row of them, one column of y. With int8 the scale of the group says it.
    values[index(2 * shape.cols + 5)] = dtype == DType::kInt8 ? kNan : kInf;
    const Weights spoiled(values, dtype, shape.rows, shape.cols);
    for (const std::int64_t rows : {1, 3}) {
      const std::vector<float> x = noise_.normal(rows * shape.cols);
      const std::vector<float> y = linear(spoiled, x), good = linear(w, x);
      for (std::size_t i = 0; i < y.size(); ++i) {
        if (i % 6 == 2) {
          EXPECT_FALSE(std::isfinite(y[i]));
        } else {
          EXPECT_TRUE(same_bits(&y[i], &good[i], 1));
        }
      }
    }
  }
}

TEST_P(ModelOpsTest, NumbersOfUnusualSize) {
  for (const DType dtype : kWeightTypes) {
    const Shape shape{5, 64};
    for (const float size : {1e-30f, 1e-19f, 1e-4f, 1e4f, 1e15f}) {  // 1e-19: products of scales are subnormal
      const Weights w(noise_.normal(shape.rows * shape.cols, dtype == DType::kFloat16 ? 1.0f : size), dtype, shape.rows,
                      shape.cols);
      std::vector<float> x = noise_.normal(3 * shape.cols, size);
      std::fill(x.begin() + shape.cols, x.begin() + 2 * shape.cols, 0.0f);  // a row of zeros
      const std::vector<float> y = linear(w, x);
      expect_within(y, reference_linear(w.matrix, x, {}, linear_model(dtype)), name_of(dtype, shape, 3));
      for (std::int64_t i = 0; i < shape.rows; ++i) EXPECT_EQ(y[index(shape.rows + i)], 0.0f);
    }
  }
  // Activations whose scales are subnormal, and weights that make ordinary numbers of them.
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kInt8}) {
    const Shape shape{5, 64};
    const Weights w(noise_.normal(shape.rows * shape.cols, 1e30f), dtype, shape.rows, shape.cols);
    for (const float size : {1e-45f, 1e-44f, 1e-43f, 1e-42f, 1e-41f}) {
      const std::vector<float> x = noise_.normal(3 * shape.cols, size);
      expect_within(linear(w, x), reference_linear(w.matrix, x, {}, linear_model(dtype)), name_of(dtype, shape, 3));
    }
  }
  // Of an infinity and a subnormal weight comes that infinity, or NaN where such weights count as zero.
  for (const DType dtype : kWeightTypes) {
    const std::vector<float> infinities(kWeightGroup, kInf);
    const Weights w(std::vector<float>(kWeightGroup, 1e-39f), dtype, 1, kWeightGroup);
    const std::vector<float> y = linear(w, infinities);
    expect_within(y, reference_linear(w.matrix, infinities, {}, linear_model(dtype)), "inf");
    EXPECT_FALSE(std::isfinite(y[0])) << dtype_name(dtype);
  }
  // An infinity, which the sum of the others may meet as the other infinity.
  for (const DType dtype : kWeightTypes) {
    std::vector<float> large(kWeightGroup, 3e38f);
    large.back() = -kInf;
    const Weights w(std::vector<float>(kWeightGroup, 1.0f), dtype, 1, kWeightGroup);
    const std::vector<float> y = linear(w, large);
    expect_within(y, reference_linear(w.matrix, large, {}, linear_model(dtype)), "-inf and large");
    EXPECT_FALSE(std::isfinite(y[0])) << dtype_name(dtype);
  }
  // The product of the scales overflows, and no product of elements does.
  std::vector<float> x(kWeightGroup, 0.0f), values(kWeightGroup, 0.0f);
  x[0] = 1e30f, values[1] = 1e20f;
  const Weights w(values, DType::kInt8, 1, kWeightGroup);
  expect_within(linear(w, x), reference_linear(w.matrix, x, {}, linear_model(DType::kInt8)), "scales");
}

TEST_P(ModelOpsTest, NoRowsAreNoWork) {
  const auto all = ops();
  for (const DType dtype : kWeightTypes) {
    const Weights w(noise_.normal(64), dtype, 2, 32);
    all->linear(w.matrix, nullptr, 0, nullptr, false);
    all->embed(w.matrix, {}, nullptr);
  }
  all->rms_norm(nullptr, nullptr, 1e-5f, 0, 4, nullptr);
  all->swiglu(nullptr, 0, 4, nullptr);
  const std::vector<double> frequencies(2, 1.0);
  all->rope(nullptr, 0, 1, 4, {}, frequencies);
}

TEST_P(ModelOpsTest, EmbedTakesRowsOfTheTable) {
  for (const DType dtype : kWeightTypes) {
    for (Shape shape : {Shape{1, 1}, Shape{11, 37}, Shape{50, 320}}) {
      shape.cols = accepted_cols(dtype, shape.cols);
      const Weights w(noise_.normal(shape.rows * shape.cols), dtype, shape.rows, shape.cols);
      std::vector<std::int32_t> tokens(60);
      for (auto& token : tokens) token = static_cast<std::int32_t>(noise_.below(shape.rows));
      std::vector<float> x(tokens.size() * index(shape.cols), kNan);
      ops()->embed(w.matrix, tokens, x.data());
      expect_within(x, reference_embed(w.matrix, tokens), name_of(dtype, shape, 60));
    }
  }
}

TEST_P(ModelOpsTest, RmsNorm) {
  for (const std::int64_t dim : {1, 2, 7, 8, 33, 64, 129, 2048}) {
    for (const std::int64_t rows : {1, 3, 40}) {
      for (const float size : {1e-3f, 1.0f, 1e6f}) {
        const std::vector<float> x = noise_.normal(rows * dim, size), weight = noise_.normal(dim);
        std::vector<float> y(x.size(), kNan);
        ops()->rms_norm(x.data(), weight.data(), 1e-5f, rows, dim, y.data());
        expect_within(y, reference_rms_norm(x, weight, 1e-5f), std::to_string(dim));
        std::vector<float> in_place = x;  // and on another number of threads
        ops(1)->rms_norm(in_place.data(), weight.data(), 1e-5f, rows, dim, in_place.data());
        EXPECT_TRUE(same_bits(in_place.data(), y.data(), y.size()));
        std::vector<float> last(index(dim));
        ops()->rms_norm(x.data() + (rows - 1) * dim, weight.data(), 1e-5f, 1, dim, last.data());
        EXPECT_TRUE(same_bits(last.data(), y.data() + (rows - 1) * dim, last.size()));
      }
    }
  }
  const std::vector<float> weight(9, 1.0f), zeros(9, 0.0f);
  std::vector<float> x(9, 1.0f), y(9);
  ops()->rms_norm(zeros.data(), weight.data(), 1e-5f, 1, 9, y.data());
  EXPECT_TRUE(same_bits(y.data(), zeros.data(), 9));
  x[3] = kNan;
  ops()->rms_norm(x.data(), weight.data(), 1e-5f, 1, 9, y.data());
  EXPECT_TRUE(std::all_of(y.begin(), y.end(), [](float value) { return std::isnan(value); }));
}

// Squares that float32 does not hold, with eps or without, and a large weight for a number that is nearly lost.
TEST_P(ModelOpsTest, RmsNormOfNumbersOfAnySize) {
  for (const std::int64_t dim : {1, 7, 40, 129}) {
    for (const float size : {1e-44f, 1e-30f, 1e-20f, 1.0f, 1e19f, 1e25f, 5e37f}) {
      for (const float eps : {0.0f, 1e-42f, 1e-5f}) {
        for (const float weight_size : {1e-30f, 1.0f, 1e20f}) {
          std::vector<float> x = noise_.normal(dim, size), y(x.size(), kNan);
          const std::vector<float> weight = noise_.normal(dim, weight_size);
          if (dim > 1) x[1] *= 1e-38f;
          ops()->rms_norm(x.data(), weight.data(), eps, 1, dim, y.data());
          expect_within(y, reference_rms_norm(x, weight, eps),
                        fmt::format("{} of {}, eps {}, weights {}", dim, size, eps, weight_size));
        }
      }
    }
  }
  const std::vector<float> weight(9, 1.0f);
  std::vector<float> x(9, 0.0f), y(9);
  ops()->rms_norm(x.data(), weight.data(), 0.0f, 1, 9, y.data());
  EXPECT_TRUE(std::all_of(y.begin(), y.end(), [](float value) { return std::isnan(value); })) << "0 / 0";
  x[3] = kInf;
  ops()->rms_norm(x.data(), weight.data(), 1e-5f, 1, 9, y.data());
  for (std::size_t i = 0; i < y.size(); ++i) EXPECT_TRUE(i == 3 ? std::isnan(y[i]) : y[i] == 0.0f);
}

TEST_P(ModelOpsTest, Swiglu) {
  for (const std::int64_t dim : {1, 3, 8, 31, 8192}) {
    for (const std::int64_t rows : {1, 5}) {
      for (const float size : {1e-6f, 1.0f, 30.0f, 1e4f}) {
        const std::vector<float> gate_up = noise_.normal(2 * rows * dim, size);
        std::vector<float> y(index(rows * dim), kNan);
        ops()->swiglu(gate_up.data(), rows, dim, y.data());
        expect_within(y, reference_swiglu(gate_up, dim), std::to_string(dim));
        std::vector<float> last(index(dim));
        ops(1)->swiglu(gate_up.data() + (rows - 1) * 2 * dim, 1, dim, last.data());
        EXPECT_TRUE(same_bits(last.data(), y.data() + (rows - 1) * dim, last.size()));
      }
    }
  }
  const std::vector<float> gate_up = {kNan, 1.0f, kInf, 0.0f, 1.0f, kNan, 2.0f, 3.0f};
  std::vector<float> y(4);
  ops()->swiglu(gate_up.data(), 1, 4, y.data());
  EXPECT_TRUE(std::isnan(y[0]) && std::isnan(y[1]));
  EXPECT_EQ(y[2], kInf);
  EXPECT_EQ(y[3], 0.0f);
  // Far below zero next to nothing is left of however large a number; of -inf it is -inf / inf.
  const std::vector<float> far = {-1e38f, -1e30f, -200.0f, -88.0f, -kInf, -1e4f, 1.0f, 1e30f, 1.0f, 1.0f, 1.0f, kInf};
  std::vector<float> left(6);
  ops()->swiglu(far.data(), 1, 6, left.data());
  expect_within(left, reference_swiglu(far, 6), "far below zero");
  EXPECT_LE(std::fabs(left[0]), 0x1p-126f);
  EXPECT_TRUE(std::isnan(left[4]));
  EXPECT_EQ(left[5], -kInf);
}

TEST_P(ModelOpsTest, RopeAtAnyPosition) {
  const auto all = ops();
  for (const std::int64_t dim : {2, 6, 64, 128}) {
    std::vector<double> frequencies;
    for (std::int64_t i = 0; i < dim / 2; ++i) {
      frequencies.push_back(std::pow(500000.0, -2.0 * static_cast<double>(i) / static_cast<double>(dim)));
    }
    for (const std::int64_t heads : {1, 3, 32}) {
      std::vector<std::int64_t> positions = {0, 1, 2, 4095, 131071};
      for (const int bits : {20, 24, 40, 62}) positions.push_back((std::int64_t{1} << bits) + 1);
      const auto rows = static_cast<std::int64_t>(positions.size());
      const std::vector<float> x = noise_.normal(rows * heads * dim);
      std::vector<float> y = x;
      all->rope(y.data(), rows, heads, dim, positions, frequencies);
      expect_within(y, reference_rope(x, heads, positions, frequencies), std::to_string(dim));
      EXPECT_TRUE(same_bits(x.data(), y.data(), index(heads * dim))) << "position 0 turns nothing";
      for (std::int64_t row = 0; row < rows; ++row) {
        std::vector<float> one(x.begin() + row * heads * dim, x.begin() + (row + 1) * heads * dim);
        ops(1)->rope(one.data(), 1, heads, dim, std::span(positions).subspan(index(row), 1), frequencies);
        EXPECT_TRUE(same_bits(one.data(), y.data() + row * heads * dim, one.size()));
      }
    }
  }
}

// No double is this position, so that it and the angle are both rounded; ones and zeros show all that this does.
TEST_P(ModelOpsTest, RopeAtAPositionThatIsRounded) {
  const std::vector<std::int64_t> positions = {(std::int64_t{9} << 50) + 1};
  std::vector<double> frequencies;
  for (int i = 0; i < 512; ++i) frequencies.push_back(std::exp2(-20.0 - i / 512.0));
  std::vector<float> x(1024, 0.0f);
  std::fill(x.begin(), x.begin() + 512, 1.0f);
  std::vector<float> y = x;
  ops()->rope(y.data(), 1, 1, 1024, positions, frequencies);
  expect_within(y, reference_rope(x, 1, positions, frequencies), "9 * 2^50 + 1");
}

// On every target the same as the plain loop, with numbers of every size, NaN and infinities among them.
TEST_P(ModelOpsTest, QuantizesLikeThePlainLoop) {
  const std::int64_t groups = 300;
  std::vector<float> x = noise_.normal(groups * kWeightGroup);
  for (std::int64_t g = 0; g < groups; ++g) {
    const float size = std::ldexp(1.0f, static_cast<int>(noise_.below(270)) - 149);
    for (std::int64_t i = 0; i < kWeightGroup; ++i) x[index(g * kWeightGroup + i)] *= g < 5 ? 0.0f : size;
    if (g % 50 == 7) x[index(g * kWeightGroup + noise_.below(kWeightGroup))] = g % 100 == 7 ? kNan : -kInf;
  }
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    const Weights w(x, dtype, groups, kWeightGroup);
    std::vector<std::int8_t> values(x.size()), want(x.size());
    std::vector<float> scales(index(groups)), want_scales(index(groups)), row(kWeightGroup);
    target().model->quantize[static_cast<int>(dtype)](w.data.data(), groups, values.data(), scales.data());
    for (std::size_t g = 0; g < scales.size(); ++g) {
      base::load_row_as_float(w.data.data() + g * kWeightGroup * dtype_size(dtype), dtype, kWeightGroup, row.data());
      base::quantize_row_int8(row.data(), kWeightGroup, want.data() + g * kWeightGroup, &want_scales[g]);
    }
    EXPECT_EQ(values, want) << dtype_name(dtype);
    EXPECT_TRUE(same_bits(scales.data(), want_scales.data(), scales.size())) << dtype_name(dtype);
  }
}

TEST_P(ModelOpsTest, MemoryIsTheCallers) {
  const auto all = ops();
  for (const std::size_t bytes : {std::size_t{0}, std::size_t{1}, std::size_t{100}, std::size_t{5} << 20}) {
    void* memory = all->allocate(bytes);
    ASSERT_NE(memory, nullptr);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory) % 64, 0u);
    const std::vector<std::byte> from(bytes, std::byte{0x5a});
    std::vector<std::byte> back(bytes);
    all->from_host(memory, from.data(), bytes);
    all->to_host(back.data(), memory, bytes);
    EXPECT_EQ(back, from);
    all->release(memory);
  }
  all->release(nullptr);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // which end the program in the place of bad_alloc
  try {
    all->allocate(std::size_t{1} << 60);
    ADD_FAILURE() << "2^60 bytes were given";
  } catch (const Unavailable& error) {
    EXPECT_NE(std::string(error.what()).find(std::to_string(std::size_t{1} << 60)), std::string::npos) << error.what();
  }
#endif
}

TEST_P(ModelOpsTest, BadCallsAreRefused) {
  const auto all = ops();
  const Weights good(noise_.normal(4 * 64), DType::kInt8, 4, 64);
  std::vector<float> x(4 * 64, 1.0f), y(16);
  const auto refused = [&](WeightMatrix w) {
    EXPECT_THROW(all->linear(w, x.data(), 1, y.data(), false), InvalidArgument);
    EXPECT_THROW(all->embed(w, std::vector<std::int32_t>{0}, x.data()), InvalidArgument);
  };
  WeightMatrix w = good.matrix;
  w.scales = nullptr, refused(w);
  w = good.matrix, w.group = 16, refused(w);
  w = good.matrix, w.cols = 40, refused(w);
  w = good.matrix, w.rows = 0, refused(w);
  w = good.matrix, w.data = nullptr, refused(w);
  w = good.matrix, w.dtype = DType::kFp8E4M3, refused(w);
  EXPECT_THROW(all->linear(good.matrix, x.data(), -1, y.data(), false), InvalidArgument);
  EXPECT_THROW(all->embed(good.matrix, std::vector<std::int32_t>{4}, x.data()), InvalidArgument);
  EXPECT_THROW(all->embed(good.matrix, std::vector<std::int32_t>{-1}, x.data()), InvalidArgument);
  const std::vector<std::int64_t> positions = {1};
  const std::vector<double> frequencies = {1.0, 0.5};
  EXPECT_THROW(all->rope(x.data(), 1, 1, 5, positions, frequencies), InvalidArgument);
  EXPECT_THROW(all->rope(x.data(), 2, 1, 4, positions, frequencies), InvalidArgument);
  EXPECT_THROW(all->rope(x.data(), 1, 1, 6, positions, frequencies), InvalidArgument);
}

INSTANTIATE_TEST_SUITE_P(, ModelOpsTest, testing::ValuesIn(cpu_targets().begin(), cpu_targets().end()),
                         [](const auto& which) { return std::string(which.param->name); });

// A number is off by half a step at most, and a little for the rounding of the scale and of the quotient.
TEST(QuantizeWeights, IsWithinHalfAStepOfEveryGroup) {
  Noise noise;
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    for (const Shape shape : {Shape{1, 32}, Shape{3, 96}, Shape{300, 320}}) {
      std::vector<float> values = noise.normal(shape.rows * shape.cols);
      std::fill(values.begin(), values.begin() + kWeightGroup, 0.0f);
      const Weights w(values, dtype, shape.rows, shape.cols);
      std::vector<std::int8_t> bytes(values.size()), again(values.size());
      std::vector<float> scales(values.size() / kWeightGroup), scales_again(scales.size());
      quantize_weights(w.matrix, bytes.data(), scales.data(), pool_of(1));
      quantize_weights(w.matrix, again.data(), scales_again.data(), pool_of(3));
      EXPECT_EQ(bytes, again);
      EXPECT_EQ(scales, scales_again);
      for (std::size_t group = 0; group < scales.size(); ++group) {
        int largest = 0;
        for (std::size_t i = group * kWeightGroup; i < (group + 1) * kWeightGroup; ++i) {
          const float exact = base::load_as_float(w.data.data() + i * dtype_size(dtype), dtype);
          EXPECT_LE(std::fabs(exact - static_cast<double>(scales[group]) * bytes[i]),
                    static_cast<double>(scales[group]) * (0.5 + 127 * 0x1p-22));
          largest = std::max(largest, std::abs(static_cast<int>(bytes[i])));
        }
        EXPECT_EQ(largest, group == 0 ? 0 : 127);
      }
    }
  }
  const WeightMatrix odd{nullptr, DType::kFloat32, 1, 33, nullptr, 0};
  EXPECT_THROW(quantize_weights(odd, nullptr, nullptr, pool_of(1)), InvalidArgument);
}

TEST(ModelOps, RunsOnTheInstructionSetThatIsActive) {
  const std::string name(cpu_model_ops(pool_of(1))->name());
  EXPECT_EQ(name, "cpu (" + std::string(active_target().name) + ")");
}

}  // namespace
}  // namespace treeattn::kernels
