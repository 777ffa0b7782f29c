// SPDX-License-Identifier: Apache-2.0
// Ranks that are MPI processes. Only non-blocking messages: a call of MPI that waits may wait for ever when a rank is
// lost. Making the communicator is the exception: it needs all ranks and has no deadline.
#include <fmt/format.h>
#include <mpi.h>
#include <sched.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/round_up.h"
#include "comm/group.h"
#include "comm/mpi_blocks.h"
#include "comm/topology.h"
#include "comm/transport.h"
#include "treeattn/communicator.h"
#include "treeattn/error.h"

namespace treeattn::comm {
namespace {

constexpr int kNoteTag = 0;  // on a communicator of their own

// How long a waiting rank polls; how long it lets others have its core between polls; how long it then sleeps.
constexpr int kPolls = 8;
constexpr std::chrono::milliseconds kYieldFor{1};
constexpr std::chrono::microseconds kNap{50};

// Whether MPI is SimGrid's, which runs all ranks in turn in one thread, on a clock of its own.
#ifdef TREEATTN_SMPI
constexpr bool kSimulated = true;
#else
constexpr bool kSimulated = false;
#endif

void check(int code, const char* call) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  MPI_Error_string(code, text, &length);
  throw Error(fmt::format("{}: {}", call, std::string_view(text, static_cast<std::size_t>(length))));
}

struct MpiOperation final : Operation {
  bool receiving = false;
  int other = 0;
  bool failed = false;      // it will never be done
  bool wrong_size = false;  // of the message that came
  std::size_t bytes = 0;
  std::vector<MPI_Request> pieces;  // one; more in a simulation, where the size of a message is an int
  std::size_t done = 0;             // pieces

  // The bytes before a piece. Pieces are equal, but that some have a byte more: on a link that is shared fairly a
  // message gets the same share from its beginning to its end.
  std::size_t begin_of(std::size_t piece) const {
    return piece * (bytes / pieces.size()) + std::min(piece, bytes % pieces.size());
  }
  std::size_t bytes_of(std::size_t piece) const { return begin_of(piece + 1) - begin_of(piece); }
};

// So many bytes as MPI counts them, in int: those of a long message are blocks and a rest, in a type of its own. So
// every message is one for MPI, and a receive of another size takes that one and no other.
class Length {
 public:
  Length(std::size_t bytes, std::size_t largest_block) {
    if (bytes <= largest_block) {
      count_ = static_cast<int>(bytes);
      return;
    }
    MPI_Datatype block = MPI_DATATYPE_NULL;
    check(MPI_Type_contiguous(static_cast<int>(largest_block), MPI_BYTE, &block), "MPI_Type_contiguous");
    const std::array<int, 2> counts = {static_cast<int>(bytes / largest_block),
                                       static_cast<int>(bytes % largest_block)};
    const std::array<MPI_Aint, 2> places = {0, static_cast<MPI_Aint>(bytes - bytes % largest_block)};
    const std::array<MPI_Datatype, 2> types = {block, MPI_BYTE};
    check(MPI_Type_create_struct(2, counts.data(), places.data(), types.data(), &type_), "MPI_Type_create_struct");
    check(MPI_Type_commit(&type_), "MPI_Type_commit");
    MPI_Type_free(&block);
  }
  // Messages under way keep what they need of it.
  ~Length() {
    if (type_ != MPI_BYTE) MPI_Type_free(&type_);
  }
  Length(const Length&) = delete;
  Length& operator=(const Length&) = delete;

  int count() const { return count_; }
  MPI_Datatype type() const { return type_; }

 private:
  int count_ = 1;
  MPI_Datatype type_ = MPI_BYTE;
};

// MPI is one thing of the whole process, and so is this. Never destroyed: the other side of a message that was given up
// may touch its memory until the process ends.
struct Process {
  bool finalize = false;
  std::vector<std::shared_ptr<MpiOperation>> given_up;
};

Process& process() {
  static Process& one = *new Process;
  return one;
}

bool is_finalized() {
  int finalized = 0;
  MPI_Finalized(&finalized);
  return finalized != 0;
}

void initialize() {
  if (is_finalized()) throw Error("mpi_communicator: MPI has been finalised in this process, and starts only once");
  int initialized = 0;
  MPI_Initialized(&initialized);
  if (initialized != 0) return;
  int provided = 0;
  check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &provided), "MPI_Init_thread");
  process().finalize = true;
  // At the end of the process and not of the communicator: MPI cannot start twice. MPI_Finalize waits for all ranks, so
  // after a loss it is left out; the launcher may then report that processes ended without it.
  std::atexit([] {
    if (process().finalize && !is_finalized()) MPI_Finalize();
  });
}

