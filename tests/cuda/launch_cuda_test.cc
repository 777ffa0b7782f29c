// SPDX-License-Identifier: Apache-2.0
// Which kernel a call gets on GPUs with less shared memory than the one at hand, and that it computes the same there.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "device_case.h"
#include "kernels/cuda/plan_parts.h"
#include "treeattn/cuda.h"

namespace treeattn::kernels {
namespace {

// What a block may have: compute capability 8.6, 8.9 and 12.0; 8.0; 9.0.
constexpr std::size_t kSmall = 99 << 10, kAmpere = 163 << 10, kHopper = 227 << 10;

cuda::Launch launch_for(const cuda::AttentionParams& params, int rows, std::size_t most_bytes) {
  const cuda::Launch launch = cuda::find_decode_mma(params, rows, most_bytes);
  return launch.kernel != nullptr ? launch : cuda::find_generic(params, rows, most_bytes);
}

// Needs no GPU.
TEST(LaunchCudaTest, FitsIntoSharedMemory) {
  for (const DType type : {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kInt8, DType::kFp8E4M3}) {
    for (const int dim : {16, 64, 80, 96, 112, 128, 192, 256}) {
      for (const std::size_t most_bytes : {kSmall, kAmpere, kHopper}) {
        cuda::AttentionParams params;
        params.k.dim = params.v.dim = dim;
        params.k.dtype = params.v.dtype = type;
        params.k.token_stride = params.v.token_stride = params.k.head_stride = params.v.head_stride = dim;
        params.q_dtype = dtype_size(type) == 1 ? DType::kBFloat16 : type;
        params.q_query_stride = params.q_head_stride = dim;
        params.kv_heads = 2;
        const std::string alone = launch_for(params, 1, most_bytes).name;
        for (int rows = 1; rows <= 16; ++rows) {
          const cuda::Launch launch = launch_for(params, rows, most_bytes);
          ASSERT_NE(launch.kernel, nullptr) << dtype_name(type) << " " << dim << " " << rows;
          EXPECT_LE(launch.shared_bytes, most_bytes) << dtype_name(type) << " " << dim << " " << rows;
          EXPECT_LE(launch.limits.rows, rows * launch.limits.kv_heads);
          EXPECT_TRUE(launch.limits.kv_heads == 1 || launch.limits.rows == 2 * rows) << "both heads in every item";
          EXPECT_EQ(launch.name, alone) << "a row's bits must not depend on how many come with it";
        }
      }
    }
  }
}

// out and lse as on a GPU whose blocks have no more shared memory.
std::vector<float> run_with(const CaseData& data, std::size_t most_bytes, int& rows_per_item) {
  const DeviceCase device(data);
  const Problem problem = make_problem(device.input(), data.options());
  const DeviceMemory lengths(problem.lengths.data(), problem.lengths.size() * sizeof(std::int64_t));
  const DeviceMemory first_query(problem.first_query.data(), problem.first_query.size() * sizeof(std::int64_t));
  cuda::AttentionParams params = cuda::params_of(problem);
  params.lengths = lengths.as<std::int64_t>();
  params.first_query = first_query.as<std::int64_t>();
  const auto rows = static_cast<int>(std::min<std::int64_t>(problem.group() * problem.q.queries, 16));
  cuda::Launch launch = launch_for(params, rows, most_bytes);
  cuda_check(cudaFuncSetAttribute(reinterpret_cast<const void*>(launch.kernel),
                                  cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(launch.shared_bytes)),
             "shared memory");
  launch.slots = launch.busy = 64;
  const cuda::Work work = cuda::split(problem, launch);
  rows_per_item = work.rows_per_item;
  const DeviceMemory items(work.items.data(), work.items.size() * sizeof(cuda::WorkItem));
  const DeviceMemory workspace(work.workspace_bytes), counters(work.counters * sizeof(unsigned));
  cuda_check(cudaMemset(counters.as<void>(), 0, work.counters * sizeof(unsigned)), "counters");
  cuda::set_work(work, {items.as<cuda::WorkItem>(), workspace.as<std::byte>(), counters.as<unsigned>()}, params);
  const auto all = static_cast<std::size_t>(problem.rows());
  const std::size_t floats = all * static_cast<std::size_t>(problem.v.head_dim);
  const DeviceMemory results((floats + all) * sizeof(float));
  params.out = results.as<float>();
  params.lse = results.as<float>() + floats;
  cuda::start(launch, params, nullptr);
  std::vector<float> out(floats + all);
  cuda_check(cudaMemcpy(out.data(), results.as<void>(), out.size() * sizeof(float), cudaMemcpyDeviceToHost), "results");
  return out;
}

TEST(LaunchCudaTest, FewerRowsOfAnItemHaveTheSameBits) {
  if (!cuda_problem().empty()) GTEST_SKIP() << "*** SKIPPED: " << cuda_problem() << " ***";
  struct Kind {
    DType type;
    std::int64_t dim, group, queries;
    std::size_t most_bytes;
    int rows;  // of the largest item
  };
  const std::vector<Kind> kinds = {
      {DType::kBFloat16, 96, 16, 1, kSmall, 8},   {DType::kFloat16, 128, 5, 3, kSmall, 5},
      {DType::kBFloat16, 128, 12, 2, kSmall, 8},  {DType::kBFloat16, 256, 4, 1, kAmpere, 4},
      {DType::kFloat16, 256, 1, 7, kAmpere, 3},   {DType::kFp8E4M3, 256, 8, 1, kSmall, 4},
      {DType::kBFloat16, 256, 16, 1, kAmpere, 4}, {DType::kInt8, 248, 16, 1, kSmall / 2, 8},
      {DType::kFloat32, 128, 12, 2, kSmall, 8},   {DType::kFloat32, 256, 4, 1, kAmpere, 4}};
  for (const Kind& kind : kinds) {
    Case shape;
    shape.k_type = shape.v_type = kind.type;
    shape.q_type = dtype_size(kind.type) == 1 ? DType::kBFloat16 : kind.type;
    shape.head_dim = shape.v_dim = kind.dim;
    shape.heads = 2 * kind.group;
    shape.queries = kind.queries;
    shape.causal = true;
    shape.tokens = 3000;
    shape.order = {64, 64};
    const CaseData data(shape, 5);
    const cuda::DeviceOutput expected = DeviceCase(data).run();
    int rows = 0;
    const std::vector<float> got = run_with(data, kind.most_bytes, rows);
    EXPECT_EQ(rows, kind.rows) << dtype_name(kind.type) << " " << kind.dim << " " << kind.group;
    EXPECT_EQ(std::memcmp(got.data(), expected.out.data(), expected.out.size() * sizeof(float)), 0)
        << dtype_name(kind.type) << " " << kind.dim << " " << kind.group;
    EXPECT_EQ(std::memcmp(&got[expected.out.size()], expected.lse.data(), expected.lse.size() * sizeof(float)), 0);
  }
}

}  // namespace
}  // namespace treeattn::kernels
