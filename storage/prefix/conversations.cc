// SPDX-License-Identifier: Apache-2.0
#include "storage/prefix/conversations.h"

#include <algorithm>
#include <array>

#include "storage/prefix/stored_prefixes.h"

namespace ashlar::storage {
namespace {

Conversations::Mark MarkOf(const PrefixText& text, uint64_t depth, uint64_t span_begin) {
  const PrefixKeys& keys = *text.own();
  if (span_begin == 0) return {.depth = depth, .key = keys.Checkpoint(depth)};
  const auto tokens = text.tokens().subspan(span_begin, depth - span_begin);
  return {.depth = depth,
          .key = keys.Span(span_begin, depth),
          .span_begin = span_begin,
          .base = keys.Checkpoint(span_begin),
          .tokens = {tokens.begin(), tokens.end()}};
}

}  // namespace

const Conversations::States* Conversations::Find(TenantId tenant, const PrefixText& text) const {
  const auto table = tables_.find(tenant);
  if (!text.own() || table == tables_.end()) return nullptr;
  return table->second->Find({text.model().ns, text.conversation()});
}

std::vector<uint64_t> Conversations::Checkpoints(TenantId tenant, const PrefixText& text) const {
  std::vector<uint64_t> depths;
  const States* const states = Find(tenant, text);
  if (states == nullptr) return depths;
  for (const Mark* const mark : {&states->last, &states->before, &states->saved}) {
    if (mark->depth > 0 && mark->span_begin == 0 && mark->depth < text.tokens().size()) depths.push_back(mark->depth);
  }
  return depths;
}

// A conversation keeps its last two states, and the last one on the disk. Most blocks of older states are also blocks
// of later ones. Blocks of a text that its conversation has left are evicted when space is needed.
bool Conversations::Remember(TenantId tenant, const PrefixText& text, uint64_t depth, uint64_t span_begin) {
  const Name name{text.model().ns, text.conversation()};
  Mark mark = MarkOf(text, depth, span_begin);
  std::unique_ptr<Table>& of_tenant = tables_[tenant];
  if (of_tenant == nullptr) of_tenant = std::make_unique<Table>(kConversations);
  Table& table = *of_tenant;
  States conversation;
  if (const States* const known = table.Find(name)) conversation = *known;
  if (conversation.last.key == mark.key || conversation.before.key == mark.key) {
    if (conversation.last.key != mark.key)
      table.Put(name, {std::move(mark), std::move(conversation.last), std::move(conversation.saved)});
    return false;
  }
  // If a turn is asked again, the states of its former answer end, and those from its start stay (for example, if the
  // texts diverge inside a span).
  const Mark& last = conversation.last;
  const bool left = last.depth > 0 &&
                    (last.checkpoint() > depth || text.own()->Checkpoint(last.checkpoint()) != last.checkpoint_key());
  Mark gone = left ? conversation.last : conversation.before;
  States now{std::move(mark), left ? std::move(conversation.before) : std::move(conversation.last),
             std::move(conversation.saved)};
  // The outgoing states may be on the disk and later ones not: they stay until the disk has later ones.
  const bool saved = gone.depth > 0 && IsOnDisk(table_, tenant, gone.checkpoint_key(), text.model().shard);
  if (!left && table_.placement().defers() && saved) std::swap(gone, now.saved);
  if (left && now.saved.key == gone.key) now.saved = {};
  const auto is_used = [&now](const Key& key) {  // several answers to a turn use the same checkpoint
    return std::ranges::any_of(std::array{&now.last, &now.before, &now.saved}, [&key](const Mark* const used) {
      return used->depth > 0 && (used->key == key || used->checkpoint_key() == key);
    });
  };
  if (gone.depth > 0 && !is_used(gone.key)) table_.EvictKey(tenant, gone.key);
  if (gone.span_begin > 0 && !is_used(gone.base)) table_.EvictKey(tenant, gone.base);
  table.Put(name, std::move(now));
  return true;
}

void Conversations::Erase(TenantId tenant, const NamespaceId* ns) {
  const auto table = tables_.find(tenant);
  if (table == tables_.end()) return;
  if (ns == nullptr) {
    tables_.erase(table);
  } else {
    table->second->EraseIf([ns](const Name& name, const States&) { return name.ns == *ns; });
  }
}

}  // namespace ashlar::storage