// Number of the lowest rank on the same machine, for each rank.
std::vector<int> shared_memory_nodes(MPI_Comm communicator) {
  int rank = 0;
  int size = 0;
  check(MPI_Comm_rank(communicator, &rank), "MPI_Comm_rank");
  check(MPI_Comm_size(communicator, &size), "MPI_Comm_size");
  MPI_Comm local = MPI_COMM_NULL;
  check(MPI_Comm_split_type(communicator, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &local), "MPI_Comm_split_type");
  int lowest = rank;
  check(MPI_Allreduce(&rank, &lowest, 1, MPI_INT, MPI_MIN, local), "MPI_Allreduce");
  MPI_Comm_free(&local);
  std::vector<int> nodes(static_cast<std::size_t>(size));
  check(MPI_Allgather(&lowest, 1, MPI_INT, nodes.data(), 1, MPI_INT, communicator), "MPI_Allgather");
  return nodes;
}

class MpiTransport final : public Transport {
 public:
  MpiTransport(MPI_Comm parent, const std::vector<int>& nodes, std::size_t largest_block)
      : largest_block_(largest_block) {
    if constexpr (kSimulated) {
      // Nobody else uses it and no notes are sent; a copy would hold a list of all ranks, on every one of them.
      data_ = notes_ = parent;
    } else {
      check(MPI_Comm_dup(parent, &data_), "MPI_Comm_dup");
      check(MPI_Comm_dup(parent, &notes_), "MPI_Comm_dup");
    }
    MPI_Comm_set_errhandler(data_, MPI_ERRORS_RETURN);
    MPI_Comm_set_errhandler(notes_, MPI_ERRORS_RETURN);
    check(MPI_Comm_rank(data_, &rank_), "MPI_Comm_rank");
    int size = 0;
    check(MPI_Comm_size(data_, &size), "MPI_Comm_size");
    // Who has been told the nodes need not find out; with thousands of ranks that takes its time.
    const std::vector<int> unknown(static_cast<std::size_t>(size), 0);
    nodes_of_ranks_ = choose_nodes(nodes, nodes.empty() ? shared_memory_nodes(data_) : unknown);
    gone_.assign(nodes_of_ranks_.size(), false);
  }

  ~MpiTransport() override {
    if (broken_ || is_finalized()) {
      for (auto& note : outgoing_) keep(std::move(note));
      if (incoming_ != nullptr) keep(std::move(incoming_));
      return;
    }
    if constexpr (kSimulated) return;
    MPI_Comm_free(&data_);
    MPI_Comm_free(&notes_);
  }

