// SPDX-License-Identifier: Apache-2.0
#include "device_option.h"

#include <fmt/format.h>

#include <charconv>
#include <string_view>

#include "base/available_memory.h"
#include "base/check.h"
#include "command_line.h"
#include "table.h"
#include "treeattn/cuda.h"
#include "treeattn/error.h"

namespace treeattn::tools {
namespace {

constexpr std::string_view kCuda = "cuda";

// -1: all of them.
int parse_index(const std::string& text) {
  if (text == kCuda) return -1;
  int index = -1;
  const char* end = text.data() + text.size();
  const bool prefixed = text.starts_with("cuda:") && text.size() > kCuda.size() + 1;
  const bool number = prefixed && std::from_chars(text.data() + kCuda.size() + 1, end, index).ptr == end;
  base::require(number && index >= 0, "--device is \"{}\"; accepted: cpu, cuda, cuda:N with the number N of a GPU",
                text);
  return index;
}

}  // namespace

int Device::gpu_of_rank(int rank) const {
  return on_gpu() ? gpus[static_cast<std::size_t>(rank) % gpus.size()] : KvCache::kHost;
}

std::string Device::name_of_rank(int rank) const {
  if (!on_gpu()) return "cpu";
  const int gpu = gpu_of_rank(rank);
  for (const CudaDevice& device : cuda_devices()) {
    if (device.index == gpu) return fmt::format("cuda:{} {}", gpu, device.name);
  }
  return fmt::format("cuda:{}", gpu);
}

void add_device_option(CommandLine& app, std::string& text) {
  app.add_option("--device", text, "What computes: cpu, cuda (a GPU) or cuda:N (that GPU) (default cpu)")
      ->type_name("NAME")
      ->own_to_rank();
}

Device parse_device(const std::string& text) {
  Device device;
  if (text.empty() || text == "cpu") return device;
  const int index = parse_index(text);
  const std::string problem = cuda_problem();
  if (!problem.empty()) {
    throw Unavailable(
        fmt::format("--device is \"{}\": {}. The CPU works: --device cpu, or leave the option out", text, problem));
  }
  const std::vector<CudaDevice> found = cuda_devices();
  const int count = static_cast<int>(found.size());
  if (index >= count) {
    throw Unavailable(fmt::format("--device is \"{}\" and this machine has {}; accepted here: cpu, cuda, cuda:0{}",
                                  text, format_count(count, "GPU"),
                                  count > 1 ? fmt::format(" to cuda:{}", count - 1) : ""));
  }
  for (const CudaDevice& gpu : found) {
    if (index < 0 || gpu.index == index) device.gpus.push_back(gpu.index);
  }
  return device;
}

RankPlace place_of_rank(const Communicator& world, const Device& device) {
  RankPlace place;
  for (int rank = 0; rank < world.size(); ++rank) {
    if (world.node_of(rank) != world.node_of(world.rank())) continue;
    place.number += rank < world.rank() ? 1 : 0;
    ++place.here;
  }
  place.gpu = device.gpu_of_rank(place.number);
  for (int number = 0; number < place.here; ++number) place.sharing += device.gpu_of_rank(number) == place.gpu ? 1 : 0;
  return place;
}

std::optional<std::size_t> usable_memory(int gpu) {
  const std::optional<std::size_t> bytes = gpu == KvCache::kHost ? base::available_memory() : cuda_free_bytes(gpu);
  return bytes ? std::optional(*bytes / 10 * 9) : std::nullopt;
}

}  // namespace treeattn::tools
