// SPDX-License-Identifier: Apache-2.0
// The operations of a decoder layer on a GPU against double precision. The bounds are derived in
// src/kernels/reference/model_reference.cc.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "kernels/cuda/error_model.h"
#include "kernels/model_ops.h"
#include "kernels/reference/model_reference.h"
#include "model_ops_data.h"
#include "thinning.h"
#include "treeattn/cuda.h"
#include "treeattn/error.h"

namespace treeattn::kernels {
namespace {

constexpr Pass kPasses[] = {Pass::kDecode, Pass::kPrefill};

class CudaModelOps : public testing::Test {
 protected:
  void SetUp() override {
    if (!cuda_problem().empty()) GTEST_SKIP() << "*** SKIPPED: " << cuda_problem() << " ***";
    ops_ = cuda_model_ops(0);
  }

  std::vector<float> normal(std::int64_t count, float size = 1.0f) { return noise_.normal(count, size); }
  std::int64_t below(std::int64_t end) { return noise_.below(end); }

  // GPU memory with a copy of something.
  class There {
   public:
    There(ModelOps& ops, const void* from, std::size_t bytes) : ops_(ops), data_(ops.allocate(bytes)) {
      if (bytes > 0) ops.from_host(data_, from, bytes);
    }
    There(ModelOps& ops, const std::vector<float>& from) : There(ops, from.data(), from.size() * sizeof(float)) {}
    ~There() { ops_.release(data_); }
    There(const There&) = delete;
    There& operator=(const There&) = delete;
    template <class T = float>
    T* get() const {
      return static_cast<T*>(data_);
    }
    std::vector<float> back(std::int64_t count) const {
      std::vector<float> out(index(count));
      ops_.to_host(out.data(), data_, out.size() * sizeof(float));
      return out;
    }

   private:
    ModelOps& ops_;
    void* data_;
  };

  // A weight matrix here and there.
  struct Weights {
    Weights(ModelOps& ops, const std::vector<float>& values, DType dtype, std::int64_t rows, std::int64_t cols)
        : host(values, dtype, rows, cols),
          here(host.matrix),
          there(here),
          data(ops, host.data.data(), host.data.size()),
          scales(ops, host.scales) {
      there.data = data.get<void>();
      if (dtype == DType::kInt8) there.scales = scales.get();
    }
    HostWeights host;
    WeightMatrix here, there;
    There data, scales;
  };

  std::vector<float> linear(const Weights& w, const std::vector<float>& x, Pass pass) {
    const std::int64_t rows = static_cast<std::int64_t>(x.size()) / w.here.cols;
    ops_->begin({pass, {}, {}, {}});
    const There x_there(*ops_, x);
    const There y(*ops_, std::vector<float>(index(rows * w.here.rows), kNan));
    ops_->linear(w.there, x_there.get(), rows, y.get(), false);
    return y.back(rows * w.here.rows);
  }