  std::string_view name() const override { return "mpi"; }
  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(nodes_of_ranks_.size()); }
  const std::vector<int>& nodes() const override { return nodes_of_ranks_; }

  std::shared_ptr<Operation> send(int to, int tag, std::span<const std::byte> data,
                                  std::shared_ptr<const void> owner) override {
    return start(false, to, data.size(), std::move(owner),
                 [&](std::size_t at, const Length& length, MPI_Request* request) {
                   return MPI_Isend(data.data() + at, length.count(), length.type(), to, tag, data_, request);
                 });
  }

  std::shared_ptr<Operation> receive(int from, int tag, std::span<std::byte> data,
                                     std::shared_ptr<const void> owner) override {
    return start(true, from, data.size(), std::move(owner),
                 [&](std::size_t at, const Length& length, MPI_Request* request) {
                   return MPI_Irecv(data.data() + at, length.count(), length.type(), from, tag, data_, request);
                 });
  }

  bool test(Operation& operation) override {
    auto& message = static_cast<MpiOperation&>(operation);
    if constexpr (kSimulated) return is_over_or_awaited(message);
    if (message.wrong_size) throw_wrong_size(message);
    if (message.failed) return false;
    for (; message.done < message.pieces.size(); ++message.done) {
      int flag = 0;
      MPI_Status status;
      const int code = MPI_Test(&message.pieces[message.done], &flag, &status);
      if (code != MPI_SUCCESS) return fail(message, code);
      if (flag == 0) return false;
      if (message.receiving) check_size(message, status);
    }
    return true;
  }

  void abandon(std::shared_ptr<Operation> operation) override {
    if (is_finalized()) return;
    auto message = std::static_pointer_cast<MpiOperation>(std::move(operation));
    if (message->receiving && !message->wrong_size) {
      for (std::size_t i = message->done; i < message->pieces.size(); ++i) {
        if (message->pieces[i] != MPI_REQUEST_NULL) MPI_Cancel(&message->pieces[i]);
      }
    }
    std::erase_if(process().given_up, [](const auto& earlier) { return is_over(*earlier); });
    if (!is_over(*message)) keep(std::move(message));
  }

  void forget(int, int) override {}  // what came is MPI's

  void send_note(int to, std::vector<std::byte> note) override {
    std::erase_if(outgoing_, [](const auto& earlier) { return is_over(*earlier); });
    auto owner = std::make_shared<std::vector<std::byte>>(std::move(note));
    auto operation =
        start(false, to, owner->size(), owner, [&](std::size_t, const Length& length, MPI_Request* request) {
          return MPI_Isend(owner->data(), length.count(), length.type(), to, kNoteTag, notes_, request);
        });
    outgoing_.push_back(std::move(operation));
  }

  std::optional<ReceivedNote> next_note() override {
    if constexpr (kSimulated) return {};  // notes are about lost ranks, and to look for one is not cheap there
    int flag = 0;
    MPI_Status status;
    if (incoming_ == nullptr) {
      if (MPI_Iprobe(MPI_ANY_SOURCE, kNoteTag, notes_, &flag, &status) != MPI_SUCCESS || flag == 0) return {};
      int bytes = 0;
      MPI_Get_count(&status, MPI_BYTE, &bytes);
      auto buffer = std::make_shared<std::vector<std::byte>>(static_cast<std::size_t>(bytes));
      const int from = status.MPI_SOURCE;
      incoming_ =
          start(true, from, buffer->size(), buffer, [&](std::size_t, const Length& length, MPI_Request* request) {
            return MPI_Irecv(buffer->data(), length.count(), length.type(), from, kNoteTag, notes_, request);
          });
      note_ = std::move(buffer);
    }
    // Of one that is too long to come along with its header, the rest may be on its way for ever: never wait for it.
    if (!test(*incoming_)) {
      if (incoming_->failed) incoming_.reset();  // its sender is gone; others have more to say
      return {};
    }
    const int from = std::exchange(incoming_, nullptr)->other;
    return ReceivedNote{from, std::move(*std::exchange(note_, nullptr))};
  }

  // Where ranks share cores, one that polls keeps from working those it waits for.
  void pause(int idle) override {
    if constexpr (kSimulated) return wait_for_awaited();
    const auto now = std::chrono::steady_clock::now();
    if (idle == 0) idle_since_ = now;
    if (idle < kPolls) return;
    if (now - idle_since_ < kYieldFor) {
      ::sched_yield();
    } else {
      std::this_thread::sleep_for(kNap);
    }
  }

  bool gone(int rank) const override { return gone_[static_cast<std::size_t>(rank)]; }

  void mark_lost(const std::vector<int>&) override {
    broken_ = true;
    process().finalize = false;
  }

 private:
  template <class Post>
  std::shared_ptr<MpiOperation> start(bool receiving, int other, std::size_t bytes, std::shared_ptr<const void> owner,
                                      const Post& post) {
    auto message = std::make_shared<MpiOperation>();
    message->owner = std::move(owner);
    message->receiving = receiving;
    message->other = other;
    message->bytes = bytes;
    const std::size_t blocks = std::max<std::size_t>(1, base::divide_up(bytes, largest_block_));
    message->pieces.assign(kSimulated ? blocks : 1, MPI_REQUEST_NULL);
    for (std::size_t i = 0; i < message->pieces.size(); ++i) {
      const int code = post(message->begin_of(i), Length(message->bytes_of(i), largest_block_), &message->pieces[i]);
      if (code != MPI_SUCCESS) {
        fail(*message, code);
        break;
      }
    }
    return message;
  }

  // A message that did not fit is a mistake of the program; of any other error the other side is taken to be the cause.
  bool fail(MpiOperation& message, int code) {
    message.failed = true;
    int error_class = MPI_SUCCESS;
    MPI_Error_class(code, &error_class);
    if (error_class == MPI_ERR_TRUNCATE) refuse_size(message);
    gone_[static_cast<std::size_t>(message.other)] = true;
    return false;
  }

  static std::size_t bytes_that_came(const MPI_Status& status) {
#ifdef TREEATTN_SMPI
    int bytes = 0;
    MPI_Get_count(&status, MPI_BYTE, &bytes);
#else
    MPI_Count bytes = 0;
    MPI_Get_elements_x(&status, MPI_BYTE, &bytes);
#endif
    return static_cast<std::size_t>(bytes);
  }

  void check_size(MpiOperation& message, const MPI_Status& status) {
    if (bytes_that_came(status) != message.bytes_of(message.done)) refuse_size(message);
  }

  // Waiting in a simulation. Polling takes no time there, so that nothing would ever arrive: test() only says what has
  // been waited for, and pause() waits, by MPI itself, for the message last asked for. No rank is lost in a simulation,
  // and whoever waits for several messages waits for them all, so the order does not matter.
  bool is_over_or_awaited(MpiOperation& message) {
    const bool over = message.done == message.pieces.size();
    awaited_ = over ? nullptr : &message;
    return over;
  }

  void wait_for_awaited() {
    if (awaited_ == nullptr) return;
    MpiOperation& message = *std::exchange(awaited_, nullptr);
    MPI_Status status;
    check(MPI_Wait(&message.pieces[message.done], &status), "MPI_Wait");
    if (message.receiving) check_size(message, status);
    ++message.done;
  }

  [[noreturn]] static void refuse_size(MpiOperation& message) {
    message.wrong_size = true;
    throw_wrong_size(message);
  }

  [[noreturn]] static void throw_wrong_size(const MpiOperation& message) {
    throw Error(
        fmt::format("receive of {} bytes met a message of another size from transport rank {}; accepted: the "
                    "size that was sent",
                    message.bytes, message.other));
  }

  static bool is_over(MpiOperation& message) {
    for (; message.done < message.pieces.size(); ++message.done) {
      int flag = 0;
      if (MPI_Test(&message.pieces[message.done], &flag, MPI_STATUS_IGNORE) == MPI_SUCCESS && flag == 0) return false;
    }
    return true;
  }

  static void keep(std::shared_ptr<MpiOperation> message) { process().given_up.push_back(std::move(message)); }

  MPI_Comm data_ = MPI_COMM_NULL;
  MPI_Comm notes_ = MPI_COMM_NULL;
  std::size_t largest_block_;
  int rank_ = 0;
  bool broken_ = false;
  std::vector<int> nodes_of_ranks_;
  std::vector<bool> gone_;
  std::vector<std::shared_ptr<MpiOperation>> outgoing_;  // notes
  std::shared_ptr<MpiOperation> incoming_;               // a note, into note_
  std::shared_ptr<std::vector<std::byte>> note_;
  std::chrono::steady_clock::time_point idle_since_;
  MpiOperation* awaited_ = nullptr;  // good until the next call
};

