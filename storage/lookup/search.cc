// SPDX-License-Identifier: Apache-2.0
#include "storage/lookup/search.h"

#include <algorithm>
#include <iterator>

namespace ashlar::storage {
namespace {

// Returns the objects of a prefix; the first one has index `begin` among the found objects.
PrefixObjects Named(std::span<const Query> objects, uint32_t begin) {
  PrefixObjects named{.begin = begin};
  for (const Query& object : objects) {
    const uint32_t place = begin + named.size();
    if (object.kind == ObjectKind::kCheckpoint) {
      named.checkpoint = place;
    } else if (object.kind == ObjectKind::kSpan) {
      named.span = place;
    } else {
      ++named.blocks;
    }
  }
  return named;
}

}  // namespace

Search::Search(Matcher& matcher, SessionId session, std::optional<TenantId> tenant, std::span<const Query> queries,
               const PrefixText* prompt, HasSpace has_space, const LeaseId& name, MissReason refused)
    : matcher_(matcher),
      session_(session),
      tenant_(tenant.value_or(kNoTenant)),
      queries_(queries),
      prompt_(prompt),
      has_space_(std::move(has_space)),
      name_(name),
      refused_(refused) {
  if (tenant.has_value()) return;
  RefuseAll(MissReason::kInvalidRequest, /*counted=*/false);
  stage_ = Stage::kDone;
}

Search::~Search() {
  matcher_.leases_.GiveBack(tenant_, std::move(objects_), std::move(others_));
  matcher_.leases_.GiveBack(tenant_, std::move(found_), std::move(of_found_));
  matcher_.leases_.GiveBack(tenant_, {}, std::move(lost_));
}

bool Search::GoTo(Stage stage) {
  stage_ = stage;
  next_ = 0;
  begin_ = 0;
  return true;
}

bool Search::Run(Slice& slice) {
  while (true) {
    bool ended = true;
    switch (stage_) {
      case Stage::kBegin:
        ended = Begin(slice);
        break;
      case Stage::kWeigh:
        ended = Weigh(slice);
        break;
      case Stage::kPeek:
        ended = Peek(slice);
        break;
      case Stage::kChoose:
        ended = Choose();
        break;
      case Stage::kHold:
        ended = Hold(slice);
        break;
      case Stage::kFind:
        ended = Find(slice);
        break;
      case Stage::kAnswer:
        ended = Answer(slice);
        break;
      case Stage::kAnswerPrefix:
        ended = AnswerPrefix(slice);
        break;
      case Stage::kSettle:
        ended = Settle(slice);
        break;
      case Stage::kDone:
        return true;
    }
    if (!ended) return false;
  }
}

bool Search::Begin(Slice& slice) {
  if (!slice.Take()) return false;
  if (refused_ == MissReason::kNone && matcher_.leases_.Exists(name_)) refused_ = MissReason::kInvalidRequest;
  for (const Query& query : queries_) listed_ += query.shard.size;
  if (refused_ == MissReason::kNone && !matcher_.leases_.HasCapacity(session_, tenant_, listed_)) {
    refused_ = MissReason::kBusy;
  }
  needed_at_ = std::max(matcher_.clock_.Now(), prompt_ == nullptr ? 0 : prompt_->needed_at);
  if (prompt_ == nullptr || refused_ != MissReason::kNone) return GoTo(Stage::kFind);
  Prefixes::Answer asked = matcher_.prefixes_.Ask(tenant_, *prompt_);
  prefix_.checkpoint_at = std::move(asked.checkpoint_at);
  candidates_ = std::move(asked.candidates);
  for (const Prefixes::Candidate& candidate : candidates_) prefix_.resumable.push_back(candidate.depth);
  if (candidates_.empty()) return PrefixIsKnown();
  segments_.reserve(queries_.size());
  return GoTo(prompt_->tokens_per_second > 0 ? Stage::kWeigh : Stage::kPeek);
}

// Break-even check of prefixes: a depth is only used if loading its objects is faster than computing the tokens that no
// shallower depth saves at less cost. Blocks of a prefix may be in several tiers, so it is checked as a whole.
bool Search::Weigh(Slice& slice) {
  if (matcher_.level_of_(session_) == ObjectFinder::kWhereItLies) return GoTo(Stage::kPeek);
  if (!SumBlocks(/*own=*/false, slice) || !SumBlocks(/*own=*/true, slice)) return false;
  ExcludeSlow();
  return candidates_.empty() ? PrefixIsKnown() : GoTo(Stage::kPeek);
}

bool Search::SumBlocks(bool own, Slice& slice) {
  uint64_t depth = 0;
  for (const Prefixes::Candidate& candidate : candidates_) {
    if (candidate.own == own) depth = std::max(depth, candidate.checkpoint());
  }
  const PrefixModel& model = prompt_->model();
  const size_t blocks = model.paged ? depth / model.block_tokens : 0;
  std::vector<PromotionCost::Load>& sums = blocks_[own ? 1 : 0];
  if (sums.empty()) sums.emplace_back();
  Query query{.kind = ObjectKind::kPrefixBlock, .shard = model.shard, .ns = model.ns};
  while (sums.size() <= blocks) {
    if (!slice.Take()) return false;
    query.key = (own ? *prompt_->own() : prompt_->shared()).blocks()[sums.size() - 1];
    PromotionCost::Load sum = sums.back();
    sum += matcher_.finder_.LoadOf(tenant_, query, matcher_.level_of_(session_));
    sums.push_back(sum);
  }
  return true;
}

PromotionCost::Load Search::LoadOf(const Prefixes::Candidate& candidate) const {
  const PrefixModel& model = prompt_->model();
  const PrefixKeys& keys = candidate.own ? *prompt_->own() : prompt_->shared();
  const size_t level = matcher_.level_of_(session_);
  const uint64_t depth = candidate.checkpoint();
  PromotionCost::Load load = blocks_[candidate.own ? 1 : 0][model.paged ? depth / model.block_tokens : 0];
  Query query{.kind = ObjectKind::kCheckpoint, .key = keys.Checkpoint(depth), .shard = model.shard, .ns = model.ns};
  load += matcher_.finder_.LoadOf(tenant_, query, level);
  if (candidate.span_begin == 0) return load;
  query.kind = ObjectKind::kSpan;
  query.key = candidate.span;
  load += matcher_.finder_.LoadOf(tenant_, query, level);
  return load;
}

void Search::ExcludeSlow() {
  auto& costs = matcher_.table_.costs()[tenant_];
  const Nanos ahead = std::max<Nanos>(needed_at_ - matcher_.clock_.Now(), 0);
  double most_saved = 0;  // ns
  uint64_t deepest = 0;
  const Prefixes::Candidate* deepest_slow = nullptr;
  std::vector<bool> slow;
  for (const Prefixes::Candidate& candidate : candidates_) {
    const double saved = 1e9 * static_cast<double>(candidate.depth) / prompt_->tokens_per_second -
                         static_cast<double>(costs.Estimate(LoadOf(candidate), ahead));
    slow.push_back(saved < most_saved);
    if (slow.back()) {
      deepest_slow = &candidate;
    } else {
      deepest = candidate.depth;
    }
    most_saved = std::max(most_saved, saved);
  }
  if (deepest_slow == nullptr || costs.ProbesLoad()) return;
  if (deepest_slow->depth > deepest) {
    const PrefixKeys& keys = deepest_slow->own ? *prompt_->own() : prompt_->shared();
    const Query missed{.kind = ObjectKind::kCheckpoint,
                       .key = keys.Checkpoint(deepest_slow->checkpoint()),
                       .shard = prompt_->model().shard,
                       .ns = prompt_->model().ns,
                       .tokens = deepest_slow->depth - deepest};
    matcher_.Missed(session_, tenant_, missed, MissReason::kSlowerThanRecompute);
  }
  size_t i = 0;
  std::erase_if(candidates_, [&](const Prefixes::Candidate&) { return slow[i++]; });
}

bool Search::Peek(Slice& slice) {
  for (; next_ < queries_.size(); ++next_) {
    if (!slice.Take()) return false;
    const Query& query = queries_[next_];
    const Entry* const entry =
        query.storable ? matcher_.table_.index().keys().Find(tenant_, query.key, query.shard) : nullptr;
    segments_.push_back({begin_, begin_ + query.tokens, entry != nullptr && entry->ready});
    begin_ += query.tokens;
  }
  return GoTo(Stage::kChoose);
}

// Chooses the prefix that saves most together with the segments after it, as far as this is visible without using them.
bool Search::Choose() {
  const PrefixModel& model = prompt_->model();
  std::vector<uint64_t> depths;
  for (const Prefixes::Candidate& candidate : candidates_) depths.push_back(candidate.depth);
  const Cover cover = BestCover(depths, segments_, model.layout->head, model.layout->tail,
                                [&model](uint64_t depth) { return model.costs.Flops(depth); });
  const auto chosen = std::ranges::find(candidates_, cover.prefix, &Prefixes::Candidate::depth);
  if (chosen == candidates_.end()) return PrefixIsKnown();  // segments without a prefix, from the first one, save more
  chosen_ = *chosen;
  of_prefix_ = Prefixes::Objects(*prompt_, chosen_);
  matcher_.prefixes_.DeferWrites(tenant_, *prompt_, candidates_, chosen_, of_prefix_);
  objects_.reserve(of_prefix_.size());
  prefix_.provenance = Provenance::kExact;
  return GoTo(Stage::kHold);
}

bool Search::Hold(Slice& slice) {
  for (; next_ < of_prefix_.size(); ++next_) {
    if (!slice.Take() || WaitsForMemory(of_prefix_[next_], slice)) return false;
    objects_.push_back(matcher_.FindWhole(session_, tenant_, of_prefix_[next_], others_, verified_));
    const ObjectReference& object = objects_.back().object;
    if (object) {
      if (object->header.provenance == Provenance::kComposed) prefix_.provenance = Provenance::kComposed;
      continue;
    }
    // Excludes all candidates that need the lost object: a lost block excludes candidates of its depth or deeper; a
    // lost checkpoint or span excludes those that use it.
    const ObjectKind lost = of_prefix_[next_].kind;
    const uint64_t block_end = (next_ + 1) * prompt_->model().block_tokens;
    std::erase_if(candidates_, [&](const Prefixes::Candidate& candidate) {
      if (candidate.own != chosen_.own) return false;
      if (lost == ObjectKind::kPrefixBlock) return candidate.checkpoint() >= block_end;
      if (lost == ObjectKind::kSpan) return candidate.span_begin > 0 && candidate.span == chosen_.span;
      return candidate.checkpoint() == chosen_.checkpoint();
    });
    LetPrefixGo();
    return candidates_.empty() ? PrefixIsKnown() : GoTo(Stage::kChoose);
  }
  prefix_.depth = chosen_.depth;
  prefix_.own = chosen_.own;
  prefix_.span_tokens = static_cast<uint32_t>(chosen_.depth - chosen_.checkpoint());
  return PrefixIsKnown();
}

bool Search::WaitsForMemory(const Query& query, Slice& slice) {
  if (!slice.resume() || !*may_wait_ || !query.storable) return false;
  const auto waits = [&](Tier& tier, uint64_t extents) {
    return tier.WhenGrown(tenant_, extents, [may_wait = may_wait_, resume = slice.resume()](bool grown) {
      *may_wait = grown;
      resume();
    });
  };
  if (!matcher_.finder_.AnyTarget(tenant_, query, matcher_.level_of_(session_), waits)) return false;
  slice.Wait();
  return true;
}

void Search::LetPrefixGo() {
  matcher_.leases_.GiveBack(tenant_, std::exchange(objects_, {}), std::exchange(others_, {}));
  of_prefix_.clear();
  prefix_.provenance = Provenance::kExact;
}

bool Search::PrefixIsKnown() {
  std::erase_if(prefix_.checkpoint_at, [this](uint64_t depth) { return depth <= prefix_.depth; });
  if (!matcher_.leases_.HasCapacity(session_, tenant_, listed_ + objects_.size() + others_.size())) {
    prefix_.depth = prefix_.span_tokens = 0;
    LetPrefixGo();
  }
  return GoTo(Stage::kFind);
}

bool Search::Find(Slice& slice) {
  if (next_ == 0) found_.reserve(queries_.size() + objects_.size());  // a lease only needs memory for its entries
  for (; next_ < queries_.size(); ++next_) {
    if (!slice.Take()) return false;
    const Query& query = queries_[next_];
    needed_at_ = std::max(needed_at_, query.needed_at);
    const uint64_t end = begin_ + query.tokens;
    if (prompt_ != nullptr &&
        (prefix_.depth >= end || SpoiledBy(prefix_.depth, begin_, prompt_->model().layout->head))) {
      found_.push_back({.reason = MissReason::kCovered});
    } else if (refused_ != MissReason::kNone) {
      found_.push_back({.reason = matcher_.Missed(session_, tenant_, query, refused_)});
    } else if (WaitsForMemory(query, slice)) {
      return false;
    } else {
      found_.push_back(matcher_.Find(session_, tenant_, query, of_found_, verified_));
    }
    begin_ = end;
  }
  match_.found.reserve(queries_.size() + objects_.size());
  return GoTo(Stage::kAnswer);
}

// A hit without space in the reply is reported as a miss but stays leased. An object that was lost meanwhile is
// reported as a miss and released with the other shards of its bundle, so that their memory becomes free.
bool Search::Answer(Slice& slice) {
  for (; next_ < queries_.size(); ++next_) {
    if (!slice.Take()) return false;
    const Query& query = queries_[next_];
    Found found = Matcher::Describe(found_[next_]);
    const bool held = static_cast<bool>(found_[next_].object), lost = held && found.reason != MissReason::kNone;
    if (lost) lost_.push_back(std::move(found_[next_].object));
    if (lost) found_[next_].reason = found.reason;
    any_ |= held && !lost;
    if (held && !lost && has_space_ && !has_space_(found)) found = {MissReason::kBusy};
    if (held && found.reason == MissReason::kNone) {
      matcher_.observer_.Hit(tenant_, query.kind, found.tier, query.tokens);
    } else if (held) {
      found = {.reason = matcher_.Missed(session_, tenant_, query, found.reason)};
    }
    match_.found.push_back(found);
  }
  for (; next_ < queries_.size() + of_found_.size(); ++next_) {
    if (!slice.Take()) return false;
    ObjectReference& other = of_found_[next_ - queries_.size()];
    if (other->gone != MissReason::kNone) lost_.push_back(std::move(other));
  }
  std::erase_if(of_found_, [](const ObjectReference& other) { return !other; });
  matcher_.leases_.GiveBack(tenant_, {}, std::exchange(lost_, {}));
  prefix_.objects = Named(of_prefix_, static_cast<uint32_t>(queries_.size()));
  return GoTo(Stage::kAnswerPrefix);
}

// Replies with all objects of a prefix or with none: the reply reserves space for all of them before they are counted.
bool Search::AnswerPrefix(Slice& slice) {
  for (; next_ < 2 * prefix_.objects.size(); ++next_) {
    if (!slice.Take()) return false;
    if (next_ >= prefix_.objects.size()) {
      const size_t i = next_ - prefix_.objects.size();
      const Query& query = of_prefix_[i];
      matcher_.observer_.Hit(tenant_, query.kind, match_.found[prefix_.objects.begin + i].tier, query.tokens);
      continue;
    }
    const Found found = Matcher::Describe(objects_[next_]);
    if (found.reason != MissReason::kNone) {
      DropPrefix(found.reason);
      LetPrefixGo();
    } else if (has_space_ && !has_space_(found)) {
      DropPrefix(MissReason::kBusy);
    } else {
      match_.found.push_back(found);
    }
  }
  any_ |= !objects_.empty();
  if (prefix_.depth > 0) {
    matcher_.observer_.Resumed(tenant_, prefix_.own, prefix_.depth, prompt_->tokens().size());
  }
  return GoTo(Stage::kSettle);
}

void Search::DropPrefix(MissReason instead) {
  match_.found.resize(prefix_.objects.begin);
  for (Found& found : match_.found) {
    if (found.reason == MissReason::kCovered) found.reason = instead;
  }
  prefix_.depth = prefix_.span_tokens = 0;
  prefix_.objects = {.begin = prefix_.objects.begin};
}

bool Search::Settle(Slice& slice) {
  if (!matcher_.leases_.Settle(tenant_, slice)) return false;
  Grant();
  return GoTo(Stage::kDone);
}

void Search::Grant() {
  LeaseTable& leases = matcher_.leases_;
  const size_t size = found_.size() + of_found_.size() + objects_.size() + others_.size();
  if (!matcher_.is_open_(session_)) return RefuseAll(MissReason::kInvalidRequest, /*counted=*/false);
  if (any_ && leases.Exists(name_)) return RefuseAll(MissReason::kInvalidRequest, /*counted=*/true);
  if (any_ && !leases.HasCapacity(session_, tenant_, size)) return RefuseAll(MissReason::kBusy, /*counted=*/true);
  match_.prefix = std::move(prefix_);
  if (!any_) return;
  std::ranges::move(objects_, std::back_inserter(found_));
  std::ranges::move(of_found_, std::back_inserter(others_));
  match_.lease =
      leases.Grant(session_, tenant_, std::move(found_), needed_at_, std::move(others_), match_.prefix, name_);
  objects_.clear();
  of_found_.clear();
}

void Search::RefuseAll(MissReason reason, bool counted) {
  for (size_t i = 0; counted && i < match_.found.size(); ++i) {
    if (match_.found[i].reason != MissReason::kNone || i >= queries_.size()) continue;
    matcher_.Missed(session_, tenant_, queries_[i], reason);
  }
  match_.found.assign(queries_.size(), Found{.reason = reason});
}

}  // namespace ashlar::storage
