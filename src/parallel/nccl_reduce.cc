// SPDX-License-Identifier: Apache-2.0
// States from GPU to GPU by NCCL. The communicator that is there anyway (threads, MPI, TCP) brings the ranks together
// and says who is lost; NCCL carries the states. It is used without blocking, so that nothing waits for ever.
#include <cuda_runtime.h>
#include <fmt/format.h>
#include <nccl.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <map>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/cuda/device_buffer.h"
#include "kernels/cuda/ranks/state_kernels.h"
#include "parallel/agree.h"
#include "parallel/device_reduce.h"
#include "treeattn/error.h"
#include "treeattn/parallel_attention.h"

namespace treeattn {

bool nccl_available() { return true; }

namespace parallel {
namespace {

using Clock = std::chrono::steady_clock;
using kernels::cuda::check;
using kernels::cuda::DeviceBuffer;
using kernels::cuda::MergeStep;
using kernels::cuda::RowShape;
using plan::Message;
using plan::Payload;

// NCCL or the GPU failed, or took too long. Not for callers: see NcclReducer::reduce.
struct Failure {
  std::string what;
};

constexpr std::chrono::microseconds kNap{20};

// How many blocks NCCL may start. Those of all ranks wait for each other, so ranks that share a GPU must leave room for
// each other there: with 64 each, the third one would never begin. Half of the GPU, for work of other streams.
int most_blocks(Communicator& ranks, int gpu) {
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, gpu), "properties of the GPU");
  using Uuid = std::array<char, sizeof properties.uuid.bytes>;
  Uuid mine;
  std::memcpy(mine.data(), properties.uuid.bytes, mine.size());
  const std::vector<Uuid> all = gathered(ranks, mine);
  const auto sharing = static_cast<int>(std::count(all.begin(), all.end(), mine));
  return sharing == 1 ? NCCL_CONFIG_UNDEF_INT : std::max(1, properties.multiProcessorCount / (2 * sharing));
}

// Device memory handed out piece by piece and taken back all at once.
class Scratch {
 public:
  void begin(std::size_t floats) {
    used_ = 0;
    if (buffer_.bytes() < floats * sizeof(float)) buffer_ = DeviceBuffer(floats * sizeof(float));
  }
  float* take(std::size_t floats) {
    float* out = buffer_.as<float>() + used_;
    used_ += floats;
    return out;
  }

 private:
  DeviceBuffer buffer_;
  std::size_t used_ = 0;
};

// NodeStates (node_states.h) on a GPU: merges are noted and done all at once.
class DeviceNodes {
 public:
  DeviceNodes(RowShape shape, cudaStream_t stream) : shape_(shape), stream_(stream) {}

  void add(const plan::NodeSet& nodes, float* data) {
    std::vector<std::pair<plan::TreeNode, float*>> all;
    for (std::size_t i = 0; i < nodes_.size(); ++i) all.emplace_back(nodes_[i], blocks_[i]);
    for (const plan::TreeNode& node : nodes) {
      all.emplace_back(node, data);
      data += shape_.floats();
    }
    std::ranges::sort(all, {}, [](const auto& one) { return one.first.first_leaf(); });
    nodes_.clear();
    blocks_.clear();
    for (const auto& [node, block] : all) {
      blocks_.push_back(block);
      plan::append_node(nodes_, node, [&] { merge_last_two(); });
    }
  }
  void merge_all() {
    std::vector<float*> all = std::exchange(blocks_, {});
    for (float* block : all) {
      blocks_.push_back(block);
      if (blocks_.size() > 1) merge_last_two();
    }
    nodes_.resize(std::min<std::size_t>(nodes_.size(), 1));
  }
  const plan::NodeSet& nodes() const { return nodes_; }
  // The blocks as they are on the stream from now on.
  const std::vector<float*>& blocks() {
    kernels::cuda::merge_blocks(steps_, shape_, stream_);
    steps_.clear();
    return blocks_;
  }

 private:
  void merge_last_two() {
    const float* higher = blocks_.back();
    blocks_.pop_back();
    steps_.push_back({blocks_.back(), higher});
  }

  RowShape shape_;
  cudaStream_t stream_;
  plan::NodeSet nodes_;
  std::vector<float*> blocks_;
  std::vector<MergeStep> steps_;
};

// The communicator of NCCL: made once, aborted when something fails.
class Nccl {
 public:
  Nccl() = default;
  ~Nccl() { abort(); }
  Nccl(const Nccl&) = delete;
  Nccl& operator=(const Nccl&) = delete;

