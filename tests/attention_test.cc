// SPDX-License-Identifier: Apache-2.0
// Attention on every instruction set this processor has, and through the public calls, against the oracle.
#include "treeattn/attention.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iterator>
#include <limits>
#include <map>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "address_limit.h"
#include "kernels/case_list.h"
#include "kernels/cpu/dispatch.h"
#include "thinning.h"
#include "treeattn/error.h"
#include "treeattn/state.h"

namespace treeattn::kernels {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
// A NaN is not one number: bit tricks that work on the usual one can turn these into something finite.
const float kNans[] = {kNan, std::bit_cast<float>(0xffffffffu), std::bit_cast<float>(0x7fc00155u)};

std::string bits_of(float x) { return " " + std::to_string(std::bit_cast<std::uint32_t>(x)); }

bool is_nan(float x) { return std::isnan(x); }

std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

ThreadPool& pool_of(int threads) {
  static ThreadPool one(1), two(2), seven(7);
  return threads == 1 ? one : threads == 2 ? two : seven;
}

std::vector<float> states_on(const CpuTarget& target, const Problem& problem, int threads) {
  std::vector<float> states(index(problem.rows()) * state_floats(problem.v.head_dim), kNan);
  attention_states_on(target, problem, states.data(), pool_of(threads));
  return states;
}

struct Output {
  std::vector<float> out, lse;
};

Output finalized(const std::vector<float>& states, const Problem& problem) {
  Output result;
  result.out.assign(index(problem.rows() * problem.v.head_dim), kNan);
  result.lse.assign(index(problem.rows()), kNan);
  finalize_states(states, problem.v.head_dim, problem.sinks, result.out, result.lse);
  return result;
}

// The largest error in units of its bound, and where it is.
struct Worst {
  double error = 0;
  std::string where;

