// SPDX-License-Identifier: Apache-2.0
#include "parallel/choose_link.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "parallel/agree.h"
#include "parallel/kv_store.h"
#include "parallel/lend.h"
#include "treeattn/error.h"

namespace treeattn::parallel {

using kernels::cuda::LentMemory;

std::string_view link_name(DeviceLink link) {
  switch (link) {
    case DeviceLink::kHost:
      return "host";
    case DeviceLink::kNccl:
      return "nccl";
    case DeviceLink::kPeer:
      return "peer";
    case DeviceLink::kAuto:
      break;
  }
  return "auto";
}

DeviceLink fastest_link(Communicator& communicator, const kernels::cuda::RankDevice* device) {
  if (communicator.size() == 1 || !on_one_machine(communicator)) return DeviceLink::kHost;
  constexpr std::int64_t kNone = -1;
  std::vector<std::int64_t> slots = gathered(communicator, device != nullptr ? device->slot() : kNone);
  if (std::ranges::count(slots, kNone) > 0) return DeviceLink::kHost;
  if (share_one_gpu(communicator, device->gpu())) return DeviceLink::kPeer;
  std::ranges::sort(slots);
  if (std::ranges::adjacent_find(slots) != slots.end()) return DeviceLink::kHost;
  std::unique_ptr<LentMemory> lent;
  const std::string failure =
      failure_of([&] { lent = std::make_unique<LentMemory>(device->gpu(), 1, LentMemory::Others::kWrite); });
  try {
    connect_together(communicator, lent.get(), failure);
  } catch (const Unavailable&) {
    return DeviceLink::kHost;
  }
  free_together(communicator, *lent);
  return DeviceLink::kPeer;
}

DeviceLink link_of(const ParallelOptions& options, const KvStore& store) {
  if (options.link != DeviceLink::kAuto) return options.link;
  // A strategy that was asked for is to be seen at work.
  return options.strategy == Strategy::kAuto ? store.fastest_link() : DeviceLink::kHost;
}

}  // namespace treeattn::parallel
