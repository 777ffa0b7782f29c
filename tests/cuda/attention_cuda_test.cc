// SPDX-License-Identifier: Apache-2.0
// Attention on the GPU against the oracle: the one list of cases, and random ones.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "device_case.h"
#include "kernels/cuda/error_model.h"
#include "kernels/problem.h"
#include "treeattn/cuda.h"

namespace treeattn::kernels {
namespace {

// The largest error in units of its bound.
double check_case(const CaseData& data) {
  const cuda::DeviceOutput got = DeviceCase(data).run();
  const Problem problem = make_problem(data.input(), data.options());
  return worst_in_bounds(got.out, got.lse, reference_attention(problem, cuda::error_model(got.kernel, problem)));
}

class CudaTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!cuda_problem().empty()) GTEST_SKIP() << "*** SKIPPED: " << cuda_problem() << " ***";
  }
};

// compute-sanitizer makes everything a hundred times slower: TREEATTN_TEST_THINNING=8 takes every eighth case.
TEST_F(CudaTest, CaseList) {
  const char* given = std::getenv("TREEATTN_TEST_THINNING");
  const std::size_t step = given ? std::max(1ull, std::strtoull(given, nullptr, 10)) : 1;
  if (step > 1) std::printf("TREEATTN_TEST_THINNING=%zu: not the whole list\n", step);
  const std::vector<Case> cases = case_list();
  double worst = 0;
  for (std::size_t i = 0; i < cases.size(); i += step) {
    const double error = check_case(CaseData(cases[i], i + 1));
    EXPECT_LE(error, 1) << cases[i].name;
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
