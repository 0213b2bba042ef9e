// SPDX-License-Identifier: Apache-2.0
// Commits of texts: which parts are kept, and which older ones they replace. commit_job.h copies them.
#include <algorithm>
#include <utility>

#include "proto/limits.h"
#include "storage/prefix/commit_job.h"
#include "storage/prefix/prefixes.h"

namespace ashlar::storage {
namespace {

constexpr size_t kCommits = 16;  // in flight per session

// Returns nothing if no span is offered or the model has none.
std::optional<PrefixPlanner::SpanOffer> Offered(const PrefixCommit& commit) {
  if (!commit.span) return std::nullopt;
  const PrefixModel& model = commit.text.model();
  const uint64_t begin = commit.span->begin, end = commit.text.tokens().size();
  const auto plan = PlanPrefixSpan(*model.layout, model.ns, Key{}, model.span_dtype, begin, end);
  if (!plan.ok() || begin < commit.text.first_span() || end - begin > commit.text.span_tokens()) return std::nullopt;
  return PrefixPlanner::SpanOffer{begin, plan->Extents() * limits::kExtentBytes * model.shard.size};
}

}  // namespace

Prefixes::Keep Prefixes::Decide(Space& space, const PrefixCommit& commit) {
  const std::span<const int32_t> tokens = commit.text.tokens();
  const std::optional<PrefixPlanner::SpanOffer> span = Offered(commit);
  Keep keep{.states = std::vector<bool>(commit.checkpoints.size(), true), .span = span.has_value()};
  const auto count_turns = [&keep, &tokens](const PrefixNode& node) {
    if (PrefixPlanner::IsEnd(node.data) && node.depth() < tokens.size()) ++keep.turns;
  };
  // A rank that does not decide may commit before the one that does.
  if (commit.text.model().shard.rank != 0) {
    keep.known = Checkpoints(space, commit.text);
    std::ranges::reverse(keep.known);
    space.planner->tree().Walk(tokens, count_turns);
    return keep;
  }
  std::vector<uint64_t> inside;
  for (const PrefixCommit::Checkpoint& checkpoint : commit.checkpoints) {
    if (checkpoint.depth < tokens.size()) inside.push_back(checkpoint.depth);
  }
  PrefixPlanner& planner = *space.planner;
  planner.Commit(tokens, commit.prompt_tokens, inside, span);
  keep.span = false;
  planner.tree().Walk(tokens, [&](PrefixNode& node) {
    Name(commit.text, node);
    count_turns(node);
    if (!node.data.kept) return;
    if (node.data.span == nullptr) keep.known.push_back(node.depth());
    // A span of another length is a different object, and it exists.
    keep.span |= span && node.data.span != nullptr && node.depth() == tokens.size() &&
                 node.data.span->base->depth() == span->begin;
  });
  for (size_t i = 0; i < keep.states.size(); ++i) {
    keep.states[i] = std::ranges::binary_search(keep.known, commit.checkpoints[i].depth);
  }
  return keep;
}

// Keeps the end of the text. If the end is a span, also the checkpoint that it starts from; no other prompt uses the
// other depths.
Prefixes::Keep Prefixes::KeepOwn(TenantId tenant, const PrefixCommit& commit) {
  Keep keep{.states = std::vector<bool>(commit.checkpoints.size(), false),
            .known = conversations_.Checkpoints(tenant, commit.text)};
  std::ranges::sort(keep.known);
  const Conversations::States* const earlier = conversations_.Find(tenant, commit.text);
  keep.turns = earlier != nullptr ? 1 : 0;
  if (commit.checkpoints.empty()) return keep;
  const std::optional<PrefixPlanner::SpanOffer> span = Offered(commit);
  const auto base = span ? std::ranges::find(commit.checkpoints, span->begin, &PrefixCommit::Checkpoint::depth)
                         : commit.checkpoints.end();
  keep.span = base != commit.checkpoints.end() &&
              span->bytes < commit.text.model().costs.StateBytes(commit.text.tokens().size());
  keep.states[keep.span ? static_cast<size_t>(base - commit.checkpoints.begin()) : keep.states.size() - 1] = true;
  return keep;
}

void Prefixes::Name(const Space& space, const PrefixText& text, uint64_t depth) {
  space.planner->tree().Walk(text.tokens().first(depth), [&](PrefixNode& node) { Name(text, node); });
}

void Prefixes::Name(const PrefixText& text, PrefixNode& node) {
  const PrefixModel& model = text.model();
  const std::span<const Key> blocks = text.shared().blocks();
  const size_t begin = model.paged ? node.begin() / model.block_tokens : 0;
  const size_t end = model.paged ? node.depth() / model.block_tokens : 0;
  const bool needed = node.data.needs > 0 && begin < end;
  if (!needed && !node.data.kept) return;
  if (node.data.stored == nullptr) node.data.stored = std::make_unique<StoredKeys>();
  StoredKeys& stored = *node.data.stored;
  if (needed && stored.blocks.empty()) stored.blocks.assign(blocks.begin() + begin, blocks.begin() + end);
  if (!node.data.kept) return;
  if (const KeptSpan* const span = node.data.span.get()) {
    if (!stored.span) stored.span = text.shared().Span(span->base->depth(), node.depth());
  } else if (!stored.checkpoint) {
    stored.checkpoint = text.shared().Checkpoint(node.depth());
  }
}

void Prefixes::EvictCheckpoint(TenantId tenant, const PrefixText& text, uint64_t needed, uint64_t depth) {
  table_.EvictKey(tenant, text.shared().Checkpoint(depth));
  const uint64_t block = text.model().block_tokens;
  for (uint64_t i = needed / block; text.model().paged && i < depth / block; ++i) {
    table_.EvictKey(tenant, text.shared().blocks()[i]);
  }
}

// A token is worth the bytes of its keys and values. For a model without them, a block's tokens are worth a checkpoint.
bool Prefixes::Defers(TenantId tenant, const PrefixText& text, const ObjectHeader& header, bool own,
                      std::span<const uint64_t> depths) const {
  if (!table_.placement().defers()) return false;
  const PrefixModel& model = text.model();
  const PrefixKeys& keys = own ? *text.own() : text.shared();
  uint64_t needed = model.block_tokens;  // tokens
  if (model.paged) {
    const uint64_t bytes = header.Extents() * limits::kExtentBytes;
    needed = (bytes * model.block_tokens + model.block_bytes - 1) / model.block_bytes;
  }
  if (header.tokens < needed) return true;
  const auto near = std::ranges::upper_bound(depths, header.tokens - needed);
  return std::any_of(near, std::ranges::lower_bound(depths, header.tokens),
                     [&](uint64_t depth) { return IsOnDisk(table_, tenant, keys.Checkpoint(depth), model.shard); });
}

void Prefixes::DeferWrites(TenantId tenant, const PrefixText& text, std::span<const Candidate> candidates,
                           const Candidate& chosen, std::span<Query> objects) const {
  if (!table_.placement().defers()) return;
  std::vector<uint64_t> depths;
  for (const Candidate& candidate : candidates) {
    if (candidate.own == chosen.own && candidate.span_begin == 0) depths.push_back(candidate.depth);
  }
  for (Query& object : objects) {
    if (object.kind == ObjectKind::kPrefixBlock) continue;
    const Entry* const entry = table_.index().keys().Find(tenant, object.key, object.shard);
    object.defer = entry != nullptr && Defers(tenant, text, entry->header, chosen.own, depths);
  }
}

void Prefixes::Commit(SessionId session, TenantId tenant, PrefixCommit commit, CommitDone done) {
  const size_t count = commit.checkpoints.size();
  const auto under_way = commits_.find(session);
  if (under_way != commits_.end() && under_way->second >= kCommits) {
    return done(std::vector<CommitOutcome>(count, CommitOutcome::kBusy));
  }
  bool own = commit.provenance == Provenance::kComposed;
  if (own && !commit.text.own()) return done(std::vector<CommitOutcome>(count, CommitOutcome::kBadSource));
  Keep keep;
  if (!own) {
    Space& space = Of(tenant, commit.text.model());
    keep = Decide(space, commit);
    // States that the namespace does not need may be kept for their conversation, unless others need the space. With
    // several ranks, only the deciding one knows.
    const CheckpointBudget& budget = space.planner->budget();
    const bool ample = budget.limit_bytes() == budget.capacity_bytes() && commit.text.model().shard.size == 1;
    if (count > 0 && ample && commit.text.own() && !keep.any()) {
      own = true;
      keep = KeepOwn(tenant, commit);
    }
  } else {
    keep = KeepOwn(tenant, commit);
  }
  const TenantPool pool{tenant, own ? PoolKind::kPrivate : PoolKind::kPublic};
  std::vector<CommitOutcome> outcomes(count, CommitOutcome::kDeclined);
  std::make_shared<CommitJob>(*this, session, pool, std::move(commit), own, std::move(keep), std::move(outcomes),
                              std::move(done))
      ->Start();
}

}  // namespace ashlar::storage
