// SPDX-License-Identifier: Apache-2.0
// treeattn plan: how many devices a model and a context need, what each of them holds, how long a token takes and what
// limits it; or the longest context that fits.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/bisect.h"
#include "base/check.h"
#include "base/round_up.h"
#include "command.h"
#include "json_line.h"
#include "model_size.h"
#include "option_errors.h"
#include "options.h"
#include "plan/capacity.h"
#include "table.h"

namespace treeattn::tools {
namespace {

constexpr std::int64_t kMostContext = std::int64_t{1} << 40;
constexpr std::int64_t kMostBatch = 65536;

struct PlanOptions {
  std::string model = "llama-3.1-8b", context = "128k", batch = "1", cluster = "dgx-h100", devices;
  std::string weights_type = "bfloat16", kv_type = "bfloat16";
  bool split_weights = false;
  bool longest = false;
  bool json = false;
};

// What the options say, checked.
struct Request {
  model::LlamaConfig config;
  DType weights = DType::kBFloat16;
  DType kv = DType::kBFloat16;
  int devices = 0;  // 0: to be found
  plan::CapacityRequest capacity;

  void update() { capacity.model = model_size(config, weights, kv); }
};

DType parse_type(const char* option, const std::string& text, std::vector<DType> accepted) {
  std::vector<std::string_view> names;
  for (const DType dtype : accepted) names.push_back(dtype_name(dtype));
  try {
    const DType dtype = parse_dtype(text);
    if (std::find(accepted.begin(), accepted.end(), dtype) != accepted.end()) return dtype;
  } catch (const InvalidArgument&) {
  }
  base::throw_invalid("{} is \"{}\"; accepted: {}", option, text, fmt::join(names, ", "));
}

Request parse(const PlanOptions& options) {
  Request request;
  request.config = find_model(options.model);
  request.weights = parse_type("--weights-type", options.weights_type,
                               {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kInt8});
  request.kv = parse_type("--kv-type", options.kv_type, {std::begin(kAllDTypes), std::end(kAllDTypes)});
  plan::CapacityRequest& capacity = request.capacity;
  capacity.context = parse_count("--context", options.context, 1, kMostContext);
  capacity.batch = parse_count("--batch", options.batch, 1, kMostBatch);
  capacity.cluster = inside_option("--cluster", [&] { return plan::find_cluster(options.cluster); });
  capacity.split_weights = options.split_weights;
  if (!options.devices.empty()) {
    request.devices = static_cast<int>(parse_count("--devices", options.devices, 1, plan::kMostDevices));
  } else if (options.longest) {
    request.devices = capacity.cluster.devices_per_node;
  }
  request.update();
  return request;
}

std::string gigabytes(std::uint64_t bytes) {
  const double value = static_cast<double>(bytes);
  return value >= 1e8 ? fmt::format("{:.2f} GB", value / 1e9) : fmt::format("{:.2f} MB", value / 1e6);
}

// "llama-3.1-8b (bfloat16), 2 sequences of 131072 tokens (int8) on dgx-h100".
std::string asked_text(const PlanOptions& options, const Request& request) {
  return fmt::format("{} ({}), {} of {} ({}) on {}", options.model, dtype_name(request.weights),
                     format_count(request.capacity.batch, "sequence"), format_count(request.capacity.context, "token"),
                     dtype_name(request.kv), request.capacity.cluster.name);
}

// Whether the request holds on the devices that were given, or on any number.
bool possible(const Request& request) {
  return request.devices > 0 ? plan::fits(request.capacity, request.devices)
                             : plan::fewest_devices(request.capacity).has_value();
}

// On the devices that were given, or on as many as there can be: all, or whole nodes, as one that is alone on its node
// holds all of the weights that are split.
std::int64_t longest_context(const Request& request) {
  const plan::CapacityRequest& capacity = request.capacity;
  if (request.devices > 0) return plan::longest_context(capacity, request.devices);
  const int most = capacity.most_devices, on_node = capacity.cluster.devices_per_node;
  return std::max(plan::longest_context(capacity, most), plan::longest_context(capacity, most / on_node * on_node));
}

// One change of a request that does not fit.
struct Change {
  std::string option;
  std::function<void(Request&)> apply;
};

std::vector<Change> changes() {
  std::vector<Change> out;
  out.push_back({"--kv-type int8", [](Request& r) { r.kv = DType::kInt8; }});
  out.push_back({"--weights-type int8", [](Request& r) { r.weights = DType::kInt8; }});
  out.push_back({"--split-weights", [](Request& r) { r.capacity.split_weights = true; }});
  for (const std::string_view name : plan::built_in_clusters()) {
    const std::string cluster(name);
    out.push_back(
        {"--cluster " + cluster, [cluster](Request& r) { r.capacity.cluster = plan::find_cluster(cluster); }});
  }
  return out;
}

// Some of them together.
using Changes = std::vector<const Change*>;

Request changed(Request request, const Changes& applied) {
  for (const Change* change : applied) change->apply(request);
  request.update();
  return request;
}

std::string options_of(const Changes& applied) {
  std::vector<std::string_view> options;
  for (const Change* change : applied) options.push_back(change->option);
  return fmt::format("{}", fmt::join(options, " "));
}

// The most sequences that fit; 0: not even one.
std::int64_t largest_batch(Request request) {
  return base::bisect(std::int64_t{0}, request.capacity.batch, [&](std::int64_t batch) {
    request.capacity.batch = batch;
    return possible(request);
  });
}

// What would work: each tried, one change at a time, where none does two at a time, and where none of these does with
// another number of devices.
std::vector<std::string> what_would_work(const Request& request, bool longest) {
  std::vector<std::string> out;
  if (!longest) {
    const auto fewest = plan::fewest_devices(request.capacity);
    if (fewest) out.push_back(fmt::format("--devices {}", *fewest));
    if (const std::int64_t context = longest_context(request); context > 0) {
      out.push_back(fmt::format("--context {}", context));
    }
  }
  if (const std::int64_t batch = largest_batch(request); batch > 0) out.push_back(fmt::format("--batch {}", batch));
  const std::vector<Change> all = changes();
  std::vector<Changes> ones, twos;
  for (std::size_t i = 0; i < all.size(); ++i) {
    ones.push_back({&all[i]});
    for (std::size_t j = i + 1; j < all.size(); ++j) twos.push_back({&all[i], &all[j]});
  }
  for (const std::vector<Changes>& tries : {ones, twos}) {
    for (const Changes& applied : tries) {
      if (possible(changed(request, applied))) out.push_back(options_of(applied));
    }
    if (!out.empty()) return out;
  }
  if (request.devices == 0) return out;
  for (const std::vector<Changes>& tries : {ones, twos}) {
    for (const Changes& applied : tries) {
      const auto fewest = plan::fewest_devices(changed(request, applied).capacity);
      if (fewest) out.push_back(fmt::format("--devices {} {}", *fewest, options_of(applied)));
    }
  }
  return out;
}

[[noreturn]] void throw_does_not_fit(const PlanOptions& options, const Request& request) {
  const plan::CapacityRequest& capacity = request.capacity;
  const int devices = request.devices > 0 ? request.devices : capacity.most_devices;
  const plan::DeviceBytes bytes = plan::plan_strategy(capacity, devices, Strategy::kMerge).bytes;
  const std::vector<std::string> works = what_would_work(request, options.longest);
  base::throw_invalid(
      "{} does not fit on {}: a device would hold {} ({} weights, {} K and V, {} states and workspace), {} of its {} "
      "can be used; what would work: {}",
      asked_text(options, request), format_count(devices, "device"), gigabytes(bytes.total()), gigabytes(bytes.weights),
      gigabytes(bytes.kv), gigabytes(bytes.states + bytes.workspace), gigabytes(capacity.usable_bytes()),
      gigabytes(static_cast<std::uint64_t>(capacity.cluster.device_memory_bytes)),
      works.empty() ? "a smaller model, or devices with more memory" : fmt::format("{}", fmt::join(works, "; ")));
}

struct Part {
  const char* name;
  double value;
};

const Part& largest(const std::vector<Part>& parts) {
  return *std::max_element(parts.begin(), parts.end(), [](const Part& a, const Part& b) { return a.value < b.value; });
}

// A plan that holds, and everything that is printed of it.
class Report {
 public:
  Report(const PlanOptions& options, const Request& request, int devices)
      : options_(options),
        request_(request),
        devices_(devices),
        plans_(plan::plan_strategies(request.capacity, devices)),
        longest_(plan::longest_context(request.capacity, devices)),
        needed_(plan::fewest_devices(request.capacity).value_or(devices)) {}

