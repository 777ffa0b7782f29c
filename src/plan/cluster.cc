// SPDX-License-Identifier: Apache-2.0
#include "plan/cluster.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <array>
#include <charconv>
#include <cmath>
#include <functional>
#include <optional>
#include <set>
#include <utility>

#include "base/check.h"
#include "base/file.h"

namespace treeattn::plan {
namespace {

// Rates are the makers' peak figures, latencies are of a message between two devices as communication libraries report
// them, rounded.
struct BuiltIn {
  std::string_view name;
  std::string_view text;
};

constexpr std::string_view kDgxH100 = R"(# 8 x H100 SXM, NVLink 4, 8 x NDR InfiniBand
name              = dgx-h100
devices_per_node  = 8
adapters_per_node = 8
device_memory     = 80 GB
device_rate       = 3.35 TB/s
device_flops      = 989 TFLOP/s
launch            = 5 us
local_latency     = 2 us
local_bandwidth   = 450 GB/s
remote_latency    = 4 us
remote_bandwidth  = 400 Gb/s
)";

constexpr std::string_view kMi300x = R"(# 8 x MI300X, one Infinity Fabric link to each of the others, 8 x RoCE
name              = mi300x
devices_per_node  = 8
adapters_per_node = 8
device_memory     = 192 GB
device_rate       = 5.3 TB/s
device_flops      = 1307 TFLOP/s
launch            = 8 us
local_latency     = 3 us
local_bandwidth   = 64 GB/s
remote_latency    = 6 us
remote_bandwidth  = 400 Gb/s
)";

constexpr std::string_view kRtx4090 = R"(# 2 x RTX 4090 over PCIe 4.0 x16, one 100 Gb/s adapter
name              = rtx4090
devices_per_node  = 2
adapters_per_node = 1
device_memory     = 24 GB
device_rate       = 1.008 TB/s
device_flops      = 165 TFLOP/s
launch            = 5 us
local_latency     = 10 us
local_bandwidth   = 32 GB/s
remote_latency    = 10 us
remote_bandwidth  = 100 Gb/s
)";

constexpr std::array<BuiltIn, 3> kBuiltIn{{{"dgx-h100", kDgxH100}, {"mi300x", kMi300x}, {"rtx4090", kRtx4090}}};
constexpr std::array<std::string_view, 3> kBuiltInNames{kBuiltIn[0].name, kBuiltIn[1].name, kBuiltIn[2].name};

const BuiltIn* find_built_in(std::string_view name) {
  for (const BuiltIn& cluster : kBuiltIn) {
    if (cluster.name == name) return &cluster;
  }
  return nullptr;
}

struct Unit {
  std::string_view name;
  double factor = 1;
};
constexpr std::array<Unit, 8> kRates{{{"TB/s", 1e12},
                                      {"GB/s", 1e9},
                                      {"MB/s", 1e6},
                                      {"KB/s", 1e3},
                                      {"B/s", 1},
                                      {"Tb/s", 1e12 / 8},
                                      {"Gb/s", 1e9 / 8},
                                      {"Mb/s", 1e6 / 8}}};
constexpr std::array<Unit, 4> kTimes{{{"s", 1}, {"ms", 1e-3}, {"us", 1e-6}, {"ns", 1e-9}}};
constexpr std::array<Unit, 6> kSizes{
    {{"TB", 1e12}, {"GB", 1e9}, {"MB", 1e6}, {"GiB", 1024.0 * 1024 * 1024}, {"MiB", 1024.0 * 1024}, {"B", 1}}};
constexpr std::array<Unit, 3> kFlops{{{"PFLOP/s", 1e15}, {"TFLOP/s", 1e12}, {"GFLOP/s", 1e9}}};

// What a file must say.
constexpr std::array<std::string_view, 8> kNeeded{"name",           "devices_per_node", "device_memory",
                                                  "device_rate",    "local_latency",    "local_bandwidth",
                                                  "remote_latency", "remote_bandwidth"};

constexpr int kMostDevices = 4096;
constexpr int kMostRanks = 1 << 20;
// Of rates, sizes and times, in the unit of factor 1. Outside of this no sum of times would be a number to go by.
constexpr double kLeast = 1;
constexpr double kLargest = 1e18;