  void add(const char* what, std::size_t at, double got, double want, double bound) {
    const double e = error_in_bounds(got, want, bound);
    if (!(e > error)) return;
    error = e;
    where = std::string(what) + "[" + std::to_string(at) + "] = " + std::to_string(got) + ", wanted " +
            std::to_string(want) + " +- " + std::to_string(bound);
  }
};

Worst compare(const Output& got, const ReferenceResult& want) {
  Worst worst;
  for (std::size_t i = 0; i < want.out.size(); ++i) worst.add("out", i, got.out[i], want.out[i], want.out_bound[i]);
  for (std::size_t i = 0; i < want.lse.size(); ++i) worst.add("lse", i, got.lse[i], want.lse[i], want.lse_bound[i]);
  return worst;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

std::uint64_t random_seed() {
  static const std::uint64_t seed = [] {
    const char* forced = std::getenv("TREEATTN_SEED");
    const std::uint64_t chosen =
        forced != nullptr ? std::strtoull(forced, nullptr, 10)
                          : static_cast<std::uint64_t>(std::chrono::system_clock::now().time_since_epoch().count());
    std::printf("TREEATTN_SEED=%llu\n", static_cast<unsigned long long>(chosen));
    return chosen;
  }();
  return seed;
}

// The oracle on a case that every target gets: asked once for those that round alike. Under an emulator it takes longer
// than they do.
const ReferenceResult& oracle(const std::string& name, const Problem& problem, const ErrorModel& model) {
  static std::map<std::string, std::vector<std::pair<ErrorModel, ReferenceResult>>> asked;
  auto& answers = asked[name];
  const auto same = [&](const auto& answer) { return answer.first == model; };
  const auto known = std::find_if(answers.begin(), answers.end(), same);
  if (known != answers.end()) return known->second;
  return answers.emplace_back(model, reference_attention(problem, model)).second;
}

std::string target_name(const testing::TestParamInfo<const CpuTarget*>& parameter) { return parameter.param->name; }

class TargetTest : public testing::TestWithParam<const CpuTarget*> {
 protected:
  const CpuTarget& target() const { return *GetParam(); }

  // Right on seven threads, and the same bits on one and two: of every case, or of some where tests are thinned.
  // The name and `spoiled` are all that tells the numbers of one case from those of others.
  double check(const CaseData& data, const std::string& spoiled = "") {
    const Problem problem = make_problem(data.input(), data.options());
    const std::vector<float> states = states_on(target(), problem, 7);
    const std::string name = data.shape().name + spoiled;
    const Worst worst = compare(finalized(states, problem), oracle(name, problem, error_model(target(), problem)));
    EXPECT_LE(worst.error, 1.0) << name << ": " << worst.where;
    if (checked_++ % thinning() != 0) return worst.error;
    for (const int threads : {1, 2}) {
      EXPECT_TRUE(same_bits(states, states_on(target(), problem, threads))) << data.shape().name << ", " << threads;
    }
    return worst.error;
  }

  struct Factors {
    float q, k, scale;
  };
  // One key that is not zero, in its first columns, and queries that are the same in all.
  void check_lonely_key(DType q_type, DType k_type, std::int64_t columns, const Factors& x) {
    for (const std::int64_t queries : {1, 2, 24}) {
      Case shape;
      shape.name = fmt::format("lonely key {} {} {} {} {} {}", dtype_name(q_type), dtype_name(k_type), x.q, x.k,
                               x.scale, queries);
      shape.queries = queries;
      shape.heads = shape.kv_heads = 1;
      shape.tokens = 64;
      shape.head_dim = shape.v_dim = 16;
      shape.q_type = q_type;
      shape.k_type = shape.v_type = k_type;
      shape.scale = 4 * x.scale;  // times 1 / sqrt(16)
      CaseData data(shape, 8);
      for (std::int64_t d = 0; d < 16; ++d) {
        for (std::int64_t i = 0; i < queries; ++i) data.set_q(0, i, 0, d, x.q);
        for (std::int64_t t = 0; t < 64; ++t) data.set_k(0, t, 0, d, d < columns && t == 5 ? x.k : 0.0f);
      }
      check(data);
    }
  }

 private:
  std::size_t checked_ = 0;
};

INSTANTIATE_TEST_SUITE_P(Isa, TargetTest, testing::ValuesIn(cpu_targets().begin(), cpu_targets().end()), target_name);

TEST_P(TargetTest, CaseListIsWithinBounds) {
  double worst = 0;
  for (const Case& shape : case_list()) worst = std::max(worst, check(CaseData(shape, 1)));
  std::printf("%s: largest error %.3f of its bound\n", target().name, worst);
}

TEST_P(TargetTest, RandomCasesAreWithinBounds) {
  const std::uint64_t seed = random_seed();
  for (const Case& shape : random_cases(seed, 200 / thinning())) check(CaseData(shape, seed));
}

// The keys [begin, end) of a call, by themselves: same positions, same queries. Requires begin to be a multiple of the
// page size where there are pages.
AttentionInput part(const AttentionInput& in, const Problem& problem, std::int64_t begin, std::int64_t end,
                    std::vector<std::int64_t>& lengths) {
  AttentionInput piece = in;
  lengths.clear();
  for (const std::int64_t length : problem.lengths) {
    lengths.push_back(std::clamp<std::int64_t>(length - begin, 0, end - begin));
  }
  piece.lengths = lengths;
  piece.first_key = in.first_key + begin;
  piece.first_query = problem.first_query;
  for (KvView* view : {&piece.k, &piece.v}) {
    view->tokens = end - begin;
    if (begin == 0) continue;
    if (view->page_tokens > 0) {
      view->page_table += begin / view->page_tokens;
      continue;
    }
    const std::int64_t bytes = begin * view->token_stride * static_cast<std::int64_t>(dtype_size(view->dtype));
    view->data = static_cast<const std::byte*>(view->data) + bytes;
    if (view->scales != nullptr) view->scales += begin * view->scale_token_stride;
  }
  return piece;
}

TEST_P(TargetTest, StatesOfTwoHalvesMergeIntoTheWhole) {
  std::vector<Case> cases = case_list();
  for (Case& shape : random_cases(random_seed() + 1, 50)) cases.push_back(std::move(shape));
  for (std::size_t i = 0; i < cases.size(); i += thinning()) {
    const Case& shape = cases[i];
    if (shape.tokens < 2) continue;
    const CaseData data(shape, 2);
    AttentionOptions options = data.options();
    const AttentionInput in = data.input();
    const Problem whole = make_problem(in, options);
    const bool paged = shape.k_layout == Layout::kPaged || shape.v_layout == Layout::kPaged;
    const std::int64_t step = paged ? shape.page_tokens : 1;
    const std::int64_t cut = shape.tokens / 2 / step * step;
    std::vector<std::int64_t> low_lengths, high_lengths;
    const Problem low = make_problem(part(in, whole, 0, cut, low_lengths), options);
    const Problem high = make_problem(part(in, whole, cut, shape.tokens, high_lengths), options);
    std::vector<float> states = states_on(target(), low, 2);
    merge_states(states, states_on(target(), high, 2), shape.v_dim);
    const ReferenceResult want = oracle(shape.name + " of seed 2", whole, error_model(target(), whole));
    const Worst worst = compare(finalized(states, whole), want);
    EXPECT_LE(worst.error, 1.0) << shape.name << " cut at " << cut << ": " << worst.where;
  }
}

// A few elements spoiled. The oracle knows where that must show; nan_out says in how many numbers.
struct Spoil {
  const char* name;
  std::function<void(Case&)> shape;
  std::function<void(CaseData&, float nan)> spoil;
  std::int64_t nan_out;  // outputs that must be NaN, or -1: whatever the oracle says
  std::size_t nans = 1;  // with how many of kNans: one where there is none in it
};

// Four queries of a causal call: key 96 is the first one's own, key 99 is seen by the last one only. Six query heads
// share two KV heads, v_dim is 32.
const Spoil kSpoils[] = {
    {"nothing", nullptr, [](CaseData&, float) {}, 0},
    {"nan_key_hidden_from_most", nullptr, [](CaseData& c, float nan) { c.set_k(0, 99, 0, 5, nan); }, 3 * 32,
     std::size(kNans)},
    {"nan_key_everyone_sees", nullptr, [](CaseData& c, float nan) { c.set_k(0, 10, 1, 0, nan); }, 4 * 3 * 32,
     std::size(kNans)},
    {"nan_value_hidden_from_most", nullptr, [](CaseData& c, float nan) { c.set_v(0, 99, 1, 7, nan); }, 3,
     std::size(kNans)},
    {"nan_value_everyone_sees", nullptr, [](CaseData& c, float nan) { c.set_v(0, 64, 0, 31, nan); }, 4 * 3,
     std::size(kNans)},
    {"nan_values_and_keys_nobody_sees", [](Case& s) { s.first_query = {89}; },
     [](CaseData& c, float nan) {
       for (std::int64_t t = 93; t < 100; ++t) {
         c.set_v(0, t, 0, 3, nan);
         c.set_k(0, t, 1, 3, nan);
       }
     },
     0, std::size(kNans)},
    {"nan_before_the_window", [](Case& s) { s.window = 10; },
     [](CaseData& c, float nan) {
       c.set_v(0, 86, 0, 3, nan);
       c.set_k(0, 20, 1, 3, nan);
       c.set_v(0, 87, 1, 3, nan);  // only the first query sees this one
     },
     3, std::size(kNans)},
    {"nan_query", nullptr, [](CaseData& c, float nan) { c.set_q(0, 2, 4, 1, nan); }, 32, std::size(kNans)},
    {"infinite_key", nullptr, [](CaseData& c, float) { c.set_k(0, 50, 0, 9, kInf); }, -1},
    {"infinite_key_negative", nullptr, [](CaseData& c, float) { c.set_k(0, 97, 0, 9, -kInf); }, -1},
    {"infinite_key_capped", [](Case& s) { s.softcap = 5.0f; }, [](CaseData& c, float) { c.set_k(0, 50, 0, 9, kInf); },
     0},
    {"infinite_query", nullptr, [](CaseData& c, float) { c.set_q(0, 1, 0, 3, kInf); }, -1},
    {"infinite_value", nullptr, [](CaseData& c, float) { c.set_v(0, 3, 1, 0, kInf); }, 0},
    {"infinite_value_last_of_four", nullptr, [](CaseData& c, float) { c.set_v(0, 50, 1, 0, -kInf); }, 0},
    {"infinite_values_of_both_signs", nullptr,
     [](CaseData& c, float) {
       c.set_v(0, 3, 1, 0, kInf);
       c.set_v(0, 80, 1, 0, -kInf);
     },
     4 * 3},
    {"infinite_value_of_no_weight", [](Case& s) { s.data = DataKind::kLargeLogits; },
     [](CaseData& c, float) {
       for (std::int64_t t = 0; t < 90; ++t) c.set_v(0, t, 1, 0, kInf);
     },
     0},
    {"minus_infinite_logit_hides_the_value", nullptr,
     [](CaseData& c, float nan) {
       for (std::int64_t i = 0; i < 4; ++i) {
         for (std::int64_t h = 0; h < 3; ++h) c.set_q(0, i, h, 9, 1.0f);
       }
       c.set_k(0, 40, 0, 9, -kInf);
       for (std::int64_t d = 0; d < 32; ++d) c.set_v(0, 40, 0, d, nan);
     },
     0, std::size(kNans)},
    {"all_logits_minus_infinite", [](Case& s) { s.sinks = false; },
     [](CaseData& c, float) {
       for (std::int64_t h = 0; h < 3; ++h) c.set_q(0, 3, h, 9, 1.0f);
       for (std::int64_t t = 0; t < 100; ++t) c.set_k(0, t, 0, 9, -kInf);
     },
     -1},
};

TEST_P(TargetTest, NanAndInfinityShowExactlyWhereTheyMust) {
  std::size_t turn = 0;  // thinned: one NaN, another one for the next shape
  for (const Spoil& spoil : kSpoils) {
    for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFp8E4M3}) {
      const std::string name = spoil.name;
      if (dtype == DType::kFp8E4M3 && name.find("infinite") != std::string::npos) continue;  // fp8 has none
      for (const bool tall : {false, true}) {  // many rows to a tile go another way through the kernels
        Case shape;
        shape.queries = 4;
        shape.heads = 6;
        shape.tokens = 100;
        shape.v_dim = 32;
        shape.causal = true;
        shape.order.chunk_tokens = 64;
        shape.k_type = shape.v_type = dtype;
        shape.q_type = dtype == DType::kFp8E4M3 ? DType::kBFloat16 : dtype;
        if (spoil.shape) spoil.shape(shape);
        if (tall) {  // twenty more queries after the same four
          shape.queries = 24;
          if (shape.first_query.empty()) shape.first_query = {96};
        }
        shape.name = name + " " + std::string(dtype_name(dtype)) + (tall ? " tall" : "");
        SCOPED_TRACE(shape.name);
        ++turn;
        for (std::size_t i = 0; i < spoil.nans; ++i) {
          if (thinning() > 1 && i != turn % spoil.nans) continue;
          const float nan = kNans[i];
          CaseData data(shape, 4);
          spoil.spoil(data, nan);
          check(data, bits_of(nan));
          if (tall || spoil.nan_out < 0) continue;
          const Problem problem = make_problem(data.input(), data.options());
          const Output got = finalized(states_on(target(), problem, 1), problem);
          EXPECT_EQ(std::count_if(got.out.begin(), got.out.end(), is_nan), spoil.nan_out);
        }
      }
    }
  }
}

