// SPDX-License-Identifier: Apache-2.0
#include "link_option.h"

#include "base/check.h"
#include "treeattn/error.h"

namespace treeattn::tools {

namespace {

DeviceLink parse(const std::string& text, bool on_gpu, const char* accepted, const char* on_cpu) {
  DeviceLink link = DeviceLink::kHost;
  if (text == "peer") link = DeviceLink::kPeer;
  if (text == "nccl") link = DeviceLink::kNccl;
  base::require(link != DeviceLink::kHost || text == "host", "--link is \"{}\"; accepted: {}", text, accepted);
  base::require(link == DeviceLink::kHost || on_gpu,
                "--link is \"{}\" with --device cpu; accepted: {}, or --device cuda", text, on_cpu);
  if (link == DeviceLink::kNccl && !nccl_available()) {
    throw Unavailable("--link is \"nccl\": built without NCCL; accepted here: host, peer");
  }
  return link;
}

}  // namespace

DeviceLink parse_link(const std::string& text, bool on_gpu) {
  return text.empty() ? DeviceLink::kHost : parse(text, on_gpu, "host, peer, nccl", "host");
}

DeviceLink parse_link_or_auto(const std::string& text, bool on_gpu) {
  if (text.empty() || text == "auto") return DeviceLink::kAuto;
  return parse(text, on_gpu, "auto, host, peer, nccl", "auto, host");
}

}  // namespace treeattn::tools