  bool made() const { return comm_ != nullptr; }
  ncclComm_t get() const { return comm_; }

  // Collective. Throws Unavailable on every rank when it fails on one.
  void make(Communicator& ranks, int gpu) {
    struct Start {
      ncclUniqueId id;
      int code;
    } start{};
    if (ranks.rank() == 0) start.code = ncclGetUniqueId(&start.id);
    ranks.broadcast(std::as_writable_bytes(std::span(&start, 1)), 0);
    within_ = ranks.deadline();
    const int blocks = most_blocks(ranks, gpu);
    const kernels::cuda::UseDevice use(gpu);
    std::string failure;
    try {
      done(static_cast<ncclResult_t>(start.code), "ncclGetUniqueId");
      ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
      config.blocking = 0;
      config.maxCTAs = blocks;
      done(ncclCommInitRankConfig(&comm_, ranks.size(), start.id, ranks.rank(), &config), "ncclCommInitRankConfig");
      settle("ncclCommInitRankConfig");
    } catch (const Failure& error) {
      failure = error.what;
      abort();
    }
    const std::vector<char> failed = gathered(ranks, static_cast<char>(failure.empty() ? 0 : 1));
    const auto first = std::find(failed.begin(), failed.end(), char{1});
    if (first == failed.end()) return;
    abort();
    throw Unavailable("NCCL: " +
                      (failure.empty() ? fmt::format("failed on rank {}", first - failed.begin()) : failure));
  }

  void abort() {
    if (comm_ != nullptr) ncclCommAbort(comm_);
    comm_ = nullptr;
  }

  // One call of NCCL, begun.
  void done(ncclResult_t result, const char* what) {
    if (result == ncclSuccess || result == ncclInProgress) return;
    const char* more = comm_ != nullptr ? ncclGetLastError(comm_) : nullptr;
    throw Failure{
        fmt::format("{}: {}{}{}", what, ncclGetErrorString(result), more && *more ? ": " : "", more ? more : "")};
  }
  // Until what was begun is on the stream.
  void settle(const char* what) {
    until(what, [&] { return state(what) != ncclInProgress; });
  }
  // Until the stream is done.
  void wait(cudaEvent_t event) {
    until("reduction by NCCL", [&] {
      state("reduction by NCCL");
      const cudaError_t error = cudaEventQuery(event);
      if (error != cudaSuccess && error != cudaErrorNotReady) throw Failure{cudaGetErrorString(error)};
      return error == cudaSuccess;
    });
  }
  void within(Seconds deadline) { within_ = deadline; }

 private:
  ncclResult_t state(const char* what) {
    ncclResult_t result = ncclSuccess;
    done(ncclCommGetAsyncError(comm_, &result), "ncclCommGetAsyncError");
    done(result, what);
    return result;
  }
  template <class Ready>
  void until(const char* what, const Ready& ready) {
    const auto start = Clock::now();
    while (!ready()) {
      if (Clock::now() - start > within_) throw Failure{fmt::format("{}: not within {:.1f} s", what, within_.count())};
      if (Clock::now() - start > std::chrono::milliseconds(1)) std::this_thread::sleep_for(kNap);
    }
  }

  ncclComm_t comm_ = nullptr;
  Seconds within_{1};
};

// One rank's way through one reduction.
class NcclRun {
 public:
  NcclRun(Nccl& nccl, Scratch& scratch, const ReduceContext& context, StateShape shape, cudaStream_t stream)
      : nccl_(nccl),
        scratch_(scratch),
        context_(context),
        shape_{shape.rows, shape.row_floats},
        stream_(stream),
        partial_(shape_, stream) {}

  float* two_phases(float* own) {
    const std::size_t rest = shape_.floats() - shape_.rows;
    scratch_.begin(2 * shape_.floats());
    own = merged(own, context_.shares.nodes_of(rank()).size());
    float* top = scratch_.take(shape_.rows);
    float* sums = scratch_.take(rest);
    kernels::cuda::take_maxima(own, shape_, top, stream_);
    allreduce(top, shape_.rows, ncclMax);
    kernels::cuda::weigh_sums(own, top, shape_, sums, stream_);
    allreduce(sums, rest, ncclSum);
    kernels::cuda::join_sums(top, sums, shape_, own, stream_);
    return own;
  }

