// SPDX-License-Identifier: Apache-2.0
#include "parallel/kv_ring.h"

#include <algorithm>
#include <exception>
#include <iterator>
#include <utility>

#include "base/round_up.h"
#include "plan/tree_order.h"

namespace treeattn::parallel {

namespace {

// The four arrays of each page of a piece as bytes in use, one after the other: what travels. page_of(page) says where
// a page lies.
template <class PageOf>
PageWindow::Pages pages_of(const RingPiece& piece, const TokenBytes& bytes, const PageOf& page_of) {
  PageWindow::Pages out;
  for (const RingPiece::Page& page : piece.pages) {
    const ChunkMemory at = page_of(page);
    const auto tokens = static_cast<std::size_t>(at.tokens);
    out.emplace_back(at.k, tokens * bytes.k);
    out.emplace_back(at.v, tokens * bytes.v);
    if (at.k_scales) out.emplace_back(reinterpret_cast<std::byte*>(at.k_scales), tokens * bytes.k_scales);
    if (at.v_scales) out.emplace_back(reinterpret_cast<std::byte*>(at.v_scales), tokens * bytes.v_scales);
  }
  return out;
}

// A message for each: start(bytes).
template <class Start>
std::vector<Request> started(const PageWindow::Pages& pages, const Start& start) {
  std::vector<Request> requests;
  for (const std::span<std::byte> bytes : pages) requests.push_back(start(bytes));
  return requests;
}

// A call that throws gives messages up.
class ForgetIfThrown {
 public:
  explicit ForgetIfThrown(KvMemory& memory) : memory_(memory) {}
  ~ForgetIfThrown() {
    if (std::uncaught_exceptions() > before_) memory_.forget_workspaces();
  }
  ForgetIfThrown(const ForgetIfThrown&) = delete;
  ForgetIfThrown& operator=(const ForgetIfThrown&) = delete;

 private:
  KvMemory& memory_;
  const int before_ = std::uncaught_exceptions();
};

}  // namespace

// The pieces on their way: pages of the cache, and slots of one piece each.
class KvRing::Load final : public RingLoad {
 public:
  Load(KvRing& ring, std::size_t slots, const Body& body)
      : ring_(ring),
        body_(body),
        own_(ring.store_.batch(ring.layer_, ring.sequences_)),
        memory_(ring.make_memory(slots * ring.largest_piece_)) {}

  std::vector<Request> send_own(std::size_t piece) override { return ring_.send_own(ring_.own_[piece]); }
  std::vector<Request> receive(std::size_t piece, std::size_t slot) override {
    return ring_.receive(ring_.incoming_[piece], memory_, first_page(slot));
  }
  std::vector<Request> send(std::size_t piece, std::size_t slot) override {
    return ring_.send(ring_.incoming_[piece], memory_, first_page(slot));
  }
  void work_on_own(std::size_t piece) override {
    if (!ring_.own_[piece].nodes.empty()) body_(own_, ring_.own_[piece].nodes);
  }
  void work_on(std::size_t piece, std::size_t slot) override {
    const RingPiece& incoming = ring_.incoming_[piece];
    ring_.work({&incoming, 1}, incoming.nodes, *memory_, first_page(slot), body_);
  }
  // Where an incoming piece lies.
  PageWindow::Pages pages(std::size_t piece, std::size_t slot) const {
    return ring_.pages_in(*memory_, ring_.incoming_[piece], first_page(slot));
  }

 private:
  std::size_t first_page(std::size_t slot) const { return slot * ring_.largest_piece_; }

