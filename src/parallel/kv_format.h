// SPDX-License-Identifier: Apache-2.0
// The bytes of a saved KV cache: its manifest, and the head of a branch's file. From and to memory only, so that the
// parsers can be fed anything. All integers are little-endian, and nothing is padded.
//
//   manifest  "TRKVMANI" version:u32 layers:u32 generation:u64 kv_heads:i64 k_dim:i64 v_dim:i64 chunk_tokens:i64
//             branch_tokens:i64 branches:u32 k_type:u8 v_type:u8 placement:u8 0:u8 next_sequence:i64 count:u64
//             count * (id:i64 length:i64) crc32c:u32
//   branch    "TRKVBRAN" version:u32 branch:u32 generation:u64 count:u64
//             count * (sequence:i64 chunk:i64 tokens:i64 page:u32) crc32c:u32
//             then per page, 0, 1, 2 ...: per layer the tokens in use of K, V, K's scales, V's scales; then crc32c:u32
//
// A checksum is of everything in the file before it, earlier checksums left out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "parallel/kv_store.h"
#include "treeattn/kv_cache.h"

namespace treeattn::parallel {

inline constexpr std::uint32_t kFormatVersion = 1;
inline constexpr std::size_t kChecksumBytes = 4;

struct SequenceRecord {
  SequenceId id = 0;
  std::int64_t length = 0;

  bool operator==(const SequenceRecord&) const = default;
};

struct Manifest {
  std::uint64_t generation = 0;  // what ties the files of one save together
  KvCacheConfig config;
  SequenceId next_sequence = 0;
  std::vector<SequenceRecord> sequences;  // by id

  bool operator==(const Manifest&) const = default;
};

struct BranchHeader {
  std::uint64_t generation = 0;
  int branch = 0;
  std::vector<LeafChunk> chunks;  // as KvStore::leaf_chunks gives them

  bool operator==(const BranchHeader&) const = default;
};

// What every rank knows of a cache; generation 0.
Manifest describe(const KvStore& store);

// Differs where manifests differ. (Not the checksum of encode(): with its own checksum at the end, that is a constant.)
std::uint32_t digest(const Manifest& manifest);
// Of who carries which branch, behind what gave `before`.
std::uint32_t digest(const plan::Shares& shares, std::uint32_t before = 0);

std::vector<std::byte> encode(const Manifest& manifest);
std::vector<std::byte> encode(const BranchHeader& header);
// Of encode(BranchHeader) with so many chunks.
std::size_t branch_header_bytes(std::size_t chunks);
// The checksum at the end of either.
std::uint32_t last_checksum(std::span<const std::byte> encoded);

// Any bytes at all: what is not such a thing throws BadFile with the reason (the caller knows the file). Allocates no
// more than a small multiple of bytes.size(). What comes back is in range: a config that passes check_config, ids
// ascending and below next_sequence, lengths up to KvStore::kMaxTokens; pages numbered as tokens_of_pages wants it.
Manifest parse_manifest(std::span<const std::byte> bytes);
BranchHeader parse_branch_header(std::span<const std::byte> bytes);

}  // namespace treeattn::parallel