std::string_view trimmed(std::string_view text) {
  constexpr std::string_view kBlank = " \t\r";
  const std::size_t first = text.find_first_not_of(kBlank);
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(kBlank) - first + 1);
}

// The number at the front of `text`, which loses it and the blanks after it.
template <class T>
std::optional<T> take_number(std::string_view& text) {
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc()) return {};
  text = trimmed(text.substr(static_cast<std::size_t>(end - text.data())));
  return value;
}

class Parser {
 public:
  Parser(std::string_view text, std::string_view origin) : text_(text), origin_(origin) {
    count("devices_per_node", cluster_.devices_per_node);
    count("adapters_per_node", cluster_.adapters_per_node);
    number("device_memory", cluster_.device_memory_bytes, kSizes, kLeast, "B");
    rate("device_rate", cluster_.device_bytes_per_s);
    number("device_flops", cluster_.device_flops_per_s, kFlops, kLeast, "FLOP/s");
    time("launch", cluster_.launch_s);
    rate("merge_rate", cluster_.merge_bytes_per_s);
    time("local_latency", cluster_.local.latency_s);
    rate("local_bandwidth", cluster_.local.bytes_per_s);
    time("remote_latency", cluster_.remote.latency_s);
    rate("remote_bandwidth", cluster_.remote.bytes_per_s);
    rate("local_shared", cluster_.local_shared_bytes_per_s);
    rate("remote_shared", cluster_.remote_shared_bytes_per_s);
    slower("slow_device", cluster_.slow_devices, "rank");
    slower("slow_local", cluster_.slow_local, "rank");
    slower("slow_remote", cluster_.slow_remote, "node");
    keys_.push_back({"name", [this](std::string_view value) { cluster_.name = value; }, false});
  }

  Cluster parse() {
    for (std::size_t begin = 0; begin < text_.size();) {
      const std::size_t end = std::min(text_.find('\n', begin), text_.size());
      ++line_;
      read_line(text_.substr(begin, end - begin));
      begin = end + 1;
    }
    line_ = 0;
    for (const std::string_view needed : kNeeded) {
      if (!given_.contains(needed)) fail("{} is missing; accepted: a file with {}", needed, fmt::join(kNeeded, ", "));
    }
    // One adapter, merging as fast as reading, no products: what a file that does not say so means.
    if (!given_.contains("adapters_per_node")) cluster_.adapters_per_node = 1;
    if (!given_.contains("merge_rate")) cluster_.merge_bytes_per_s = cluster_.device_bytes_per_s;
    return std::move(cluster_);
  }

 private:
  struct Key {
    std::string_view name;
    std::function<void(std::string_view)> read;
    bool repeats = false;
  };

  template <typename... Args>
  [[noreturn]] void fail(fmt::format_string<Args...> format, Args&&... args) const {
    const std::string where = line_ > 0 ? fmt::format(":{}", line_) : "";
    throw BadFile(fmt::format("{}{}: {}", origin_, where, fmt::format(format, std::forward<Args>(args)...)));
  }

  void read_line(std::string_view line) {
    line = trimmed(line.substr(0, line.find('#')));
    if (line.empty()) return;
    const std::size_t equals = line.find('=');
    if (equals == std::string_view::npos) fail("\"{}\"; accepted: key = value", line);
    const std::string_view name = trimmed(line.substr(0, equals));
    const std::string_view value = trimmed(line.substr(equals + 1));
    for (const Key& key : keys_) {
      if (key.name != name) continue;
      if (!given_.insert(key.name).second && !key.repeats) fail("{} is given twice", name);
      if (value.empty()) fail("{} has no value", name);
      key.read(value);
      return;
    }
    std::vector<std::string_view> names;
    for (const Key& key : keys_) names.push_back(key.name);
    fail("unknown key \"{}\"; accepted: {}", name, fmt::join(names, ", "));
  }

  void count(std::string_view name, int& target) {
    keys_.push_back({name, [this, name, &target](std::string_view value) {
                       std::string_view rest = value;
                       const auto number = take_number<int>(rest);
                       if (!number || !rest.empty() || *number < 1 || *number > kMostDevices) {
                         fail("{} = {}; accepted: a whole number, 1 to {}", name, value, kMostDevices);
                       }
                       target = *number;
                     }});
  }

