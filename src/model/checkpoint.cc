// SPDX-License-Identifier: Apache-2.0
// Checkpoints that are files.
#include "model/checkpoint.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <map>

#include "base/file.h"
#include "model/json.h"
#include "model/safetensors.h"
#include "model/safetensors_index.h"

namespace treeattn::model {
namespace {

constexpr std::uint64_t kLargestIndex = std::uint64_t{64} << 20;

class SingleFile : public Checkpoint {
 public:
  explicit SingleFile(const std::filesystem::path& path) : file_(path) {}
  Tensor tensor(const std::string& name, std::span<const std::int64_t> shape) const override {
    return file_.tensor(name, shape);
  }
  std::vector<std::string> names() const override { return file_.names(); }

 private:
  SafetensorsFile file_;
};

class Shards : public Checkpoint {
 public:
  explicit Shards(const std::filesystem::path& index) : index_(index) {
    std::map<std::string, std::size_t> opened;
    for (const auto& [tensor, file] : parse_safetensors_index(base::read_text(index, kLargestIndex), index.string())) {
      const auto [place, fresh] = opened.try_emplace(file, files_.size());
      if (fresh) files_.emplace_back(index.parent_path() / file);
      if (!files_[place->second].contains(tensor)) {
        base::throw_bad_file(index, fmt::format("says that {} is in {}, which does not have it", shown(tensor), file));
      }
      file_of_.emplace(tensor, place->second);
    }
  }

  Tensor tensor(const std::string& name, std::span<const std::int64_t> shape) const override {
    const auto found = file_of_.find(name);
    if (found == file_of_.end()) {
      base::throw_bad_file(index_, fmt::format("names no tensor {} of shape {}", shown(name), shape));
    }
    return files_[found->second].tensor(name, shape);
  }

  std::vector<std::string> names() const override {
    std::vector<std::string> out;
    for (const auto& [name, file] : file_of_) out.push_back(name);
    return out;
  }

 private:
  std::filesystem::path index_;
  std::vector<SafetensorsFile> files_;
  std::map<std::string, std::size_t> file_of_;
};

}  // namespace

std::unique_ptr<Checkpoint> open_checkpoint(const std::filesystem::path& directory) {
  const auto single = directory / "model.safetensors";
  const auto index = directory / "model.safetensors.index.json";
  if (base::is_there(single)) return std::make_unique<SingleFile>(single);
  if (base::is_there(index)) return std::make_unique<Shards>(index);
  base::throw_bad_file(directory,
                       "no checkpoint; accepted: a directory with model.safetensors or "
                       "model.safetensors.index.json (.gguf, .bin and .pth are not read)");
}

}  // namespace treeattn::model