  float* as_in_paper(float* own) {
    const std::size_t values = shape_.floats() - 2 * shape_.rows;
    scratch_.begin(3 * shape_.floats());
    own = merged(own, context_.shares.nodes_of(rank()).size());
    float* lse = scratch_.take(shape_.rows);
    float* top = scratch_.take(shape_.rows);
    float* weight = scratch_.take(shape_.rows);
    float* o = scratch_.take(values);
    kernels::cuda::normalise(own, shape_, lse, o, stream_);
    copy(top, lse, shape_.rows);
    allreduce(top, shape_.rows, ncclMax);
    kernels::cuda::weigh_normalised(lse, top, shape_, o, weight, stream_);
    allreduce(o, values, ncclSum);
    allreduce(weight, shape_.rows, ncclSum);
    kernels::cuda::join_normalised(top, weight, o, shape_, own, stream_);
    return own;
  }

  // Everybody's blocks, padded to those of the rank that has most.
  float* gather(float* own) {
    std::size_t most = 1;
    for (int r = 0; r < size(); ++r) most = std::max(most, part(r, r).size());
    const std::size_t floats = most * shape_.floats();
    scratch_.begin((static_cast<std::size_t>(size()) + 2) * floats);
    if (!context_.canonical) own = merged(own, context_.shares.nodes_of(rank()).size());
    float* mine = scratch_.take(floats);
    float* all = scratch_.take(static_cast<std::size_t>(size()) * floats);
    copy(mine, own, part(rank(), rank()).size() * shape_.floats());
    nccl_.done(ncclAllGather(mine, all, floats, ncclFloat, nccl_.get(), stream_), "ncclAllGather");
    nccl_.settle("ncclAllGather");
    for (int r = 0; r < size(); ++r) partial_.add(part(r, r), all + static_cast<std::size_t>(r) * floats);
    if (!context_.canonical) partial_.merge_all();
    return root();
  }

  // As ScheduleRun of reduce.cc; a gather does not come here, so parts are always merged.
  float* schedule(const plan::Schedule& schedule, float* own) {
    std::size_t floats = 2 * shape_.floats();
    for (const auto& round : schedule.rounds) {
      for (const Message& message : round) floats += message_floats(schedule, message);
    }
    scratch_.begin(floats);
    const auto found = std::find(schedule.order.begin(), schedule.order.end(), rank());
    const int place = static_cast<int>(found - schedule.order.begin());
    if (!context_.canonical) own = merged(own, context_.shares.nodes_of(rank()).size());
    partial_.add(part(rank(), place), own);
    float* result = nullptr;
    for (const auto& round : schedule.rounds) result = run_round(schedule, round, result);
    return result != nullptr ? result : root();
  }

 private:
  int rank() const { return context_.communicator.rank(); }
  int size() const { return context_.communicator.size(); }

  // What a rank brings; in the free order its place, as if that were a leaf.
  plan::NodeSet part(int rank, int place) const {
    const plan::NodeSet& nodes = context_.shares.nodes_of(rank);
    if (context_.canonical || nodes.empty()) return nodes;
    return {{0, place}};
  }

  std::size_t message_floats(const plan::Schedule& schedule, const Message& message) const {
    return plan::states_in(message, schedule, context_.shares, context_.canonical) * shape_.floats();
  }

  float* run_round(const plan::Schedule& schedule, const std::vector<Message>& round, float* result) {
    struct Transfer {
      const Message* message;
      float* data;
      std::size_t floats;
    };
    std::vector<Transfer> transfers;
    for (const Message& message : round) {
      const std::size_t floats = message_floats(schedule, message);
      if (floats == 0) continue;
      float* data = scratch_.take(floats);
      if (message.from == rank()) fill(message, result, data);
      transfers.push_back({&message, data, floats});
    }
    context_.communicator.count_step();
    if (transfers.empty()) return result;
    nccl_.done(ncclGroupStart(), "ncclGroupStart");
    for (const auto& [message, data, floats] : transfers) {
      if (message->from == rank()) {
        nccl_.done(ncclSend(data, floats, ncclFloat, message->to, nccl_.get(), stream_), "ncclSend");
      } else {
        nccl_.done(ncclRecv(data, floats, ncclFloat, message->from, nccl_.get(), stream_), "ncclRecv");
      }
    }
    nccl_.done(ncclGroupEnd(), "ncclGroupEnd");
    nccl_.settle("ncclGroupEnd");
    for (const auto& [message, data, floats] : transfers) {
      if (message->to != rank()) continue;
      if (message->payload == Payload::kResult) {
        result = data;
      } else {
        take(schedule, *message, data);
      }
    }
    return result;
  }

