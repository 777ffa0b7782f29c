// SPDX-License-Identifier: Apache-2.0
#include "model/session_file.h"

#include <fmt/format.h>

#include <array>
#include <bit>
#include <cstring>
#include <string>
#include <system_error>
#include <type_traits>
#include <utility>

#include "base/byte_reader.h"
#include "base/check.h"
#include "base/checksum.h"
#include "base/file.h"
#include "parallel/kv_files.h"
#include "treeattn/error.h"

namespace treeattn::model {
namespace {

static_assert(std::endian::native == std::endian::little, "the file is written as memory has it");

constexpr std::array<char, 8> kMagic = {'T', 'R', 'L', 'L', 'S', 'E', 'S', 'S'};
constexpr std::uint32_t kVersion = 2;

class Writer {
 public:
  template <class T>
  void put(const T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    const std::span<const std::byte> bytes = std::as_bytes(std::span(&value, 1));
    out.insert(out.end(), bytes.begin(), bytes.end());
  }
  void put_tokens(std::span<const std::int32_t> tokens) {
    const std::span<const std::byte> bytes = std::as_bytes(tokens);
    out.insert(out.end(), bytes.begin(), bytes.end());
  }

  std::vector<std::byte> out;
};

class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : left_(bytes) {}

  template <class T>
  T take() {
    T value{};
    base::require(left_.take(value), "ends in the middle");
    return value;
  }
  std::vector<std::int32_t> take_tokens(std::uint64_t count) {
    std::vector<std::int32_t> out;
    base::require(left_.take(out, count), "says {} tokens and ends before them", count);
    return out;
  }
  bool empty() const { return left_.left().empty(); }

 private:
  base::ByteReader left_;
};

Transcript take_transcript(Reader& reader) {
  const auto tokens = reader.take<std::uint64_t>();
  const auto segments = reader.take<std::uint64_t>();
  std::vector<std::int32_t> text = reader.take_tokens(tokens);
  std::vector<Transcript::Segment> list;
  for (std::uint64_t i = 0; i < segments; ++i) {
    const auto first = reader.take<std::int64_t>();
    const auto way = reader.take<std::uint32_t>();
    base::require(way <= static_cast<std::uint32_t>(Way::kOneByOne), "a segment was computed in way {}; accepted: 0, 1",
                  way);
    list.push_back({first, static_cast<Way>(way)});
  }
  return Transcript::restore(std::move(text), std::move(list));
}

}  // namespace

std::uint32_t shape_digest(const LlamaConfig& c) {
  Writer writer;
  for (const std::int64_t n : {c.vocab, c.hidden, c.layers, c.heads, c.kv_heads, c.head_dim, c.feed_forward}) {
    writer.put(n);
  }
  writer.put(c.rms_eps);
  writer.put(c.rope_theta);
  const RopeScaling scaling = c.rope_scaling.value_or(RopeScaling{1, 1, 1, 0});
  writer.put(scaling.factor);
  writer.put(scaling.low_freq_factor);
  writer.put(scaling.high_freq_factor);
  writer.put(scaling.original_context);
  return base::crc32c(writer.out);
}

std::vector<std::byte> encode(const SavedText& text) {
  Writer writer;
  writer.put(kMagic);
  writer.put(kVersion);
  writer.put(text.model);
  writer.put(text.generation);
  writer.put<std::uint64_t>(text.pending.size());
  writer.put<std::uint64_t>(text.transcripts.size());
  writer.put_tokens(text.pending);
  for (const auto& [id, transcript] : text.transcripts) {
    writer.put(id);
    writer.put<std::uint64_t>(transcript.tokens().size());
    writer.put<std::uint64_t>(transcript.segments().size());
    writer.put_tokens(transcript.tokens());
    for (const Transcript::Segment& segment : transcript.segments()) {
      writer.put(segment.first);
      writer.put(static_cast<std::uint32_t>(segment.way));
    }
  }
  writer.put(base::crc32c(writer.out));
  return std::move(writer.out);
}

SavedText parse_saved_text(std::span<const std::byte> bytes) {
  base::require(bytes.size() >= kMagic.size() + sizeof(std::uint32_t), "holds {} bytes; accepted: a saved session",
                bytes.size());
  std::uint32_t checksum = 0;
  const std::span<const std::byte> body = bytes.first(bytes.size() - sizeof(checksum));
  std::memcpy(&checksum, bytes.data() + body.size(), sizeof(checksum));
  Reader reader(body);
  base::require(reader.take<std::array<char, 8>>() == kMagic, "is not a saved session");
  base::require(checksum == base::crc32c(body), "is damaged: its checksum does not fit");
  const auto version = reader.take<std::uint32_t>();
  base::require(version == kVersion, "has version {}; accepted: {}", version, kVersion);
  SavedText text;
  text.model = reader.take<std::uint32_t>();
  text.generation = reader.take<std::uint64_t>();
  const auto pending = reader.take<std::uint64_t>();
  const auto count = reader.take<std::uint64_t>();
  text.pending = reader.take_tokens(pending);
  for (std::uint64_t i = 0; i < count; ++i) {
    const auto id = reader.take<SequenceId>();
    base::require(text.transcripts.emplace(id, take_transcript(reader)).second, "has sequence {} twice", id);
  }
  base::require(reader.empty(), "goes on after its end");
  return text;
}

SavedText read_saved_text(const std::filesystem::path& path) {
  const std::vector<std::byte> bytes = base::read_bytes(path);
  try {
    return parse_saved_text(bytes);
  } catch (const InvalidArgument& error) {
    base::throw_bad_file(path, error.what());
  }
}

SavedText saved_text_of(const std::filesystem::path& directory, std::uint64_t generation) {
  std::error_code ignored;
  if (std::filesystem::exists(directory / kSavedDraftName, ignored)) {
    try {
      SavedText draft = read_saved_text(directory / kSavedDraftName);
      if (draft.generation == generation) return draft;
    } catch (const BadFile&) {
      // cut off while it was written
    }
  }
  SavedText text = read_saved_text(directory / kSavedTextName);
  if (text.generation != generation) {
    base::throw_bad_file(directory / kSavedTextName, "belongs to another save than the cache");
  }
  return text;
}

void require_no_other_files(const std::filesystem::path& directory) {
  std::string other;
  std::error_code ignored;
  for (std::filesystem::directory_iterator entry(directory, ignored), end; entry != end; entry.increment(ignored)) {
    const std::string name = entry->path().filename().string();
    if (name == parallel::kManifestName) return;
    // What the first save left when it was cut off is no other file.
    const bool of_save = name == kSavedTextName || name == kSavedDraftName || parallel::is_cache_file(name);
    if (!of_save && (other.empty() || name < other)) other = name;
  }
  if (other.empty()) return;
  base::throw_bad_file(directory,
                       fmt::format("has other files, such as {}; accepted: a directory that is new, is empty or has a "
                                   "saved text",
                                   other));
}

}  // namespace treeattn::model
