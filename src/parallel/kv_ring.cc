// SPDX-License-Identifier: Apache-2.0
#include "parallel/kv_ring.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <utility>

#include "base/buffer.h"
#include "plan/tree_order.h"

namespace treeattn::parallel {

// Where a rank on a GPU puts the pages it computes with next; kept from piece to piece.
struct KvRing::GpuPages {
  std::array<std::unique_ptr<GrowingArray>, 4> arrays;
};

// Pages that are not in the cache: those of other ranks. The views below address them like the cache's own. They lie in
// the host's memory, where messages come and go.
class PageMemory {
 public:
  PageMemory(const KvCacheConfig& config, std::size_t pages)
      : config_(config),
        bytes_(token_bytes(config)),
        chunk_(static_cast<std::size_t>(config.order.chunk_tokens)),
        pages_(pages),
        k_(pages * chunk_ * bytes_.k),
        v_(pages * chunk_ * bytes_.v),
        k_scales_(pages * chunk_ * bytes_.k_scales),
        v_scales_(pages * chunk_ * bytes_.v_scales) {}

  ChunkMemory page(std::size_t i, std::int64_t tokens) {
    ChunkMemory out;
    out.k = k_.as<std::byte>() + i * chunk_ * bytes_.k;
    out.v = v_.as<std::byte>() + i * chunk_ * bytes_.v;
    if (bytes_.k_scales > 0) out.k_scales = k_scales_.as<float>() + i * chunk_ * bytes_.k_scales / sizeof(float);
    if (bytes_.v_scales > 0) out.v_scales = v_scales_.as<float>() + i * chunk_ * bytes_.v_scales / sizeof(float);
    out.tokens = tokens;
    return out;
  }

  using Parts = std::array<const std::byte*, 4>;

  // K, V, K's scales, V's scales; null where there are none.
  Parts parts() const {
    const auto at = [](const base::Buffer& buffer) { return buffer.bytes() > 0 ? buffer.as<std::byte>() : nullptr; };
    return {at(k_), at(v_), at(k_scales_), at(v_scales_)};
  }
  std::array<std::size_t, 4> part_bytes() const {
    return {k_.bytes(), v_.bytes(), k_scales_.bytes(), v_scales_.bytes()};
  }

  // Fills in the views of a batch whose table and lengths are set, for pages that lie here, or in a copy elsewhere.
  void bind(KvBatch& batch, const Parts& parts) const {
    const auto sequences = static_cast<std::int64_t>(batch.lengths.size());
    const auto slots = static_cast<std::int64_t>(batch.table.size()) / sequences;
    const auto view = [&](const std::byte* rows, const std::byte* scales, DType type, std::int64_t dim) {
      KvView out = KvView::paged(rows, type, static_cast<std::int64_t>(pages_), config_.order.chunk_tokens,
                                 config_.kv_heads, dim, sequences, slots, batch.table.data());
      out.tokens = *std::max_element(batch.lengths.begin(), batch.lengths.end());
      return scales != nullptr ? out.with_scales(reinterpret_cast<const float*>(scales)) : out;
    };
    batch.k = view(parts[0], parts[2], config_.k_type, config_.k_dim);
    batch.v = view(parts[1], parts[3], config_.v_type, config_.v_dim);
  }

 private:
  const KvCacheConfig config_;
  const TokenBytes bytes_;
  const std::size_t chunk_;
  const std::size_t pages_;
  base::Buffer k_, v_, k_scales_, v_scales_;
};

namespace {

// The four arrays of a page as bytes in use: what travels.
std::vector<std::span<std::byte>> spans_of(const ChunkMemory& page, const TokenBytes& bytes) {
  const auto tokens = static_cast<std::size_t>(page.tokens);
  std::vector<std::span<std::byte>> out = {{page.k, tokens * bytes.k}, {page.v, tokens * bytes.v}};
  if (page.k_scales) out.emplace_back(reinterpret_cast<std::byte*>(page.k_scales), tokens * bytes.k_scales);
  if (page.v_scales) out.emplace_back(reinterpret_cast<std::byte*>(page.v_scales), tokens * bytes.v_scales);
  return out;
}

}  // namespace

// The pieces on their way: pages of the cache, and slots of one piece each.
class KvRing::Load final : public RingLoad {
 public:
  Load(KvRing& ring, std::size_t slots, const Body& body)
      : ring_(ring), body_(body), own_(ring.store_.batch(ring.layer_, ring.sequences_)), slots_(slots) {}

