// SPDX-License-Identifier: Apache-2.0
// --device: what computes. One place for its grammar and for what is said where it cannot be had.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "treeattn/communicator.h"
#include "treeattn/kv_cache.h"

namespace treeattn::tools {

class CommandLine;

// What --device says, checked against this machine.
struct Device {
  std::vector<int> gpus;  // cuda: all there are; cuda:N: that one; cpu: none

  bool on_gpu() const { return !gpus.empty(); }
  // The GPU that rank r of this machine computes on, as KvCache takes it: ranks go round the GPUs.
  int gpu_of_rank(int rank) const;
  // "cpu", or "cuda:0 NVIDIA H200".
  std::string name_of_rank(int rank) const;
};

// Adds --device to a command; `text` is what was given, empty unless it was.
void add_device_option(CommandLine& app, std::string& text);

// Throws InvalidArgument for anything but cpu, cuda and cuda:N; Unavailable, with the reason and what to do, where
// there is no such GPU to use.
Device parse_device(const std::string& text);

// Where a rank stands among those of its machine.
struct RankPlace {
  int number = 0;  // which of them it is
  int here = 0;    // how many they are
  int gpu = KvCache::kHost;
  int sharing = 0;  // those of them on the same GPU, itself included; on the CPU all
};
RankPlace place_of_rank(const Communicator& world, const Device& device);

// Bytes of a GPU, or of the host (KvCache::kHost), to plan with: nine tenths of what can be allocated now. None:
// unknown.
std::optional<std::size_t> usable_memory(int gpu);

}  // namespace treeattn::tools
