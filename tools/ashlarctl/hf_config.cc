#include "tools/ashlarctl/hf_config.h"

#include <algorithm>
#include <optional>
#include <vector>

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"

namespace ashlar::ctl {
namespace {

using nlohmann::json;

constexpr uint64_t kMostLayers = 1024;
constexpr size_t kMostShown = 64;  // of a word of the file

std::string Shown(const json& value) {
  const std::string text = value.dump(-1, ' ', /*ensure_ascii=*/true, json::error_handler_t::replace);
  return text.size() <= kMostShown ? text : absl::StrCat(text.substr(0, kMostShown), "...");
}

// Reads fields, and remembers the first that cannot be read.
class Fields {
 public:
  explicit Fields(const json& object) : object_(object) {}

  bool Has(const char* name) const { return object_.contains(name) && !object_[name].is_null(); }
  uint32_t Number(const char* name) {
    if (!Has(name)) return Refuse(name, "missing");
    const json& value = object_[name];
    if (!value.is_number_unsigned() || value.get<uint64_t>() == 0 || value.get<uint64_t>() > UINT32_MAX) {
      return Refuse(name, "not a positive number of 32 bits");
    }
    return value.get<uint32_t>();
  }
  uint32_t NumberOr(const char* name, uint32_t otherwise) { return Has(name) ? Number(name) : otherwise; }
  std::string Text(const char* name) const {
    return Has(name) && object_[name].is_string() ? object_[name].get<std::string>() : "";
  }
  std::vector<json> List(const char* name) {
    if (!Has(name) || !object_[name].is_array()) {
      Refuse(name, "missing, or no list");
      return {};
    }
    return object_[name].get<std::vector<json>>();
  }
  bool IsTrue(const char* name) const { return Has(name) && object_[name] == true; }
  uint32_t Refuse(absl::string_view name, absl::string_view why) {
    if (status_.ok()) status_ = absl::InvalidArgumentError(absl::StrCat("config.json: ", name, ": ", why));
    return 1;
  }
  const absl::Status& status() const { return status_; }
  const json& operator[](const char* name) const { return object_[name]; }
  const json& object() const { return object_; }

