// SPDX-License-Identifier: Apache-2.0
// A Llama model as the planner sees it: bytes and operations.
#pragma once

#include <string>

#include "model/config.h"
#include "plan/capacity.h"
#include "treeattn/dtype.h"

namespace treeattn::tools {

// A shape known by name, or a directory with a config.json. Throws InvalidArgument or BadFile.
model::LlamaConfig find_model(const std::string& name_or_directory);

// weights: float32, float16, bfloat16 or int8 with a scale for every kWeightGroup of them.
plan::ModelSize model_size(const model::LlamaConfig& config, DType weights, DType kv);

}  // namespace treeattn::tools
