// SPDX-License-Identifier: Apache-2.0
// Attention on the GPU against the oracle: the one list of cases, random ones, and the same bits however it is split.
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <random>

#include "device_case.h"
#include "kernels/cuda/error_model.h"
#include "kernels/problem.h"
#include "treeattn/cuda.h"

namespace treeattn::kernels {
namespace {

struct Output {
  std::vector<float> out, lse;
};

Output run(const DeviceCase& device, const CaseData& data, std::string* kernel = nullptr) {
  const Case& shape = data.shape();
  const auto rows = static_cast<std::size_t>(shape.batch * shape.queries * shape.heads);
  Output got{std::vector<float>(rows * static_cast<std::size_t>(shape.v_dim)), std::vector<float>(rows)};
  DeviceMemory out(got.out.size() * 4), lse(got.lse.size() * 4);
  cuda_check(cudaMemset(out.as<void>(), 0xff, got.out.size() * 4), "poison");
  cuda_check(cudaMemset(lse.as<void>(), 0xff, got.lse.size() * 4), "poison");
  CudaPlan plan(0, device.input(), data.options());
  plan.attention(out.as<float>(), lse.as<float>(), nullptr);
  cuda_check(cudaDeviceSynchronize(), "run");
  cuda_check(cudaMemcpy(got.out.data(), out.as<void>(), got.out.size() * 4, cudaMemcpyDeviceToHost), "copy back");
  cuda_check(cudaMemcpy(got.lse.data(), lse.as<void>(), got.lse.size() * 4, cudaMemcpyDeviceToHost), "copy back");
  if (kernel != nullptr) *kernel = plan.kernel();
  return got;
}

// The largest error in units of its bound.
double check_case(const CaseData& data, std::string* kernel = nullptr) {
  const DeviceCase device(data);
  const Problem problem = make_problem(data.input(), data.options());
  std::string used;
  const Output got = run(device, data, &used);
  const ReferenceResult want = reference_attention(problem, cuda::error_model(used, problem));
  double worst = 0;
  for (std::size_t i = 0; i < got.out.size(); ++i) {
    worst = std::max(worst, error_in_bounds(got.out[i], want.out[i], want.out_bound[i]));
  }
  for (std::size_t i = 0; i < got.lse.size(); ++i) {
    worst = std::max(worst, error_in_bounds(got.lse[i], want.lse[i], want.lse_bound[i]));
  }
  if (kernel != nullptr) *kernel = used;
  return worst;
}

class CudaTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!cuda_problem().empty()) GTEST_SKIP() << "*** SKIPPED: " << cuda_problem() << " ***";
  }
};

TEST_F(CudaTest, CaseList) {
  double worst = 0;
  std::size_t seed = 1;
  for (const Case& shape : case_list()) {
    const double error = check_case(CaseData(shape, seed++));
    EXPECT_LE(error, 1) << shape.name;
    worst = std::max(worst, error);
  }
  std::printf("largest error %.3f of its bound\n", worst);
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

}  // namespace
}  // namespace treeattn::kernels
