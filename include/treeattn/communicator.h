// SPDX-License-Identifier: Apache-2.0
// Ranks that pass bytes to each other: threads of one process, MPI processes, processes connected by TCP, or one alone.
// The same calls on each, and none waits for ever: every call that depends on another rank has a deadline, and the
// error names who is missing.
//
//   auto world = treeattn::mpi_communicator();                       // one rank per process, under mpirun
//   treeattn::run_ranks(4, [](std::shared_ptr<treeattn::Communicator> world) { ... });   // one rank per thread
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace treeattn {

namespace comm {
class Transport;
struct Operation;
}  // namespace comm

using Seconds = std::chrono::duration<double>;
inline constexpr Seconds kDefaultDeadline{30.0};

// What a rank has sent to others. Counted per message handed to the transport, headers and roll calls not included.
struct Traffic {
  std::uint64_t messages = 0;
  std::uint64_t bytes = 0;
  std::uint64_t remote_messages = 0;  // of these, to a rank on another node
  std::uint64_t remote_bytes = 0;
  std::uint64_t steps = 0;  // rounds of communication, one after the other, also those this rank sat out
};

// lower[i] = reduce(lower[i], higher[i]) for `count` elements. Called with the side of the lower ranks first; need not
// commute. A rank where it throws must leave: it may not call the communicator again, and is lost to the others.
using ReduceFn = std::function<void(std::byte* lower, const std::byte* higher, std::size_t count)>;

// A message under way. Movable; destroying it gives the message up but not its buffer, which lives until it is safe.
// What is given up may still take place, if the other side is under way already. If it does not, it keeps its place all
// the same: the receive that it was for ends with LostRanks, and nothing sent later is taken for it.
class Request {
 public:
  Request();
  ~Request();
  Request(Request&&) noexcept;
  Request& operator=(Request&&) noexcept;
  bool pending() const { return operation_ != nullptr; }

 private:
  friend class Communicator;
  std::shared_ptr<comm::Operation> operation_;
};

// A group of ranks, seen from one of them. Not thread-safe: one thread of a rank at a time, in this group and in all
// that split() and shrink() made of it, which share its connections; with MPI, in all groups of the process. Calls
// marked collective must be made by all ranks of the group, in the same order.
//
// A rank that does not answer within the deadline, or that is known to be gone, makes the call throw LostRanks
// (treeattn/error.h), on every surviving rank that is inside a call or enters one later, with the same ranks named.
// After that only shrink(), broken(), lost() and the destructor may be called.
//
// Groups that were split from one another break together, also those that the lost rank is not in: the others of such a
// group may have thrown elsewhere and will not come. There LostRanks names no rank of the group; lost() of the group
// that had the rank does. Survivors shrink the outermost group and split it again.
//
// A call waits for about 0.6 of its deadline before it asks who is there, and answers are taken from ranks inside some
// call only. So let a deadline be well above the longest time a rank works between two calls. A rank that comes back
// too late finds itself among the lost; shrink() throws LostRanks there. A collective that throws has left the caller's
// memory as it was.
class Communicator {
 public:
  // For transports; users call the functions below this class.
  explicit Communicator(std::shared_ptr<comm::Transport> transport);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const;
  int size() const;
  // Which machine a rank is on: 0, 1, ... in the order of their lowest ranks.
  int node_of(int rank) const;
  const std::vector<int>& node_of_rank() const;  // [size] the same, of all
  int nodes() const;
  std::string_view transport() const;  // "self", "threads", "mpi" or "tcp"

  Seconds deadline() const;
  // Requires more than 0. The default of every call below that is given none.
  void set_deadline(Seconds deadline);

  // Point to point. Messages between two ranks arrive in the order they were sent; a receive must ask for exactly as
  // many bytes as were sent (Error otherwise). `owner` keeps the memory alive while the message is under way, even if
  // the call that waits for it throws; with no owner the caller must see to that. A rank may send to itself; that is
  // not counted as traffic, and a large send is done only when its receive is.
  Request send(int to, std::span<const std::byte> data, std::shared_ptr<const void> owner = nullptr);
  Request receive(int from, std::span<std::byte> data, std::shared_ptr<void> owner = nullptr);
  // The same on a channel of its own, for a call that all ranks make and that is made of messages, as those of this
  // library are. What is sent by hand may be under way during such a call: neither is taken for the other.
  Request send_in_call(int to, std::span<const std::byte> data, std::shared_ptr<const void> owner = nullptr);
  Request receive_in_call(int from, std::span<std::byte> data, std::shared_ptr<void> owner = nullptr);
  // Moves messages along; true once this one is done (then it is no longer pending). Never waits.
  bool test(Request& request);
  void wait(Request& request, std::optional<Seconds> deadline = {});
  void wait_all(std::span<Request> requests, std::optional<Seconds> deadline = {});

  // Collective. `elements` are data.size() / element_bytes; every rank gets the same bits, merged in the order of the
  // ranks along a binary tree: ceil(log2 size) rounds up, as many down, 2 (size - 1) messages of data.size() bytes.
  void allreduce(std::span<std::byte> data, std::size_t element_bytes, const ReduceFn& reduce,
                 std::optional<Seconds> deadline = {});
  // Collective. all [size, mine.size()]: what each rank gave, by rank. ceil(log2 size) rounds.
  void allgather(std::span<const std::byte> mine, std::span<std::byte> all, std::optional<Seconds> deadline = {});
  // Collective. Every rank must name the same root, which is not checked: a rank that takes itself for the root hears
  // of no other. Where they differ, ranks get different data, or wait for what nobody sends, and messages that are left
  // over are taken for those of later collectives. ceil(log2 size) rounds.
  void broadcast(std::span<std::byte> data, int root, std::optional<Seconds> deadline = {});
  // Collective: returns when all ranks have come.
  void barrier(std::optional<Seconds> deadline = {});
  // For schedules that are not one of these: counts a round.
  void count_step();
  // For what goes to another rank by another way than these: counts a message.
  void count_sent(int to, std::size_t bytes);

  // Collective. Ranks of equal color form a group, ordered by key, then by rank; a negative color joins none (null).
  std::shared_ptr<Communicator> split(int color, int key);
  // The group without its lost ranks, in the same order. To be called by every survivor, after LostRanks from this
  // group or one that breaks with it; waits for them all, so that they are in step. Ranks lost by then are left out as
  // well. Messages of the old group cannot reach the new one.
  std::shared_ptr<Communicator> shrink();
  // Whether this group can go on only by shrink().
  bool broken() const;
  // The lost ranks of this group; none until LostRanks has been thrown.
  const std::vector<int>& lost() const;

  // What this rank has sent through this communicator, since it was made or reset, added to what it was reset to.
  const Traffic& traffic() const;
  void reset_traffic(const Traffic& to = {});

 private:
  struct Impl;
  explicit Communicator(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// One rank alone.
std::shared_ptr<Communicator> self_communicator();

struct RankOptions {
  Seconds deadline = kDefaultDeadline;
  // The node of each rank, to test how several machines would be used on one; empty: as it is (MPI's shared memory
  // groups; for threads the NUMA nodes, where there is more than one). The environment variable TREEATTN_NODES, e.g.
  // "0,0,1,1", does the same.
  std::vector<int> nodes{};
  bool pin = true;  // threads: gives each rank its own cores, or several ranks one core when there are more ranks
};

// Calls body(communicator) on `ranks` threads, 1 to 4096, and returns when all have returned. A rank that returns or
// throws is gone for the others. Throws what the lowest rank threw that threw something other than LostRanks; else its
// LostRanks, if any rank let that escape.
void run_ranks(int ranks, const std::function<void(std::shared_ptr<Communicator>)>& body, RankOptions options = {});

// All MPI processes of this launch; initialises MPI unless that has been done, and finalises it at the end of the
// process in that case, when no rank was lost. Collective, without a deadline. Throws Unavailable in a build without
// MPI. To outlive a rank the launcher must let the others live (Open MPI: mpirun --enable-recovery).
std::shared_ptr<Communicator> mpi_communicator(RankOptions options = {});
// The same over a communicator of the caller's, given as a Fortran handle (MPI_Comm_c2f). MPI must outlive it.
// Throws InvalidArgument for what is none, such as MPI_COMM_NULL.
std::shared_ptr<Communicator> mpi_communicator(int fortran_handle, RankOptions options = {});
// Whether this build has MPI, and whether an MPI launcher started this process.
bool mpi_available();
bool launched_by_mpi();

// Which of the ranks that are connected by TCP this process (or thread) is, and where rank 0 listens for the others.
struct TcpPlace {
  int rank = 0;
  int size = 1;
  std::string address = "127.0.0.1";  // of rank 0: a name or a number
  int port = 0;
  // What tells the ranks of this run from those that an earlier one has left: any text, the same on all of them.
  std::string job{};
};

// All of them, as the environment says: RANK, WORLD_SIZE, MASTER_ADDR (127.0.0.1 unless set) and MASTER_PORT, which
// launchers such as torchrun set; where torchrun itself listens at that port (TORCHELASTIC_USE_AGENT_STORE), rank 0
// does at the next one. The job is TREEATTN_JOB, else TORCHELASTIC_RUN_ID (torchrun's "none" is no name), else
// SLURM_JOB_ID with SLURM_STEP_ID, else empty. Every two ranks get a connection; nothing is encrypted, and who knows
// the job is believed, so use it in a network you trust. What comes before it is asked for may take up half of the
// memory that is there now (256 MiB at least); then the rank that has sent the most of it is taken for gone.
// Collective: waits for all ranks, as long as the deadline; one that left meanwhile may come again. One of another job
// is sent away and told why, and the others are waited for. Throws Unavailable when they do not come, this one is of
// another job than rank 0, one is of a version that speaks otherwise, this process may open fewer files than there are
// ranks, or the environment says nothing; InvalidArgument when it says what cannot be.
std::shared_ptr<Communicator> tcp_communicator(RankOptions options = {});
std::shared_ptr<Communicator> tcp_communicator(const TcpPlace& place, RankOptions options = {});
// Whether the environment says so: RANK and WORLD_SIZE are set, and so is MASTER_PORT or MASTER_ADDR, or WORLD_SIZE is
// other than 1.
bool launched_by_tcp();

// Collective, for ranks that are processes; run_ranks() does it for threads. Those of one machine that may use the same
// cores, as launchers that bind none leave them, get each its own part of these: else the thread pools of all would pin
// their threads to the same ones. Holds the calling thread on its part and returns how many cores that has, or its part
// of the time that a control group gives them where that is less.
int take_own_cores(Communicator& communicator);

}  // namespace treeattn
