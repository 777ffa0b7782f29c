// SPDX-License-Identifier: Apache-2.0
#include "verify_run.h"

#include <algorithm>
#include <memory>
#include <mutex>

#include "kernels/cpu/dispatch.h"
#include "kernels/cpu/tile_ops.h"
#include "kernels/cuda/device_case.h"
#include "kernels/cuda/error_model.h"
#include "kernels/cuda/ranks/rank_device.h"
#include "kernels/problem.h"
#include "kernels/reference/reference.h"
#include "option_errors.h"
#include "progress.h"
#include "treeattn/state.h"
#include "treeattn/thread_pool.h"

namespace treeattn::tools {
namespace {

using kernels::CpuTarget;

// Cases between two steps of the progress line, at least.
constexpr std::size_t kBatch = 32;

// A case with what the reference says, for each target: bounds depend on how a target rounds.
struct Prepared {
  std::unique_ptr<kernels::CaseData> data;  // the problem points into it
  kernels::Problem problem;
  std::vector<kernels::ReferenceResult> expected;  // [targets]
};

Prepared prepare(const kernels::Case& shape, std::uint64_t seed, const std::vector<const CpuTarget*>& targets) {
  Prepared out;
  out.data = std::make_unique<kernels::CaseData>(shape, seed);
  out.problem = kernels::make_problem(out.data->input(), out.data->options());
  for (const CpuTarget* target : targets) {
    out.expected.push_back(kernels::reference_attention(out.problem, kernels::error_model(*target, out.problem)));
  }
  return out;
}

// The largest error of one case on one target, in units of its bound.
double error_of(const Prepared& prepared, std::size_t target_index, const CpuTarget& target, ThreadPool& pool) {
  const kernels::Problem& problem = prepared.problem;
  const std::int64_t v_dim = problem.v.head_dim;
  const auto rows = static_cast<std::size_t>(problem.rows());
  std::vector<float> states(rows * state_floats(v_dim));
  std::vector<float> out(rows * static_cast<std::size_t>(v_dim));
  std::vector<float> lse(rows);
  kernels::attention_states_on(target, problem, states.data(), pool);
  finalize_states(states, v_dim, problem.sinks, out, lse);
  return kernels::worst_in_bounds(out, lse, prepared.expected[target_index]);
}

struct GpuOutcome {
  std::string kernel;
  double error = 0;
};

// `turn`: one case at a time on the GPU, whose memory then holds no other.
GpuOutcome check_on_gpu(const kernels::Case& shape, std::uint64_t seed, int gpu, std::mutex& turn) {
  const kernels::CaseData data(shape, seed);
  kernels::cuda::DeviceOutput got;
  {
    const std::scoped_lock lock(turn);
    got = kernels::cuda::DeviceCase(data, gpu).run();
  }
  const kernels::Problem problem = kernels::make_problem(data.input(), data.options());
  const auto want = kernels::reference_attention(problem, kernels::cuda::error_model(got.kernel, problem));
  return {got.kernel, kernels::worst_in_bounds(got.out, got.lse, want)};
}

VerifyRows& rows_of_kernel(std::vector<VerifyRows>& rows, const std::string& kernel) {
  const auto found = std::find_if(rows.begin(), rows.end(), [&](const VerifyRows& row) { return row.isa == kernel; });
  if (found != rows.end()) return *found;
  rows.push_back({"cuda", kernel, {}});
  return rows.back();
}

}  // namespace

void VerifyRow::add(const std::string& name, double error) {
  ++cases;
  if (error > worst || worst_case.empty()) {
    worst = error;
    worst_case = name;
  }
  if (error <= 1) return;
  ++failed;
  if (failures.size() < kNamedFailures) failures.push_back(name);
}

std::vector<VerifyRows> verify_on_cpu(const std::vector<kernels::Case>& cases, std::uint64_t seed,
                                      const std::string& isa) {
  std::vector<const CpuTarget*> targets;
  if (isa.empty()) {
    for (const CpuTarget* target : kernels::cpu_targets()) targets.push_back(target);
  } else {
    targets.push_back(inside_option("--isa", [&] { return &kernels::find_target(isa); }));
  }
  std::vector<VerifyRows> rows;
  for (const CpuTarget* target : targets) rows.push_back({"cpu", target->name, {}});

  // The reference is the slow part, one thread per case; attention itself gets all threads, as in earnest.
  ThreadPool pool(ThreadPool::available_cores());
  Progress progress("verify", cases.size());
  for (std::size_t begin = 0; begin < cases.size(); begin += kBatch) {
    std::vector<Prepared> batch(std::min(kBatch, cases.size() - begin));
    pool.run(batch.size(),
             [&](std::size_t i, int) { batch[i] = prepare(cases[begin + i], seed + begin + i, targets); });
    for (std::size_t i = 0; i < batch.size(); ++i) {
      const kernels::Case& shape = cases[begin + i];
      progress.step(shape.name);
      for (std::size_t t = 0; t < targets.size(); ++t) {
        rows[t].of(shape).add(shape.name, error_of(batch[i], t, *targets[t], pool));
      }
    }
  }
  return rows;
}

std::vector<VerifyRows> verify_on_gpu(const std::vector<kernels::Case>& cases, std::uint64_t seed, int gpu) {
  ThreadPool pool(ThreadPool::available_cores());
  // A batch waits for its slowest case: long ones keep the threads busy.
  const std::size_t batch = std::max(kBatch, 16 * static_cast<std::size_t>(pool.size()));
  Progress progress("verify", cases.size());
  std::mutex turn;
  std::vector<VerifyRows> rows;
  for (std::size_t begin = 0; begin < cases.size(); begin += batch) {
    std::vector<GpuOutcome> outcomes(std::min(batch, cases.size() - begin));
    pool.run(outcomes.size(), [&](std::size_t i, int) {
      kernels::cuda::stay_on_gpu(gpu);
      outcomes[i] = check_on_gpu(cases[begin + i], seed + begin + i, gpu, turn);
    });
    for (std::size_t i = 0; i < outcomes.size(); ++i) {
      const kernels::Case& shape = cases[begin + i];
      progress.step(shape.name);
      rows_of_kernel(rows, outcomes[i].kernel).of(shape).add(shape.name, outcomes[i].error);
    }
  }
  std::sort(rows.begin(), rows.end(), [](const VerifyRows& a, const VerifyRows& b) { return a.isa < b.isa; });
  return rows;
}

}  // namespace treeattn::tools
