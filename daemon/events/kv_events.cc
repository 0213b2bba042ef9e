// SPDX-License-Identifier: Apache-2.0
#include "daemon/events/kv_events.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>

namespace ashlar::daemon {
namespace {

using Json = nlohmann::json;

Json HashOf(const Key& key) {
  return Json::binary(std::vector<uint8_t>(key.bytes.begin(), key.bytes.end()));
}

// Media as vLLM names them.
const char* MediumOf(TierKind tier) {
  switch (tier) {
    case TierKind::kHbm:
      return "GPU";
    case TierKind::kDram:
      return "CPU";
    default:
      return "STORAGE";
  }
}

Json Stored(const CacheEvent& event, const BlockTexts& texts) {
  const std::optional<BlockText> text = texts.Find(event.pool.tenant, event.key);
  Json stored = {{"type", "BlockStored"},          {"block_hashes", Json::array({HashOf(event.key)})},
                 {"parent_block_hash", nullptr},   {"token_ids", Json::array()},
                 {"block_size", event.tokens},     {"lora_id", nullptr},
                 {"medium", MediumOf(event.tier)}, {"lora_name", nullptr}};
  if (text.has_value() && text->tokens.size() <= kMostEventTokens) stored["token_ids"] = text->tokens;
  if (text.has_value() && text->before.has_value()) stored["parent_block_hash"] = HashOf(*text->before);
  return stored;
}

Json StoredSegment(const CacheEvent& event, const BlockTexts& texts) {
  const std::optional<BlockText> text = texts.Find(event.pool.tenant, event.key);
  Json stored = {{"type", "SegmentStored"},
                 {"block_hashes", Json::array({HashOf(event.key)})},
                 {"token_ids", Json::array()},
                 {"block_size", event.tokens},
                 {"medium", MediumOf(event.tier)}};
  if (text.has_value() && text->tokens.size() <= kMostEventTokens) stored["token_ids"] = text->tokens;
  return stored;
}

bool IsSegment(const CacheEvent& event) {
  return event.object == ObjectKind::kSegment;
}

Json Removed(const CacheEvent& event) {
  return {{"type", IsSegment(event) ? "SegmentRemoved" : "BlockRemoved"},
          {"block_hashes", Json::array({HashOf(event.key)})},
          {"medium", MediumOf(event.tier)}};
}

bool IsPublished(const CacheEvent& event, bool segments) {
  const bool shared = event.pool.kind == storage::PoolKind::kPublic;
  return (event.object == ObjectKind::kPrefixBlock || (segments && IsSegment(event))) && shared &&
         event.shard.rank == 0;
}

// Upper bounds of an event's size, and of the array around all of them or AllBlocksCleared.
constexpr size_t kRemovedBytes = 128, kStoredBytes = 256, kTokenBytes = 5, kRestBytes = 64;

size_t MostBytes(const CacheEvent& event) {
  if (event.kind == CacheEvent::Kind::kGap || !IsPublished(event, /*segments=*/true)) return 0;
  if (event.kind == CacheEvent::Kind::kRemoved) return kRemovedBytes;
  return kRemovedBytes + kStoredBytes + kTokenBytes * std::min<uint64_t>(event.tokens, kMostEventTokens);
}
static_assert(kRestBytes + kRemovedBytes + kStoredBytes + kTokenBytes * kMostEventTokens <= kMostBatchBytes);

}  // namespace

size_t CountForABatch(std::span<const CacheEvent> events) {
  size_t bytes = kRestBytes, count = 0;
  for (const CacheEvent& event : events) {
    bytes += MostBytes(event);
    if (bytes > kMostBatchBytes) break;
    ++count;
  }
  return count;
}

std::string EncodeKvEvents(std::span<const CacheEvent> events, const BlockTexts& texts, double seconds) {
  Json all = Json::array();
  for (const CacheEvent& event : events) {
    if (event.kind == CacheEvent::Kind::kGap) {
      all = Json::array({{{"type", "AllBlocksCleared"}}});  // earlier events are erased with the rest
      continue;
    }
    if (!IsPublished(event, texts.keeps_segments())) continue;
    if (event.kind == CacheEvent::Kind::kRemoved) {
      all.push_back(Removed(event));
      continue;
    }
    if (event.kind == CacheEvent::Kind::kTier) {
      CacheEvent before = event;
      before.tier = event.was;
      all.push_back(Removed(before));
    }
    all.push_back(IsSegment(event) ? StoredSegment(event, texts) : Stored(event, texts));
  }
  if (all.empty()) return {};
  const std::vector<uint8_t> bytes = Json::to_msgpack(Json::array({seconds, std::move(all), 0}));
  return {bytes.begin(), bytes.end()};
}

}  // namespace ashlar::daemon
