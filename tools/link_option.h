// SPDX-License-Identifier: Apache-2.0
// --link: how the states of ranks on GPUs travel.
#pragma once

#include <string>

#include "treeattn/parallel_attention.h"

namespace treeattn::tools {

// Throws InvalidArgument for anything but host, peer and nccl, or with one of the last two where ranks compute on CPUs;
// Unavailable for nccl in a build without it. An empty text is host.
DeviceLink parse_link(const std::string& text, bool on_gpu);
// The same with auto as well, which an empty text is.
DeviceLink parse_link_or_auto(const std::string& text, bool on_gpu);

}  // namespace treeattn::tools
