// SPDX-License-Identifier: Apache-2.0
// Leaves on the move: who has which, who should, and the pages in between.
//
// The truth is in the page tables, not in the shares: a rebalance that a lost rank cut off has moved some leaves and
// not others. So the ranks first tell each other what they hold, and then work through one list of moves that all of
// them can derive.
#include <fmt/format.h>

#include <algorithm>
#include <deque>
#include <map>
#include <string>
#include <utility>

#include "base/buffer.h"
#include "base/byte_reader.h"
#include "base/check.h"
#include "base/round_up.h"
#include "base/sent.h"
#include "parallel/agree.h"
#include "parallel/kv_format.h"
#include "parallel/kv_store.h"
#include "plan/tree_order.h"

namespace treeattn::parallel {
namespace {

constexpr int kNobody = -1;
// Bytes of messages under way to or from one rank.
constexpr std::size_t kWindow = std::size_t{64} << 20;

struct Move {
  int leaf = 0;
  int from = 0;
  int to = 0;
};

// In each turn a rank has at most one leaf to send or to receive, so that in none anybody waits for more than one.
std::vector<std::vector<Move>> turns_of(std::span<const int> holders, const plan::Shares& shares) {
  struct Rank {
    std::vector<bool> busy{};  // in each turn
    std::size_t first = 0;     // turn that it is free in
    bool is_free(std::size_t turn) const { return turn >= busy.size() || !busy[turn]; }
    void take(std::size_t turn) {
      busy.resize(std::max(busy.size(), turn + 1));
      busy[turn] = true;
      while (!is_free(first)) ++first;
    }
  };
  std::vector<Rank> ranks(static_cast<std::size_t>(shares.ranks()));
  std::vector<std::vector<Move>> turns;
  for (int leaf = 0; leaf < shares.branches(); ++leaf) {
    const int from = holders[static_cast<std::size_t>(leaf)];
    const int to = shares.rank_of(leaf);
    if (from == kNobody || from == to) continue;
    Rank& sender = ranks[static_cast<std::size_t>(from)];
    Rank& receiver = ranks[static_cast<std::size_t>(to)];
    std::size_t turn = std::max(sender.first, receiver.first);
    while (!sender.is_free(turn) || !receiver.is_free(turn)) ++turn;
    sender.take(turn);
    receiver.take(turn);
    if (turn == turns.size()) turns.emplace_back();
    turns[turn].push_back({leaf, from, to});
  }
  return turns;
}

// A rank that holds each leaf, kNobody where none does. Collective.
std::vector<int> find_holders(Communicator& communicator, const KvStore& store, const plan::Shares& shares) {
  const auto branches = static_cast<std::size_t>(shares.branches());
  std::vector<std::byte> mine(base::divide_up(branches, 8));
  for (std::size_t leaf = 0; leaf < branches; ++leaf) {
    if (store.holds(static_cast<int>(leaf))) mine[leaf / 8] |= std::byte{1} << (leaf % 8);
  }
  const auto ranks = static_cast<std::size_t>(communicator.size());
  std::vector<std::byte> all(ranks * mine.size());
  communicator.allgather(mine, all);
  const auto holds = [&](int rank, std::size_t leaf) {
    const std::byte bits = all[static_cast<std::size_t>(rank) * mine.size() + leaf / 8];
    return (bits >> (leaf % 8) & std::byte{1}) != std::byte{0};
  };
  std::vector<int> holders(branches, kNobody);
  for (std::size_t leaf = 0; leaf < branches; ++leaf) {
    const int wanted = shares.rank_of(static_cast<int>(leaf));
    for (int rank = communicator.size() - 1; rank >= 0; --rank) {
      if (holds(rank, leaf)) holders[leaf] = rank;
    }
    if (holds(wanted, leaf)) holders[leaf] = wanted;
  }
  return holders;
}

// The layers of the pages of one leaf as messages, in order, at most kWindow bytes of them under way.
class Window {
 public:
  explicit Window(Communicator& communicator) : communicator_(communicator) {}

  bool empty() const { return messages_.empty(); }
  bool has_room(std::size_t bytes) const { return messages_.empty() || bytes_ + bytes <= kWindow; }
  void send(int to, std::shared_ptr<base::Buffer> data) {
    const std::span<const std::byte> bytes(data->as<std::byte>(), data->bytes());
    add(communicator_.send_in_call(to, bytes, data), data);
  }
  void receive(int from, std::size_t bytes) {
    const auto data = std::make_shared<base::Buffer>(bytes);
    add(communicator_.receive_in_call(from, {data->as<std::byte>(), bytes}, data), data);
  }
  // Waits for the oldest and hands out its bytes.
  std::shared_ptr<base::Buffer> take() {
    communicator_.wait(messages_.front().request);
    std::shared_ptr<base::Buffer> data = std::move(messages_.front().data);
    bytes_ -= data->bytes();
    messages_.pop_front();
    return data;
  }

