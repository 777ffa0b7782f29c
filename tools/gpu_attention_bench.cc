// SPDX-License-Identifier: Apache-2.0
// One attention call on a GPU, planned once and started again and again, timed by events. Decode is held against a
// plain read of as many bytes, prefill against multiply-adds that stay in registers; both measured in the same way
// right before and right after each line.
//
// peak_bytes is what one call holds in the memory of the GPU: K, V, q, out and what its plan allocated.
#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "attention_bench.h"
#include "base/round_up.h"
#include "base/timing.h"
#include "bench_data.h"
#include "device_option.h"
#include "kernels/cuda/gpu_meter.h"
#include "kernels/cuda/ranks/rank_device.h"
#include "table.h"
#include "treeattn/cuda.h"

namespace treeattn::tools {
namespace {

using kernels::cuda::DeviceArray;
using kernels::cuda::GpuMeter;
using kernels::cuda::RankDevice;

constexpr std::size_t kColdBytes = std::size_t{1} << 30;   // far more than any cache of a GPU
constexpr std::size_t kPlanRoom = std::size_t{256} << 20;  // for plans, and what the driver keeps for itself
constexpr std::size_t kMostSets = 1024;                    // each has a plan; of 64 KiB each they still fill any cache
constexpr int kWarmUps = 3;
constexpr int kLeastRepeats = 31, kMostRepeats = 1000;

std::size_t aligned(std::size_t bytes) { return base::round_up(bytes, 256); }

// A BenchData in the memory of a GPU.
class GpuBenchData {
 public:
  GpuBenchData(const BenchData& host, const Shape& shape, std::size_t sets, RankDevice& device)
      : sets_(sets), kv_bytes_(shape.kv_bytes() / 16 * 16) {
    for (const auto block : host.memory()) blocks_.push_back({block.data(), block.size(), nullptr});
    std::size_t bytes = aligned(shape.out_bytes());
    for (const Block& block : blocks_) bytes += aligned(block.bytes);
    memory_ = DeviceArray(device.gpu(), bytes);
    memory_.grow(bytes);
    std::byte* at = memory_.data();
    for (Block& block : blocks_) {
      block.there = at;
      device.copy_in(at, block.host, block.bytes);
      at += aligned(block.bytes);
    }
    out_ = reinterpret_cast<float*>(at);
    device.finish();
    // q comes last: before it lies nothing but K, V and their scales.
    read_step_ = static_cast<std::size_t>(blocks_.back().there - memory_.data()) / sets / 256 * 256;
    for (std::size_t set = 0; set < sets; ++set) inputs_.push_back(moved(host.input(set)));
  }

  // With page table and lengths where the host has them.
  const AttentionInput& input(std::size_t set) const { return inputs_[set % sets_]; }
  float* out() const { return out_; }

  // As many bytes as a call reads, others for every set.
  const std::byte* plain_bytes(std::size_t set) const { return memory_.data() + set % sets_ * read_step_; }
  std::size_t plain_bytes_count() const { return kv_bytes_; }

 private:
  struct Block {
    const std::byte* host;
    std::size_t bytes;
    std::byte* there;
  };

  template <class T>
  const T* moved(const T* pointer) const {
    const auto* byte = static_cast<const std::byte*>(static_cast<const void*>(pointer));
    for (const Block& block : blocks_) {
      if (byte >= block.host && byte < block.host + block.bytes) {
        return static_cast<const T*>(static_cast<const void*>(block.there + (byte - block.host)));
      }
    }
    return nullptr;  // no scales
  }

  AttentionInput moved(AttentionInput in) const {
    in.q.data = moved(in.q.data);
    for (KvView* view : {&in.k, &in.v}) {
      view->data = moved(view->data);
      view->scales = moved(view->scales);
    }
    return in;
  }

  std::size_t sets_;
  std::size_t kv_bytes_;
  std::size_t read_step_ = 0;
  std::vector<Block> blocks_;
  DeviceArray memory_;
  float* out_ = nullptr;
  std::vector<AttentionInput> inputs_;
};

class GpuBench final : public AttentionBench {
 public:
  GpuBench(const AttentionBenchOptions& options, int gpu)
      : options_(options),
        name_(Device{{gpu}}.name_of_rank(0)),
        pool_(options.threads),
        device_(gpu),
        meter_(device_) {}

  std::string device() const override { return name_; }

  std::string lack(const Shape& shape) const override {
    const std::size_t needed = BenchData::bytes(shape, sets(shape));
    const std::size_t free = cuda_free_bytes(device_.gpu());
    const std::optional<std::size_t> room = usable_memory(KvCache::kHost);
    if (needed + kPlanRoom > free) {
      return fmt::format("needs {} on GPU {}, {} of {} free", format_bytes(needed + kPlanRoom), device_.gpu(),
                         format_bytes(free), format_bytes(device_.memory_bytes()));
    }
    if (!room || needed <= *room) return "";
    return fmt::format("needs {} on the host to make its numbers, {} can be used", format_bytes(needed),
                       format_bytes(*room));
  }

  AttentionLine measure(const Shape& shape) override {
    const BenchData host(shape, sets(shape), options_.seed, pool_);  // plans read page tables and lengths from it
    const GpuBenchData data(host, shape, sets(shape), device_);
    std::vector<CudaPlan> plans;
    AttentionOptions options;
    options.causal = shape.causal;
    for (std::size_t set = 0; set < sets(shape); ++set) plans.emplace_back(device_.gpu(), data.input(set), options);

    AttentionLine line;
    line.shape = shape;
    line.isa = plans[0].kernel();
    line.peak_bytes = shape.kv_bytes() + shape.q_bytes() + shape.out_bytes() + plans[0].workspace_bytes();
    const auto read = [&](std::size_t i) { meter_.read(data.plain_bytes(i), data.plain_bytes_count()); };
    const auto attend = [&](std::size_t i) {
      plans[i % plans.size()].attention(data.out(), nullptr, device_.stream());
    };
    const double before = median_ms(read), ours = median_ms(attend), after = median_ms(read);
    const double read_gb_s = 1e-6 * static_cast<double>(data.plain_bytes_count()) / std::min(before, after);
    line.fill_in(1e-3 * ours, read_gb_s, is_prefill(shape) ? meter_.multiply_add_gflops(shape.dtype) : 0);
    return line;
  }

 private:
  // The copies of K and V that a line rotates over: no call finds its keys in a cache.
  static std::size_t sets(const Shape& shape) { return std::min(kMostSets, kColdBytes / shape.kv_bytes() + 1); }

  template <class Work>
  double median_ms(const Work& work) {
    double last = 0;
    const auto time = [&](std::size_t i) { return meter_.milliseconds([&] { work(i); }); };
    for (std::size_t i = 0; i < kWarmUps; ++i) last = time(i);
    const double ms = options_.quick ? 40 : 200;
    const double fitting = std::clamp(ms / last, 1.0 * kLeastRepeats, 1.0 * kMostRepeats);
    std::vector<double> times(static_cast<std::size_t>(options_.repeat > 0 ? options_.repeat : fitting));
    for (std::size_t i = 0; i < times.size(); ++i) times[i] = time(i + kWarmUps);
    return base::median(std::move(times));
  }

  AttentionBenchOptions options_;
  std::string name_;
  ThreadPool pool_;  // makes the numbers
  RankDevice device_;
  GpuMeter meter_;
};

}  // namespace

std::unique_ptr<AttentionBench> gpu_attention_bench(const AttentionBenchOptions& options, int gpu) {
  return std::make_unique<GpuBench>(options, gpu);
}

}  // namespace treeattn::tools
