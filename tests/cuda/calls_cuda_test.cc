// SPDX-License-Identifier: Apache-2.0
// Calls of many plans at the same time. Blocks leave states and counts to one another in memory that a plan keeps from
// call to call: every call must see its own.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "device_case.h"
#include "kernels/cuda/ranks/rank_device.h"
#include "treeattn/cuda.h"
#include "treeattn/error.h"

namespace treeattn::kernels {
namespace {

struct Kind {
  const char* name;
  const char* kernel;
  Case shape;
  bool bad_value = false;  // one that is not a number
};

std::vector<Kind> kinds() {
  Case usual;
  usual.q_type = usual.k_type = usual.v_type = DType::kBFloat16;
  usual.heads = 8;
  usual.head_dim = usual.v_dim = 128;
  usual.tokens = 16384;
  std::vector<Kind> out = {{"items that follow from their number", "mma", usual}, {"not a number", "mma", usual, true}};
  const auto add = [&](const char* name, const char* kernel, const auto& change) {
    out.push_back({name, kernel, usual});
    change(out.back().shape);
  };
  add("a batch", "mma", [](Case& shape) {
    shape.batch = 33;
    shape.tokens = 1024;
  });
  add("unequal lengths", "mma", [](Case& shape) {
    shape.batch = 3;
    shape.lengths = {7000, 16384, 300};
  });
  add("pages", "mma", [](Case& shape) { shape.k_layout = shape.v_layout = Layout::kPaged; });
  add("more states of a group than are merged at once", "mma", [](Case& shape) {
    shape.queries = 4;
    shape.causal = true;
    shape.order = {64, 256};
  });
  add("int8", "mma8", [](Case& shape) { shape.k_type = shape.v_type = DType::kInt8; });
  add("heads in twos", "mma8", [](Case& shape) {
    shape.k_type = shape.v_type = DType::kInt8;
    shape.head_dim = shape.v_dim = 64;
  });
  add("fp8", "mma8", [](Case& shape) { shape.k_type = shape.v_type = DType::kFp8E4M3; });
  add("float32", "mma32", [](Case& shape) { shape.q_type = shape.k_type = shape.v_type = DType::kFloat32; });
  add("queries of another type", "mma", [](Case& shape) { shape.q_type = DType::kFloat32; });
  add("16 rows", "mma", [](Case& shape) { shape.heads = 32; });
  add("generic", "generic", [](Case& shape) { shape.k_type = DType::kFloat16; });
  return out;
}

// One of those that call at the same time: its own q, plan, stream and results.
struct Caller {
  static constexpr int kCalls = 6;

  Caller(const CaseData& data, std::size_t result_floats)
      : device(data), plan(0, device.input(), data.options()), results(kCalls * result_floats * sizeof(float)) {
    cuda_check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  }
  ~Caller() { cudaStreamDestroy(stream); }
  Caller(const Caller&) = delete;
  Caller& operator=(const Caller&) = delete;

  DeviceCase device;
  CudaPlan plan;
  DeviceMemory results;  // [kCalls][out, lse]
  cudaStream_t stream = nullptr;
};

TEST(CallsCudaTest, ManyPlansAtTheSameTime) {
  if (!cuda_problem().empty()) GTEST_SKIP() << "*** SKIPPED: " << cuda_problem() << " ***";
  constexpr int kCallers = 5;
  for (const Kind& kind : kinds()) {
    SCOPED_TRACE(kind.name);
    const Case& shape = kind.shape;
    CaseData data(shape, 1);
    const CaseData other(shape, 2);
    if (kind.bad_value) data.set_v(0, shape.tokens - 1, 1, 7, std::numeric_limits<float>::quiet_NaN());
    const auto rows = static_cast<std::size_t>(shape.batch * shape.queries * shape.heads);
    const std::size_t q_bytes = rows * static_cast<std::size_t>(shape.head_dim) * dtype_size(shape.q_type);
    const std::size_t out_floats = rows * static_cast<std::size_t>(shape.v_dim), floats = out_floats + rows;

    // Two queries, so that what is left of one call is wrong in the next.
    const DeviceMemory first(data.input().q.data, q_bytes), second(other.input().q.data, q_bytes);
    const auto ask = [&](const Caller& caller, int call) {
      cuda_check(
          cudaMemcpyAsync(const_cast<void*>(caller.device.input().q.data), (call % 2 == 0 ? first : second).as<void>(),
                          q_bytes, cudaMemcpyDeviceToDevice, caller.stream),
          "queries");
    };
    std::vector<std::unique_ptr<Caller>> callers;
    for (int i = 0; i < kCallers; ++i) callers.push_back(std::make_unique<Caller>(data, floats));
    EXPECT_EQ(callers[0]->plan.kernel(), kind.kernel);

    std::vector<float> expected[2];
    for (int call = 0; call < 2; ++call) {
      ask(*callers[0], call);
      cuda_check(cudaDeviceSynchronize(), "queries");
      const cuda::DeviceOutput alone = callers[0]->device.run();
      expected[call] = alone.out;
      expected[call].insert(expected[call].end(), alone.lse.begin(), alone.lse.end());
    }
    EXPECT_NE(std::memcmp(expected[0].data(), expected[1].data(), floats * sizeof(float)), 0);

    for (int call = 0; call < Caller::kCalls; ++call) {
      for (const auto& caller : callers) {
        ask(*caller, call);
        float* out = caller->results.as<float>() + static_cast<std::size_t>(call) * floats;
        caller->plan.attention(out, out + out_floats, caller->stream);
      }
    }
    cuda_check(cudaDeviceSynchronize(), "calls");
    std::vector<float> got(Caller::kCalls * floats);
    for (int i = 0; i < kCallers; ++i) {
      cuda_check(cudaMemcpy(got.data(), callers[static_cast<std::size_t>(i)]->results.as<float>(),
                            got.size() * sizeof(float), cudaMemcpyDeviceToHost),
                 "results");
      for (std::size_t call = 0; call < Caller::kCalls; ++call) {
        EXPECT_EQ(std::memcmp(&got[call * floats], expected[call % 2].data(), floats * sizeof(float)), 0)
            << "caller " << i << ", call " << call;
      }
    }
  }
}

// One head on the second of two pages, which are shorter than their number of tokens may say.
struct PagedCall {
  static constexpr std::int64_t kTokens = 112, kDim = 64;