 private:
  struct Message {
    Request request;
    std::shared_ptr<base::Buffer> data;
  };
  void add(Request request, std::shared_ptr<base::Buffer> data) {
    bytes_ += data->bytes();
    messages_.push_back({std::move(request), std::move(data)});
  }

  Communicator& communicator_;
  std::deque<Message> messages_;
  std::size_t bytes_ = 0;
};

// Message i of a leaf: one layer of one page.
struct Layout {
  const KvPool& pool;
  std::vector<std::int64_t> tokens;  // [pages]

  std::size_t messages() const { return tokens.size() * static_cast<std::size_t>(pool.layers()); }
  std::size_t page(std::size_t message) const { return message / static_cast<std::size_t>(pool.layers()); }
  int layer(std::size_t message) const { return static_cast<int>(message % static_cast<std::size_t>(pool.layers())); }
  std::size_t bytes(std::size_t message) const {
    return static_cast<std::size_t>(tokens[page(message)]) * pool.token_bytes().all();
  }
};

void send_leaf(Communicator& communicator, KvStore& store, int leaf, int to) {
  const std::vector<LeafChunk> chunks = store.leaf_chunks(leaf);
  const std::vector<std::int32_t> pages = store.pool_pages(chunks);
  const auto numbers = std::make_shared<std::vector<std::int32_t>>();
  for (const LeafChunk& chunk : chunks) numbers->push_back(chunk.page);
  Request head = communicator.send_in_call(to, std::as_bytes(std::span(*numbers)), numbers);

  const Layout layout{store.pool(), tokens_of_pages(chunks)};
  Window window(communicator);
  for (std::size_t i = 0; i < layout.messages(); ++i) {
    while (!window.has_room(layout.bytes(i))) window.take();
    const auto data = std::make_shared<base::Buffer>(layout.bytes(i));
    store.pool().pack(layout.layer(i), pages[layout.page(i)], layout.tokens[layout.page(i)], data->as<std::byte>());
    window.send(to, data);
  }
  while (!window.empty()) window.take();
  communicator.wait(head);
  // What has left here may never arrive. Only when the other side has it may we forget it.
  const auto receipt = std::make_shared<std::byte>();
  Request arrived = communicator.receive_in_call(to, {receipt.get(), 1}, receipt);
  communicator.wait(arrived);
  store.release_leaf(leaf);
}

// Pages that go back to the pool unless they are placed.
class TakenPages {
 public:
  TakenPages(KvPool& pool, std::size_t count) : pool_(pool) {
    pages_.reserve(count);
    try {
      while (pages_.size() < count) pages_.push_back(pool_.take());
    } catch (...) {
      give_back();
      throw;
    }
  }
  ~TakenPages() { give_back(); }
  TakenPages(const TakenPages&) = delete;
  TakenPages& operator=(const TakenPages&) = delete;

  std::span<const std::int32_t> pages() const { return pages_; }
  void placed() { pages_.clear(); }

 private:
  void give_back() {
    for (const std::int32_t page : pages_) pool_.release(page);
    pages_.clear();
  }

