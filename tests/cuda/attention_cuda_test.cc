// SPDX-License-Identifier: Apache-2.0
// Attention on the GPU against the oracle: the one list of cases, and random ones.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "device_case.h"
#include "treeattn/cuda.h"

namespace treeattn::kernels {
namespace {

bool is_byte(DType dtype) { return dtype == DType::kInt8 || dtype == DType::kFp8E4M3; }

// Whether a case is one of those that the tensor-core kernels for 8-bit, for float32 K and V and for queries of another
// type than 16-bit K and V are there for: rows are aligned to 16 bytes.
bool rows_served(const Case& shape) {
  const auto aligned = [&](std::int64_t elements) {
    return elements * static_cast<std::int64_t>(dtype_size(shape.k_type)) % 16 == 0;
  };
  return shape.v_type == shape.k_type && aligned(shape.head_dim) && aligned(shape.v_dim) && aligned(shape.row_padding);
}
bool for_mma8(const Case& shape) { return is_byte(shape.k_type) && rows_served(shape); }
bool for_mma32(const Case& shape) { return shape.k_type == DType::kFloat32 && rows_served(shape); }
bool for_limbs(const Case& shape) {
  return dtype_size(shape.k_type) == 2 && shape.q_type != shape.k_type && rows_served(shape) &&
         std::max(shape.head_dim, shape.v_dim) <= 128;
}

class CudaTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!cuda_problem().empty()) GTEST_SKIP() << "*** SKIPPED: " << cuda_problem() << " ***";
  }
};

TEST_F(CudaTest, CaseList) {
  const std::size_t step = thinning();
  const std::vector<Case> cases = case_list();
  double worst = 0, worst_bytes = 0, worst_wide = 0, worst_limbs = 0;
  int bytes = 0, wide = 0, limbs = 0;
  for (std::size_t i = 0; i < cases.size(); i += step) {
    const Case& shape = cases[i];
    std::string kernel;
    const double error = check_case(CaseData(shape, i + 1), &kernel);
    EXPECT_LE(error, 1) << shape.name << " by " << kernel;
    EXPECT_EQ(kernel == "mma8", for_mma8(shape)) << shape.name << " by " << kernel;
    EXPECT_EQ(kernel == "mma32", for_mma32(shape)) << shape.name << " by " << kernel;
    worst = std::max(worst, error);
    if (kernel == "mma8") {
      worst_bytes = std::max(worst_bytes, error);
      ++bytes;
    }
    if (kernel == "mma32") {
      worst_wide = std::max(worst_wide, error);
      ++wide;
    }
    if (for_limbs(shape)) {
      EXPECT_EQ(kernel, "mma") << shape.name;
      worst_limbs = std::max(worst_limbs, error);
      ++limbs;
    }
  }
  EXPECT_GE(bytes, static_cast<int>(40 / step));
  EXPECT_GE(wide, static_cast<int>(40 / step));
  EXPECT_GE(limbs, static_cast<int>(10 / step));
  std::printf(
      "largest error %.3f of its bound; %.3f in the %d cases of mma8, %.3f in the %d of mma32, %.3f in the %d with "
      "queries "
      "of another type\n",
      worst, worst_bytes, bytes, worst_wide, wide, worst_limbs, limbs);
}

TEST_F(CudaTest, RandomCases) {
  const char* given = std::getenv("TREEATTN_SEED");
  const std::uint64_t seed = given ? std::strtoull(given, nullptr, 10) : std::random_device{}();
  const char* count = std::getenv("TREEATTN_RANDOM_CASES");
  std::printf("TREEATTN_SEED=%llu\n", static_cast<unsigned long long>(seed));
  double worst = 0;
  for (const Case& shape : random_cases(seed, count ? std::strtoull(count, nullptr, 10) : 300)) {
    const double error = check_case(CaseData(shape, seed));
    EXPECT_LE(error, 1) << shape.name;
    worst = std::max(worst, error);
  }
  std::printf("largest error %.3f of its bound\n", worst);
}