  std::vector<Request> send_own(std::size_t piece) override { return ring_.send_own(ring_.own_[piece]); }
  std::vector<Request> receive(std::size_t piece, std::size_t slot) override {
    auto& memory = slots_[slot];
    if (!memory) memory = std::make_shared<PageMemory>(ring_.store_.config(), ring_.largest_piece_);
    return ring_.receive(ring_.incoming_[piece], memory, 0);
  }
  std::vector<Request> send(std::size_t piece, std::size_t slot) override {
    return ring_.send(ring_.incoming_[piece], slots_[slot], 0);
  }
  void work_on_own(std::size_t piece) override { body_(own_, ring_.own_[piece].nodes); }
  void work_on(std::size_t piece, std::size_t slot) override {
    const RingPiece& incoming = ring_.incoming_[piece];
    body_(ring_.batch_of({&incoming, 1}, *slots_[slot]), incoming.nodes);
  }

 private:
  KvRing& ring_;
  const Body& body_;
  const KvBatch own_;
  std::vector<std::shared_ptr<PageMemory>> slots_;
};

KvRing::~KvRing() = default;

KvRing::KvRing(const KvStore& store, int layer, std::span<const SequenceId> sequences)
    : store_(store),
      comm_(*store.communicator()),
      layer_(layer),
      sequences_(sequences.begin(), sequences.end()),
      place_(comm_) {
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
// without a token go with their neighbours.
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
  const std::size_t wanted = std::max<std::size_t>(1, (all_pages + kPiecesPerShare - 1) / kPiecesPerShare);
  std::vector<RingPiece> pieces;
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    const bool full = !pieces.empty() && pieces.back().pages.size() >= wanted;
    if (pieces.empty() || (full && !pages_of_leaf[i].empty())) pieces.push_back({rank, {}, {}});
    RingPiece& piece = pieces.back();
    piece.nodes = plan::unite(piece.nodes, {{0, leaves[i]}});
    piece.pages.insert(piece.pages.end(), pages_of_leaf[i].begin(), pages_of_leaf[i].end());
  }
  return pieces;
}

// Starts one message for each array of each page of a piece: start(bytes), page_of(page) saying where a page lies.
template <class PageOf, class Start>
std::vector<Request> KvRing::start_messages(const RingPiece& piece, const PageOf& page_of, const Start& start) const {
  const TokenBytes bytes = token_bytes(store_.config());
  std::vector<Request> requests;
  for (const RingPiece::Page& page : piece.pages) {
    for (const auto& span : spans_of(page_of(page), bytes)) requests.push_back(start(span));
  }
  return requests;
}

std::vector<Request> KvRing::receive(const RingPiece& piece, const std::shared_ptr<PageMemory>& memory,
                                     std::size_t first_page) {
  return start_messages(
      piece, [&](const RingPiece::Page& page) { return memory->page(first_page++, page.tokens); },
      [&](std::span<std::byte> bytes) { return comm_.receive(place_.left(), bytes, memory); });
}

std::vector<Request> KvRing::send(const RingPiece& piece, const std::shared_ptr<PageMemory>& memory,
                                  std::size_t first_page) {
  return start_messages(
      piece, [&](const RingPiece::Page& page) { return memory->page(first_page++, page.tokens); },
      [&](std::span<std::byte> bytes) { return comm_.send(place_.right(), bytes, memory); });
}

