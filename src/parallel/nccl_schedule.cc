// SPDX-License-Identifier: Apache-2.0
// The strategies that are a list of messages: sends and receives of NCCL, round by round.
#include <algorithm>
#include <vector>

#include "parallel/nccl_run.h"

namespace treeattn::parallel {
namespace {

using plan::Message;
using plan::Payload;

// As ScheduleRun of reduce.cc; a gather does not come here, so parts are always merged.
class NcclScheduleRun {
 public:
  NcclScheduleRun(NcclRun& run, const plan::Schedule& schedule)
      : run_(run), schedule_(schedule), partial_(run.shape, run.stream) {}

  float* reduce(float* own) {
    std::size_t floats = 2 * run_.shape.floats();
    for (const auto& round : schedule_.rounds) {
      for (const Message& message : round) floats += message_floats(message);
    }
    run_.scratch.begin(floats);
    const auto found = std::find(schedule_.order.begin(), schedule_.order.end(), run_.rank());
    const int place = static_cast<int>(found - schedule_.order.begin());
    if (!run_.context.canonical) own = run_.merged(own);
    partial_.add(run_.context.part(run_.rank(), place), own);
    for (const auto& round : schedule_.rounds) run_round(round);
    return result();
  }

 private:
  std::size_t message_floats(const Message& message) const {
    return plan::states_in(message, schedule_, run_.context.shares, run_.context.canonical) * run_.shape.floats();
  }

  void run_round(const std::vector<Message>& round) {
    struct Transfer {
      const Message* message;
      float* data;
      std::size_t floats;
    };
    std::vector<Transfer> transfers;
    for (const Message& message : round) {
      const std::size_t floats = message_floats(message);
      if (floats == 0) continue;
      float* data = run_.scratch.take(floats);
      if (message.from == run_.rank()) fill(message, data);
      transfers.push_back({&message, data, floats});
    }
    run_.context.communicator.count_step();
    const NcclCommunicator& nccl = run_.nccl;
    run_.start("ncclSend and ncclRecv", [&] {
      for (const auto& [message, data, floats] : transfers) {
        if (message->from == run_.rank()) {
          nccl.begun(ncclSend(data, floats, ncclFloat, message->to, nccl.get(), run_.stream), "ncclSend");
        } else {
          nccl.begun(ncclRecv(data, floats, ncclFloat, message->from, nccl.get(), run_.stream), "ncclRecv");
        }
      }
    });
    for (const auto& [message, data, floats] : transfers) {
      if (message->to == run_.rank()) take(*message, data);
    }
  }

  void fill(const Message& message, float* to) {
    if (message.payload == Payload::kResult) return run_.copy(to, result(), run_.shape.floats());
    for (const float* block : partial_.blocks()) {
      run_.copy(to, block, run_.shape.floats());
      to += run_.shape.floats();
    }
  }

  void take(const Message& message, float* data) {
    if (message.payload == Payload::kResult) {
      result_ = data;
      return;
    }
    partial_.add(run_.context.merged_parts(message, schedule_), data);
    if (!run_.context.canonical) partial_.merge_all();
  }

  // What came as such, or what has been merged here.
  float* result() { return result_ != nullptr ? result_ : run_.root(partial_); }

  NcclRun& run_;
  const plan::Schedule& schedule_;
  DeviceNodes partial_;
  float* result_ = nullptr;
};

}  // namespace

float* nccl_by_schedule(NcclRun& run, const plan::Schedule& schedule, float* own) {
  return NcclScheduleRun(run, schedule).reduce(own);
}

}  // namespace treeattn::parallel