// Head dims that no kernel is made for: rows are filled with zeros, whatever lies behind them, here NaNs of the next
// head.
TEST_F(CudaTest, EveryHeadDim) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  double worst = 0;
  std::uint64_t seed = 0;
  for (std::int64_t dim = 16; dim <= 256; dim += 8) {
    for (const DType type : {DType::kBFloat16, DType::kFloat16, DType::kFloat32, DType::kInt8, DType::kFp8E4M3}) {
      Case shape;
      shape.k_type = shape.v_type = type;
      shape.q_type = ++seed % 3 == 0 ? DType::kFloat32 : DType::kBFloat16;
      shape.head_dim = dim;
      shape.v_dim = seed % 4 == 0 ? 16 + static_cast<std::int64_t>(seed * 40 % 248) : dim;
      shape.heads = 2 * static_cast<std::int64_t>(seed % 7 == 0 ? 16 : 1 + seed % 4);
      shape.tokens = 333;
      shape.queries = seed % 5 == 0 ? 3 : 1;
      shape.order = {64, 4};
      shape.k_layout = shape.v_layout = seed % 3 == 1 ? Layout::kHeadsFirst : Layout::kTokensFirst;
      if (seed % 2 == 0) shape.k_layout = shape.v_layout = Layout::kPaged;
      shape.page_tokens = seed % 8 == 0 ? 20 : 64;  // rows by the warp, or by tensor copies
      CaseData data(shape, seed);
      // What lies behind the rows of the first KV head, and of its queries.
      if (shape.q_type == DType::kFloat32) data.set_q(0, 0, shape.heads / 2, 0, kNan);
      if (type != DType::kInt8) data.set_k(0, 7, 1, 0, kNan);
      std::string kernel;
      const double error = check_case(data, &kernel);
      EXPECT_LE(error, 1) << "dim " << dim << " and " << shape.v_dim << ", type " << dtype_name(type) << " by "
                          << kernel;
      const bool wide_q = dtype_size(type) == 2 && shape.q_type != type;
      const bool served = rows_served(shape) && (!wide_q || std::max(dim, shape.v_dim) <= 128);
      EXPECT_EQ(kernel != "generic", served) << "dim " << dim << " and " << shape.v_dim << ", " << dtype_name(type);
      worst = std::max(worst, error);
    }
  }
  std::printf("largest error %.3f of its bound\n", worst);
}

// Limbs have no room for such queries, and a large factor makes logits of them.
TEST_F(CudaTest, TinyQueriesCountAsMuchAsOthers) {
  for (const DType type : {DType::kFloat16, DType::kBFloat16, DType::kInt8, DType::kFp8E4M3}) {
    const bool byte = dtype_size(type) == 1;
    for (const std::int64_t heads : {1, 12}) {
      for (const float size : {0x1.554466p-84f, 0x1.554466p-98f, 0x1.554466p-112f, 0x1.554466p-118f, 0x1.5544p-127f}) {
        Case shape;
        shape.k_type = shape.v_type = type;
        shape.heads = heads;
        shape.kv_heads = 1;
        shape.tokens = 64;
        shape.fp8_scales = true;
        shape.scale = 0x1p103f;  // times 1 / sqrt(64)
        CaseData data(shape, 8);
        const float key = std::min(0x1p-100f / size / 64, byte ? 96.0f : 0x1p15f);
        for (std::int64_t t = 0; t < 64; ++t) {
          for (std::int64_t d = 0; d < 64; ++d) data.set_k(0, t, 0, d, t == 5 ? key : 0.0f);
          if (byte) data.set_k_scale(0, t, 0, 1.0f);
        }
        for (std::int64_t h = 0; h < heads; ++h) {
          for (std::int64_t d = 0; d < 64; ++d) data.set_q(0, 0, h, d, size);
        }
        std::string kernel;
        EXPECT_LE(check_case(data, &kernel), 1) << size << " by " << kernel << ", " << dtype_name(type);
      }
    }
  }
}

// Lower limbs of float32 are lost below 2^-126, which large queries, or a large scale, make something of.
TEST_F(CudaTest, TinyFloat32KeysCountAsMuchAsOthers) {
  struct Sizes {
    float q, k, scale;  // scale times 1 / sqrt(64)
  };
  for (const Sizes& size : {Sizes{0x1p100f, 0x1.23456p-117f, 8}, Sizes{0x1p20f, 0x1.23456p-123f, 0x1p103f},
                            Sizes{0x1.23456p-115f, 0x1p20f, 0x1p98f}, Sizes{0x1.23456p-127f, 0x1p120f, 8}}) {
    for (const std::int64_t heads : {1, 12}) {
      Case shape;
      shape.heads = heads;
      shape.kv_heads = 1;
      shape.tokens = 64;
      shape.head_dim = shape.v_dim = 64;
      shape.scale = size.scale;
      CaseData data(shape, 8);
      for (std::int64_t d = 0; d < 64; ++d) {
        for (std::int64_t t = 0; t < 64; ++t) data.set_k(0, t, 0, d, t == 5 ? size.k : 0.0f);
        for (std::int64_t h = 0; h < heads; ++h) data.set_q(0, 0, h, d, size.q);
      }
      std::string kernel;
      EXPECT_LE(check_case(data, &kernel), 1) << size.q << ", " << size.k << " by " << kernel;
      EXPECT_EQ(kernel, "mma32");
    }
  }
}