  void print_text() const {
    const plan::CapacityRequest& c = request_.capacity;
    fmt::print("{}\n\n", asked_text(options_, request_));
    fmt::print("devices    {} on {}{}\n", devices_, format_count(nodes(), "node"),
               request_.devices > 0 ? fmt::format(" (at least {} needed)", needed_) : ", the fewest that hold it");
    fmt::print("placement  {}\n", placement());
    fmt::print("longest    {} tokens fit on them{}\n\n", longest_, beyond_training(longest_));
    print_bytes();
    print_times();
    fmt::print("\nbest       {}: {} ms a token, {} tokens/s\n", strategy_name(best().strategy),
               format_number(1e3 * best().seconds.total()),
               format_number(static_cast<double>(c.batch) / best().seconds.total()));
    fmt::print("limits     memory: {}; time: {} ({:.0f} % of it)\n", memory_limit().name, time_limit().name,
               100 * time_limit().value / best().seconds.total());
  }

  void print_json() const {
    const plan::StrategyPlan& b = best();
    const ReductionOrder order = plan::order_for(request_.capacity, devices_);
    nlohmann::ordered_json out;
    out["model"] = options_.model;
    out["weights_type"] = dtype_name(request_.weights);
    out["kv_type"] = dtype_name(request_.kv);
    out["context"] = request_.capacity.context;
    out["batch"] = request_.capacity.batch;
    out["cluster"] = request_.capacity.cluster.name;
    out["devices"] = devices_;
    out["devices_needed"] = needed_;
    out["nodes"] = nodes();
    out["split_weights"] = request_.capacity.split_weights;
    out["placement"] = "cyclic";
    out["chunk_tokens"] = order.chunk_tokens;
    out["branches"] = order.branches;
    out["weights_bytes"] = b.bytes.weights;
    out["kv_bytes"] = b.bytes.kv;
    out["states_bytes"] = b.bytes.states;
    out["workspace_bytes"] = b.bytes.workspace;
    out["total_bytes"] = b.bytes.total();
    out["usable_bytes"] = request_.capacity.usable_bytes();
    out["longest_context"] = longest_;
    out["strategy"] = strategy_name(b.strategy);
    out["us"] = 1e6 * b.seconds.total();
    out["weights_us"] = 1e6 * b.seconds.weights;
    out["attention_us"] = 1e6 * b.seconds.kv;
    out["exchange_us"] = 1e6 * b.seconds.exchange;
    out["split_weights_us"] = 1e6 * b.seconds.split_weights;
    out["memory_limit"] = memory_limit().name;
    out["time_limit"] = time_limit().name;
    for (const plan::StrategyPlan& p : plans_) {
      out["strategies"].push_back({{"strategy", strategy_name(p.strategy)},
                                   {"us", 1e6 * p.seconds.total()},
                                   {"exchange_us", 1e6 * p.seconds.exchange},
                                   {"fits", p.fits}});
    }
    fmt::print("{}\n", json_line(out));
  }

