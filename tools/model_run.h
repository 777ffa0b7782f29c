// SPDX-License-Identifier: Apache-2.0
// A model on ranks: checks that there is room, loads the weights once a process, and runs a body on every rank.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>

#include "kernels/model_ops.h"
#include "model/llama.h"
#include "model/memory_need.h"
#include "model_options.h"
#include "treeattn/communicator.h"
#include "treeattn/thread_pool.h"

namespace treeattn::tools {

// What a rank has to work with.
struct ModelRank {
  std::shared_ptr<Communicator> world;
  const LlamaModel::Impl& model;
  ThreadPool& pool;
  kernels::ModelOps& ops;
  int ranks_here = 1;   // on this machine
  bool speaks = false;  // the one that prints

  std::unique_ptr<model::Llama> make_llama(const LlamaOptions& options) const {
    return std::make_unique<model::Llama>(model.weights, world, ops, pool, options);
  }
};

// Ranks are the processes of a launcher, or else threads. tokens: the longest text there will be; throws Unavailable
// when this machine has no room for it, saying how much it takes and how many ranks would do. Returns the
// largest of what the bodies return.
int run_model(const ModelPlan& plan, std::int64_t tokens, const std::function<int(const ModelRank&)>& body);

// Says which ranks were lost while a text was made.
void print_losses(const GenerateStats& stats);

// GB/s that these processors, or this GPU (negative: none), read at best: what a token is held against.
double read_gb_s(int gpu, const std::vector<int>& processors);

// Set by the first Ctrl-C after catch_interrupt(); the one after it ends the process.
const std::atomic<bool>& interrupt_flag();
// Clears the flag. Before it is called, as while weights are read, a Ctrl-C ends the process.
void catch_interrupt();

}  // namespace treeattn::tools
