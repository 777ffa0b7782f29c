// SPDX-License-Identifier: Apache-2.0
// make_problem: bad arguments are refused with name, value and what is accepted; defaults; masks; addresses.
#include "kernels/problem.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "treeattn/error.h"

namespace treeattn::kernels {
namespace {

constexpr std::int64_t kHuge = std::numeric_limits<std::int64_t>::max();
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// A small valid call, to be spoiled in one place.
struct Call {
  std::vector<float> q, k, v, k_scales, v_scales, slopes, sinks;
  std::vector<std::int32_t> table{2, 0, -1, 1, 3, -1};  // [2, 3], the last column unused
  std::vector<std::int64_t> lengths{5, 8}, first_query{4, 7};
  AttentionInput in;
  AttentionOptions options;

  Call() : q(2 * 1 * 8 * 32), k(2 * 8 * 4 * 32), v(2 * 8 * 4 * 16), k_scales(64), v_scales(64), slopes(8), sinks(8) {
    in.q = QueryView::dense(q.data(), DType::kFloat32, 2, 1, 8, 32);
    in.k = KvView::tokens_first(k.data(), DType::kFloat32, 2, 8, 4, 32);
    in.v = KvView::heads_first(v.data(), DType::kFloat32, 2, 8, 4, 16);
    in.lengths = lengths;
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  void page() {
    in.k = KvView::paged(k.data(), DType::kFloat32, 4, 4, 4, 32, 2, 3, table.data());
    in.v = KvView::paged(v.data(), DType::kFloat32, 4, 4, 4, 16, 2, 3, table.data());
  }
  void quantise() {
    in.k.dtype = in.v.dtype = DType::kInt8;
    in.k = in.k.with_scales(k_scales.data());
    in.v = in.v.with_scales(v_scales.data());
  }
};

struct BadCall {
  const char* name;
  std::function<void(Call&)> spoil;
  std::vector<std::string> says;  // all of these are in the message
};

void PrintTo(const BadCall& bad, std::ostream* out) { *out << bad.name; }

template <typename T>
const T* misaligned(const T* pointer) {
  return reinterpret_cast<const T*>(reinterpret_cast<std::uintptr_t>(pointer) + 1);
}

const BadCall kBadCalls[] = {
    // q
    {"q_batch", [](Call& c) { c.in.q.batch = 0; }, {"q.batch = 0", "accepted: 1"}},
    {"q_batch_negative", [](Call& c) { c.in.q.batch = -3; }, {"q.batch = -3"}},
    {"q_batch_huge", [](Call& c) { c.in.q.batch = kHuge; }, {"q.batch = 9223372036854775807"}},
    {"q_queries", [](Call& c) { c.in.q.queries = 0; }, {"q.queries = 0"}},
    {"q_heads", [](Call& c) { c.in.q.heads = 0; }, {"q.heads = 0"}},
    {"q_heads_multiple",
     [](Call& c) { c.in.q.heads = 30; },
     {"q.heads = 30 is not a multiple of k.kv_heads = 4", "accepted: 4, 8, 12, ..."}},
    {"q_heads_of_one_group",
     [](Call& c) { c.in.q = QueryView::dense(c.q.data(), DType::kFloat32, 2, 1, 4 * ((1 << 20) + 1), 32); },
     {"q.heads = 4194308 with k.kv_heads = 4", "1048576 for each of these"}},
    {"q_dim_small", [](Call& c) { c.in.q.head_dim = 8; }, {"q.head_dim = 8", "16 to 256 in steps of 8"}},
    {"q_dim_step", [](Call& c) { c.in.q.head_dim = 100; }, {"q.head_dim = 100"}},
    {"q_dim_large", [](Call& c) { c.in.q.head_dim = 264; }, {"q.head_dim = 264"}},
    {"q_int8", [](Call& c) { c.in.q.dtype = DType::kInt8; }, {"q.dtype = int8", "float32, float16, bfloat16"}},
    {"q_fp8", [](Call& c) { c.in.q.dtype = DType::kFp8E4M3; }, {"q.dtype = fp8"}},
    {"q_type_unknown", [](Call& c) { c.in.q.dtype = static_cast<DType>(77); }, {"dtype = 77"}},
    {"q_null", [](Call& c) { c.in.q.data = nullptr; }, {"q.data = null"}},
    {"q_misaligned", [](Call& c) { c.in.q.data = misaligned(c.q.data()); }, {"q.data = 0x", "multiple of 4"}},
    {"q_half_misaligned",
     [](Call& c) {
       c.in.q.dtype = DType::kFloat16;
       c.in.q.data = misaligned(c.q.data());
     },
     {"q.data = 0x", "multiple of 2", "float16"}},
    {"q_stride_negative", [](Call& c) { c.in.q.head_stride = -32; }, {"q.head_stride = -32"}},
    {"q_stride_zero", [](Call& c) { c.in.q.batch_stride = 0; }, {"q.batch_stride = 0 with 2 rows"}},
    {"q_stride_overflow",
     [](Call& c) { c.in.q.batch_stride = kHuge; },
     {"q.batch_stride = 9223372036854775807", "2^63"}},
    {"q_stride_overflow_bytes",
     [](Call& c) { c.in.q.head_stride = kHuge / 7; },
     {"q.head_stride = 1317624576693539401"}},
    {"q_too_many_rows",
     [](Call& c) {
       c.in.q.batch = c.in.k.batch = c.in.v.batch = 2147483647;
       c.in.q.queries = c.in.q.heads = 2147483644;
       c.in.q.batch_stride = c.in.q.query_stride = c.in.q.head_stride = 1;
     },
     {"2147483647 * 2147483644", "overflow"}},
    // k and v against q and each other
    {"k_batch", [](Call& c) { c.in.k.batch = 3; }, {"k.batch = 3 differs from q.batch = 2"}},
    {"v_batch", [](Call& c) { c.in.v.batch = 1; }, {"v.batch = 1 differs from q.batch = 2"}},
    {"v_tokens", [](Call& c) { c.in.v.tokens = 9; }, {"v.tokens = 9 differs from k.tokens = 8"}},
    {"v_heads", [](Call& c) { c.in.v.kv_heads = 2; }, {"v.kv_heads = 2 differs from k.kv_heads = 4"}},
    {"k_dim", [](Call& c) { c.in.k.head_dim = 16; }, {"k.head_dim = 16 differs from q.head_dim = 32"}},
    {"v_dim", [](Call& c) { c.in.v.head_dim = 20; }, {"v.head_dim = 20"}},
    {"k_heads", [](Call& c) { c.in.k.kv_heads = 0; }, {"k.kv_heads = 0"}},
    {"v_heads_negative", [](Call& c) { c.in.v.kv_heads = -4; }, {"v.kv_heads = -4"}},
    {"k_tokens", [](Call& c) { c.in.k.tokens = -1; }, {"k.tokens = -1", "0 to"}},
    {"k_tokens_huge", [](Call& c) { c.in.k.tokens = kHuge; }, {"k.tokens = 9223372036854775807"}},
    {"k_type", [](Call& c) { c.in.k.dtype = static_cast<DType>(9); }, {"dtype = 9"}},
    // memory
    {"k_null", [](Call& c) { c.in.k.data = nullptr; }, {"k.data = null"}},
    {"v_misaligned", [](Call& c) { c.in.v.data = misaligned(c.v.data()); }, {"v.data = 0x", "multiple of 4"}},
    {"k_stride_negative", [](Call& c) { c.in.k.token_stride = -128; }, {"k.token_stride = -128"}},
    {"k_stride_zero", [](Call& c) { c.in.k.head_stride = 0; }, {"k.head_stride = 0 with 4 rows"}},
    {"v_stride_overflow", [](Call& c) { c.in.v.token_stride = kHuge / 2; }, {"v.token_stride = 4611686018427387903"}},
    {"v_bytes_overflow", [](Call& c) { c.in.v.batch_stride = kHuge / 4; }, {"v reaches", "4 bytes"}},
    {"k_factory_overflow",
     [](Call& c) {
       c.in.k = KvView::tokens_first(c.k.data(), DType::kFloat32, 2, std::int64_t{1} << 58, 4, 32);
       c.in.v = KvView::tokens_first(c.v.data(), DType::kFloat32, 2, std::int64_t{1} << 58, 4, 16);
     },
     {"k.batch_stride = 9223372036854775807", "overflow"}},
    {"int8_without_scales", [](Call& c) { c.in.k.dtype = DType::kInt8; }, {"k.scales = null", "int8"}},
    {"scales_on_float", [](Call& c) { c.in.v.scales = c.v_scales.data(); }, {"v.scales = 0x", "float32"}},
    {"scales_misaligned",
     [](Call& c) {
       c.quantise();
       c.in.v.scales = misaligned(c.in.v.scales);
     },
     {"v.scales = 0x", "multiple of 4"}},
    {"scale_stride",
     [](Call& c) {
       c.quantise();
       c.in.k.scale_token_stride = 0;
     },
     {"k.scale_token_stride = 0"}},
    {"scale_stride_negative",
     [](Call& c) {
       c.quantise();
       c.in.v.scale_head_stride = -1;
     },
     {"v.scale_head_stride = -1"}},
    // pages
    {"page_tokens_zero",
     [](Call& c) {
       c.page();
       c.in.k.page_tokens = 0;
     },
     {"k.page_tokens = 0"}},
    {"page_tokens_negative",
     [](Call& c) {
       c.page();
       c.in.v.page_tokens = -16;
     },
     {"v.page_tokens = -16"}},
    {"pages_negative",
     [](Call& c) {
       c.page();
       c.in.k.pages = -1;
     },
     {"k.pages = -1"}},
    {"pages_per_sequence",
     [](Call& c) {
       c.page();
       c.in.k.pages_per_sequence = 2;
     },
     {"k.tokens = 12 is more than pages_per_sequence * page_tokens = 8"}},
    {"pages_per_sequence_huge",
     [](Call& c) {
       c.page();
       c.in.v.pages_per_sequence = kHuge;
     },
     {"v.pages_per_sequence = 9223372036854775807"}},
    {"table_null",
     [](Call& c) {
       c.page();
       c.in.v.page_table = nullptr;
     },
     {"v.page_table = null"}},
    {"table_misaligned",
     [](Call& c) {
       c.page();
       c.in.k.page_table = misaligned(c.table.data());
     },
     {"k.page_table = 0x", "multiple of 4"}},
    {"table_entry_large",
     [](Call& c) {
       c.page();
       c.table[4] = 4;
     },
     {"k.page_table[1, 1] = 4", "0 to pages - 1 = 3"}},
    {"table_entry_negative",
     [](Call& c) {
       c.page();
       c.table[1] = -1;
     },
     {"k.page_table[0, 1] = -1"}},
    {"page_stride_zero",
     [](Call& c) {
       c.page();
       c.in.k.page_stride = 0;
     },
     {"k.page_stride = 0 with 4 rows"}},
    // lengths and positions
    {"lengths_count", [](Call& c) { c.in.lengths = c.in.lengths.first(1); }, {"lengths has 1 values", "batch = 2"}},
    {"length_large", [](Call& c) { c.lengths[1] = 9; }, {"lengths[1] = 9", "k.tokens = 8"}},
    {"length_negative", [](Call& c) { c.lengths[0] = -1; }, {"lengths[0] = -1"}},
    {"first_key_negative", [](Call& c) { c.in.first_key = -1; }, {"first_key = -1"}},
    {"first_key_overflow", [](Call& c) { c.in.first_key = kHuge - 4; }, {"first_key = 9223372036854775803"}},
    {"first_query_count",
     [](Call& c) { c.in.first_query = std::span(c.first_query).first(1); },
     {"first_query has 1 values", "batch = 2"}},
    {"first_query_overflow",
     [](Call& c) {
       c.first_query[1] = kHuge;
       c.in.first_query = c.first_query;
     },
     {"first_query[1] = 9223372036854775807"}},
    {"first_query_underflow",
     [](Call& c) {
       c.first_query[0] = std::numeric_limits<std::int64_t>::min();
       c.in.first_query = c.first_query;
     },
     {"first_query[0] = -9223372036854775808"}},
    // options
    {"scale_nan", [](Call& c) { c.options.scale = kNan; }, {"scale = nan"}},
    {"scale_inf", [](Call& c) { c.options.scale = -kInf; }, {"scale = -inf"}},
    {"window", [](Call& c) { c.options.window = -1; }, {"window = -1", "0 (none)"}},
    {"softcap_negative", [](Call& c) { c.options.softcap = -30.0f; }, {"softcap = -30"}},
    {"softcap_nan", [](Call& c) { c.options.softcap = kNan; }, {"softcap = nan"}},
    {"softcap_inf", [](Call& c) { c.options.softcap = kInf; }, {"softcap = inf"}},
    {"softcap_far_above_the_scale",
     [](Call& c) {
       c.options.scale = 0x1p-80f;
       c.options.softcap = 0x1p80f;
     },
     {"softcap = 1.208", "scale = 8.27", "2^-100"}},
    {"softcap_far_above_the_default_scale",
     [](Call& c) {
       c.options.scale.reset();
       c.options.softcap = 0x1p99f;
     },
     {"softcap = 6.33", "with scale = 0.", "2^-100"}},
    {"softcap_denormal", [](Call& c) { c.options.softcap = 1e-40f; }, {"softcap = 1e-40"}},
    {"slopes_count",
     [](Call& c) { c.options.alibi_slopes = std::span(c.slopes).first(4); },
     {"alibi_slopes has 4 values", "q.heads = 8"}},
    {"slopes_nan",
     [](Call& c) {
       c.slopes[3] = kNan;
       c.options.alibi_slopes = c.slopes;
     },
     {"alibi_slopes[3] = nan"}},
    {"sinks_count", [](Call& c) { c.options.sinks = std::span(c.sinks).first(7); }, {"sinks has 7 values"}},
    {"sinks_null",
     [](Call& c) {
       c.options.sinks = {static_cast<const float*>(nullptr), 8};
     },
     {"sinks = 0x0 with 8 values"}},
    {"slopes_null",
     [](Call& c) {
       c.options.alibi_slopes = {static_cast<const float*>(nullptr), 8};
     },
     {"alibi_slopes = 0x0 with 8 values"}},
    {"lengths_null",
     [](Call& c) {
       c.in.lengths = {static_cast<const std::int64_t*>(nullptr), 2};
     },
     {"lengths = 0x0 with 2 values"}},
    {"first_query_null",
     [](Call& c) {
       c.in.first_query = {static_cast<const std::int64_t*>(nullptr), 2};
     },
     {"first_query = 0x0 with 2 values"}},
    {"sinks_nan",
     [](Call& c) {
       c.sinks[7] = kNan;
       c.options.sinks = c.sinks;
     },
     {"sinks[7] = nan"}},
    {"sinks_inf",
     [](Call& c) {
       c.sinks[0] = kInf;
       c.options.sinks = c.sinks;
     },
     {"sinks[0] = inf", "-inf (none)"}},
    {"chunk_zero", [](Call& c) { c.in.order.chunk_tokens = 0; }, {"chunk_tokens = 0"}},
    {"chunk_negative", [](Call& c) { c.in.order.chunk_tokens = -64; }, {"chunk_tokens = -64"}},
    {"chunk_step", [](Call& c) { c.in.order.chunk_tokens = 100; }, {"chunk_tokens = 100", "multiple of 64"}},
    {"chunk_huge", [](Call& c) { c.in.order.chunk_tokens = std::int64_t{1} << 41; }, {"chunk_tokens = 2199023255552"}},
    {"branches_zero", [](Call& c) { c.in.order.branches = 0; }, {"branches = 0"}},
    {"branches_power", [](Call& c) { c.in.order.branches = 48; }, {"branches = 48", "power of two"}},
    {"branches_many", [](Call& c) { c.in.order.branches = 131072; }, {"branches = 131072", "65536"}},
    {"branches_negative",
     [](Call& c) { c.in.order.branches = std::numeric_limits<int>::min(); },
     {"branches = -2147483648"}},
};

class BadCallTest : public testing::TestWithParam<BadCall> {};

TEST_P(BadCallTest, IsRefusedByName) {
  Call call;
  GetParam().spoil(call);
  try {
    make_problem(call.in, call.options);
    FAIL() << "accepted";
  } catch (const InvalidArgument& error) {
    const std::string message = error.what();
    for (const std::string& part : GetParam().says) {
      EXPECT_TRUE(message.find(part) != std::string::npos) << "no \"" << part << "\" in: " << message;
    }
    EXPECT_TRUE(message.find("accepted: ") != std::string::npos) << message;
  }
}

INSTANTIATE_TEST_SUITE_P(All, BadCallTest, testing::ValuesIn(kBadCalls),
                         [](const auto& bad) { return std::string(bad.param.name); });

TEST(ProblemTest, FillsInDefaults) {
  Call call;
  call.in.first_key = 100;
  const Problem problem = make_problem(call.in, call.options);
  EXPECT_EQ(problem.lengths, (std::vector<std::int64_t>{5, 8}));
  EXPECT_EQ(problem.first_query, (std::vector<std::int64_t>{104, 107}));
  EXPECT_FLOAT_EQ(problem.scale, 1.0f / std::sqrt(32.0f));
  EXPECT_EQ(problem.order.chunk_tokens, 256);
  EXPECT_EQ(problem.order.branches, 256);
  EXPECT_EQ(problem.group(), 2);
  EXPECT_EQ(problem.rows(), 16);
  call.in.lengths = {};
  EXPECT_EQ(make_problem(call.in, call.options).lengths, (std::vector<std::int64_t>{8, 8}));
}

TEST(ProblemTest, AcceptsTheExtremes) {
  Call call;
  call.options.window = kHuge;
  call.options.softcap = 1e-6f;
  call.options.scale = 0.0f;
  call.in.order.branches = 65536;
  call.sinks[2] = -kInf;
  call.options.sinks = call.sinks;
  call.first_query = {-1000, std::int64_t{1} << 59};
  call.in.first_query = call.first_query;
  const Problem problem = make_problem(call.in, call.options);
  EXPECT_EQ(problem.visible(0, 0).end, 5);
  EXPECT_EQ(problem.visible(1, 0).begin, 0);
}

TEST(ProblemTest, NothingUsedNeedsNoMemory) {
  Call call;
  call.lengths = {0, 0};
  call.in.lengths = call.lengths;
  call.in.k.data = call.in.v.data = nullptr;
  call.in.k.dtype = DType::kInt8;  // nor scales
  EXPECT_NO_THROW(make_problem(call.in, call.options));

  call.in.lengths = {};
  for (const auto make : {KvView::tokens_first, KvView::heads_first}) {
    call.in.k = make(nullptr, DType::kFloat16, 2, 0, 4, 32);
    call.in.v = make(nullptr, DType::kFloat16, 2, 0, 4, 16);
    EXPECT_TRUE(make_problem(call.in, call.options).visible(1, 0).empty());
  }
  call.in.k = KvView::paged(nullptr, DType::kFloat16, 0, 16, 4, 32, 2, 0, nullptr);
  call.in.v = KvView::paged(nullptr, DType::kFloat16, 0, 16, 4, 16, 2, 0, nullptr);
  EXPECT_TRUE(make_problem(call.in, call.options).visible(0, 0).empty());
}

TEST(ProblemTest, UnusedPageTableEntriesMayBeAnything) {
  Call call;
  call.page();
  EXPECT_NO_THROW(make_problem(call.in, call.options));
  call.lengths = {4, 8};
  call.table[1] = 12345;
  EXPECT_NO_THROW(make_problem(call.in, call.options));
}

// Of a part of the tree a page is needed just where one of its tokens belongs to a leaf of that part.
TEST(ProblemTest, PagesOfOtherLeavesMayBeAnything) {
  constexpr std::int64_t kTokens = 1000;
  std::vector<float> memory(64);
  for (const ReductionOrder order : {ReductionOrder{64, 8}, ReductionOrder{64, 4, Placement::kContiguous, 128}}) {
    for (const std::int64_t page_tokens : {16, 64, 96, 500}) {
      for (const std::int64_t first_key : {0, 40, 64 * 11}) {
        for (const plan::NodeSet& nodes :
             {plan::NodeSet{{0, 1}}, plan::NodeSet{{1, 1}}, plan::NodeSet{{0, 0}, {0, 3}}}) {
          const auto slots = static_cast<std::size_t>((kTokens + page_tokens - 1) / page_tokens);
          std::vector<bool> needed(slots, false);
          for (std::int64_t token = 0; token < kTokens; ++token) {
            const int leaf = plan::leaf_of_chunk(order, plan::chunk_of(order, first_key + token));
            if (plan::contains(nodes, leaf)) needed[static_cast<std::size_t>(token / page_tokens)] = true;
          }
          std::vector<std::int32_t> table(slots, 0);
          AttentionInput in;
          in.q = QueryView::dense(memory.data(), DType::kFloat32, 1, 1, 1, 16);
          in.k = in.v = KvView::paged(memory.data(), DType::kFloat32, 1, page_tokens, 1, 16, 1,
                                      static_cast<std::int64_t>(slots), table.data());
          in.k.tokens = in.v.tokens = kTokens;
          in.first_key = first_key;
          in.order = order;
          for (std::size_t slot = 0; slot < slots; ++slot) {
            table[slot] = -1;
            bool refused = false;
            try {
              make_problem(in, {}, &nodes);
            } catch (const InvalidArgument&) {
              refused = true;
            }
            ASSERT_EQ(refused, needed[slot]) << "slot " << slot << " of pages of " << page_tokens << ", first key "
                                             << first_key << ", " << order.branches << " branches";
            table[slot] = 0;
          }
        }
      }
    }
  }
}

TEST(ProblemTest, StridesOfSingleRowsAreNotUsed) {
  Call call;
  call.in.q = QueryView::dense(call.q.data(), DType::kFloat32, 1, 1, 8, 32);
  call.in.k = KvView::tokens_first(call.k.data(), DType::kFloat32, 1, 8, 4, 32);
  call.in.v = KvView::tokens_first(call.v.data(), DType::kFloat32, 1, 8, 4, 16);
  call.in.lengths = call.in.lengths.first(1);
  call.in.q.batch_stride = call.in.q.query_stride = call.in.k.batch_stride = 0;
  call.in.v.batch_stride = kHuge;
  EXPECT_NO_THROW(make_problem(call.in, call.options));
}

TEST(ProblemTest, AddressesRowsAndScales) {
  Call call;
  call.quantise();
  const auto row = [&](const KvView& view, std::int64_t b, std::int64_t t, std::int64_t h) {
    return kv_row(view, b, t, h) - static_cast<const std::byte*>(view.data);
  };
  EXPECT_EQ(row(call.in.k, 1, 3, 2), (8 + 3) * 4 * 32 + 2 * 32);
  EXPECT_EQ(row(call.in.v, 1, 3, 2), ((4 + 2) * 8 + 3) * 16);
  for (std::size_t i = 0; i < 64; ++i) call.k_scales[i] = call.v_scales[i] = static_cast<float>(i);
  EXPECT_EQ(kv_scale(call.in.k, 1, 3, 2), (8 + 3) * 4 + 2);
  EXPECT_EQ(kv_scale(call.in.v, 1, 3, 2), (4 + 2) * 8 + 3);
  EXPECT_EQ(kv_scale(KvView::tokens_first(nullptr, DType::kFp8E4M3, 1, 1, 1, 16), 0, 0, 0), 1.0f);

  call.page();
  call.in.k = call.in.k.with_scales(call.k_scales.data());
  EXPECT_EQ(row(call.in.k, 1, 5, 3), ((3 * 4 + 1) * 4 + 3) * 32 * 4);  // page 3, token 1 of it
  EXPECT_EQ(kv_scale(call.in.k, 1, 5, 3), (3 * 4 + 1) * 4 + 3);
  EXPECT_EQ(query_row(call.in.q, 1, 0, 5) - static_cast<const std::byte*>(call.in.q.data), (8 + 5) * 32 * 4);
}

// Keys at positions 100 to 107; the query at 103 unless said otherwise.
TEST(ProblemTest, SeesWhatTheMasksLeave) {
  Call call;
  call.in.first_key = 100;
  call.in.lengths = {};
  const auto seen = [&](bool causal, std::int64_t window, std::int64_t position) {
    call.options.causal = causal;
    call.options.window = window;
    call.first_query = {position, 0};
    call.in.first_query = call.first_query;
    const KeyRange range = make_problem(call.in, call.options).visible(0, 0);
    return std::pair(range.begin, range.end);
  };
  using Range = std::pair<std::int64_t, std::int64_t>;
  EXPECT_EQ(seen(false, 0, 103), Range(0, 8));
  EXPECT_EQ(seen(true, 0, 103), Range(0, 4));
  EXPECT_EQ(seen(true, 1, 103), Range(3, 4));  // itself only
  EXPECT_EQ(seen(true, 3, 103), Range(1, 4));
  EXPECT_EQ(seen(false, 1, 103), Range(3, 4));
  EXPECT_EQ(seen(false, 3, 103), Range(1, 6));
  EXPECT_EQ(seen(true, 0, 99), Range(0, 0));
  EXPECT_EQ(seen(true, 0, 100), Range(0, 1));
  EXPECT_EQ(seen(true, 0, 1000), Range(0, 8));
  EXPECT_EQ(seen(true, 5, 110), Range(6, 8));
  EXPECT_EQ(seen(false, 3, 97), Range(0, 0));
  EXPECT_EQ(seen(false, 4, 97), Range(0, 1));
  EXPECT_EQ(seen(false, 2, 109), Range(0, 0));
  EXPECT_EQ(seen(false, kHuge, -1000), Range(0, 8));
}

}  // namespace
}  // namespace treeattn::kernels
