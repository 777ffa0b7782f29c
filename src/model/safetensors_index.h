// SPDX-License-Identifier: Apache-2.0
// model.safetensors.index.json: which file of the directory holds which tensor.
#pragma once

#include <map>
#include <string>
#include <string_view>

namespace treeattn::model {

// Tensor -> name of a file in the same directory. Throws BadFile, also for a name that leads anywhere else.
std::map<std::string, std::string> parse_safetensors_index(std::string_view json, const std::string& name);

}  // namespace treeattn::model
