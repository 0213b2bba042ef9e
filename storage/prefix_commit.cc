// Committing a text: what of it is to be kept is copied in, block by block.
#include <algorithm>
#include <set>
#include <utility>

#include "storage/prefixes.h"

namespace ashlar::storage {

// Copies the blocks and checkpoints of one text in, a few at a time, so that a long one neither fills the workers'
// queue nor reserves room long before it is used. Lives as long as something is under way.
class Prefixes::Writing : public std::enable_shared_from_this<Writing> {
 public:
  // Of `keep`, those checkpoints of `commit` are wanted.
  Writing(Prefixes& prefixes, SessionId session, const Group& group, PrefixCommit commit, bool own,
          std::vector<bool> keep, std::vector<CommitOutcome> outcomes, CommitDone done)
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
    std::vector<uint64_t> before = prefixes_.CheckpointsOf(group_.tenant, commit_.text, own_);
    for (size_t i = 0; i < keep_.size(); ++i) {
      if (!keep_[i]) continue;
      const uint64_t depth = commit_.checkpoints[i].depth;
      ++prefixes_.writing_[Keys().Checkpoint(depth)];
      const size_t blocks = model.paged ? depth / model.block_tokens : 0;
      while (blocks_ < blocks) objects_.push_back({.checkpoint = i, .block = blocks_++});
      const auto behind = std::ranges::lower_bound(before, depth);
      objects_.push_back({.checkpoint = i, .resume = behind == before.begin() ? 0 : *std::prev(behind)});
      before.insert(behind, depth);
      outcomes_[i] = CommitOutcome::kAlreadyPresent;
    }
    Go();
  }

 private:
  static constexpr size_t kUnderWay = 4;  // copies at a time
  static constexpr size_t kNoBlock = SIZE_MAX;

  struct Object {
    size_t checkpoint = 0;    // that needs it; those behind it do, too, where it is a block
    size_t block = kNoBlock;  // which one; else the checkpoint itself
    uint64_t resume = 0;      // without the checkpoint, from there
  };

  const PrefixKeys& Keys() const { return own_ ? *commit_.text.own() : commit_.text.shared(); }

  void Go() {
    const auto self = shared_from_this();
    if (going_) return;  // a copy that ended at once
    going_ = true;
    while (next_ < objects_.size() && under_way_ < kUnderWay) Begin(objects_[next_++]);
    going_ = false;
    if (next_ == objects_.size() && under_way_ == 0) Finish();
  }

