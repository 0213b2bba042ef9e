// SPDX-License-Identifier: Apache-2.0
#include "storage/prefix/commit_job.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "proto/limits.h"

namespace ashlar::storage {

Prefixes::CommitJob::CommitJob(Prefixes& prefixes, SessionId session, const TenantPool& pool, PrefixCommit commit,
                               bool own, Keep keep, std::vector<CommitOutcome> outcomes, CommitDone done)
    : prefixes_(prefixes),
      session_(session),
      pool_(pool),
      commit_(std::move(commit)),
      own_(own),
      keep_(std::move(keep)),
      outcomes_(std::move(outcomes)),
      done_(std::move(done)) {}

void Prefixes::CommitJob::Start() {
  prefixes_.transfers_.Begin(session_);
  ++prefixes_.commits_[session_];
  const PrefixModel& model = commit_.text.model();
  // Depths of known states: without a checkpoint, a prompt would resume from the previous state.
  std::vector<uint64_t> before = keep_.known;
  for (size_t i = 0; i < keep_.states.size(); ++i) {
    if (!keep_.states[i]) continue;
    const uint64_t depth = commit_.checkpoints[i].depth;
    prefixes_.stored_.BeginCopy(Keys().Checkpoint(depth));
    const size_t blocks = model.paged ? depth / model.block_tokens : 0;
    while (blocks_ < blocks) objects_.push_back({Object::kBlock, i, blocks_++});
    const auto behind = std::ranges::lower_bound(before, depth);
    objects_.push_back({.checkpoint = i, .resume = behind == before.begin() ? 0 : *std::prev(behind)});
    before.insert(behind, depth);
    outcomes_[i] = CommitOutcome::kAlreadyPresent;
  }
  depths_ = std::move(before);
  if (keep_.span) {
    prefixes_.stored_.BeginCopy(SpanKey());
    objects_.push_back({.what = Object::kSpan});
    span_outcome_ = CommitOutcome::kAlreadyPresent;
  }
  Go();
}

CommitOutcome& Prefixes::CommitJob::OutcomeOf(const Object& object) {
  return object.what == Object::kSpan ? span_outcome_ : outcomes_[object.checkpoint];
}

void Prefixes::CommitJob::Go() {
  const auto self = shared_from_this();
  if (going_) return;  // a copy may end immediately
  going_ = true;
  while (next_ < objects_.size() && under_way_ < kUnderWay && !waits_ && Begin(objects_[next_])) ++next_;
  going_ = false;
  if (next_ == objects_.size() && under_way_ == 0) Finish();
}

bool Prefixes::CommitJob::Begin(const Object& object) {
  if (Failed(OutcomeOf(object))) return true;
  absl::StatusOr<ObjectHeader> plan = Plan(object);
  if (!prefixes_.is_open_(session_)) {
    Fail(object, CommitOutcome::kUnavailable);
  } else if (!plan.ok()) {
    Fail(object, CommitOutcome::kBadSource);
  } else if (WaitsFor(*plan)) {
    return false;
  } else {
    Reserve(object, *std::move(plan));
  }
  return true;
}

bool Prefixes::CommitJob::WaitsFor(const ObjectHeader& plan) {
  waits_ = may_wait_ && prefixes_.publisher_.WhenGrown(session_, pool_.tenant, plan.Extents(),
                                                       [self = shared_from_this()](bool grown) {
                                                         self->waits_ = false;
                                                         self->may_wait_ = grown;
                                                         self->Go();
                                                       });
  return waits_;
}

void Prefixes::CommitJob::Reserve(const Object& object, ObjectHeader plan) {
  plan.shard = commit_.text.model().shard;
  const Publisher::Reserved reserved = prefixes_.publisher_.Reserve(session_, pool_, plan, 0, Saves(object));
  ObjectTable& table = prefixes_.table_;
  for (Entry* shard : table.index().keys().All(pool_.tenant, plan.key)) {
    shard->group = Keys().Group();
    if (shard->ready) continue;
    shard->turns = keep_.turns;
    shard->ends_text = EndsText(object);
  }
  switch (reserved.outcome) {
    case ReserveOutcome::kGranted:
      if (object.what != Object::kBlock && prefixes_.Defers(pool_.tenant, commit_.text, plan, own_, depths_)) {
        table.placement().Defer(*table.index().keys().Find(pool_.tenant, plan.key, plan.shard));
      }
      return Copy(object, reserved.id);
    case ReserveOutcome::kAlreadyPresent:
    case ReserveOutcome::kBeingPublished:  // by another engine; if that fails, the next lookup detects it
      return;
    default:
      return Fail(object, CommitOutcome::kNoSpace);
  }
}

// A prompt that is longer than the tokens so far goes on. A span needs the states from which it starts.
bool Prefixes::CommitJob::EndsText(const Object& object) const {
  const uint64_t end = commit_.text.tokens().size();
  if (object.what == Object::kBlock || commit_.prompt_tokens > end) return false;
  const uint64_t depth = object.what == Object::kSpan ? end : commit_.checkpoints[object.checkpoint].depth;
  return depth == end || (keep_.span && depth == commit_.span->begin);
}

double Prefixes::CommitJob::Saves(const Object& object) const {
  const PrefixModel& model = commit_.text.model();
  uint64_t begin = object.resume, end = 0;
  switch (object.what) {
    case Object::kBlock:
      begin = object.block * model.block_tokens;
      end = begin + model.block_tokens;
      break;
    case Object::kCheckpoint:
      end = commit_.checkpoints[object.checkpoint].depth;
      break;
    case Object::kSpan:
      begin = commit_.span->begin;
      end = commit_.text.tokens().size();
      break;
  }
  return model.costs.Flops(begin, end) / model.shard.size;
}

absl::StatusOr<ObjectHeader> Prefixes::CommitJob::Plan(const Object& object) const {
  const PrefixModel& model = commit_.text.model();
  const uint32_t block = model.block_tokens;
  switch (object.what) {
    case Object::kBlock:
      return PlanPrefixBlock(*model.layout, model.ns, Keys().blocks()[object.block], block, (object.block + 1) * block);
    case Object::kCheckpoint: {
      const uint64_t depth = commit_.checkpoints[object.checkpoint].depth;
      return PlanPrefixCheckpoint(*model.layout, model.ns, Keys().Checkpoint(depth), block, depth);
    }
    case Object::kSpan:
      break;
  }
  return PlanPrefixSpan(*model.layout, model.ns, SpanKey(), model.span_dtype, commit_.span->begin,
                        commit_.text.tokens().size());
}

void Prefixes::CommitJob::Copy(const Object& object, ReservationId reservation) {
  PublishSource source{.provenance = commit_.provenance,
                       .rows = commit_.rows,
                       .page_table = commit_.page_table,
                       .deadline = commit_.deadline,
                       .keep = commit_.keep};
  if (object.what == Object::kCheckpoint) source.tensors = commit_.checkpoints[object.checkpoint].tensors;
  if (object.what == Object::kSpan) source.tensors = commit_.span->tensors;
  ++under_way_;
  prefixes_.publisher_.Publish(session_, reservation, std::move(source), /*renews=*/false,
                               [self = shared_from_this(), object, reservation](PublishOutcome outcome) {
                                 --self->under_way_;
                                 if (outcome == PublishOutcome::kPublished) {
                                   CommitOutcome& kept = self->OutcomeOf(object);
                                   if (object.what != Object::kBlock && !Failed(kept)) kept = CommitOutcome::kKept;
                                 } else {
                                   if (outcome == PublishOutcome::kBusy)
                                     self->prefixes_.publisher_.Abandon(self->session_, reservation);
                                   self->Fail(object, outcome == PublishOutcome::kBusy ? CommitOutcome::kBusy
                                                      : outcome == PublishOutcome::kBadSource
                                                          ? CommitOutcome::kBadSource
                                                          : CommitOutcome::kUnavailable);
                                 }
                                 self->Go();
                               });
}

bool Prefixes::CommitJob::Failed(CommitOutcome outcome) {
  return outcome != CommitOutcome::kKept && outcome != CommitOutcome::kAlreadyPresent;
}

void Prefixes::CommitJob::Fail(const Object& object, CommitOutcome outcome) {
  const bool all = object.what == Object::kBlock;
  const size_t end = all ? keep_.states.size() : object.what == Object::kSpan ? 0 : object.checkpoint + 1;
  bool base = object.what == Object::kSpan;
  for (size_t i = object.checkpoint; i < end; ++i) {
    if (!keep_.states[i]) continue;
    if (!Failed(outcomes_[i])) outcomes_[i] = outcome;
    base |= keep_.span && commit_.checkpoints[i].depth == commit_.span->begin;
  }
  if (base && !Failed(span_outcome_)) span_outcome_ = outcome;
}

void Prefixes::CommitJob::Finish() {
  const TenantId tenant = pool_.tenant;
  Space* const space = own_ ? nullptr : FindSpace();
  std::vector<PrefixNode*> way;  // path of the text
  if (space != nullptr) way = space->planner->tree().Way(commit_.text.tokens());
  for (size_t i = 0; i < keep_.states.size(); ++i) {
    if (keep_.states[i]) Conclude(i, space, way);
  }
  if (keep_.span) ConcludeSpan(space, way);
  if (own_) RememberOwn();
  if (keep_.span && !keep_.states.back()) {
    outcomes_.back() = span_outcome_ == CommitOutcome::kKept ? CommitOutcome::kKeptAsSpan : span_outcome_;
  }
  commit_.keep.reset();
  for (size_t i = 0; i < outcomes_.size(); ++i) {
    prefixes_.observer_.Committed(tenant, outcomes_[i], own_, commit_.checkpoints[i].depth);
  }
  if (--prefixes_.commits_.at(session_) == 0) prefixes_.commits_.erase(session_);
  done_(std::move(outcomes_));
  prefixes_.transfers_.End(session_);
}

Prefixes::Space* Prefixes::CommitJob::FindSpace() const {
  const auto found = prefixes_.spaces_.find(commit_.text.model().ns);
  return found == prefixes_.spaces_.end() ? nullptr : &found->second;
}

PrefixPlanner::Kept Prefixes::CommitJob::IsKept(std::span<PrefixNode* const> way, uint64_t depth) {
  const PrefixNode* const node = PrefixTree<PrefixEntry>::NodeOn(way, depth);
  return node == nullptr ? PrefixPlanner::Kept::kNot : PrefixPlanner::IsKept(*node);
}

bool Prefixes::CommitJob::GivenUp(std::span<PrefixNode* const> way, uint64_t depth, PrefixPlanner::Kept as) const {
  const bool decides = commit_.text.model().shard.rank == 0;
  return decides && IsKept(way, depth) != as;
}

void Prefixes::CommitJob::Conclude(size_t i, Space* space, std::span<PrefixNode* const> way) {
  const TenantId tenant = pool_.tenant;
  const uint64_t depth = commit_.checkpoints[i].depth;
  const bool last = prefixes_.stored_.EndCopy(Keys().Checkpoint(depth));
  if (own_) return;
  if (!Failed(outcomes_[i]) && last && GivenUp(way, depth, PrefixPlanner::Kept::kByStates)) {
    outcomes_[i] = CommitOutcome::kDeclined;
    const auto needs = [](const PrefixNode* node) { return node->data.needs > 0; };
    const auto needed = std::ranges::find_if(way.rbegin(), way.rend(), needs);
    prefixes_.EvictCheckpoint(tenant, commit_.text, needed == way.rend() ? 0 : (*needed)->depth(), depth);
  }
  if (!Failed(outcomes_[i]) || IsKept(way, depth) != PrefixPlanner::Kept::kByStates) return;
  size_t whole = 0;
  const bool gone = prefixes_.stored_.FindState(tenant, commit_.text.model(), Keys(), depth, whole) == There::kGone;
  if (gone) space->planner->Lost(*PrefixTree<PrefixEntry>::NodeOn(way, depth));
}

void Prefixes::CommitJob::ConcludeSpan(Space* space, std::span<PrefixNode* const> way) {
  const TenantId tenant = pool_.tenant;
  const Key key = SpanKey();
  const bool last = prefixes_.stored_.EndCopy(key);
  if (own_) return;
  const uint64_t end = commit_.text.tokens().size();
  if (!Failed(span_outcome_) && last && GivenUp(way, end, PrefixPlanner::Kept::kBySpan)) {
    span_outcome_ = CommitOutcome::kDeclined;
    prefixes_.table_.EvictKey(tenant, key);
  }
  if (!Failed(span_outcome_) || IsKept(way, end) != PrefixPlanner::Kept::kBySpan) return;
  const bool gone = prefixes_.stored_.FindSpan(tenant, commit_.text.model(), key) == There::kGone;
  if (gone) space->planner->Lost(*way.back());
}

void Prefixes::CommitJob::RememberOwn() {
  const uint64_t end = commit_.text.tokens().size();
  if (keep_.span && !Failed(span_outcome_)) {
    prefixes_.conversations_.Remember(pool_.tenant, commit_.text, end, commit_.span->begin);
    return;
  }
  for (size_t i = 0; i < keep_.states.size(); ++i) {
    if (keep_.states[i] && !Failed(outcomes_[i])) {
      prefixes_.conversations_.Remember(pool_.tenant, commit_.text, commit_.checkpoints[i].depth);
    }
  }
}

}  // namespace ashlar::storage
