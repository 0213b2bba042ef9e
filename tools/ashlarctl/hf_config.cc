#include "tools/ashlarctl/hf_config.h"

#include <algorithm>
#include <functional>
#include <vector>

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"

namespace ashlar::ctl {
namespace {

using nlohmann::json;

constexpr uint64_t kMostLayers = 1024;

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
  uint32_t Refuse(const char* name, const char* why) {
    if (status_.ok()) status_ = absl::InvalidArgumentError(absl::StrCat("config.json: ", name, ": ", why));
    return 1;
  }
  const absl::Status& status() const { return status_; }
  const json& operator[](const char* name) const { return object_[name]; }

 private:
  const json& object_;
  absl::Status status_;
};

DType TypeOf(Fields& fields) {
  const std::string name = fields.Has("dtype") ? fields.Text("dtype") : fields.Text("torch_dtype");
  if (name == "float32") return DType::kF32;
  return name == "float16" ? DType::kF16 : DType::kBF16;
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
  layer.kv_heads = fields.NumberOr("num_key_value_heads", heads);
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

// One for each layer. A family says it in its own way.
std::vector<Kind> KindsOf(Fields& fields, uint32_t layers) {
  std::vector<Kind> kinds(layers, Kind::kAttention);
  const auto from = [&](const char* name) {
    const std::vector<json> types = fields.List(name);
    if (types.size() != layers) fields.Refuse(name, "not one for each of num_hidden_layers");
    for (size_t i = 0; i < std::min<size_t>(types.size(), layers); ++i) {
      const std::string type = types[i].is_string() ? types[i].get<std::string>() : "";
      const bool linear = type == "linear_attention" || type == "mamba" || type == "mamba2" ||
                          (types[i].is_number_integer() && types[i].get<int64_t>() == 0);
      if (type == "sliding_attention" || type == "chunked_attention") fields.Refuse(name, "windows are not known");
      kinds[i] = linear ? Kind::kLinear : type == "mlp" || type == "moe" ? Kind::kNothing : Kind::kAttention;
    }
  };
  if (fields.Has("linear_attn_config")) {
    const json none = json::object();
    Fields own(fields["linear_attn_config"].is_object() ? fields["linear_attn_config"] : none);
    for (const json& layer : own.List("kda_layers")) {  // counted from 1
      const bool sound = layer.is_number_unsigned() && layer.get<uint64_t>() >= 1 && layer.get<uint64_t>() <= layers;
      if (!sound) fields.Refuse("linear_attn_config", "kda_layers: not the numbers of layers");
      if (sound) kinds[layer.get<uint64_t>() - 1] = Kind::kLinear;
    }
  } else if (fields.Has("hybrid_override_pattern")) {
    const std::string pattern = fields.Text("hybrid_override_pattern");
    if (pattern.size() != layers) fields.Refuse("hybrid_override_pattern", "not one letter for each layer");
    for (size_t i = 0; i < std::min<size_t>(pattern.size(), layers); ++i) {
      kinds[i] = pattern[i] == 'M' ? Kind::kLinear : pattern[i] == '*' ? Kind::kAttention : Kind::kNothing;
    }
  } else if (fields.Has("layer_types")) {
    from("layer_types");
  } else if (fields.Has("layers_block_type")) {
    from("layers_block_type");
  } else if (fields.Has("attn_type_list")) {
    from("attn_type_list");
  } else if (fields.Has("full_attention_interval")) {
    const uint32_t interval = fields.Number("full_attention_interval");
    for (uint32_t i = 0; i < layers; ++i) kinds[i] = (i + 1) % interval == 0 ? Kind::kAttention : Kind::kLinear;
  } else if (fields.Has("attn_layer_indices")) {
    kinds.assign(layers, Kind::kLinear);
    for (const json& layer : fields.List("attn_layer_indices")) {
      const bool sound = layer.is_number_unsigned() && layer.get<uint64_t>() < layers;
      if (!sound) fields.Refuse("attn_layer_indices", "not the numbers of layers");
      if (sound) kinds[layer.get<uint64_t>()] = Kind::kAttention;
    }
  }
  return kinds;
}

// Refuses models whose layers would be taken for plain attention, which they are not or not alone.
void RefuseUnread(Fields& fields, const std::vector<Kind>& kinds) {
  const bool linear = std::ranges::count(kinds, Kind::kLinear) > 0;
  for (const char* name : {"mamba_n_heads", "mamba_num_heads", "linear_num_value_heads"}) {
    if (!linear && fields.Has(name)) fields.Refuse(name, "no field says which layers are linear");
  }
  if (fields.Has("attn_layer_period")) fields.Refuse("attn_layer_period", "its other layers are not known");
  if (fields.Has("sliding_window_pattern")) fields.Refuse("sliding_window_pattern", "windows are not known");
}

using MakeLinear = LinearLayer (*)(Fields&, DType);

MakeLinear LinearOf(const Fields& fields) {
  if (fields.Has("linear_num_value_heads")) return GatedDeltaNet;
  if (fields.Has("linear_attn_config")) return Kda;
  if (fields.Has("mamba_n_heads") || fields.Has("mamba_num_heads")) return Mamba2;
  if (fields.Text("model_type").find("minimax") != std::string::npos) return Lightning;
  return nullptr;
}

}  // namespace

absl::StatusOr<Layout> LayoutFromHfConfig(const std::string& text, const LayoutWishes& wishes) {
  const json file = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!file.is_object()) return absl::InvalidArgumentError("config.json: not a JSON object");
  // A model of text and images keeps its text's numbers apart.
  const json& config = file.contains("text_config") && file["text_config"].is_object() ? file["text_config"] : file;
  Fields fields(config);
  const uint32_t layers = fields.Number("num_hidden_layers");
  if (layers > kMostLayers) fields.Refuse("num_hidden_layers", "more than 1,024");
  if (!fields.status().ok()) return fields.status();
  const std::vector<Kind> kinds = KindsOf(fields, layers);
  RefuseUnread(fields, kinds);
  if (!fields.status().ok()) return fields.status();
  const MakeLinear make = LinearOf(fields);
  Layout layout{.page_tokens = wishes.page_tokens, .head = wishes.head, .tail = wishes.tail};
  for (const Kind kind : kinds) {
    if (kind == Kind::kAttention) layout.layers.emplace_back(Attention(fields));
    if (kind != Kind::kLinear) continue;
    if (make == nullptr) {
      return absl::UnimplementedError(
          absl::StrCat("config.json: model_type \"", fields.Text("model_type"), "\": its linear layers are not known"));
    }
    layout.layers.emplace_back(make(fields, wishes.state_dtype));
  }
  if (!fields.status().ok()) return fields.status();
  if (absl::Status sound = Validate(layout); !sound.ok()) return sound;
  return layout;
}

}  // namespace ashlar::ctl
