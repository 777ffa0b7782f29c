// SPDX-License-Identifier: Apache-2.0
// The choice of DeviceLink::kAuto.
#pragma once

#include <string_view>

#include "kernels/cuda/ranks/rank_device.h"
#include "treeattn/communicator.h"
#include "treeattn/parallel_attention.h"

namespace treeattn::parallel {

class KvStore;

// "host", "nccl", "peer" or "auto".
std::string_view link_name(DeviceLink link);

// Collective. kPeer where every rank has a GPU of its own, in one machine, and reaches those of all others, or all are
// threads with one GPU; else kHost. Not for processes that share a GPU: they take turns on it, and one whose kernel
// waits for the others holds them up. device: this rank's, or null.
DeviceLink fastest_link(Communicator& communicator, const kernels::cuda::RankDevice* device);

// Collective the first time. What options.link stands for with this cache.
DeviceLink link_of(const ParallelOptions& options, const KvStore& store);

}  // namespace treeattn::parallel