// A signalling NaN of which the upper half alone is an infinity. Where a query is cut into limbs it must not become
// one: all logits would be minus infinity, and the row one that sees nothing.
TEST_P(TargetTest, NanOfTheLowerHalfOfAQueryShows) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kInt8, DType::kFp8E4M3}) {
    for (const std::int64_t queries : {1, 24}) {  // many rows to a tile go another way through the kernels
      Case shape;
      shape.queries = queries;
      shape.heads = 2;
      shape.kv_heads = 1;
      shape.tokens = 100;
      shape.k_type = shape.v_type = dtype;
      shape.q_type = DType::kFloat32;
      shape.name = "signalling NaN, " + std::string(dtype_name(dtype)) + ", queries " + std::to_string(queries);
      CaseData data(shape, 4);
      for (std::int64_t t = 0; t < shape.tokens; ++t) data.set_k(0, t, 0, 1, 1.0f);
      data.set_q(0, 0, 1, 1, std::bit_cast<float>(0xff800001u));
      check(data);
      const Problem problem = make_problem(data.input(), data.options());
      const Output got = finalized(states_on(target(), problem, 1), problem);
      EXPECT_EQ(std::count_if(got.out.begin(), got.out.end(), is_nan), shape.v_dim) << shape.name;
    }
  }
}

