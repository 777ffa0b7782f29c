// SPDX-License-Identifier: Apache-2.0
// config.json and generation_config.json: what is read, what is refused, and the shapes known by name.
#include "model/config.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include "model/generation_config.h"
#include "model/loaded_model.h"
#include "model/sampler.h"
#include "model/tensor_list.h"
#include "model_files.h"
#include "temporary_directory.h"

namespace treeattn {
namespace {

using namespace model;
using namespace testing_model;
using Tokens = std::vector<std::int32_t>;

LlamaConfig parse_llama(const Json& json) { return parse_config(json.dump(), "config.json"); }

TEST(ModelConfig, ReadsLlama32) {
  EXPECT_EQ(parse_llama(llama_config()), known_shape("llama-3.2-1b"));
  TemporaryDirectory directory;
  write_file(directory.path() / "config.json", llama_config().dump(2));
  EXPECT_EQ(read_config(directory.path() / "config.json"), known_shape("llama-3.2-1b"));
}

// Hugging Face's config.json of the other published models differ in these keys.
TEST(ModelConfig, ReadsTheOtherSizes) {
  const struct {
    const char* name;
    int hidden, layers, heads, feed_forward;
    double factor;
    bool tied;
    std::int64_t parameters;
  } kPublished[] = {{"llama-3.2-1b", 2048, 16, 32, 8192, 32, true, 1'235'814'400},
                    {"llama-3.2-3b", 3072, 28, 24, 8192, 32, true, 3'212'749'824},
                    {"llama-3.1-8b", 4096, 32, 32, 14336, 8, false, 8'030'261'248},
                    {"llama-3.1-70b", 8192, 80, 64, 28672, 8, false, 70'553'706'496},
                    {"llama-3.1-405b", 16384, 126, 128, 53248, 8, false, 405'853'388'800}};
  EXPECT_EQ(known_shapes().size(), std::size(kPublished));
  for (const auto& model : kPublished) {
    Json json = llama_config();
    json["hidden_size"] = model.hidden;
    json["num_hidden_layers"] = model.layers;
    json["num_attention_heads"] = model.heads;
    json["intermediate_size"] = model.feed_forward;
    json["rope_scaling"]["factor"] = model.factor;
    json["tie_word_embeddings"] = model.tied;
    json.erase("head_dim");
    EXPECT_EQ(parse_llama(json), known_shape(model.name)) << model.name;
    EXPECT_EQ(known_shape(model.name).parameters(), model.parameters) << model.name;
  }
}

TEST(ModelConfig, AbsentKeysHaveHuggingFacesDefaults) {
  Json json = llama_config();
  for (const char* key : {"num_key_value_heads", "rms_norm_eps", "rope_theta", "tie_word_embeddings", "hidden_act",
                          "bos_token_id", "eos_token_id", "rope_scaling", "attention_bias", "architectures"}) {
    json.erase(key);
  }
  json["head_dim"] = nullptr;
  const LlamaConfig config = parse_llama(json);
  EXPECT_EQ(config.kv_heads, 32);
  EXPECT_EQ(config.head_dim, 64);
  EXPECT_EQ(config.rms_eps, 1e-6);
  EXPECT_EQ(config.rope_theta, 10000);
  EXPECT_FALSE(config.tied_embeddings || config.rope_scaling);
  EXPECT_EQ(config.eos, Tokens{2});
}

// As transformers 4.57 generates: 2, unless a file says otherwise or generation_config.json is there.
TEST(ModelConfig, WhatEndsATextThatNoFileSpeaksOf) {
  TemporaryDirectory directory;
  const auto eos = [&](const Json& config, const char* generation) {
    write_file(directory.path() / "config.json", config.dump());
    std::filesystem::remove(directory.path() / "generation_config.json");
    if (generation != nullptr) write_file(directory.path() / "generation_config.json", generation);
    return describe_model(directory.path()).config.eos;
  };
  Json absent = llama_config();
  absent.erase("eos_token_id");
  EXPECT_EQ(eos(absent, nullptr), Tokens{2});
  EXPECT_EQ(eos(absent, "{}"), Tokens{});
  EXPECT_EQ(eos(absent, R"({"eos_token_id": null})"), Tokens{});
  EXPECT_EQ(eos(absent, R"({"eos_token_id": [9, 7]})"), (Tokens{9, 7}));
  Json null = absent;
  null["eos_token_id"] = nullptr;
  EXPECT_EQ(eos(null, nullptr), Tokens{});
  null["eos_token_id"] = 5;
  EXPECT_EQ(eos(null, nullptr), Tokens{5});
  EXPECT_EQ(eos(null, "{}"), Tokens{5});
  EXPECT_EQ(eos(null, R"({"eos_token_id": 7})"), (Tokens{5, 7}));
  for (const int vocab : {1, 2, 3}) {
    absent["vocab_size"] = vocab;
    EXPECT_EQ(eos(absent, nullptr), vocab < 3 ? Tokens{} : Tokens{2}) << vocab;
  }
}

TEST(ModelConfig, OtherSpellings) {
  Json json = llama_config();
  json["eos_token_id"] = 128001;  // Llama 3
  json["rope_scaling"]["type"] = json["rope_scaling"]["rope_type"];
  json["rope_scaling"].erase("rope_type");
  EXPECT_EQ(parse_llama(json).eos, std::vector<std::int32_t>{128001});
  EXPECT_EQ(parse_llama(json).rope_scaling, known_shape("llama-3.2-1b").rope_scaling);

  Json together = llama_config();  // newer files
  together["rope_parameters"] = together["rope_scaling"];
  together["rope_parameters"]["rope_theta"] = together["rope_theta"];
  together.erase("rope_scaling");
  together.erase("rope_theta");
  EXPECT_EQ(parse_llama(together), known_shape("llama-3.2-1b"));
  together["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", 5.5}};
  EXPECT_FALSE(parse_llama(together).rope_scaling.has_value());
  EXPECT_EQ(parse_llama(together).rope_theta, 5.5);
  // The base beside the object, and both forms in one file, as transformers reads them.
  together["rope_parameters"] = {{"rope_type", "default"}};
  together["rope_theta"] = 500000.0;
  EXPECT_EQ(parse_llama(together).rope_theta, 500000.0);
  together["rope_parameters"]["rope_theta"] = 7.0;
  together["rope_scaling"] = llama_config()["rope_scaling"];
  EXPECT_EQ(parse_llama(together), known_shape("llama-3.2-1b"));
  together["rope_scaling"]["partial_rotary_factor"] = 0.5;
  EXPECT_THROW(parse_llama(together), BadFile);
}

TEST(ModelConfig, WhatWeightsAreSaidToBe) {
  Json json = llama_config();
  EXPECT_EQ(parse_llama(json).stored, DType::kBFloat16);
  json["torch_dtype"] = "float32";
  EXPECT_EQ(parse_llama(json).stored, DType::kFloat32);
  json.erase("torch_dtype");
  json["dtype"] = "float16";
  EXPECT_EQ(parse_llama(json).stored, DType::kFloat16);
  json["dtype"] = 7;
  EXPECT_EQ(parse_llama(json).stored, DType::kBFloat16);
}

TEST(ModelConfig, RefusesByKeyAndValue) {
  const struct {
    const char* key;  // "a/b": member b of a
    Json value;
    std::vector<std::string> says;
  } kWrong[] = {
      {"/model_type", "mistral", {"model_type", "mistral", "\"llama\""}},
      {"/architectures", {"MistralForCausalLM"}, {"architectures[0]", "MistralForCausalLM", "LlamaForCausalLM"}},
      {"/architectures", Json::array(), {"architectures"}},
      {"/architectures", "LlamaForCausalLM", {"an array"}},
      {"/hidden_act", "gelu", {"hidden_act", "gelu", "silu"}},
      {"/attention_bias", true, {"attention_bias", "true", "false"}},
      {"/mlp_bias", true, {"mlp_bias", "true", "false"}},
      {"/mlp_bias", 0, {"mlp_bias", "true or false"}},
      {"/quantization_config", {{"bits", 4}}, {"quantization_config"}},
      {"/partial_rotary_factor", 0.5, {"partial_rotary_factor", "0.5"}},
      {"/rope_scaling/rope_type", "yarn", {"rope_scaling.rope_type", "yarn", "llama3"}},
      {"/rope_scaling", {{"factor", 2.0}}, {"rope_scaling.rope_type", "required"}},
      {"/rope_scaling", 3, {"rope_scaling", "an object"}},
      {"/rope_scaling/factor", 0.5, {"rope_scaling.factor", "0.5"}},
      {"/rope_scaling/high_freq_factor", 1.0, {"high_freq_factor", "low_freq_factor"}},
      {"/rope_scaling/original_max_position_embeddings", 0, {"original_max_position_embeddings"}},
      {"/vocab_size", 0, {"vocab_size", "0"}},
      {"/vocab_size", -1, {"vocab_size", "-1"}},
      {"/vocab_size", 1e5, {"vocab_size", "an integer"}},
      {"/vocab_size", "128256", {"vocab_size", "an integer"}},
      {"/vocab_size", nullptr, {"vocab_size", "required"}},
      {"/vocab_size", std::uint64_t{1} << 63, {"vocab_size", "9223372036854775808"}},
      {"/hidden_size", std::int64_t{1} << 40, {"hidden_size", "1099511627776"}},
      {"/num_hidden_layers", 1'000'000, {"num_hidden_layers"}},
      {"/num_attention_heads", 0, {"num_attention_heads"}},
      {"/num_key_value_heads", 5, {"num_key_value_heads", "5", "divisor"}},
      {"/num_key_value_heads", 64, {"num_key_value_heads", "64"}},
      {"/head_dim", 60, {"head_dim", "60", "multiple of 8"}},
      {"/head_dim", 8, {"head_dim", "8", "16 to 256"}},
      {"/head_dim", 1 << 20, {"head_dim"}},
      {"/intermediate_size", std::int64_t{1} << 62, {"intermediate_size"}},
      {"/max_position_embeddings", 0, {"max_position_embeddings"}},
      {"/rms_norm_eps", 0, {"rms_norm_eps"}},
      {"/rms_norm_eps", "1e-5", {"rms_norm_eps", "a number"}},
      {"/rope_theta", -1.0, {"rope_theta"}},
      {"/rope_theta", 1e300, {"rope_theta"}},
      {"/eos_token_id", 128256, {"eos_token_id", "128256"}},
      {"/eos_token_id", {1, -1}, {"eos_token_id[1]", "-1"}},
      {"/eos_token_id", Json(std::vector<int>(1000, 1)), {"eos_token_id", "1000"}},
      {"/tie_word_embeddings", "yes", {"tie_word_embeddings"}},
  };
  for (const auto& [key, value, says] : kWrong) {
    Json json = llama_config();
    json[Json::json_pointer(key)] = value;
    SCOPED_TRACE(std::string(key) + " = " + value.dump());
    auto parts = says;
    parts.push_back("config.json");
    expect_refused([&] { parse_llama(json); }, parts);
  }
  Json odd = llama_config();
  odd.erase("head_dim");
  odd["hidden_size"] = 2050;
  expect_refused([&] { parse_llama(odd); }, {"hidden_size", "2050", "num_attention_heads = 32"});
  Json nameless = llama_config();
  nameless.erase("model_type");
  nameless.erase("architectures");
  expect_refused([&] { parse_llama(nameless); }, {"model_type", "architectures"});
}

TEST(ModelConfig, RefusesWhatIsNoJson) {
  const std::string good = llama_config().dump();
  for (const std::string& text :
       {std::string(), std::string("{"), std::string("[]"), std::string("null"), good + "x",
        good.substr(0, good.size() / 2), std::string("\xff\xfe"), std::string("{\"vocab_size\": 1e999}"),
        std::string(100'000, '['), std::string(20, '{'), good.substr(0, good.size() - 1) + ",\"vocab_size\":1}"}) {
    expect_refused([&] { parse_config(text, "some.json"); }, {"some.json"});
  }
  expect_refused([&] { parse_config(R"({"a": {"b": 1, "c": {}, "b": 2}})", "x"); }, {"\"b\"", "twice"});
  expect_refused([&] { parse_config(std::string(40, '[') + std::string(40, ']'), "x"); }, {"deep", "32"});
  expect_refused([&] { parse_config(R"({"a": "\ud800"})", "x"); }, {"not JSON"});
  expect_refused([&] { parse_config("version https://git-lfs.github.com/spec/v1\n", "x"); }, {"x", "Git LFS"});
  expect_refused([&] { parse_config("<!doctype html>", "x"); }, {"not JSON", "last read: '<'"});  // an error's page
  TemporaryDirectory directory;
  expect_refused([&] { read_config(directory.path() / "absent.json"); }, {"absent.json", "No such file"});
  expect_refused([&] { read_config(directory.path()); }, {"not a file"});
  ASSERT_EQ(::mkfifo((directory.path() / "pipe").c_str(), 0600), 0);
  expect_refused([&] { read_config(directory.path() / "pipe"); }, {"not a file"});  // and does not wait for a writer
  write_file(directory.path() / "big.json", std::string(2 << 20, ' ') + good);
  expect_refused([&] { read_config(directory.path() / "big.json"); }, {"big.json", "at most 1048576"});
}

TEST(ModelConfig, KnownShapesAreNamed) {
  expect_refused<InvalidArgument>([] { known_shape("llama-4"); }, {"llama-4", "llama-3.2-1b", "llama-3.1-405b"});
}

TEST(ModelConfig, TensorList) {
  LlamaConfig config = parse_llama(llama_config());
  config.layers = 2;
  const auto find = [&](const std::string& name) -> std::vector<std::int64_t> {
    for (const NamedShape& tensor : tensor_list(config)) {
      if (tensor.name == name) return tensor.shape;
    }
    return {};
  };
  EXPECT_EQ(find("model.embed_tokens.weight"), (std::vector<std::int64_t>{128256, 2048}));
  EXPECT_EQ(find("model.layers.1.self_attn.k_proj.weight"), (std::vector<std::int64_t>{512, 2048}));
  EXPECT_EQ(find("model.layers.1.mlp.down_proj.weight"), (std::vector<std::int64_t>{2048, 8192}));
  EXPECT_EQ(find("model.norm.weight"), (std::vector<std::int64_t>{2048}));
  EXPECT_TRUE(find("lm_head.weight").empty());
  EXPECT_TRUE(find("model.layers.2.mlp.up_proj.weight").empty());
  config.tied_embeddings = false;
  EXPECT_EQ(find("lm_head.weight"), (std::vector<std::int64_t>{128256, 2048}));
  EXPECT_EQ(tensor_list(config).size(), 3u + 2 * 9);
}

TEST(GenerationConfig, ReadsLlama3) {
  const Json json = {{"bos_token_id", 128000},
                     {"do_sample", true},
                     {"eos_token_id", {128001, 128008, 128009}},
                     {"temperature", 0.6},
                     {"top_p", 0.9},
                     {"num_beams", 1},
                     {"typical_p", nullptr},
                     {"suppress_tokens", Json::array()},
                     {"forced_eos_token_id", nullptr},
                     {"transformers_version", "4.45.0"}};
  const GenerationConfig config = parse_generation_config(json.dump(), "generation_config.json");
  GenerationConfig expected;
  expected.sampler.temperature = 0.6;
  expected.sampler.top_k = 50;
  expected.sampler.top_p = 0.9;
  expected.eos = {128001, 128008, 128009};
  EXPECT_EQ(config, expected);
  EXPECT_EQ(parse_generation_config("{}", ""), GenerationConfig());
  TemporaryDirectory directory;
  write_file(directory.path() / "g.json", R"({"do_sample": true, "top_k": 0, "min_p": 0.05, "repetition_penalty": 1.1,)"
                                          R"( "max_new_tokens": 7, "eos_token_id": 3})");
  const GenerationConfig other = read_generation_config(directory.path() / "g.json");
  EXPECT_EQ(other.sampler.top_k, 0);
  EXPECT_EQ(parse_generation_config(R"({"do_sample": true, "top_k": null})", "").sampler.top_k, 0);
  EXPECT_EQ(other.sampler.min_p, 0.05);
  EXPECT_EQ(other.sampler.repetition_penalty, 1.1);
  EXPECT_EQ(other.max_new_tokens, 7);
  EXPECT_EQ(other.eos, std::vector<std::int32_t>{3});
}

TEST(GenerationConfig, TakesTheMostLikelyTokenUnlessToldToDraw) {
  SamplerOptions expected;
  expected.repetition_penalty = 1.5;
  const char* kept = R"({"temperature": 0.6, "top_k": 7, "top_p": 0.5, "min_p": 0.1, "repetition_penalty": 1.5})";
  EXPECT_EQ(parse_generation_config(kept, "").sampler, expected);
  const SamplerOptions drawn = parse_generation_config(R"({"do_sample": true, "top_p": 0})", "").sampler;
  EXPECT_NO_THROW(check_sampler(drawn));
  EXPECT_EQ(drawn.temperature, 1);
}

// All that GenerationConfig of transformers 4.57 writes, and what 5.23 has beside it, at its defaults.
TEST(GenerationConfig, TakesWhatIsSwitchedOff) {
  const char* text =
      R"({"assistant_confidence_threshold": 0.4, "assistant_early_exit": null, "assistant_lookbehind": 10,
    "bad_words_ids": null, "begin_suppress_tokens": null, "bos_token_id": null, "cache_config": null,
    "cache_implementation": null, "compile_config": null, "constraints": null, "decoder_start_token_id": null,
    "disable_compile": false, "diversity_penalty": 0.0, "do_sample": false, "dola_layers": null,
    "early_stopping": false, "encoder_no_repeat_ngram_size": 0, "encoder_repetition_penalty": 1.0,
    "eos_token_id": null, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "exponential_decay_length_penalty": null,
    "force_words_ids": null, "forced_bos_token_id": null, "forced_eos_token_id": null, "guidance_scale": null,
    "is_assistant": false, "length_penalty": 1.0, "low_memory": null, "max_length": 20,
    "max_matching_ngram_size": null, "max_new_tokens": null, "max_time": null, "min_length": 0,
    "min_new_tokens": null, "min_p": null, "no_repeat_ngram_size": 0, "num_assistant_tokens": 20,
    "num_assistant_tokens_schedule": "constant", "num_beam_groups": 1, "num_beams": 1, "num_return_sequences": 1,
    "output_attentions": false, "output_hidden_states": false, "output_logits": null, "output_scores": false,
    "pad_token_id": null, "penalty_alpha": null, "prefill_chunk_size": null, "prompt_lookup_num_tokens": null,
    "remove_invalid_values": false, "renormalize_logits": false, "repetition_penalty": 1.0,
    "return_dict_in_generate": false, "return_legacy_cache": null, "sequence_bias": null, "stop_strings": null,
    "suppress_tokens": null, "target_lookbehind": 10, "temperature": 1.0, "token_healing": false, "top_h": null,
    "top_k": 50, "top_p": 1.0, "transformers_version": "4.57.6", "typical_p": 1.0, "use_cache": true,
    "use_mtp": null, "watermarking_config": null})";
  EXPECT_EQ(parse_generation_config(text, "generation_config.json"), GenerationConfig());
}

TEST(GenerationConfig, RefusesByKeyAndValue) {
  for (const auto& wrong : std::vector<std::pair<std::string, std::string>>{
           {R"({"temperature": -1})", "temperature is -1"},
           {R"({"temperature": "hot"})", "temperature"},
           {R"({"top_k": -1})", "top_k is -1"},
           {R"({"top_k": 1.5})", "top_k"},
           {R"({"top_p": 1.5})", "top_p is 1.5"},
           {R"({"min_p": 2})", "min_p"},
           {R"({"repetition_penalty": 0})", "repetition_penalty"},
           {R"({"max_new_tokens": 0})", "max_new_tokens"},
           {R"({"do_sample": 1})", "do_sample"},
           {R"({"eos_token_id": "</s>"})", "eos_token_id"},
           {R"({"eos_token_id": 3000000000})", "eos_token_id"},
           {R"({"num_beams": 4})", "num_beams is 4"},
           {R"({"no_repeat_ngram_size": 3})", "no_repeat_ngram_size"},
           {R"({"guidance_scale": 1.5})", "guidance_scale is 1.5"},
           {R"({"suppress_tokens": [7]})", "suppress_tokens"},
           {R"({"bad_words_ids": [[7, 8]]})", "bad_words_ids"},
           {R"({"forced_bos_token_id": 0})", "forced_bos_token_id is 0"},
           {R"({"stop_strings": "END"})", "stop_strings"},
           {R"({"encoder_no_repeat_ngram_size": 2})", "encoder_no_repeat_ngram_size is 2; accepted: 0"},
           {R"({"top_h": 0.4})", "top_h is 0.4; accepted: null"},
           {R"({"max_time": 2.5})", "max_time is 2.5; accepted: null"},
           {R"({"constraints": [{}]})", "constraints is an array of 1"},
           {R"({"token_healing": true})", "token_healing is true"},
           {R"({"token_healing": 1})", "token_healing"},
           {"[]", "an object"},
           {"", "not JSON"}}) {
    expect_refused([&] { parse_generation_config(wrong.first, "generation_config.json"); },
                   {"generation_config.json", wrong.second});
  }
}

}  // namespace
}  // namespace treeattn
