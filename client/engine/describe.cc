// SPDX-License-Identifier: Apache-2.0
#include "client/engine/describe.h"

#include <algorithm>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "proto/invalid.h"
#include "proto/limits.h"

namespace ashlar::engine {
namespace {

constexpr uint64_t kAlignment = 64;
constexpr uint32_t kNoGroup = UINT32_MAX;
constexpr uint64_t kMostBytes = uint64_t{1} << 46;  // limit of a memory; larger than any machine's

uint64_t Align(uint64_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

std::string Given(const char* text) {
  return text == nullptr ? "" : text;
}

absl::StatusOr<ashlar::Rope> Describe(const Rope& rope, const std::string& field) {
  ashlar::Rope described{.kind = rope.style, .rotary_dim = rope.rotary_dim, .scale = rope.scale};
  if (rope.style == RopeStyle::kNone) return described;
  if (rope.rotary_dim > limits::kMaxHeadDim)
    return ashlar::Invalid(field, ".rotary_dim: out of range; expected at most ", limits::kMaxHeadDim);
  if (rope.frequencies == nullptr) return ashlar::Invalid(field, ".frequencies: null");
  described.frequencies.assign(rope.frequencies, rope.frequencies + rope.rotary_dim / 2);
  return described;
}

absl::StatusOr<ashlar::Layer> DescribeLinear(const Layer& layer, const std::string& field) {
  absl::StatusOr<ashlar::Rope> rope = Describe(layer.rope, field + ".rope");
  if (!rope.ok()) return rope.status();
  LinearLayer linear{.family = layer.family,
                     .key_heads = layer.key_heads,
                     .value_heads = layer.value_heads,
                     .d_k = layer.d_k,
                     .d_v = layer.d_v,
                     .state_dtype = layer.state_dtype,
                     .transition = NaturalForm(layer.family),
                     .order = layer.order,
                     .conv_channels = layer.conv_channels,
                     .conv_kernel = layer.conv_kernel,
                     .rope = *std::move(rope),
                     .conv_order = layer.conv_order};
  if (layer.conv_dtype != DType{0} && layer.conv_dtype != layer.state_dtype) linear.conv_dtype = layer.conv_dtype;
  if (layer.decay_table == nullptr) return linear;  // if one is needed, the layout is refused
  if (layer.value_heads > limits::kMaxHeads)
    return ashlar::Invalid(field, ".value_heads: out of range; expected at most ", limits::kMaxHeads);
  if (layer.d_k > limits::kMaxLinearHeadDim)
    return ashlar::Invalid(field, ".d_k: out of range; expected at most ", limits::kMaxLinearHeadDim);
  if (layer.d_v > limits::kMaxLinearHeadDim)
    return ashlar::Invalid(field, ".d_v: out of range; expected at most ", limits::kMaxLinearHeadDim);
  uint64_t numbers = layer.value_heads;
  if (layer.family == Family::kMamba1) numbers *= uint64_t{layer.d_k} * layer.d_v;
  linear.decay_table.assign(layer.decay_table, layer.decay_table + numbers);
  return linear;
}

absl::StatusOr<ashlar::Layer> Describe(const Layer& layer, const std::string& field) {
  if (layer.kind == LayerKind::kLinear) return DescribeLinear(layer, field);
  if (layer.kind == LayerKind::kOpaque)
    return OpaqueLayer{.token_bytes = layer.token_bytes, .state_bytes = layer.state_bytes};
  if (layer.kind != LayerKind::kGqa && layer.kind != LayerKind::kMla) {
    return ashlar::Invalid(field, ".kind: ", static_cast<int>(layer.kind), " is unknown");
  }
  absl::StatusOr<ashlar::Rope> rope = Describe(layer.rope, field + ".rope");
  if (!rope.ok()) return rope.status();
  return ashlar::AttentionLayer{.kind = layer.kind == LayerKind::kMla ? AttentionKind::kMla : AttentionKind::kGqa,
                                .kv_heads = layer.kv_heads,
                                .key_dim = layer.key_dim,
                                .value_dim = layer.value_dim,
                                .dtype = layer.dtype,
                                .scales = layer.scales,
                                .rope = *std::move(rope),
                                .stored = layer.stored};
}

}  // namespace

absl::StatusOr<DescribedModel> Describe(const Model& model) {
  if (model.layers == nullptr) return ashlar::Invalid("model.layers: null");
  if (model.layer_count > limits::kMaxLayers)
    return ashlar::Invalid("model.layer_count: out of range; expected at most ", limits::kMaxLayers);
  DescribedModel described{
      .identity = {.model_id = Given(model.model_id),
                   .weights_digest = Given(model.weights_digest),
                   .dtype = Given(model.dtype),
                   .quantization = Given(model.quantization),
                   .tokenizer_digest = Given(model.tokenizer_digest),
                   .lora = Given(model.lora)},
      .layout = {.page_tokens = model.page_tokens, .head = model.head, .tail = model.tail, .layers = {}},
      .shard = {.tensor_parallel_rank = model.tensor_parallel_rank, .tensor_parallel_size = model.tensor_parallel_size},
      .cost = {.flops_per_token = model.flops_per_token,
               .flops_per_token_squared = model.flops_per_token_squared,
               .tokens_per_second = model.tokens_per_second}};
  for (uint32_t i = 0; i < model.layer_count; ++i) {
    absl::StatusOr<ashlar::Layer> layer = Describe(model.layers[i], absl::StrCat("model.layers[", i, "]"));
    if (!layer.ok()) return layer.status();
    described.layout.layers.push_back(*std::move(layer));
  }
  return described;
}

absl::StatusOr<std::vector<MediaHash>> DescribeMedia(const Media* media, uint64_t count, uint64_t tokens,
                                                     const std::string& field) {
  if (count > limits::kMaxMedia)
    return ashlar::Invalid(field, "_count: out of range; expected at most ", limits::kMaxMedia);
  if (media == nullptr && count > 0) return ashlar::Invalid(field, ": null");
  std::vector<MediaHash> described(count);
  for (uint64_t i = 0; i < count; ++i) {
    described[i].offset = media[i].offset;
    std::ranges::copy(media[i].hash, described[i].hash.begin());
  }
  return UnpackMedia(field, PackMedia(described), tokens);
}

absl::StatusOr<Salt> DescribeSalt(const void* salt, uint64_t bytes, const std::string& field) {
  if (bytes > limits::kMaxSaltBytes)
    return ashlar::Invalid(field, "_bytes: out of range; expected at most ", limits::kMaxSaltBytes);
  if (salt == nullptr && bytes > 0) return ashlar::Invalid(field, ": null");
  return MakeSalt({static_cast<const char*>(salt), bytes});
}

absl::Status NameModel(const absl::Status& status) {
  absl::string_view message = status.message();
  if (!absl::ConsumePrefix(&message, "layout.") && !absl::ConsumePrefix(&message, "identity.")) return status;
  return absl::Status(status.code(), absl::StrCat("model.", message));
}

absl::StatusOr<std::vector<uint32_t>> GroupsOf(const Memory& memory, const ashlar::Layout& shard) {
  std::vector<uint32_t> group_of;
  if (memory.group_count == 0) {
    if (memory.common_pages) return ashlar::Invalid("memory.common_pages: requires groups");
    return group_of;
  }
  if (memory.groups == nullptr) return ashlar::Invalid("memory.groups: null");
  if (memory.group_count > limits::kMaxLayers)
    return ashlar::Invalid("memory.group_count: out of range; expected at most ", limits::kMaxLayers);
  const auto attends = [&shard](uint32_t layer) { return layer < shard.layers.size() && HasRows(shard.layers[layer]); };
  group_of.assign(shard.layers.size(), kNoGroup);
  for (uint32_t g = 0; g < memory.group_count; ++g) {
    const LayerGroup& group = memory.groups[g];
    const std::string field = absl::StrCat("memory.groups[", g, "].layer");
    if (group.layer_count == 0) return ashlar::Invalid(field, "_count: 0; expected at least 1");
    if (group.layers == nullptr) return ashlar::Invalid(field, "s: null");
    for (uint32_t i = 0; i < group.layer_count; ++i) {
      const uint32_t layer = group.layers[i];
      if (!attends(layer)) return ashlar::Invalid(field, "s[", i, "]: ", layer, " is not an attention layer");
      if (group_of[layer] != kNoGroup)
        return ashlar::Invalid(field, "s[", i, "]: layer ", layer, " is in groups[", group_of[layer], "]");
      group_of[layer] = g;
    }
  }
  for (uint32_t layer = 0; layer < group_of.size(); ++layer) {
    if (attends(layer) && group_of[layer] == kNoGroup)
      return ashlar::Invalid("memory.groups: attention layer ", layer, " is in no group");
  }
  return group_of;
}

absl::StatusOr<PagedCache> Describe(const Memory& memory, uint32_t page_tokens, const std::vector<uint32_t>& group_of) {
  PagedCache pages{.page_tokens = page_tokens, .pages = memory.pages, .layers = {}};
  pages.common_pages = memory.common_pages;
  for (uint32_t g = 0; g < memory.group_count; ++g) {
    const LayerGroup& group = memory.groups[g];
    pages.groups.push_back({.page_tokens = group.page_tokens == 0 ? page_tokens : group.page_tokens,
                            .pages = group.pages == 0 ? memory.pages : group.pages});
    const std::string field = absl::StrCat("memory.groups[", g, "]");
    if (pages.groups[g].pages == 0) return ashlar::Invalid(field, ".pages: 0; expected at least 1");
    if (pages.groups[g].page_tokens > limits::kMaxPageTokens)
      return ashlar::Invalid(field, ".page_tokens: out of range; expected at most ", limits::kMaxPageTokens);
    if (pages.common_pages && pages.groups[g].pages != pages.groups[0].pages)
      return ashlar::Invalid(field, ".pages: ", pages.groups[g].pages,
                             "; with common_pages every group needs the same number");
  }
  if (memory.places == nullptr && memory.place_count > 0) return ashlar::Invalid("memory.places: null");
  for (uint32_t i = 0; i < memory.place_count; ++i) {
    const PagePlace& place = memory.places[i];
    const bool grouped = place.layer < group_of.size() && group_of[place.layer] != kNoGroup;
    pages.layers.push_back({.layer = place.layer,
                            .key_offset = place.key_offset,
                            .value_offset = place.value_offset,
                            .page_stride = place.page_stride,
                            .token_stride = place.token_stride,
                            .key_head_stride = place.key_head_stride,
                            .value_head_stride = place.value_head_stride,
                            .key_scale_offset = place.key_scale_offset,
                            .value_scale_offset = place.value_scale_offset,
                            .scale_page_stride = place.scale_page_stride,
                            .scale_token_stride = place.scale_token_stride,
                            .scale_head_stride = place.scale_head_stride,
                            .group = grouped ? group_of[place.layer] : 0});
  }
  return pages;
}

namespace {

// Places one page of a layer, whose keys, values and scales begin at `begin`. Does not set strides between pages.
// Returns the end of keys and values, and the end of all.
std::pair<uint64_t, uint64_t> PlacePage(const ashlar::AttentionLayer& attention, uint32_t page_tokens, uint64_t begin,
                                        PagedLayer& layer) {
  const uint64_t element = ElementBytes(attention.dtype);
  const uint64_t key = attention.key_dim * element, value = attention.value_dim * element;
  // Keys and values of one token side by side: one stride serves both.
  layer.key_offset = begin;
  layer.value_offset = begin + attention.kv_heads * key;
  layer.token_stride = Align(attention.kv_heads * (key + value));
  layer.key_head_stride = key;
  layer.value_head_stride = value;
  const uint64_t rows_end = begin + layer.token_stride * page_tokens;
  if (!attention.scales) return {rows_end, rows_end};
  layer.scale_head_stride = sizeof(float);
  layer.scale_token_stride = 2 * attention.kv_heads * sizeof(float);
  return {rows_end, rows_end + layer.scale_token_stride * page_tokens};
}

// The same for an opaque layer: the bytes of a page are dense.
std::pair<uint64_t, uint64_t> PlacePage(const OpaqueLayer& opaque, uint32_t page_tokens, uint64_t begin,
                                        PagedLayer& layer) {
  layer.key_offset = begin;
  layer.token_stride = opaque.token_bytes;
  const uint64_t end = begin + Align(uint64_t{opaque.token_bytes} * page_tokens);
  return {end, end};
}

}  // namespace

absl::StatusOr<uint64_t> PlacePages(const ashlar::Layout& shard, const std::vector<uint32_t>& group_of,
                                    PagedCache& pages) {
  if (pages.groups.empty() && pages.pages == 0) return ashlar::Invalid("memory.pages: 0; expected at least 1");
  uint64_t bytes = 0, page_bytes = 0;
  std::vector<uint64_t> ends(
      std::max<size_t>(pages.groups.size(), 1));  // ends of what is placed in a common page so far
  for (uint32_t i = 0; i < shard.layers.size(); ++i) {
    if (!HasRows(shard.layers[i])) continue;
    const auto* attention = std::get_if<ashlar::AttentionLayer>(&shard.layers[i]);
    const uint32_t group = group_of.empty() ? 0 : group_of[i];
    const PageGroup of = pages.groups.empty() ? PageGroup{pages.page_tokens, pages.pages} : pages.groups[group];
    PagedLayer layer{.layer = i, .group = group};
    uint64_t& begin = pages.common_pages ? ends[group] : bytes;
    const auto [rows_end, end] = attention != nullptr
                                     ? PlacePage(*attention, of.page_tokens, begin, layer)
                                     : PlacePage(std::get<OpaqueLayer>(shard.layers[i]), of.page_tokens, begin, layer);
    const uint64_t scales = pages.common_pages ? rows_end : begin + (rows_end - begin) * of.pages;
    if (attention != nullptr && attention->scales) {
      layer.key_scale_offset = scales;
      layer.value_scale_offset = scales + attention->kv_heads * sizeof(float);
    }
    layer.page_stride = rows_end - begin;
    layer.scale_page_stride = end - rows_end;
    begin = pages.common_pages ? Align(end) : Align(scales + layer.scale_page_stride * of.pages);
    page_bytes = std::max(page_bytes, begin);
    if (begin > kMostBytes)
      return ashlar::Invalid("memory.pages: ", of.pages, " pages exceed the maximum size of the memory");
    pages.layers.push_back(layer);
  }
  if (!pages.common_pages) return bytes;
  for (PagedLayer& layer : pages.layers) {
    layer.page_stride = page_bytes;
    layer.scale_page_stride = layer.scale_token_stride == 0 ? 0 : page_bytes;
  }
  bytes = page_bytes * pages.groups.front().pages;
  if (bytes > kMostBytes)
    return ashlar::Invalid("memory.pages: ", pages.groups.front().pages,
                           " pages exceed the maximum size of the memory");
  return bytes;
}

PagePlace ToPlace(const PagedLayer& layer) {
  return {.layer = layer.layer,
          .key_offset = layer.key_offset,
          .value_offset = layer.value_offset,
          .page_stride = layer.page_stride,
          .token_stride = layer.token_stride,
          .key_head_stride = layer.key_head_stride,
          .value_head_stride = layer.value_head_stride,
          .key_scale_offset = layer.key_scale_offset,
          .value_scale_offset = layer.value_scale_offset,
          .scale_page_stride = layer.scale_page_stride,
          .scale_token_stride = layer.scale_token_stride,
          .scale_head_stride = layer.scale_head_stride};
}

}  // namespace ashlar::engine
