// SPDX-License-Identifier: Apache-2.0
// What the programs beside llama_transformers.py share: a model and a text from their arguments, and how they end.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <vector>

#include "kernels/model_ops.h"
#include "model/checkpoint.h"
#include "model/config.h"
#include "model/weights.h"
#include "treeattn/error.h"

namespace treeattn::testing_model {

// MODEL: a directory. TOKENS: a file of whole numbers, of which PROMPT are the prompt. WEIGHTS: their format.
struct LlamaCase {
  LlamaCase(const char* directory, const char* token_file, const char* prompt_tokens, const char* format)
      : config(model::read_config(std::filesystem::path(directory) / "config.json")),
        prompt(static_cast<std::size_t>(std::atoi(prompt_tokens))) {
    std::ifstream file(token_file);
    tokens.assign(std::istream_iterator<std::int32_t>(file), {});
    if (prompt < 1 || prompt > tokens.size()) throw InvalidArgument("PROMPT must be 1 to the number of tokens");
    model::WeightOptions loading;
    loading.format = model::parse_weight_format(format);
    weights = std::make_shared<model::Weights>(config, model::open_checkpoint(directory), *ops, pool, loading);
  }

  model::LlamaConfig config;
  std::vector<std::int32_t> tokens;
  std::size_t prompt;
  ThreadPool pool{1};
  std::unique_ptr<kernels::ModelOps> ops = kernels::cpu_model_ops(pool);
  std::shared_ptr<const model::Weights> weights;
};

// The exit code of a program whose usage has `words` words, its name among them.
template <class Run>
int exit_code(int argc, char** argv, int words, const char* usage, const Run& run) {
  if (argc != words) {
    std::fprintf(stderr, "%s\n", usage);
    return 2;
  }
  try {
    run(argv);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", argv[0], error.what());
    return 1;
  }
}

}  // namespace treeattn::testing_model