// Tensor cores align products with subnormal float16 numbers as if those were larger: by the first of two columns the
// second loses what is below 2^-24 of its products, 1409 / 64 * 1023 of them with the row scaled: nearly one.
TEST_F(CudaTest, SubnormalFloat16KeysAreWithinBounds) {
  for (const DType q_type : {DType::kFloat32, DType::kFloat16}) {
    for (const std::int64_t queries : {1, 80}) {
      Case shape;
      shape.q_type = q_type;
      shape.k_type = shape.v_type = DType::kFloat16;
      shape.queries = queries;
      shape.heads = shape.kv_heads = 1;
      shape.tokens = 64;
      shape.head_dim = shape.v_dim = 16;
      shape.scale = 4e6f;  // times 1 / sqrt(16)
      CaseData data(shape, 8);
      for (std::int64_t d = 0; d < 16; ++d) {
        for (std::int64_t t = 0; t < 64; ++t) data.set_k(0, t, 0, d, d % 2 == 0 ? 0x1p-24f : 1023 * 0x1p-24f);
        for (std::int64_t i = 0; i < queries; ++i) data.set_q(0, i, 0, d, d % 2 == 0 ? 1404.0f : 1409 / 1024.0f);
      }
      std::string kernel;
      EXPECT_LE(check_case(data, &kernel), 1) << dtype_name(q_type) << " by " << kernel;
    }
  }
}

// 2,048 items of a group: runs of 32 of them become 64 states, and those two.
TEST_F(CudaTest, RunsOfRuns) {
  Case shape;
  shape.q_type = shape.k_type = shape.v_type = DType::kBFloat16;
  shape.heads = 3;
  shape.kv_heads = 1;
  shape.head_dim = shape.v_dim = 16;
  shape.tokens = 1 << 20;
  shape.order = {64, 1 << 14};
  std::string kernel;
  EXPECT_LE(check_case(CaseData(shape, 3), &kernel), 1);
  EXPECT_EQ(kernel, "mma");
}

// Every shape that the kernel for 8-bit K and V has code for: head dims, rows of an item, types of q, masks.
TEST_F(CudaTest, ByteShapes) {
  double worst = 0;
  std::uint64_t seed = 1;
  for (const std::int64_t dim : {64, 80, 96, 128, 256}) {
    for (const std::int64_t group : {1, 3, 4, 8, 11, 16}) {
      for (const DType type : {DType::kInt8, DType::kFp8E4M3}) {
        for (const DType q : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
          Case shape;
          shape.k_type = shape.v_type = type;
          shape.q_type = q;
          shape.head_dim = shape.v_dim = dim;
          shape.kv_heads = 2;
          shape.heads = 2 * group;
          shape.tokens = 700;
          shape.order = {128, 4};
          shape.fp8_scales = ++seed % 2 == 0;
          shape.k_layout = shape.v_layout = seed % 3 == 0   ? Layout::kTokensFirst
                                            : seed % 3 == 1 ? Layout::kHeadsFirst
                                                            : Layout::kPaged;
          shape.page_tokens = 64;
          shape.causal = seed % 5 == 0;
          shape.queries = group < 4 && seed % 2 == 0 ? 2 : 1;
          std::string kernel;
          const double error = check_case(CaseData(shape, seed), &kernel);
          EXPECT_LE(error, 1) << "dim " << dim << ", group " << group << ", seed " << seed;
          EXPECT_EQ(kernel, "mma8");
          worst = std::max(worst, error);
        }
      }
    }
  }
  std::printf("largest error %.3f of its bound\n", worst);
}

// Heads of 64 columns that lie side by side are worked on two by two: groups that fill the rows or do not, an odd head
// left over, lengths that end anywhere, pages that a piece does not fit into, all that becomes of logits.
TEST_F(CudaTest, ByteHeadsInTwos) {
  double worst = 0;
  std::uint64_t seed = 1;
  for (const std::int64_t kv_heads : {2, 3, 6}) {
    for (const std::int64_t group : {1, 2, 4, 8}) {
      for (const std::int64_t tokens : {1L, 31L, 97L, 513L, kv_heads == 2 ? 8191L : 1234L}) {
        for (const DType type : {DType::kInt8, DType::kFp8E4M3}) {
          Case shape;
          shape.k_type = shape.v_type = type;
          shape.q_type = ++seed % 3 == 0 ? DType::kFloat32 : DType::kBFloat16;
          shape.kv_heads = kv_heads;
          shape.heads = kv_heads * group;
          shape.batch = 2;
          shape.tokens = tokens;
          shape.lengths = {tokens, (tokens + 1) / 2};
          shape.queries = group < 4 && tokens > 8 ? static_cast<std::int64_t>(seed % 4) + 1 : 1;
          if (tokens == 8191) {
            shape.order = {64, 128};  // 64 items to merge
          } else {
            shape.order = {128, 8};
          }
          shape.fp8_scales = seed % 2 == 0;
          shape.k_layout = shape.v_layout = seed % 5 < 2 ? Layout::kTokensFirst : Layout::kPaged;
          shape.page_tokens = seed % 4 == 0 ? 16 : 64;
          shape.causal = seed % 3 != 0;
          shape.window = seed % 7 == 0 ? 50 : 0;
          shape.softcap = seed % 11 == 0 ? 5.0f : 0.0f;
          shape.alibi = seed % 13 == 0;
          std::string kernel;
          const double error = check_case(CaseData(shape, seed), &kernel);
          EXPECT_LE(error, 1) << kv_heads << " x " << group << ", tokens " << tokens << ", seed " << seed;
          EXPECT_EQ(kernel, "mma8");
          worst = std::max(worst, error);
        }
      }
    }
  }
  std::printf("largest error %.3f of its bound\n", worst);
}