  void Begin(const Object& object) {
    if (Failed(object.checkpoint)) return;
    if (!prefixes_.is_open_(session_)) return Fail(object, CommitOutcome::kUnavailable);
    const PrefixModel& model = commit_.text.model();
    const bool block = object.block != kNoBlock;
    const uint64_t depth =
        block ? (object.block + 1) * model.block_tokens : commit_.checkpoints[object.checkpoint].depth;
    absl::StatusOr<ObjectHeader> plan =
        block ? PlanPrefixBlock(model.layout, model.ns, Keys().blocks()[object.block], model.block_tokens, depth)
              : PlanPrefixCheckpoint(model.layout, model.ns, Keys().Checkpoint(depth), model.block_tokens, depth);
    if (!plan.ok()) return Fail(object, CommitOutcome::kBadSource);
    plan->shard = model.shard;
    const Publisher::Reserved reserved = prefixes_.publisher_.Reserve(session_, group_, *plan, 0, Saves(object, depth));
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
  double Saves(const Object& object, uint64_t depth) const {
    const PrefixModel& model = commit_.text.model();
    const uint64_t from = object.block == kNoBlock ? object.resume : depth - model.block_tokens;
    return (model.costs.Flops(depth) - model.costs.Flops(from)) / model.shard.size;
  }

  void Copy(const Object& object, ReservationId reservation) {
    PublishSource source{.provenance = commit_.provenance,
                         .rows = commit_.rows,
                         .page_table = commit_.page_table,
                         .deadline = commit_.deadline,
                         .keep = commit_.keep};
    const bool block = object.block != kNoBlock;
    if (!block) source.tensors = commit_.checkpoints[object.checkpoint].tensors;
    ++under_way_;
    prefixes_.publisher_.Publish(session_, reservation, std::move(source),
                                 [self = shared_from_this(), object, block, reservation](PublishOutcome outcome) {
                                   --self->under_way_;
                                   if (outcome == PublishOutcome::kPublished) {
                                     if (!block && !self->Failed(object.checkpoint))
                                       self->outcomes_[object.checkpoint] = CommitOutcome::kKept;
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

  bool Failed(size_t checkpoint) const {
    return outcomes_[checkpoint] != CommitOutcome::kKept && outcomes_[checkpoint] != CommitOutcome::kAlreadyPresent;
  }

  // Without a block, none of the checkpoints behind it can be resumed from.
  void Fail(const Object& object, CommitOutcome outcome) {
    const size_t end = object.block == kNoBlock ? object.checkpoint + 1 : keep_.size();
    for (size_t i = object.checkpoint; i < end; ++i) {
      if (keep_[i] && !Failed(i)) outcomes_[i] = outcome;
    }
  }

  void Finish() {
    const TenantId tenant = group_.tenant;
    for (size_t i = 0; i < keep_.size(); ++i) {
      if (keep_[i]) Conclude(i);
    }
    commit_.keep.reset();
    for (size_t i = 0; i < outcomes_.size(); ++i) {
      prefixes_.observer_.Committed(tenant, outcomes_[i], own_, commit_.checkpoints[i].depth);
    }
    if (--prefixes_.commits_.at(session_) == 0) prefixes_.commits_.erase(session_);
    done_(std::move(outcomes_));
    prefixes_.drain_.End(session_);
  }

  void Conclude(size_t i) {
    const uint64_t depth = commit_.checkpoints[i].depth;
    const Key key = Keys().Checkpoint(depth);
    const auto writing = prefixes_.writing_.find(key);
    const bool last = --writing->second == 0;
    if (last) prefixes_.writing_.erase(writing);
    if (own_) {
      if (!Failed(i)) prefixes_.Remember(group_.tenant, commit_.text, depth);
      return;
    }
    // While it was copied in, what came may have been worth more, or the namespace may have been forgotten.
    const auto found = prefixes_.spaces_.find(commit_.text.model().ns);
    Space* const space = found == prefixes_.spaces_.end() ? nullptr : &found->second;
    const auto prefix = commit_.text.tokens().first(depth);
    const bool decides = commit_.text.model().shard.rank == 0;
    if (decides && !Failed(i) && last && (space == nullptr || !space->cache->IsKept(prefix))) {
      outcomes_[i] = CommitOutcome::kDeclined;
      prefixes_.GiveUp(group_.tenant, commit_.text, space, depth);
    }
    size_t whole = 0;
    const bool gone =
        Failed(i) && prefixes_.Find(group_.tenant, commit_.text.model(), Keys(), depth, whole) == There::kGone;
    if (gone && space != nullptr) space->cache->Lost(prefix);
  }

  Prefixes& prefixes_;
  const SessionId session_;
  const Group group_;
  PrefixCommit commit_;
  const bool own_;
  const std::vector<bool> keep_;
  std::vector<CommitOutcome> outcomes_;
  const CommitDone done_;
  std::vector<Object> objects_;
  size_t blocks_ = 0;  // that are among them
  size_t next_ = 0, under_way_ = 0;
  bool going_ = false;
};

std::vector<bool> Prefixes::Decide(Space& space, const PrefixCommit& commit) {
  const std::span<const int32_t> tokens = commit.text.tokens();
  std::vector<bool> keep(commit.checkpoints.size(), true);
  // A rank that does not decide: it may come before the one that does.
  if (commit.text.model().shard.rank != 0) return keep;
  std::vector<uint64_t> inside;
  for (const PrefixCommit::Checkpoint& checkpoint : commit.checkpoints) {
    if (checkpoint.depth < tokens.size()) inside.push_back(checkpoint.depth);
  }
  PrefixCache& cache = *space.cache;
  const uint64_t shared = cache.tree().Walk(tokens).depth;  // with earlier texts
  cache.Commit({.shared = shared}, tokens, commit.prompt_tokens, inside);
  std::set<uint64_t> kept;
  cache.tree().Walk(tokens, [&](PrefixNode& node) {
    if (node.data.kept) kept.insert(node.depth());
  });
  for (size_t i = 0; i < keep.size(); ++i) keep[i] = kept.contains(commit.checkpoints[i].depth);
  Name(space, commit.text, tokens.size());
  return keep;
}

std::vector<uint64_t> Prefixes::CheckpointsOf(TenantId tenant, const PrefixText& text, bool own) {
  std::vector<uint64_t> depths;
  if (own) {
    const Conversation* const conversation = Of(tenant).Find({text.model().ns, text.conversation()});
    if (conversation == nullptr) return depths;
    for (const Mark& mark : {conversation->before, conversation->last}) {
      const bool of_text = mark.depth > 0 && mark.depth <= text.tokens().size();
      if (of_text && text.own()->Checkpoint(mark.depth) == mark.key) depths.push_back(mark.depth);
    }
    std::ranges::sort(depths);
  } else if (const auto space = spaces_.find(text.model().ns); space != spaces_.end()) {
    space->second.cache->tree().Walk(text.tokens(), [&depths](PrefixNode& node) {
      if (node.data.kept) depths.push_back(node.depth());
    });
  }
  return depths;
}

void Prefixes::Name(const Space& space, const PrefixText& text, uint64_t depth) {
  const PrefixModel& model = text.model();
  const std::span<const Key> blocks = text.shared().blocks();
  space.cache->tree().Walk(text.tokens().first(depth), [&](PrefixNode& node) {
    const size_t begin = model.paged ? node.begin() / model.block_tokens : 0;
    const size_t end = model.paged ? node.depth() / model.block_tokens : 0;
    if (node.data.needs == 0 || (begin == end && !node.data.kept)) return;
    if (node.data.stored == nullptr) node.data.stored = std::make_unique<StoredKeys>();
    StoredKeys& stored = *node.data.stored;
    if (stored.blocks.empty()) stored.blocks.assign(blocks.begin() + begin, blocks.begin() + end);
    if (node.data.kept && !stored.checkpoint) stored.checkpoint = text.shared().Checkpoint(node.depth());
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

// The states before the last two are of no use any more. Their blocks mostly are the later ones' as well; those of a
// text that its conversation has left go when space is needed.
bool Prefixes::Remember(TenantId tenant, const PrefixText& text, uint64_t depth) {
  const ConversationName name{text.model().ns, text.conversation()};
  const Mark mark{depth, text.own()->Checkpoint(depth)};
  Conversations& table = Of(tenant);
  Conversation conversation;
  if (const Conversation* const known = table.Find(name)) conversation = *known;
  if (conversation.last.key == mark.key || conversation.before.key == mark.key) {
    if (conversation.last.key != mark.key) table.Put(name, {.last = mark, .before = conversation.last});
    return false;
  }
  // What a turn that is asked again had before goes, and not what the turn began with.
  const Mark last = conversation.last;
  const bool left = last.depth > 0 && (last.depth > depth || text.own()->Checkpoint(last.depth) != last.key);
  const Mark gone = left ? last : conversation.before;
  if (gone.depth > 0) pool_.GiveUp(tenant, gone.key);
  table.Put(name, {.last = mark, .before = left ? conversation.before : last});
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
  std::vector<bool> keep(count, true);
  if (!own) {
    Space& space = Of(tenant, commit.text.model());
    keep = Decide(space, commit);
    // What the namespace has no use for, its conversation may have, unless that would take from others what they have
    // no other room for. (Of several ranks only one knows.)
    const PrefixStore& store = space.cache->store();
    const bool roomy = store.limit_bytes() == store.capacity_bytes() && commit.text.model().shard.size == 1;
    if (count > 0 && roomy && commit.text.own() && std::ranges::count(keep, true) == 0) {
      own = true;
      keep.back() = true;
    }
  } else if (count > 0) {
    keep.assign(count, false);
    keep.back() = true;  // its end: nobody else comes by the depths before
  }
  const Group group{tenant, own ? PoolKind::kPrivate : PoolKind::kPublic};
  std::vector<CommitOutcome> outcomes(count, CommitOutcome::kDeclined);
  std::make_shared<Writing>(*this, session, group, std::move(commit), own, std::move(keep), std::move(outcomes),
                            std::move(done))
      ->Start();
}

}  // namespace ashlar::storage
