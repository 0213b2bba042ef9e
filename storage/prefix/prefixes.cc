// SPDX-License-Identifier: Apache-2.0
#include "storage/prefix/prefixes.h"

#include <algorithm>
#include <ranges>
#include <utility>

namespace ashlar::storage {
namespace {

constexpr size_t kListed = 64;  // deepest depths inside a span that a lookup lists

// Adds the depths after the span's begin, up to `depth`, except known ones.
void AddSpan(std::vector<Prefixes::Candidate>& candidates, uint64_t begin, uint64_t depth, bool own, const Key& key) {
  const uint64_t deepest = std::max(begin, depth - std::min<uint64_t>(depth, kListed));
  for (; depth > deepest; --depth) {
    const auto place = std::ranges::lower_bound(candidates, depth, {}, &Prefixes::Candidate::depth);
    if (place != candidates.end() && place->depth == depth) continue;  // states exist there, or another span
    candidates.insert(place, {.depth = depth, .own = own, .span_begin = begin, .span = key});
  }
}

// Returns how long the engine takes to compute that many tokens; 0 if its rate is unknown.
Nanos PrefillTime(const PrefixText& text, double tokens) {
  if (text.tokens_per_second <= 0) return 0;
  return static_cast<Nanos>(1 + std::min(1e18, 1e9 * tokens / text.tokens_per_second));
}

}  // namespace

Prefixes::Prefixes(ObjectTable& table, Publisher& publisher, SessionTransfers& transfers, Executor& background,
                   const Clock& clock, Observer& observer, IsOpen is_open, std::function<uint64_t(TenantId)> capacity)
    : table_(table),
      publisher_(publisher),
      transfers_(transfers),
      background_(background),
      observer_(observer),
      is_open_(std::move(is_open)),
      capacity_(std::move(capacity)),
      stored_(table, clock),
      conversations_(table) {}

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
  space.planner = std::make_unique<PrefixPlanner>(model.costs, options, [this, tenant](auto work, auto done) {
    return background_.Run(tenant, std::move(work), std::move(done));
  });
  space.planner->WhenGone([this, tenant](PrefixNode& node) { EvictState(tenant, node); });
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
  conversations_.Erase(tenant, ns);
}

Prefixes::Answer Prefixes::Ask(TenantId tenant, const PrefixText& text) {
  Answer asked;
  if (text.tokens().size() < 2) return asked;
  Space& space = Of(tenant, text.model());
  Probe(space, text);
  if (text.span_tokens() > 0) ProbeSpans(space, text);
  const auto prompt = text.tokens().first(text.tokens().size() - 1);
  if (text.tokens_per_second > 0) {
    table_.costs()[tenant].Computed(text.model().costs.Flops(0, prompt.size()) / text.model().shard.size,
                                    PrefillTime(text, static_cast<double>(prompt.size())));
  }
  PrefixPlanner::Match match = space.planner->Lookup(prompt, text.span_tokens() > 0);
  size_t whole = 0;
  uint64_t missed = match.missed == nullptr ? 0 : match.missed->depth();
  for (PrefixNode* const node : match.kept) {
    const There there = stored_.FindState(tenant, text.model(), text.shared(), node->depth(), whole);
    if (there == There::kWhole) asked.candidates.push_back({.depth = node->depth()});
    if (there != There::kGone) continue;
    missed = std::max(missed, node->depth());
    space.planner->Lost(*node);
  }
  if (missed > 0) NoteMissed(tenant, text, text.shared(), missed);
  asked.checkpoint_at = match.checkpoint_at;
  // Another engine of this namespace may use a finer capture unit.
  std::erase_if(asked.checkpoint_at, [&](uint64_t depth) { return depth % text.model().capture_tokens != 0; });
  AddSpans(space, text, match.spans, asked);
  space.planner->Release(std::move(match));  // the found objects are leased
  AddOwn(tenant, text, asked);
  return asked;
}