 private:
  const plan::StrategyPlan& best() const { return plans_.front(); }
  int nodes() const { return base::divide_up(devices_, request_.capacity.cluster.devices_per_node); }

  std::string placement() const {
    const ReductionOrder order = plan::order_for(request_.capacity, devices_);
    return fmt::format(
        "chunks of {} tokens in turn over {} branches, {:.4g} {} a device; {}", order.chunk_tokens, order.branches,
        static_cast<double>(order.branches) / devices_, order.branches == devices_ ? "branch" : "branches",
        request_.capacity.split_weights ? "weights split over the devices of a node" : "all weights on every device");
  }

  // What is to be said of a context of so many tokens.
  std::string beyond_training(std::int64_t context) const {
    const std::int64_t trained = request_.config.context;
    return context > trained ? fmt::format("; the model was made for {}", trained) : "";
  }

  Part memory_limit() const {
    const plan::DeviceBytes& bytes = best().bytes;
    return largest({{"weights", static_cast<double>(bytes.weights)},
                    {"K and V", static_cast<double>(bytes.kv)},
                    {"states", static_cast<double>(bytes.states)},
                    {"workspace", static_cast<double>(bytes.workspace)}});
  }

  Part time_limit() const {
    const plan::StepTime& s = best().seconds;
    return largest({{"weights", s.weights},
                    {"attention to K and V", s.kv},
                    {"exchange of states", s.exchange},
                    {"exchange for split weights", s.split_weights}});
  }

