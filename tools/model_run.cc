// SPDX-License-Identifier: Apache-2.0
#include "model_run.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <csignal>

#include "base/check.h"
#include "base/machine.h"
#include "rate_progress.h"
#include "table.h"
#include "treeattn/error.h"

namespace treeattn::tools {
namespace {

constexpr std::size_t kStoredBytes = 2;  // of a weight, before the files have been opened: bfloat16

std::atomic<bool> interrupted = false;

void on_interrupt(int) {
  interrupted = true;
  std::signal(SIGINT, SIG_DFL);
}

// copies: of the weights on this machine.
void check_memory(const ModelPlan& plan, std::int64_t tokens, int ranks, int here, int copies) {
  const std::size_t available = base::available_memory() / 10 * 9;
  if (available == 0) return;  // unknown
  const model::MemoryNeed need =
      model::memory_need(plan.model.config, plan.llama, plan.weights, kStoredBytes, tokens, ranks);
  const std::size_t all =
      need.weights * static_cast<std::size_t>(copies) + need.of_rank() * static_cast<std::size_t>(here);
  if (all <= available) return;
  const int enough = model::ranks_needed(plan.model.config, plan.llama, plan.weights, kStoredBytes, tokens, available);
  const std::string advice =
      enough == 0 ? fmt::format("no number of machines like this one would do: each needs all weights")
                  : fmt::format("{} rank{} would do, each on a machine like this one", enough, enough == 1 ? "" : "s");
  throw Unavailable(fmt::format(
      "{} tokens on {} rank{} need {} on this machine ({} of weights, {} of cache, {} of workspace); {} can be used; "
      "{}",
      tokens, ranks, ranks == 1 ? "" : "s", format_bytes(all),
      format_bytes(need.weights * static_cast<std::size_t>(copies)),
      format_bytes(need.cache * static_cast<std::size_t>(here)),
      format_bytes((need.of_rank() - need.cache) * static_cast<std::size_t>(here)), format_bytes(available), advice));
}

std::unique_ptr<LlamaModel::Impl> load(const ModelPlan& plan, int threads, bool shows) {
  RateProgress progress("loading", "M parameters");
  LlamaLoadOptions options;
  options.weights = plan.weights;
  options.threads = threads;
  if (shows) {
    options.progress = [&](std::size_t done, std::size_t total) {
      progress.update(static_cast<std::int64_t>(done / 1000000), static_cast<std::int64_t>(total / 1000000));
    };
  }
  return std::make_unique<LlamaModel::Impl>(plan.model, options);
}

int run_processes(const ModelPlan& plan, std::int64_t tokens, const std::function<int(const ModelRank&)>& body) {
  const std::shared_ptr<Communicator> world = mpi_communicator(plan.ranks);
  base::require(plan.rank_count == 0 || plan.rank_count == world->size(),
                "--ranks is {}; accepted under an MPI launcher: its processes, {}", plan.rank_count, world->size());
  int here = 0;
  for (int r = 0; r < world->size(); ++r) here += world->node_of(r) == world->node_of(world->rank()) ? 1 : 0;
  const bool shared = !plan.model.directory.empty() && plan.weights == WeightFormat::kAsStored;  // mapped
  check_memory(plan, tokens, world->size(), here, shared ? 1 : here);
  const int threads = threads_of_rank(plan, here);
  const bool speaks = world->rank() == 0;
  const auto model = load(plan, threads, speaks);
  ThreadPool pool(threads);
  const auto ops = kernels::cpu_model_ops(pool);
  return body({world, *model, pool, *ops, here, speaks});
}

int run_threads(const ModelPlan& plan, std::int64_t tokens, const std::function<int(const ModelRank&)>& body) {
  const int ranks = std::max(1, plan.rank_count);
  check_memory(plan, tokens, ranks, ranks, 1);
  const auto model = load(plan, 0, true);
  std::atomic<int> code = 0;
  const auto on_rank = [&](const std::shared_ptr<Communicator>& world) {
    ThreadPool pool(threads_of_rank(plan, ranks));
    const auto ops = kernels::cpu_model_ops(pool);
    const int mine = body({world, *model, pool, *ops, ranks, world->rank() == 0});
    for (int seen = code; seen < mine && !code.compare_exchange_weak(seen, mine);) {
    }
  };
  run_ranks(ranks, on_rank, plan.ranks);
  return code;
}

}  // namespace

int threads_of_rank(const ModelPlan& plan, int ranks_here) {
  return plan.threads > 0 ? plan.threads : std::max(1, ThreadPool::available_cores() / ranks_here);
}

const std::atomic<bool>& interrupt_flag() {
  interrupted = false;
  std::signal(SIGINT, on_interrupt);
  return interrupted;
}

int run_model(const ModelPlan& plan, std::int64_t tokens, const std::function<int(const ModelRank&)>& body) {
  return launched_by_mpi() ? run_processes(plan, tokens, body) : run_threads(plan, tokens, body);
}

}  // namespace treeattn::tools