 private:
  const json& object_;
  absl::Status status_;
};

DType TypeOf(Fields& fields) {
  const std::string name = fields.Has("dtype") ? fields.Text("dtype") : fields.Text("torch_dtype");
  if (name == "float32") return DType::kF32;
  return name == "float16" ? DType::kF16 : DType::kBF16;
}

// Fewer than the queries' heads, which each family says in its own way.
uint32_t KeyValueHeads(Fields& fields, uint32_t heads) {
  if (fields.Has("num_key_value_heads")) return fields.Number("num_key_value_heads");
  if (fields.IsTrue("multi_query_attention")) return fields.Number("multi_query_group_num");  // ChatGLM
  // Falcon: its older models have the number of their query heads in num_kv_heads, and one head.
  if (fields.IsTrue("multi_query") && !fields.IsTrue("new_decoder_architecture")) return 1;
  return fields.NumberOr("num_kv_heads", heads);
}

AttentionLayer Attention(Fields& fields) {
  AttentionLayer layer;
  layer.dtype = TypeOf(fields);
  if (fields.Has("kv_lora_rank")) {
    layer.kind = AttentionKind::kMla;
    layer.kv_heads = 1;
    layer.key_dim = fields.Number("kv_lora_rank");
    layer.value_dim = fields.Number("qk_rope_head_dim");
    return layer;
  }
  const uint32_t heads = fields.Number("num_attention_heads");
  layer.kv_heads = KeyValueHeads(fields, heads);
  layer.key_dim = layer.value_dim =
      fields.Has("head_dim") ? fields.Number("head_dim") : fields.Number("hidden_size") / heads;
  return layer;
}

LinearLayer Linear(Family family, uint32_t key_heads, uint32_t value_heads, uint32_t d_k, uint32_t d_v) {
  LinearLayer layer{.family = family,
                    .key_heads = key_heads,
                    .value_heads = value_heads,
                    .d_k = d_k,
                    .d_v = d_v,
                    .transition = NaturalForm(family)};
  if (layer.transition == TransitionForm::kScalar) layer.decay_table.assign(value_heads, -1.0F);
  return layer;
}

void Convolve(LinearLayer& layer, uint32_t channels, uint32_t kernel, DType inputs) {
  layer.conv_channels = channels;
  layer.conv_kernel = kernel;
  if (inputs != layer.state_dtype) layer.conv_dtype = inputs;
}

// Gated DeltaNet as Qwen3-Next has it.
LinearLayer GatedDeltaNet(Fields& fields, DType state) {
  const uint32_t keys = fields.Number("linear_num_key_heads"), values = fields.Number("linear_num_value_heads");
  const uint32_t d_k = fields.Number("linear_key_head_dim"), d_v = fields.Number("linear_value_head_dim");
  LinearLayer layer = Linear(Family::kGdn, keys, values, d_k, d_v);
  layer.state_dtype = state;
  Convolve(layer, 2 * keys * d_k + values * d_v, fields.Number("linear_conv_kernel_dim"), TypeOf(fields));
  return layer;
}

LinearLayer Kda(Fields& fields, DType state) {
  const json none = json::object();
  Fields own(fields.Has("linear_attn_config") ? fields["linear_attn_config"] : none);
  const uint32_t heads = own.Number("num_heads"), dim = own.Number("head_dim");
  LinearLayer layer = Linear(Family::kKda, heads, heads, dim, dim);
  layer.state_dtype = state;
  Convolve(layer, 3 * heads * dim, own.Number("short_conv_kernel_size"), TypeOf(fields));
  if (!own.status().ok()) fields.Refuse("linear_attn_config", "num_heads, head_dim or short_conv_kernel_size missing");
  return layer;
}

LinearLayer Lightning(Fields& fields, DType state) {
  const uint32_t heads = fields.Number("num_attention_heads");
  const uint32_t dim = fields.Has("head_dim") ? fields.Number("head_dim") : fields.Number("hidden_size") / heads;
  LinearLayer layer = Linear(Family::kLightning, heads, heads, dim, dim);
  layer.state_dtype = state;
  return layer;
}

// Its B and C are the keys and queries of groups of heads, its x the values.
LinearLayer Mamba2(Fields& fields, DType state) {
  const bool nemotron = fields.Has("mamba_num_heads");
  const uint32_t heads = fields.Number(nemotron ? "mamba_num_heads" : "mamba_n_heads");
  const uint32_t d_v = fields.Number(nemotron ? "mamba_head_dim" : "mamba_d_head");
  const uint32_t d_k = fields.Number(nemotron ? "ssm_state_size" : "mamba_d_state");
  const uint32_t groups = fields.NumberOr(nemotron ? "n_groups" : "mamba_n_groups", 1);
  LinearLayer layer = Linear(Family::kMamba2, groups, heads, d_k, d_v);
  layer.state_dtype = state;
  Convolve(layer, heads * d_v + 2 * groups * d_k, fields.NumberOr(nemotron ? "conv_kernel" : "mamba_d_conv", 4),
           TypeOf(fields));
  return layer;
}

enum class Kind { kAttention, kLinear, kNothing };  // kNothing: keeps nothing of a token (an MLP alone)

struct Kinds {
  std::vector<Kind> of_layers;
  bool said = true;      // by a field; otherwise all are taken for attention
  bool windows = false;  // that field says which layers have a window, too
};

// Of one word of a list, or its number.
std::optional<Kind> KindOf(const json& type) {
  if (type.is_number_integer()) {
    if (type == 0) return Kind::kLinear;
    return type == 1 ? std::optional(Kind::kAttention) : std::nullopt;
  }
  const std::string word = type.is_string() ? type.get<std::string>() : "";
  if (word == "full_attention" || word == "attention") return Kind::kAttention;
  if (word == "linear_attention" || word == "mamba" || word == "mamba2") return Kind::kLinear;
  return word == "mlp" || word == "moe" ? std::optional(Kind::kNothing) : std::nullopt;
}

void ReadList(Fields& fields, const char* name, std::vector<Kind>& kinds) {
  const std::vector<json> types = fields.List(name);
  if (types.size() != kinds.size()) fields.Refuse(name, "not one for each of num_hidden_layers");
  for (size_t i = 0; i < std::min(types.size(), kinds.size()); ++i) {
    const std::optional<Kind> kind = KindOf(types[i]);
    if (types[i] == "sliding_attention" || types[i] == "chunked_attention") {
      fields.Refuse(name, "windows are not known");
    } else if (!kind) {
      fields.Refuse(name, absl::StrCat(Shown(types[i]), " is no kind of layer that is known"));
    }
    kinds[i] = kind.value_or(Kind::kAttention);
  }
}

void ReadPattern(Fields& fields, std::vector<Kind>& kinds) {
  const std::string pattern = fields.Text("hybrid_override_pattern");
  if (pattern.size() != kinds.size()) fields.Refuse("hybrid_override_pattern", "not one letter for each layer");
  for (size_t i = 0; i < std::min(pattern.size(), kinds.size()); ++i) {
    const char letter = pattern[i];
    if (letter != 'M' && letter != '*' && letter != '-' && letter != 'E') {
      fields.Refuse("hybrid_override_pattern", "letters other than M, *, - and E");
    }
    kinds[i] = letter == 'M' ? Kind::kLinear : letter == '*' ? Kind::kAttention : Kind::kNothing;
  }
}

void ReadKdaLayers(Fields& fields, std::vector<Kind>& kinds) {
  const json& own = fields["linear_attn_config"];
  const bool there = own.is_object() && own.contains("kda_layers") && own["kda_layers"].is_array();
  if (!there) fields.Refuse("linear_attn_config", "kda_layers: missing, or no list");
  if (!there) return;
  for (const json& layer : own["kda_layers"]) {  // counted from 1
    const bool sound =
        layer.is_number_unsigned() && layer.get<uint64_t>() >= 1 && layer.get<uint64_t>() <= kinds.size();
    if (!sound) fields.Refuse("linear_attn_config", "kda_layers: not the numbers of layers");
    if (sound) kinds[layer.get<uint64_t>() - 1] = Kind::kLinear;
  }
}

void ReadAttentionLayers(Fields& fields, std::vector<Kind>& kinds) {
  std::ranges::fill(kinds, Kind::kLinear);
  for (const json& layer : fields.List("attn_layer_indices")) {
    const bool sound = layer.is_number_unsigned() && layer.get<uint64_t>() < kinds.size();
    if (!sound) fields.Refuse("attn_layer_indices", "not the numbers of layers");
    if (sound) kinds[layer.get<uint64_t>()] = Kind::kAttention;
  }
}

// Attention is the last layer of each group, and all layers behind the last whole group where `rest`.
void ReadGroups(uint32_t group, bool rest, std::vector<Kind>& kinds) {
  const size_t whole = kinds.size() / group * group;
  for (size_t i = 0; i < kinds.size(); ++i) {
    kinds[i] = (i + 1) % group == 0 || (rest && i >= whole) ? Kind::kAttention : Kind::kLinear;
  }
}

bool IsRing(const Fields& fields) {
  return fields.Text("model_type") == "bailing_moe_linear";
}

// One for each layer. A family says it in its own way.
Kinds KindsOf(Fields& fields, uint32_t layers) {
  Kinds kinds{.of_layers = std::vector<Kind>(layers, Kind::kAttention)};
  if (fields.Has("linear_attn_config")) {
    ReadKdaLayers(fields, kinds.of_layers);
  } else if (fields.Has("hybrid_override_pattern")) {
    ReadPattern(fields, kinds.of_layers);
  } else if (fields.Has("layer_types")) {
    ReadList(fields, "layer_types", kinds.of_layers);
    kinds.windows = true;
  } else if (fields.Has("layers_block_type")) {
    ReadList(fields, "layers_block_type", kinds.of_layers);
  } else if (fields.Has("attn_type_list")) {
    ReadList(fields, "attn_type_list", kinds.of_layers);
  } else if (fields.Has("full_attention_interval")) {
    ReadGroups(fields.Number("full_attention_interval"), /*rest=*/false, kinds.of_layers);
  } else if (fields.Has("attn_layer_indices")) {
    ReadAttentionLayers(fields, kinds.of_layers);
  } else if (IsRing(fields) && fields.Has("layer_group_size")) {
    ReadGroups(fields.Number("layer_group_size"), /*rest=*/true, kinds.of_layers);
  } else {
    kinds.said = false;
  }
  return kinds;
}

// How a family's linear layers are made, and the fields of a recurrence that these then account for.
struct LinearRule {
  LinearLayer (*make)(Fields&, DType);
  std::vector<std::string> accounts_for;  // names, or with '*' at the end beginnings of names
};

std::optional<LinearRule> LinearOf(const Fields& fields) {
  if (fields.Has("linear_num_value_heads")) return LinearRule{GatedDeltaNet, {"linear_*", "mamba_ssm_dtype"}};
  if (fields.Has("linear_attn_config")) return LinearRule{Kda, {}};
  if (fields.Has("mamba_n_heads") || fields.Has("mamba_num_heads")) {
    return LinearRule{Mamba2, {"mamba_*", "ssm_*", "conv_kernel"}};
  }
  if (IsRing(fields)) return LinearRule{Lightning, {"layer_group_size"}};
  if (fields.Text("model_type").find("minimax") != std::string::npos) return LinearRule{Lightning, {}};
  return std::nullopt;
}

bool IsAmong(const std::string& name, const std::vector<std::string>& names) {
  return std::ranges::any_of(names, [&](const std::string& each) {
    return each.back() == '*' ? name.starts_with(each.substr(0, each.size() - 1)) : name == each;
  });
}

// Families whose fields would be taken for another one's, or for those of attention.
absl::Status CheckFamily(const Fields& fields) {
  const std::string type = fields.Text("model_type");
  const auto refused = [&](absl::string_view why) {
    return absl::UnimplementedError(absl::StrCat("config.json: model_type ", Shown(type), ": ", why));
  };
  if (type == "falcon_h1") return refused("each layer is attention and Mamba2 at once");
  const bool recurrent = IsAmong(type, {"mamba*", "falcon_mamba", "rwkv*", "xlstm"});
  return recurrent ? refused("the layers of this family are not known") : absl::OkStatus();
}

// Attention that keeps something else than the keys and values of every token, in every layer.
void RefuseOtherAttention(Fields& fields, const Kinds& kinds) {
  const bool off = fields.Has("use_sliding_window") && fields["use_sliding_window"] == false;
  if (!off && !kinds.windows && fields.Has("sliding_window")) fields.Refuse("sliding_window", "windows are not known");
  if (!kinds.windows && fields.Has("attention_chunk_size")) {
    fields.Refuse("attention_chunk_size", "windows are not known");
  }
  for (const char* name :
       {"sliding_window_pattern", "interleaved_sliding_window", "attention_window_size", "window_size"}) {
    if (fields.Has(name)) fields.Refuse(name, "windows are not known");
  }
  for (const char* name : {"block_configs", "num_key_value_heads_per_layer"}) {
    if (fields.Has(name)) fields.Refuse(name, "layers of different heads are not known");
  }
  if (fields.IsTrue("use_cla") || (fields.Has("num_kv_shared_layers") && fields["num_kv_shared_layers"] != 0)) {
    fields.Refuse(fields.IsTrue("use_cla") ? "use_cla" : "num_kv_shared_layers",
                  "layers that share keys and values are not known");
  }
  if (fields.Has("index_head_dim")) fields.Refuse("index_head_dim", "keys of an index are not known");
  if (fields.Has("attn_layer_period")) fields.Refuse("attn_layer_period", "its other layers are not known");
}

// Fields of a recurrence that no rule accounts for: their layers would be taken for attention alone.
void RefuseUnread(Fields& fields, const Kinds& kinds, const std::optional<LinearRule>& rule) {
  static const auto* const recurrent = new std::vector<std::string>{
      "mamba_*",       "ssm_*",          "lru_*",        "rwkv_*",           "linear_num_*",    "linear_key_*",
      "linear_conv_*", "linear_value_*", "conv_L_cache", "conv_kernel",      "state_size",      "time_step_rank",
      "n_mamba_heads", "block_types",    "mb_per_layer", "layer_group_size", "hybrid_layer_ids"};
  const bool linear = std::ranges::count(kinds.of_layers, Kind::kLinear) > 0;
  if (kinds.said && !linear) return;  // each layer is named, and none is recurrent
  for (const auto& [name, value] : fields.object().items()) {
    if (value.is_null() || !IsAmong(name, *recurrent)) continue;
    if (linear && rule && IsAmong(name, rule->accounts_for)) continue;
    fields.Refuse(name,
                  linear ? "not known of these linear layers" : "no field that is known says which layers have it");
  }
}

}  // namespace

absl::StatusOr<Layout> LayoutFromHfConfig(const std::string& text, const LayoutWishes& wishes) {
  const json file = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!file.is_object()) return absl::InvalidArgumentError("config.json: not a JSON object");
  // A model of text and images keeps its text's numbers apart.
  const json& config = file.contains("text_config") && file["text_config"].is_object() ? file["text_config"] : file;
  Fields fields(config);
  if (absl::Status known = CheckFamily(fields); !known.ok()) return known;
  const uint32_t layers = fields.Number("num_hidden_layers");
  if (layers > kMostLayers) fields.Refuse("num_hidden_layers", "more than 1,024");
  if (!fields.status().ok()) return fields.status();
  const Kinds kinds = KindsOf(fields, layers);
  RefuseOtherAttention(fields, kinds);
  if (!fields.status().ok()) return fields.status();
  const std::optional<LinearRule> rule = LinearOf(fields);
  if (!rule && std::ranges::count(kinds.of_layers, Kind::kLinear) > 0) {
    return absl::UnimplementedError(absl::StrCat("config.json: model_type ", Shown(fields.Text("model_type")),
                                                 ": its linear layers are not known"));
  }
  RefuseUnread(fields, kinds, rule);
  if (!fields.status().ok()) return fields.status();
  Layout layout{.page_tokens = wishes.page_tokens, .head = wishes.head, .tail = wishes.tail};
  for (const Kind kind : kinds.of_layers) {
    if (kind == Kind::kAttention) layout.layers.emplace_back(Attention(fields));
    if (kind == Kind::kLinear) layout.layers.emplace_back(rule->make(fields, wishes.state_dtype));
  }
  if (!fields.status().ok()) return fields.status();
  if (absl::Status sound = Validate(layout); !sound.ok()) return sound;
  return layout;
}

}  // namespace ashlar::ctl
