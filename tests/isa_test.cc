// SPDX-License-Identifier: Apache-2.0
// TREEATTN_ISA takes effect: the instruction set it names is the one that runs.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/case_list.h"
#include "kernels/cpu/dispatch.h"
#include "treeattn/attention.h"
#include "treeattn/error.h"
#include "treeattn/state.h"

namespace treeattn::kernels {
namespace {

constexpr char kVariable[] = "TREEATTN_ISA";
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Every test starts without the variable; afterwards it is as it was.
class IsaTest : public testing::Test {
 protected:
  void SetUp() override {
    if (const char* value = std::getenv(kVariable)) before_ = value;
    unsetenv(kVariable);
  }
  void TearDown() override {
    if (before_) {
      setenv(kVariable, before_->c_str(), 1);
    } else {
      unsetenv(kVariable);
    }
  }

  static void force(std::string_view name) { ASSERT_EQ(setenv(kVariable, std::string(name).c_str(), 1), 0); }

 private:
  std::optional<std::string> before_;
};

// One query row and many, for each storage type: together they go through every kernel of a target.
std::vector<Case> cases() {
  std::vector<Case> result;
  for (const DType dtype : kAllDTypes) {
    for (const std::int64_t queries : {1, 24}) {
      Case shape;
      shape.name = std::string(dtype_name(dtype)) + ", " + std::to_string(queries) + " queries";
      shape.queries = queries;
      shape.heads = 6;
      shape.causal = true;
      shape.k_type = shape.v_type = dtype;
      shape.q_type = dtype == DType::kInt8 || dtype == DType::kFp8E4M3 ? DType::kBFloat16 : dtype;
      result.push_back(shape);
    }
  }
  return result;
}

struct Output {
  std::vector<float> out, lse;
  bool operator==(const Output& other) const { return same(out, other.out) && same(lse, other.lse); }

 private:
  static bool same(const std::vector<float>& a, const std::vector<float>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
  }
};

Output sized(const Case& shape) {
  const auto rows = static_cast<std::size_t>(shape.batch * shape.queries * shape.heads);
  return {std::vector<float>(rows * static_cast<std::size_t>(shape.v_dim), kNan), std::vector<float>(rows, kNan)};
}

Output by_public_call(const CaseData& data, ThreadPool& pool) {
  Output result = sized(data.shape());
  attention(data.input(), data.options(), result.out, result.lse, pool);
  return result;
}

Output by_target(const CaseData& data, const CpuTarget& target, ThreadPool& pool) {
  Output result = sized(data.shape());
  const Problem problem = make_problem(data.input(), data.options());
  std::vector<float> states(result.lse.size() * state_floats(problem.v.head_dim), kNan);
  attention_states_on(target, problem, states.data(), pool);
  finalize_states(states, problem.v.head_dim, problem.sinks, result.out, result.lse);
  return result;
}

TEST_F(IsaTest, ListIsDistinctBestFirstAndEndsWithWhatEveryProcessorHas) {
  const std::vector<std::string_view> names = available_isas();
  ASSERT_FALSE(names.empty());
  EXPECT_EQ(std::set<std::string_view>(names.begin(), names.end()).size(), names.size());
#if defined(__aarch64__)
  EXPECT_EQ(names.back(), "NEON");
#else
  EXPECT_EQ(names.back(), "GENERIC");
#endif
  EXPECT_EQ(active_isa(), names.front());
  std::string list;
  for (const std::string_view name : names) list += " " + std::string(name);
  std::printf("instruction sets:%s\n", list.c_str());
}

TEST_F(IsaTest, EmptyMeansTheDefault) {
  const std::string_view best = active_isa();
  force("");
  EXPECT_EQ(active_isa(), best);
}

TEST_F(IsaTest, TheNamedOneIsTheOneThatRuns) {
  ThreadPool pool(1);
  for (const std::string_view name : available_isas()) {
    force(name);
    EXPECT_EQ(active_isa(), name);
    for (const Case& shape : cases()) {
      const CaseData data(shape, 5);
      EXPECT_TRUE(by_public_call(data, pool) == by_target(data, find_target(name), pool)) << name << ", " << shape.name;
    }
  }
}

TEST_F(IsaTest, UnknownNamesAreRefusedNamingTheAccepted) {
  ThreadPool pool(1);
  const CaseData data(cases().front(), 5);
  const std::string first(available_isas().front());
  for (const std::string& name : {std::string("AVX9000"), " " + first, first + ",", std::string("neon"), first + "X"}) {
    force(name);
    try {
      active_isa();
      ADD_FAILURE() << "\"" << name << "\" was accepted";
    } catch (const Unavailable& error) {
      const std::string message = error.what();
      EXPECT_NE(message.find("\"" + name + "\""), std::string::npos) << message;
      for (const std::string_view accepted : available_isas()) {
        EXPECT_NE(message.find(accepted), std::string::npos) << accepted << " not in: " << message;
      }
    }
    Output result = sized(data.shape());
    EXPECT_THROW(attention(data.input(), data.options(), result.out, result.lse, pool), Unavailable);
    EXPECT_TRUE(std::all_of(result.out.begin(), result.out.end(), [](float x) { return x != x; })) << "some work done";
  }
}

// Not only the name changes: sets that add in another order, or in other formats, show it in the bits.
TEST_F(IsaTest, DifferentSetsRunDifferentCode) {
  const std::vector<std::string_view> names = available_isas();
  if (names.size() < 2) GTEST_SKIP() << "only " << names.front() << " here: nothing to tell apart";
  ThreadPool pool(1);
  for (std::size_t i = 1; i < names.size(); ++i) {
    std::string differ;
    for (const Case& shape : cases()) {
      const CaseData data(shape, 5);
      force(names[0]);
      const Output best = by_public_call(data, pool);
      force(names[i]);
      if (!(best == by_public_call(data, pool))) differ += (differ.empty() ? "" : "; ") + shape.name;
    }
    std::printf("%s and %s differ in bits on: %s\n", std::string(names[0]).c_str(), std::string(names[i]).c_str(),
                differ.empty() ? "nothing" : differ.c_str());
    // Two sets of equal width and arithmetic may agree; the best and the plainest never do.
    if (i + 1 == names.size()) {
      EXPECT_FALSE(differ.empty());
    }
  }
}

}  // namespace
}  // namespace treeattn::kernels
