// SPDX-License-Identifier: Apache-2.0
#include "tools/ashlarctl/hf_config.h"

#include <algorithm>
#include <string>
#include <variant>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "proto/limits.h"
#include "tools/ashlarctl/hf_fields.h"
#include "tools/ashlarctl/hf_layer_kinds.h"

namespace ashlar::ctl {
namespace {

using nlohmann::json;

// Where multimodal models keep the configuration of their text model.
constexpr const char* kTextPlaces[] = {"text_config", "llm_config", "language_config", "language_model_config",
                                       "thinker_config.text_config"};

struct Types {
  DType model = DType::kBF16;
  DType state = DType::kF32;
};

DType TypeOf(HfFields& fields, const std::string& name, DType otherwise) {
  if (!fields.Has(name)) return otherwise;
  const std::string type(absl::StripPrefix(fields.Text(name), "torch."));
  if (type == "float32") return DType::kF32;
  if (type == "float16") return DType::kF16;
  if (type != "bfloat16") {
    fields.Refuse(
        name, absl::StrCat(ShownJson(fields.object()[name]), " is unsupported; expected float32, float16 or bfloat16"));
  }
  return DType::kBF16;
}

uint32_t HeadsOf(HfFields& fields) {
  return fields.Number("num_attention_heads");
}

// Fewer than the queries' heads. Each family has its own field for them.
uint32_t KeyValueHeads(HfFields& fields, uint32_t heads) {
  if (fields.Has("num_key_value_heads")) return fields.Number("num_key_value_heads");
  if (fields.IsTrue("multi_query_attention")) return fields.Number("multi_query_group_num");  // ChatGLM
  // Falcon: older models have one key-value head, and num_kv_heads has the number of their query heads.
  const bool old = fields.IsTrue("multi_query") && !fields.IsTrue("new_decoder_architecture");
  fields.Accept("num_kv_heads");
  return old ? 1 : fields.NumberOr("num_kv_heads", heads);
}

uint32_t HeadDim(HfFields& fields, uint32_t heads) {
  if (fields.Has("attention_head_dim")) {  // Zamba: wider than the heads that these fields describe
    for (const char* const name : {"head_dim", "kv_channels", "attention_hidden_size", "num_query_groups"}) {
      fields.Accept(name);
    }
    return fields.Number("attention_head_dim");
  }
  if (fields.Has("head_dim")) {
    const uint32_t dim = fields.Number("head_dim");
    if (fields.NumberOr("kv_channels", dim) != dim) fields.Refuse("kv_channels", "contradicts head_dim");
    return dim;
  }
  if (fields.Has("kv_channels")) return fields.Number("kv_channels");
  const uint32_t hidden = fields.Number("hidden_size");
  if (hidden % heads != 0)
    fields.Refuse("hidden_size", absl::StrCat(hidden, " is not a multiple of ", heads, " heads"));
  return hidden / heads;
}

AttentionLayer Attention(HfFields& fields, const Types& types) {
  AttentionLayer layer;
  layer.dtype = types.model;
  if (fields.Has("kv_lora_rank")) {
    layer.kind = AttentionKind::kMla;
    layer.kv_heads = 1;
    layer.key_dim = fields.Number("kv_lora_rank");
    layer.value_dim = fields.Number("qk_rope_head_dim");
    // Fields of what is computed from the latent, and not stored.
    for (const char* const name : {"num_attention_heads", "num_key_value_heads", "head_dim", "q_lora_rank",
                                   "qk_nope_head_dim", "qk_head_dim", "v_head_dim"}) {
      fields.Accept(name);
    }
    return layer;
  }
  const uint32_t heads = HeadsOf(fields);
  layer.kv_heads = KeyValueHeads(fields, heads);
  layer.key_dim = HeadDim(fields, heads);
  layer.value_dim = fields.NumberOr("v_head_dim", layer.key_dim);
  return layer;
}

LinearLayer Linear(Family family, uint32_t key_heads, uint32_t value_heads, uint32_t d_k, uint32_t d_v, DType state) {
  LinearLayer layer{.family = family,
                    .key_heads = key_heads,
                    .value_heads = value_heads,
                    .d_k = d_k,
                    .d_v = d_v,
                    .transition = NaturalForm(family)};
  layer.state_dtype = state;
  // More heads are refused with the layout.
  if (layer.transition == TransitionForm::kScalar && value_heads <= limits::kMaxHeads) {
    layer.decay_table.assign(value_heads, -1.0F);
  }
  return layer;
}

void Convolve(LinearLayer& layer, uint64_t channels, uint32_t kernel, const Types& types) {
  layer.conv_channels = static_cast<uint32_t>(std::min<uint64_t>(channels, UINT32_MAX));
  layer.conv_kernel = kernel;
  if (types.model != layer.state_dtype) layer.conv_dtype = types.model;
}

// Gated DeltaNet as Qwen3-Next has it.
LinearLayer GatedDeltaNet(HfFields& fields, const Types& types) {
  const uint32_t keys = fields.Number("linear_num_key_heads"), values = fields.Number("linear_num_value_heads");
  const uint32_t d_k = fields.Number("linear_key_head_dim"), d_v = fields.Number("linear_value_head_dim");
  LinearLayer layer = Linear(Family::kGdn, keys, values, d_k, d_v, types.state);
  Convolve(layer, uint64_t{2} * keys * d_k + uint64_t{values} * d_v, fields.Number("linear_conv_kernel_dim"), types);
  return layer;
}

LinearLayer KdaLayer(uint32_t heads, uint32_t dim, uint32_t kernel, const Types& types) {
  LinearLayer layer = Linear(Family::kKda, heads, heads, dim, dim, types.state);
  Convolve(layer, uint64_t{3} * heads * dim, kernel, types);
  return layer;
}

// Kimi-Linear as published, and the names with which Transformers saves the same numbers.
LinearLayer KimiKda(HfFields& fields, const Types& types) {
  HfFields own(fields.Object("linear_attn_config"), "linear_attn_config.");
  const uint32_t heads = own.Number("num_heads"), dim = own.Number("head_dim"),
                 kernel = own.Number("short_conv_kernel_size");
  fields.Refuse(own.status());
  const auto same = [&](const char* name, uint32_t number) {
    if (fields.NumberOr(name, number) != number) fields.Refuse(name, "contradicts linear_attn_config");
  };
  same("linear_num_heads", heads);
  same("linear_head_dim", dim);
  same("linear_conv_kernel_dim", kernel);
  return KdaLayer(heads, dim, kernel, types);
}

LinearLayer SavedKda(HfFields& fields, const Types& types) {
  const uint32_t kernel = fields.Number("linear_conv_kernel_dim");
  if (fields.NumberOr("short_conv_kernel_size", kernel) != kernel) {
    fields.Refuse("short_conv_kernel_size", "contradicts linear_conv_kernel_dim");
  }
  return KdaLayer(fields.Number("linear_num_heads"), fields.Number("linear_head_dim"), kernel, types);
}

// Ling 3.0: its KDA has the heads of its attention.
LinearLayer LingKda(HfFields& fields, const Types& types) {
  return KdaLayer(HeadsOf(fields), fields.Number("head_dim"), fields.Number("short_conv_kernel_size"), types);
}

LinearLayer Lightning(HfFields& fields, const Types& types) {
  const uint32_t heads = HeadsOf(fields), dim = HeadDim(fields, heads);
  fields.Accept("block_size");  // block size of its kernel
  return Linear(Family::kLightning, heads, heads, dim, dim, types.state);
}

// Mamba-2: its B and C are the keys and queries of groups of heads, its x the values.
struct Mamba2Names {
  const char *heads, *head_dim, *state, *groups, *kernel;
};

constexpr Mamba2Names kNemotron = {"mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel"};
constexpr Mamba2Names kBamba = {"mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv"};
constexpr Mamba2Names kZamba = {"n_mamba_heads", "mamba_headdim", "mamba_d_state", "mamba_ngroups", "mamba_d_conv"};

LinearLayer Mamba2(HfFields& fields, const Mamba2Names& names, const Types& types) {
  const uint32_t heads = fields.Number(names.heads), d_k = fields.Number(names.state);
  const bool derived = fields.Text(names.head_dim) == "auto";
  const uint32_t d_v = derived ? fields.NumberOr("mamba_expand", 2) * fields.Number("hidden_size") / heads
                               : fields.Number(names.head_dim);
  const uint64_t inner = uint64_t{heads} * d_v;
  if (fields.Has("mamba_d_ssm") && fields.Number("mamba_d_ssm") != inner) {
    fields.Refuse("mamba_d_ssm", absl::StrCat("is not ", names.heads, " times ", names.head_dim));
  }
  const uint32_t groups = fields.NumberOr(names.groups, 1);
  LinearLayer layer = Linear(Family::kMamba2, groups, heads, d_k, d_v, types.state);
  Convolve(layer, inner + uint64_t{2} * groups * d_k, fields.NumberOr(names.kernel, 4), types);
  for (const char* const kernels : {"chunk_size", "expand"}) fields.Accept(kernels);
  return layer;
}

LinearLayer NemotronMamba2(HfFields& fields, const Types& types) {
  return Mamba2(fields, kNemotron, types);
}

LinearLayer BambaMamba2(HfFields& fields, const Types& types) {
  return Mamba2(fields, kBamba, types);
}

LinearLayer ZambaMamba2(HfFields& fields, const Types& types) {
  // Weights, not layers: the shared blocks and their adapters.
  for (const char* const weights :
       {"adapter_rank", "use_shared_attention_adapter", "num_mem_blocks", "use_mem_eff_path"}) {
    fields.Accept(weights);
  }
  return Mamba2(fields, kZamba, types);
}

// A layer with `count` numbers of state for each of `rows`, as heads of at most kMaxLinearHeadDim.
LinearLayer Rows(Family family, uint32_t rows, uint32_t count, DType state) {
  uint32_t dim = std::min(rows, limits::kMaxLinearHeadDim);
  while (rows % dim != 0) --dim;
  return Linear(family, rows / dim, rows / dim, count, dim, state);
}

// Mamba, as in Jamba: a state for each channel.
LinearLayer Mamba1(HfFields& fields, const Types& types) {
  const uint64_t inner = uint64_t{fields.NumberOr("mamba_expand", 2)} * fields.Number("hidden_size");
  const uint64_t numbers = fields.Number("mamba_d_state");
  if (inner > limits::kMaxConvChannels || numbers > limits::kMaxLinearHeadDim) {
    fields.Refuse("mamba_d_state",
                  absl::StrCat(inner, " channels of ", numbers, " values exceed the limit of a layer"));
    return {};
  }
  LinearLayer layer = Rows(Family::kMamba1, static_cast<uint32_t>(inner), static_cast<uint32_t>(numbers), types.state);
  layer.decay_table.assign(inner * numbers, -1.0F);
  Convolve(layer, inner, fields.NumberOr("mamba_d_conv", 4), types);
  return layer;
}

// LFM2: for each channel, the last inputs of a short convolution.
LinearLayer ShortConvolution(HfFields& fields, const Types& types) {
  const uint32_t kernel = fields.Number("conv_L_cache"), channels = fields.Number("hidden_size");
  if (kernel < 2) fields.Refuse("conv_L_cache", "a convolution of one token has no state; expected at least 2");
  for (const char* const name : {"conv_dim", "conv_dim_out"}) {
    if (fields.NumberOr(name, channels) != channels) fields.Refuse(name, "must equal hidden_size");
  }
  for (const char* const name : {"num_heads", "conv_use_xavier_init"}) fields.Accept(name);
  return Rows(Family::kGla, channels, std::max(kernel, 2U) - 1, types.model);
}

using MakeLinear = LinearLayer (*)(HfFields&, const Types&);

// How the family's recurrences are read; null: the family is unknown.
MakeLinear LinearOf(HfFields& fields) {
  const std::string type = fields.Text("model_type");
  if (fields.Has("linear_num_value_heads")) return GatedDeltaNet;
  if (fields.Has("linear_attn_config")) return KimiKda;
  if (fields.Has("linear_num_heads")) return SavedKda;
  if (type == "bailing_hybrid" && fields.Has("short_conv_kernel_size")) return LingKda;
  if (fields.Has("mamba_num_heads")) return NemotronMamba2;
  if (fields.Has("mamba_n_heads")) return BambaMamba2;
  if (fields.Has("n_mamba_heads") && type == "zamba2") return ZambaMamba2;
  if (type == "jamba") return Mamba1;
  if (type == "bailing_moe_linear" || absl::StrContains(type, "minimax")) return Lightning;
  return nullptr;
}

// The object at a path of names separated by dots, or null.
const json* At(const json& file, const std::string& path) {
  const json* object = &file;
  for (const std::string& name : std::vector<std::string>(absl::StrSplit(path, '.'))) {
    if (!object->contains(name) || !(*object)[name].is_object()) return nullptr;
    object = &(*object)[name];
  }
  return object;
}

std::string Searched() {
  return absl::StrCat("searched at the top level, ", absl::StrJoin(kTextPlaces, ", "));
}

// If layers with windows would be named, and none is, the sizes of windows have no effect.
void AcceptWindows(HfFields& fields, const LayerKinds& kinds) {
  if (kinds.windows) {
    for (const char* const name : {"sliding_window", "sliding_window_pattern", "_sliding_window_pattern",
                                   "attention_chunk_size", "max_window_layers", "use_sliding_window"}) {
      fields.Accept(name);
    }
  }
  if (fields.Has("use_sliding_window") && fields.object()["use_sliding_window"] == false) {
    for (const char* const name : {"sliding_window", "max_window_layers"}) fields.Accept(name);
  }
}

Types ReadTypes(HfFields& fields, const json& file, const LayoutWishes& wishes) {
  Types types;
  HfFields outer(file, "");
  types.model = TypeOf(outer, outer.Has("dtype") ? "dtype" : "torch_dtype", DType::kBF16);
  types.model = TypeOf(fields, fields.Has("dtype") ? "dtype" : "torch_dtype", types.model);
  fields.Refuse(outer.status());
  for (const char* const name : {"mamba_ssm_cache_dtype", "mamba_ssm_dtype"})
    types.state = TypeOf(fields, name, types.state);
  types.state = wishes.state_dtype.value_or(types.state);
  return types;
}

void Append(HfFields& fields, LayerKind kind, MakeLinear linear, const Types& types, HfLayout& out) {
  const auto append = [&](Layer layer, bool convolution) {
    out.layout.layers.push_back(std::move(layer));
    out.convolution.push_back(convolution);
  };
  if (kind == LayerKind::kAttention || kind == LayerKind::kBoth) append(Attention(fields, types), false);
  if (kind == LayerKind::kLinear || kind == LayerKind::kBoth) append(linear(fields, types), false);
  if (kind == LayerKind::kConvolution) append(ShortConvolution(fields, types), true);
}

absl::StatusOr<HfLayout> LayoutOf(HfFields& fields, const json& file, const LayoutWishes& wishes) {
  const LayerKinds kinds = ReadLayerKinds(fields);
  if (!fields.status().ok()) return fields.status();
  const Types types = ReadTypes(fields, file, wishes);
  const bool recurrent = kinds.Any(LayerKind::kLinear) || kinds.Any(LayerKind::kBoth);
  const MakeLinear linear = recurrent ? LinearOf(fields) : nullptr;
  if (recurrent && linear == nullptr) {
    fields.Refuse("model_type", absl::StrCat(ShownJson(fields.Text("model_type")),
                                             ": linear layers of this model type are not supported"));
    return fields.status();
  }
  HfLayout out{.layout = {.page_tokens = wishes.page_tokens, .head = wishes.head, .tail = wishes.tail}};
  uint64_t tables = 0;
  for (const LayerKind kind : kinds.of_layers) {
    Append(fields, kind, linear, types, out);
    if (!fields.status().ok()) return fields.status();
    if (out.layout.layers.empty()) continue;
    const auto* const last = std::get_if<LinearLayer>(&out.layout.layers.back());
    tables += last == nullptr ? 0 : last->decay_table.size() * sizeof(float);
    if (tables > limits::kMaxLayoutTableBytes) {
      return absl::InvalidArgumentError(
          "num_hidden_layers: the decays of this many layers exceed the limit of a layout");
    }
  }
  AcceptWindows(fields, kinds);
  if (!kinds.Any(LayerKind::kAttention) && !kinds.Any(LayerKind::kBoth)) {
    for (const char* const name : {"num_attention_heads", "num_key_value_heads", "head_dim"}) fields.Accept(name);
  }
  RefuseUnread(fields, recurrent || kinds.Any(LayerKind::kConvolution) || !kinds.said);
  if (!fields.status().ok()) return fields.status();
  if (absl::Status sound = Validate(out.layout); !sound.ok()) return sound;
  return out;
}

}  // namespace

absl::StatusOr<HfLayout> LayoutFromHfConfig(const json& file, const LayoutWishes& wishes) {
  if (!file.is_object()) return absl::InvalidArgumentError("expected a JSON object");
  std::string place;
  for (const char* const each : kTextPlaces) {
    if (At(file, each) == nullptr) continue;
    if (!place.empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat(each, ": found together with ", place, "; the text model is ambiguous"));
    }
    place = each;
  }
  HfFields fields(place.empty() ? file : *At(file, place), place.empty() ? "" : absl::StrCat(place, "."));
  absl::StatusOr<HfLayout> layout = LayoutOf(fields, file, wishes);
  const bool missing = !layout.ok() && absl::StrContains(layout.status().message(), "num_hidden_layers: missing");
  if (!missing) return layout;
  return absl::InvalidArgumentError(absl::StrCat(layout.status().message(), "; ", Searched()));
}

}  // namespace ashlar::ctl