TEST_P(TargetTest, ScalesThatAreNotFiniteShowExactlyWhereTheyMust) {
  std::size_t turn = 0;
  for (const DType dtype : {DType::kInt8, DType::kFp8E4M3}) {
    for (const std::int64_t queries : {4, 24}) {
      for (const std::int64_t token : {99, 40}) {  // seen by the last query only, or by all
        for (const float bad : {kNans[0], kNans[1], kInf, -kInf}) {
          if (thinning() > 1 && turn++ % 3 != 0) continue;  // no divisor of four: each of them some time
          Case shape;
          shape.name = std::string(dtype_name(dtype)) + " bad scale, token " + std::to_string(token) + ", " +
                       std::to_string(queries) + " queries";
          shape.queries = queries;
          shape.heads = 6;
          shape.tokens = 100;
          shape.causal = true;
          shape.k_type = shape.v_type = dtype;
          shape.fp8_scales = true;
          CaseData keys(shape, 4), values(shape, 4);
          keys.set_k_scale(0, token, 1, bad);
          check(keys, " of a key" + bits_of(bad));
          values.set_v_scale(0, token, 1, bad);
          check(values, " of a value" + bits_of(bad));
        }
      }
    }
  }
}

// However small what it multiplies: q . k times the softmax's scale is nothing here, and nothing times infinity is NaN.
TEST_P(TargetTest, AnInfiniteScaleOfAKeyCountsHoweverSmallTheSoftmaxScale) {
  for (const DType dtype : {DType::kInt8, DType::kFp8E4M3}) {
    for (const std::int64_t queries : {1, 24}) {
      Case shape;
      shape.name = std::string(dtype_name(dtype)) + " infinite scale, " + std::to_string(queries) + " queries";
      shape.queries = queries;
      shape.heads = shape.kv_heads = 1;
      shape.tokens = 64;
      shape.head_dim = shape.v_dim = 16;
      shape.k_type = shape.v_type = dtype;
      shape.fp8_scales = true;
      shape.scale = 0x1p-98f;  // times 1 / sqrt(16)
      CaseData data(shape, 9);
      for (std::int64_t d = 0; d < 16; ++d) {
        for (std::int64_t i = 0; i < queries; ++i) data.set_q(0, i, 0, d, 0x1p-60f);
        data.set_k(0, 5, 0, d, 1.0f);
      }
      data.set_k_scale(0, 5, 0, -kInf);  // hides the key
      check(data);
    }
  }
}

