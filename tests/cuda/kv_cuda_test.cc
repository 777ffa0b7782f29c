// SPDX-License-Identifier: Apache-2.0
// The KV cache with its pages on a GPU: content against the mirror, from the host's memory and from the GPU's, through
// forks, rebalancing and files; rows converted on the GPU bit for bit as on the host.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <memory>

#include "cuda/device_case.h"
#include "kv_mirror.h"
#include "parallel/kv_memory.h"
#include "parallel/kv_rows.h"
#include "treeattn/cuda.h"
#include "treeattn/error.h"

namespace treeattn {
namespace {

using kernels::cuda_check;
using kernels::DeviceMemory;
using namespace testing_kv;

class KvCuda : public testing::Test {
 protected:
  void SetUp() override {
    if (!cuda_problem().empty()) GTEST_SKIP() << "*** SKIPPED: " << cuda_problem() << " ***";
  }
};

// The rows of a source on the GPU.
struct DeviceSource {
  explicit DeviceSource(const Source& source)
      : bytes(source.bytes().data(), source.bytes().size()),
        scales(source.scales().data(), source.scales().size() * sizeof(float)),
        view(source.view()) {
    view.data = bytes.as<void>();
    if (view.scales != nullptr) view.scales = scales.as<float>();
  }
  DeviceMemory bytes, scales;
  KvView view;
};

// Rows go to the cache from the host's memory or, on a stream of the caller's, from the GPU's, which is overwritten as
// soon as the stream allows.
class GpuPair : public Pair {
 public:
  GpuPair(std::shared_ptr<Communicator> world, const KvCacheConfig& config, std::span<const double> weights,
          std::uint64_t seed)
      : Pair(std::move(world), config, weights, 0), random_(seed) {
    cuda_check(cudaStreamCreate(&stream_), "stream");
  }
  ~GpuPair() override { cudaStreamDestroy(stream_); }

  void store(SequenceId id, int layer, std::int64_t first, const Source& k, const Source& v, bool append) override {
    if (random_.chance(0.5)) return Pair::store(id, layer, first, k, v, append);
    const DeviceSource k_there(k), v_there(v);
    if (append) {
      cache.append_from_device(id, k_there.view, v_there.view, stream_);
    } else {
      cache.write_from_device(id, layer, first, k_there.view, v_there.view, stream_);
    }
    cuda_check(cudaMemsetAsync(k_there.bytes.as<void>(), 0xff, k.bytes().size(), stream_), "overwrite");
    cuda_check(cudaMemsetAsync(v_there.bytes.as<void>(), 0xff, v.bytes().size(), stream_), "overwrite");
    cuda_check(cudaStreamSynchronize(stream_), "stream");
  }