  Noise noise_;
  std::unique_ptr<ModelOps> ops_;
};

struct Shape {
  std::int64_t rows, cols;
};
// Odd sizes, which go one way; multiples of 8, which go the other; whole and broken tiles and groups of columns.
constexpr Shape kShapes[] = {{1, 1},    {3, 5},     {7, 31},    {66, 130},  {11, 1031}, {1, 8},
                             {16, 128}, {24, 1024}, {40, 1032}, {72, 2056}, {33, 264},  {17, 4096}};
constexpr std::int64_t kRows[] = {1, 2, 7, 8, 9, 16, 17, 33};

std::string name_of(DType dtype, Shape shape, std::int64_t rows, Pass pass) {
  return std::string(dtype_name(dtype)) + " [" + std::to_string(shape.rows) + ", " + std::to_string(shape.cols) +
         "], " + std::to_string(rows) + " rows, " + (pass == Pass::kDecode ? "decode" : "prefill");
}

TEST_F(CudaModelOps, LinearIsWithinItsBound) {
  std::size_t number = 0;
  for (const DType dtype : kWeightTypes) {
    for (Shape shape : kShapes) {
      shape.cols = accepted_cols(dtype, shape.cols);
      const Weights w(*ops_, normal(shape.rows * shape.cols, 0.1f), dtype, shape.rows, shape.cols);
      for (const std::int64_t rows : kRows) {
        if (number++ % thinning() != 0) continue;
        const std::vector<float> x = normal(rows * shape.cols), before = normal(rows * shape.rows);
        for (const Pass pass : kPasses) {
          const std::string what = name_of(dtype, shape, rows, pass);
          const LinearModel model = cuda::linear_model(dtype, pass, shape.rows, shape.cols);
          expect_within(linear(w, x, pass), reference_linear(w.here, x, {}, model), what);
          const There x_there(*ops_, x), y(*ops_, before);
          ops_->linear(w.there, x_there.get(), rows, y.get(), true);
          expect_within(y.back(rows * shape.rows), reference_linear(w.here, x, before, model), what + ", added");
        }
      }
    }
  }
}

// int8 weights as no quantisation makes them: the extremes, groups that are scaled to nothing, scales of every size.
// And every number of rows, in shapes of whole and broken tiles, groups of a warp and rows of scales.
TEST_F(CudaModelOps, Int8WeightsOfEveryKind) {
  for (const Shape shape : {Shape{1, 32}, Shape{7, 96}, Shape{16, 128}, Shape{33, 1056}, Shape{24, 2048},
                            Shape{40, 4128}, Shape{8, 14336}}) {
    if (thinning() > 1 && shape.cols != 1056) continue;
    Weights w(*ops_, normal(shape.rows * shape.cols), DType::kInt8, shape.rows, shape.cols);
    auto* values = reinterpret_cast<std::int8_t*>(w.host.data.data());
    for (std::int64_t i = 0; i < shape.rows * shape.cols; ++i) {
      const std::int64_t kind = i / kWeightGroup % 4;
      if (kind == 0) values[i] = i % 3 == 0 ? -127 : 127;
      if (kind == 1) values[i] = static_cast<std::int8_t>(below(256) - 128);
    }
    for (std::size_t i = 0; i < w.host.scales.size(); ++i) {
      w.host.scales[i] = i % 5 == 0 ? 0.0f : std::ldexp(w.host.scales[i], static_cast<int>(below(40)) - 20);
    }
    const There data(*ops_, w.host.data.data(), w.host.data.size()), scales(*ops_, w.host.scales);
    w.there.data = data.get<void>();
    w.there.scales = scales.get();
    const std::vector<float> all = normal(16 * shape.cols);
    for (const Pass pass : kPasses) {
      std::vector<float> first;
      for (std::int64_t rows = 1; rows <= 16; ++rows) {
        const std::vector<float> x(all.begin(), all.begin() + rows * shape.cols);
        const std::vector<float> y = linear(w, x, pass);
        const std::string what = name_of(DType::kInt8, shape, rows, pass);
        expect_within(
            y, reference_linear(w.here, x, {}, cuda::linear_model(DType::kInt8, pass, shape.rows, shape.cols)), what);
        EXPECT_TRUE(same_bits(y.data(), first.data(), first.size())) << what;  // of one row less
        first = y;
      }
    }
  }
}

// A row alone and with others: the same bits, in decode and in prefill, each for itself.
TEST_F(CudaModelOps, RowsOfALinearMapDependOnNothingElse) {
  constexpr std::int64_t kAll = 700;
  for (const DType dtype : kWeightTypes) {
    for (Shape shape : {Shape{152, 72}, Shape{67, 1031}, Shape{128, 2048}, Shape{1024, 4096}}) {
      shape.cols = accepted_cols(dtype, shape.cols);
      const std::int64_t all = dtype == DType::kBFloat16 || dtype == DType::kInt8 ? kAll : 40;
      const Weights w(*ops_, normal(shape.rows * shape.cols), dtype, shape.rows, shape.cols);
      std::vector<float> x = normal(all * shape.cols);
      x[index(7 * shape.cols + below(shape.cols))] = kNan;  // one row spoils itself only
      for (const Pass pass : kPasses) {
        const std::vector<float> together = linear(w, x, pass);
        for (const std::int64_t rows : {1, 2, 5, 8, 9, 16, 17, 33, 200, 256, 513}) {
          if (rows > all) continue;
          const std::int64_t first = below(all - rows + 1);
          const std::vector<float> part(x.begin() + first * shape.cols, x.begin() + (first + rows) * shape.cols);
          const std::vector<float> alone = linear(w, part, pass);
          EXPECT_TRUE(same_bits(alone.data(), together.data() + first * shape.rows, alone.size()))
              << name_of(dtype, shape, rows, pass) << " from row " << first;
        }
      }
    }
  }
}

TEST_F(CudaModelOps, LinearPassesOnWhatIsNotFinite) {
  for (const DType dtype : kWeightTypes) {
    const Shape shape{6, 96};
    std::vector<float> values = normal(shape.rows * shape.cols);
    for (float& value : values) value = std::fabs(value) + 0.5f;
    const Weights w(*ops_, values, dtype, shape.rows, shape.cols);
    for (const std::int64_t rows : {1, 2, 9}) {
      for (const float bad : {kNan, kInf, -kInf}) {
        std::vector<float> x = normal(rows * shape.cols);
        x[index((rows - 1) * shape.cols + below(shape.cols))] = bad;
        const std::vector<float> y = linear(w, x, Pass::kDecode);
        expect_within(y,
                      reference_linear(w.here, x, {}, cuda::linear_model(dtype, Pass::kDecode, shape.rows, shape.cols)),
                      name_of(dtype, shape, rows, Pass::kDecode));
      }
    }
  }
}

// Several maps at once, and the whole feed-forward part: the bits of the single calls.
TEST_F(CudaModelOps, CallsThatDoSeveralThingsDoThemAlike) {
  for (const DType dtype : kWeightTypes) {
    const std::int64_t hidden = 288, dim = 416;
    const Weights a(*ops_, normal(160 * hidden, 0.1f), dtype, 160, hidden);
    const Weights b(*ops_, normal(40 * hidden, 0.1f), dtype, 40, hidden);
    const Weights gate(*ops_, normal(dim * hidden, 0.1f), dtype, dim, hidden);
    const Weights up(*ops_, normal(dim * hidden, 0.1f), dtype, dim, hidden);
    const Weights down(*ops_, normal(hidden * dim, 0.1f), dtype, hidden, dim);
    const There norm(*ops_, normal(hidden));
    for (const Pass pass : kPasses) {
      for (const std::int64_t rows : {1, 5, 16, 37}) {
        if (thinning() > 1 && rows != 5) continue;
        ops_->begin({pass, {}, {}, {}});
        const std::string what = name_of(dtype, {dim, hidden}, rows, pass);
        const std::vector<float> x = normal(rows * hidden);
        const There x_there(*ops_, x), normed(*ops_, x), single(*ops_, x);
        // Where weights are streamed the size of a row is divided by after the map.
        const bool streams = pass == Pass::kDecode && (dtype == DType::kInt8 || dtype == DType::kBFloat16);
        const auto norm_linear = [&](const There& from, const WeightMatrix& w, float* y) {
          if (streams) {
            const Projection one{w, y};
            return ops_->norm_linear(from.get(), norm.get(), 1e-5f, rows, normed.get(), {&one, 1});
          }
          ops_->rms_norm(from.get(), norm.get(), 1e-5f, rows, hidden, normed.get());
          ops_->linear(w, normed.get(), rows, y, false);
        };
        const There ya(*ops_, normal(rows * 160)), yb(*ops_, normal(rows * 40)), ya2(*ops_, normal(rows * 160)),
            yb2(*ops_, normal(rows * 40)), yc2(*ops_, normal(rows * 40));
        norm_linear(x_there, a.there, ya.get());
        norm_linear(x_there, b.there, yb.get());
        const Projection both[] = {{a.there, ya2.get()}, {b.there, yb2.get()}, {b.there, yc2.get()}};
        ops_->norm_linear(x_there.get(), norm.get(), 1e-5f, rows, normed.get(), both);
        EXPECT_TRUE(same_bits(ya.back(rows * 160).data(), ya2.back(rows * 160).data(), index(rows * 160))) << what;
        EXPECT_TRUE(same_bits(yb.back(rows * 40).data(), yb2.back(rows * 40).data(), index(rows * 40))) << what;
        EXPECT_TRUE(same_bits(yb.back(rows * 40).data(), yc2.back(rows * 40).data(), index(rows * 40))) << what;

        const There gate_up(*ops_, normal(2 * rows * dim)), activated(*ops_, normal(rows * dim));
        norm_linear(single, gate.there, gate_up.get());
        norm_linear(single, up.there, gate_up.get() + rows * dim);
        ops_->swiglu(gate_up.get(), 1, rows * dim, activated.get());
        ops_->linear(down.there, activated.get(), rows, single.get(), true);
        ops_->feed_forward(
            {norm.get(), 1e-5f, gate.there, up.there, down.there, normed.get(), gate_up.get(), activated.get()}, rows,
            x_there.get());
        EXPECT_TRUE(
            same_bits(single.back(rows * hidden).data(), x_there.back(rows * hidden).data(), index(rows * hidden)))
            << what;
      }
    }
  }
}

// The same of rms_norm and then linear where weights are streamed: rows times the norm's weights are rounded as
// activations are, and the sums are multiplied by what the norm divides by, which takes the norm's roundings.
BoundedValues normalised_linear(const WeightMatrix& w, const std::vector<float>& x, const std::vector<float>& norm,
                                float eps) {
  std::vector<float> scaled(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) scaled[i] = x[i] * norm[i % norm.size()];
  BoundedValues result = reference_linear(w, scaled, {}, cuda::linear_model(w.dtype, Pass::kDecode, w.rows, w.cols));
  for (std::size_t i = 0; i < result.value.size(); ++i) {
    const std::size_t row = i / index(w.rows);
    double squares = 0;
    for (std::size_t c = 0; c < norm.size(); ++c) squares += std::pow(double{x[row * norm.size() + c]}, 2);
    const double by = 1.0 / std::sqrt(squares / static_cast<double>(norm.size()) + eps);
    result.value[i] *= by;
    result.bound[i] *= by;
    result.bound[i] += 1.01 * (rms_norm_roundings(w.cols) + 1) * 0x1p-24 * std::fabs(result.value[i]);
  }
  return result;
}

// A norm before a map, however many rows come with a row and whoever has prepared it: within the bound of the two, and
// always the same bits.
TEST_F(CudaModelOps, MapsOfNormalisedRows) {
  constexpr std::int64_t kAll = 40, kDim = 96;
  constexpr float kEps = 1e-5f;
  for (const DType dtype : {DType::kBFloat16, DType::kInt8}) {
    for (const std::int64_t about : {64, 1032, 2056, 4096, 4608}) {
      if (thinning() > 1 && about != 1032) continue;  // rows longer than what a warp has under way
      const std::int64_t hidden = accepted_cols(dtype, about);
      const Weights before(*ops_, normal(hidden * kDim, 0.1f), dtype, hidden, kDim);
      const Weights w(*ops_, normal(160 * hidden, 0.1f), dtype, 160, hidden);
      const std::vector<float> norm = normal(hidden), first = normal(kAll * hidden), added = normal(kAll * kDim);
      const There norm_there(*ops_, norm);
      std::vector<float> together;
      for (const std::int64_t rows : std::initializer_list<std::int64_t>{kAll, 1, 4, 8, 9, 16, 17}) {
        ops_->begin({Pass::kDecode, {}, {}, {}});
        const std::vector<float> x(first.begin(), first.begin() + rows * hidden);
        const There x_there(*ops_, x), from(*ops_, added), normed(*ops_, x);
        const There y(*ops_, normal(rows * 160)), prepared(*ops_, normal(rows * 160));
        const Projection one{w.there, y.get()}, other{w.there, prepared.get()};
        ops_->add_linear(before.there, from.get(), rows, x_there.get(), norm_there.get());
        ops_->norm_linear(x_there.get(), norm_there.get(), kEps, rows, normed.get(), {&other, 1});
        ops_->norm_linear(x_there.get(), norm_there.get(), kEps, rows, normed.get(), {&one, 1});
        const std::vector<float> got = y.back(rows * 160), got_prepared = prepared.back(rows * 160);
        const std::string what = name_of(dtype, {160, hidden}, rows, Pass::kDecode);
        EXPECT_TRUE(same_bits(got.data(), got_prepared.data(), got.size())) << what;
        if (rows == kAll) together = got;
        EXPECT_TRUE(same_bits(got.data(), together.data(), got.size())) << what;
        // x changed by other hands is not what was prepared.
        ops_->add_linear(before.there, from.get(), rows, x_there.get(), norm_there.get());
        ops_->from_host(x_there.get(), x.data(), x.size() * sizeof(float));
        ops_->norm_linear(x_there.get(), norm_there.get(), kEps, rows, normed.get(), {&other, 1});
        expect_within(prepared.back(rows * 160), normalised_linear(w.here, x, norm, kEps), what);
      }
    }
  }
}

// Rows whose squares float32 does not hold, beside one of ordinary size.
TEST_F(CudaModelOps, MapsOfNormalisedRowsWhoseSquaresOverflow) {
  constexpr float kEps = 1e-5f;
  for (const DType dtype : {DType::kBFloat16, DType::kInt8}) {
    const std::int64_t hidden = accepted_cols(dtype, 1032);
    const Weights w(*ops_, normal(160 * hidden, 0.1f), dtype, 160, hidden);
    const std::vector<float> norm = normal(hidden);
    const There norm_there(*ops_, norm);
    for (const std::int64_t rows : {1, 9, 17}) {
      std::vector<float> x = normal(rows * hidden, 1e25f);
      const std::vector<float> ordinary = normal(hidden);
      if (rows > 1) std::copy(ordinary.begin(), ordinary.end(), x.begin() + hidden);
      ops_->begin({Pass::kDecode, {}, {}, {}});
      const There x_there(*ops_, x), normed(*ops_, x), y(*ops_, normal(rows * 160));
      const Projection one{w.there, y.get()};
      ops_->norm_linear(x_there.get(), norm_there.get(), kEps, rows, normed.get(), {&one, 1});
      expect_within(y.back(rows * 160), normalised_linear(w.here, x, norm, kEps),
                    name_of(dtype, {160, hidden}, rows, Pass::kDecode));
    }
  }
}

// Results for the host come in one piece or in several: the bits of norm_linear.
TEST_F(CudaModelOps, ResultsForTheHostAreTheSame) {
  for (const DType dtype : {DType::kBFloat16, DType::kInt8}) {
    for (const Shape shape : {Shape{304, 256}, Shape{70001, 64}}) {
      const Weights w(*ops_, normal(shape.rows * shape.cols, 0.1f), dtype, shape.rows, shape.cols);
      const There norm(*ops_, normal(shape.cols));
      for (const Pass pass : kPasses) {
        for (const std::int64_t rows : {1, 16, 33}) {
          ops_->begin({pass, {}, {}, {}});
          const There x(*ops_, normal(rows * shape.cols)), normed(*ops_, normal(rows * shape.cols));
          const There y(*ops_, normal(rows * shape.rows)), work(*ops_, normal(rows * shape.rows));
          const Projection one{w.there, y.get()}, other{w.there, work.get()};
          ops_->norm_linear(x.get(), norm.get(), 1e-5f, rows, normed.get(), {&one, 1});
          const float* host = ops_->norm_linear_to_host(x.get(), norm.get(), 1e-5f, rows, normed.get(), other);
          ops_->finish();
          EXPECT_TRUE(same_bits(host, y.back(rows * shape.rows).data(), index(rows * shape.rows)))
              << name_of(dtype, shape, rows, pass);
        }
      }
    }
  }
}

TEST_F(CudaModelOps, EmbedTakesRowsOfTheTable) {
  for (const DType dtype : kWeightTypes) {
    for (Shape shape : {Shape{1, 1}, Shape{11, 37}, Shape{50, 320}}) {
      shape.cols = accepted_cols(dtype, shape.cols);
      const Weights w(*ops_, normal(shape.rows * shape.cols), dtype, shape.rows, shape.cols);
      std::vector<std::int32_t> tokens(60);
      for (auto& token : tokens) token = static_cast<std::int32_t>(below(shape.rows));
      const There x(*ops_, std::vector<float>(tokens.size() * index(shape.cols), kNan));
      ops_->embed(w.there, tokens, x.get());
      expect_within(x.back(60 * shape.cols), reference_embed(w.here, tokens), name_of(dtype, shape, 60, Pass::kDecode));
    }
  }
}

TEST_F(CudaModelOps, RmsNorm) {
  for (const std::int64_t dim : {1, 2, 7, 33, 129, 2048, 4096}) {
    for (const std::int64_t rows : {1, 3, 40}) {
      for (const float size : {1e-3f, 1.0f, 1e6f, 1e19f, 1e30f, 3e37f}) {  // squares of the last three overflow
        const std::vector<float> x = normal(rows * dim, size), weight = normal(dim);
        const There x_there(*ops_, x), weight_there(*ops_, weight), y(*ops_, x);
        ops_->rms_norm(x_there.get(), weight_there.get(), 1e-5f, rows, dim, y.get());
        const std::vector<float> got = y.back(rows * dim);
        expect_within(got, reference_rms_norm(x, weight, 1e-5f), std::to_string(dim));
        ops_->rms_norm(x_there.get() + (rows - 1) * dim, weight_there.get(), 1e-5f, 1, dim, x_there.get());
        EXPECT_TRUE(same_bits(x_there.back(dim).data(), got.data() + (rows - 1) * dim, index(dim)));
      }
    }
  }
  // Of an infinity comes NaN, and nothing is left beside it.
  std::vector<float> x = normal(300);
  x[3] = -kInf;
  const There y(*ops_, x), weight(*ops_, normal(300));
  ops_->rms_norm(y.get(), weight.get(), 1e-5f, 1, 300, y.get());
  const std::vector<float> got = y.back(300);
  for (std::size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(i == 3 ? std::isnan(got[i]) : got[i] == 0.0f) << i;
}

// The squares overflow, and all threads read the row before one of them writes to it.
TEST_F(CudaModelOps, RmsNormOfLargeNumbersInPlace) {
  const std::vector<float> x = normal(8 * 4096, 1e25f), weight = normal(4096);
  const There y(*ops_, x), weight_there(*ops_, weight);
  ops_->rms_norm(y.get(), weight_there.get(), 1e-5f, 8, 4096, y.get());
  expect_within(y.back(8 * 4096), reference_rms_norm(x, weight, 1e-5f), "in place");
}

TEST_F(CudaModelOps, Swiglu) {
  for (const std::int64_t dim : {1, 3, 31, 8192}) {
    for (const std::int64_t rows : {1, 5}) {
      for (const float size : {1e-6f, 1.0f, 30.0f, 1e4f}) {
        const std::vector<float> gate_up = normal(2 * rows * dim, size);
        const There from(*ops_, gate_up), y(*ops_, gate_up);
        ops_->swiglu(from.get(), rows, dim, y.get());
        expect_within(y.back(rows * dim), reference_swiglu(gate_up, dim), std::to_string(dim));
      }
    }
  }
  // Far below zero next to nothing is left of however large a number; of -inf it is -inf / inf.
  const std::vector<float> far = {-1e38f, -1e30f, -200.0f, -88.0f, -kInf, -1e4f, 1.0f, 1e30f, 1.0f, 1.0f, 1.0f, kInf};
  const There from(*ops_, far), y(*ops_, far);
  ops_->swiglu(from.get(), 1, 6, y.get());
  const std::vector<float> left = y.back(6);
  expect_within(left, reference_swiglu(far, 6), "far below zero");
  EXPECT_TRUE(std::isnan(left[4]));
  EXPECT_EQ(left[5], -kInf);
}

TEST_F(CudaModelOps, RopeAtAnyPosition) {
  for (const std::int64_t dim : {2, 6, 64, 128}) {
    std::vector<double> frequencies;
    for (std::int64_t i = 0; i < dim / 2; ++i) {
      frequencies.push_back(std::pow(500000.0, -2.0 * static_cast<double>(i) / static_cast<double>(dim)));
    }
    for (const std::int64_t heads : {1, 3, 32}) {
      const std::vector<std::int64_t> positions = {0, 1, 2, 4095, 131071, (1 << 20) + 3, (std::int64_t{1} << 24) + 1};
      const auto rows = static_cast<std::int64_t>(positions.size());
      const std::vector<float> x = normal(rows * heads * dim);
      const There y(*ops_, x);
      ops_->rope(y.get(), rows, heads, dim, positions, frequencies);
      const std::vector<float> got = y.back(rows * heads * dim);
      expect_within(got, reference_rope(x, heads, positions, frequencies), std::to_string(dim));
      EXPECT_TRUE(same_bits(x.data(), got.data(), index(heads * dim))) << "position 0 turns nothing";
    }
  }
}

TEST_F(CudaModelOps, BadCallsAreRefused) {
  const Weights w(*ops_, normal(64), DType::kBFloat16, 2, 32);
  const std::vector<std::int32_t> beyond{2};
  EXPECT_THROW(ops_->embed(w.there, beyond, nullptr), InvalidArgument);
  WeightMatrix broken = w.there;
  broken.dtype = DType::kFp8E4M3;
  EXPECT_THROW(ops_->linear(broken, nullptr, 1, nullptr, false), InvalidArgument);
  EXPECT_THROW(ops_->allocate(std::size_t{1} << 60), Unavailable);
  EXPECT_THROW(cuda_model_ops(1000), Unavailable);
  ops_->linear(w.there, nullptr, 0, nullptr, false);  // no rows are no work
}

}  // namespace
}  // namespace treeattn::kernels
