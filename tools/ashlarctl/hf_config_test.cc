// SPDX-License-Identifier: Apache-2.0
#include "tools/ashlarctl/hf_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <utility>
#include <variant>

#include "nlohmann/json.hpp"
#include "tools/ashlarctl/command.h"

namespace ashlar::ctl {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;
using ::testing::StartsWith;

// The published sizes of Qwen3-Next-80B-A3B.
json Qwen3Next() {
  return {{"model_type", "qwen3_next"},
          {"num_hidden_layers", 48},
          {"full_attention_interval", 4},
          {"hidden_size", 2048},
          {"num_attention_heads", 16},
          {"num_key_value_heads", 2},
          {"head_dim", 256},
          {"linear_num_key_heads", 16},
          {"linear_num_value_heads", 32},
          {"linear_key_head_dim", 128},
          {"linear_value_head_dim", 128},
          {"linear_conv_kernel_dim", 4},
          {"torch_dtype", "bfloat16"}};
}

size_t AttentionLayers(const Layout& layout) {
  return std::ranges::count_if(layout.layers, [](const Layer& layer) { return layer.index() == 0; });
}

absl::StatusOr<Layout> Read(const json& config) {
  // A parser's numbers are unsigned.
  const json parsed = json::parse(config.dump());
  absl::StatusOr<HfLayout> model = LayoutFromHfConfig(parsed, {.head = 4, .tail = 4});
  if (!model.ok()) return model.status();
  return std::move(model->layout);
}

TEST(HfConfig, ReadsGatedDeltaNetBesideAttention) {
  const absl::StatusOr<Layout> layout = Read(Qwen3Next());
  ASSERT_TRUE(layout.ok()) << layout.status();
  ASSERT_EQ(layout->layers.size(), 48u);
  EXPECT_EQ(AttentionLayers(*layout), 12u);
  const auto& linear = std::get<LinearLayer>(layout->layers[0]);
  EXPECT_EQ(linear.family, Family::kGdn);
  EXPECT_EQ(linear.conv_channels, 8192u) << "queries, keys and values";
  EXPECT_EQ(ConvTailBytes(linear), 3u * 8192 * 2) << "in the model's type, the states in fp32";
  const auto& attention = std::get<AttentionLayer>(layout->layers[3]);
  EXPECT_EQ(attention.kv_heads, 2u);
  EXPECT_EQ(attention.key_dim, 256u);
}

TEST(HfConfig, ReadsTheOtherFamilies) {
  const json attention = {{"hidden_size", 4096}, {"num_attention_heads", 32}, {"num_key_value_heads", 8}};
  const auto with = [&](json more) {
    more.update(attention);
    return Read(more);
  };
  const auto plain = with({{"num_hidden_layers", 32}, {"model_type", "llama"}});
  ASSERT_TRUE(plain.ok()) << plain.status();
  EXPECT_EQ(std::get<AttentionLayer>(plain->layers[0]).key_dim, 128u) << "hidden_size over heads";
  const auto bamba = with({{"num_hidden_layers", 4},
                           {"attn_layer_indices", {2}},
                           {"mamba_n_heads", 128},
                           {"mamba_d_head", 64},
                           {"mamba_d_state", 128},
                           {"mamba_n_groups", 1},
                           {"mamba_d_conv", 4}});
  ASSERT_TRUE(bamba.ok()) << bamba.status();
  EXPECT_EQ(AttentionLayers(*bamba), 1u);
  EXPECT_EQ(std::get<LinearLayer>(bamba->layers[0]).conv_channels, 128u * 64 + 2 * 128);
  const auto nemotron = with({{"num_hidden_layers", 4},
                              {"hybrid_override_pattern", "M-*M"},
                              {"mamba_num_heads", 128},
                              {"mamba_head_dim", 64},
                              {"ssm_state_size", 128},
                              {"n_groups", 8},
                              {"conv_kernel", 4}});
  ASSERT_TRUE(nemotron.ok()) << nemotron.status();
  EXPECT_EQ(nemotron->layers.size(), 3u) << "an MLP keeps nothing";
  const auto minimax = with({{"num_hidden_layers", 4},
                             {"model_type", "minimax_text_01"},
                             {"head_dim", 128},
                             {"attn_type_list", {0, 0, 0, 1}}});
  ASSERT_TRUE(minimax.ok()) << minimax.status();
  EXPECT_EQ(std::get<LinearLayer>(minimax->layers[0]).transition, TransitionForm::kScalar);
  const auto kimi =
      Read({{"num_hidden_layers", 4},
            {"kv_lora_rank", 512},
            {"qk_rope_head_dim", 64},
            {"linear_attn_config",
             {{"kda_layers", {1, 2, 3}}, {"num_heads", 32}, {"head_dim", 128}, {"short_conv_kernel_size", 4}}}});
  ASSERT_TRUE(kimi.ok()) << kimi.status();
  EXPECT_EQ(std::get<LinearLayer>(kimi->layers[2]).family, Family::kKda);
  EXPECT_EQ(std::get<AttentionLayer>(kimi->layers[3]).kind, AttentionKind::kMla);
}

TEST(HfConfig, NamesTheFieldThatIsInvalid) {
  const auto refused = [](const char* name, const json& value) {
    json config = Qwen3Next();
    config[name] = value;
    const absl::StatusOr<Layout> layout = Read(config);
    EXPECT_FALSE(layout.ok()) << name;
    EXPECT_THAT(std::string(layout.status().message()), HasSubstr(name));
  };
  refused("num_hidden_layers", -1);
  refused("num_hidden_layers", 5000);
  refused("head_dim", "wide");
  refused("linear_conv_kernel_dim", nullptr);
  refused("full_attention_interval", 0);
  refused("layer_types", json::array({"linear_attention"}));
  json odd = Qwen3Next();
  for (const char* name : {"linear_num_key_heads", "linear_num_value_heads"}) odd.erase(name);
  EXPECT_TRUE(absl::IsInvalidArgument(Read(odd).status())) << "one code for each refusal";
  EXPECT_FALSE(LayoutFromHfConfig(json::array(), {}).ok());
}

json Attention(uint32_t layers) {
  return {{"num_hidden_layers", layers}, {"hidden_size", 2048}, {"num_attention_heads", 16},
          {"num_key_value_heads", 4},    {"head_dim", 128},     {"model_type", "llama"}};
}

std::string Refusal(const json& config) {
  return std::string(Read(config).status().message());
}

// Its groups of five layers end with attention, like the replayer's preset ring-mini.
TEST(HfConfig, ReadsTheGroupsOfRing) {
  json ring = Attention(20);
  ring.update({{"model_type", "bailing_moe_linear"}, {"layer_group_size", 5}, {"group_norm_size", 4}});
  const absl::StatusOr<Layout> layout = Read(ring);
  ASSERT_TRUE(layout.ok()) << layout.status();
  EXPECT_EQ(AttentionLayers(*layout), 4u);
  for (const size_t last : {4, 9, 14, 19}) EXPECT_EQ(layout->layers[last].index(), 0u) << last;
  const auto& linear = std::get<LinearLayer>(layout->layers[0]);
  EXPECT_EQ(linear.family, Family::kLightning);
  EXPECT_EQ(linear.value_heads, 16u);
  EXPECT_EQ(linear.d_k, 128u);
  EXPECT_EQ(linear.conv_channels, 0u);
  ring["num_hidden_layers"] = 22;
  EXPECT_EQ(AttentionLayers(Read(ring).value()), 6u) << "the rest behind the last whole group is attention";
  ring["model_type"] = "bailing_hybrid";
  EXPECT_THAT(Refusal(ring), HasSubstr("\"bailing_hybrid\": linear layers of this model type are not supported"));
}

TEST(HfConfig, CountsTheHeadsOfKeysAndValues) {
  const auto heads = [](const json& more) {
    json config = Attention(2);
    config.erase("num_key_value_heads");
    config.update(more);
    const absl::StatusOr<Layout> layout = Read(config);
    EXPECT_TRUE(layout.ok()) << layout.status();
    return layout.ok() ? std::get<AttentionLayer>(layout->layers[0]).kv_heads : 0;
  };
  EXPECT_EQ(heads(json::object()), 16u);
  EXPECT_EQ(heads({{"num_key_value_heads", nullptr}}), 16u);
  EXPECT_EQ(heads({{"num_key_value_heads", 2}}), 2u);
  EXPECT_EQ(heads({{"multi_query", true}, {"num_kv_heads", 16}}), 1u) << "Falcon-7B";
  EXPECT_EQ(heads({{"multi_query", true}, {"new_decoder_architecture", true}, {"num_kv_heads", 8}}), 8u) << "40B";
  EXPECT_EQ(heads({{"multi_query", false}, {"num_kv_heads", 16}}), 16u);
  EXPECT_EQ(heads({{"multi_query_attention", true}, {"multi_query_group_num", 2}}), 2u) << "GLM-4";
}

TEST(HfConfig, RefusesUnknownAttention) {
  ASSERT_EQ(AttentionLayers(Read(Attention(4)).value()), 4u);
  const std::pair<const char*, json> ills[] = {
      {"mamba_n_heads", 24},
      {"mamba_d_state", 16},  // Mamba-1
      {"ssm_state_size", 128},
      {"linear_num_key_heads", 16},
      {"attn_layer_period", 8},  // Jamba
      {"conv_L_cache", 3},       // LFM2
      {"layer_types", {"attention", "attention", "attention", 2}},
      {"layer_types", {"sliding_attention", "full_attention", "full_attention", "full_attention"}},  // gpt-oss
      {"layers_block_type", {"mamba", "hybrid", "mamba", "hybrid"}},                                 // Zamba2
      {"attn_type_list", {0, 1, 2, 1}},
      {"hybrid_override_pattern", "M*X-"},
      {"block_types", {"recurrent", "recurrent", "attention"}},  // RecurrentGemma
      {"lru_width", 2560},
      {"mb_per_layer", 2},  // Phi-4-flash
      {"layer_group_size", 5},
      {"linear_attn_config", {{"num_heads", 32}}},
      {"sliding_window", 4096},  // Gemma-2, Mistral v0.1
      {"sliding_window_pattern", 6},
      {"attention_chunk_size", 8192},
      {"block_configs", json::array({json::object()})},
      {"num_kv_shared_layers", 2},
      {"use_cla", true},
      {"index_head_dim", 128},
  };
  for (const auto& [name, value] : ills) {
    json config = Attention(4);
    config[name] = value;
    EXPECT_THAT(Refusal(config), HasSubstr(name)) << value;
  }
}

TEST(HfConfig, AcceptsDisabledAndHandledFields) {
  const json more[] = {
      {{"sliding_window", nullptr}, {"num_kv_shared_layers", 0}, {"mamba_n_heads", nullptr}},
      {{"sliding_window", 32768}, {"use_sliding_window", false}},  // Qwen2.5
      {{"sliding_window", 4096}, {"layer_types", {"full_attention", "full_attention"}}},
      {{"mamba_n_heads", 48}, {"layer_types", {"attention", "attention"}}},  // Granite 4 without Mamba
  };
  for (const json& each : more) {
    json config = Attention(2);
    config.update(each);
    const absl::StatusOr<Layout> layout = Read(config);
    ASSERT_TRUE(layout.ok()) << layout.status();
    EXPECT_EQ(AttentionLayers(*layout), 2u);
  }
  json qwen = Qwen3Next();
  qwen["mamba_ssm_dtype"] = "float32";  // Qwen3.5
  EXPECT_TRUE(Read(qwen).ok()) << Refusal(qwen);
  qwen["conv_L_cache"] = 3;
  EXPECT_THAT(Refusal(qwen), HasSubstr("conv_L_cache"));
}

TEST(HfConfig, NamesUnknownFamilies) {
  for (const char* family : {"mamba2", "falcon_mamba", "rwkv6"}) {
    json config = Attention(4);
    config["model_type"] = family;
    EXPECT_TRUE(absl::IsInvalidArgument(Read(config).status())) << family;
    EXPECT_THAT(Refusal(config), HasSubstr(family));
  }
}

// Answers of `ashlarctl layout` for a file of models, by the models' names.
std::map<std::string, json> AnswersFor(const std::string& path) {
  AdminClient client("/nonexistent");
  const absl::StatusOr<Answer> answer = LayoutCosts({.files = {path}}, client);
  EXPECT_TRUE(answer.ok()) << answer.status();
  std::map<std::string, json> answers;
  if (!answer.ok()) return answers;
  for (const char* const part : {"accepted", "refused"}) {
    for (const json& each : answer->json[part])
      answers[each["model"].get<std::string>().substr(path.size() + 2)] = each;
  }
  return answers;
}

// The answer's figures, under the names that the file uses.
void ExpectFigures(const json& derived, const json& answer) {
  static const std::map<std::string, const char*> names = {{"kv_bytes_per_token_16bit", "token_bytes"},
                                                           {"recurrent_state_bytes_fp32", "recurrent_state_bytes"},
                                                           {"conv_tail_bytes_bf16", "conv_tail_bytes"},
                                                           {"conv_layers", "convolution_layers"}};
  for (const auto& [name, figure] : derived.items()) {
    if (name == "state_elements_per_layer" || name == "conv_channels" || name == "conv_kernel") continue;
    const auto other = names.find(name);
    const std::string field = other == names.end() ? name : other->second;
    EXPECT_EQ(answer[field], figure) << field;
  }
}

TEST(HfConfig, EveryModelIsRightOrRefusedByField) {
  const std::string path = ASHLAR_MODEL_CONFIGS;
  const std::map<std::string, json> answers = AnswersFor(path);
  const json file = json::parse(std::ifstream(path));
  ASSERT_EQ(answers.size(), file["models"].size()) << "names are unique";
  for (const json& model : file["models"]) {
    const std::string name = model["model"];
    SCOPED_TRACE(name);
    const json& answer = answers.at(name);
    if (model.contains("refused")) {
      ASSERT_TRUE(answer.contains("error")) << answer;
      EXPECT_THAT(answer["error"].get<std::string>(),
                  StartsWith(path + ": " + name + ": " + std::string(model["refused"])));
    } else {
      ASSERT_FALSE(answer.contains("error")) << answer["error"];
      ExpectFigures(model["derived"], answer);
    }
  }
}

// The published configurations, if available: accepted ones have the figures that were derived by hand, and the others
// are refused with the name of the unsupported or missing field.
TEST(HfConfig, PublishedModelsAreRightOrRefusedByField) {
  const char* const given = std::getenv("ASHLAR_SHARED");
  const std::string path =
      std::string(given != nullptr ? given : ASHLAR_SOURCE_DIR "/../shared") + "/models/configs.json";
  if (!std::filesystem::exists(path)) GTEST_SKIP() << path << " is not at hand";
  const std::map<std::string, json> answers = AnswersFor(path);
  size_t accepted = 0;
  const json file = json::parse(std::ifstream(path));
  for (const json& model : file["models"]) {
    const std::string name = model["model"];
    SCOPED_TRACE(name);
    const json& answer = answers.at(name);
    if (answer.contains("error")) {
      const std::string why = answer["error"].get<std::string>().substr((path + ": " + name + ": ").size());
      const std::string field = why.substr(0, why.find(':'));
      EXPECT_TRUE(model["config"].contains(field) || why.find(": missing") != std::string::npos) << why;
    } else {
      ++accepted;
      ASSERT_FALSE(model["derived"].empty()) << "nothing says that these figures are right: " << answer;
      ExpectFigures(model["derived"], answer);
    }
  }
  EXPECT_GE(accepted, 34u);
}

TEST(HfConfig, SeparateFilesAreReadOrRefusedByName) {
  const std::string folder = ::testing::TempDir() + "/";
  const std::string sound = folder + "sound.json", odd = folder + "odd.json", list = folder + "list.json";
  // Python writes numbers that JSON does not have.
  std::ofstream(sound) << R"({"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "note": "a NaN \\\"",
                              "time_step_limit": [0.0, Infinity], "mtp_loss_x": NaN})";
  std::ofstream(odd) << R"({"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "window_size": 7})";
  std::ofstream(list) << R"({"models": [{"config": {}}]})";
  AdminClient client("/nonexistent");
  const auto one = LayoutCosts({.files = {sound}}, client);
  ASSERT_TRUE(one.ok()) << one.status();
  EXPECT_EQ(one->json["model"], sound);
  const absl::Status refused = LayoutCosts({.files = {odd}}, client).status();
  EXPECT_TRUE(absl::IsInvalidArgument(refused));
  EXPECT_THAT(std::string(refused.message()), StartsWith(odd + ": window_size: 7 is unknown"));
  const auto both = LayoutCosts({.files = {odd, sound}}, client);
  ASSERT_TRUE(both.ok()) << both.status();
  EXPECT_TRUE(both->refused);
  EXPECT_EQ(both->json["accepted"][0]["model"], sound);
  EXPECT_EQ(both->json["refused"][0]["model"], odd);
  EXPECT_THAT(both->text, HasSubstr("1 of 2 accepted"));
  EXPECT_THAT(std::string(LayoutCosts({.files = {list}}, client).status().message()),
              HasSubstr(list + ": models[0]: "));
  EXPECT_THAT(std::string(LayoutCosts({.files = {folder + "none"}}, client).status().message()), HasSubstr("none"));
}

TEST(HfConfig, StatesHaveTheRequestedTypeOrTheFiles) {
  json qwen = Qwen3Next();
  qwen["mamba_ssm_dtype"] = "bfloat16";
  EXPECT_EQ(std::get<LinearLayer>(Read(qwen)->layers[0]).state_dtype, DType::kBF16);
  const auto asked = LayoutFromHfConfig(json::parse(qwen.dump()), {.head = 4, .tail = 4, .state_dtype = DType::kF32});
  EXPECT_EQ(std::get<LinearLayer>(asked->layout.layers[0]).state_dtype, DType::kF32);
  qwen["mamba_ssm_dtype"] = "int8";
  EXPECT_THAT(Refusal(qwen),
              HasSubstr("mamba_ssm_dtype: \"int8\" is unsupported; expected float32, float16 or bfloat16"));
}

}  // namespace
}  // namespace ashlar::ctl
