// SPDX-License-Identifier: Apache-2.0
// treeattn verify: every instruction set against the double-precision reference, over the one list of cases.
#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <array>
#include <cstdio>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "command.h"
#include "kernels/case_list.h"
#include "kernels/cpu/dispatch.h"
#include "kernels/cpu/tile_ops.h"
#include "kernels/problem.h"
#include "kernels/reference/reference.h"
#include "options.h"
#include "progress.h"
#include "table.h"
#include "treeattn/state.h"

namespace treeattn::tools {
namespace {

using kernels::CpuTarget;

constexpr std::size_t kNamedFailures = 5;  // per row; more would bury the table

struct VerifyOptions {
  std::string isa;
  std::string random;
  std::string seed;
  bool json = false;
};

// One row of the table: an instruction set and a type of K.
struct Row {
  std::size_t cases = 0;
  std::size_t failed = 0;
  double worst = 0;
  std::string worst_case;
  std::vector<std::string> failures;

  void add(const std::string& name, double error) {
    ++cases;
    if (error > worst || worst_case.empty()) {
      worst = error;
      worst_case = name;
    }
    if (error <= 1) return;
    ++failed;
    if (failures.size() < kNamedFailures) failures.push_back(name);
  }
};

using Rows = std::array<Row, std::size(kAllDTypes)>;  // by DType

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

double worst_of(const std::vector<float>& got, const std::vector<double>& want, const std::vector<double>& bound) {
  double worst = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double error = kernels::error_in_bounds(got[i], want[i], bound[i]);
    if (!(error <= worst)) worst = error == error ? error : std::numeric_limits<double>::infinity();
  }
  return worst;
}

// The largest error of one case on one target, in units of its bound.
double error_of(const Prepared& prepared, std::size_t target_index, const CpuTarget& target, ThreadPool& pool) {
  const kernels::Problem& problem = prepared.problem;
  const kernels::ReferenceResult& expected = prepared.expected[target_index];
  const std::int64_t v_dim = problem.v.head_dim;
  const auto rows = static_cast<std::size_t>(problem.rows());
  std::vector<float> states(rows * state_floats(v_dim));
  std::vector<float> out(rows * static_cast<std::size_t>(v_dim));
  std::vector<float> lse(rows);
  kernels::attention_states_on(target, problem, states.data(), pool);
  finalize_states(states, v_dim, problem.sinks, out, lse);
  return std::max(worst_of(out, expected.out, expected.out_bound), worst_of(lse, expected.lse, expected.lse_bound));
}

std::vector<Rows> check(const std::vector<kernels::Case>& cases, std::uint64_t seed,
                        const std::vector<const CpuTarget*>& targets) {
  // The reference is the slow part, one thread per case; attention itself gets all threads, as in earnest.
  constexpr std::size_t kBatch = 32;
  ThreadPool pool(ThreadPool::available_cores());
  Progress progress("verify", cases.size());
  std::vector<Rows> rows(targets.size());
  for (std::size_t begin = 0; begin < cases.size(); begin += kBatch) {
    std::vector<Prepared> batch(std::min(kBatch, cases.size() - begin));
    pool.run(batch.size(),
             [&](std::size_t i, int) { batch[i] = prepare(cases[begin + i], seed + begin + i, targets); });
    for (std::size_t i = 0; i < batch.size(); ++i) {
      const kernels::Case& shape = cases[begin + i];
      progress.step(shape.name);
      for (std::size_t t = 0; t < targets.size(); ++t) {
        rows[t][static_cast<std::size_t>(shape.k_type)].add(shape.name, error_of(batch[i], t, *targets[t], pool));
      }
    }
  }
  return rows;
}

std::string format_error(double error) {
  return error < 1000 ? fmt::format("{:.3f}", error) : fmt::format("{:.1e}", error);
}

Row total_of(const std::vector<Rows>& all) {
  Row total;
  for (const Rows& rows : all) {
    for (const Row& row : rows) {
      total.cases += row.cases;
      total.failed += row.failed;
      total.worst = std::max(total.worst, row.worst);
    }
  }
  return total;
}

nlohmann::ordered_json counts(const Row& row, nlohmann::ordered_json out = {}) {
  out["cases"] = row.cases;
  out["failed"] = row.failed;
  out["worst"] = row.worst;  // an infinity is written as null
  return out;
}

void print_json(const std::vector<Rows>& all, const std::vector<const CpuTarget*>& targets) {
  for (std::size_t t = 0; t < targets.size(); ++t) {
    for (const DType dtype : kAllDTypes) {
      const Row& row = all[t][static_cast<std::size_t>(dtype)];
      if (row.cases == 0) continue;
      nlohmann::ordered_json head;
      head["backend"] = "cpu";
      head["isa"] = targets[t]->name;
      head["dtype"] = dtype_name(dtype);
      fmt::print("{}\n", counts(row, std::move(head)).dump());
    }
  }
  fmt::print("{}\n", counts(total_of(all)).dump());
}

void print_table(const std::vector<Rows>& all, const std::vector<const CpuTarget*>& targets) {
  Table table({{"backend", Align::kLeft},
               {"isa", Align::kLeft},
               {"dtype", Align::kLeft},
               {"cases"},
               {"failed"},
               {"worst"},
               {"worst case", Align::kLeft}});
  for (std::size_t t = 0; t < targets.size(); ++t) {
    for (const DType dtype : kAllDTypes) {
      const Row& row = all[t][static_cast<std::size_t>(dtype)];
      if (row.cases == 0) continue;
      table.add({"cpu", targets[t]->name, std::string(dtype_name(dtype)), fmt::format("{}", row.cases),
                 fmt::format("{}", row.failed), format_error(row.worst), row.worst_case});
    }
  }
  table.print();
  const Row total = total_of(all);
  fmt::print("\n{} cases, {} failed; worst error {} of its bound (1 is the most that rounding explains)\n", total.cases,
             total.failed, format_error(total.worst));
}

void name_failures(const std::vector<Rows>& all, const std::vector<const CpuTarget*>& targets) {
  for (std::size_t t = 0; t < targets.size(); ++t) {
    for (const Row& row : all[t]) {
      for (const std::string& name : row.failures) fmt::print(stderr, "failed on {}: {}\n", targets[t]->name, name);
      const std::size_t unnamed = row.failed - row.failures.size();
      if (unnamed > 0) fmt::print(stderr, "failed on {}: {} more of this type\n", targets[t]->name, unnamed);
    }
  }
}

int run(const VerifyOptions& options) {
  std::vector<const CpuTarget*> targets;
  if (options.isa.empty()) {
    for (const CpuTarget* target : kernels::cpu_targets()) targets.push_back(target);
  } else {
    targets.push_back(&kernels::find_target(options.isa));
  }
  const std::int64_t seed = options.seed.empty() ? 1 : parse_count("--seed", options.seed, 0, std::int64_t{1} << 40);
  const std::int64_t extra = options.random.empty() ? 200 : parse_count("--random", options.random, 0, 1 << 20);

  std::vector<kernels::Case> cases = kernels::case_list();
  for (kernels::Case& shape :
       kernels::random_cases(static_cast<std::uint64_t>(seed), static_cast<std::size_t>(extra))) {
    cases.push_back(std::move(shape));
  }
  const std::vector<Rows> all = check(cases, static_cast<std::uint64_t>(seed), targets);
  options.json ? print_json(all, targets) : print_table(all, targets);
  std::fflush(stdout);
  name_failures(all, targets);
  return total_of(all).failed == 0 ? kOk : kCheckFailed;
}

constexpr char kFooter[] =
    R"(An error is given in units of its bound, which is derived for every output
from the numbers of its case: at most 1 is right. Exit code 1 when a case failed.

Examples:
  treeattn verify
  treeattn verify --random 1000 --seed 7
  treeattn verify --isa NEON --json)";

}  // namespace

Command add_verify(CLI::App& parent) {
  CLI::App* app = parent.add_subcommand("verify", "Check every kernel against a double-precision reference");
  auto options = std::make_shared<VerifyOptions>();
  app->add_option("--isa", options->isa, "Only this instruction set; `treeattn info` lists them (default: all)")
      ->type_name("NAME");
  app->add_option("--random", options->random, "As many cases of random shape on top of the list (default 200)")
      ->type_name("N");
  app->add_option("--seed", options->seed, "Of the random shapes and of all numbers (default 1)")->type_name("N");
  app->add_flag("--json", options->json, "One JSON object a line; docs/cli.md explains the keys");
  app->footer(kFooter);
  return {app, [options] { return run(*options); }};
}

}  // namespace treeattn::tools
