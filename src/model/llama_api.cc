// SPDX-License-Identifier: Apache-2.0
// The public face: treeattn/llama.h.
#include <iterator>
#include <optional>
#include <utility>

#include "base/check.h"
#include "model/loaded_model.h"
#include "model/session.h"
#include "treeattn/error.h"

namespace treeattn {

std::string_view stop_reason_name(StopReason reason) {
  constexpr std::string_view kNames[] = {"max_tokens", "stop_token", "stop_string", "context", "interrupted"};
  const auto index = static_cast<std::size_t>(reason);
  base::require(index < std::size(kNames), "stop reason = {}; accepted: 0 to {}", index, std::size(kNames) - 1);
  return kNames[index];
}

LlamaModel::LlamaModel(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
LlamaModel::~LlamaModel() = default;

std::shared_ptr<const LlamaModel> LlamaModel::load(const std::filesystem::path& directory,
                                                   const LlamaLoadOptions& options) {
  return std::shared_ptr<const LlamaModel>(
      new LlamaModel(std::make_unique<Impl>(model::describe_model(directory), options)));
}

std::shared_ptr<const LlamaModel> LlamaModel::random(std::string_view shape, std::uint64_t seed,
                                                     const LlamaLoadOptions& options) {
  return std::shared_ptr<const LlamaModel>(
      new LlamaModel(std::make_unique<Impl>(model::describe_random_model(shape, seed), options)));
}

std::int64_t LlamaModel::vocab() const { return impl_->description.config.vocab; }
std::int64_t LlamaModel::context() const { return impl_->description.config.context; }
bool LlamaModel::has_tokenizer() const { return impl_->description.tokenizer != nullptr; }

GenerateOptions LlamaModel::generate_options() const {
  const model::GenerationConfig& said = impl_->description.generation;
  GenerateOptions options;
  options.sampler = said.sampler;
  options.max_tokens = said.max_new_tokens.value_or(options.max_tokens);
  return options;
}

std::vector<std::int32_t> LlamaModel::encode(std::string_view text) const {
  return model::encode_prompt(impl_->description, text);
}

std::string LlamaModel::decode(std::span<const std::int32_t> tokens) const {
  if (!has_tokenizer()) throw Unavailable("this model has no tokenizer");
  base::require_address("tokens", tokens);
  for (const std::int32_t token : tokens) {
    base::require(token >= 0 && token < vocab(), "token {}; accepted: 0 to {}", token, vocab() - 1);
  }
  return impl_->description.tokenizer->decode(tokens);
}

struct LlamaSession::Impl {
  std::shared_ptr<const LlamaModel> model;
  std::unique_ptr<kernels::ModelOps> ops;
  std::optional<model::Session> session;
};

namespace {

const LlamaModel::Impl& loaded_model(const LlamaModel* model) {
  base::require(model != nullptr, "model = null; accepted: a model");
  return model->impl();
}

}  // namespace

LlamaSession::LlamaSession(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
LlamaSession::~LlamaSession() = default;
LlamaSession::LlamaSession(LlamaSession&&) noexcept = default;

LlamaSession::LlamaSession(std::shared_ptr<const LlamaModel> model, std::shared_ptr<Communicator> communicator,
                           ThreadPool& pool, const LlamaOptions& options)
    : impl_(std::make_unique<Impl>()) {
  const LlamaModel::Impl& loaded = loaded_model(model.get());
  impl_->ops = kernels::make_model_ops(loaded.ops->gpu(), pool);
  impl_->session.emplace(
      std::make_unique<model::Llama>(loaded.weights, std::move(communicator), *impl_->ops, pool, options),
      loaded.description.tokenizer.get());
  impl_->model = std::move(model);
}

LlamaSession LlamaSession::load(const std::filesystem::path& directory, std::shared_ptr<const LlamaModel> model,
                                std::shared_ptr<Communicator> communicator, ThreadPool& pool,
                                const LlamaOptions& options) {
  auto impl = std::make_unique<Impl>();
  const LlamaModel::Impl& loaded = loaded_model(model.get());
  impl->ops = kernels::make_model_ops(loaded.ops->gpu(), pool);
  impl->session.emplace(model::Session::load(directory, loaded.weights, std::move(communicator), *impl->ops, pool,
                                             loaded.description.tokenizer.get(), options));
  impl->model = std::move(model);
  return LlamaSession(std::move(impl));
}

GenerateResult LlamaSession::generate(std::string_view prompt, const GenerateOptions& options,
                                      const TextListener& listener) {
  // Only a text begins with the token for that.
  const bool first = tokens().empty();
  const model::ModelDescription& description = impl_->model->impl().description;
  std::vector<std::int32_t> encoded;
  std::string refusal;
  try {
    if (!prompt.empty()) encoded = model::encode_prompt(description, prompt, first);
  } catch (const InvalidArgument& error) {
    refusal = error.what();
  } catch (const Unavailable& error) {
    refusal = error.what();
  }
  try {
    return impl_->session->generate(encoded, options, listener, refusal);
  } catch (const InvalidArgument&) {
    // By now the others have heard of it, who may have a tokenizer.
    if (!prompt.empty() && !impl_->model->has_tokenizer()) throw Unavailable(refusal);
    throw;
  }
}

GenerateResult LlamaSession::generate(std::span<const std::int32_t> prompt, const GenerateOptions& options,
                                      const TextListener& listener) {
  return impl_->session->generate(prompt, options, listener);
}

const std::vector<std::int32_t>& LlamaSession::tokens() const { return impl_->session->tokens(); }
void LlamaSession::save(const std::filesystem::path& directory) const { impl_->session->save(directory); }

}  // namespace treeattn