// The scale makes a weight vanish: it is not the weight of a hidden key, and NaN times nothing is NaN.
TEST_P(TargetTest, NanShowsHoweverSmallItsScale) {
  for (const float scale : {0.0f, 1e-45f, -1e-30f}) {
    for (const std::int64_t token : {98, 97, 40}) {  // some queries do not see the first two
      Case shape;
      shape.name = "nan of scale " + std::to_string(scale) + ", token " + std::to_string(token);
      shape.queries = 4;
      shape.heads = 6;
      shape.tokens = 100;
      shape.causal = true;
      shape.k_type = shape.v_type = DType::kFp8E4M3;
      shape.fp8_scales = true;
      shape.data = DataKind::kLargeLogits;
      CaseData data(shape, 4);
      data.set_v(0, token, 1, 3, kNan);
      data.set_v_scale(0, token, 1, scale);
      check(data, bits_of(scale));
    }
  }
}

// Numbers that break things, anywhere, several at once. The oracle knows where they must show.
TEST_P(TargetTest, RandomCasesWithSpoiledNumbersAreWithinBounds) {
  const float spoilers[] = {kNan, kInf, -kInf, 0.0f, 1e-45f, -1e-38f, 3e38f, -1e30f, 1e5f};
  const std::uint64_t seed = random_seed();
  std::mt19937_64 engine(seed);
  const auto below = [&](std::int64_t n) {
    return static_cast<std::int64_t>(engine() % static_cast<std::uint64_t>(n));
  };
  for (const Case& shape : random_cases(seed + 2, 120 / thinning())) {
    CaseData data(shape, seed);
    const AttentionInput in = data.input();
    for (std::int64_t left = below(6); left > 0; --left) {
      const float x = spoilers[below(std::ssize(spoilers))];
      const std::int64_t b = below(shape.batch), h = below(shape.kv_heads), what = below(5);
      if (what == 0) data.set_q(b, below(shape.queries), below(shape.heads), below(shape.head_dim), x);
      if (what == 0 || data.length(b) == 0) continue;
      const std::int64_t token = below(data.length(b));
      if (what == 1 && shape.k_type != DType::kInt8) data.set_k(b, token, h, below(shape.head_dim), x);
      if (what == 2 && shape.v_type != DType::kInt8) data.set_v(b, token, h, below(shape.v_dim), x);
      if (what == 3 && in.k.scales != nullptr) data.set_k_scale(b, token, h, x);
      if (what == 4 && in.v.scales != nullptr) data.set_v_scale(b, token, h, x);
    }
    check(data, " spoiled");
  }
}