std::shared_ptr<Communicator> make(MPI_Comm parent, const RankOptions& options,
                                   std::size_t largest_block = kLargestBlock) {
  checked(options.deadline);  // before all ranks are needed
  auto communicator =
      std::make_shared<Communicator>(std::make_shared<MpiTransport>(parent, options.nodes, largest_block));
  communicator->set_deadline(options.deadline);
  return communicator;
}

// What the handle stands for. MPI ends the process where that is nothing, unless it is told to return.
MPI_Comm checked_handle(int handle) {
  MPI_Errhandler before{};
  check(MPI_Comm_get_errhandler(MPI_COMM_WORLD, &before), "MPI_Comm_get_errhandler");
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);  // its errors are those of what is no communicator
  const MPI_Comm communicator = MPI_Comm_f2c(handle);
  int between_groups = 0;
  const bool known = communicator != MPI_COMM_NULL && MPI_Comm_test_inter(communicator, &between_groups) == MPI_SUCCESS;
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, before);
  MPI_Errhandler_free(&before);
  base::require(known && between_groups == 0,
                "fortran_handle = {}; accepted: MPI_Comm_c2f() of a communicator of one group", handle);
  return communicator;
}

}  // namespace

std::shared_ptr<Communicator> mpi_communicator_of_blocks(std::size_t largest_block) {
  initialize();
  return make(MPI_COMM_WORLD, {}, largest_block);
}

}  // namespace treeattn::comm

namespace treeattn {

std::shared_ptr<Communicator> mpi_communicator(RankOptions options) {
  comm::initialize();
  return comm::make(MPI_COMM_WORLD, options);
}

std::shared_ptr<Communicator> mpi_communicator(int fortran_handle, RankOptions options) {
  comm::initialize();
  return comm::make(comm::checked_handle(fortran_handle), options);
}

bool mpi_available() { return true; }

}  // namespace treeattn
