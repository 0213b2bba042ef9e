#include "daemon/events/block_texts.h"

#include <span>
#include <utility>

namespace ashlar::daemon {

void BlockTexts::Note(const PrefixKeys& keys) {
  const std::lock_guard lock(mutex_);
  const std::span<const Key> blocks = keys.blocks();
  for (size_t i = 0; i < blocks.size(); ++i) {
    if (const auto known = known_.find(blocks[i]); known != known_.end()) {
      order_.splice(order_.end(), order_, known->second);
      continue;
    }
    const std::span<const int32_t> tokens = keys.tokens().subspan(i * keys.block_tokens(), keys.block_tokens());
    BlockText text{.before = i == 0 ? std::nullopt : std::optional(blocks[i - 1]),
                   .tokens = {tokens.begin(), tokens.end()}};
    known_[blocks[i]] = order_.insert(order_.end(), {blocks[i], std::move(text)});
    tokens_ += tokens.size();
  }
  for (; tokens_ > most_tokens_; order_.pop_front()) {
    tokens_ -= order_.front().text.tokens.size();
    known_.erase(order_.front().key);
  }
}

std::optional<BlockText> BlockTexts::Find(const Key& block) const {
  const std::lock_guard lock(mutex_);
  const auto known = known_.find(block);
  if (known == known_.end()) return std::nullopt;
  return known->second->text;
}

}  // namespace ashlar::daemon