  KvRing& ring_;
  const Body& body_;
  const KvBatch own_;
  const std::shared_ptr<PageMemory> memory_;
};

KvRing::KvRing(const KvStore& store, int layer, std::span<const SequenceId> sequences, bool repeated)
    : store_(store),
      comm_(*store.communicator()),
      layer_(layer),
      sequences_(sequences.begin(), sequences.end()),
      place_(comm_),
      repeated_(repeated),
      window_(comm_.size() > 1 ? store.page_window() : nullptr),
      // What threads send may lie on a GPU (comm/far_memory.h); one rank alone sends nothing.
      reached_(window_ != nullptr || store.device() == nullptr || comm_.transport() == "threads" ||
               comm_.transport() == "self") {
  store.pool().backend().finish();  // what others are about to read, and what still reads the workspace
  for (const SequenceId id : sequences_) lengths_.push_back(store.length(id));
  own_ = pieces_of(comm_.rank());
  most_pieces_ = own_.size();
  for (int step = 1; step < comm_.size(); ++step) {
    std::vector<RingPiece> pieces = pieces_of(place_.before(step));
    most_pieces_ = std::max(most_pieces_, pieces.size());
    std::move(pieces.begin(), pieces.end(), std::back_inserter(incoming_));
  }
  for (const RingPiece& piece : incoming_) largest_piece_ = std::max(largest_piece_, piece.pages.size());
}

// The same on every rank: it follows from shares and lengths alone. Pieces have about as many pages each; branches
// without a token go with their neighbours. A rank without branches has one piece of nothing, so that what comes from
// the left one turn can go to the right in the next.
std::vector<RingPiece> KvRing::pieces_of(int rank) const {
  const ReductionOrder& order = store_.config().order;
  std::vector<std::vector<RingPiece::Page>> pages_of_leaf;
  std::size_t all_pages = 0;
  const std::vector<int> leaves = store_.shares().leaves_of(rank);
  for (const int leaf : leaves) {
    auto& pages = pages_of_leaf.emplace_back();
    for (std::size_t s = 0; s < sequences_.size(); ++s) {
      const std::int64_t chunks = plan::chunk_count(order, lengths_[s]);
      for (std::int64_t c = plan::first_chunk(order, leaf, 0); c < chunks; c = plan::next_chunk(order, leaf, c)) {
        pages.push_back({s, c, plan::tokens_in_chunk(order, lengths_[s], c)});
      }
    }
    all_pages += pages.size();
  }
  const std::size_t wanted = std::max<std::size_t>(1, base::divide_up(all_pages, kPiecesPerShare));
  std::vector<RingPiece> pieces = {{rank, {}, {}}};
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    const bool full = pieces.back().pages.size() >= wanted;
    if (full && !pages_of_leaf[i].empty()) pieces.push_back({rank, {}, {}});
    RingPiece& piece = pieces.back();
    piece.nodes = plan::unite(piece.nodes, {{0, leaves[i]}});
    piece.pages.insert(piece.pages.end(), pages_of_leaf[i].begin(), pages_of_leaf[i].end());
  }
  return pieces;
}

PageWindow::Pages KvRing::own_pages(const RingPiece& piece) const {
  return pages_of(piece, token_bytes(store_.config()), [&](const RingPiece::Page& page) {
    return store_.chunk(layer_, sequences_[page.sequence], page.chunk);
  });
}

PageWindow::Pages KvRing::pages_in(const PageMemory& memory, const RingPiece& piece, std::size_t first_page) const {
  return pages_of(piece, token_bytes(store_.config()),
                  [&](const RingPiece::Page& page) { return memory.page(first_page++, page.tokens); });
}

std::vector<Request> KvRing::receive(const RingPiece& piece, const std::shared_ptr<PageMemory>& memory,
                                     std::size_t first_page) {
  return started(pages_in(*memory, piece, first_page),
                 [&](std::span<std::byte> bytes) { return comm_.receive_in_call(place_.left(), bytes, memory); });
}

std::vector<Request> KvRing::send(const RingPiece& piece, const std::shared_ptr<PageMemory>& memory,
                                  std::size_t first_page) {
  return started(pages_in(*memory, piece, first_page),
                 [&](std::span<std::byte> bytes) { return comm_.send_in_call(place_.right(), bytes, memory); });
}

// From where the pages lie, or, where messages cannot reach that, from a copy.
std::vector<Request> KvRing::send_own(const RingPiece& piece) {
  if (!reached_) {
    const auto memory = make_memory(piece.pages.size());
    copy_own(piece, *memory, 0);
    store_.pool().backend().finish();
    return send(piece, memory, 0);
  }
  return started(own_pages(piece), [&](std::span<std::byte> bytes) {
    return comm_.send_in_call(place_.right(), bytes, store_.memory());
  });
}

// Where messages come and go.
std::shared_ptr<PageMemory> KvRing::make_memory(std::size_t pages) const {
  const bool kept = reached_ && (repeated_ || store_.device() != nullptr);
  return std::make_shared<PageMemory>(store_.config(), pages, kept ? &store_.pool().backend() : nullptr);
}

// Done when the backend has finished.
void KvRing::copy_own(const RingPiece& piece, const PageMemory& memory, std::size_t first_page) const {
  KvMemory& backend = store_.pool().backend();
  const PageWindow::Pages from = own_pages(piece), to = pages_in(memory, piece, first_page);
  for (std::size_t i = 0; i < from.size(); ++i) {
    if (reached_) {
      backend.copy(to[i].data(), from[i].data(), to[i].size());
    } else {
      backend.copy_out(to[i].data(), from[i].data(), to[i].size());
    }
  }
}

// body for pieces whose pages lie in `memory` one after the other, computed with where the cache is.
void KvRing::work(std::span<const RingPiece> pieces, const plan::NodeSet& nodes, const PageMemory& memory,
                  std::size_t first_page, const Body& body) const {
  if (nodes.empty()) return;
  KvBatch batch;
  batch.lengths = lengths_;
  const std::int64_t longest = *std::max_element(lengths_.begin(), lengths_.end());
  const auto slots = static_cast<std::size_t>(plan::chunk_count(store_.config().order, longest));
  batch.table.assign(slots * lengths_.size(), kNoPage);
  const std::size_t begin = reached_ ? first_page : 0;
  std::size_t next = begin;
  for (const RingPiece& piece : pieces) {
    for (const RingPiece::Page& page : piece.pages) {
      batch.table[page.sequence * slots + static_cast<std::size_t>(page.chunk)] = static_cast<std::int32_t>(next++);
    }
  }
  batch.device = store_.device();
  if (reached_) {
    memory.bind(batch);
    return body(batch, nodes);
  }
  const PageMemory on_gpu = memory.copied(store_.pool().backend(), first_page, next - begin);
  on_gpu.bind(batch);
  body(batch, nodes);
}

