// SPDX-License-Identifier: Apache-2.0
// Packed states on a GPU: the calls of treeattn/state.h against their counterparts, bit for bit.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "cuda/device_case.h"
#include "treeattn/cuda.h"
#include "treeattn/cuda_states.h"
#include "treeattn/error.h"
#include "treeattn/state.h"

namespace treeattn {
namespace {

using kernels::cuda_check;
using kernels::DeviceMemory;

class CudaStates : public testing::Test {
 protected:
  void SetUp() override {
    if (!cuda_problem().empty()) GTEST_SKIP() << "*** SKIPPED: " << cuda_problem() << " ***";
  }
  std::mt19937 random{std::random_device{}()};

  // Ordinary rows, empty ones with garbage behind the mark, maxima far apart.
  std::vector<float> rows(std::size_t count, std::int64_t v_dim) {
    std::normal_distribution<float> normal;
    std::vector<float> out(count * state_floats(v_dim));
    for (std::size_t r = 0; r < count; ++r) {
      float* row = out.data() + r * state_floats(v_dim);
      for (std::size_t i = 0; i < state_floats(v_dim); ++i) row[i] = normal(random);
      row[0] *= random() % 4 == 0 ? 1e5f : 10.0f;
      row[1] = std::fabs(row[1]) + 0.1f;
      if (random() % 7 == 0) row[0] = -std::numeric_limits<float>::infinity();
    }
    return out;
  }
};

std::vector<float> read(const DeviceMemory& memory, std::size_t floats) {
  std::vector<float> out(floats);
  cuda_check(cudaDeviceSynchronize(), "run");
  cuda_check(cudaMemcpy(out.data(), memory.as<float>(), floats * sizeof(float), cudaMemcpyDeviceToHost), "copy");
  return out;
}

bool same(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

TEST_F(CudaStates, IdentityMergeAndFinalize) {
  for (const std::int64_t v_dim : {1, 16, 40, 128, 256}) {
    for (const std::size_t count : {1u, 6u, 30u, 1002u}) {
      std::vector<float> lower = rows(count, v_dim);
      const std::vector<float> higher = rows(count, v_dim);
      const DeviceMemory low(lower.data(), lower.size() * 4), high(higher.data(), higher.size() * 4);
      cuda_merge_states(low.as<float>(), high.as<float>(), count, v_dim, nullptr);
      merge_states(lower, higher, v_dim);
      ASSERT_TRUE(same(read(low, lower.size()), lower)) << "merge of " << count << " rows of " << v_dim;

      const std::vector<float> sinks = {0.5f, -1.0f, -std::numeric_limits<float>::infinity()};
      const DeviceMemory sinks_there(sinks.data(), sinks.size() * 4);
      for (const std::size_t heads : {std::size_t{0}, sinks.size()}) {
        if (heads > 0 && count % heads != 0) continue;
        std::vector<float> out(count * static_cast<std::size_t>(v_dim)), lse(count);
        const DeviceMemory out_there(out.size() * 4), lse_there(lse.size() * 4);
        cuda_finalize_states(low.as<float>(), count, v_dim, heads > 0 ? sinks_there.as<float>() : nullptr, heads,
                             out_there.as<float>(), lse_there.as<float>(), nullptr);
        finalize_states(lower, v_dim, std::span(sinks).first(heads), out, lse);
        ASSERT_TRUE(same(read(out_there, out.size()), out)) << "out of " << count << " rows of " << v_dim;
        const std::vector<float> got = read(lse_there, lse.size());
        for (std::size_t r = 0; r < count; ++r) {
          // Two libraries' logarithms.
          ASSERT_TRUE(got[r] == lse[r] || std::fabs(got[r] - lse[r]) <= 0x1p-22f * std::fabs(lse[r])) << got[r];
        }
      }
      cuda_identity_states(low.as<float>(), count, v_dim, nullptr);
      identity_states(lower, v_dim);
      ASSERT_TRUE(same(read(low, lower.size()), lower));
    }
  }
}

// What a program's own call left behind is not reported as the failure of ours.
TEST_F(CudaStates, ErrorsOfOtherCallsAreNotTheirs) {
  const DeviceMemory states(18 * sizeof(float)), out(16 * sizeof(float));
  void* too_much = nullptr;
  ASSERT_EQ(cudaMalloc(&too_much, std::size_t{1} << 60), cudaErrorMemoryAllocation);
  EXPECT_NO_THROW(cuda_identity_states(states.as<float>(), 1, 16, nullptr));
  EXPECT_NO_THROW(cuda_merge_states(states.as<float>(), states.as<float>(), 1, 16, nullptr));
  EXPECT_NO_THROW(cuda_finalize_states(states.as<float>(), 1, 16, nullptr, 0, out.as<float>(), nullptr, nullptr));
  EXPECT_EQ(cudaGetLastError(), cudaErrorMemoryAllocation);  // it stays where the program finds it
}

TEST_F(CudaStates, WrongCallsAreRefused) {
  EXPECT_THROW(cuda_merge_states(nullptr, nullptr, 1, 0, nullptr), InvalidArgument);
  EXPECT_THROW(cuda_finalize_states(nullptr, 6, 16, nullptr, 2, nullptr, nullptr, nullptr), InvalidArgument);
}

}  // namespace
}  // namespace treeattn
