// Committing a text: what of it is to be kept is copied in, block by block.
#include <algorithm>
#include <array>
#include <set>
#include <utility>

#include "proto/limits.h"
#include "storage/prefix/prefixes.h"

namespace ashlar::storage {

// Copies the blocks and checkpoints of one text in, a few at a time, so that a long one neither fills the workers'
// queue nor reserves room long before it is used. Lives as long as something is under way.
class Prefixes::Writing : public std::enable_shared_from_this<Writing> {
 public:
  // What of `commit` is wanted.
  Writing(Prefixes& prefixes, SessionId session, const Group& group, PrefixCommit commit, bool own, Keep keep,
          std::vector<CommitOutcome> outcomes, CommitDone done)
      : prefixes_(prefixes),
        session_(session),
        group_(group),
        commit_(std::move(commit)),
        own_(own),
        keep_(std::move(keep)),
        outcomes_(std::move(outcomes)),
        done_(std::move(done)) {}

  void Start() {
    prefixes_.drain_.Begin(session_);
    ++prefixes_.commits_[session_];
    const PrefixModel& model = commit_.text.model();
    // Of states that are known, how deep they are: without a checkpoint, one would resume from the one before it.
    std::vector<uint64_t> before = prefixes_.KnownBefore(group_.tenant, commit_.text, own_);
    for (size_t i = 0; i < keep_.states.size(); ++i) {
      if (!keep_.states[i]) continue;
      const uint64_t depth = commit_.checkpoints[i].depth;
      ++prefixes_.writing_[Keys().Checkpoint(depth)];
      const size_t blocks = model.paged ? depth / model.block_tokens : 0;
      while (blocks_ < blocks) objects_.push_back({Object::kBlock, i, blocks_++});
      const auto behind = std::ranges::lower_bound(before, depth);
      objects_.push_back({.checkpoint = i, .resume = behind == before.begin() ? 0 : *std::prev(behind)});
      before.insert(behind, depth);
      outcomes_[i] = CommitOutcome::kAlreadyPresent;
    }
    if (keep_.span) {
      ++prefixes_.writing_[SpanKey()];
      objects_.push_back({.what = Object::kSpan});
      span_outcome_ = CommitOutcome::kAlreadyPresent;
    }
    Go();
  }

 private:
  static constexpr size_t kUnderWay = 4;  // copies at a time

  struct Object {
    enum What : uint8_t { kBlock, kCheckpoint, kSpan };
    What what = kCheckpoint;
    size_t checkpoint = 0;  // it, or which one needs the block; those behind it do, too
    size_t block = 0;
    uint64_t resume = 0;  // without the checkpoint, from there
  };

  const PrefixKeys& Keys() const { return own_ ? *commit_.text.own() : commit_.text.shared(); }
  Key SpanKey() const { return Keys().Span(commit_.span->begin, commit_.text.tokens().size()); }
  CommitOutcome& OutcomeOf(const Object& object) {
    return object.what == Object::kSpan ? span_outcome_ : outcomes_[object.checkpoint];
  }

  void Go() {
    const auto self = shared_from_this();
    if (going_) return;  // a copy that ended at once
    going_ = true;
    while (next_ < objects_.size() && under_way_ < kUnderWay) Begin(objects_[next_++]);
    going_ = false;
    if (next_ == objects_.size() && under_way_ == 0) Finish();
  }

  void Begin(const Object& object) {
    if (Failed(OutcomeOf(object))) return;
    if (!prefixes_.is_open_(session_)) return Fail(object, CommitOutcome::kUnavailable);
    absl::StatusOr<ObjectHeader> plan = Plan(object);
    if (!plan.ok()) return Fail(object, CommitOutcome::kBadSource);
    plan->shard = commit_.text.model().shard;
    const Publisher::Reserved reserved = prefixes_.publisher_.Reserve(session_, group_, *plan, 0, Saves(object));
    switch (reserved.outcome) {
      case ReserveOutcome::kGranted:
        return Copy(object, reserved.id);
      case ReserveOutcome::kAlreadyPresent:
      case ReserveOutcome::kBeingPublished:  // by another engine; should it fail, the next look-up sees it
        return;
      default:
        return Fail(object, CommitOutcome::kNoSpace);
    }
  }

