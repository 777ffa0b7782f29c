// SPDX-License-Identifier: Apache-2.0
#include "link_option.h"

#include "base/check.h"
#include "treeattn/error.h"

namespace treeattn::tools {

DeviceLink parse_link(const std::string& text, bool on_gpu) {
  DeviceLink link = DeviceLink::kHost;
  if (text == "peer") link = DeviceLink::kPeer;
  if (text == "nccl") link = DeviceLink::kNccl;
  base::require(link != DeviceLink::kHost || text.empty() || text == "host",
                "--link is \"{}\"; accepted: host, peer, nccl", text);
  base::require(link == DeviceLink::kHost || on_gpu,
                "--link is \"{}\" with --device cpu; accepted: host, or --device cuda", text);
  if (link == DeviceLink::kNccl && !nccl_available()) {
    throw Unavailable("--link is \"nccl\": built without NCCL; accepted here: host, peer");
  }
  return link;
}

std::string_view link_name(DeviceLink link) {
  return link == DeviceLink::kPeer ? "peer" : link == DeviceLink::kNccl ? "nccl" : "host";
}

}  // namespace treeattn::tools
