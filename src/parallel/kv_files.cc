// SPDX-License-Identifier: Apache-2.0
#include "parallel/kv_files.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "base/buffer.h"
#include "base/checksum.h"
#include "base/counting.h"
#include "base/file.h"
#include "base/sent.h"
#include "base/timing.h"
#include "parallel/agree.h"
#include "parallel/kv_format.h"
#include "plan/tree_order.h"
#include "treeattn/error.h"

namespace treeattn::parallel {
namespace {

namespace fs = std::filesystem;
using base::File;

constexpr const char* kManifestDraft = "cache.manifest.tmp";

std::string branch_name(int branch, std::uint64_t generation) {
  return fmt::format("branch-{:05}.{:016x}.kv", branch, generation);
}

// Digits wherever branch_name() puts some, and nothing else: what others call their files is theirs.
bool is_branch_name(std::string_view name) {
  const auto is_digit = [](char c) { return c >= '0' && c <= '9'; };
  const auto fits = [&](char c, char shape) {
    if (shape == '0') return is_digit(c);
    if (shape == 'f') return is_digit(c) || (c >= 'a' && c <= 'f');
    return c == shape;
  };
  return std::ranges::equal(name, branch_name(0, ~std::uint64_t{0}), fits);  // branch-00000.ffffffffffffffff.kv
}

fs::path branch_file(const fs::path& directory, int branch, std::uint64_t generation) {
  return directory / branch_name(branch, generation);
}

std::uint64_t new_generation() {
  std::random_device device;
  return (static_cast<std::uint64_t>(device()) << 32) | device();
}

// Leftovers cost only room, so failures are of no interest.
std::vector<fs::path> other_generations(const fs::path& directory, std::uint64_t generation) {
  const std::string ours = branch_name(0, generation);
  std::vector<fs::path> others;
  std::error_code ignored;
  for (fs::directory_iterator entry(directory, ignored), end; entry != end; entry.increment(ignored)) {
    const std::string name = entry->path().filename().string();
    const bool other = is_branch_name(name) && name.substr(name.find('.')) != ours.substr(ours.find('.'));
    if (other) others.push_back(entry->path());
  }
  return others;
}

// The bytes of each layer of each page of a branch, one after the other, and a running checksum over them.
class PageStream {
 public:
  PageStream(File& file, const KvPool& pool, std::uint32_t checksum) : file_(file), pool_(pool), checksum_(checksum) {}

  void write(std::int32_t page, std::int64_t tokens) {
    std::vector<std::byte>& bytes = sized(tokens);
    for (int layer = 0; layer < pool_.layers(); ++layer) {
      pool_.pack(layer, page, tokens, bytes.data());
      checksum_ = base::crc32c(bytes, checksum_);
      file_.write(bytes);
    }
    file_.write(std::as_bytes(std::span(&checksum_, 1)));
  }

  void read(KvPool& pool, std::int32_t page, std::int64_t tokens) {
    std::vector<std::byte>& bytes = sized(tokens);
    for (int layer = 0; layer < pool.layers(); ++layer) {
      file_.read(bytes);
      checksum_ = base::crc32c(bytes, checksum_);
      pool.unpack(layer, page, tokens, bytes.data());
    }
    std::uint32_t stored = 0;
    file_.read(std::as_writable_bytes(std::span(&stored, 1)));
    if (stored != checksum_) {
      base::throw_bad_file(file_.path(), fmt::format("damaged: checksum {:08x}, should be {:08x}", checksum_, stored));
    }
  }

  // Of one page in the file.
  static std::uint64_t bytes(const KvPool& pool, std::int64_t tokens) {
    return static_cast<std::uint64_t>(pool.layers()) * pool.token_bytes().all() * static_cast<std::uint64_t>(tokens) +
           kChecksumBytes;
  }

 private:
  std::vector<std::byte>& sized(std::int64_t tokens) {
    buffer_.resize(pool_.token_bytes().all() * static_cast<std::size_t>(tokens));
    return buffer_;
  }