  KvPool& pool_;
  std::vector<std::int32_t> pages_;
};

void receive_leaf(Communicator& communicator, KvStore& store, int leaf, int from) {
  std::vector<LeafChunk> chunks = store.leaf_chunks(leaf);
  const auto numbers = std::make_shared<std::vector<std::int32_t>>(chunks.size());
  Request head = communicator.receive_in_call(from, std::as_writable_bytes(std::span(*numbers)), numbers);
  communicator.wait(head);
  for (std::size_t i = 0; i < chunks.size(); ++i) chunks[i].page = (*numbers)[i];

  Layout layout{store.pool(), {}};
  const std::string wrong = failure_of([&] { layout.tokens = tokens_of_pages(chunks); });
  base::require_sent(wrong.empty(), from, "pages of leaf {} that cannot be: {}", leaf, wrong);
  TakenPages taken(store.pool(), layout.tokens.size());
  Window window(communicator);
  for (std::size_t i = 0, posted = 0; i < layout.messages(); ++i) {
    while (posted < layout.messages() && window.has_room(layout.bytes(posted))) {
      window.receive(from, layout.bytes(posted++));
    }
    const std::size_t page = layout.page(i);
    store.pool().unpack(layout.layer(i), taken.pages()[page], layout.tokens[page], window.take()->as<std::byte>());
  }
  store.place(chunks, taken.pages());
  taken.placed();
  const auto receipt = std::make_shared<std::byte>();
  Request arrived = communicator.send_in_call(from, {receipt.get(), 1}, receipt);
  communicator.wait(arrived);
}

}  // namespace

std::vector<TokenRange> KvStore::redistribute(Communicator& communicator, plan::Shares shares, bool all_must_be_there) {
  require_same(communicator, digest(shares, digest(describe(*this))), "sequences or weights");
  const std::vector<int> holders = find_holders(communicator, *this, shares);
  const auto lost = std::ranges::count(holders, kNobody);
  if (all_must_be_there && lost > 0) {
    throw Error(
        fmt::format("no rank has the content of {} branches; accepted: adopt(), which says what to write", lost));
  }
  const int rank = communicator.rank();
  for (const std::vector<Move>& turn : turns_of(holders, shares)) {
    for (const Move& move : turn) {
      if (move.from == rank) send_leaf(communicator, *this, move.leaf, move.to);
      if (move.to == rank) receive_leaf(communicator, *this, move.leaf, move.from);
    }
    // Who has nothing to move would otherwise wait elsewhere for those who have, and miss them.
    communicator.barrier();
  }
  shares_ = std::move(shares);
  std::vector<int> missing;
  for (int leaf = 0; leaf < shares_.branches(); ++leaf) {
    if (shares_.rank_of(leaf) != rank) {
      release_leaf(leaf);  // parts of a leaf, or a second copy, that an earlier failure left here
    } else if (holders[static_cast<std::size_t>(leaf)] == kNobody) {
      missing.push_back(leaf);
    }
  }
  return make_room_for(missing);
}

// Zeroed pages for leaves nobody has.
std::vector<TokenRange> KvStore::make_room_for(std::span<const int> leaves) {
  std::vector<LeafChunk> chunks;
  for (const int leaf : leaves) {
    release_leaf(leaf);
    for (const LeafChunk& chunk : leaf_chunks(leaf)) chunks.push_back(chunk);
  }
  std::ranges::sort(chunks, {}, [](const LeafChunk& chunk) { return std::pair(chunk.sequence, chunk.chunk); });
  TakenPages taken(*pool_, chunks.size());
  std::vector<TokenRange> ranges;
  for (std::size_t i = 0; i < chunks.size(); ++i) {
    chunks[i].page = static_cast<std::int32_t>(i);
    pool_->fill_zero(taken.pages()[i]);
    append_range(ranges, chunks[i].sequence, chunks[i].chunk * config_.order.chunk_tokens, chunks[i].tokens);
  }
  place(chunks, taken.pages());
  taken.placed();
  return ranges;
}

void KvStore::rebalance(plan::Shares shares) { redistribute(*communicator_, std::move(shares), true); }

// A loss can reach one rank while it reduces and another when it has begun the next step: they are at most some calls
// apart, and what all of them have is common ground.
void KvStore::cut_to_common(Communicator& communicator) {
  constexpr std::int64_t kDropped = -1;
  const std::vector<std::int64_t> all = gathered(communicator, next_);
  for (std::size_t r = 0; r < all.size(); ++r) {
    base::require_sent(all[r] >= 0 && all[r] <= kMaxSequences, static_cast<int>(r),
                       "{} as its next sequence; accepted: 0 to 2^60", all[r]);
    next_ = std::max(next_, all[r]);  // what one of them has given to a sequence is not given again
  }
  // Those of rank 0, as what it lacks is dropped. Of all that there ever were a table could be of any length.
  std::vector<SequenceId> ids = sequences();
  const auto own_bytes = std::as_bytes(std::span(ids));
  std::vector<std::byte> bytes(own_bytes.begin(), own_bytes.end());
  share(communicator, bytes, 0);
  base::ByteReader sent(bytes);
  base::require_sent(sent.take(ids, bytes.size() / sizeof(SequenceId)) && sent.left().empty(), 0,
                     "{} bytes of sequences; accepted: {} of each", bytes.size(), sizeof(SequenceId));
  struct Held {
    std::int64_t length, rank;  // the shortest, and who has it
  };
  std::vector<Held> held;
  for (const SequenceId id : ids) {
    const auto found = sequences_.find(id);
    held.push_back({found == sequences_.end() ? kDropped : found->second.length, communicator.rank()});
  }
  combine_over_ranks(communicator, std::span(held), [](Held a, Held b) { return b.length < a.length ? b : a; });
  for (const Held& one : held) {
    base::require_sent(one.length >= kDropped, static_cast<int>(one.rank),
                       "{} as the length of a sequence; accepted: 0 or more, {} where it has none", one.length,
                       kDropped);
  }
  std::map<SequenceId, std::int64_t> common;
  for (std::size_t i = 0; i < ids.size(); ++i) common[ids[i]] = held[i].length;
  for (const SequenceId id : sequences()) {
    const auto found = common.find(id);
    found == common.end() || found->second == kDropped ? drop(id) : truncate(id, found->second);
  }
}

std::vector<TokenRange> KvStore::adopt(std::shared_ptr<Communicator> survivors, plan::Shares shares) {
  // While nothing has changed: shares of the old ranks with the numbers of the new ones would be of no use to anybody.
  require_same(*survivors, digest(shares), "weights");
  // The numbering of the ranks changes with the shares: from here on the old communicator is of no use.
  communicator_ = std::move(survivors);
  same_on_ranks_ = false;
  page_window_.reset();
  fastest_link_.reset();
  cut_to_common(*communicator_);
  return redistribute(*communicator_, std::move(shares), false);
}

}  // namespace treeattn::parallel
