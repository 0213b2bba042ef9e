#include "tools/ashlarctl/hf_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <variant>

#include "nlohmann/json.hpp"

namespace ashlar::ctl {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

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
  return LayoutFromHfConfig(config.dump(), {.head = 4, .tail = 4});
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

TEST(HfConfig, NamesTheFieldThatMakesNoSense) {
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
  EXPECT_TRUE(absl::IsUnimplemented(Read(odd).status()));
  EXPECT_FALSE(LayoutFromHfConfig("[1", {}).ok());
}

// Falcon-H1 has both kinds in each layer, Jamba layers of Mamba-1, gpt-oss and Gemma-3 windows.
TEST(HfConfig, TakesNothingForPlainAttentionThatIsNot) {
  json plain = Qwen3Next();
  for (const char* name : {"full_attention_interval", "linear_num_value_heads"}) plain.erase(name);
  EXPECT_EQ(AttentionLayers(Read(plain).value()), 48u);
  const auto refused = [&](const char* name, const json& value) {
    json config = plain;
    config[name] = value;
    EXPECT_THAT(std::string(Read(config).status().message()), HasSubstr(name));
  };
  refused("mamba_n_heads", 24);
  refused("attn_layer_period", 8);
  refused("sliding_window_pattern", 6);
  json types = json::array();
  for (int i = 0; i < 48; ++i) types.push_back(i % 2 == 0 ? "sliding_attention" : "full_attention");
  refused("layer_types", types);
}

}  // namespace
}  // namespace ashlar::ctl
