// SPDX-License-Identifier: Apache-2.0
#include "simulation_job.h"

#include <nlohmann/json.hpp>

#include "json_line.h"

namespace treeattn::tools {

using nlohmann::json;

std::string SimulationJob::to_json() const {
  std::vector<std::string> names;
  for (const Strategy strategy : strategies) names.emplace_back(strategy_name(strategy));
  return json_line(json{{"cluster", cluster},
                        {"origin", origin},
                        {"ranks", ranks},
                        {"ranks_per_node", ranks_per_node},
                        {"batch", shape.batch},
                        {"queries", shape.queries},
                        {"heads", shape.heads},
                        {"kv_heads", shape.kv_heads},
                        {"head_dim", shape.head_dim},
                        {"dtype", dtype_name(shape.dtype)},
                        {"q_dtype", dtype_name(shape.q_dtype)},
                        {"tokens", tokens},
                        {"strategies", names},
                        {"branches", branches},
                        {"canonical", canonical},
                        {"overhead_s", overhead_s}});
}

SimulationJob SimulationJob::from_json(const std::string& text) {
  const json in = json::parse(text);
  SimulationJob job;
  in.at("cluster").get_to(job.cluster);
  in.at("origin").get_to(job.origin);
  in.at("ranks").get_to(job.ranks);
  in.at("ranks_per_node").get_to(job.ranks_per_node);
  in.at("batch").get_to(job.shape.batch);
  in.at("queries").get_to(job.shape.queries);
  in.at("heads").get_to(job.shape.heads);
  in.at("kv_heads").get_to(job.shape.kv_heads);
  in.at("head_dim").get_to(job.shape.head_dim);
  job.shape.dtype = parse_dtype(in.at("dtype").get<std::string>());
  job.shape.q_dtype = parse_dtype(in.at("q_dtype").get<std::string>());
  in.at("tokens").get_to(job.tokens);
  for (const json& name : in.at("strategies")) job.strategies.push_back(parse_strategy(name.get<std::string>()));
  in.at("branches").get_to(job.branches);
  in.at("canonical").get_to(job.canonical);
  in.at("overhead_s").get_to(job.overhead_s);
  return job;
}

std::string SimulationLine::to_json() const {
  return json_line(json{{"strategy", strategy_name(strategy)},
                        {"tokens", tokens},
                        {"us", us},
                        {"local_us", local_us},
                        {"steps", steps},
                        {"messages", messages},
                        {"bytes", bytes},
                        {"remote_bytes", remote_bytes},
                        {"device_bytes", device_bytes},
                        {"closed_form_us", closed_form_us},
                        {"closed_form_bytes", closed_form_bytes},
                        {"failure", failure},
                        {"wall_s", wall_s}});
}

SimulationLine SimulationLine::from_json(const std::string& text) {
  const json in = json::parse(text);
  SimulationLine line;
  line.strategy = parse_strategy(in.at("strategy").get<std::string>());
  in.at("tokens").get_to(line.tokens);
  in.at("us").get_to(line.us);
  in.at("local_us").get_to(line.local_us);
  in.at("steps").get_to(line.steps);
  in.at("messages").get_to(line.messages);
  in.at("bytes").get_to(line.bytes);
  in.at("remote_bytes").get_to(line.remote_bytes);
  in.at("device_bytes").get_to(line.device_bytes);
  in.at("closed_form_us").get_to(line.closed_form_us);
  in.at("closed_form_bytes").get_to(line.closed_form_bytes);
  in.at("failure").get_to(line.failure);
  in.at("wall_s").get_to(line.wall_s);
  return line;
}

}  // namespace treeattn::tools
