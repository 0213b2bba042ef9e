// SPDX-License-Identifier: Apache-2.0
#include "daemon/events/block_texts.h"

#include <span>
#include <utility>

namespace ashlar::daemon {

void BlockTexts::Note(storage::TenantId tenant, const NamespaceId& ns, const PrefixKeys& keys) {
  MutexLock lock(mutex_);
  const std::span<const Key> blocks = keys.blocks();
  for (size_t i = 0; i < blocks.size(); ++i) {
    if (const auto known = known_.find({tenant, blocks[i]}); known != known_.end()) {
      order_.splice(order_.end(), order_, known->second);
      continue;
    }
    const std::span<const int32_t> tokens = keys.tokens().subspan(i * keys.block_tokens(), keys.block_tokens());
    BlockText text{.before = i == 0 ? std::nullopt : std::optional(blocks[i - 1]),
                   .tokens = {tokens.begin(), tokens.end()}};
    Add({tenant, ns, blocks[i], std::move(text)});
  }
  Trim();
}

void BlockTexts::NoteSegment(storage::TenantId tenant, const NamespaceId& ns, const Key& key,
                             std::vector<int32_t> tokens) {
  if (!keeps_segments_) return;
  MutexLock lock(mutex_);
  if (const auto known = known_.find({tenant, key}); known != known_.end()) {
    order_.splice(order_.end(), order_, known->second);
    return;
  }
  Add({tenant, ns, key, {.before = std::nullopt, .tokens = std::move(tokens)}});
  Trim();
}

void BlockTexts::Add(Known known) {
  tokens_ += known.text.tokens.size();
  const std::pair place(known.tenant, known.key);
  known_[place] = order_.insert(order_.end(), std::move(known));
}

void BlockTexts::Trim() {
  for (; tokens_ > most_tokens_; order_.pop_front()) {
    tokens_ -= order_.front().text.tokens.size();
    known_.erase({order_.front().tenant, order_.front().key});
  }
}

std::optional<BlockText> BlockTexts::Find(storage::TenantId tenant, const Key& block) const {
  MutexLock lock(mutex_);
  const auto known = known_.find({tenant, block});
  if (known == known_.end()) return std::nullopt;
  return known->second->text;
}

void BlockTexts::Erase(storage::TenantId tenant, const std::optional<NamespaceId>& ns) {
  MutexLock lock(mutex_);
  for (auto known = order_.begin(); known != order_.end();) {
    if (known->tenant != tenant || (ns.has_value() && known->ns != *ns)) {
      ++known;
      continue;
    }
    tokens_ -= known->text.tokens.size();
    known_.erase({tenant, known->key});
    known = order_.erase(known);
  }
  ++erasures_;
}

}  // namespace ashlar::daemon
