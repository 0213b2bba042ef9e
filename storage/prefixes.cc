#include "storage/prefixes.h"

#include <algorithm>
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
                                                                   const Layout& layout, uint32_t capture_tokens,
                                                                   double flops_per_token, double flops_per_square) {
  auto model =
      std::make_shared<PrefixModel>(PrefixModel{.ns = ns,
                                                .shard = shard,
                                                .layout = layout,
                                                .block_tokens = PrefixBlockTokens(layout),
                                                .capture_tokens = std::max(capture_tokens, 1u),
                                                .paged = std::ranges::any_of(layout.layers, [](const Layer& layer) {
                                                  return std::holds_alternative<AttentionLayer>(layer);
                                                })});
  const uint32_t block = model->block_tokens;
  absl::StatusOr<ObjectHeader> checkpoint = PlanPrefixCheckpoint(layout, ns, Key{}, block, block);
  if (!checkpoint.ok()) return checkpoint.status();
  checkpoint->shard = shard;
  const bool known = flops_per_token > 0;
  model->costs = {.page_tokens = block,
                  .checkpoint_bytes = AllocatedBytes(*checkpoint),
                  .flops_per_token = known ? flops_per_token : 1,
                  .flops_per_square = known ? std::max(flops_per_square, 0.0) : 0};
  if (!model->paged) return model;
  absl::StatusOr<ObjectHeader> rows = PlanPrefixBlock(layout, ns, Key{}, block, block);
  if (!rows.ok()) return rows.status();
  rows->shard = shard;
  model->costs.page_bytes = AllocatedBytes(*rows);
  return model;
}

PrefixText::PrefixText(std::shared_ptr<const PrefixModel> model, std::vector<int32_t> tokens,
                       const ConversationId& conversation)
    : model_(std::move(model)),
      tokens_(std::move(tokens)),
      conversation_(conversation),
      shared_(model_->ns, model_->block_tokens, tokens_) {
  if (conversation != ConversationId{}) own_.emplace(model_->ns, model_->block_tokens, tokens_, conversation);
}

Prefixes::Prefixes(Pool& pool, Publisher& publisher, Drain& drain, const Clock& clock, Observer& observer,
                   IsOpen is_open, std::function<uint64_t(TenantId)> capacity)
    : pool_(pool),
      publisher_(publisher),
      drain_(drain),
      clock_(clock),
      observer_(observer),
      is_open_(std::move(is_open)),
      capacity_(std::move(capacity)) {}

void Prefixes::Adopt(const ObjectHeader& header) {
  if (header.kind != ObjectKind::kCheckpoint || header.shard.rank != 0) return;
  ++recovered_[header.ns][{header.tokens, header.first_token}];
}

Prefixes::Space& Prefixes::Of(TenantId tenant, const PrefixModel& model) {
  const auto [found, added] = spaces_.try_emplace(model.ns);
  Space& space = found->second;
  space.asked = ++asked_;
  if (!added) return space;
  space.tenant = tenant;
  const auto capacity = capacities_.find(tenant);
  const PrefixCacheOptions options{
      .capacity_bytes = capacity == capacities_.end() ? capacity_(tenant) : capacity->second,
      .capture_tokens = model.capture_tokens};
  space.cache = std::make_unique<PrefixCache>(model.costs, options);
  space.cache->WhenGone([this, tenant](PrefixNode& node) { GiveUp(tenant, node); });
  size_t own = 0;
  auto oldest = spaces_.end();
  for (auto it = spaces_.begin(); it != spaces_.end(); ++it) {
    if (it->second.tenant != tenant) continue;
    ++own;
    if (oldest == spaces_.end() || it->second.asked < oldest->second.asked) oldest = it;
  }
  if (own > kNamespaces) Forget(oldest);
  return space;
}

// What it keeps is found again as after a restart.
void Prefixes::Forget(std::map<NamespaceId, Space>::iterator space) {
  const uint64_t block = space->second.cache->costs().page_tokens;
  Depths& depths = recovered_[space->first];
  space->second.cache->store().ForEachKept([&](const PrefixNode& node) {
    ++depths[{node.depth(), node.depth() / block * block}];
  });
  spaces_.erase(space);
}

Prefixes::Conversations& Prefixes::Of(TenantId tenant) {
  std::unique_ptr<Conversations>& table = conversations_[tenant];
  if (table == nullptr) table = std::make_unique<Conversations>(kConversations);
  return *table;
}