// Limbs of int8 queries lose what makes the first key the largest; then another one wins whose scale makes the steps of
// the weights coarse, and its value is 0. The weights of all others are rounded up, to twice what they are.
TEST_P(TargetTest, WeightsThatAreRoundedUpTogetherAreWithinBounds) {
  Case shape;
  shape.name = "weights rounded up together";
  shape.heads = shape.kv_heads = 1;
  shape.tokens = 64;
  shape.head_dim = shape.v_dim = 16;
  shape.k_type = shape.v_type = DType::kInt8;
  shape.scale = 4e5f;  // times 1 / sqrt(16)
  CaseData data(shape, 7);
  constexpr float kSteps = 127 * 256, kScale = 1e4f;
  constexpr float kHalfAStep = kScale / kSteps / 2;
  const float winner = 0.014f, other = winner + std::log(1.005f * kHalfAStep) / 1e5f;
  for (std::int64_t d = 0; d < 16; ++d) data.set_q(0, 0, 0, d, d == 0 ? 1.0f : 0.49f / kSteps);
  for (std::int64_t t = 0; t < 64; ++t) {
    data.set_k_scale(0, t, 0, t == 0 ? 1.0f : t == 1 ? winner : other);
    data.set_v_scale(0, t, 0, t == 1 ? kScale : 1.0f);
    for (std::int64_t d = 0; d < 16; ++d) {
      data.set_k(0, t, 0, d, t == 0 ? (d == 0 ? 0.0f : 127.0f) : (d == 0 ? 1.0f : 0.0f));
      data.set_v(0, t, 0, d, t == 0 ? -127.0f : t == 1 ? 0.0f : 127.0f);
    }
  }
  check(data);
}

// Instructions that take subnormal numbers for zero must not lose a logit that a large factor makes of them.
TEST_P(TargetTest, SubnormalQueriesAndKeysCountAsMuchAsOthers) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    check_lonely_key(dtype, DType::kBFloat16, 1, {0x1p-130f, 0x1p100f, 0x1p32f});
    check_lonely_key(dtype, DType::kBFloat16, 1, {0x1p100f, 0x1p-130f, 0x1p32f});
    check_lonely_key(dtype, DType::kBFloat16, 1, {0x1.234568p-110f, 0x1p110f, 4.0f});
    check_lonely_key(dtype, DType::kBFloat16, 1, {0x1p-64f, 0x1p-64f, 0x1p99f});
  }
}

// The same of float16 keys: queries have to be brought far up to be cut into float16 limbs.
TEST_P(TargetTest, TinyQueriesWithFloat16KeysCountAsMuchAsOthers) {
  for (const float size : {0x1.554466p-112f, 0x1.554466p-116f, 0x1.5544p-127f}) {
    const float key = std::min(0x1p-102f / size, 0x1p15f);
    check_lonely_key(DType::kFloat32, DType::kFloat16, 16, {size, key, 0x1p100f});
  }
}

// What a weight's lower limb brings of the smallest float16 numbers is less than half of one, and lost in every sum.
TEST_P(TargetTest, SubnormalFloat16ValuesAreWithinBounds) {
  for (const float value : {0x1p-24f, 0x1.8p-23f, 0x1p-20f}) {
    for (const std::int64_t heads : {1, 2, 4}) {
      Case shape;
      shape.name = "subnormal values" + bits_of(value) + " " + std::to_string(heads);
      shape.heads = heads;
      shape.kv_heads = 1;
      shape.tokens = 64;
      shape.head_dim = shape.v_dim = 16;
      shape.k_type = shape.v_type = DType::kFloat16;
      shape.scale = 4.0f;  // times 1 / sqrt(16)
      CaseData data(shape, 8);
      constexpr float kWeight = 0x1p-1f + 1.49f * 0x1p-14f;  // of all keys but the first
      for (std::int64_t d = 0; d < 16; ++d) {
        for (std::int64_t h = 0; h < heads; ++h) data.set_q(0, 0, h, d, d == 0 ? std::log(kWeight) : 0.0f);
        for (std::int64_t t = 0; t < 64; ++t) {
          data.set_k(0, t, 0, d, d == 0 && t > 0 ? 1.0f : 0.0f);
          data.set_v(0, t, 0, d, value);
        }
      }
      check(data);
    }
  }
}

