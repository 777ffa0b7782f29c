// SPDX-License-Identifier: Apache-2.0
// A Llama's cache and tokens in a directory.
#include <fmt/format.h>

#include <utility>

#include "base/file.h"
#include "model/llama.h"
#include "model/session_file.h"
#include "parallel/agree.h"
#include "parallel/kv_files.h"
#include "treeattn/error.h"

namespace treeattn::model {
namespace {

namespace fs = std::filesystem;

constexpr const char* kName = kSavedTextName;
constexpr const char* kDraft = kSavedDraftName;

// Why these are not the tokens of this cache; empty if they are.
std::string mismatch(const SavedText& text, const KvCache& cache) {
  const std::vector<SequenceId> ids = cache.sequences();
  if (text.transcripts.size() != ids.size()) {
    return fmt::format("has {} texts for {} sequences of the cache", text.transcripts.size(), ids.size());
  }
  for (const SequenceId id : ids) {
    const auto found = text.transcripts.find(id);
    if (found == text.transcripts.end()) return fmt::format("lacks sequence {} of the cache", id);
    if (found->second.length() != cache.length(id)) {
      return fmt::format("has {} tokens of sequence {}, the cache {}", found->second.length(), id, cache.length(id));
    }
  }
  return {};
}

SavedText text_of(const fs::path& directory, const KvCache& cache) {
  SavedText text = saved_text_of(directory, cache.store().generation());
  if (const std::string why = mismatch(text, cache); !why.empty()) base::throw_bad_file(directory / kName, why);
  return text;
}

// The checksum does not keep out a file that was changed on purpose, and a recovery looks every token up.
void check_tokens(const SavedText& text, std::int64_t vocab, const fs::path& file) {
  const auto check = [&](std::span<const std::int32_t> tokens) {
    for (const std::int32_t token : tokens) {
      if (token >= 0 && token < vocab) continue;
      base::throw_bad_file(file, fmt::format("has token {}; accepted: 0 to {}", token, vocab - 1));
    }
  };
  check(text.pending);
  for (const auto& [id, transcript] : text.transcripts) check(transcript.tokens());
}

// Where a save was cut off before the draft had its name, the draft is the text of the cache that is there: the next
// one must not write over it, as that may be cut off as well.
void keep_draft_of_cache(const fs::path& directory) {
  try {
    if (read_saved_text(directory / kDraft).generation != parallel::saved_manifest(directory).generation) return;
  } catch (const BadFile&) {
    return;  // no draft, or no cache
  }
  fs::rename(directory / kDraft, directory / kName);
  base::sync_directory(directory);
}

}  // namespace

void Llama::save(const fs::path& directory, std::span<const std::int32_t> pending) {
  finish_recovery();
  for (const auto& [id, transcript] : transcripts_) drop_unfinished(id);
  const bool writes = communicator()->rank() == 0;
  // Two saves at once would leave one's tokens beside the other's cache.
  const parallel::DirectoryTurn turn(*communicator(), directory);
  parallel::on_all_or_none(*communicator(), [&] {
    if (!writes) return;
    const SavedText text{shape_digest(config()), turn.generation(), transcripts_, {pending.begin(), pending.end()}};
    keep_draft_of_cache(directory);
    base::File draft = base::File::create(directory / kDraft);
    draft.write(encode(text));
    draft.finish();
  });
  parallel::save(cache_.store(), directory, &turn);
  parallel::on_all_or_none(*communicator(), [&] {
    if (!writes) return;
    fs::rename(directory / kDraft, directory / kName);
    base::sync_directory(directory);
  });
}

std::unique_ptr<Llama> Llama::load(const fs::path& directory, std::shared_ptr<const Weights> weights,
                                   std::shared_ptr<Communicator> communicator, kernels::ModelOps& ops, ThreadPool& pool,
                                   LlamaOptions options, std::vector<std::int32_t>* pending) {
  KvCache cache = KvCache::load(communicator, directory, {}, ops.gpu());
  SavedText text;
  parallel::on_all_or_none(*communicator, [&] {
    text = text_of(directory, cache);
    if (text.model != shape_digest(weights->config())) {
      base::throw_bad_file(directory / kName, "was made by a model of another shape");
    }
    model::check_tokens(text, weights->config().vocab, directory / kName);
  });
  options.kv_type = cache.config().k_type;
  options.order = cache.config().order;
  std::unique_ptr<Llama> out(new Llama(std::move(weights), std::move(cache), ops, pool, options));
  out->transcripts_ = std::move(text.transcripts);
  if (pending) *pending = std::move(text.pending);
  return out;
}

}  // namespace treeattn::model
