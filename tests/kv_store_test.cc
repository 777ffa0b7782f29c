// SPDX-License-Identifier: Apache-2.0
// One rank's part of a KV cache, without other ranks: content against the mirror, forks, pages, conversion, memory, and
// what is refused.
#include "parallel/kv_store.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "address_limit.h"
#include "base/virtual_memory.h"
#include "kv_mirror.h"
#include "parallel/kv_memory.h"
#include "parallel/kv_pool.h"
#include "plan/tree_order.h"
#include "resident_bytes.h"
#include "treeattn/attention.h"
#include "treeattn/error.h"
#include "treeattn/parallel_attention.h"

namespace treeattn {
namespace {

using namespace testing_kv;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

TEST(KvMemory, WhatIsForgottenStaysWithItsUsers) {
  const auto memory = parallel::host_memory();
  const auto first = memory->workspace(0, 2000);
  EXPECT_EQ(memory->workspace(0, 3000), first);
  EXPECT_EQ(memory->workspace_bytes(), 3000u);
  first->data()[2999] = std::byte{7};
  EXPECT_NE(memory->workspace(0, 100000), first);
  EXPECT_EQ(memory->workspace_bytes(), 100000u);
  memory->forget_workspaces();
  EXPECT_EQ(memory->workspace_bytes(), 0u);
  EXPECT_NE(memory->workspace(0, 1000)->data(), first->data());
  EXPECT_EQ(first->data()[2999], std::byte{7});
}

TEST(KvPool, LeavesAddressesToOthersWhereTheyAreFew) {
  constexpr int kRanks = 4;
  const testing_base::AddressLimit limit(std::size_t{1} << 30);
  std::vector<std::unique_ptr<parallel::KvPool>> pools;
  for (int rank = 0; rank < kRanks; ++rank) {
    pools.push_back(std::make_unique<parallel::KvPool>(1, parallel::TokenBytes{4096, 4096, 0, 0}, 256,
                                                       parallel::host_memory(kRanks)));
  }
  for (const auto& pool : pools) {
    for (int page = 0; page < 16; ++page) EXPECT_NO_THROW(pool->take());  // of 2 MiB
  }
  EXPECT_NO_THROW(base::VirtualMemory(std::size_t{256} << 20)) << "nothing is left for what computes";
  // A page for which there would be addresses without the limit is no mistake of the caller's.
  EXPECT_THROW(parallel::KvPool(1, {4096, 4096, 0, 0}, 64 << 10), std::bad_alloc);
}

KvCacheConfig small_config(DType type = DType::kFloat32) {
  return {.layers = 1,
          .kv_heads = 2,
          .k_dim = 16,
          .v_dim = 24,
          .k_type = type,
          .v_type = type,
          .order = {.chunk_tokens = 64, .branches = 4}};
}

std::string what_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "nothing thrown";
}

TEST(VirtualMemory, GrowsInPlaceAndGivesBack) {
  base::VirtualMemory memory(std::size_t{1} << 36);
  std::byte* data = memory.data();
  ASSERT_NE(data, nullptr);
  EXPECT_GE(memory.reserved(), std::size_t{1} << 36);
  EXPECT_EQ(memory.usable(), 0u);
  memory.grow(10000);
  data[9999] = std::byte{7};
  memory.grow(std::size_t{64} << 20);
  EXPECT_EQ(memory.data(), data);
  EXPECT_EQ(data[9999], std::byte{7});
  EXPECT_EQ(data[(std::size_t{64} << 20) - 1], std::byte{0});
  std::fill_n(data, std::size_t{64} << 20, std::byte{1});
  const std::size_t before = resident_bytes();
  memory.discard(100, (std::size_t{32} << 20) - 100);  // the first page of the kernel is not whole
  EXPECT_EQ(data[4095], std::byte{1});
  EXPECT_EQ(data[std::size_t{16} << 20], std::byte{0});
  EXPECT_EQ(data[std::size_t{32} << 20], std::byte{1});
  EXPECT_LT(resident_bytes() + (std::size_t{24} << 20), before);
  base::VirtualMemory moved = std::move(memory);
  EXPECT_EQ(moved.data(), data);
  EXPECT_EQ(memory.data(), nullptr);  // NOLINT: what a moved-from one promises
  EXPECT_THROW(moved.grow(moved.reserved() + 1), std::bad_alloc);
  EXPECT_THROW(base::VirtualMemory(std::numeric_limits<std::size_t>::max() - 4096), std::bad_alloc);
}

TEST(KvPool, TakesTheLowestFreePageAndCounts) {
  parallel::KvPool pool(2, {.k = 32, .v = 64, .k_scales = 4, .v_scales = 0}, 64);
  for (std::int32_t i = 0; i < 100; ++i) EXPECT_EQ(pool.take(), i);
  EXPECT_EQ(pool.used_bytes(), 100u * 64 * 100 * 2);
  EXPECT_EQ(pool.memory(0, 0).v_scales, nullptr);
  EXPECT_NE(pool.memory(1, 5).k_scales, nullptr);
  pool.share(7);
  pool.release(7);
  EXPECT_FALSE(pool.shared(7));
  EXPECT_EQ(pool.used_pages(), 100);
  for (const std::int32_t page : {50, 7, 9, 8}) pool.release(page);
  pool.trim();
  EXPECT_EQ(pool.used_pages(), 96);
  for (const std::int32_t page : {7, 8, 9, 50}) EXPECT_EQ(pool.take(), page);
}

TEST(KvStore, RandomCallsKeepTheContent) {
  const std::uint64_t seed = test_seed();
  for (std::uint64_t round = 0; round < 40; ++round) {
    Random random(seed + round);
    Pair pair(self_communicator(), random_config(random));
    for (int step = 0; step < 25; ++step) pair.step(random, 500);
    pair.check();
    if (testing::Test::HasFatalFailure()) FAIL() << "TREEATTN_SEED=" << seed + round;
    for (const SequenceId id : pair.mirror.ids()) pair.drop(id);
    EXPECT_EQ(pair.cache.allocated_bytes(), 0u);
  }
}

TEST(KvStore, EveryTypeFromEveryAcceptedType) {
  Random random(1);
  for (const DType type : kAllDTypes) {
    for (const DType from : {type, DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
      Pair pair(self_communicator(), small_config(type));
      const SequenceId id = pair.add();
      const Rows k = random_rows(random, from, 130, 2, 16), v = random_rows(random, from, 130, 2, 24);
      const Source k_source(random, k), v_source(random, v);
      pair.cache.append(id, k_source.view(), v_source.view());
      pair.mirror.resize(id, 130);
      pair.mirror.write(id, 0, 0, k, v);
      pair.check();
    }
  }
}

// Rows of which the scale says something: zeros, the smallest numbers, what is not a number.
TEST(KvStore, QuantisesUnusualRows) {
  const float tiny = std::numeric_limits<float>::denorm_min();
  for (const DType type : {DType::kInt8, DType::kFp8E4M3}) {
    KvCache cache(self_communicator(), small_config(type));
    const SequenceId id = cache.add_sequence();
    std::vector<float> k(5 * 2 * 16, 1.0f), v(5 * 2 * 24, 2.0f);
    std::fill_n(&k[0], 16, 0.0f);
    std::fill_n(&k[32], 16, tiny);
    k[64] = kNan;
    k[96 + 3] = -kInf;
    cache.append(id, KvView::tokens_first(k.data(), DType::kFloat32, 1, 5, 2, 16),
                 KvView::tokens_first(v.data(), DType::kFloat32, 1, 5, 2, 24));
    const parallel::ChunkMemory memory = cache.store().chunk(0, id, 0);
    const auto value = [&](std::size_t i) { return base::load_as_float(memory.k + i, type) * memory.k_scales[i / 16]; };
    EXPECT_EQ(memory.k_scales[0], 0x1p-126f);
    for (std::size_t i = 0; i < 16; ++i) EXPECT_EQ(value(i), 0.0f);
    for (std::size_t i = 0; i < 16; ++i) EXPECT_EQ(value(32 + i), tiny);
    EXPECT_TRUE(std::isnan(value(64)));
    EXPECT_TRUE(std::isnan(value(96 + 3)));
    if (type == DType::kInt8) {  // no code for it: the whole row
      EXPECT_TRUE(std::isnan(value(65)));
    } else {
      EXPECT_EQ(value(65), 1.0f);
      EXPECT_EQ(value(96 + 4), 1.0f);
    }
    EXPECT_EQ(value(128), 1.0f);
  }
}

// A value of zeros adds nothing, and costs the others next to it nothing, however small they are.
TEST(KvStore, ARowOfZerosLeavesTheOthersAsExact) {
  constexpr std::int64_t kTokens = 64, kDim = 64;
  for (const float size : {1.0f, 1e-4f, 1e-30f}) {
    KvCacheConfig config = small_config(DType::kInt8);
    config.kv_heads = 1;
    config.k_dim = config.v_dim = kDim;
    const auto alone = self_communicator();
    KvCache cache(alone, config);
    const SequenceId id = cache.add_sequence();
    const std::vector<float> k(kTokens * kDim, 0.0f), q(kDim, 1.0f);  // all weights are the same
    std::vector<float> v(kTokens * kDim, size), out(kDim);
    std::fill_n(v.begin(), kDim, 0.0f);
    cache.append(id, KvView::tokens_first(k.data(), DType::kFloat32, 1, kTokens, 1, kDim),
                 KvView::tokens_first(v.data(), DType::kFloat32, 1, kTokens, 1, kDim));
    ThreadPool pool(1);
    ParallelAttention(alone).decode(cache, 0, {&id, 1}, QueryView::dense(q.data(), DType::kFloat32, 1, 1, 1, kDim), {},
                                    out, {}, pool);
    for (const float x : out) EXPECT_NEAR(x, size * 63 / 64, 1e-3f * size);
  }
}

TEST(KvStore, Fp8WithoutScalesHasScaleOne) {
  KvCache cache(self_communicator(), small_config(DType::kFp8E4M3));
  const SequenceId id = cache.add_sequence();
  const std::vector<std::uint8_t> bytes(3 * 2 * 24, 0x38);
  cache.append(id, KvView::tokens_first(bytes.data(), DType::kFp8E4M3, 1, 3, 2, 16),
               KvView::heads_first(bytes.data(), DType::kFp8E4M3, 1, 3, 2, 24));
  const parallel::ChunkMemory memory = cache.store().chunk(0, id, 0);
  for (int row = 0; row < 6; ++row) EXPECT_EQ(memory.k_scales[row] * memory.v_scales[row], 1.0f);
  EXPECT_EQ(memory.v[3 * 2 * 24 - 1], std::byte{0x38});
}

TEST(KvStore, ForksShareUntilOneWrites) {
  Random random(2);
  KvCacheConfig config = small_config(DType::kInt8);
  config.layers = 3;
  Pair pair(self_communicator(), config);
  const SequenceId a = pair.add();
  pair.grow(random, a, 64 * 4 + 10);
  const std::size_t page = pair.cache.allocated_bytes() / 5;
  const SequenceId b = pair.fork(a);
  EXPECT_EQ(pair.cache.allocated_bytes(), 5 * page);
  pair.cache.extend(b, 3);  // room alone copies nothing
  pair.mirror.resize(b, 64 * 4 + 13);
  EXPECT_EQ(pair.cache.allocated_bytes(), 5 * page);
  for (int layer = 0; layer < 3; ++layer) pair.write(random, b, layer, 64 * 4 + 10, 3);
  EXPECT_EQ(pair.cache.allocated_bytes(), 6 * page);
  const SequenceId c = pair.fork(b);
  pair.write(random, c, 1, 63, 2);  // two pages of one layer: copied whole
  EXPECT_EQ(pair.cache.allocated_bytes(), 8 * page);
  pair.check();
  pair.drop(a);
  EXPECT_EQ(pair.cache.allocated_bytes(), 7 * page);
  pair.truncate(b, 64);
  pair.write(random, c, 2, 64 * 4, 13);  // the last to use that page: not copied
  EXPECT_EQ(pair.cache.allocated_bytes(), 6 * page);
  pair.check();
  EXPECT_EQ(pair.add(), 3);  // ids are not used again
}

TEST(KvStore, GrowthMovesNothing) {
  KvCacheConfig config = small_config();
  KvCache cache(self_communicator(), config);
  const SequenceId id = cache.add_sequence();
  cache.extend(id, 64);
  const parallel::ChunkMemory before = cache.store().chunk(0, id, 0);
  cache.extend(id, 2'000'000);
  const parallel::ChunkMemory after = cache.store().chunk(0, id, 0);
  EXPECT_EQ(before.k, after.k);
  EXPECT_EQ(before.v, after.v);
  EXPECT_EQ(cache.length(id), 2'000'064);
}

TEST(KvStore, MemoryGoesBackToTheKernel) {
  KvCacheConfig config = small_config();
  config.kv_heads = 8;  // 32 + 48 KiB a page: less than the smallest hole, so neighbours must join
  KvCache cache(self_communicator(), config);
  constexpr std::int64_t kTokens = 64 * 800;
  const std::vector<float> k(kTokens * 8 * 16, 1.0f), v(kTokens * 8 * 24, 1.0f);
  const auto fill = [&] {
    const SequenceId id = cache.add_sequence();
    cache.append(id, KvView::tokens_first(k.data(), DType::kFloat32, 1, kTokens, 8, 16),
                 KvView::tokens_first(v.data(), DType::kFloat32, 1, kTokens, 8, 24));
    return id;
  };
  const SequenceId kept = fill();
  const std::size_t one = cache.allocated_bytes();
  EXPECT_EQ(one, std::size_t{800} * 64 * 8 * 40 * 4);
  const std::size_t base = resident_bytes();
  const SequenceId dropped = fill();
  EXPECT_GT(resident_bytes(), base + one * 9 / 10);
  cache.drop(dropped);
  EXPECT_EQ(cache.allocated_bytes(), one);
  EXPECT_LT(resident_bytes(), base + one / 10);
  for (std::int64_t length = kTokens; length >= 0; length -= 64) cache.truncate(kept, length);  // page by page
  EXPECT_EQ(cache.allocated_bytes(), 0u);
  EXPECT_LT(resident_bytes(), base - one * 8 / 10);
}

TEST(KvStore, ViewsForTheKernels) {
  Random random(3);
  for (const DType type : kAllDTypes) {
    Pair pair(self_communicator(), small_config(type));
    const SequenceId ids[] = {pair.add(), pair.add(), pair.add()};
    pair.grow(random, ids[0], 300);
    pair.grow(random, ids[2], 71);
    const parallel::KvBatch batch = pair.cache.store().batch(0, ids);
    EXPECT_EQ(batch.lengths, (std::vector<std::int64_t>{300, 0, 71}));
    EXPECT_EQ(batch.k.tokens, 300);
    EXPECT_EQ(batch.k.pages_per_sequence, 5);
    EXPECT_EQ(batch.table.size(), 15u);
    EXPECT_EQ(batch.k.scales != nullptr, kernels::has_scales(type));
    ThreadPool pool(1);
    std::vector<float> q(3 * 2 * 16, 0.5f), out(3 * 2 * 24), again(2 * 24);
    AttentionInput in;
    in.q = QueryView::dense(q.data(), DType::kFloat32, 3, 1, 2, 16);
    in.k = batch.k;
    in.v = batch.v;
    in.lengths = batch.lengths;
    in.order = pair.cache.config().order;
    attention(in, {}, out, {}, pool);
    // The same from plain memory.
    const Rows k = pair.mirror.k(ids[0], 0, 0, 300), v = pair.mirror.v(ids[0], 0, 0, 300);
    in.q.batch = 1;
    in.k = KvView::tokens_first(k.bytes.data(), type, 1, 300, 2, 16);
    in.v = KvView::tokens_first(v.bytes.data(), type, 1, 300, 2, 24);
    if (kernels::has_scales(type)) {
      in.k = in.k.with_scales(k.scales.data());
      in.v = in.v.with_scales(v.scales.data());
    }
    in.lengths = {};
    attention(in, {}, again, {}, pool);
    EXPECT_EQ(std::memcmp(out.data(), again.data(), again.size() * sizeof(float)), 0);
  }
}

// Before a list of them is made, which may take more memory than there is.
TEST(KvStore, SaysThatThereIsNoRoomForSoManyTokens) {
  KvCache cache(self_communicator(), small_config());
  const SequenceId id = cache.add_sequence();
  cache.extend(id, 10);
  for (const int bits : {44, 50, 59}) {
    try {
      cache.extend(id, std::int64_t{1} << bits);
      FAIL() << "2^" << bits << " tokens accepted";
    } catch (const Error& error) {
      const std::string pages = std::to_string(std::int64_t{1} << (bits - 6)) + " more pages of";
      EXPECT_NE(std::string(error.what()).find(pages), std::string::npos) << error.what();
    }
    EXPECT_EQ(cache.length(id), 10);
  }
  EXPECT_NO_THROW(cache.extend(id, 100));
}

TEST(KvStore, RefusesByName) {
  const auto broken = [](const std::function<void(KvCacheConfig&)>& change) {
    KvCacheConfig config = small_config();
    change(config);
    return what_of([&] { KvCache(self_communicator(), config); });
  };
  EXPECT_EQ(what_of([&] { KvCache(self_communicator(), small_config(), {}, -2); }),
            "gpu = -2; accepted: KvCache::kHost or the index of a GPU");
  ThreadPool pool(1);
  EXPECT_THROW(bandwidth_weights(*self_communicator(), -2, pool), InvalidArgument);
  EXPECT_EQ(broken([](auto& c) { c.kv_heads = 0; }), "kv_heads = 0; accepted: 1 to 1048576");
  EXPECT_EQ(broken([](auto& c) { c.k_dim = 20; }), "k_dim = 20; accepted: 16 to 256 in steps of 8");
  EXPECT_EQ(broken([](auto& c) { c.v_dim = 264; }), "v_dim = 264; accepted: 16 to 256 in steps of 8");
  EXPECT_EQ(broken([](auto& c) { c.layers = 0; }), "layers = 0; accepted: 1 to 65536");
  EXPECT_EQ(broken([](auto& c) { c.order.branches = 3; }), "branches = 3; accepted: a power of two, 1 to 65536");
  EXPECT_NE(broken([](auto& c) { c.order.chunk_tokens = std::int64_t{1} << 40; }).find("chunk_tokens = 1099511627776"),
            std::string::npos);
  EXPECT_EQ(what_of([] { KvCache(nullptr, small_config()); }), "communicator = null; accepted: a group of ranks");

  KvCache cache(self_communicator(), small_config(DType::kInt8));
  const SequenceId id = cache.add_sequence();
  cache.extend(id, 10);
  std::vector<float> floats(100 * 2 * 24);
  const KvView k = KvView::tokens_first(floats.data(), DType::kFloat32, 1, 10, 2, 16);
  const KvView v = KvView::tokens_first(floats.data(), DType::kFloat32, 1, 10, 2, 24);
  const auto write = [&](const KvView& some_k, const KvView& some_v, std::int64_t first = 0, int layer = 0) {
    return what_of([&] { cache.write(id, layer, first, some_k, some_v); });
  };
  EXPECT_EQ(write(k, v), "nothing thrown");
  EXPECT_EQ(write(k, v, 1), "first = 1 with 10 tokens; accepted: those of the sequence, 0 to 10");
  EXPECT_EQ(write(k, v, -1), "first = -1 with 10 tokens; accepted: those of the sequence, 0 to 10");
  EXPECT_EQ(write(k, v, 0, 1), "layer = 1; accepted: 0 to 0");
  EXPECT_EQ(write(v, v), "k.head_dim = 24; accepted: the cache's, 16");
  KvView wrong = k;
  wrong.dtype = DType::kFp8E4M3;
  EXPECT_EQ(write(wrong, v), "k.dtype = fp8; accepted: float32, float16, bfloat16 or the cache's, int8");
  wrong.dtype = DType::kInt8;
  EXPECT_EQ(write(wrong, v), "k.scales = null with int8 values; accepted: one float32 per token and head");
  wrong = k;
  wrong.tokens = 9;
  EXPECT_EQ(write(wrong, v), "k.tokens = 9 differs from v.tokens = 10; accepted: equal values");
  wrong.batch = 2;
  EXPECT_EQ(write(wrong, v), "k.batch = 2; accepted: 1");
  wrong = k;
  wrong.data = nullptr;
  EXPECT_EQ(write(wrong, v), "k.data = null with 10 tokens; accepted: their address");
  wrong = k;
  wrong.token_stride = 0;  // forgotten: every token would be the first one
  EXPECT_EQ(write(wrong, v), "k.token_stride = 0 with 10 rows along it; accepted: 1 or more");
  wrong = v;
  wrong.head_stride = -24;
  EXPECT_EQ(write(k, wrong), "v.head_stride = -24; accepted: 1 or more");
  const std::int32_t table[] = {0, 2};
  wrong = KvView::paged(floats.data(), DType::kFloat32, 2, 5, 2, 16, 1, 2, table);
  EXPECT_EQ(write(wrong, v), "k.page_table[0, 1] = 2; accepted: 0 to pages - 1 = 1");
  wrong.pages = -2;
  EXPECT_EQ(write(wrong, v), "k.pages = -2; accepted: 0 or more");
  wrong.pages = 3;
  wrong.page_table = reinterpret_cast<const std::int32_t*>(reinterpret_cast<std::uintptr_t>(table) + 1);
  EXPECT_NE(write(wrong, v).find("accepted: an address that is a multiple of 4"), std::string::npos);
  wrong = k;
  wrong.page_table = table;  // and page_tokens forgotten
  EXPECT_EQ(write(wrong, v), "k.page_tokens = 0; accepted: 1 or more, or 0 and no pages");

  EXPECT_EQ(what_of([&] { cache.length(5); }), "sequence = 5; accepted: one of the 1 that were added and not dropped");
  EXPECT_EQ(what_of([&] { cache.truncate(id, 11); }), "length = 11; accepted: 0 to the current one, 10");
  EXPECT_EQ(what_of([&] { cache.carried(id, 5, 6); }),
            "first = 5, count = 6; accepted: tokens of the sequence, 0 to 10");
  EXPECT_EQ(what_of([&] { cache.extend(id, -1); }), "tokens = -1 after 10; accepted: 0 or more, 2^60 in all");
  EXPECT_EQ(what_of([&] { cache.store().chunk(0, id, 1); }), "chunk = 1; accepted: 0 to 0");
  KvCacheConfig layered = small_config();
  layered.layers = 2;
  KvCache two(self_communicator(), layered);
  const SequenceId other = two.add_sequence();
  EXPECT_EQ(what_of([&] { two.append(other, k, v); }),
            "append with layers = 2; accepted: 1, else extend and write each layer");
  EXPECT_EQ(two.length(other), 0);
}

TEST(KvStore, RunsOutOfAddressesAndStaysAsItWas) {
  KvCacheConfig config = small_config();
  config.kv_heads = 1 << 20;
  KvCache cache(self_communicator(), config);  // 10 GiB a page
  const SequenceId id = cache.add_sequence();
  EXPECT_THROW(cache.extend(id, 64 * 100'000), Error);
  EXPECT_EQ(cache.length(id), 0);
  EXPECT_EQ(cache.allocated_bytes(), 0u);
}

}  // namespace
}  // namespace treeattn