  // FLOPs, the shard's part of them.
  double Saves(const Object& object) const {
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
    return (model.costs.Flops(end) - model.costs.Flops(begin)) / model.shard.size;
  }

  absl::StatusOr<ObjectHeader> Plan(const Object& object) const {
    const PrefixModel& model = commit_.text.model();
    const uint32_t block = model.block_tokens;
    switch (object.what) {
      case Object::kBlock:
        return PlanPrefixBlock(*model.layout, model.ns, Keys().blocks()[object.block], block,
                               (object.block + 1) * block);
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

  void Copy(const Object& object, ReservationId reservation) {
    PublishSource source{.provenance = commit_.provenance,
                         .rows = commit_.rows,
                         .page_table = commit_.page_table,
                         .deadline = commit_.deadline,
                         .keep = commit_.keep};
    if (object.what == Object::kCheckpoint) source.tensors = commit_.checkpoints[object.checkpoint].tensors;
    if (object.what == Object::kSpan) source.tensors = commit_.span->tensors;
    ++under_way_;
    prefixes_.publisher_.Publish(session_, reservation, std::move(source),
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

  static bool Failed(CommitOutcome outcome) {
    return outcome != CommitOutcome::kKept && outcome != CommitOutcome::kAlreadyPresent;
  }

  // Without a block, none of the checkpoints behind it can be resumed from; without its checkpoint, no span.
  void Fail(const Object& object, CommitOutcome outcome) {
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

  void Finish() {
    const TenantId tenant = group_.tenant;
    for (size_t i = 0; i < keep_.states.size(); ++i) {
      if (keep_.states[i]) Conclude(i);
    }
    if (keep_.span) ConcludeSpan();
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
    prefixes_.drain_.End(session_);
  }

  // True: nobody else is copying it in any more.
  bool Written(const Key& key) {
    const auto writing = prefixes_.writing_.find(key);
    if (--writing->second > 0) return false;
    prefixes_.writing_.erase(writing);
    return true;
  }

  // Null where the namespace has been forgotten meanwhile.
  Space* FindSpace() const {
    const auto found = prefixes_.spaces_.find(commit_.text.model().ns);
    return found == prefixes_.spaces_.end() ? nullptr : &found->second;
  }
  // Whether what was copied in is not to be kept any more: meanwhile what came may have been worth more.
  bool GivenUp(const Space* space, std::span<const int32_t> prefix, PrefixCache::Kept as) const {
    const bool decides = commit_.text.model().shard.rank == 0;
    return decides && (space == nullptr || space->cache->IsKept(prefix) != as);
  }

  void Conclude(size_t i) {
    const TenantId tenant = group_.tenant;
    const uint64_t depth = commit_.checkpoints[i].depth;
    const bool last = Written(Keys().Checkpoint(depth));
    if (own_) return;
    Space* const space = FindSpace();
    const auto prefix = commit_.text.tokens().first(depth);
    if (!Failed(outcomes_[i]) && last && GivenUp(space, prefix, PrefixCache::Kept::kByStates)) {
      outcomes_[i] = CommitOutcome::kDeclined;
      prefixes_.GiveUp(tenant, commit_.text, space, depth);
    }
    if (!Failed(outcomes_[i]) || space == nullptr) return;
    size_t whole = 0;
    const bool gone = prefixes_.Find(tenant, commit_.text.model(), Keys(), depth, whole) == There::kGone;
    if (gone && space->cache->IsKept(prefix) == PrefixCache::Kept::kByStates) space->cache->Lost(prefix);
  }

  void ConcludeSpan() {
    const TenantId tenant = group_.tenant;
    const Key key = SpanKey();
    const bool last = Written(key);
    if (own_) return;
    Space* const space = FindSpace();
    const auto prefix = commit_.text.tokens();
    if (!Failed(span_outcome_) && last && GivenUp(space, prefix, PrefixCache::Kept::kBySpan)) {
      span_outcome_ = CommitOutcome::kDeclined;
      prefixes_.pool_.GiveUp(tenant, key);
    }
    if (!Failed(span_outcome_) || space == nullptr) return;
    const bool gone = prefixes_.FindSpan(tenant, commit_.text.model(), key) == There::kGone;
    if (gone && space->cache->IsKept(prefix) == PrefixCache::Kept::kBySpan) space->cache->Lost(prefix);
  }

  // The text's end or, where a span failed to get there, what it would have hung on.
  void RememberOwn() {
    const uint64_t end = commit_.text.tokens().size();
    if (keep_.span && !Failed(span_outcome_)) {
      prefixes_.Remember(group_.tenant, commit_.text, end, commit_.span->begin);
      return;
    }
    for (size_t i = 0; i < keep_.states.size(); ++i) {
      if (keep_.states[i] && !Failed(outcomes_[i])) {
        prefixes_.Remember(group_.tenant, commit_.text, commit_.checkpoints[i].depth);
      }
    }
  }

  Prefixes& prefixes_;
  const SessionId session_;
  const Group group_;
  PrefixCommit commit_;
  const bool own_;
  const Keep keep_;
  std::vector<CommitOutcome> outcomes_;
  CommitOutcome span_outcome_ = CommitOutcome::kDeclined;
  const CommitDone done_;
  std::vector<Object> objects_;
  size_t blocks_ = 0;  // that are among them
  size_t next_ = 0, under_way_ = 0;
  bool going_ = false;
};

// Nothing where no span is offered, or none that the model has.
std::optional<PrefixCache::SpanOffer> Prefixes::Offered(const PrefixCommit& commit) {
  if (!commit.span) return std::nullopt;
  const PrefixModel& model = commit.text.model();
  const uint64_t begin = commit.span->begin, end = commit.text.tokens().size();
  const auto plan = PlanPrefixSpan(*model.layout, model.ns, Key{}, model.span_dtype, begin, end);
  if (!plan.ok() || end - begin > model.span_tokens) return std::nullopt;
  return PrefixCache::SpanOffer{begin, plan->Extents() * limits::kExtentBytes * model.shard.size};
}

Prefixes::Keep Prefixes::Decide(Space& space, const PrefixCommit& commit) {
  const std::span<const int32_t> tokens = commit.text.tokens();
  const std::optional<PrefixCache::SpanOffer> span = Offered(commit);
  Keep keep{.states = std::vector<bool>(commit.checkpoints.size(), true), .span = span.has_value()};
  // A rank that does not decide: it may come before the one that does.
  if (commit.text.model().shard.rank != 0) return keep;
  std::vector<uint64_t> inside;
  for (const PrefixCommit::Checkpoint& checkpoint : commit.checkpoints) {
    if (checkpoint.depth < tokens.size()) inside.push_back(checkpoint.depth);
  }
  PrefixCache& cache = *space.cache;
  const uint64_t shared = cache.tree().Walk(tokens).depth;  // with earlier texts
  cache.Commit({.shared = shared}, tokens, commit.prompt_tokens, inside, {}, span);
  std::set<uint64_t> kept;
  keep.span = false;
  cache.tree().Walk(tokens, [&](PrefixNode& node) {
    if (!node.data.kept) return;
    if (node.data.span == nullptr) kept.insert(node.depth());
    // Of another length it is another object, which is there.
    keep.span |= span && node.data.span != nullptr && node.depth() == tokens.size() &&
                 node.data.span->base->depth() == span->begin;
  });
  for (size_t i = 0; i < keep.states.size(); ++i) keep.states[i] = kept.contains(commit.checkpoints[i].depth);
  Name(space, commit.text, tokens.size());
  return keep;
}

std::vector<uint64_t> Prefixes::KnownBefore(TenantId tenant, const PrefixText& text, bool own) {
  const auto space = spaces_.find(text.model().ns);
  std::vector<uint64_t> depths = own                      ? OwnCheckpoints(tenant, text)
                                 : space == spaces_.end() ? std::vector<uint64_t>()
                                                          : Checkpoints(space->second, text);
  std::ranges::sort(depths);
  return depths;
}

// Its end, or where that takes less a span up to there and what it hangs on: nobody else comes by the other depths.
Prefixes::Keep Prefixes::KeepOwn(const PrefixCommit& commit) {
  Keep keep{.states = std::vector<bool>(commit.checkpoints.size(), false)};
  if (commit.checkpoints.empty()) return keep;
  const std::optional<PrefixCache::SpanOffer> span = Offered(commit);
  const auto base = span ? std::ranges::find(commit.checkpoints, span->begin, &PrefixCommit::Checkpoint::depth)
                         : commit.checkpoints.end();
  keep.span = base != commit.checkpoints.end() &&
              span->bytes < commit.text.model().costs.StateBytes(commit.text.tokens().size());
  keep.states[keep.span ? static_cast<size_t>(base - commit.checkpoints.begin()) : keep.states.size() - 1] = true;
  return keep;
}

void Prefixes::Name(const Space& space, const PrefixText& text, uint64_t depth) {
  const PrefixModel& model = text.model();
  const std::span<const Key> blocks = text.shared().blocks();
  space.cache->tree().Walk(text.tokens().first(depth), [&](PrefixNode& node) {
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
  });
}

void Prefixes::GiveUp(TenantId tenant, const PrefixText& text, const Space* space, uint64_t depth) {
  uint64_t needed = 0;  // as far as something kept needs the blocks
  if (space != nullptr) {
    space->cache->tree().Walk(text.tokens(), [&needed](PrefixNode& node) {
      if (node.data.needs > 0) needed = node.depth();
    });
  }
  pool_.GiveUp(tenant, text.shared().Checkpoint(depth));
  const uint64_t block = text.model().block_tokens;
  for (uint64_t i = needed / block; text.model().paged && i < depth / block; ++i) {
    pool_.GiveUp(tenant, text.shared().blocks()[i]);
  }
}

Prefixes::Mark Prefixes::MarkOf(const PrefixText& text, uint64_t depth, uint64_t span_begin) {
  const PrefixKeys& keys = *text.own();
  if (span_begin == 0) return {.depth = depth, .key = keys.Checkpoint(depth)};
  const auto tokens = text.tokens().subspan(span_begin, depth - span_begin);
  return {.depth = depth,
          .key = keys.Span(span_begin, depth),
          .span_begin = span_begin,
          .base = keys.Checkpoint(span_begin),
          .tokens = {tokens.begin(), tokens.end()}};
}

// The states before the last two are of no use any more. Their blocks mostly are the later ones' as well; those of a
// text that its conversation has left go when space is needed.
bool Prefixes::Remember(TenantId tenant, const PrefixText& text, uint64_t depth, uint64_t span_begin) {
  const ConversationName name{text.model().ns, text.conversation()};
  Mark mark = MarkOf(text, depth, span_begin);
  Conversations& table = Of(tenant);
  Conversation conversation;
  if (const Conversation* const known = table.Find(name)) conversation = *known;
  if (conversation.last.key == mark.key || conversation.before.key == mark.key) {
    if (conversation.last.key != mark.key) table.Put(name, {std::move(mark), std::move(conversation.last)});
    return false;
  }
  // What a turn that is asked again had before goes, and not what the turn began with, as where it parts inside a span.
  const Mark& last = conversation.last;
  const bool left = last.depth > 0 &&
                    (last.checkpoint() > depth || text.own()->Checkpoint(last.checkpoint()) != last.checkpoint_key());
  Mark gone = left ? conversation.last : conversation.before;
  Conversation now{std::move(mark), left ? std::move(conversation.before) : std::move(conversation.last)};
  const auto is_used = [&now](const Key& key) {  // answers to one turn hang on the same checkpoint
    return std::ranges::any_of(std::array{&now.last, &now.before}, [&key](const Mark* const used) {
      return used->depth > 0 && (used->key == key || used->checkpoint_key() == key);
    });
  };
  if (gone.depth > 0 && !is_used(gone.key)) pool_.GiveUp(tenant, gone.key);
  if (gone.span_begin > 0 && !is_used(gone.base)) pool_.GiveUp(tenant, gone.base);
  table.Put(name, std::move(now));
  return true;
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
    // What the namespace has no use for, its conversation may have, unless that would take from others what they have
    // no other room for. (Of several ranks only one knows.)
    const PrefixStore& store = space.cache->store();
    const bool roomy = store.limit_bytes() == store.capacity_bytes() && commit.text.model().shard.size == 1;
    if (count > 0 && roomy && commit.text.own() && !keep.any()) {
      own = true;
      keep = KeepOwn(commit);
    }
  } else {
    keep = KeepOwn(commit);
  }
  const Group group{tenant, own ? PoolKind::kPrivate : PoolKind::kPublic};
  std::vector<CommitOutcome> outcomes(count, CommitOutcome::kDeclined);
  std::make_shared<Writing>(*this, session, group, std::move(commit), own, std::move(keep), std::move(outcomes),
                            std::move(done))
      ->Start();
}

}  // namespace ashlar::storage
