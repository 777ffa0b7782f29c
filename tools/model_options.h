// SPDX-License-Identifier: Apache-2.0
// Options that the commands on a model share: which model, on which ranks, and how tokens are chosen.
#pragma once

#include <cstdint>
#include <string>

#include "device_option.h"
#include "model/loaded_model.h"
#include "treeattn/communicator.h"
#include "treeattn/llama.h"

namespace treeattn::tools {

class CommandLine;

// Text, as in ShapeOptions: empty means not given.
struct ModelOptions {
  std::string model, random_weights, weights, kv_type, strategy, ranks, threads, chunk, branches, piece, deadline;
  std::string device, link;
  bool gather_kv = false;
  const CommandLine* command = nullptr;  // that they were added to
  // Said by the command, before add_to: --strategy may be a list; there is no --random-weights, which has no tokenizer.
  bool many_strategies = false, must_have_tokenizer = false;

  void add_to(CommandLine& app);
};

// What they say, checked. Nothing of the model's weights has been read.
struct ModelPlan {
  const CommandLine* command = nullptr;  // that was given
  model::ModelDescription model;
  LlamaOptions llama;
  WeightFormat weights = WeightFormat::kAsStored;
  RankOptions ranks;
  int rank_count = 0;  // 0: not given
  int threads = 0;     // of a rank; 0: not given
  Device device;       // cuda: the ranks of a machine go round its GPUs
};

// Throws InvalidArgument, BadFile; Unavailable for a GPU where there is none.
ModelPlan make_model_plan(const ModelOptions& options);

// Throws InvalidArgument for a model without a tokenizer. why: who needs it, as " by chat".
void require_tokenizer(const ModelOptions& options, const ModelPlan& plan, const std::string& why);

struct SamplingOptions {
  std::string temperature, top_k, top_p, min_p, repetition_penalty, seed, logprobs, max_tokens;
  std::vector<std::string> stop;
  bool ignore_eos = false;
  bool recover = false;

  void add_to(CommandLine& app, const char* default_max_tokens);
  // What is not given is as the model says. Throws InvalidArgument.
  GenerateOptions parse(const model::GenerationConfig& model, std::int64_t default_max_tokens) const;
};

// Throws InvalidArgument where the text is not UTF-8, as a shell can hand over any bytes.
void require_utf8(const char* option, const std::string& text);

}  // namespace treeattn::tools