// What the other of two heads holds, NaN and infinity included, changes no bit of a row.
TEST_F(CudaTest, ByteHeadsDoNotMix) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  for (const std::int64_t group : {1, 4, 8}) {
    Case shape;
    shape.k_type = shape.v_type = DType::kFp8E4M3;
    shape.q_type = DType::kBFloat16;
    shape.heads = 2 * group;
    shape.tokens = 700;
    shape.fp8_scales = true;
    const CaseData plain(shape, 3);
    CaseData mixed(shape, 3);
    mixed.set_k(0, 0, 0, 5, kNan);
    mixed.set_v(0, 350, 0, 6, kNan);
    mixed.set_k_scale(0, 351, 0, kNan);
    mixed.set_v_scale(0, 699, 0, std::numeric_limits<float>::infinity());
    EXPECT_LE(check_case(mixed), 1);
    const cuda::DeviceOutput want = DeviceCase(plain).run(), got = DeviceCase(mixed).run();
    const auto heads = static_cast<std::size_t>(group), floats = heads * 64;
    EXPECT_EQ(std::memcmp(want.out.data() + floats, got.out.data() + floats, floats * sizeof(float)), 0);
    EXPECT_EQ(std::memcmp(want.lse.data() + heads, got.lse.data() + heads, heads * sizeof(float)), 0);
  }
}

// Scales and queries of very different size, in one call and in one leaf.
TEST_F(CudaTest, ByteScales) {
  double worst = 0;
  for (const DType type : {DType::kInt8, DType::kFp8E4M3}) {
    for (const int spread : {0, 3, 30, 90}) {
      for (const int shift : {0, 60, -60}) {
        Case shape;
        shape.k_type = shape.v_type = type;
        shape.fp8_scales = true;
        shape.tokens = 900;
        shape.head_dim = shape.v_dim = 128;
        shape.order = {256, 2};
        CaseData data(shape, 7);
        spread_sizes(data, spread, shift, 0.03f, 0.03f);
        std::string kernel;
        const double error = check_case(data, &kernel);
        EXPECT_LE(error, 1) << "spread " << spread << ", shift " << shift;
        EXPECT_EQ(kernel, "mma8");
        worst = std::max(worst, error);
      }
    }
  }
  std::printf("largest error %.3f of its bound\n", worst);
}

// What is not a number shows where it should and nowhere else.
TEST_F(CudaTest, BytesThatAreNotFinite) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN(), kInf = std::numeric_limits<float>::infinity();
  for (const DType type : {DType::kInt8, DType::kFp8E4M3}) {
    for (int number = 0; number < 18; ++number) {
      const int what = number / 2;
      if (what < 2 && type == DType::kInt8) continue;  // int8 has no NaN
      Case shape;
      shape.k_type = shape.v_type = type;
      shape.q_type = what % 2 == 0 ? DType::kFloat32 : DType::kBFloat16;
      shape.fp8_scales = true;
      shape.tokens = 300;
      shape.queries = number % 2 == 0 ? 4 : 2;  // few enough for two heads in one item, or not
      shape.causal = true;
      CaseData data(shape, 9);
      if (what == 0) data.set_v(0, 298, 1, 7, kNan);  // hidden from two queries of four
      if (what == 1) data.set_k(0, 298, 0, 7, kNan);
      if (what == 2) data.set_v_scale(0, 298, 0, kNan);
      if (what == 3) data.set_k_scale(0, 298, 1, kNan);
      if (what == 4) data.set_v_scale(0, 298, 0, kInf);
      if (what == 5) data.set_q(0, 1, 2, 3, -kInf);
      if (what == 6) data.set_q(0, 1, 2, 3, kNan);
      if (what == 7) data.set_k_scale(0, 298, 1, kInf);
      if (what == 8) data.set_k_scale(0, 298, 0, -kInf);
      std::string kernel;
      EXPECT_LE(check_case(data, &kernel), 1) << dtype_name(type) << " " << number;
      EXPECT_EQ(kernel, "mma8");
    }
  }
}

}  // namespace
}  // namespace treeattn::kernels
