// SPDX-License-Identifier: Apache-2.0
// K and V going round the ranks. Every rank's share is cut into pieces of whole branches, which ring_pass.h moves and
// which are handed out as they arrive.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "parallel/kv_store.h"
#include "parallel/page_memory.h"
#include "parallel/ring_pass.h"
#include "plan/node_set.h"
#include "treeattn/communicator.h"

namespace treeattn::parallel {

// Some branches of one rank's share, for the sequences of a call.
struct RingPiece {
  struct Page {
    std::size_t sequence = 0;  // place among the sequences of the call
    std::int64_t chunk = 0;
    std::int64_t tokens = 0;
  };
  int rank = 0;
  plan::NodeSet nodes;
  std::vector<Page> pages;
};

class KvRing {
 public:
  // What a piece is worked on with: keys and values, and the part of the tree they are.
  using Body = std::function<void(const KvBatch& batch, const plan::NodeSet& nodes)>;

  // Requires: every rank makes one for the same call, and the cache outlives it unchanged. repeated: the same is about
  // to be asked for again, so memory is kept for that; on a GPU it is anyway.
  KvRing(const KvStore& store, int layer, std::span<const SequenceId> sequences, bool repeated = false);

  // Collective. Calls body for every piece there is, this rank's own first. Holds as much memory as the largest share.
  void pass_round(const Body& body);
  // Collective. Collects everything, then calls body once, for the whole tree. Holds all of K and V.
  void collect(const Body& body);

 private:
  class Load;

  std::vector<RingPiece> pieces_of(int rank) const;
  std::vector<Request> receive(const RingPiece& piece, const std::shared_ptr<PageMemory>& memory,
                               std::size_t first_page);
  std::vector<Request> send(const RingPiece& piece, const std::shared_ptr<PageMemory>& memory, std::size_t first_page);
  std::vector<Request> send_own(const RingPiece& piece);
  std::shared_ptr<PageMemory> make_memory(std::size_t pages) const;
  void copy_own(const RingPiece& piece, const PageMemory& memory, std::size_t first_page) const;
  void pass_pages(std::span<const RingPiece> all, const std::shared_ptr<PageMemory>& memory);
  void take_pages(std::span<const RingPiece> all, const PageMemory& memory);
  PageWindow::Pages own_pages(const RingPiece& piece) const;
  PageWindow::Pages pages_in(const PageMemory& memory, const RingPiece& piece, std::size_t first_page) const;
  void pass_through_window(const Body& body);
  void work(std::span<const RingPiece> pieces, const plan::NodeSet& nodes, const PageMemory& memory,
            std::size_t first_page, const Body& body) const;

  const KvStore& store_;
  Communicator& comm_;
  int layer_;
  std::vector<SequenceId> sequences_;
  std::vector<std::int64_t> lengths_;
  RingPlace place_;
  std::vector<RingPiece> own_;
  std::vector<RingPiece> incoming_;  // in the order they arrive
  std::size_t largest_piece_ = 0;    // pages
  std::size_t most_pieces_ = 0;      // of one rank
  const bool repeated_;
  PageWindow* window_ = nullptr;  // by which pages go where messages do not reach
  bool reached_;                  // pages come to the memory that the cache is in, not by way of the host
};

}  // namespace treeattn::parallel
