// SPDX-License-Identifier: Apache-2.0
// Who is who among TCP ranks, by the variables that launchers set.
#include <fmt/format.h>

#include <cstdlib>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "base/check.h"
#include "comm/tcp_mesh.h"
#include "treeattn/communicator.h"
#include "treeattn/error.h"

namespace treeattn {
namespace {

int number_from(const char* name, int least, int most) {
  const char* text = std::getenv(name);
  if (text == nullptr) {
    throw Unavailable(fmt::format(
        "tcp_communicator: {} is not set; accepted: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in the environment",
        name));
  }
  char* end = nullptr;
  const long value = std::strtol(text, &end, 10);
  base::require(end != text && *end == '\0' && value >= least && value <= most, "{} = {}; accepted: {} to {}", name,
                text, least, most);
  return static_cast<int>(value);
}

// torchrun's own process may have the port that it tells its workers.
bool port_is_taken() {
  const char* text = std::getenv("TORCHELASTIC_USE_AGENT_STORE");
  return text != nullptr && std::string_view(text) == "True";
}

}  // namespace

std::string comm::job_of_launcher() {
  const auto value_of = [](const char* name) {
    const char* text = std::getenv(name);
    return text != nullptr ? std::optional<std::string>(text) : std::nullopt;
  };
  if (const auto job = value_of("TREEATTN_JOB")) return *job;
  // Nothing else is asked under torchrun: the agents that start the workers may each be a step of Slurm.
  if (const auto run = value_of("TORCHELASTIC_RUN_ID")) return *run == "none" ? std::string() : *run;
  const auto job = value_of("SLURM_JOB_ID"), step = value_of("SLURM_STEP_ID");
  return job && step ? *job + "." + *step : std::string();
}

bool launched_by_tcp() {
  const char* size = std::getenv("WORLD_SIZE");
  if (size == nullptr || std::getenv("RANK") == nullptr) return false;
  if (std::getenv("MASTER_PORT") != nullptr || std::getenv("MASTER_ADDR") != nullptr) return true;
  // Who forgot both is told so: several processes must not run each by itself.
  return *size != '\0' && std::string_view(size) != "1";
}

std::shared_ptr<Communicator> tcp_communicator(RankOptions options) {
  TcpPlace place;
  place.size = number_from("WORLD_SIZE", 1, comm::kMostTcpRanks);
  place.rank = number_from("RANK", 0, place.size - 1);
  constexpr int kMostPort = 65535;
  place.port = number_from("MASTER_PORT", 1, kMostPort);
  if (port_is_taken()) place.port += place.port < kMostPort ? 1 : -1;
  const char* address = std::getenv("MASTER_ADDR");
  if (address != nullptr && *address != '\0') place.address = address;
  place.job = comm::job_of_launcher();
  return tcp_communicator(place, std::move(options));
}

}  // namespace treeattn
