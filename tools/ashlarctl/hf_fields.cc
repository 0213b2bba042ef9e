// SPDX-License-Identifier: Apache-2.0
#include "tools/ashlarctl/hf_fields.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace ashlar::ctl {
namespace {

using nlohmann::json;

constexpr size_t kMostShown = 64;

// Parts of names of fields that may change what a layer stores.
constexpr absl::string_view kMatters[] = {
    "attention", "attn",  "block",   "cache",   "cca",    "chunk",  "cla",    "compress",  "conv",
    "delta",     "gdn",   "global",  "gla",     "group",  "head",   "hybrid", "index",     "interval",
    "kda",       "key",   "kv",      "latent",  "layer",  "linear", "local",  "lora",      "loop",
    "lru",       "mamba", "mem",     "pattern", "period", "rank",   "recurr", "retention", "rwkv",
    "share",     "sink",  "sliding", "ssm",     "state",  "swa",    "value",  "window"};

// The ones of a recurrence.
constexpr absl::string_view kRecurrence[] = {"conv",  "delta",  "gdn",  "kda", "linear", "lru",
                                             "mamba", "recurr", "rwkv", "ssm", "state",  "n_groups"};

// Names that match the above but change nothing that is stored. '*' stands for any text at the begin or end.
constexpr absl::string_view kHarmless[] = {
    // norms, biases, dropouts, activations, factors
    "*norm*", "*bias*", "*drop*", "*_act", "*activation*", "*_multiplier*", "*_alpha_factor", "*_beta_factor",
    "*softcap*", "*_loss*", "*_scale", "layer_scale*", "scale_*", "attention_softmax_in_fp32",
    "attn_temperature_tuning", "query_pre_attn_scalar", "reorder_and_upcast_attn", "residual_in_fp32",
    "attn_output_gate", "use_attention_gate", "use_full_rank_gate", "use_logn_attn", "mla_*", "kda_lower_bound",
    "kda_safe_gate", "no_kda_lora", "linear_silu", "linear_a_log_*", "linear_dt_*", "linear_allow_neg_eigval",
    "linear_lower_bound",
    // experts and MLPs, also of later heads that predict more tokens
    "*expert*", "*moe*", "mlp_*", "n_group", "topk_group", "num_dense_layers", "first_k_dense_replace", "mtp_*",
    "num_nextn_predict_layers", "num_mtp_layers", "*intermediate_size", "block_ff*", "block_multiple_of",
    "block_auto_adjust_ff_dim", "block_dim", "block_mlp_*", "block_out_*", "block_use_*",
    // positions
    "*rope*", "*rotary*",
    // how a program runs it
    "*attn_implementation*", "use_flash_attn*", "use_cache", "output_*", "return_*", "chunk_size_feed_forward",
    "compression_config", "keys_to_ignore_at_inference", "*qkv*", "use_mamba_kernels", "use_mambapy", "lm_head*",
    "*_token_id*", "*_token_index", "parallel_attn", "mamba_chunk_size", "mamba_expand", "mamba_dt_rank", "hidden_size",
    "attn_res_block_size", "multi_query*", "shared_head*", "vision_*", "audio_*", "image_*", "video_*"};

bool Matches(absl::string_view name, absl::string_view pattern) {
  const bool open_begin = absl::ConsumePrefix(&pattern, "*"), open_end = absl::ConsumeSuffix(&pattern, "*");
  if (open_begin && open_end) return absl::StrContains(name, pattern);
  if (open_begin) return absl::EndsWith(name, pattern);
  return open_end ? absl::StartsWith(name, pattern) : name == pattern;
}

template <size_t kCount>
bool HasPart(absl::string_view name, const absl::string_view (&parts)[kCount]) {
  return std::ranges::any_of(parts, [&](absl::string_view part) { return absl::StrContains(name, part); });
}

bool IsOff(const json& value) {
  return value.is_null() || value == false || value == 0 ||
         ((value.is_structured() || value.is_string()) && value.empty()) || value == "";
}

}  // namespace

std::string ShownJson(const json& value) {
  const std::string text = value.dump(-1, ' ', /*ensure_ascii=*/true, json::error_handler_t::replace);
  return text.size() <= kMostShown ? text : absl::StrCat(text.substr(0, kMostShown), "...");
}

uint32_t HfFields::Number(const std::string& name) {
  Accept(name);
  if (!Has(name)) return Refuse(name, "missing");
  const json& value = object_[name];
  if (!value.is_number_unsigned() || value.get<uint64_t>() == 0 || value.get<uint64_t>() > UINT32_MAX) {
    return Refuse(name, absl::StrCat(ShownJson(value), " is out of range; expected a positive 32-bit number"));
  }
  return value.get<uint32_t>();
}

uint32_t HfFields::NumberOrZero(const std::string& name) {
  Accept(name);
  return !Has(name) || object_[name] == 0 ? 0 : Number(name);
}

std::string HfFields::Text(const std::string& name) {
  Accept(name);
  return Has(name) && object_[name].is_string() ? object_[name].get<std::string>() : "";
}

std::vector<json> HfFields::List(const std::string& name) {
  Accept(name);
  if (Has(name) && object_[name].is_array()) return object_[name].get<std::vector<json>>();
  Refuse(name, "expected a list");
  return {};
}

bool HfFields::IsTrue(const std::string& name) {
  Accept(name);
  return Has(name) && object_[name] == true;
}

const json& HfFields::Object(const std::string& name) {
  static const auto* const none = new json(json::object());
  Accept(name);
  return Has(name) && object_[name].is_object() ? object_[name] : *none;
}

uint32_t HfFields::Refuse(absl::string_view name, absl::string_view why) {
  Refuse(absl::InvalidArgumentError(absl::StrCat(path_, name, ": ", why)));
  return 1;
}

void HfFields::Refuse(const absl::Status& status) {
  if (status_.ok()) status_ = status;
}

void RefuseUnread(HfFields& fields, bool recurrence_matters) {
  for (const auto& [name, value] : fields.object().items()) {
    const std::string lower = absl::AsciiStrToLower(name);
    if (fields.IsRead(name) || IsOff(value) || !HasPart(lower, kMatters)) continue;
    if (!recurrence_matters && HasPart(lower, kRecurrence)) continue;
    if (std::ranges::any_of(kHarmless, [&](absl::string_view pattern) { return Matches(lower, pattern); })) continue;
    fields.Refuse(name, absl::StrCat(ShownJson(value), " is unknown and may change the state of the layers"));
  }
}

}  // namespace ashlar::ctl
