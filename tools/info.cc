// SPDX-License-Identifier: Apache-2.0
// treeattn info: what this machine is, what this build can use of it, and how fast it reads memory.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/available_memory.h"
#include "base/machine.h"
#include "base/read_bandwidth.h"
#include "child_process.h"
#include "command.h"
#include "json_line.h"
#include "kernels/cuda/ranks/rank_device.h"
#include "progress.h"
#include "simulation_job.h"
#include "table.h"
#include "treeattn/attention.h"
#include "treeattn/communicator.h"
#include "treeattn/cuda.h"
#include "treeattn/error.h"
#include "treeattn/parallel_attention.h"
#include "treeattn/version.h"

namespace treeattn::tools {
namespace {

constexpr int kRepeats = 7;

constexpr std::size_t kGpuProbeBytes = std::size_t{1} << 30;

struct Backend {
  std::string name;
  std::string what;
  bool usable;
};

struct Gpu {
  CudaDevice device;
  std::size_t free_bytes = 0;
  double read_gb_s = 0;      // 0: no memory left to measure with
  std::string problem = {};  // why it cannot be used; empty where it can
};

std::vector<Gpu> gpus() {
  std::vector<Gpu> out;
  for (const CudaDevice& device : cuda_devices()) {
    Gpu gpu{device};
    try {
      gpu.free_bytes = cuda_free_bytes(device.index);
      if (gpu.free_bytes > 2 * kGpuProbeBytes) {
        gpu.read_gb_s = kernels::cuda::RankDevice(device.index).read_bandwidth(kGpuProbeBytes);
      }
    } catch (const Unavailable& error) {  // another process has it for itself, say
      gpu.problem = error.what();
    }
    out.push_back(std::move(gpu));
  }
  return out;
}

std::vector<Backend> backends(const std::vector<Gpu>& gpus) {
  std::vector<Backend> out = {
      {"cpu", "SIMD kernels, one thread per core", true},
      {"reference", "double precision, plain loops; what verify checks against", true},
      {"mpi", mpi_available() ? "ranks as processes" : "built without MPI", mpi_available()},
  };
  const bool simulates = std::filesystem::exists(program_folder() / kSimulator);
  out.push_back({"simulator",
                 simulates ? "clusters that are not there, by SimGrid"
                           : "no treeattn-sim beside this program; it is built where SimGrid is",
                 simulates});
  const std::string problem = cuda_problem();
  if (!problem.empty()) out.push_back({"cuda", problem, false});
  for (const auto& [device, free_bytes, read_gb_s, unusable] : gpus) {
    const std::string name = fmt::format("cuda:{}", device.index);
    if (!unusable.empty()) {
      out.push_back({name, fmt::format("{}: {}", device.name, unusable), false});
      continue;
    }
    out.push_back({name,
                   fmt::format("{} ({}.{}), {} multiprocessors, {} of {} free, reads {:.0f} GB/s", device.name,
                               device.compute_major, device.compute_minor, device.multiprocessors,
                               format_bytes(free_bytes), format_bytes(device.memory_bytes), read_gb_s),
                   true});
  }
  const std::string no_nccl = nccl_available() ? problem : "built without NCCL";
  out.push_back({"nccl", no_nccl.empty() ? "states from GPU to GPU" : no_nccl, no_nccl.empty()});
  return out;
}

struct Info {
  base::Machine machine;
  std::optional<std::size_t> available_memory;
  std::string_view isa;
  std::vector<std::string_view> isas;
  double one_thread_gb_s = 0;
  double all_threads_gb_s = 0;
  std::size_t probe_bytes = 0;
  std::vector<Gpu> gpus;
};

Info gather() {
  Info info;
  info.isa = active_isa();  // first: a wrong TREEATTN_ISA is reported before any waiting
  info.isas = available_isas();
  info.machine = base::read_machine();
  info.available_memory = base::available_memory();
  const Progress progress("measuring", 0);
  ThreadPool one(1);
  ThreadPool all(ThreadPool::available_cores());
  base::ReadBandwidthProbe probe(all);
  info.probe_bytes = probe.bytes();
  info.one_thread_gb_s = probe.measure(one, kRepeats);
  info.all_threads_gb_s = probe.measure(all, kRepeats);
  info.gpus = gpus();
  return info;
}

std::string size_or_unknown(std::size_t bytes) { return bytes == 0 ? "unknown" : format_bytes(bytes); }

void print_text(const Info& info) {
  const base::Machine& machine = info.machine;
  fmt::print("treeattn {}\n\n", kVersion);
  fmt::print("processor       {} ({}), {} of {} cores usable\n", machine.cpu_model, machine.architecture,
             machine.usable_cores, machine.logical_cores);
  fmt::print("caches          L1d {}, L2 {}, L3 {}\n", size_or_unknown(machine.l1d_bytes),
             size_or_unknown(machine.l2_bytes), size_or_unknown(machine.l3_bytes));
  fmt::print("memory          {}, {} available, pages of {}\n", size_or_unknown(machine.memory_bytes),
             info.available_memory ? format_bytes(*info.available_memory) : "unknown",
             size_or_unknown(machine.page_bytes));
  fmt::print("read bandwidth  {:.1f} GB/s with one thread, {:.1f} GB/s with {} (best of {} passes over {})\n",
             info.one_thread_gb_s, info.all_threads_gb_s, machine.usable_cores,
             base::ReadBandwidthProbe::passes(kRepeats), format_bytes(info.probe_bytes));
  fmt::print("instructions    {}", info.isa);
  std::vector<std::string_view> others = info.isas;
  std::erase(others, info.isa);
  if (!others.empty()) fmt::print(" (also available: {}; choose with TREEATTN_ISA)", fmt::join(others, ", "));
  fmt::print("\nbackends\n");
  for (const Backend& backend : backends(info.gpus)) {
    fmt::print("  {:<12}{}{}\n", backend.name, backend.usable ? "" : "not usable here: ", backend.what);
  }
}

void print_json(const Info& info) {
  const base::Machine& machine = info.machine;
  nlohmann::ordered_json out;
  out["version"] = kVersion;
  out["cpu"] = machine.cpu_model;
  out["architecture"] = machine.architecture;
  out["isa"] = info.isa;
  out["isas"] = info.isas;
  out["cores"] = machine.logical_cores;
  out["usable_cores"] = machine.usable_cores;
  out["l1d_bytes"] = machine.l1d_bytes;
  out["l2_bytes"] = machine.l2_bytes;
  out["l3_bytes"] = machine.l3_bytes;
  out["memory_bytes"] = machine.memory_bytes;
  out["available_memory_bytes"] = nullptr;
  if (info.available_memory) out["available_memory_bytes"] = *info.available_memory;
  out["page_bytes"] = machine.page_bytes;
  out["read_gb_s_one_thread"] = info.one_thread_gb_s;
  out["read_gb_s_all_threads"] = info.all_threads_gb_s;
  out["backends"] = nlohmann::ordered_json::array();
  for (const Backend& backend : backends(info.gpus)) {
    nlohmann::ordered_json entry;
    entry["name"] = backend.name;
    entry["usable"] = backend.usable;
    if (!backend.usable) entry["why"] = backend.what;
    out["backends"].push_back(std::move(entry));
  }
  out["gpus"] = nlohmann::ordered_json::array();
  for (const auto& [device, free_bytes, read_gb_s, unusable] : info.gpus) {
    nlohmann::ordered_json entry;
    entry["index"] = device.index;
    entry["name"] = device.name;
    entry["compute"] = fmt::format("{}.{}", device.compute_major, device.compute_minor);
    entry["multiprocessors"] = device.multiprocessors;
    entry["memory_bytes"] = device.memory_bytes;
    entry["free_bytes"] = free_bytes;
    entry["read_gb_s"] = read_gb_s;
    out["gpus"].push_back(std::move(entry));
  }
  fmt::print("{}\n", json_line(out));
}

}  // namespace

Command add_info(CommandLine& parent) {
  CommandLine* app = parent.add_subcommand("info", "This machine: processor, memory, measured bandwidth, backends");
  auto json = std::make_shared<bool>(false);
  app->add_flag("--json", *json, "One JSON object instead of text; docs/cli.md explains the keys");
  app->footer("Examples:\n  treeattn info\n  treeattn info --json | python3 -m json.tool");
  return {app, [json] {
            const Info info = gather();
            *json ? print_json(info) : print_text(info);
            return kOk;
          }};
}

}  // namespace treeattn::tools