// A row that has to be computed in another way must not take along those it happens to be grouped with: how many heads
// these are depends on the number of threads, and how many queries on how they are given.
TEST_P(TargetTest, WhatOneRowSeesChangesNoBitsOfAnother) {
  struct Rows {
    std::int64_t queries, group, window;
  };
  constexpr std::int64_t kTokens = 200, kKvHeads = 3;
  for (const Rows rows : {Rows{2, 2, 0}, {3, 1, 0}, {3, 2, 45}, {29, 1, 0}, {29, 1, 37}}) {
    for (const DType dtype : kAllDTypes) {
      Case shape;
      shape.queries = rows.queries;
      shape.heads = rows.group * kKvHeads;
      shape.kv_heads = kKvHeads;
      shape.tokens = kTokens;
      shape.causal = true;
      shape.window = rows.window;
      shape.order.chunk_tokens = 64;
      shape.k_type = shape.v_type = dtype;
      shape.fp8_scales = true;
      // A key that one query sees: the newest, or the oldest of the window.
      const std::int64_t seer = rows.window > 0 ? 0 : rows.queries - 1;
      const std::int64_t seen = rows.window > 0 ? kTokens - rows.queries - rows.window + 1 : kTokens - 1;
      const CaseData clean(shape, 5);
      const Problem problem = make_problem(clean.input(), clean.options());
      const std::vector<float> want = states_on(target(), problem, 1);
      CaseData key(shape, 5), value(shape, 5), query(shape, 5);
      for (std::int64_t h = rows.group; h < 2 * rows.group; ++h) {
        query.set_q(0, seer, h, 3, 1e-42f);  // of which limbs would lose too much
      }
      if (dtype == DType::kInt8) {
        key.set_k_scale(0, seen, 1, kNan);
        value.set_v_scale(0, seen, 1, kNan);
      } else {
        key.set_k(0, seen, 1, 3, kNan);
        value.set_v(0, seen, 1, 3, kNan);
      }
      for (const CaseData* spoiled : {&key, &value, &query}) {
        const bool not_finite = spoiled != &query;
        const char* what = spoiled == &key ? "key" : spoiled == &value ? "value" : "query";
        SCOPED_TRACE(fmt::format("{} queries, group {}, window {}, {}, a {}", rows.queries, rows.group, rows.window,
                                 dtype_name(dtype), what));
        const std::vector<float> got = states_on(target(), make_problem(spoiled->input(), spoiled->options()), 1);
        const std::size_t row_floats = state_floats(shape.v_dim);
        for (std::int64_t row = 0; row < rows.queries * shape.heads; ++row) {
          const auto floats = [&](const std::vector<float>& states) {
            const auto first = states.begin() + row * static_cast<std::ptrdiff_t>(row_floats);
            return std::vector<float>(first, first + static_cast<std::ptrdiff_t>(row_floats));
          };
          const bool sees_it = row / shape.heads == seer && row % shape.heads / rows.group == 1;
          const std::vector<float> state = floats(got);
          EXPECT_TRUE(sees_it || same_bits(state, floats(want))) << "row " << row;
          EXPECT_EQ(std::any_of(state.begin(), state.end(), is_nan), sees_it && not_finite) << "row " << row;
        }
      }
    }
  }
}