// From where the pages lie, or, where messages cannot reach that, from a copy.
std::vector<Request> KvRing::send_own(const RingPiece& piece) {
  if (store_.device() != nullptr) {
    const auto memory = std::make_shared<PageMemory>(store_.config(), piece.pages.size());
    copy_own(piece, *memory, 0);
    return send(piece, memory, 0);
  }
  return start_messages(
      piece, [&](const RingPiece::Page& page) { return store_.chunk(layer_, sequences_[page.sequence], page.chunk); },
      [&](std::span<std::byte> bytes) { return comm_.send(place_.right(), bytes, store_.memory()); });
}

void KvRing::copy_own(const RingPiece& piece, PageMemory& memory, std::size_t first_page) const {
  const TokenBytes bytes = token_bytes(store_.config());
  for (const RingPiece::Page& page : piece.pages) {
    const auto from = spans_of(store_.chunk(layer_, sequences_[page.sequence], page.chunk), bytes);
    const auto to = spans_of(memory.page(first_page++, page.tokens), bytes);
    for (std::size_t i = 0; i < from.size(); ++i) {
      store_.pool().backend().copy_out(to[i].data(), from[i].data(), to[i].size());
    }
  }
  store_.pool().backend().finish();
}

// Pages lie in `memory` in the order of the pieces.
KvBatch KvRing::batch_of(std::span<const RingPiece> pieces, const PageMemory& memory) {
  KvBatch batch;
  batch.lengths = lengths_;
  const std::int64_t longest = *std::max_element(lengths_.begin(), lengths_.end());
  const auto slots = static_cast<std::size_t>(plan::chunk_count(store_.config().order, longest));
  batch.table.assign(slots * lengths_.size(), -1);
  std::int32_t next = 0;
  for (const RingPiece& piece : pieces) {
    for (const RingPiece::Page& page : piece.pages) {
      batch.table[page.sequence * slots + static_cast<std::size_t>(page.chunk)] = next++;
    }
  }
  batch.device = store_.device();
  memory.bind(batch, batch.device == nullptr ? memory.parts() : upload(memory));
  return batch;
}

// All of it; what holds no token is copied along. The last piece has been worked on when this one comes.
std::array<const std::byte*, 4> KvRing::upload(const PageMemory& memory) {
  KvMemory& backend = store_.pool().backend();
  if (!on_gpu_) on_gpu_ = std::make_unique<GpuPages>();
  PageMemory::Parts parts = memory.parts();
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (parts[i] == nullptr) continue;
    const std::size_t bytes = memory.part_bytes()[i];
    auto& array = on_gpu_->arrays[i];
    if (!array) array = backend.reserve(bytes);
    array->grow(bytes);
    backend.copy_in(array->data(), parts[i], bytes);
    parts[i] = array->data();
  }
  backend.finish();
  return parts;
}

void KvRing::pass_round(const Body& body) {
  RingPieces pieces;
  pieces.own = own_.size();
  for (const RingPiece& piece : incoming_) pieces.incoming.push_back(piece.rank);
  pieces.most = most_pieces_;
  Load load(*this, pieces.slots(), body);
  parallel::pass_round(comm_, place_, pieces, load);
}

void KvRing::collect(const Body& body) {
  std::vector<RingPiece> all = own_;
  all.insert(all.end(), incoming_.begin(), incoming_.end());
  std::size_t pages = 0;
  for (const RingPiece& piece : all) pages += piece.pages.size();
  const auto memory = std::make_shared<PageMemory>(store_.config(), pages);

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
  for (std::size_t i = 0; i < own_.size(); ++i) {
    if (comm_.size() > 1) keep(send_own(own_[i]));
    copy_own(own_[i], *memory, first_page[i]);
  }
  for (std::size_t i = own_.size(); i < all.size(); ++i) {
    comm_.wait_all(receives[i]);
    if (all[i].rank != place_.right()) keep(send(all[i], memory, first_page[i]));
  }
  comm_.wait_all(sends);
  for (int step = 1; step < comm_.size(); ++step) comm_.count_step();
  body(batch_of(all, *memory), {{plan::log2_exact(store_.config().order.branches), 0}});
}

}  // namespace treeattn::parallel
