// SPDX-License-Identifier: Apache-2.0
#include "decode_times.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <sstream>

#include "base/check.h"
#include "child_process.h"
#include "command.h"
#include "plan/cluster.h"
#include "plan/tree_order.h"
#include "scenario.h"
#include "simulation_job.h"
#include "treeattn/error.h"

namespace treeattn::tools {
namespace {

std::string key_of(const std::string& line) { return line.substr(0, line.find(' ')); }

std::string cluster_text(const DecodePoint& point) {
  std::set<std::string> given;
  std::istringstream lines(point.cluster_lines), description(plan::cluster_text(point.cluster));
  for (std::string line; std::getline(lines, line);) given.insert(key_of(line));
  std::string text;
  for (std::string line; std::getline(description, line);) {
    if (!given.contains(key_of(line))) text += line + "\n";
  }
  return text + point.cluster_lines;
}

// A simulation takes time like the messages it sends.
bool quick_to_simulate(const DecodePoint& point) {
  switch (point.strategy) {
    case Strategy::kRing:
      return point.ranks <= 128;
    case Strategy::kButterfly:
    case Strategy::kGather:
      return point.ranks <= 1024;
    default:
      return point.ranks <= 4096;
  }
}

SimulationJob job_of(const DecodePoint& point) {
  SimulationJob job;
  job.cluster = cluster_text(point);
  job.origin = point.cluster;
  job.ranks = point.ranks;
  job.ranks_per_node = point.ranks_per_node;
  job.shape.batch = point.batch;
  job.shape.queries = point.queries;
  job.shape.heads = point.heads;
  job.shape.kv_heads = point.kv_heads;
  job.shape.head_dim = point.head_dim;
  job.shape.dtype = point.dtype;
  job.shape.q_dtype = default_q_dtype(point.dtype);
  job.tokens = {point.tokens};
  job.strategies = {point.strategy};
  job.branches = plan::branches_for(point.ranks);
  job.overhead_s = 1e-6 * point.overhead_us;
  return job;
}

double rest_us(const DecodeTime& time, const DecodePoint& point) {
  return std::max(0.0, time.us - time.local_us - point.overhead_us);
}

}  // namespace

DecodePoint decode_point(double ranks, double tokens) {
  DecodePoint out;
  out.ranks = static_cast<int>(ranks);
  out.tokens = static_cast<std::int64_t>(tokens);
  return out;
}

DecodeTime closed_form(const DecodePoint& point) {
  Scenario scenario(job_of(point));
  scenario.choose(point.strategy, point.tokens);
  const plan::Cost cost = scenario.closed_form();
  DecodeTime time;
  time.us = 1e6 * cost.seconds;
  time.local_us = 1e6 * scenario.local_seconds();
  time.reduce_us = rest_us(time, point);
  time.steps = static_cast<double>(cost.steps);
  time.bytes_per_rank = static_cast<double>(cost.bytes) / point.ranks;
  time.closed_form_us = time.us;
  return time;
}

DecodeTime DecodeTimes::at(const DecodePoint& point) {
  if (!can_simulate() || !quick_to_simulate(point)) return closed_form(point);
  const DecodeTime time = simulate(point);
  if (point.cluster_lines.empty()) {
    const double distance = std::fabs(time.us / time.closed_form_us - 1);
    largest_distance_ = std::max(distance, largest_distance_.value_or(0));
  }
  return time;
}

DecodeTime DecodeTimes::simulate(const DecodePoint& point) {
  const std::string job = job_of(point).to_json();
  if (const auto found = known_.find(job); found != known_.end()) return found->second;
  const std::string what = fmt::format("{} on {} ranks", strategy_name(point.strategy), point.ranks);
  std::optional<SimulationLine> line;
  const int status = run_child(simulator_, job, [&](const std::string& text) {
    listener_(what);
    if (text.starts_with('{')) line = SimulationLine::from_json(text);  // else: how far it has come
  });
  if (status == kUnavailable) throw Unavailable("the simulator has not enough memory; it has said why");
  if (status != 0 || !line)
    throw Error(fmt::format("{} ended with status {} for {}", simulator_.string(), status, what));
  if (!line->failure.empty()) throw Error(fmt::format("a check of the simulation failed: {}", line->failure));
  DecodeTime time;
  time.us = line->us;
  time.local_us = line->local_us;
  time.reduce_us = rest_us(time, point);
  time.steps = static_cast<double>(line->steps);
  time.bytes_per_rank = static_cast<double>(line->bytes) / point.ranks;
  time.closed_form_us = line->closed_form_us;
  time.source = Source::kSimulated;
  return known_[job] = time;
}

}  // namespace treeattn::tools
