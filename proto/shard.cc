// SPDX-License-Identifier: Apache-2.0
#include "proto/shard.h"

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace ashlar {
namespace {

absl::Status Refuse(const std::string& field, uint64_t number, uint32_t shards) {
  return absl::InvalidArgumentError(
      absl::StrCat(field, ": ", number, " is not divisible by ", shards, " tensor-parallel shards"));
}

// For heads that may be fewer than the shards; then shards share a head.
absl::StatusOr<uint32_t> SharedHeads(const std::string& field, uint32_t heads, uint32_t shards) {
  if (heads % shards == 0) return heads / shards;
  if (shards % heads == 0) return 1;
  return Refuse(field, heads, shards);
}

absl::Status Divide(const std::string& field, const TensorShard& shard, AttentionLayer& layer) {
  const auto heads = SharedHeads(field + ".kv_heads", layer.kv_heads, shard.size);
  if (!heads.ok()) return heads.status();
  layer.kv_heads = *heads;
  return absl::OkStatus();
}

// A convolution over queries, keys and values, as in gated delta networks and state-space models, is split by heads;
// any other one is split evenly.
absl::StatusOr<uint32_t> ConvChannels(const std::string& field, const LinearLayer& whole, const LinearLayer& part,
                                      uint32_t shards) {
  const auto channels = [](const LinearLayer& layer) {
    return 2 * uint64_t{layer.key_heads} * layer.d_k + uint64_t{layer.value_heads} * layer.d_v;
  };
  if (whole.conv_channels == channels(whole)) return static_cast<uint32_t>(channels(part));
  if (whole.conv_channels % shards != 0) return Refuse(field + ".conv_channels", whole.conv_channels, shards);
  return whole.conv_channels / shards;
}

absl::Status Divide(const std::string& field, const TensorShard& shard, LinearLayer& layer) {
  const LinearLayer whole = layer;
  const auto key_heads = SharedHeads(field + ".key_heads", whole.key_heads, shard.size);
  if (!key_heads.ok()) return key_heads.status();
  if (whole.value_heads % shard.size != 0) return Refuse(field + ".value_heads", whole.value_heads, shard.size);
  layer.key_heads = *key_heads;
  layer.value_heads = whole.value_heads / shard.size;
  const auto numbers = static_cast<ptrdiff_t>(whole.decay_table.size() / shard.size);
  const auto first = whole.decay_table.begin() + shard.rank * numbers;
  layer.decay_table =
      std::vector<float>(first, first + numbers);  // assigns exactly this shard's numbers, without spare capacity
  const auto channels = ConvChannels(field, whole, layer, shard.size);
  if (!channels.ok()) return channels.status();
  layer.conv_channels = *channels;
  return absl::OkStatus();
}

absl::Status Divide(const std::string& field, const TensorShard& shard, OpaqueLayer& layer) {
  if (layer.token_bytes % shard.size != 0) return Refuse(field + ".token_bytes", layer.token_bytes, shard.size);
  if (layer.state_bytes % shard.size != 0) return Refuse(field + ".state_bytes", layer.state_bytes, shard.size);
  layer.token_bytes /= shard.size;
  layer.state_bytes /= shard.size;
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Layout> ShardLayout(Layout layout, const TensorShard& shard) {
  if (shard.size == 1) return layout;
  for (size_t i = 0; i < layout.layers.size(); ++i) {
    const std::string field = absl::StrCat("layout.layers[", i, "]");
    const absl::Status divided = std::visit([&](auto& layer) { return Divide(field, shard, layer); }, layout.layers[i]);
    if (!divided.ok()) return divided;
  }
  return layout;
}

}  // namespace ashlar