  File& file_;
  const KvPool& pool_;
  std::uint32_t checksum_;
  std::vector<std::byte> buffer_;
};

void write_branch(const KvStore& store, const fs::path& directory, std::uint64_t generation, int leaf) {
  const std::vector<LeafChunk> chunks = store.leaf_chunks(leaf);
  if (chunks.empty()) return;
  const int branch = plan::branch_of_leaf(store.config().order, leaf);
  const std::vector<std::int64_t> tokens = tokens_of_pages(chunks);
  const std::vector<std::int32_t> pages = store.pool_pages(chunks);
  const std::vector<std::byte> header = encode(BranchHeader{generation, branch, chunks});
  File file = File::create(branch_file(directory, branch, generation));
  file.write(header);
  PageStream stream(file, store.pool(), last_checksum(header));
  for (std::size_t i = 0; i < pages.size(); ++i) stream.write(pages[i], tokens[i]);
  file.finish();
}

// Reads a branch into chunks that have no pages yet.
void read_branch(KvStore& store, const fs::path& directory, std::uint64_t generation, int leaf) {
  std::vector<LeafChunk> chunks = store.leaf_chunks(leaf);
  if (chunks.empty()) return;
  const int branch = plan::branch_of_leaf(store.config().order, leaf);
  File file = File::open(branch_file(directory, branch, generation));
  std::vector<std::byte> bytes(branch_header_bytes(chunks.size()));
  file.read(bytes);
  BranchHeader header;
  try {
    header = parse_branch_header(bytes);
  } catch (const BadFile& error) {
    base::throw_bad_file(file.path(), error.what());
  }
  const std::vector<std::int64_t> tokens = tokens_of_pages(header.chunks);
  for (std::size_t i = 0; i < chunks.size(); ++i) chunks[i].page = header.chunks[i].page;
  if (header != BranchHeader{generation, branch, chunks}) {
    base::throw_bad_file(file.path(), "belongs to another save or branch than its name and the manifest say");
  }
  std::uint64_t expected = bytes.size();
  for (const std::int64_t count : tokens) expected += PageStream::bytes(store.pool(), count);
  if (file.size() != expected) {
    base::throw_bad_file(file.path(), fmt::format("has {} bytes; accepted: {}", file.size(), expected));
  }
  std::vector<std::int32_t> pages;
  for (std::size_t i = 0; i < tokens.size(); ++i) pages.push_back(store.pool().take());
  store.place(chunks, pages);
  PageStream stream(file, store.pool(), last_checksum(bytes));
  for (std::size_t i = 0; i < pages.size(); ++i) stream.read(store.pool(), pages[i], tokens[i]);
}

// Those of this rank, of a save that has failed.
void remove_branches(const KvStore& store, const fs::path& directory, std::uint64_t generation) {
  std::error_code ignored;
  for (const int leaf : store.shares().leaves_of(store.communicator()->rank())) {
    fs::remove(branch_file(directory, plan::branch_of_leaf(store.config().order, leaf), generation), ignored);
  }
}

Manifest parsed_manifest(const fs::path& path, std::span<const std::byte> bytes) {
  try {
    return parse_manifest(bytes);
  } catch (const BadFile& error) {
    base::throw_bad_file(path, error.what());
  }
}

// Before tables are made as long as the manifest says: is there a file that has so many chunks?
void check_branch_size(const Manifest& manifest, const fs::path& directory, int leaf) {
  const ReductionOrder& order = manifest.config.order;
  std::uint64_t chunks = 0;  // at most 2^54 a sequence
  bool overflow = false;
  for (const SequenceRecord& sequence : manifest.sequences) {
    if (sequence.length == 0) continue;
    const std::int64_t last = plan::chunk_of(order, sequence.length - 1);
    overflow |= __builtin_add_overflow(chunks, plan::chunks_of_leaf(order, leaf, 0, last), &chunks);
  }
  if (chunks == 0) return;
  const fs::path path = branch_file(directory, plan::branch_of_leaf(order, leaf), manifest.generation);
  const std::uint64_t size = File::open(path).size();
  if (overflow || chunks > size || branch_header_bytes(chunks) > size) {
    base::throw_bad_file(path, fmt::format("has {} bytes, too few for {} chunks", size, chunks));
  }
}

// Collective. One rank reads it: a save at the same time could give the others another one.
Manifest manifest_of(Communicator& communicator, const fs::path& directory) {
  const fs::path path = directory / kManifestName;
  std::vector<std::byte> bytes;
  on_all_or_none(communicator, [&] {
    if (communicator.rank() != 0) return;
    bytes = base::read_bytes(path);
    parsed_manifest(path, bytes);
  });
  share(communicator, bytes, 0);
  return parsed_manifest(path, bytes);
}

// Files that a rank opens or removes before all ranks meet.
constexpr std::size_t kFilesAtOnce = 32;

// Collective. work() with every one of `mine`, and after some of them all ranks meet: who has more to do with the disk
// than others, or a slower one, would otherwise be missed by those who wait for it. No rank has more than `most`.
template <class T, class Work>
void meet_after_every(std::size_t some, Communicator& communicator, std::span<const T> mine, std::size_t most,
                      const Work& work) {
  for (std::size_t done = 0; done < most; done += some) {
    on_all_or_none(communicator, [&] {
      for (std::size_t i = done; i < std::min(done + some, mine.size()); ++i) work(mine[i]);
    });
  }
}

std::size_t most_leaves(const plan::Shares& shares) {
  std::size_t most = 0;
  for (int rank = 0; rank < shares.ranks(); ++rank) most = std::max(most, shares.leaves_of(rank).size());
  return most;
}

// The same with the leaves of each rank.
template <class Work>
void leaf_by_leaf(Communicator& communicator, const plan::Shares& shares, const Work& work, std::size_t some = 1) {
  const std::vector<int> leaves = shares.leaves_of(communicator.rank());
  meet_after_every(some, communicator, std::span(leaves), most_leaves(shares), work);
}

// Collective. The cache that the manifest speaks of.
std::unique_ptr<KvStore> load_as(const Manifest& manifest, const std::shared_ptr<Communicator>& communicator,
                                 const fs::path& directory, std::span<const double> weights, int gpu) {
  plan::Shares shares = make_shares(*communicator, manifest.config, weights);
  require_same(*communicator, digest(shares), "weights");
  leaf_by_leaf(
      *communicator, shares, [&](int leaf) { check_branch_size(manifest, directory, leaf); }, kFilesAtOnce);
  std::unique_ptr<KvStore> store;
  on_all_or_none(*communicator, [&] {
    check_gpu(gpu);  // what else is refused here is the manifest's
    try {
      store = std::make_unique<KvStore>(communicator, manifest.config, std::move(shares), gpu);
      for (const auto& [id, length] : manifest.sequences) store->restore(id, length);
    } catch (const InvalidArgument& error) {
      base::throw_bad_file(directory / kManifestName, error.what());
    }
    store->restore_next(manifest.next_sequence);
    store->restore_generation(manifest.generation);
  });
  leaf_by_leaf(*communicator, store->shares(),
               [&](int leaf) { read_branch(*store, directory, manifest.generation, leaf); });
  return store;
}

}  // namespace

bool is_cache_file(std::string_view name) {
  return name == kManifestName || name == kManifestDraft || is_branch_name(name);
}

DirectoryTurn::DirectoryTurn(Communicator& communicator, const fs::path& directory) : generation_(new_generation()) {
  constexpr double kPatience = 60;  // seconds
  const bool first = communicator.rank() == 0;
  on_all_or_none(communicator, [&] {
    std::error_code error;
    if (first) fs::create_directories(directory, error);
    if (error) base::throw_bad_file(directory, "cannot create: " + error.message());
  });
  const auto start = base::Clock::now();
  enum class Answer : std::uint8_t { kOurs, kBusy, kTooLong };
  for (;;) {
    Answer answer = Answer::kOurs;
    if (first && !lock_.try_take(directory)) {
      answer = base::seconds_since(start) > kPatience ? Answer::kTooLong : Answer::kBusy;
    }
    communicator.broadcast(std::as_writable_bytes(std::span(&answer, 1)), 0);
    base::require_sent(answer <= Answer::kTooLong, 0, "answer {}; accepted: 0 to 2", static_cast<int>(answer));
    if (answer == Answer::kOurs) break;
    if (answer == Answer::kTooLong) base::throw_bad_file(directory, "somebody else is writing there");
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  communicator.broadcast(std::as_writable_bytes(std::span(&generation_, 1)), 0);
}

void save(const KvStore& store, const fs::path& directory, const DirectoryTurn* turn) {
  Communicator& communicator = *store.communicator();
  const bool first = communicator.rank() == 0;
  Manifest manifest = describe(store);
  require_same(communicator, digest(store.shares(), digest(manifest)), "sequences or weights");

  std::optional<DirectoryTurn> own_turn;
  if (turn == nullptr) turn = &own_turn.emplace(communicator, directory);
  manifest.generation = turn->generation();
  try {
    leaf_by_leaf(communicator, store.shares(),
                 [&](int leaf) { write_branch(store, directory, manifest.generation, leaf); });
    on_all_or_none(communicator, [&] { base::sync_directory(directory); });
    // What others wrote elsewhere (another machine's disk) would be missed only when it is read.
    const std::vector<int> all_leaves = base::counting(store.config().order.branches);
    meet_after_every(kFilesAtOnce, communicator, std::span(all_leaves).first(first ? all_leaves.size() : 0),
                     all_leaves.size(), [&](int leaf) { check_branch_size(manifest, directory, leaf); });
    on_all_or_none(communicator, [&] {
      if (!first) return;
      const fs::path draft = directory / kManifestDraft;
      base::Replacement file(directory / kManifestName, draft, draft);
      file.write(encode(manifest));
      file.finish();
    });
  } catch (const BadFile&) {
    remove_branches(store, directory, manifest.generation);
    throw;
  } catch (const Unavailable&) {
    remove_branches(store, directory, manifest.generation);
    throw;
  }
  std::vector<fs::path> leftovers;
  // Not before the new manifest would survive a power cut.
  if (first && failure_of([&] { base::sync_directory(directory); }).empty()) {
    leftovers = other_generations(directory, manifest.generation);
  }
  const auto most = largest_of_ranks<std::uint64_t>(communicator, leftovers.size());
  meet_after_every(kFilesAtOnce, communicator, std::span<const fs::path>(leftovers), most, [](const fs::path& file) {
    std::error_code ignored;
    fs::remove(file, ignored);
  });
}

std::unique_ptr<KvStore> load(std::shared_ptr<Communicator> communicator, const fs::path& directory,
                              std::span<const double> weights, int gpu) {
  for (;;) {
    const Manifest manifest = manifest_of(*communicator, directory);
    try {
      return load_as(manifest, communicator, directory, weights, gpu);
    } catch (const BadFile&) {
      // Another group may have saved meanwhile, and removed what this manifest speaks of.
      if (manifest_of(*communicator, directory).generation == manifest.generation) throw;
    }
  }
}

Manifest saved_manifest(const fs::path& directory) {
  const fs::path path = directory / kManifestName;
  return parsed_manifest(path, base::read_bytes(path));
}

}  // namespace treeattn::parallel
