// SPDX-License-Identifier: Apache-2.0
// Ranks that are MPI processes. Only non-blocking messages: a call of MPI that waits may wait for ever when a rank is
// lost. Making the communicator is the exception: it needs all ranks and has no deadline.
#include <fmt/format.h>
#include <mpi.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "comm/group.h"
#include "comm/mpi_pieces.h"
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
  int tag = 0;
  bool failed = false;      // it will never be done
  bool wrong_size = false;  // of the message that came
  std::size_t bytes = 0;
  std::vector<MPI_Request> pieces;
  std::size_t done = 0;  // pieces

  // Each side cuts the size that it knows. By the size of its first piece, a message tells how many there are: longer
  // than all that goes whole, and by so many bytes as pieces follow. A receive that knows another number meets another
  // size than its own at once. In a simulation the pieces are equal instead: on a link that is shared fairly a message
  // gets the same share from its beginning to its end.
  std::size_t first_bytes() const {
    if (pieces.size() == 1) return bytes;
    return kSimulated ? (bytes + pieces.size() - 1) / pieces.size() : largest_piece + pieces.size() - 1;
  }
  // The bytes before a piece. Those after the first are equal, but that some have a byte more.
  std::size_t begin_of(std::size_t piece) const {
    if (piece == 0) return 0;
    const std::size_t first = first_bytes(), others = std::max<std::size_t>(1, pieces.size() - 1);
    return first + (piece - 1) * ((bytes - first) / others) + std::min(piece - 1, (bytes - first) % others);
  }
  int bytes_of(std::size_t piece) const { return static_cast<int>(begin_of(piece + 1) - begin_of(piece)); }
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
  MpiTransport(MPI_Comm parent, const std::vector<int>& nodes) {
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
    return start(false, to, tag, data.size(), std::move(owner), [&](std::size_t at, int bytes, MPI_Request* request) {
      return MPI_Isend(data.data() + at, bytes, MPI_BYTE, to, tag, data_, request);
    });
  }

  std::shared_ptr<Operation> receive(int from, int tag, std::span<std::byte> data,
                                     std::shared_ptr<const void> owner) override {
    return start(true, from, tag, data.size(), std::move(owner), [&](std::size_t at, int bytes, MPI_Request* request) {
      return MPI_Irecv(data.data() + at, bytes, MPI_BYTE, from, tag, data_, request);
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
      if (code != MPI_SUCCESS) return fail(message, code, &status);
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

  void send_note(int to, std::vector<std::byte> note) override {
    std::erase_if(outgoing_, [](const auto& earlier) { return is_over(*earlier); });
    auto owner = std::make_shared<std::vector<std::byte>>(std::move(note));
    auto operation =
        start(false, to, kNoteTag, owner->size(), owner, [&](std::size_t, int bytes, MPI_Request* request) {
          return MPI_Isend(owner->data(), bytes, MPI_BYTE, to, kNoteTag, notes_, request);
        });
    outgoing_.push_back(std::move(operation));
  }

  std::optional<std::vector<std::byte>> next_note() override {
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
          start(true, from, kNoteTag, buffer->size(), buffer, [&](std::size_t, int count, MPI_Request* request) {
            return MPI_Irecv(buffer->data(), count, MPI_BYTE, from, kNoteTag, notes_, request);
          });
      note_ = std::move(buffer);
    }
    // Of one that is too long to come along with its header, the rest may be on its way for ever: never wait for it.
    if (!test(*incoming_)) {
      if (incoming_->failed) incoming_.reset();  // its sender is gone; others have more to say
      return {};
    }
    incoming_.reset();
    return std::move(*std::exchange(note_, nullptr));
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

  void mark_broken() override {
    broken_ = true;
    process().finalize = false;
  }

 private:
  template <class Post>
  std::shared_ptr<MpiOperation> start(bool receiving, int other, int tag, std::size_t bytes,
                                      std::shared_ptr<const void> owner, const Post& post) {
    auto message = std::make_shared<MpiOperation>();
    message->owner = std::move(owner);
    message->receiving = receiving;
    message->other = other;
    message->tag = tag;
    message->bytes = bytes;
    message->pieces.assign(std::max<std::size_t>(1, (bytes + largest_piece - 1) / largest_piece), MPI_REQUEST_NULL);
    for (std::size_t i = 0; i < message->pieces.size(); ++i) {
      const int code = post(message->begin_of(i), message->bytes_of(i), &message->pieces[i]);
      if (code != MPI_SUCCESS) {
        fail(*message, code);
        break;
      }
    }
    return message;
  }

  // A message that did not fit is a mistake of the program; of any other error the other side is taken to be the cause.
  bool fail(MpiOperation& message, int code, const MPI_Status* status = nullptr) {
    message.failed = true;
    int error_class = MPI_SUCCESS;
    MPI_Error_class(code, &error_class);
    if (error_class == MPI_ERR_TRUNCATE && status) refuse_size(message, *status);
    gone_[static_cast<std::size_t>(message.other)] = true;
    return false;
  }

  static std::size_t bytes_that_came(const MPI_Status& status) {
    int bytes = 0;
    MPI_Get_count(&status, MPI_BYTE, &bytes);
    return static_cast<std::size_t>(std::max(0, bytes));
  }

  void check_size(MpiOperation& message, const MPI_Status& status) {
    const auto expected = static_cast<std::size_t>(message.bytes_of(message.done));
    if (bytes_that_came(status) != expected) refuse_size(message, status);
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

  [[noreturn]] void refuse_size(MpiOperation& message, const MPI_Status& status) {
    message.wrong_size = true;
    if constexpr (!kSimulated) take_rest(message, status);
    throw_wrong_size(message);
  }

  // The pieces that follow a refused one must not be taken for the next message. After the first piece there are as
  // many as that tells, by its whole size (which Open MPI knows also of a message that did not fit); after another one
  // as many as this receive has. Receives of nothing are for those that it has not. Those that it has too many have
  // taken what came meanwhile.
  void take_rest(MpiOperation& message, const MPI_Status& status) {
    if (message.done > 0) return;
    const std::size_t first = bytes_that_came(status), own = message.pieces.size() - 1;
    const std::size_t coming = first > largest_piece ? first - largest_piece : 0;
    for (std::size_t i = coming; i < own; ++i) MPI_Cancel(&message.pieces[i + 1]);
    message.pieces.resize(1 + std::max(own, coming), MPI_REQUEST_NULL);
    for (std::size_t i = own; i < coming; ++i) {
      MPI_Irecv(nullptr, 0, MPI_BYTE, message.other, message.tag, data_, &message.pieces[i + 1]);
    }
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

std::shared_ptr<Communicator> make(MPI_Comm parent, const RankOptions& options) {
  checked(options.deadline);  // before all ranks are needed
  auto communicator = std::make_shared<Communicator>(std::make_shared<MpiTransport>(parent, options.nodes));
  communicator->set_deadline(options.deadline);
  return communicator;
}

}  // namespace
}  // namespace treeattn::comm

namespace treeattn {

std::shared_ptr<Communicator> mpi_communicator(RankOptions options) {
  comm::initialize();
  return comm::make(MPI_COMM_WORLD, options);
}

std::shared_ptr<Communicator> mpi_communicator(int fortran_handle, RankOptions options) {
  comm::initialize();
  return comm::make(MPI_Comm_f2c(fortran_handle), options);
}

bool mpi_available() { return true; }

}  // namespace treeattn