  PagedCall(std::int64_t page_tokens, const std::int32_t* table, std::int64_t length) : lengths{length} {
    // Page 0 is nobody's. Not NaN: what comes out not finite is computed once more, by another kernel.
    cuda_check(cudaMemset(rows.as<void>(), 0x3f, kTokens * kDim * 2), "page 0");
    cuda_check(cudaMemset(rows.as<std::byte>() + kTokens * kDim * 2, 0, kTokens * kDim * 2), "page 1");
    cuda_check(cudaMemset(q.as<void>(), 0, kDim * 2), "q");
    in.q = QueryView::dense(q.as<void>(), DType::kBFloat16, 1, 1, 1, kDim);
    in.k = KvView::paged(rows.as<void>(), DType::kBFloat16, 2, page_tokens, 1, kDim, 1, 1, table);
    in.k.page_stride = kTokens * kDim;
    in.k.tokens = kTokens;
    in.v = in.k;
    in.lengths = lengths;
  }
  std::vector<float> run() const {
    CudaPlan plan(0, in, {});
    plan.attention(out.as<float>(), nullptr, nullptr);
    std::vector<float> got(kDim);
    cuda_check(cudaMemcpy(got.data(), out.as<void>(), kDim * sizeof(float), cudaMemcpyDeviceToHost), "results");
    return got;
  }

  DeviceMemory rows{2 * kTokens * kDim * 2}, q{kDim * 2}, out{kDim * sizeof(float)};
  std::vector<std::int64_t> lengths;
  AttentionInput in;
};

TEST(CallsCudaTest, PagesOfAnySize) {
  if (!cuda_problem().empty()) GTEST_SKIP() << "*** SKIPPED: " << cuda_problem() << " ***";
  const std::int32_t second_page = 1;
  for (const std::int64_t page_tokens : {std::int64_t{112}, std::int64_t{1} << 31, std::int64_t{1} << 32}) {
    const PagedCall call(page_tokens, &second_page, 100);
    EXPECT_EQ(call.run(), std::vector<float>(PagedCall::kDim)) << page_tokens;
  }
}

// Many queries of several sequences, by kernels that leave states of all of them on their way.
TEST(CallsCudaTest, LargeCallInParts) {
  if (!cuda_problem().empty()) GTEST_SKIP() << "*** SKIPPED: " << cuda_problem() << " ***";
  Case shape;
  shape.batch = 5;
  shape.queries = 1024;
  shape.heads = 32;
  shape.head_dim = shape.v_dim = 128;
  shape.tokens = 16384;
  shape.causal = true;
  shape.lengths = {16384, 9000, 16000, 600, 12345};
  shape.order = {64, 256};
  for (const bool alibi : {false, true}) {
    SCOPED_TRACE(alibi);
    shape.alibi = alibi;
    if (alibi) shape.q_type = shape.k_type = shape.v_type = DType::kBFloat16;
    const CaseData data(shape, 1);
    const DeviceCase device(data);
    const cuda::DeviceOutput whole = device.run();
    constexpr std::size_t kMiB = std::size_t{1} << 20;
    const std::size_t at_once = CudaPlan(0, device.input(), data.options()).workspace_bytes();
    ASSERT_GT(at_once, 1100 * kMiB);

    cuda::RankDevice rank(0);
    const DeviceMemory out(whole.out.size() * sizeof(float));
    cuda_check(cudaMemset(out.as<void>(), 0xff, whole.out.size() * sizeof(float)), "NaN");
    const std::size_t before = cuda_free_bytes(0);
    rank.attend_on_device(make_problem(device.input(), data.options()), out.as<float>());
    rank.finish();
    // At most 1 GiB and a quarter more, and some MiB that are no workspace.
    EXPECT_LT(before, cuda_free_bytes(0) + at_once / 4 * 5);
    std::printf("%zu MiB at once, %zu MiB taken\n", at_once / kMiB, (before - cuda_free_bytes(0)) / kMiB);
    std::vector<float> got(whole.out.size());
    cuda_check(cudaMemcpy(got.data(), out.as<void>(), got.size() * sizeof(float), cudaMemcpyDeviceToHost), "results");
    EXPECT_EQ(got, whole.out);
  }
}

TEST(CallsCudaTest, NoPlaceForTheResult) {
  if (!cuda_problem().empty()) GTEST_SKIP() << "*** SKIPPED: " << cuda_problem() << " ***";
  const std::int32_t second_page = 1;
  const PagedCall call(112, &second_page, 100);
  CudaPlan plan(0, call.in, {});
  EXPECT_THROW(plan.attention(nullptr, nullptr, nullptr), InvalidArgument);
  EXPECT_THROW(plan.attention_states(nullptr, nullptr), InvalidArgument);
}

TEST(CallsCudaTest, WithoutTokensThereNeedNotBeATable) {
  if (!cuda_problem().empty()) GTEST_SKIP() << "*** SKIPPED: " << cuda_problem() << " ***";
  EXPECT_EQ(PagedCall(112, nullptr, 0).run(), std::vector<float>(PagedCall::kDim));
}

}  // namespace
}  // namespace treeattn::kernels
