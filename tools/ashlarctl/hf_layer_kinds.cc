// SPDX-License-Identifier: Apache-2.0
#include "tools/ashlarctl/hf_layer_kinds.h"

#include <algorithm>
#include <optional>
#include <string>

#include "absl/strings/str_cat.h"

namespace ashlar::ctl {
namespace {

using nlohmann::json;
using Kinds = std::vector<LayerKind>;

constexpr uint64_t kMostLayers = 1024;

const char* NameOf(LayerKind kind) {
  static constexpr const char* kNames[] = {"attention", "linear", "attention and linear", "a convolution", "no state"};
  return kNames[static_cast<size_t>(kind)];
}

// Families in which some layers are not attention: a missing list of those layers does not mean "none".
bool IsHybrid(const std::string& model_type) {
  static constexpr const char* kFamilies[] = {"bailing_hybrid", "bailing_moe_linear",
                                              "bamba",          "falcon_h1",
                                              "falcon_mamba",   "granitemoehybrid",
                                              "hymba",          "jamba",
                                              "kimi_linear",    "lfm2",
                                              "lfm3",           "mamba",
                                              "mamba2",         "minimax",
                                              "minimax_m1",     "minimax_text_01",
                                              "nemotron_h",     "olmo_hybrid",
                                              "plamo2",         "qwen3_5",
                                              "qwen3_next",     "recurrent_gemma",
                                              "rwkv",           "rwkv5",
                                              "rwkv6",          "rwkv7",
                                              "xlstm",          "zamba",
                                              "zamba2",         "zaya"};
  return std::ranges::any_of(kFamilies, [&](const std::string& family) {
    return model_type == family || model_type.starts_with(family + "_moe") || model_type == family + "_text";
  });
}

std::optional<LayerKind> KindOfWord(const json& word, const std::string& model_type) {
  if (word == "full_attention" || word == "attention") return LayerKind::kAttention;
  if (word == "linear_attention" || word == "mamba" || word == "mamba2") return LayerKind::kLinear;
  if (word == "conv") return LayerKind::kConvolution;
  if (word == "mlp" || word == "moe") return LayerKind::kNothing;
  // Other models use this word for layers of other kinds.
  if (word == "hybrid" && model_type == "zamba2") return LayerKind::kBoth;
  return std::nullopt;
}

Kinds ReadWords(HfFields& fields, const char* name, size_t layers) {
  Kinds kinds(layers, LayerKind::kAttention);
  const std::vector<json> words = fields.List(name);
  if (words.size() != layers)
    fields.Refuse(name, absl::StrCat(words.size(), " entries; expected one per layer, ", layers));
  for (size_t i = 0; i < std::min(words.size(), layers); ++i) {
    const std::optional<LayerKind> kind = KindOfWord(words[i], fields.Text("model_type"));
    if (words[i] == "sliding_attention" || words[i] == "chunked_attention") {
      fields.Refuse(name, absl::StrCat(ShownJson(words[i]), ": sliding-window attention is not supported"));
    } else if (!kind) {
      fields.Refuse(name, absl::StrCat(ShownJson(words[i]), " is not a supported layer type"));
    }
    kinds[i] = kind.value_or(LayerKind::kAttention);
  }
  return kinds;
}

// MiniMax: 1 for attention, 0 for lightning attention.
Kinds ReadAttentionFlags(HfFields& fields, const char* name, size_t layers) {
  Kinds kinds(layers, LayerKind::kAttention);
  const std::vector<json> flags = fields.List(name);
  if (flags.size() != layers)
    fields.Refuse(name, absl::StrCat(flags.size(), " entries; expected one per layer, ", layers));
  for (size_t i = 0; i < std::min(flags.size(), layers); ++i) {
    if (flags[i] != 0 && flags[i] != 1)
      fields.Refuse(name, absl::StrCat(ShownJson(flags[i]), " is invalid; expected 0 or 1"));
    if (flags[i] == 0) kinds[i] = LayerKind::kLinear;
  }
  return kinds;
}

// Nemotron-H.
Kinds ReadPattern(HfFields& fields, const char* name, size_t layers) {
  Kinds kinds(layers, LayerKind::kNothing);
  const std::string pattern = fields.Text(name);
  if (pattern.size() != layers) fields.Refuse(name, absl::StrCat(pattern.size(), " letters for ", layers, " layers"));
  if (pattern.find_first_not_of("M*-E") != std::string::npos)
    fields.Refuse(name, "has an unknown letter; expected M, *, - and E");
  for (size_t i = 0; i < std::min(pattern.size(), layers); ++i) {
    if (pattern[i] == 'M') kinds[i] = LayerKind::kLinear;
    if (pattern[i] == '*') kinds[i] = LayerKind::kAttention;
  }
  return kinds;
}

// Sets the kind of the layers in a list of numbers, counted from `first`.
void SetListed(HfFields& fields, const char* name, uint64_t first, LayerKind kind, Kinds& kinds) {
  for (const json& layer : fields.List(name)) {
    const bool sound =
        layer.is_number_unsigned() && layer.get<uint64_t>() >= first && layer.get<uint64_t>() - first < kinds.size();
    if (!sound) fields.Refuse(name, absl::StrCat(ShownJson(layer), " is not a layer index"));
    if (sound) kinds[layer.get<uint64_t>() - first] = kind;
  }
}

// Kimi-Linear: both lists name layers counted from 1, and together name all of them.
Kinds ReadKdaLayers(HfFields& fields, const char* name, size_t layers) {
  HfFields own(fields.Object(name), absl::StrCat(name, "."));
  Kinds linear(layers, LayerKind::kAttention), full(layers, LayerKind::kLinear);
  SetListed(own, "kda_layers", 1, LayerKind::kLinear, linear);
  if (own.Has("full_attn_layers")) SetListed(own, "full_attn_layers", 1, LayerKind::kAttention, full);
  if (own.Has("full_attn_layers") && full != linear)
    own.Refuse("full_attn_layers", "must be the complement of kda_layers");
  for (const char* const read : {"num_heads", "head_dim", "short_conv_kernel_size"}) own.Accept(read);
  RefuseUnread(own, /*recurrence_matters=*/true);
  fields.Refuse(own.status());
  return linear;
}

// A list of the layers of kind `listed`; all others are of kind `rest`. LFM2: attention among convolutions. Zamba2: a
// shared attention block with some of the Mamba-2 layers.
template <LayerKind listed, LayerKind rest>
Kinds ReadListed(HfFields& fields, const char* name, size_t layers) {
  Kinds kinds(layers, rest);
  SetListed(fields, name, 0, listed, kinds);
  return kinds;
}

// Attention is the last layer of each group.
Kinds ReadInterval(HfFields& fields, const char* name, size_t layers) {
  Kinds kinds(layers, LayerKind::kLinear);
  const uint32_t group = fields.Number(name);
  for (size_t i = group - 1; i < layers; i += group) kinds[i] = LayerKind::kAttention;
  return kinds;
}

// Ring and Ling: the same, and the layers after the last whole group.
Kinds ReadGroups(HfFields& fields, const char* name, size_t layers) {
  Kinds kinds = ReadInterval(fields, name, layers);
  const size_t whole = layers / fields.Number(name) * fields.Number(name);
  std::fill(kinds.begin() + static_cast<ptrdiff_t>(whole), kinds.end(), LayerKind::kAttention);
  return kinds;
}

// Jamba.
Kinds ReadPeriod(HfFields& fields, const char* name, size_t layers) {
  Kinds kinds(layers, LayerKind::kLinear);
  const uint32_t period = fields.Number(name);
  for (size_t i = fields.NumberOrZero("attn_layer_offset"); i < layers; i += period) kinds[i] = LayerKind::kAttention;
  return kinds;
}

struct Source {
  const char* field;
  Kinds (*read)(HfFields& fields, const char* name, size_t layers);
  bool one_a_layer = false;    // its length is the number of layers
  bool names_windows = false;  // whether it would name layers with windows
  const char* only_of = "";    // families whose names begin with this
};

constexpr Source kSources[] = {
    {"linear_attn_config", ReadKdaLayers},
    {"hybrid_override_pattern", ReadPattern, true},
    {"layer_types", ReadWords, true, true},
    {"layers_block_type", ReadWords, true, true},
    {"attn_type_list", ReadAttentionFlags, true},
    {"full_attention_interval", ReadInterval},
    {"attn_layer_indices", ReadListed<LayerKind::kAttention, LayerKind::kLinear>},
    {"layer_group_size", ReadGroups, false, false, "bailing_"},
    {"hybrid_layer_ids", ReadListed<LayerKind::kBoth, LayerKind::kLinear>, false, false, "zamba2"},
    {"full_attn_idxs", ReadListed<LayerKind::kAttention, LayerKind::kConvolution>, false, false, "lfm2"},
    {"attn_layer_period", ReadPeriod, false, false, "jamba"},
};

// 0: refused.
size_t CountLayers(HfFields& fields) {
  if (fields.Has("num_hidden_layers")) {
    const uint32_t layers = fields.Number("num_hidden_layers");
    if (layers > kMostLayers) fields.Refuse("num_hidden_layers", "too many; expected at most 1,024");
    return fields.status().ok() ? layers : 0;
  }
  for (const Source& source : kSources) {
    if (!source.one_a_layer || !fields.Has(source.field)) continue;
    const json& value = fields.object()[source.field];
    const size_t layers = value.is_string() ? value.get_ref<const std::string&>().size() : value.size();
    if (layers > 0 && layers <= kMostLayers) return layers;
    fields.Refuse(source.field, "out of range; expected 1 to 1,024 layers");
    return 0;
  }
  fields.Refuse("num_hidden_layers", "missing");
  return 0;
}

}  // namespace

bool LayerKinds::Any(LayerKind kind) const {
  return std::ranges::count(of_layers, kind) > 0;
}

LayerKinds ReadLayerKinds(HfFields& fields) {
  LayerKinds kinds;
  const size_t layers = CountLayers(fields);
  const std::string type = fields.Text("model_type");
  if (layers == 0) return kinds;
  kinds.of_layers.assign(layers, LayerKind::kAttention);
  const char* first = "model_type";
  if (type == "falcon_h1") {
    kinds.of_layers.assign(layers, LayerKind::kBoth);
    kinds.said = true;
  }
  for (const Source& source : kSources) {
    if (!fields.Has(source.field) || !type.starts_with(source.only_of)) continue;
    const Kinds read = source.read(fields, source.field, layers);
    if (!fields.status().ok()) return kinds;
    if (kinds.said && read != kinds.of_layers) {
      const size_t layer = std::ranges::mismatch(read, kinds.of_layers).in1 - read.begin();
      fields.Refuse(source.field, absl::StrCat("layer ", layer, " is ", NameOf(read[layer]), ", but according to ",
                                               first, " it is ", NameOf(kinds.of_layers[layer])));
      return kinds;
    }
    if (!kinds.said) first = source.field;
    kinds.of_layers = read;
    kinds.said = true;
    kinds.windows |= source.names_windows;
  }
  if (!kinds.said && fields.object().contains("linear_attn_config")) {
    fields.Refuse("linear_attn_config", "null; no other field lists the linear layers");
  } else if (!kinds.said && IsHybrid(type)) {
    fields.Refuse("model_type", absl::StrCat(ShownJson(type),
                                             " has layers without attention, and no known field "
                                             "(such as layer_types) lists them"));
  }
  return kinds;
}

}  // namespace ashlar::ctl
