// SPDX-License-Identifier: Apache-2.0
#include "model_run.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <exception>
#include <map>

#include "base/available_memory.h"
#include "base/check.h"
#include "base/read_bandwidth.h"
#include "command.h"
#include "kernels/cuda/ranks/rank_device.h"
#include "model/weights.h"
#include "parallel/agree.h"
#include "rate_progress.h"
#include "table.h"
#include "treeattn/cuda.h"
#include "treeattn/error.h"

namespace treeattn::tools {
namespace {

std::atomic<bool> interrupted = false;

void on_interrupt(int) {
  interrupted = true;
  std::signal(SIGINT, SIG_DFL);
}

std::size_t free_memory_of(int gpu) {
  for (const CudaDevice& device : cuda_devices()) {
    if (device.index == gpu) return device.free_bytes;
  }
  return 0;
}

ModelPlan on_gpu(ModelPlan plan, int gpu) {
  plan.gpu = gpu;
  return plan;
}

// The plan for a rank that is the so-manieth on its machine.
ModelPlan on_its_gpu(const ModelPlan& plan, int number) {
  if (plan.gpu != ModelPlan::kAnyGpu) return plan;
  return on_gpu(plan, number % std::max(1, static_cast<int>(cuda_devices().size())));
}

// copies: of the weights on this machine, or on its GPU; here: ranks there.
void check_memory(const ModelPlan& plan, std::int64_t tokens, int ranks, int here, int copies) {
  const std::size_t available = (plan.gpu < 0 ? base::available_memory() : free_memory_of(plan.gpu)) / 10 * 9;
  if (available == 0) return;  // unknown
  const model::MemoryNeed need = model::memory_need(plan.model.config, plan.llama, plan.weights, tokens, ranks);
  const std::size_t all =
      need.weights * static_cast<std::size_t>(copies) + need.of_rank() * static_cast<std::size_t>(here);
  if (all <= available) return;
  const int enough = model::ranks_needed(plan.model.config, plan.llama, plan.weights, tokens, available);
  const std::string kind = plan.gpu < 0 ? "machine" : "GPU";
  const std::string advice =
      enough == 0 ? fmt::format("no number of {}s like this one would do: each needs all weights", kind)
                  : fmt::format("{} would do, each on a {} like this one", format_count(enough, "rank"), kind);
  throw Unavailable(fmt::format(
      "{} tokens on {} need {} on this {} ({} of weights, {} of cache, {} of workspace); {} can be used; {}", tokens,
      format_count(ranks, "rank"), format_bytes(all), kind,
      format_bytes(need.weights * static_cast<std::size_t>(copies)),
      format_bytes(need.cache * static_cast<std::size_t>(here)),
      format_bytes((need.of_rank() - need.cache) * static_cast<std::size_t>(here)), format_bytes(available), advice));
}

std::unique_ptr<LlamaModel::Impl> load(const ModelPlan& plan, int threads, bool shows) {
  RateProgress progress("loading", "M parameters");
  LlamaLoadOptions options;
  options.weights = plan.weights;
  options.threads = threads;
  options.gpu = plan.gpu;
  if (shows) {
    options.progress = [&](std::size_t done, std::size_t total) {
      progress.update(static_cast<std::int64_t>(done / 1000000), static_cast<std::int64_t>(total / 1000000));
    };
  }
  return std::make_unique<LlamaModel::Impl>(plan.model, options);
}

// Collective. What fails on one machine alone, for want of memory or of a file, ends all ranks, and the first one says
// where it was.
void on_all_or_none(Communicator& world, const std::function<void()>& work) {
  std::exception_ptr error;
  std::string own;
  try {
    work();
  } catch (const std::exception& what) {
    error = std::current_exception();
    own = what.what();
  }
  const std::string failure = parallel::failure_of_any(world, own);
  if (error) std::rethrow_exception(error);
  if (!failure.empty()) throw Unavailable(failure);
}

int run_processes(const ModelPlan& given, std::int64_t tokens, const std::function<int(const ModelRank&)>& body) {
  const std::shared_ptr<Communicator> world = mpi_communicator(given.ranks);
  met_other_ranks = true;
  base::require(given.rank_count == 0 || given.rank_count == world->size(),
                "--ranks is {}; accepted under an MPI launcher: its processes, {}", given.rank_count, world->size());
  int here = 0, before = 0;
  for (int r = 0; r < world->size(); ++r) {
    const bool neighbour = world->node_of(r) == world->node_of(world->rank());
    here += neighbour ? 1 : 0;
    before += neighbour && r < world->rank() ? 1 : 0;
  }
  const ModelPlan plan = on_its_gpu(given, before);
  int sharing = 0;  // of those here, the ranks on the same GPU, or all
  for (int place = 0; place < here; ++place) sharing += on_its_gpu(given, place).gpu == plan.gpu ? 1 : 0;
  const bool mapped = model::stays_as_stored(plan.weights, plan.model.config.stored);
  const bool shared = !plan.model.directory.empty() && mapped && plan.gpu < 0;
  const int threads = threads_of_rank(plan, here);
  const bool speaks = world->rank() == 0;
  std::unique_ptr<LlamaModel::Impl> model;
  on_all_or_none(*world, [&] {
    check_memory(plan, tokens, world->size(), sharing, shared ? 1 : sharing);
    model = load(plan, threads, speaks);
  });
  ThreadPool pool(threads);
  const auto ops = kernels::make_model_ops(plan.gpu, pool);
  return body({world, *model, pool, *ops, here, speaks});
}

// Ranks on one GPU, or on the CPU, share a model; every other GPU has one of its own.
int run_threads(const ModelPlan& given, std::int64_t tokens, const std::function<int(const ModelRank&)>& body) {
  const int ranks = std::max(1, given.rank_count);
  std::map<int, int> ranks_on;  // by GPU
  for (int rank = 0; rank < ranks; ++rank) ++ranks_on[on_its_gpu(given, rank).gpu];
  std::map<int, std::unique_ptr<LlamaModel::Impl>> models;
  for (const auto& [gpu, here] : ranks_on) check_memory(on_gpu(given, gpu), tokens, ranks, here, 1);
  for (const auto& [gpu, here] : ranks_on) models[gpu] = load(on_gpu(given, gpu), 0, true);
  std::atomic<int> code = 0;
  const auto on_rank = [&](const std::shared_ptr<Communicator>& world) {
    const int gpu = on_its_gpu(given, world->rank()).gpu;
    ThreadPool pool(threads_of_rank(given, ranks));
    const auto ops = kernels::make_model_ops(gpu, pool);
    const int mine = body({world, *models.at(gpu), pool, *ops, ranks, world->rank() == 0});
    for (int seen = code; seen < mine && !code.compare_exchange_weak(seen, mine);) {
    }
  };
  run_ranks(ranks, on_rank, given.ranks);
  return code;
}

}  // namespace

int threads_of_rank(const ModelPlan& plan, int ranks_here) {
  return plan.threads > 0 ? plan.threads : std::max(1, ThreadPool::available_cores() / ranks_here);
}

double read_gb_s(int gpu) {
  if (gpu >= 0) return kernels::cuda::RankDevice(gpu).read_bandwidth(std::size_t{2} << 30);
  ThreadPool all(ThreadPool::available_cores());
  return base::read_bandwidth(all, std::size_t{256} << 20, 5);
}

const std::atomic<bool>& interrupt_flag() { return interrupted; }

void catch_interrupt() {
  interrupted = false;
  std::signal(SIGINT, on_interrupt);
}

int run_model(const ModelPlan& plan, std::int64_t tokens, const std::function<int(const ModelRank&)>& body) {
  return launched_by_mpi() ? run_processes(plan, tokens, body) : run_threads(plan, tokens, body);
}

}  // namespace treeattn::tools