TEST(AttentionTest, PublicCallsGiveTheSameBitsAsTheTarget) {
  const std::vector<Case> cases = case_list();
  for (std::size_t i = 0; i < cases.size(); i += thinning()) {
    const Case& shape = cases[i];
    const CaseData data(shape, 1);
    const Problem problem = make_problem(data.input(), data.options());
    const std::vector<float> states = states_on(active_target(), problem, 1);
    const Output want = finalized(states, problem);

    Output got{std::vector<float>(want.out.size(), kNan), std::vector<float>(want.lse.size(), kNan)};
    attention(data.input(), data.options(), got.out, got.lse, pool_of(2));
    EXPECT_TRUE(same_bits(got.out, want.out)) << shape.name;
    EXPECT_TRUE(same_bits(got.lse, want.lse)) << shape.name;
    std::fill(got.out.begin(), got.out.end(), kInf);
    attention(data.input(), data.options(), got.out, {}, pool_of(7));
    EXPECT_TRUE(same_bits(got.out, want.out)) << shape.name << ", without lse";

    AttentionOptions options = data.options();
    options.sinks = {};
    std::vector<float> public_states(states.size(), kNan);
    attention_states(data.input(), options, public_states, pool_of(2));
    EXPECT_TRUE(same_bits(public_states, states)) << shape.name;
  }
}

TEST(AttentionTest, WrongSizesAreRefusedBeforeAnyWork) {
  Case shape;
  shape.sinks = true;
  shape.queries = 2;
  const CaseData data(shape, 1);
  const std::size_t rows = 8, out_size = rows * 64;
  std::vector<float> out(out_size + 1, 123.0f), lse(rows + 1, 123.0f), states(rows * 66 + 1, 123.0f);
  const auto call = [&](std::size_t outs, std::size_t lses) {
    attention(data.input(), data.options(), std::span(out).first(outs), std::span(lse).first(lses), pool_of(1));
  };
  EXPECT_THROW(call(out_size - 1, rows), InvalidArgument);
  EXPECT_THROW(call(out_size + 1, rows), InvalidArgument);
  EXPECT_THROW(call(0, 0), InvalidArgument);
  EXPECT_THROW(call(out_size, rows - 1), InvalidArgument);
  EXPECT_THROW(call(out_size, rows + 1), InvalidArgument);
  EXPECT_THROW(
      attention(data.input(), data.options(), std::span(out).first(out_size), std::span(out).last(rows), pool_of(1)),
      InvalidArgument)
      << "out and lse overlap";
  AttentionOptions options = data.options();
  EXPECT_THROW(attention_states(data.input(), options, std::span(states).first(rows * 66), pool_of(1)), InvalidArgument)
      << "sinks are no part of a state";
  options.sinks = {};
  EXPECT_THROW(attention_states(data.input(), options, states, pool_of(1)), InvalidArgument);
  // Nowhere, or between two floats.
  float* const odd = reinterpret_cast<float*>(reinterpret_cast<char*>(states.data()) + 1);
  for (float* const address : {static_cast<float*>(nullptr), odd}) {
    const auto put = [&](std::span<float> outs, std::span<float> lses) {
      attention(data.input(), data.options(), outs, lses, pool_of(1));
    };
    EXPECT_THROW(put({address, out_size}, {}), InvalidArgument);
    EXPECT_THROW(put(std::span(out).first(out_size), {address, rows}), InvalidArgument);
    EXPECT_THROW(attention_states(data.input(), options, {address, rows * 66}, pool_of(1)), InvalidArgument);
  }
  AttentionInput bad = data.input();
  bad.q.heads = 3;
  EXPECT_THROW(attention(bad, data.options(), std::span(out).first(out_size), {}, pool_of(1)), InvalidArgument);
  // Before anything is made whose size they give: the lengths of these alone would take 16 GB.
  AttentionInput huge = data.input();
  huge.q.batch = huge.k.batch = huge.v.batch = std::numeric_limits<std::int32_t>::max();
  huge.q.batch_stride = huge.k.batch_stride = huge.v.batch_stride = 8;
  huge.lengths = huge.first_query = {};
  {
    const testing_base::AddressLimit limit(std::size_t{1} << 30);
    EXPECT_THROW(attention(huge, data.options(), std::span(out).first(out_size), {}, pool_of(1)), InvalidArgument);
    EXPECT_THROW(attention_states(huge, options, std::span(states).first(rows * 66), pool_of(1)), InvalidArgument);
  }
  for (const auto* buffer : {&out, &lse, &states}) {
    EXPECT_TRUE(std::all_of(buffer->begin(), buffer->end(), [](float x) { return x == 123.0f; }));
  }
  EXPECT_NO_THROW(call(out_size, rows));
  EXPECT_EQ(out[out_size], 123.0f);
  EXPECT_EQ(lse[rows], 123.0f);
}

}  // namespace
}  // namespace treeattn::kernels
