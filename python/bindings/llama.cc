// SPDX-License-Identifier: Apache-2.0
// The Llama of treeattn/llama.h: a model, and texts that grow.
#include "treeattn/llama.h"

#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/variant.h>

#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>

#include "arrays.h"
#include "bindings.h"
#include "use.h"

namespace treeattn::python {
namespace {

using Model = std::shared_ptr<LlamaModel>;  // nanobind knows no pointers to const objects
using World = std::shared_ptr<Communicator>;
using Tokens = std::vector<std::int32_t>;

constexpr char kGenerate[] =
    R"(generate(prompt, on_text=None, on_token=None, on_logits=None, **options) -> dict

Adds the prompt, a text or a list of tokens, and what the model says to it. The result has text, tokens, reason,
prompt_tokens, first_token_seconds, token_seconds, bytes_sent and lost.

on_text(text) is called as the text grows, on_token((token, logprob, {token: logprob})) and on_logits(array) for every
token. Options: max_tokens, stop, stop_tokens, ignore_eos, recover; temperature, top_k, top_p, min_p,
repetition_penalty, seed, logprobs. What is not given is as the model's generation_config.json says.)";

Model shared(std::shared_ptr<const LlamaModel> model) { return std::const_pointer_cast<LlamaModel>(std::move(model)); }

LlamaLoadOptions load_options(const std::string& weights, int gpu) {
  LlamaLoadOptions options{.gpu = gpu};
  if (weights == "bf16") {
    options.weights = WeightFormat::kBFloat16;
  } else if (weights == "int8") {
    options.weights = WeightFormat::kInt8;
  } else if (weights != "as_stored") {
    refuse("weights", weights, "as_stored, bf16, int8");
  }
  return options;
}

// A session with the threads it works on, and the model whose generation_config.json it follows.
struct Session {
  std::unique_ptr<ThreadPool> pool;
  Model model;
  LlamaSession session;
};

World world_or_self(const World& world) { return world ? world : self_communicator(); }

LlamaOptions session_options(const std::string& kv_type, const std::string& strategy) {
  return {.kv_type = parse_dtype(kv_type), .attention = {.strategy = parse_strategy(strategy)}};
}

// Calls back, with what make_argument() makes. The interpreter sees signals either way, as that of Ctrl-C.
void tell(const nb::object& callback, const auto& make_argument) {
  const nb::gil_scoped_acquire hold;
  raise_signals();
  if (!callback.is_none()) callback(make_argument());
}

nb::object choice_of(const TokenChoice& choice) {
  nb::dict top;
  for (const TokenLogprob& other : choice.top) top[nb::int_(other.token)] = other.logprob;
  return nb::make_tuple(choice.token, choice.logprob, top);
}

nb::object copy_of(std::span<const float> logits) {
  auto* memory = new std::vector<float>(logits.begin(), logits.end());
  const nb::capsule owner(memory, [](void* p) noexcept { delete static_cast<std::vector<float>*>(p); });
  return nb::cast(nb::ndarray<nb::numpy, float>(memory->data(), {memory->size()}, owner));
}

GenerateOptions options_of(const LlamaModel& model, const nb::kwargs& given) {
  GenerateOptions options = model.generate_options();
  SamplerOptions& sampler = options.sampler;
  set_options(given, {
                         {"max_tokens", sets(options.max_tokens, kWholeNumber)},
                         {"stop", sets(options.stop, "a list of texts")},
                         {"stop_tokens", sets(options.stop_tokens, "a list of tokens")},
                         {"ignore_eos", sets(options.ignore_eos, kChoice)},
                         {"recover", sets(options.recover, kChoice)},
                         {"temperature", sets(sampler.temperature, kNumber)},
                         {"top_k", sets(sampler.top_k, kWholeNumber)},
                         {"top_p", sets(sampler.top_p, kNumber)},
                         {"min_p", sets(sampler.min_p, kNumber)},
                         {"repetition_penalty", sets(sampler.repetition_penalty, kNumber)},
                         {"seed", sets(sampler.seed, kWholeNumber)},
                         {"logprobs", sets(sampler.logprobs, kWholeNumber)},
                     });
  return options;
}

nb::object generate(Session& self, const std::variant<std::string, Tokens>& prompt, const nb::object& on_text,
                    const nb::object& on_token, const nb::object& on_logits, const nb::kwargs& given) {
  const GenerateOptions options = options_of(*self.model, given);
  std::string text;
  TextListener listener;
  listener.text = [&](std::string_view part) {
    text += part;
    tell(on_text, [&] { return nb::str(part.data(), part.size()); });
  };
  listener.token = [&](const TokenChoice& choice) { tell(on_token, [&] { return choice_of(choice); }); };
  if (!on_logits.is_none()) {
    listener.logits = [&](std::span<const float> logits) { tell(on_logits, [&] { return copy_of(logits); }); };
  }
  const nb::object nobody = nb::none();
  listener.prefill = [&](std::int64_t, std::int64_t) { tell(nobody, [] { return nb::none(); }); };
  GenerateResult result;
  {
    const Use use({&self});
    const nb::gil_scoped_release others_go_on;
    result = std::visit(
        [&](const auto& text_or_tokens) { return self.session.generate(text_or_tokens, options, listener); }, prompt);
  }
  nb::dict out;
  out["text"] = nb::str(text.data(), text.size());
  out["tokens"] = result.tokens;
  out["reason"] = std::string(stop_reason_name(result.reason));
  out["prompt_tokens"] = result.stats.prompt_tokens;
  out["first_token_seconds"] = result.stats.first_token_seconds;
  out["token_seconds"] = result.stats.token_seconds;
  out["bytes_sent"] = result.stats.bytes_sent;
  out["lost"] = result.stats.lost;
  return out;
}

}  // namespace

void add_llama(nb::module_& module) {
  using Free = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<LlamaModel>(module, "LlamaModel")
      .def_static(
          "load",
          [](const std::filesystem::path& directory, const std::string& weights, int gpu) {
            return shared(LlamaModel::load(directory, load_options(weights, gpu)));
          },
          nb::arg("directory"), nb::arg("weights") = "as_stored", nb::arg("gpu") = -1, Free())
      .def_static(
          "random",
          [](const std::string& shape, std::uint64_t seed, const std::string& weights, int gpu) {
            return shared(LlamaModel::random(shape, seed, load_options(weights, gpu)));
          },
          nb::arg("shape"), nb::arg("seed") = 0, nb::arg("weights") = "as_stored", nb::arg("gpu") = -1, Free())
      .def_prop_ro("vocab", &LlamaModel::vocab)
      .def_prop_ro("context", &LlamaModel::context)
      .def_prop_ro("has_tokenizer", &LlamaModel::has_tokenizer)
      .def(
          "encode", [](const LlamaModel& model, const std::string& text) { return model.encode(text); },
          nb::arg("text"), Free())
      .def(
          "decode",
          [](const LlamaModel& model, const Tokens& tokens) {
            const std::string bytes = model.decode(tokens);
            return nb::bytes(bytes.data(), bytes.size());
          },
          nb::arg("tokens"));

  nb::class_<Session>(module, "LlamaSession")
      .def(
          "__init__",
          [](Session* place, Model model, World world, const std::string& kv_type, const std::string& strategy) {
            auto pool = std::make_unique<ThreadPool>(ThreadPool::available_cores());
            LlamaSession session(model, world_or_self(world), *pool, session_options(kv_type, strategy));
            new (place) Session{std::move(pool), std::move(model), std::move(session)};
          },
          nb::arg("model"), nb::arg("world") = nb::none(), nb::arg("kv_type") = "bfloat16",
          nb::arg("strategy") = "auto", Free())
      .def_static(
          "load",
          [](const std::filesystem::path& directory, Model model, World world, const std::string& strategy) {
            auto pool = std::make_unique<ThreadPool>(ThreadPool::available_cores());
            LlamaSession session = LlamaSession::load(directory, model, world_or_self(world), *pool,
                                                      session_options("bfloat16", strategy));
            return Session{std::move(pool), std::move(model), std::move(session)};
          },
          nb::arg("directory"), nb::arg("model"), nb::arg("world") = nb::none(), nb::arg("strategy") = "auto", Free())
      .def("generate", &generate, nb::arg("prompt"), nb::arg("on_text") = nb::none(), nb::arg("on_token") = nb::none(),
           nb::arg("on_logits") = nb::none(), nb::arg("options"), kGenerate)
      .def_prop_ro("tokens",
                   [](const Session& self) {
                     const Use use({&self});
                     return self.session.tokens();
                   })
      .def(
          "save",
          [](const Session& self, const std::filesystem::path& directory) {
            const Use use({&self});
            const nb::gil_scoped_release others_go_on;
            self.session.save(directory);
          },
          nb::arg("directory"));
}

}  // namespace treeattn::python