  void fill(const Message& message, float* result, float* to) {
    if (message.payload == Payload::kResult) return copy(to, result != nullptr ? result : root(), shape_.floats());
    for (const float* block : partial_.blocks()) {
      copy(to, block, shape_.floats());
      to += shape_.floats();
    }
  }

  void take(const plan::Schedule& schedule, const Message& message, float* data) {
    plan::NodeSet nodes;
    for (int i = 0; i < message.count; ++i) {
      const int place = (message.first + i) % static_cast<int>(schedule.order.size());
      nodes = plan::unite(nodes, part(schedule.order[static_cast<std::size_t>(place)], place));
    }
    if (!context_.canonical) nodes.resize(1);
    partial_.add(nodes, data);
    if (!context_.canonical) partial_.merge_all();
  }

  float* root() {
    if (partial_.nodes().size() != 1) throw Error("internal: a reduction ended with more than its root");
    return partial_.blocks().front();
  }

  // All of a rank's blocks as one; the empty state where it has none.
  float* merged(float* own, std::size_t blocks) {
    if (blocks == 0) {
      own = scratch_.take(shape_.floats());
      kernels::cuda::clear_rows(own, shape_, stream_);
      return own;
    }
    std::vector<MergeStep> steps;
    for (std::size_t i = 1; i < blocks; ++i) steps.push_back({own, own + i * shape_.floats()});
    kernels::cuda::merge_blocks(steps, shape_, stream_);
    return own;
  }

  void copy(float* to, const float* from, std::size_t floats) {
    if (floats == 0) return;
    check(cudaMemcpyAsync(to, from, floats * sizeof(float), cudaMemcpyDeviceToDevice, stream_), "copy of states");
  }

  void allreduce(float* data, std::size_t count, ncclRedOp_t operation) {
    nccl_.done(ncclAllReduce(data, data, count, ncclFloat, operation, nccl_.get(), stream_), "ncclAllReduce");
    nccl_.settle("ncclAllReduce");
    context_.communicator.count_step();
  }

  Nccl& nccl_;
  Scratch& scratch_;
  const ReduceContext& context_;
  RowShape shape_;
  cudaStream_t stream_;
  DeviceNodes partial_;
};

class NcclReducer final : public DeviceReducer {
 public:
  void reduce(Strategy strategy, const plan::Schedule& schedule, const ReduceContext& context, StateShape shape,
              float* own, kernels::cuda::RankDevice& device, float* root) override {
    Communicator& comm = context.communicator;
    const kernels::cuda::UseDevice use(device.gpu());
    if (!nccl_.made()) nccl_.make(comm, device.gpu());
    nccl_.within(comm.deadline());
    try {
      const Event event;
      const auto stream = static_cast<cudaStream_t>(device.stream());
      NcclRun run(nccl_, scratch_, context, shape, stream);
      const float* result = run_strategy(run, strategy, schedule, own);
      check(cudaEventRecord(event.get(), stream), "event");
      nccl_.wait(event.get());
      device.fetch(root, result, shape.block_floats() * sizeof(float));
    } catch (const Failure& failure) {
      nccl_.abort();   // ends what waits on the GPU, on the other ranks too
      comm.barrier();  // says who is lost, the same on all survivors
      throw Error(fmt::format("NCCL failed though all ranks are there: {}", failure.what));
    }
  }

 private:
  class Event {
   public:
    Event() { check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "event"); }
    ~Event() { cudaEventDestroy(event_); }
    Event(const Event&) = delete;
    Event& operator=(const Event&) = delete;
    cudaEvent_t get() const { return event_; }

   private:
    cudaEvent_t event_ = nullptr;
  };

  static float* run_strategy(NcclRun& run, Strategy strategy, const plan::Schedule& schedule, float* own) {
    switch (strategy) {
      case Strategy::kPaper:
        return run.as_in_paper(own);
      case Strategy::kTwoPhase:
        return run.two_phases(own);
      case Strategy::kGather:
        return run.gather(own);
      default:
        return run.schedule(schedule, own);
    }
  }

  Nccl nccl_;
  Scratch scratch_;
};

}  // namespace

std::unique_ptr<DeviceReducer> nccl_reducer() { return std::make_unique<NcclReducer>(); }

}  // namespace parallel
}  // namespace treeattn