  void print_bytes() const {
    const plan::DeviceBytes& bytes = best().bytes;
    Table table({{"fullest device", Align::kLeft}, {"bytes"}, {"of usable"}});
    const auto row = [&](const char* name, std::uint64_t value) {
      const double share = static_cast<double>(value) / static_cast<double>(request_.capacity.usable_bytes());
      table.add({name, gigabytes(value), fmt::format("{:.1f} %", 100 * share)});
    };
    row("weights", bytes.weights);
    row("K and V", bytes.kv);
    row("states", bytes.states);
    row("workspace", bytes.workspace);
    row("all", bytes.total());
    row("usable", request_.capacity.usable_bytes());
    table.print();
  }

  void print_times() const {
    fmt::print("\n");
    Table table({{"strategy", Align::kLeft},
                 {"ms a token"},
                 {"weights"},
                 {"attention"},
                 {"exchange"},
                 {"steps a layer"},
                 {""}});
    for (const plan::StrategyPlan& p : plans_) {
      table.add({std::string(strategy_name(p.strategy)), format_number(1e3 * p.seconds.total()),
                 format_number(1e3 * (p.seconds.weights + p.seconds.split_weights)), format_number(1e3 * p.seconds.kv),
                 format_number(1e3 * p.seconds.exchange), fmt::format("{}", p.layer.steps),
                 p.fits ? "" : "does not fit"});
    }
    table.print();
  }

  const PlanOptions& options_;
  const Request& request_;
  int devices_;
  std::vector<plan::StrategyPlan> plans_;  // best first
  std::int64_t longest_;
  int needed_;
};

// The inverse.
int run_longest(const PlanOptions& options, Request& request) {
  const std::int64_t longest = plan::longest_context(request.capacity, request.devices);
  if (longest == 0) {
    request.capacity.context = 1;
    throw_does_not_fit(options, request);
  }
  request.capacity.context = longest;
  const Report report(options, request, request.devices);
  options.json ? report.print_json() : report.print_text();
  return kOk;
}

int run(const PlanOptions& options) {
  Request request = parse(options);
  if (options.longest) return run_longest(options, request);
  if (!possible(request)) throw_does_not_fit(options, request);
  const int devices = request.devices > 0 ? request.devices : *plan::fewest_devices(request.capacity);
  const Report report(options, request, devices);
  options.json ? report.print_json() : report.print_text();
  return kOk;
}

constexpr char kFooter[] =
    R"(The times are a model: peak rates of the cluster's description, no overlap between weights, attention and exchange.

Examples:
  treeattn plan --model llama-3.1-8b --context 1M                       how many H100s, and how fast
  treeattn plan --model llama-3.1-8b --context 128k --batch 16 --kv-type int8 --devices 4
  treeattn plan --model llama-3.2-1b --cluster rtx4090 --devices 2 --longest
  treeattn plan --model llama-3.1-405b --split-weights --weights-type int8 --context 1M --json
  treeattn plan --model ./my-llama --cluster two_boxes.txt)";

}  // namespace

Command add_plan(CommandLine& parent) {
  CommandLine* app = parent.add_subcommand("plan", "Devices, memory and time that a model and a context need");
  auto options = std::make_shared<PlanOptions>();
  const auto text = [&](const char* name, std::string& value, const std::string& what, const char* type) {
    return app->add_option(name, value, what)->type_name(type);
  };
  text("--model", options->model,
       fmt::format("{}, or a directory with config.json (default llama-3.1-8b)", fmt::join(model::known_shapes(), " ")),
       "NAME|DIR");
  Option* context = text("--context", options->context,
                         "Tokens of a sequence; 128k is 131072, 1M is 1048576 (default 128k); not with --longest", "N");
  text("--batch", options->batch, "Sequences (default 1)", "N");
  text("--cluster", options->cluster,
       fmt::format("{}, or a file (default dgx-h100)", fmt::join(plan::built_in_clusters(), " ")), "NAME|FILE");
  text("--devices", options->devices, "Devices there are (default: the fewest that hold it; --longest: one node)", "N");
  text("--weights-type", options->weights_type, "float32 float16 bfloat16 int8 (default bfloat16)", "TYPE");
  text("--kv-type", options->kv_type, "float32 float16 bfloat16 int8 fp8 (default bfloat16)", "TYPE");
  app->add_flag("--split-weights", options->split_weights, "Cut the weights over the devices of a node");
  app->add_flag("--longest", options->longest, "The longest context that fits on the devices; not with --context")
      ->excludes(context);
  app->add_flag("--json", options->json, "One JSON object; docs/cli.md explains the keys");
  app->footer(kFooter);
  return {app, [options] { return run(*options); }};
}

}  // namespace treeattn::tools