// The states at the depth, or a span to there, would have been used, with the blocks before them.
void Prefixes::NoteMissed(TenantId tenant, const PrefixText& text, const PrefixKeys& keys, uint64_t depth) {
  Placement& placement = table_.placement();
  if (!placement.defers()) return;
  placement.RecordDemand(tenant, keys.Checkpoint(depth));
  for (const Key& block : keys.blocks().first(std::min(keys.blocks().size(), depth / keys.block_tokens()))) {
    placement.RecordDemand(tenant, block);
  }
  if (text.span_tokens() == 0) return;
  for (const uint64_t begin : Checkpoints(spaces_.at(text.model().ns), text)) {
    if (begin < depth && depth - begin <= text.span_tokens()) placement.RecordDemand(tenant, keys.Span(begin, depth));
  }
}

void Prefixes::AddSpans(Space& space, const PrefixText& text, std::span<const PrefixPlanner::Match::Span> spans,
                        Answer& asked) {
  for (const PrefixPlanner::Match::Span& span : spans) {
    const StoredKeys* const stored = span.end->data.stored.get();
    if (stored == nullptr || !stored->span) continue;  // lost, with the states that it starts from
    const There there = stored_.FindSpan(space.tenant, text.model(), *stored->span);
    if (there == There::kGone) space.planner->Lost(*span.end);
    if (there != There::kWhole) continue;
    if (!std::ranges::binary_search(asked.candidates, span.begin, {}, &Candidate::depth)) continue;
    AddSpan(asked.candidates, span.begin, span.depth, false, *stored->span);
  }
}

void Prefixes::AddOwn(TenantId tenant, const PrefixText& text, Answer& asked) {
  const Conversations::States* const conversation = conversations_.Find(tenant, text);
  if (conversation == nullptr) return;
  const auto prompt = text.tokens().first(text.tokens().size() - 1);
  for (const Conversations::Mark* const mark : {&conversation->saved, &conversation->before, &conversation->last}) {
    const uint64_t depth = mark->checkpoint();
    if (depth == 0 || depth > prompt.size()) continue;
    size_t whole = 0;
    if (text.own()->Checkpoint(depth) != mark->checkpoint_key()) continue;  // belongs to another text
    if (stored_.FindState(tenant, text.model(), *text.own(), depth, whole) != There::kWhole) {
      if (mark == &conversation->last) NoteMissed(tenant, text, *text.own(), depth);
      continue;
    }
    const auto place = std::ranges::lower_bound(asked.candidates, depth, {}, &Candidate::depth);
    if (place == asked.candidates.end() || place->depth != depth) {
      asked.candidates.insert(place, {.depth = depth, .own = true});
    }
    if (mark->span_begin == 0 || text.span_tokens() == 0) continue;
    if (stored_.FindSpan(tenant, text.model(), mark->key) != There::kWhole) {
      table_.placement().RecordDemand(tenant, mark->key);
      continue;
    }
    const auto behind = prompt.subspan(depth);
    const auto same = std::ranges::mismatch(behind, mark->tokens).in1 - behind.begin();
    AddSpan(asked.candidates, depth, depth + static_cast<uint64_t>(same), true, mark->key);
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
    return PrefillTime(text, static_cast<double>(tokens) * part);
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
    return stored_.FindState(tenant, model, candidate.own ? *text.own() : text.shared(), candidate.checkpoint(),
                             whole) == There::kWhole &&
           (candidate.span_begin == 0 || stored_.FindSpan(tenant, model, candidate.span) == There::kWhole);
  };
  std::vector<Candidate> candidates;
  if (text.own()) candidates.push_back({.depth = end, .own = true});
  if (const Conversations::States* const known = conversations_.Find(tenant, text)) {
    const Conversations::Mark& last = known->last;
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
void Prefixes::EvictState(TenantId tenant, PrefixNode& node) {
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
  for (const Key& key : keys) table_.EvictKey(tenant, key);
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
