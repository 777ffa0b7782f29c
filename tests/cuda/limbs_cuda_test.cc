// SPDX-License-Identifier: Apache-2.0
// What the GPU's tensor cores take in limbs, against the oracle: float32 K and V, and q beside 16-bit K and V of
// another type.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "device_case.h"
#include "treeattn/cuda.h"

namespace treeattn::kernels {
namespace {

// By the type of K and V.
class LimbsCudaTest : public testing::TestWithParam<DType> {
 protected:
  static DType kv() { return GetParam(); }
  static const char* kernel() { return kv() == DType::kFloat32 ? "mma32" : "mma"; }
  static std::vector<DType> query_types() {
    if (kv() == DType::kBFloat16) return {DType::kFloat32, DType::kFloat16};
    if (kv() == DType::kFloat16) return {DType::kFloat32, DType::kBFloat16};
    return {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
  }
  static std::vector<std::int64_t> head_dims() {
    if (kv() == DType::kFloat32) return {64, 80, 96, 128, 256};
    return {64, 80, 96, 128};
  }

  void SetUp() override {
    if (!cuda_problem().empty()) GTEST_SKIP() << "*** SKIPPED: " << cuda_problem() << " ***";
  }

  // The largest error in units of its bound, of a call that must be served by tensor cores.
  static double check(const CaseData& data) {
    std::string used;
    const double error = check_case(data, &used);
    EXPECT_EQ(used, kernel());
    return error;
  }
};

INSTANTIATE_TEST_SUITE_P(All, LimbsCudaTest, testing::Values(DType::kFloat32, DType::kBFloat16, DType::kFloat16),
                         [](const auto& test) { return std::string(dtype_name(test.param)); });

// Head dims, rows of an item, types of q, layouts, masks and all that becomes of logits.
TEST_P(LimbsCudaTest, EveryShape) {
  const std::size_t step = thinning();
  double worst = 0;
  std::uint64_t seed = 1;
  for (const std::int64_t dim : head_dims()) {
    for (const std::int64_t group : {1, 2, 3, 4, 8, 11, 16}) {
      for (const DType q : query_types()) {
        for (const std::int64_t tokens : {1L, 7L, 97L, 1234L}) {
          if (++seed % step != 0) continue;
          Case shape;
          shape.q_type = q;
          shape.k_type = shape.v_type = kv();
          shape.head_dim = shape.v_dim = dim;
          shape.heads = 2 * group;
          shape.batch = 2;
          shape.tokens = tokens;
          shape.lengths = {tokens, (tokens + 1) / 2};
          shape.queries = group < 4 && tokens > 8 ? static_cast<std::int64_t>(seed % 4) + 1 : 1;
          shape.order = {128, 8};
          shape.k_layout = shape.v_layout = seed % 3 == 0   ? Layout::kTokensFirst
                                            : seed % 3 == 1 ? Layout::kHeadsFirst
                                                            : Layout::kPaged;
          shape.page_tokens = seed % 4 == 0 ? 16 : 20;  // pieces fit into a page, or do not
          shape.causal = seed % 5 != 0;
          shape.window = seed % 7 == 0 ? 50 : 0;
          shape.softcap = seed % 11 == 0 ? 5.0f : 0.0f;
          shape.alibi = seed % 13 == 0;
          shape.sinks = seed % 17 == 0;
          shape.data = seed % 6 == 0 ? DataKind::kLargeLogits : DataKind::kNormal;
          const double error = check(CaseData(shape, seed));
          EXPECT_LE(error, 1) << "dim " << dim << ", group " << group << ", tokens " << tokens << ", seed " << seed;
          worst = std::max(worst, error);
        }
      }
    }
  }
  std::printf("largest error %.3f of its bound\n", worst);
}

// Elements of very different size in one row, down to subnormal numbers, whose lower limbs are smaller still. K and V
// of float16 stay in its range.
TEST_P(LimbsCudaTest, EverySize) {
  double worst = 0;
  for (const int spread : {1, 12, 40}) {
    for (const int shift : {0, 60, -60, 110, -110, -130}) {
      Case shape;
      shape.k_type = shape.v_type = kv();
      shape.tokens = 300;
      shape.head_dim = shape.v_dim = 128;
      shape.order = {64, 2};
      CaseData data(shape, 7);
      std::mt19937_64 engine(static_cast<std::uint64_t>(spread));
      const auto number = [&](int exponent) {
        const float size = 0.5f + static_cast<float>(engine() % (1u << 24)) * 0x1p-25f;
        const float x = std::ldexp(size, exponent - static_cast<int>(engine() % static_cast<unsigned>(spread)));
        return engine() % 2 == 0 ? x : -x;
      };
      const int kv_shift = kv() == DType::kFloat16 ? 0 : shift;
      for (std::int64_t t = 0; t < shape.tokens; ++t) {
        for (std::int64_t h = 0; h < shape.kv_heads; ++h) {
          for (std::int64_t d = 0; d < shape.head_dim; ++d) {
            data.set_k(0, t, h, d, number(kv_shift));
            data.set_v(0, t, h, d, number(-kv_shift));
          }
        }
      }
      for (std::int64_t h = 0; h < shape.heads; ++h) {
        for (std::int64_t d = 0; d < shape.head_dim; ++d) data.set_q(0, 0, h, d, number(std::min(-shift, 120)));
      }
      const double error = check(data);
      EXPECT_LE(error, 1) << "spread " << spread << ", shift " << shift;
      worst = std::max(worst, error);
    }
  }
  std::printf("largest error %.3f of its bound\n", worst);
}

// What is not a number shows where it should and nowhere else; so does what is too large for an upper limb.
TEST_P(LimbsCudaTest, NumbersThatAreNotFinite) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN(), kInf = std::numeric_limits<float>::infinity();
  constexpr float kMax = std::numeric_limits<float>::max();
  for (int number = 0; number < 20; ++number) {
    const int what = number / 2;
    Case shape;
    shape.k_type = shape.v_type = kv();
    shape.tokens = 300;
    shape.queries = number % 2 == 0 ? 4 : 1;
    shape.causal = true;
    CaseData data(shape, 9);
    if (what == 0) data.set_v(0, 298, 1, 7, kNan);  // hidden from two queries of four
    if (what == 1) data.set_k(0, 298, 0, 7, kNan);
    if (what == 2) data.set_v(0, 298, 0, 7, kInf);
    if (what == 3) data.set_k(0, 298, 1, 7, -kInf);
    if (what == 4) data.set_q(0, 0, 2, 3, -kInf);
    if (what == 5) data.set_q(0, 0, 2, 3, kNan);
    if (what == 6) data.set_v(0, 298, 0, 7, kMax);
    if (what == 7) data.set_k(0, 298, 0, 7, -kMax);
    if (what == 8) data.set_q(0, 0, 2, 3, kMax);
    if (what == 9) data.set_v(0, 299, 0, 7, -kInf);
    EXPECT_LE(check(data), 1) << number;
  }
}

}  // namespace
}  // namespace treeattn::kernels
