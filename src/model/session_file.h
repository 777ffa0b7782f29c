// SPDX-License-Identifier: Apache-2.0
// The tokens beside a saved cache.
//
//   "TRLLSESS" version:u32 model:u32 generation:u64 pending:u64 count:u64  pending * token:i32
//   count * (id:i64 tokens:u64 segments:u64  tokens * token:i32  segments * (first:i64 way:u32))  crc32c:u32
//
// Little-endian, nothing padded. The checksum covers everything before it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <vector>

#include "model/config.h"
#include "model/transcript.h"
#include "treeattn/kv_cache.h"

namespace treeattn::model {

struct SavedText {
  std::uint32_t model = 0;       // shape_digest of the model that made it
  std::uint64_t generation = 0;  // that of the cache it was saved with
  std::map<SequenceId, Transcript> transcripts;
  // Known, but not in the cache yet: the last that was said, or several, or one and no text before it, that end in what
  // was left of a prompt.
  std::vector<std::int32_t> pending;

  bool operator==(const SavedText&) const = default;
};

// Two models with another digest cannot read each other's caches. The weights are not part of it.
std::uint32_t shape_digest(const LlamaConfig& config);

std::vector<std::byte> encode(const SavedText& text);
// Throws InvalidArgument, naming what is wrong.
SavedText parse_saved_text(std::span<const std::byte> bytes);

// Beside the files of the cache. A save writes the draft, then the cache, then gives the draft its name. So where it
// was cut off, one of the two belongs to the cache that is there.
inline constexpr const char* kSavedTextName = "session.tokens";
inline constexpr const char* kSavedDraftName = "session.tokens.tmp";
// Both throw BadFile.
SavedText read_saved_text(const std::filesystem::path& file);
// The one of a directory that belongs to a generation of its cache.
SavedText saved_text_of(const std::filesystem::path& directory, std::uint64_t generation);
// Throws BadFile where other files are in the directory and no save: one would mix its own with them.
void require_no_other_files(const std::filesystem::path& directory);

}  // namespace treeattn::model
