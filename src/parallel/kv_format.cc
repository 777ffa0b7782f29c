// SPDX-License-Identifier: Apache-2.0
#include "parallel/kv_format.h"

#include <fmt/format.h>

#include <bit>
#include <cstring>
#include <iterator>
#include <string_view>
#include <type_traits>

#include "base/byte_reader.h"
#include "base/checksum.h"
#include "treeattn/error.h"

namespace treeattn::parallel {
namespace {

static_assert(std::endian::native == std::endian::little, "numbers are written as they lie in memory");

constexpr std::string_view kManifestMagic = "TRKVMANI";
constexpr std::string_view kBranchMagic = "TRKVBRAN";
constexpr std::size_t kSequenceBytes = 16;
constexpr std::size_t kChunkBytes = 28;
constexpr std::size_t kBranchFixedBytes = 32 + kChecksumBytes;

template <typename... Args>
void accept(bool condition, fmt::format_string<Args...> format, Args&&... args) {
  if (!condition) throw BadFile(fmt::format(format, std::forward<Args>(args)...));
}

class Writer {
 public:
  explicit Writer(std::string_view magic) {
    for (const char c : magic) put(c);
    put(kFormatVersion);
  }
  template <class T>
  void put(T value) {
    static_assert(std::is_arithmetic_v<T>);
    const auto bytes = std::as_bytes(std::span(&value, 1));
    bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
  }
  std::vector<std::byte> finish() {
    put(base::crc32c(bytes_));
    return std::move(bytes_);
  }

 private:
  std::vector<std::byte> bytes_;
};

// Checks magic, version and checksum, then hands out what lies between them.
class Reader {
 public:
  Reader(std::span<const std::byte> bytes, std::string_view magic) : rest_(bytes) {
    std::vector<char> begin;
    accept(rest_.take(begin, magic.size()) && std::string_view(begin.data(), begin.size()) == magic,
           "does not begin with \"{}\"", magic);
    const auto version = get<std::uint32_t>();
    accept(version == kFormatVersion, "version {}; accepted: {}", version, kFormatVersion);
    accept(rest_.left().size() >= kChecksumBytes, "ends too early");
    rest_ = base::ByteReader(rest_.left().first(rest_.left().size() - kChecksumBytes));
    const std::uint32_t stored = last_checksum(bytes);
    const std::uint32_t computed = base::crc32c(bytes.first(bytes.size() - kChecksumBytes));
    accept(stored == computed, "damaged: checksum {:08x}, should be {:08x}", computed, stored);
  }
  template <class T>
  T get() {
    T value{};
    accept(rest_.take(value), "ends too early");
    return value;
  }
  // How many records follow: no more than there are bytes for, and nothing after them.
  std::size_t count(std::size_t record_bytes) {
    const auto records = get<std::uint64_t>();
    const std::size_t left = rest_.left().size();
    accept(left % record_bytes == 0 && records == left / record_bytes,
           "announces {} records of {} bytes and has {} bytes for them", records, record_bytes, left);
    return static_cast<std::size_t>(records);
  }

