// SPDX-License-Identifier: Apache-2.0
// Calls with many queries on the GPU: against the oracle, and with the same bits however the tree is cut.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "base/half.h"
#include "device_case.h"
#include "kernels/cuda/error_model.h"
#include "kernels/cuda/ranks/rank_device.h"
#include "kernels/problem.h"
#include "treeattn/cuda.h"
#include "treeattn/state.h"

namespace treeattn::kernels {
namespace {

struct Output {
  std::vector<float> out, lse;

  Output(const Case& shape)
      : out(static_cast<std::size_t>(shape.batch * shape.queries * shape.heads * shape.v_dim)),
        lse(static_cast<std::size_t>(shape.batch * shape.queries * shape.heads)) {}
  bool same_bits_as(const Output& other) const {
    return std::memcmp(out.data(), other.out.data(), out.size() * 4) == 0 &&
           std::memcmp(lse.data(), other.lse.data(), lse.size() * 4) == 0;
  }
  double error(const ReferenceResult& want) const { return worst_in_bounds(out, lse, want); }
};

std::vector<float> read(const DeviceMemory& memory, std::size_t floats) {
  std::vector<float> out(floats);
  cuda_check(cudaDeviceSynchronize(), "run");
  cuda_check(cudaMemcpy(out.data(), memory.as<float>(), floats * sizeof(float), cudaMemcpyDeviceToHost), "copy back");
  return out;
}

Output finished(const CaseData& data, std::span<const float> states) {
  Output out(data.shape());
  finalize_states(states, data.shape().v_dim, data.options().sinks, out.out, out.lse);
  return out;
}

// One case in every way it can be asked for.
class PrefillCase {
 public:
  explicit PrefillCase(const CaseData& from)
      : data(from), device(from), plan(0, device.input(), from.options()), whole(from.shape()) {
    const DeviceMemory out(whole.out.size() * 4), lse(whole.lse.size() * 4);
    for (int i = 0; i < 2; ++i) {  // the second call finds the counters of the first
      cuda_check(cudaMemset(out.as<void>(), 0xff, whole.out.size() * 4), "poison");
      cuda_check(cudaMemset(lse.as<void>(), 0xff, whole.lse.size() * 4), "poison");
      plan.attention(out.as<float>(), lse.as<float>(), nullptr);
      whole.out = read(out, whole.out.size());
      whole.lse = read(lse, whole.lse.size());
    }
  }
  double error() const {
    const Problem problem = make_problem(data.input(), data.options());
    return whole.error(reference_attention(problem, cuda::error_model(plan.kernel(), problem)));
  }
  // The state of the root, finished on the host: the logarithm is another library's.
  bool states_agree() {
    const std::size_t floats = whole.lse.size() * state_floats(data.shape().v_dim);
    const DeviceMemory states(floats * 4);
    cuda_check(cudaMemset(states.as<void>(), 0xff, floats * 4), "poison");
    plan.attention_states(states.as<float>(), nullptr);
    root = read(states, floats);
    const Output got = finished(data, root);
    return std::memcmp(got.out.data(), whole.out.data(), got.out.size() * 4) == 0;
  }
  // The last queries of every sequence in a call of their own.
  bool last_queries_agree(std::int64_t count) const {
    AttentionInput in = device.input();
    const std::int64_t before = in.q.queries - count;
    in.q.data = static_cast<const std::byte*>(in.q.data) +
                before * in.q.query_stride * static_cast<std::int64_t>(dtype_size(in.q.dtype));
    in.q.queries = count;
    CudaPlan last(0, in, data.options());
    if (last.kernel() != plan.kernel()) return false;
    const auto row = static_cast<std::size_t>(data.shape().heads * data.shape().v_dim);
    const std::size_t rows = static_cast<std::size_t>(count) * row;  // of a sequence
    const DeviceMemory out(static_cast<std::size_t>(in.q.batch) * rows * 4);
    last.attention(out.as<float>(), nullptr, nullptr);
    const std::vector<float> got = read(out, static_cast<std::size_t>(in.q.batch) * rows);
    for (std::size_t b = 0; b < static_cast<std::size_t>(in.q.batch); ++b) {
      const float* want = &whole.out[b * (rows + static_cast<std::size_t>(before) * row)];
      want += static_cast<std::size_t>(before) * row;
      if (std::memcmp(&got[b * rows], want, rows * 4) != 0) return false;
    }
    return true;
  }
  // The tree in nodes of 2^level leaves and one of half as many, merged here.
  bool nodes_agree(int level) {
    const ReductionOrder& order = data.shape().order;
    const int levels = plan::log2_exact(order.branches);
    if (level >= levels) return true;
    plan::NodeSet nodes;
    for (int i = 0; i < 1 << (levels - level); ++i) nodes.push_back({level, i});
    AttentionInput in = device.input();
    in.q = data.input().q;
    AttentionOptions options = data.options();
    options.sinks = {};
    const Problem problem = make_problem(in, options, &nodes);
    const std::size_t floats = root.size();
    std::vector<float> states(nodes.size() * floats);
    rank.attend(problem, states.data());
    if (rank.kernel() != plan.kernel()) return false;
    for (std::size_t width = 1; width < nodes.size(); width *= 2) {
      for (std::size_t i = 0; i < nodes.size(); i += 2 * width) {
        merge_states(std::span(states).subspan(i * floats, floats),
                     std::span<const float>(states).subspan((i + width) * floats, floats), data.shape().v_dim);
      }
    }
    return std::memcmp(states.data(), root.data(), floats * 4) == 0;
  }