 private:
  Random random_;
  cudaStream_t stream_ = nullptr;
};

std::vector<double> random_weights(Random& random, int ranks) {
  std::vector<double> weights;
  for (int rank = 0; rank < ranks; ++rank) weights.push_back(random.chance(0.3) ? 0.0 : std::fabs(random.value()));
  weights[static_cast<std::size_t>(random.integer(0, ranks - 1))] = 1.0;
  return weights;
}

TEST_F(KvCuda, RandomCallsKeepTheContent) {
  const std::uint64_t seed = test_seed();
  std::uint64_t round = 0;
  for (const int ranks : {1, 2, 3, 5}) {
    for (int repeat = 0; repeat < 4; ++repeat, ++round) {
      SCOPED_TRACE(seed + round);
      const TemporaryDirectory directory;
      run_ranks(ranks, [&](std::shared_ptr<Communicator> world) {
        Random random(seed + round);
        const KvCacheConfig config = random_config(random);
        GpuPair pair(world, config, random_weights(random, ranks), seed + static_cast<std::uint64_t>(world->rank()));
        for (int step = 0; step < 40; ++step) {
          if (random.chance(0.1)) {
            pair.cache.rebalance(random_weights(random, ranks));
          } else if (random.chance(0.05)) {
            // Into the memory of the other kind, and on from there.
            pair.cache.save(directory.path());
            const std::vector<double> weights = random_weights(random, ranks);
            KvCache on_host = KvCache::load(world, directory.path(), weights);
            pair.mirror.expect_equal(on_host);
            pair.cache = KvCache::load(world, directory.path(), weights, 0);
          } else {
            pair.step(random, 700);
          }
          if (step % 8 == 7) pair.check();
        }
        pair.check();
        EXPECT_EQ(pair.cache.gpu(), 0);
        for (const SequenceId id : pair.mirror.ids()) pair.drop(id);
        EXPECT_EQ(pair.cache.allocated_bytes(), 0u);
      });
      if (HasFailure()) FAIL() << "TREEATTN_SEED=" << seed + round << ", " << ranks << " ranks";
    }
  }
}

// Rows with everything a float can be.
std::vector<float> odd_values(Random& random, std::size_t count) {
  const std::vector<float> special = {0.0f,
                                      -0.0f,
                                      0x1p-149f,
                                      -0x1.8p-140f,
                                      0x1p-126f,
                                      65504.0f,
                                      65520.0f,
                                      448.0f,
                                      -464.0f,
                                      0x1.fffffep+127f,
                                      std::numeric_limits<float>::infinity(),
                                      -std::numeric_limits<float>::infinity(),
                                      std::numeric_limits<float>::quiet_NaN(),
                                      std::bit_cast<float>(0xff800001u)};
  std::vector<float> values(count);
  const float size = std::exp2(static_cast<float>(random.integer(-149, 120)));
  const double odd = random.chance(0.5) ? 0.02 : 0.0;
  for (float& value : values) value = random.chance(odd) ? random.pick(special) : random.value() * size;
  return values;
}

TEST_F(KvCuda, RowsAreConvertedBitForBitAsOnTheHost) {
  const std::uint64_t seed = test_seed();
  Random random(seed);
  const auto memory = parallel::memory_of(0);
  for (int round = 0; round < 400; ++round) {
    const std::int64_t tokens = random.integer(1, 9), heads = random.integer(1, 3), dim = 8 * random.integer(2, 32);
    const std::vector<DType> floats = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
    const std::vector<DType> types(std::begin(kAllDTypes), std::end(kAllDTypes));
    Rows rows{random.pick(floats), heads, dim, {}, {}};
    const DType to = random.pick(types);
    rows.resize(tokens);
    const auto count = static_cast<std::size_t>(tokens * heads * dim);
    for (std::size_t i = 0; i < count; i += static_cast<std::size_t>(dim)) {
      const std::vector<float> values = odd_values(random, static_cast<std::size_t>(dim));
      for (std::size_t j = 0; j < values.size(); ++j) {
        base::store_from_float(&rows.bytes[(i + j) * dtype_size(rows.type)], values[j], rows.type);
      }
    }
    const Source source(random, rows);
    Rows want{to, heads, dim, {}, {}}, got = want;
    want.resize(tokens);
    got.resize(tokens);
    parallel::store_rows(source.view(), 0, tokens, to, want.bytes.data(), want.scales.data());
    const DeviceSource there(source);
    const DeviceMemory bytes(got.bytes.size()), scales(got.scales.size() * sizeof(float));
    cuda_check(cudaDeviceSynchronize(), "copy");  // the stream below does not wait for it
    memory->device()->store_rows(there.view, 0, tokens, to, bytes.as<std::byte>(),
                                 got.scales.empty() ? nullptr : scales.as<float>());
    memory->copy_out(got.bytes.data(), bytes.as<std::byte>(), got.bytes.size());
    memory->copy_out(reinterpret_cast<std::byte*>(got.scales.data()), scales.as<std::byte>(),
                     got.scales.size() * sizeof(float));
    memory->finish();
    ASSERT_EQ(got.bytes, want.bytes) << dtype_name(rows.type) << " to " << dtype_name(to) << ", TREEATTN_SEED=" << seed;
    ASSERT_EQ(std::memcmp(got.scales.data(), want.scales.data(), want.scales.size() * sizeof(float)), 0)
        << dtype_name(rows.type) << " to " << dtype_name(to) << ", TREEATTN_SEED=" << seed;
  }
}

// Growth moves nothing: what was written stays where it is, and memory is taken as it is used.
TEST_F(KvCuda, GrowsInPlace) {
  KvCacheConfig config{1, 8, 128, 128, DType::kBFloat16, DType::kBFloat16, {}};
  KvCache cache(self_communicator(), config, {}, 0);
  const SequenceId id = cache.add_sequence();
  cache.extend(id, 256);
  const std::byte* first = cache.store().chunk(0, id, 0).k;
  cache.extend(id, 1 << 18);
  EXPECT_EQ(cache.store().chunk(0, id, 0).k, first);
  EXPECT_EQ(cache.allocated_bytes(), static_cast<std::size_t>((1 << 18) + 256) * 8 * 256 * 2);
}

TEST_F(KvCuda, WrongCallsAreRefused) {
  const KvCacheConfig config{1, 1, 16, 16, DType::kFloat32, DType::kFloat32, {64, 4}};
  EXPECT_THROW(KvCache(self_communicator(), config, {}, 4711), Unavailable);
  KvCache on_host(self_communicator(), config);
  const std::vector<float> rows(16);
  const KvView view = KvView::tokens_first(rows.data(), DType::kFloat32, 1, 1, 1, 16);
  const SequenceId id = on_host.add_sequence();
  EXPECT_THROW(on_host.append_from_device(id, view, view, nullptr), InvalidArgument);
  EXPECT_EQ(on_host.length(id), 0);
}

}  // namespace
}  // namespace treeattn