// Of several shards all must be there; ranks commit one after the other.
Prefixes::There Prefixes::Find(TenantId tenant, const Key& key, const TensorShard& shard) const {
  const Entry* const entry = pool_.Peek(tenant, key, shard);
  if (entry == nullptr) return There::kGone;
  if (!entry->ready) return There::kComing;
  if (shard.size == 1) return There::kWhole;
  const std::vector<Entry*> all = pool_.PeekAll(tenant, key);
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

Prefixes::Asked Prefixes::Ask(TenantId tenant, const PrefixText& text) {
  Asked asked;
  if (text.tokens().size() < 2) return asked;
  Space& space = Of(tenant, text.model());
  Probe(space, text);
  const auto prompt = text.tokens().first(text.tokens().size() - 1);
  PrefixCache::Match match = space.cache->Lookup(prompt);
  size_t whole = 0;
  for (const uint64_t depth : match.resumable) {
    const There there = Find(tenant, text.model(), text.shared(), depth, whole);
    if (there == There::kWhole) asked.candidates.push_back({.depth = depth});
    if (there == There::kGone) space.cache->Lost(prompt.first(depth));
  }
  asked.checkpoint_at = match.checkpoint_at;
  // Another engine of this namespace may capture more finely.
  std::erase_if(asked.checkpoint_at, [&](uint64_t depth) { return depth % text.model().capture_tokens != 0; });
  space.cache->Release(std::move(match));  // what it finds is leased as objects
  AddOwn(tenant, text, asked);
  return asked;
}

// Checkpoints of an earlier run of the daemon, on its disk: their tokens are not known, but their depths are.
void Prefixes::Probe(Space& space, const PrefixText& text) {
  const auto found = recovered_.find(text.model().ns);
  if (found == recovered_.end()) return;
  const uint64_t block = text.model().block_tokens;
  Depths& depths = found->second;
  for (const bool own : {false, true}) {
    if (own && !text.own()) continue;
    const PrefixKeys& keys = own ? *text.own() : text.shared();
    // Deeper ones lack a block; the last token is left to compute.
    const uint64_t behind =
        std::min<uint64_t>(text.tokens().size(), (WholeBlocks(space.tenant, text.model(), keys) + 1) * block);
    std::vector<uint64_t> tried;
    for (auto at = depths.lower_bound({behind, 0}); at != depths.begin() && tried.size() < kProbes;) {
      --at;
      const auto [depth, first] = at->first;
      if (first == depth / block * block) {
        tried.push_back(depth);
      } else {
        at = depths.erase(at);  // no chain's
      }
    }
    for (const uint64_t depth : tried | std::views::reverse) {
      if (!Recover(space, text, own, depth)) continue;
      const auto count = depths.find({depth, depth / block * block});
      if (--count->second == 0) depths.erase(count);
    }
  }
  if (depths.empty()) recovered_.erase(found);
}

// False: it is not there, or known already; then one of the same depth that is there is another text's.
bool Prefixes::Recover(Space& space, const PrefixText& text, bool own, uint64_t depth) {
  const PrefixKeys& keys = own ? *text.own() : text.shared();
  if (Find(space.tenant, keys.Checkpoint(depth), text.model().shard) != There::kWhole) return false;
  if (own) return Remember(space.tenant, text, depth);
  const auto prefix = text.tokens().first(depth);
  if (space.cache->IsKept(prefix)) return false;
  if (space.cache->Recover(prefix)) Name(space, text, depth);
  return true;
}

void Prefixes::AddOwn(TenantId tenant, const PrefixText& text, Asked& asked) {
  if (!text.own()) return;
  const Conversation* const conversation = Of(tenant).Find({text.model().ns, text.conversation()});
  if (conversation == nullptr) return;
  for (const Mark& mark : {conversation->before, conversation->last}) {
    if (mark.depth == 0 || mark.depth >= text.tokens().size()) continue;
    size_t whole = 0;
    if (text.own()->Checkpoint(mark.depth) != mark.key) continue;  // another text
    if (Find(tenant, text.model(), *text.own(), mark.depth, whole) != There::kWhole) continue;
    const auto place = std::ranges::lower_bound(asked.candidates, mark.depth, {}, &Candidate::depth);
    if (place != asked.candidates.end() && place->depth == mark.depth) continue;
    asked.candidates.insert(place, {.depth = mark.depth, .own = true});
  }
}

std::vector<Query> Prefixes::Objects(const PrefixText& text, const Candidate& candidate) {
  const PrefixModel& model = text.model();
  const PrefixKeys& keys = candidate.own ? *text.own() : text.shared();
  Query query{.kind = ObjectKind::kPrefixPage,
              .shard = model.shard,
              .ns = model.ns,
              .tokens = model.block_tokens,
              .needed_at = text.needed_at};
  std::vector<Query> queries;
  const size_t blocks = candidate.depth / model.block_tokens;
  for (size_t i = 0; model.paged && i < blocks; ++i) {
    query.key = keys.blocks()[i];
    queries.push_back(query);
  }
  query.kind = ObjectKind::kCheckpoint;
  query.key = keys.Checkpoint(candidate.depth);
  query.tokens = model.paged ? candidate.depth % model.block_tokens : candidate.depth;
  queries.push_back(query);
  return queries;
}

// The checkpoint, and the blocks on the way to it that nothing else needs.
void Prefixes::GiveUp(TenantId tenant, PrefixNode& node) {
  std::vector<Key> keys;
  if (node.data.stored != nullptr && node.data.stored->checkpoint) {
    keys.push_back(*std::exchange(node.data.stored->checkpoint, std::nullopt));
  }
  for (PrefixNode* at = &node; at->parent() != nullptr && at->data.needs == 0; at = at->parent()) {
    if (at->data.stored == nullptr) continue;
    keys.insert(keys.end(), at->data.stored->blocks.begin(), at->data.stored->blocks.end());
    at->data.stored->blocks.clear();
  }
  for (const Key& key : keys) pool_.GiveUp(tenant, key);
}

Prefixes::Stats Prefixes::stats(TenantId tenant) const {
  Stats stats;
  for (const auto& [ns, space] : spaces_) {
    if (space.tenant != tenant) continue;
    ++stats.namespaces;
    stats.checkpoints += space.cache->store().checkpoints();
    stats.bytes += space.cache->store().bytes();
    stats.history_bytes += space.cache->history_bytes();
  }
  return stats;
}

}  // namespace ashlar::storage