 private:
  base::ByteReader rest_;
};

DType checked_type(std::uint8_t type) {
  accept(type < std::size(kAllDTypes), "type {}; accepted: 0 to {}", type, std::size(kAllDTypes) - 1);
  return static_cast<DType>(type);
}

int checked_int(std::string_view name, std::uint32_t value) {
  accept(value <= 0x7fffffffu, "{} = {}; accepted: at most 2^31 - 1", name, value);
  return static_cast<int>(value);
}

}  // namespace

Manifest describe(const KvStore& store) {
  Manifest manifest{.generation = 0, .config = store.config(), .next_sequence = store.next_sequence(), .sequences = {}};
  for (const SequenceId id : store.sequences()) manifest.sequences.push_back({id, store.length(id)});
  return manifest;
}

std::uint32_t digest(const Manifest& manifest) { return last_checksum(encode(manifest)); }
std::uint32_t digest(const plan::Shares& shares, std::uint32_t before) {
  return base::crc32c(std::as_bytes(std::span(shares.rank_of_leaf())), before);
}

std::uint32_t last_checksum(std::span<const std::byte> encoded) {
  std::uint32_t checksum = 0;
  std::memcpy(&checksum, encoded.last(kChecksumBytes).data(), sizeof checksum);
  return checksum;
}

std::vector<std::byte> encode(const Manifest& manifest) {
  const KvCacheConfig& config = manifest.config;
  Writer out(kManifestMagic);
  out.put(static_cast<std::uint32_t>(config.layers));
  out.put(manifest.generation);
  for (const std::int64_t value :
       {config.kv_heads, config.k_dim, config.v_dim, config.order.chunk_tokens, config.order.branch_tokens}) {
    out.put(value);
  }
  out.put(static_cast<std::uint32_t>(config.order.branches));
  out.put(static_cast<std::uint8_t>(config.k_type));
  out.put(static_cast<std::uint8_t>(config.v_type));
  out.put(static_cast<std::uint8_t>(config.order.placement));
  out.put(std::uint8_t{0});
  out.put(manifest.next_sequence);
  out.put(static_cast<std::uint64_t>(manifest.sequences.size()));
  for (const SequenceRecord& sequence : manifest.sequences) {
    out.put(sequence.id);
    out.put(sequence.length);
  }
  return out.finish();
}

Manifest parse_manifest(std::span<const std::byte> bytes) {
  Reader in(bytes, kManifestMagic);
  Manifest manifest;
  KvCacheConfig& config = manifest.config;
  config.layers = checked_int("layers", in.get<std::uint32_t>());
  manifest.generation = in.get<std::uint64_t>();
  for (std::int64_t* value :
       {&config.kv_heads, &config.k_dim, &config.v_dim, &config.order.chunk_tokens, &config.order.branch_tokens}) {
    *value = in.get<std::int64_t>();
  }
  config.order.branches = checked_int("branches", in.get<std::uint32_t>());
  config.k_type = checked_type(in.get<std::uint8_t>());
  config.v_type = checked_type(in.get<std::uint8_t>());
  const auto placement = in.get<std::uint8_t>();
  accept(placement <= static_cast<std::uint8_t>(Placement::kContiguous), "placement {}; accepted: 0 or 1", placement);
  config.order.placement = static_cast<Placement>(placement);
  const auto unused = in.get<std::uint8_t>();
  accept(unused == 0, "unused byte {}; accepted: 0", unused);
  try {
    check_config(config);
  } catch (const InvalidArgument& error) {
    throw BadFile(error.what());
  }
  manifest.next_sequence = in.get<std::int64_t>();
  accept(manifest.next_sequence >= 0 && manifest.next_sequence <= KvStore::kMaxSequences,
         "next sequence {}; accepted: 0 to 2^60", manifest.next_sequence);
  manifest.sequences.resize(in.count(kSequenceBytes));
  SequenceId above = 0;  // the lowest id the next sequence may have
  for (SequenceRecord& sequence : manifest.sequences) {
    sequence.id = in.get<std::int64_t>();
    sequence.length = in.get<std::int64_t>();
    accept(sequence.id >= above && sequence.id < manifest.next_sequence, "sequence {}; accepted: {} to {}", sequence.id,
           above, manifest.next_sequence - 1);
    accept(sequence.length >= 0 && sequence.length <= KvStore::kMaxTokens, "length {}; accepted: 0 to 2^60",
           sequence.length);
    above = sequence.id + 1;
  }
  return manifest;
}

std::size_t branch_header_bytes(std::size_t chunks) { return kBranchFixedBytes + chunks * kChunkBytes; }

std::vector<std::byte> encode(const BranchHeader& header) {
  Writer out(kBranchMagic);
  out.put(static_cast<std::uint32_t>(header.branch));
  out.put(header.generation);
  out.put(static_cast<std::uint64_t>(header.chunks.size()));
  for (const LeafChunk& chunk : header.chunks) {
    out.put(chunk.sequence);
    out.put(chunk.chunk);
    out.put(chunk.tokens);
    out.put(static_cast<std::uint32_t>(chunk.page));
  }
  return out.finish();
}

BranchHeader parse_branch_header(std::span<const std::byte> bytes) {
  Reader in(bytes, kBranchMagic);
  BranchHeader header;
  header.branch = checked_int("branch", in.get<std::uint32_t>());
  header.generation = in.get<std::uint64_t>();
  header.chunks.resize(in.count(kChunkBytes));
  for (LeafChunk& chunk : header.chunks) {
    chunk.sequence = in.get<std::int64_t>();
    chunk.chunk = in.get<std::int64_t>();
    chunk.tokens = in.get<std::int64_t>();
    chunk.page = checked_int("page", in.get<std::uint32_t>());
    accept(chunk.sequence >= 0 && chunk.chunk >= 0 && chunk.tokens > 0,
           "chunk {} of sequence {} with {} tokens; accepted: numbers from 0, 1 token or more", chunk.chunk,
           chunk.sequence, chunk.tokens);
  }
  try {
    tokens_of_pages(header.chunks);
  } catch (const Error& error) {
    throw BadFile(error.what());
  }
  return header;
}

}  // namespace treeattn::parallel
