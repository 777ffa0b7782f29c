// SPDX-License-Identifier: Apache-2.0
// Pieces going round the ranks, whatever they hold: the moving part of Ring Attention.
//
// A rank sends its own pieces to its right neighbour, then passes on what comes from the left, up to what the right
// neighbour had itself. Pieces are worked on as they arrive, while the next ones are under way: communication hides
// behind computation as far as there is any.
#pragma once

#include <cstddef>
#include <vector>

#include "treeattn/communicator.h"

namespace treeattn::parallel {

// Pieces a share is cut into, at most: enough for the last of one to cost little, few enough to keep the kernels busy.
inline constexpr std::size_t kPiecesPerShare = 16;

// Where a rank stands. Neighbours on the ring are neighbours in the cluster.
class RingPlace {
 public:
  explicit RingPlace(const Communicator& communicator);

  // The rank so many places to the left.
  int before(int steps) const;
  int left() const { return before(1); }
  int right() const { return before(-1); }

 private:
  std::vector<int> ring_;  // ranks
  int place_ = 0;
};

// What goes round. Pieces that come in lie in slots until they have been worked on and sent on.
class RingLoad {
 public:
  virtual ~RingLoad() = default;
  // Start the messages of a piece: own pieces are numbered by themselves, incoming ones in the order they arrive.
  virtual std::vector<Request> send_own(std::size_t piece) = 0;
  virtual std::vector<Request> receive(std::size_t piece, std::size_t slot) = 0;
  virtual std::vector<Request> send(std::size_t piece, std::size_t slot) = 0;
  virtual void work_on_own(std::size_t piece) = 0;
  virtual void work_on(std::size_t piece, std::size_t slot) = 0;
};

struct RingPieces {
  std::size_t own = 0;
  std::vector<int> incoming;  // the rank each came from at first, in the order they arrive
  std::size_t most = 0;       // of one rank
  // Of these a rank needs: one more than a share has pieces. With fewer, everybody could wait for the right neighbour
  // to take a piece, and it for its own: my piece i is its piece i + my own share, and takes the slot of one that went
  // before piece i.
  std::size_t slots() const { return incoming.size() < most + 1 ? incoming.size() : most + 1; }
};

// Collective. Works on every piece there is, this rank's own first.
void pass_round(Communicator& communicator, const RingPlace& place, const RingPieces& pieces, RingLoad& load);

}  // namespace treeattn::parallel
