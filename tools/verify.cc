// SPDX-License-Identifier: Apache-2.0
// treeattn verify: every instruction set, or the GPU, against the double-precision reference, over the one list of
// cases.
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/check.h"
#include "command.h"
#include "device_option.h"
#include "json_line.h"
#include "kernels/case_list.h"
#include "notes.h"
#include "options.h"
#include "table.h"
#include "verify_run.h"

namespace treeattn::tools {
namespace {

struct VerifyOptions {
  std::string device;
  std::string isa;
  std::string random;
  std::string seed;
  bool json = false;
};

std::string format_error(double error) {
  return error < 1000 ? fmt::format("{:.3f}", error) : fmt::format("{:.1e}", error);
}

VerifyRow total_of(const std::vector<VerifyRows>& all) {
  VerifyRow total;
  for (const VerifyRows& rows : all) {
    for (const VerifyRow& row : rows.by_type) {
      total.cases += row.cases;
      total.failed += row.failed;
      total.worst = std::max(total.worst, row.worst);
    }
  }
  return total;
}

nlohmann::ordered_json counts(const VerifyRow& row, nlohmann::ordered_json out = {}) {
  out["cases"] = row.cases;
  out["failed"] = row.failed;
  out["worst"] = row.worst;  // an infinity is written as null
  return out;
}

void print_json(const std::vector<VerifyRows>& all) {
  for (const VerifyRows& rows : all) {
    for (const DType dtype : kAllDTypes) {
      const VerifyRow& row = rows.by_type[static_cast<std::size_t>(dtype)];
      if (row.cases == 0) continue;
      nlohmann::ordered_json head;
      head["backend"] = rows.backend;
      head["isa"] = rows.isa;
      head["dtype"] = dtype_name(dtype);
      fmt::print("{}\n", json_line(counts(row, std::move(head))));
    }
  }
  fmt::print("{}\n", json_line(counts(total_of(all))));
}

void print_table(const std::vector<VerifyRows>& all) {
  Table table({{"backend", Align::kLeft},
               {"isa", Align::kLeft},
               {"dtype", Align::kLeft},
               {"cases"},
               {"failed"},
               {"worst"},
               {"worst case", Align::kLeft}});
  for (const VerifyRows& rows : all) {
    for (const DType dtype : kAllDTypes) {
      const VerifyRow& row = rows.by_type[static_cast<std::size_t>(dtype)];
      if (row.cases == 0) continue;
      table.add({rows.backend, rows.isa, std::string(dtype_name(dtype)), fmt::format("{}", row.cases),
                 fmt::format("{}", row.failed), format_error(row.worst), row.worst_case});
    }
  }
  table.print();
  const VerifyRow total = total_of(all);
  fmt::print("\n{} cases, {} failed; worst error {} of its bound (1 is the most that rounding explains)\n", total.cases,
             total.failed, format_error(total.worst));
}

void name_failures(const std::vector<VerifyRows>& all) {
  for (const VerifyRows& rows : all) {
    for (const VerifyRow& row : rows.by_type) {
      for (const std::string& name : row.failures) print_note("failed on {}: {}\n", rows.isa, name);
      const std::size_t unnamed = row.failed - row.failures.size();
      if (unnamed > 0) print_note("failed on {}: {} more of this type\n", rows.isa, unnamed);
    }
  }
}

int run(const VerifyOptions& options) {
  const Device device = parse_device(options.device);
  base::require(!device.on_gpu() || options.isa.empty(),
                "--isa is \"{}\" with --device {}; accepted: instruction sets with --device cpu", options.isa,
                options.device);
  const std::int64_t seed = options.seed.empty() ? 1 : parse_count("--seed", options.seed, 0, std::int64_t{1} << 40);
  const std::int64_t extra = options.random.empty() ? 200 : parse_count("--random", options.random, 0, 1 << 20);

  std::vector<kernels::Case> cases = kernels::case_list();
  for (kernels::Case& shape :
       kernels::random_cases(static_cast<std::uint64_t>(seed), static_cast<std::size_t>(extra))) {
    cases.push_back(std::move(shape));
  }
  const std::vector<VerifyRows> all = device.on_gpu()
                                          ? verify_on_gpu(cases, static_cast<std::uint64_t>(seed), device.gpus.front())
                                          : verify_on_cpu(cases, static_cast<std::uint64_t>(seed), options.isa);
  options.json ? print_json(all) : print_table(all);
  std::fflush(stdout);
  name_failures(all);
  return total_of(all).failed == 0 ? kOk : kCheckFailed;
}

constexpr char kFooter[] =
    R"(An error is given in units of its bound, which is derived for every output
from the numbers of its case: at most 1 is right. Exit code 1 when a case failed.

Examples:
  treeattn verify
  treeattn verify --random 1000 --seed 7
  treeattn verify --isa NEON --json
  treeattn verify --device cuda --random 10000)";

}  // namespace

Command add_verify(CommandLine& parent) {
  CommandLine* app = parent.add_subcommand("verify", "Check every kernel against a double-precision reference");
  auto options = std::make_shared<VerifyOptions>();
  add_device_option(*app, options->device);
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