  // A number and one of the units, in the unit of factor 1.
  std::optional<double> with_unit(std::string_view value, std::span<const Unit> units) const {
    const auto number = take_number<double>(value);
    if (!number || !std::isfinite(*number)) return {};
    for (const Unit& unit : units) {
      if (value == unit.name) return *number * unit.factor;
    }
    return {};
  }

  // From `least` on, in the unit of factor 1, whose name is `unit`.
  void number(std::string_view name, double& target, std::span<const Unit> units, double least, const char* unit) {
    keys_.push_back({name, [this, name, &target, units, least, unit](std::string_view value) {
                       const auto number = with_unit(value, units);
                       if (number && *number >= least && *number <= kLargest) {
                         target = *number;
                         return;
                       }
                       std::vector<std::string_view> names;
                       for (const Unit& known : units) names.push_back(known.name);
                       fail("{} = {}; accepted: {} to {:.0e} {}, a number and its unit, one of {}", name, value, least,
                            kLargest, unit, fmt::join(names, ", "));
                     }});
  }

  void rate(std::string_view name, double& target) { number(name, target, kRates, kLeast, "B/s"); }
  void time(std::string_view name, double& target) { number(name, target, kTimes, 0, "s"); }

  void slower(std::string_view name, std::vector<Slower>& target, std::string_view what) {
    const auto read = [this, name, &target, what](std::string_view value) {
      std::string_view rest = value;
      const auto index = take_number<int>(rest);
      const auto factor = take_number<double>(rest);
      const bool known = index && *index >= 0 && *index < kMostRanks;
      const bool accepted = factor && *factor > 0 && *factor <= kMostFactor;
      if (!known || !accepted || !rest.empty()) {
        fail("{} = {}; accepted: a {} and how many times slower it is, above 0 and up to {}, as in \"3 2.5\"", name,
             value, what, kMostFactor);
      }
      if (!slowed_.insert({name, *index}).second) {
        fail("{} = {}: {} {} is given twice; accepted: one factor for a {}", name, value, what, *index, what);
      }
      target.push_back({*index, *factor});
    };
    keys_.push_back({name, read, true});
  }

  std::string_view text_;
  std::string_view origin_;
  Cluster cluster_;
  std::vector<Key> keys_;
  std::set<std::string_view> given_;
  std::set<std::pair<std::string_view, int>> slowed_;
  int line_ = 0;  // 0: the file as a whole
};

}  // namespace

Network Cluster::network(int ranks, int ranks_per_node) const {
  base::require(ranks > 0, "ranks = {}; accepted: 1 or more", ranks);
  base::require(ranks_per_node > 0, "ranks_per_node = {}; accepted: 1 or more", ranks_per_node);
  Network network{.local = local, .remote = remote};
  for (int rank = 0; rank < ranks; ++rank) network.node_of_rank.push_back(rank / ranks_per_node);
  network.merge_bytes_per_s = merge_bytes_per_s;
  network.adapters_per_node = adapters_per_node;
  return network;
}

std::span<const std::string_view> built_in_clusters() { return kBuiltInNames; }

std::string_view built_in_cluster_text(std::string_view name) {
  if (const BuiltIn* cluster = find_built_in(name)) return cluster->text;
  base::throw_invalid("cluster = \"{}\"; accepted: {}", name, fmt::join(kBuiltInNames, ", "));
}

std::string cluster_text(const std::string& name_or_path) {
  if (const BuiltIn* cluster = find_built_in(name_or_path)) return std::string(cluster->text);
  std::error_code ignored;  // a name that no file can have is none of a file
  base::require(std::filesystem::exists(name_or_path, ignored), "cluster = \"{}\"; accepted: {}, or a file",
                name_or_path, fmt::join(kBuiltInNames, ", "));
  constexpr std::uint64_t kMostBytes = std::uint64_t{1} << 20;
  return base::read_text(name_or_path, kMostBytes);
}

Cluster parse_cluster(std::string_view text, std::string_view origin) { return Parser(text, origin).parse(); }

Cluster find_cluster(const std::string& name_or_path) {
  return parse_cluster(cluster_text(name_or_path), name_or_path);
}

}  // namespace treeattn::plan
