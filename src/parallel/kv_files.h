// SPDX-License-Identifier: Apache-2.0
// A KV cache on disk. In one directory, which every rank must see:
//
//   cache.manifest                          what is in the cache and which save this is; renamed into place last
//   branch-00042.<generation, 16 hex>.kv    the chunks of one branch (by the branch's number, not its leaf); branches
//                                           without chunks have no file
//
// A save writes files of a new generation beside those of the last one, then the manifest that names it, and only then
// removes what other generations left. So whatever interrupts it, the manifest's files are whole.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string_view>

#include "base/file.h"
#include "parallel/kv_format.h"
#include "parallel/kv_store.h"

namespace treeattn::parallel {

inline constexpr const char* kManifestName = "cache.manifest";
// Whether a save gives its files such names.
bool is_cache_file(std::string_view name);

// Collective. A directory that one group at a time writes to: made where there is none, and locked by rank 0 as long as
// this lives. The ranks wait together, so that none is missed by the others meanwhile. Throws BadFile on every rank if
// it cannot be made, or if another group still has it after a minute: its rank 0 may have been stopped.
class DirectoryTurn {
 public:
  DirectoryTurn(Communicator& communicator, const std::filesystem::path& directory);

  // Of the save of this turn, the same on every rank: what ties its files together.
  std::uint64_t generation() const { return generation_; }

 private:
  base::DirectoryLock lock_;
  std::uint64_t generation_;
};

// Both collective; KvCache documents them. turn: of a caller that has it already; else save takes it.
void save(const KvStore& store, const std::filesystem::path& directory, const DirectoryTurn* turn = nullptr);
std::unique_ptr<KvStore> load(std::shared_ptr<Communicator> communicator, const std::filesystem::path& directory,
                              std::span<const double> weights, int gpu = KvCache::kHost);
// Of the save that is there. By one rank alone; throws BadFile.
Manifest saved_manifest(const std::filesystem::path& directory);

}  // namespace treeattn::parallel