  const CaseData& data;
  DeviceCase device;
  CudaPlan plan;
  cuda::RankDevice rank{0};
  Output whole;
  std::vector<float> root;
};

bool is_byte(DType type) { return dtype_size(type) == 1; }

// q is bfloat16 where K and V are bytes.
void set_types(Case& shape, DType type) {
  shape.k_type = shape.v_type = type;
  shape.q_type = is_byte(type) ? DType::kBFloat16 : type;
}

bool on_hopper() {
  const CudaDevice device = cuda_devices().front();
  return device.compute_major == 9 && device.compute_minor == 0;
}

class CudaPrefill : public testing::Test {
 protected:
  void SetUp() override {
    if (!cuda_problem().empty()) GTEST_SKIP() << "*** SKIPPED: " << cuda_problem() << " ***";
    if (!on_hopper()) GTEST_SKIP() << "*** SKIPPED: the kernel for prefill is there for compute capability 9.0 ***";
  }
};

// Every type and head dim that has code, and some that are filled up, with masks, layouts, positions and orders in
// turn.
TEST_F(CudaPrefill, EveryShape) {
  double worst = 0;
  std::uint64_t seed = 0;
  const std::size_t step = thinning();
  constexpr auto kPieces = Placement::kContiguous;
  const ReductionOrder orders[] = {{256, 256}, {64, 16}, {128, 4}, {192, 8}, {64, 2, kPieces, 128}, {256, 1}};
  for (const std::int64_t dim : {64, 80, 96, 128, 16, 72, 112}) {
    for (const DType type : {DType::kBFloat16, DType::kFloat16, DType::kInt8, DType::kFp8E4M3}) {
      if (is_byte(type) && dim == 72) continue;  // no whole units of 16 bytes
      for (const std::int64_t queries : {64, 100, 129, 300}) {
        Case shape;
        const std::uint64_t turn = seed++;
        if (turn % step != 0) continue;
        set_types(shape, type);
        shape.fp8_scales = turn % 5 != 0;
        shape.head_dim = shape.v_dim = dim;
        if (turn % 8 == 5) shape.v_dim = 48;
        shape.queries = queries;
        shape.tokens = turn % 4 == 0 ? 1100 : 300 + static_cast<std::int64_t>(turn * 37 % 400);
        shape.heads = turn % 3 == 0 ? 4 : 2;
        shape.causal = turn % 4 != 1;
        shape.window = turn % 5 == 2 ? 130 : 0;
        shape.sinks = turn % 3 == 1;
        shape.scale = turn % 7 == 3 ? 0.7f : 1.0f;
        shape.k_layout = turn % 3 == 2 ? Layout::kPaged : turn % 3 == 1 ? Layout::kHeadsFirst : Layout::kTokensFirst;
        shape.v_layout = turn % 11 == 5 ? Layout::kTokensFirst : shape.k_layout;
        shape.page_tokens = turn % 2 == 0 ? 64 : 256;
        shape.row_padding = turn % 6 == 3 ? 16 / static_cast<std::int64_t>(dtype_size(type)) : 0;
        shape.order = orders[turn % std::size(orders)];
        shape.first_key = turn % 4 == 3 ? (shape.k_layout == shape.v_layout && turn % 3 != 2 ? 77 : 320) : 0;
        if (turn % 10 == 6) {
          shape.batch = 3;
          shape.lengths = {shape.tokens, 0, shape.tokens / 2};
        }
        shape.data = turn % 9 == 4 ? DataKind::kLargeLogits : turn % 9 == 7 ? DataKind::kPeaked : DataKind::kNormal;
        const CaseData data(shape, turn);
        PrefillCase test(data);
        const std::string name =
            "turn " + std::to_string(turn) + ", " + std::string(dtype_name(type)) + ", dim " + std::to_string(dim);
        EXPECT_EQ(test.plan.kernel(), "prefill") << name;
        const double error = test.error();
        EXPECT_LE(error, 1) << name;
        EXPECT_TRUE(test.states_agree()) << name;
        EXPECT_TRUE(queries == 64 || test.last_queries_agree(queries - queries / 4)) << name;
        for (int level = 0; level < 4; ++level) EXPECT_TRUE(test.nodes_agree(level)) << name << ", level " << level;
        worst = std::max(worst, error);
      }
    }
  }
  std::printf("largest error %.3f of its bound\n", worst);
}

// Scales and queries of very different size, in one call and in one leaf.
TEST_F(CudaPrefill, ScalesOfBytes) {
  double worst = 0;
  for (const DType type : {DType::kInt8, DType::kFp8E4M3}) {
    for (const int spread : {0, 3, 30, 90}) {
      for (const int shift : {0, 60, -60}) {
        Case shape;
        set_types(shape, type);
        shape.fp8_scales = true;
        shape.tokens = 450;
        shape.queries = 70;
        shape.causal = true;
        shape.head_dim = shape.v_dim = spread == 3 ? 64 : 128;
        shape.order = {256, 2};
        CaseData data(shape, 7);
        spread_sizes(data, spread, shift, -0.03f, 0.02f);
        const PrefillCase test(data);
        const double error = test.error();
        EXPECT_EQ(test.plan.kernel(), "prefill");
        EXPECT_LE(error, 1) << dtype_name(type) << ", spread " << spread << ", shift " << shift;
        worst = std::max(worst, error);
      }
    }
  }
  std::printf("largest error %.3f of its bound\n", worst);
}

// Every byte there is: a sequence of one key, whose elements are all the same, for each.
TEST_F(CudaPrefill, EveryByte) {
  for (const DType type : {DType::kInt8, DType::kFp8E4M3}) {
    for (const std::int64_t dim : {64, 80, 128}) {
      Case shape;
      set_types(shape, type);
      shape.fp8_scales = true;
      shape.head_dim = shape.v_dim = dim;
      shape.batch = 128;
      shape.heads = 2;
      shape.tokens = 1;
      shape.queries = 64;
      CaseData data(shape, 3);
      const auto value_of = [&](std::int64_t batch, std::int64_t head) {
        const auto byte = static_cast<std::uint8_t>(2 * batch + head);
        if (type == DType::kFp8E4M3) return base::fp8_to_float(byte);
        return static_cast<float>(std::max(-127, static_cast<int>(static_cast<std::int8_t>(byte))));  // as set_k does
      };
      for (std::int64_t b = 0; b < shape.batch; ++b) {
        for (std::int64_t h = 0; h < shape.kv_heads; ++h) {
          data.set_k_scale(b, 0, h, 0x1p-5f);
          data.set_v_scale(b, 0, h, 1.0f);
          for (std::int64_t d = 0; d < dim; ++d) {
            data.set_k(b, 0, h, d, value_of(b, h));
            data.set_v(b, 0, h, d, value_of(b, h));
          }
        }
      }
      const PrefillCase test(data);
      EXPECT_EQ(test.plan.kernel(), "prefill");
      EXPECT_LE(test.error(), 1) << dtype_name(type) << ", dim " << dim;  // lse has the key
      for (std::int64_t b = 0; b < shape.batch; ++b) {
        for (std::int64_t h = 0; h < shape.heads; ++h) {
          const float want = value_of(b, h);
          const auto at = static_cast<std::size_t>((b * shape.queries * shape.heads + h) * dim);
          for (std::size_t d = 0; d < static_cast<std::size_t>(dim) && !std::isnan(want); ++d) {
            ASSERT_NEAR(test.whole.out[at + d], want, 1e-5f * std::fabs(want)) << dtype_name(type) << " " << 2 * b + h;
          }
        }
      }
    }
  }
}

// Queries that are not bfloat16 numbers have a kernel that cuts them into limbs.
TEST_F(CudaPrefill, WiderQueriesOfBytesGoElsewhere) {
  for (const DType q : {DType::kFloat16, DType::kFloat32}) {
    Case shape;
    set_types(shape, DType::kInt8);
    shape.q_type = q;
    shape.queries = 64;
    const CaseData data(shape, 1);
    const PrefillCase test(data);
    EXPECT_EQ(test.plan.kernel(), "mma8");
    EXPECT_LE(test.error(), 1);
  }
}

// Some hundred keys and queries, so that a warpgroup's tile is full and another is not.
Case few_hundred(DType type, std::int64_t tokens, std::int64_t queries) {
  Case shape;
  set_types(shape, type);
  shape.fp8_scales = true;
  shape.tokens = tokens;
  shape.queries = queries;
  shape.order = {64, 8};
  return shape;
}

void expect_within_bound(const CaseData& data, int what) {
  const PrefillCase test(data);
  EXPECT_EQ(test.plan.kernel(), "prefill");
  EXPECT_LE(test.error(), 1) << dtype_name(data.shape().k_type) << " " << what;
}

// Of logits beyond 2^31 rounding takes more than 2^x has room for: all weights of a row may vanish, or be infinite.
TEST_F(CudaPrefill, HugeLogits) {
  for (const DType type : {DType::kBFloat16, DType::kFloat16, DType::kInt8, DType::kFp8E4M3}) {
    for (const float scale : {1e8f, 1e10f, 1e15f, 0x1p90f}) {
      Case shape = few_hundred(type, 300, 150);
      shape.scale = scale;
      expect_within_bound(CaseData(shape, 5), std::ilogb(scale));
    }
  }
}

// What is not a number shows where it should and nowhere else.
TEST_F(CudaPrefill, NotFinite) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN(), kInf = std::numeric_limits<float>::infinity();
  for (int what = 0; what < 8; ++what) {
    Case shape = few_hundred(what % 2 == 0 ? DType::kBFloat16 : DType::kFloat16, 500, 200);
    shape.causal = true;
    CaseData data(shape, 9);
    if (what == 0) data.set_v(0, 400, 1, 7, kNan);  // hidden from some queries
    if (what == 1) data.set_v(0, 400, 1, 7, kInf);
    if (what == 2) data.set_v(0, 10, 0, 7, -kInf);
    if (what == 3) data.set_k(0, 400, 0, 7, kNan);
    if (what == 4) data.set_k(0, 400, 0, 7, kInf);
    if (what == 5) data.set_q(0, 77, 2, 3, kNan);
    if (what == 6) data.set_q(0, 77, 2, 3, -kInf);
    if (what == 7) {
      data.set_k(0, 400, 0, 7, -kInf);
      data.set_v(0, 400, 0, 5, kNan);
    }
    expect_within_bound(data, what);
  }
}

TEST_F(CudaPrefill, BytesThatAreNotFinite) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN(), kInf = std::numeric_limits<float>::infinity();
  for (const DType type : {DType::kInt8, DType::kFp8E4M3}) {
    for (int what = type == DType::kInt8 ? 2 : 0; what < 11; ++what) {  // int8 has no NaN
      Case shape = few_hundred(type, 500, 200);
      shape.causal = true;
      CaseData data(shape, 9);
      if (what == 0) data.set_v(0, 400, 1, 7, kNan);  // hidden from some queries
      if (what == 1) data.set_k(0, 400, 0, 7, kNan);
      if (what == 2) data.set_v_scale(0, 400, 0, kNan);
      if (what == 3) data.set_k_scale(0, 400, 1, kNan);
      if (what == 4) data.set_v_scale(0, 400, 0, kInf);
      if (what == 5) data.set_v_scale(0, 10, 1, -kInf);
      if (what == 6) data.set_k_scale(0, 400, 1, kInf);
      if (what == 7) data.set_k_scale(0, 10, 0, -kInf);
      if (what == 8) data.set_q(0, 77, 2, 3, kNan);
      if (what == 9) data.set_q(0, 77, 2, 3, -kInf);
      if (what == 10) {
        data.set_k_scale(0, 400, 0, -kInf);
        data.set_v_scale(0, 400, 0, kNan);
      }
      expect_within_bound(data, what);
    }
  }
}

}  // namespace
}  // namespace treeattn::kernels
