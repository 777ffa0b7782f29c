// SPDX-License-Identifier: Apache-2.0
#include "model/loaded_model.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <string>
#include <system_error>
#include <utility>

#include "base/available_memory.h"
#include "base/check.h"
#include "base/file.h"
#include "model/json.h"
#include "model/tensor_list.h"
#include "model/tokenizer_config.h"
#include "treeattn/error.h"

namespace treeattn::model {
namespace {

// A bias or a layer that config.json does not speak of would be left out, and the text be another model's.
void require_no_other_tensors(const std::vector<std::string>& names, const LlamaConfig& config,
                              const std::filesystem::path& directory) {
  std::set<std::string> known;
  for (const NamedShape& tensor : tensor_list(config)) known.insert(tensor.name);
  for (const std::string& name : names) {
    // Beside the model there may be heads for other purposes; older files keep the frequencies of RoPE.
    if (!name.starts_with("model.") || name.ends_with("rotary_emb.inv_freq") || known.contains(name)) continue;
    base::throw_bad_file(directory,
                         fmt::format("has the tensor {}, which a Llama of its config.json does not have", shown(name)));
  }
}

// Where logits are said to come from the embedding, and there is another matrix for them, programs differ in which one
// they take.
void require_no_other_head(const Checkpoint& checkpoint, const std::vector<std::string>& names,
                           const LlamaConfig& config, const std::filesystem::path& directory) {
  const std::string head = "lm_head.weight", table = "model.embed_tokens.weight";
  if (!config.tied_embeddings || std::find(names.begin(), names.end(), head) == names.end()) return;
  const std::vector<std::int64_t> shape = {config.vocab, config.hidden};
  const Tensor one = checkpoint.tensor(table, shape), other = checkpoint.tensor(head, shape);
  const std::size_t bytes = static_cast<std::size_t>(config.vocab * config.hidden) * dtype_size(one.dtype);
  if (one.dtype != other.dtype || std::memcmp(one.data, other.data, bytes) != 0) {
    base::throw_bad_file(directory,
                         fmt::format("has {} that is not {}, though tie_word_embeddings of its config.json is true; "
                                     "accepted: equal ones, or tie_word_embeddings false",
                                     head, table));
  }
  checkpoint.release(head);
}

// tokenizer.json, and before a text what tokenizer_config.json puts there.
Tokenizer read_tokenizer(const std::filesystem::path& directory) {
  constexpr const char* kDefaultBos = "<s>";  // of Hugging Face's LlamaTokenizerFast
  Tokenizer tokenizer = Tokenizer::read(directory / "tokenizer.json");
  const auto file = directory / "tokenizer_config.json";
  if (!base::is_there(file)) return tokenizer;
  const TokenizerConfig config = read_tokenizer_config(file);
  if (!config.begins_with_bos) return tokenizer;
  const std::string name = config.bos.value_or(kDefaultBos);
  const auto bos = *config.begins_with_bos ? tokenizer.find(name) : std::nullopt;
  if (*config.begins_with_bos && !bos) {
    base::throw_bad_file(file,
                         fmt::format("its tokenizer_class puts bos_token, \"{}\", before a text, and tokenizer.json "
                                     "has no such added token; accepted: one of those, or add_bos_token false",
                                     shown(name)));
  }
  tokenizer.set_bos(bos);
  return tokenizer;
}

// A tokenizer of another model would make other text of everything. Added tokens without a row are another matter: they
// were added and never trained, and only who uses one hears of it.
void require_tokens_of_model(const Tokenizer& tokenizer, const LlamaConfig& config,
                             const std::filesystem::path& directory) {
  const auto refuse = [&](const std::string& what) {
    base::throw_bad_file(directory / "tokenizer.json",
                         fmt::format("{}, and vocab_size of config.json is {}; accepted: the tokenizer of this model",
                                     what, config.vocab));
  };
  if (tokenizer.plain_vocab() > config.vocab) {
    refuse(fmt::format("its vocabulary goes up to token {}", tokenizer.plain_vocab() - 1));
  }
  if (const auto bos = tokenizer.bos(); bos && *bos >= config.vocab) {
    refuse(fmt::format("a text begins with token {}", *bos));
  }
}

}  // namespace

std::shared_ptr<const Checkpoint> ModelDescription::open() const {
  if (directory.empty()) return random_checkpoint(config, seed);
  std::shared_ptr<const Checkpoint> checkpoint = open_checkpoint(directory);
  const std::vector<std::string> names = checkpoint->names();
  require_no_other_tensors(names, config, directory);
  require_no_other_head(*checkpoint, names, config, directory);
  return checkpoint;
}

ModelDescription describe_model(const std::filesystem::path& directory) {
  ModelDescription out;
  out.directory = directory;
  const auto config = directory / "config.json";
  if (!base::is_there(config)) {
    const bool cache = base::is_there(directory / "snapshots");  // of what Hugging Face's programs have fetched
    base::throw_bad_file(
        config,
        fmt::format("not there; accepted: a directory as Hugging Face has them, on this machine, with config.json "
                    "and *.safetensors (.gguf, .bin and .pth are not read){}",
                    cache ? "; those in snapshots are such directories" : ""));
  }
  out.config = read_config(config);
  // Chat models name more of these than config.json does. The default is for a model without this file.
  if (const auto file = directory / "generation_config.json"; base::is_there(file)) {
    out.generation = read_generation_config(file);
    if (out.config.eos_is_default) out.config.eos.clear();
    for (const std::int32_t token : out.generation.eos) {
      const bool known = std::find(out.config.eos.begin(), out.config.eos.end(), token) != out.config.eos.end();
      if (!known) out.config.eos.push_back(token);
    }
  }
  if (base::is_there(directory / "tokenizer.json")) {
    out.tokenizer = std::make_shared<Tokenizer>(read_tokenizer(directory));
    require_tokens_of_model(*out.tokenizer, out.config, directory);
  }
  return out;
}

ModelDescription describe_random_model(std::string_view shape, std::uint64_t seed) {
  ModelDescription out;
  out.config = known_shape(shape);
  out.seed = seed;
  return out;
}

void require_room_for_weights(const ModelDescription& model, const LlamaLoadOptions& options,
                              std::optional<std::size_t> available) {
  const bool in_files = !model.directory.empty() && stays_as_stored(options.weights, model.config.stored);
  if (options.gpu >= 0 || in_files || !available) return;
  const std::size_t bytes = all_weight_bytes(model.config, options.weights);
  if (bytes <= *available) return;
  throw Unavailable(fmt::format("the weights take {:.1f} GB of memory, and {:.1f} GB can be had here",
                                static_cast<double>(bytes) * 1e-9, static_cast<double>(*available) * 1e-9));
}

std::vector<std::int32_t> encode_prompt(const ModelDescription& model, std::string_view text, bool begin) {
  if (!model.tokenizer) throw Unavailable("this model has no tokenizer (tokenizer.json); give tokens instead of text");
  std::vector<std::int32_t> tokens = model.tokenizer->encode(text);
  // Not the bos_token_id of config.json: models that were trained without one in front may name one.
  if (const auto bos = model.tokenizer->bos(); begin && bos) tokens.insert(tokens.begin(), *bos);
  return tokens;
}

}  // namespace treeattn::model

namespace treeattn {

namespace {

int gpu_of(const LlamaLoadOptions& options) {
  base::require(options.gpu >= -1, "gpu = {}; accepted: -1 (the CPU) or the index of a GPU", options.gpu);
  return options.gpu;
}

int loading_threads(const LlamaLoadOptions& options) {
  base::require(options.threads >= 0, "threads = {}; accepted: 1 or more, or 0 for one per core", options.threads);
  return options.threads == 0 ? ThreadPool::available_cores() : options.threads;
}

}  // namespace

LlamaModel::Impl::Impl(model::ModelDescription what, const LlamaLoadOptions& options)
    : description(std::move(what)),
      pool(loading_threads(options)),
      ops(kernels::make_model_ops(gpu_of(options), pool)) {
  model::check_weight_format(options.weights);
  model::require_room_for_weights(description, options, base::available_memory());
  model::WeightOptions loading;
  loading.host_memory = options.gpu < 0;
  loading.format = options.weights;
  loading.progress = options.progress;
  weights = std::make_shared<model::Weights>(description.config, description.open(), *ops, pool, loading);
}

}  // namespace treeattn
