// SPDX-License-Identifier: Apache-2.0
#include "model_run.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <map>
#include <optional>
#include <thread>

#include "base/check.h"
#include "base/machine.h"
#include "base/read_bandwidth.h"
#include "command.h"
#include "kernels/cuda/ranks/rank_device.h"
#include "launched_ranks.h"
#include "model/weights.h"
#include "notes.h"
#include "rate_progress.h"
#include "table.h"
#include "terminal_line.h"
#include "treeattn/error.h"

namespace treeattn::tools {
namespace {

std::atomic<bool> interrupted = false;

void on_interrupt(int signal) {
  interrupted = true;
  end_wiped_on(signal);
}

// copies: of the weights on this machine, or on its GPU; here: ranks there.
void check_memory(const ModelPlan& plan, int gpu, std::int64_t tokens, int ranks, int here, int copies) {
  const std::optional<std::size_t> usable = usable_memory(gpu);
  if (!usable) return;
  const std::size_t available = *usable;
  const model::MemoryNeed need = model::memory_need(plan.model.config, plan.llama, plan.weights, tokens, ranks);
  const std::size_t all =
      need.weights * static_cast<std::size_t>(copies) + need.of_rank() * static_cast<std::size_t>(here);
  if (all <= available) return;
  const int enough = model::ranks_needed(plan.model.config, plan.llama, plan.weights, tokens, available);
  const std::string kind = gpu < 0 ? "machine" : "GPU";
  const std::string advice =
      need.weights > available ? fmt::format("no number of {}s like this one would do: each needs all weights", kind)
      : enough == 0            ? fmt::format("not even {} would do, one for each branch, each on a {} like this one",
                                             format_count(plan.llama.order.branches, "rank"), kind)
                    : fmt::format("{} would do, each on a {} like this one", format_count(enough, "rank"), kind);
  throw Unavailable(fmt::format(
      "{} tokens on {} need {} on this {} ({} of weights, {} of cache, {} of workspace); {} can be used; {}", tokens,
      format_count(ranks, "rank"), format_bytes(all), kind,
      format_bytes(need.weights * static_cast<std::size_t>(copies)),
      format_bytes(need.cache * static_cast<std::size_t>(here)),
      format_bytes((need.of_rank() - need.cache) * static_cast<std::size_t>(here)), format_bytes(available), advice));
}

std::unique_ptr<LlamaModel::Impl> load(const ModelPlan& plan, int gpu, int threads, bool shows) {
  RateProgress progress("loading", "M parameters");
  LlamaLoadOptions options;
  options.weights = plan.weights;
  options.threads = threads;
  options.gpu = gpu;
  if (shows) {
    options.progress = [&](std::size_t done, std::size_t total) {
      progress.update(static_cast<std::int64_t>(done / 1000000), static_cast<std::int64_t>(total / 1000000));
    };
  }
  return std::make_unique<LlamaModel::Impl>(plan.model, options);
}

int run_processes(const ModelPlan& plan, std::int64_t tokens, const std::function<int(const ModelRank&)>& body) {
  const std::shared_ptr<Communicator> world = meet_ranks(*plan.command, plan.ranks, plan.rank_count);
  const RankPlace place = place_of_rank(*world, plan.device);
  const bool mapped = model::stays_as_stored(plan.weights, plan.model.config.stored);
  const bool shared = !plan.model.directory.empty() && mapped && place.gpu < 0;
  const int cores = take_own_cores(*world);
  const int threads = plan.threads > 0 ? plan.threads : cores;
  const bool speaks = world->rank() == 0;
  std::unique_ptr<LlamaModel::Impl> model;
  std::optional<ThreadPool> pool;
  std::unique_ptr<kernels::ModelOps> ops;
  on_all_or_none(*world, [&] {
    kernels::cuda::stay_on_gpu(place.gpu);
    check_memory(plan, place.gpu, tokens, world->size(), place.sharing, shared ? 1 : place.sharing);
    model = load(plan, place.gpu, threads, speaks);
    pool.emplace(threads);
    ops = kernels::make_model_ops(place.gpu, *pool);
  });
  return body({world, *model, *pool, *ops, place.here, speaks});
}

// Ranks on one GPU, or on the CPU, share a model; every other GPU has one of its own.
int run_threads(const ModelPlan& plan, std::int64_t tokens, const std::function<int(const ModelRank&)>& body) {
  const int ranks = std::max(1, plan.rank_count);
  std::map<int, int> ranks_on;  // by GPU
  for (int rank = 0; rank < ranks; ++rank) ++ranks_on[plan.device.gpu_of_rank(rank)];
  std::map<int, std::unique_ptr<LlamaModel::Impl>> models;
  for (const auto& [gpu, here] : ranks_on) {
    kernels::cuda::stay_on_gpu(gpu);
    check_memory(plan, gpu, tokens, ranks, here, 1);
  }
  for (const auto& [gpu, here] : ranks_on) models[gpu] = load(plan, gpu, 0, true);
  const int threads = plan.threads > 0 ? plan.threads : cores_of_thread(ranks);
  std::atomic<int> code = 0;
  const auto on_rank = [&](const std::shared_ptr<Communicator>& world) {
    const int gpu = plan.device.gpu_of_rank(world->rank());
    kernels::cuda::stay_on_gpu(gpu);
    ThreadPool pool(threads);
    const auto ops = kernels::make_model_ops(gpu, pool);
    const int mine = body({world, *models.at(gpu), pool, *ops, ranks, world->rank() == 0});
    for (int seen = code; seen < mine && !code.compare_exchange_weak(seen, mine);) {
    }
  };
  run_ranks(ranks, on_rank, plan.ranks);
  return code;
}

}  // namespace

void print_losses(const GenerateStats& stats) {
  for (const int lost : stats.lost) print_note("treeattn: went on without rank {}\n", lost);
}

double read_gb_s(int gpu, const std::vector<int>& processors) {
  if (gpu >= 0) return kernels::cuda::RankDevice(gpu).read_bandwidth(std::size_t{2} << 30);
  double out = 0;
  // A thread of its own, as the caller's is held on the cores of its rank.
  std::thread([&] {
    base::stay_on(processors);
    ThreadPool all(ThreadPool::available_cores());
    out = base::read_bandwidth(all, std::size_t{256} << 20, 5);
  }).join();
  return out;
}

const std::atomic<bool>& interrupt_flag() { return interrupted; }

void catch_interrupt() {
  interrupted = false;
  // What a script starts in the background has it ignored: Ctrl-C is for who is in front.
  if (std::signal(SIGINT, on_interrupt) == SIG_IGN) std::signal(SIGINT, SIG_IGN);
  if (launched()) std::signal(SIGTERM, on_interrupt);  // what mpirun and torchrun make of Ctrl-C
}

int run_model(const ModelPlan& plan, std::int64_t tokens, const std::function<int(const ModelRank&)>& body) {
  return launched() ? run_processes(plan, tokens, body) : run_threads(plan, tokens, body);
}

}  // namespace treeattn::tools
