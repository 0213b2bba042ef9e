// SPDX-License-Identifier: Apache-2.0
#include "storage/prefix/prefixes.h"

#include <algorithm>
#include <cstring>
#include <ranges>
#include <utility>
#include <variant>

#include "proto/limits.h"
#include "proto/object.h"

namespace ashlar::storage {
namespace {

uint64_t AllocatedBytes(const ObjectHeader& header) {
  return header.Extents() * limits::kExtentBytes * header.shard.size;
}

}  // namespace

absl::StatusOr<std::shared_ptr<const PrefixModel>> MakePrefixModel(const NamespaceId& ns, const TensorShard& shard,
                                                                   std::shared_ptr<const Layout> shared_layout,
                                                                   uint32_t capture_tokens, const ComputeCost& declared,
                                                                   const SpanUse& spans) {
  const Layout& layout = *shared_layout;
  auto model = std::make_shared<PrefixModel>(PrefixModel{.ns = ns,
                                                         .shard = shard,
                                                         .layout = std::move(shared_layout),
                                                         .block_tokens = PrefixBlockTokens(layout),
                                                         .capture_tokens = std::max(capture_tokens, 1u),
                                                         .span_tokens = spans.tokens,
                                                         .span_dtype = spans.dtype,
                                                         .paged = std::ranges::any_of(layout.layers, HasRows)});
  const uint32_t block = model->block_tokens;
  absl::StatusOr<ObjectHeader> checkpoint = PlanPrefixCheckpoint(layout, ns, Key{}, block, block);
  if (!checkpoint.ok()) return checkpoint.status();
  checkpoint->shard = shard;
  if (spans.tokens > 0) {
    const absl::StatusOr<ObjectHeader> span = PlanPrefixSpan(layout, ns, Key{}, spans.dtype, 1, 1 + spans.tokens);
    if (!span.ok()) return span.status();
  }
  const ComputeCost compute = CostOf(declared, layout, shard);
  model->costs = {.page_tokens = block,
                  .checkpoint_bytes = AllocatedBytes(*checkpoint),
                  .flops_per_token = compute.flops_per_token,
                  .flops_per_square = compute.flops_per_square};
  if (!model->paged) return model;
  absl::StatusOr<ObjectHeader> rows = PlanPrefixBlock(layout, ns, Key{}, block, block);
  if (!rows.ok()) return rows.status();
  rows->shard = shard;
  model->costs.page_bytes = AllocatedBytes(*rows);
  model->block_bytes = rows->bytes;
  return model;
}

PrefixText::PrefixText(std::shared_ptr<const PrefixModel> model, std::vector<int32_t> tokens,
                       const ConversationId& conversation, std::vector<MediaHash> media, const Salt& salt)
    : model_(std::move(model)),
      tokens_(std::move(tokens)),
      media_(std::move(media)),
      salted_(salt != Salt{}),
      conversation_(conversation),
      shared_(Salted(model_->ns, salt), model_->block_tokens, tokens_, {}, media_) {
  if (conversation != ConversationId{}) {
    own_.emplace(Salted(model_->ns, salt), model_->block_tokens, tokens_, conversation, media_);
    for (size_t i = 0; i < conversation_.size(); ++i) conversation_[i] ^= salt.bytes[i];
  }
  if (media_.empty() && !salted_) return;
  planned_ = tokens_;
  for (const MediaHash& input : media_) Show(input);
  if (salted_) Show(salt);
}

void PrefixText::Show(const MediaHash& input) {
  // The whole hash counts: some engines' hashes differ in a few bytes only.
  uint32_t shown = 1;
  for (size_t i = 0; i < input.hash.size(); i += sizeof shown) {
    uint32_t word = 0;
    std::memcpy(&word, input.hash.data() + i, sizeof word);
    shown = (shown ^ word) * 0x9E3779B1u;
  }
  planned_[input.offset] ^= static_cast<int32_t>(shown);
}

void PrefixText::Show(const Salt& salt) {
  for (size_t i = 0; i < std::min(kSaltedTokens, planned_.size()); ++i) {
    int32_t word = 0;
    std::memcpy(&word, salt.bytes.data() + i * sizeof word, sizeof word);
    planned_[i] ^= word;
  }
}

Prefixes::Prefixes(ObjectTable& table, Publisher& publisher, SessionTransfers& transfers, const Clock& clock,
                   Observer& observer, IsOpen is_open, std::function<uint64_t(TenantId)> capacity)
    : table_(table),
      publisher_(publisher),
      transfers_(transfers),
      clock_(clock),
      observer_(observer),
      is_open_(std::move(is_open)),
      capacity_(std::move(capacity)) {}

void Prefixes::Adopt(TenantId tenant, const ObjectHeader& header) {
  if (header.shard.rank != 0 || (header.kind != ObjectKind::kCheckpoint && header.kind != ObjectKind::kSpan)) return;
  recovered_of_[header.ns] = tenant;
  if (header.kind == ObjectKind::kCheckpoint) ++recovered_[header.ns][{header.tokens, header.first_token}];
  if (header.kind == ObjectKind::kSpan) ++recovered_spans_[header.ns][{header.tokens, header.first_token}];
}

void Prefixes::AdoptRemote(TenantId tenant, const ObjectHeader& header) {
  if (header.shard.rank != 0 || (header.kind != ObjectKind::kCheckpoint && header.kind != ObjectKind::kSpan)) return;
  recovered_of_[header.ns] = tenant;
  const std::pair place(header.tokens, header.first_token);
  if (header.kind == ObjectKind::kCheckpoint) recovered_[header.ns].try_emplace(place, 1);
  if (header.kind == ObjectKind::kSpan) recovered_spans_[header.ns].try_emplace(place, 1);
}

Prefixes::Space& Prefixes::Of(TenantId tenant, const PrefixModel& model) {
  const auto [found, added] = spaces_.try_emplace(model.ns);
  Space& space = found->second;
  space.asked = ++asked_;
  if (!added) return space;
  space.tenant = tenant;
  const auto capacity = capacities_.find(tenant);
  const PrefixPlannerOptions options{
      .capacity_bytes = capacity == capacities_.end() ? capacity_(tenant) : capacity->second,
      .capture_tokens = model.capture_tokens};
  space.planner = std::make_unique<PrefixPlanner>(model.costs, options);
  space.planner->WhenGone([this, tenant](PrefixNode& node) { GiveUp(tenant, node); });
  size_t own = 0;
  auto oldest = spaces_.end();
  for (auto it = spaces_.begin(); it != spaces_.end(); ++it) {
    if (it->second.tenant != tenant) continue;
    ++own;
    if (oldest == spaces_.end() || it->second.asked < oldest->second.asked) oldest = it;
  }
  if (own > kNamespaces) Erase(oldest);
  return space;
}

// Its kept prefixes are found again as after a restart.
void Prefixes::Erase(std::map<NamespaceId, Space>::iterator space) {
  const uint64_t block = space->second.planner->costs().page_tokens;
  recovered_of_[space->first] = space->second.tenant;
  Depths& depths = recovered_[space->first];
  Depths& spans = recovered_spans_[space->first];
  space->second.planner->budget().ForEachKept([&](const PrefixNode& node) {
    if (node.data.span != nullptr) {
      ++spans[{node.depth(), node.data.span->base->depth()}];
    } else {
      ++depths[{node.depth(), node.depth() / block * block}];
    }
  });
  spaces_.erase(space);
}

void Prefixes::Erase(TenantId tenant, const NamespaceId* ns) {
  const auto is_meant = [&](const NamespaceId& whose, TenantId owner) {
    return owner == tenant && (ns == nullptr || whose == *ns);
  };
  std::erase_if(spaces_, [&](const auto& space) { return is_meant(space.first, space.second.tenant); });
  std::erase_if(recovered_of_, [&](const auto& owned) {
    if (!is_meant(owned.first, owned.second)) return false;
    recovered_.erase(owned.first);
    recovered_spans_.erase(owned.first);
    return true;
  });
  if (ns == nullptr) {
    conversations_.erase(tenant);
  } else if (const auto table = conversations_.find(tenant); table != conversations_.end()) {
    table->second->EraseIf([ns](const ConversationName& name, const Conversation&) { return name.ns == *ns; });
  }
}

Prefixes::Conversations& Prefixes::Of(TenantId tenant) {
  std::unique_ptr<Conversations>& table = conversations_[tenant];
  if (table == nullptr) table = std::make_unique<Conversations>(kConversations);
  return *table;
}

// All shards must be present. Ranks commit one after the other.
Prefixes::There Prefixes::Find(TenantId tenant, const Key& key, const TensorShard& shard) const {
  const Entry* const entry = table_.index().keys().Find(tenant, key, shard);
  if (entry == nullptr) return There::kGone;
  if (!entry->ready) return There::kComing;
  if (shard.size == 1) return There::kWhole;
  const std::vector<Entry*> all = table_.index().keys().All(tenant, key);
  if (all.size() == shard.size && std::ranges::all_of(all, &Entry::ready)) return There::kWhole;
  return clock_.Now() - entry->published_at < kRanks ? There::kComing : There::kGone;
}

size_t Prefixes::WholeBlocks(TenantId tenant, const PrefixModel& model, const PrefixKeys& keys) const {
  const std::span<const Key> blocks = keys.blocks();
  if (!model.paged) return blocks.size();
  const auto missing =
      std::ranges::find_if(blocks, [&](const Key& key) { return Find(tenant, key, model.shard) != There::kWhole; });
  return static_cast<size_t>(missing - blocks.begin());
}

Prefixes::There Prefixes::Find(TenantId tenant, const PrefixModel& model, const PrefixKeys& keys, uint64_t depth,
                               size_t& whole) const {
  const Key checkpoint = keys.Checkpoint(depth);
  if (writing_.contains(checkpoint)) return There::kComing;
  const size_t needed = model.paged ? depth / model.block_tokens : 0;
  for (; whole < needed; ++whole) {
    const There block = Find(tenant, keys.blocks()[whole], model.shard);
    if (block != There::kWhole) return block;
  }
  return Find(tenant, checkpoint, model.shard);
}

Prefixes::There Prefixes::FindSpan(TenantId tenant, const PrefixModel& model, const Key& key) const {
  return writing_.contains(key) ? There::kComing : Find(tenant, key, model.shard);
}

Prefixes::Asked Prefixes::Ask(TenantId tenant, const PrefixText& text) {
  Asked asked;
  if (text.tokens().size() < 2) return asked;
  Space& space = Of(tenant, text.model());
  Probe(space, text);
  if (text.span_tokens() > 0) ProbeSpans(space, text);
  const auto prompt = text.tokens().first(text.tokens().size() - 1);
  PrefixPlanner::Match match = space.planner->Lookup(prompt, text.span_tokens() > 0);
  size_t whole = 0;
  for (PrefixNode* const node : match.kept) {
    const There there = Find(tenant, text.model(), text.shared(), node->depth(), whole);
    if (there == There::kWhole) asked.candidates.push_back({.depth = node->depth()});
    if (there == There::kGone) space.planner->Lost(*node);
  }
  asked.checkpoint_at = match.checkpoint_at;
  // Another engine of this namespace may use a finer capture unit.
  std::erase_if(asked.checkpoint_at, [&](uint64_t depth) { return depth % text.model().capture_tokens != 0; });
  AddSpans(space, text, match.spans, asked);
  space.planner->Release(std::move(match));  // the found objects are leased
  AddOwn(tenant, text, asked);
  return asked;
}

void Prefixes::AddSpan(Asked& asked, uint64_t begin, uint64_t depth, bool own, const Key& key) {
  const uint64_t deepest = std::max(begin, depth - std::min<uint64_t>(depth, kListed));
  for (; depth > deepest; --depth) {
    const auto place = std::ranges::lower_bound(asked.candidates, depth, {}, &Candidate::depth);
    if (place != asked.candidates.end() && place->depth == depth) continue;  // states exist there, or another span
    asked.candidates.insert(place, {.depth = depth, .own = own, .span_begin = begin, .span = key});
  }
}

void Prefixes::AddSpans(Space& space, const PrefixText& text, std::span<const PrefixPlanner::Match::Span> spans,
                        Asked& asked) {
  for (const PrefixPlanner::Match::Span& span : spans) {
    const StoredKeys* const stored = span.end->data.stored.get();
    if (stored == nullptr || !stored->span) continue;  // lost, with the states that it starts from
    const There there = FindSpan(space.tenant, text.model(), *stored->span);
    if (there == There::kGone) space.planner->Lost(*span.end);
    if (there != There::kWhole) continue;
    if (!std::ranges::binary_search(asked.candidates, span.begin, {}, &Candidate::depth)) continue;
    AddSpan(asked, span.begin, span.depth, false, *stored->span);
  }
}

void Prefixes::AddOwn(TenantId tenant, const PrefixText& text, Asked& asked) {
  if (!text.own()) return;
  const Conversation* const conversation = Of(tenant).Find({text.model().ns, text.conversation()});
  if (conversation == nullptr) return;
  const auto prompt = text.tokens().first(text.tokens().size() - 1);
  for (const Mark* const mark : {&conversation->saved, &conversation->before, &conversation->last}) {
    const uint64_t depth = mark->checkpoint();
    if (depth == 0 || depth > prompt.size()) continue;
    size_t whole = 0;
    if (text.own()->Checkpoint(depth) != mark->checkpoint_key()) continue;  // belongs to another text
    if (Find(tenant, text.model(), *text.own(), depth, whole) != There::kWhole) continue;
    const auto place = std::ranges::lower_bound(asked.candidates, depth, {}, &Candidate::depth);
    if (place == asked.candidates.end() || place->depth != depth) {
      asked.candidates.insert(place, {.depth = depth, .own = true});
    }
    if (mark->span_begin == 0 || text.span_tokens() == 0) continue;
    if (FindSpan(tenant, text.model(), mark->key) != There::kWhole) continue;
    const auto behind = prompt.subspan(depth);
    const auto same = std::ranges::mismatch(behind, mark->tokens).in1 - behind.begin();
    AddSpan(asked, depth, depth + static_cast<uint64_t>(same), true, mark->key);
  }
}

std::vector<Query> Prefixes::Objects(const PrefixText& text, const Candidate& candidate) {
  const PrefixModel& model = text.model();
  const PrefixKeys& keys = candidate.own ? *text.own() : text.shared();
  Query query{.kind = ObjectKind::kPrefixBlock,
              .shard = model.shard,
              .ns = model.ns,
              .tokens = model.block_tokens,
              .needed_at = text.needed_at};
  std::vector<Query> queries;
  const uint64_t depth = candidate.checkpoint();
  const size_t blocks = model.paged ? depth / model.block_tokens : 0;
  // All of them are needed, so each one's value is its share of the prefix's bytes times the FLOPs of the prefix.
  const uint64_t block_bytes = model.costs.page_bytes, state_bytes = model.costs.StateBytes(depth);
  const auto recompute = [&](uint64_t tokens, double part) {
    return text.tokens_per_second > 0 ? static_cast<Nanos>(1 + std::min(1e18, 1e9 * static_cast<double>(tokens) * part /
                                                                                  text.tokens_per_second))
                                      : 0;
  };
  const double all_bytes = std::max(1.0, static_cast<double>(blocks * block_bytes + state_bytes));
  query.remote_recompute = recompute(depth, static_cast<double>(block_bytes) / all_bytes);
  for (size_t i = 0; i < blocks; ++i) {
    query.key = keys.blocks()[i];
    query.flops = model.costs.Flops(i * model.block_tokens, (i + 1) * model.block_tokens) / model.shard.size;
    queries.push_back(query);
  }
  query.flops = 0;
  query.kind = ObjectKind::kCheckpoint;
  query.remote_recompute = recompute(depth, static_cast<double>(state_bytes) / all_bytes);
  query.key = keys.Checkpoint(depth);
  query.tokens = model.paged ? depth % model.block_tokens : depth;
  queries.push_back(query);
  if (candidate.span_begin == 0) return queries;
  query.kind = ObjectKind::kSpan;
  query.remote_recompute = recompute(candidate.depth - depth, 1);
  query.key = candidate.span;
  query.tokens = candidate.depth - depth;
  queries.push_back(query);
  return queries;
}

std::vector<Query> Prefixes::AtEnd(TenantId tenant, const PrefixText& text) const {
  const PrefixModel& model = text.model();
  const uint64_t end = text.tokens().size();
  const auto is_here = [&](const Candidate& candidate) {
    size_t whole = 0;
    return Find(tenant, model, candidate.own ? *text.own() : text.shared(), candidate.checkpoint(), whole) ==
               There::kWhole &&
           (candidate.span_begin == 0 || FindSpan(tenant, model, candidate.span) == There::kWhole);
  };
  std::vector<Candidate> candidates;
  if (text.own()) candidates.push_back({.depth = end, .own = true});
  if (const auto table = conversations_.find(tenant); text.own() && table != conversations_.end()) {
    const Conversation* const known = table->second->Find({model.ns, text.conversation()});
    const Mark last = known == nullptr ? Mark() : known->last;
    if (last.depth == end && last.span_begin > 0 && text.own()->Span(last.span_begin, end) == last.key) {
      candidates.push_back({.depth = end, .own = true, .span_begin = last.span_begin, .span = last.key});
    }
  }
  candidates.push_back({.depth = end});
  if (const auto space = spaces_.find(model.ns); space != spaces_.end()) {
    space->second.planner->tree().Walk(text.tokens(), [&](PrefixNode& node) {
      if (node.depth() != end || node.data.span == nullptr || node.data.stored == nullptr) return;
      if (!node.data.stored->span) return;
      candidates.push_back(
          {.depth = end, .span_begin = node.data.span->base->depth(), .span = *node.data.stored->span});
    });
  }
  const auto found = std::ranges::find_if(candidates, is_here);
  return end == 0 || found == candidates.end() ? std::vector<Query>() : Objects(text, *found);
}

// Ends the checkpoint or span, and the blocks before it that nothing else needs.
void Prefixes::GiveUp(TenantId tenant, PrefixNode& node) {
  std::vector<Key> keys;
  if (node.data.stored != nullptr && node.data.stored->checkpoint) {
    keys.push_back(*std::exchange(node.data.stored->checkpoint, std::nullopt));
  }
  if (node.data.stored != nullptr && node.data.stored->span) {
    keys.push_back(*std::exchange(node.data.stored->span, std::nullopt));
  }
  for (PrefixNode* at = &node; at->parent() != nullptr && at->data.needs == 0; at = at->parent()) {
    if (at->data.stored == nullptr) continue;
    keys.insert(keys.end(), at->data.stored->blocks.begin(), at->data.stored->blocks.end());
    at->data.stored->blocks.clear();
  }
  for (const Key& key : keys) table_.GiveUp(tenant, key);
}

Prefixes::Stats Prefixes::stats(TenantId tenant) const {
  Stats stats;
  for (const auto& [ns, space] : spaces_) {
    if (space.tenant != tenant) continue;
    ++stats.namespaces;
    stats.checkpoints += space.planner->budget().checkpoints();
    stats.bytes += space.planner->budget().bytes();
    stats.spans += space.planner->budget().spans();
    stats.span_saved_bytes += space.planner->budget().saved_bytes();
    stats.history_bytes += space.planner->history_bytes();
  }
  return stats;
}

}  // namespace ashlar::storage