// In turns: what comes in turn t is worked on, and goes on, as many turns later as this rank has own pieces. It is out
// of its slot before the next piece comes there.
void KvRing::pass_through_window(const Body& body) {
  const std::size_t own = own_.size(), incoming = incoming_.size(), slots = own + 1;
  const auto goes_on = [&](const RingPiece& piece) { return piece.rank != place_.right(); };
  const auto outgoing = own + static_cast<std::size_t>(std::ranges::count_if(incoming_, goes_on));
  const std::size_t turns = std::max(outgoing, incoming);
  Load load(*this, slots, body);
  const auto work = [&](std::size_t turn) {
    if (turn < own) return load.work_on_own(turn);
    if (turn < own + incoming) load.work_on(turn - own, (turn - own) % slots);
  };
  WindowPass pass(comm_, place_, *window_);
  for (std::size_t turn = 0; turn < turns; ++turn) {
    PageWindow::Pages give, take;
    if (turn < own) {
      give = own_pages(own_[turn]);
    } else if (turn < outgoing) {
      give = load.pages(turn - own, (turn - own) % slots);
    }
    if (turn < incoming) take = load.pages(turn, turn % slots);
    pass.turn(give, take, [&] { work(turn); });
  }
  pass.finish();
  for (std::size_t turn = turns; turn < own + incoming; ++turn) work(turn);
  for (int step = 1; step < comm_.size(); ++step) comm_.count_step();
}

void KvRing::pass_round(const Body& body) {
  const ForgetIfThrown guard(store_.pool().backend());
  if (window_ != nullptr) return pass_through_window(body);
  RingPieces pieces;
  pieces.own = own_.size();
  for (const RingPiece& piece : incoming_) pieces.incoming.push_back(piece.rank);
  pieces.most = most_pieces_;
  Load load(*this, pieces.slots(), body);
  parallel::pass_round(comm_, place_, pieces, load);
}

// Own pages copied, the others' by messages round the ring.
void KvRing::pass_pages(std::span<const RingPiece> all, const std::shared_ptr<PageMemory>& memory) {
  std::vector<std::vector<Request>> receives(all.size());
  std::vector<Request> sends;
  const auto keep = [&](std::vector<Request> requests) {
    std::move(requests.begin(), requests.end(), std::back_inserter(sends));
  };
  std::vector<std::size_t> first_page(all.size(), 0);
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (i > 0) first_page[i] = first_page[i - 1] + all[i - 1].pages.size();
    if (i >= own_.size()) receives[i] = receive(all[i], memory, first_page[i]);
  }
  // Own pieces go from where they lie, or, where messages cannot reach that, from the copy that is made anyway.
  const bool sent = comm_.size() > 1;
  for (std::size_t i = 0; i < own_.size(); ++i) {
    if (sent && reached_) keep(send_own(own_[i]));
    copy_own(own_[i], *memory, first_page[i]);
  }
  store_.pool().backend().finish();
  for (std::size_t i = 0; i < own_.size(); ++i) {
    if (sent && !reached_) keep(send(own_[i], memory, first_page[i]));
  }
  for (std::size_t i = own_.size(); i < all.size(); ++i) {
    comm_.wait_all(receives[i]);
    if (all[i].rank != place_.right()) keep(send(all[i], memory, first_page[i]));
  }
  comm_.wait_all(sends);
}

// The same, through a window.
void KvRing::take_pages(std::span<const RingPiece> all, const PageMemory& memory) {
  std::vector<PageWindow::Pages> pages(static_cast<std::size_t>(comm_.size()));
  std::size_t next = 0;
  for (const RingPiece& piece : all) {
    if (piece.rank == comm_.rank()) copy_own(piece, memory, next);
    const PageWindow::Pages more = pages_in(memory, piece, next);
    PageWindow::Pages& of_rank = pages[static_cast<std::size_t>(piece.rank)];
    of_rank.insert(of_rank.end(), more.begin(), more.end());
    next += piece.pages.size();
  }
  window_->exchange(comm_, pages);
}

void KvRing::collect(const Body& body) {
  const ForgetIfThrown guard(store_.pool().backend());
  std::vector<RingPiece> all = own_;
  all.insert(all.end(), incoming_.begin(), incoming_.end());
  std::size_t pages = 0;
  for (const RingPiece& piece : all) pages += piece.pages.size();
  const auto memory = make_memory(pages);
  if (window_ != nullptr) {
    take_pages(all, *memory);
  } else {
    pass_pages(all, memory);
  }
  for (int step = 1; step < comm_.size(); ++step) comm_.count_step();
  work(all, {{plan::log2_exact(store_.config().order.branches), 0}}, *memory, 0, body);
}

}  // namespace treeattn::parallel
