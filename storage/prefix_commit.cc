// Committing a text: what of it is to be kept is copied in, block by block.
#include <algorithm>
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
    const PrefixModel& model = commit_.text.model();
    for (size_t i = 0; i < keep_.size(); ++i) {
      if (!keep_[i]) continue;
      const uint64_t depth = commit_.checkpoints[i].depth;
      const size_t blocks = model.paged ? depth / model.block_tokens : 0;
      while (blocks_ < blocks) objects_.push_back({.checkpoint = i, .block = blocks_++});
      objects_.push_back({.checkpoint = i});
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
  };

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
    const PrefixKeys& keys = own_ ? *commit_.text.own() : commit_.text.shared();
    const PrefixModel& model = commit_.text.model();
    const bool block = object.block != kNoBlock;
    const uint64_t depth =
        block ? (object.block + 1) * model.block_tokens : commit_.checkpoints[object.checkpoint].depth;
    absl::StatusOr<ObjectHeader> plan =
        block ? PlanPrefixBlock(model.layout, model.ns, keys.blocks()[object.block], model.block_tokens, depth)
              : PlanPrefixCheckpoint(model.layout, model.ns, keys.Checkpoint(depth), model.block_tokens, depth);
    if (!plan.ok()) return Fail(object, CommitOutcome::kBadSource);
    plan->shard = model.shard;
    const Publisher::Reserved reserved = prefixes_.publisher_.Reserve(session_, group_, *plan, 0);
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
      if (!keep_[i]) continue;
      const uint64_t depth = commit_.checkpoints[i].depth;
      if (own_ && !Failed(i)) prefixes_.Remember(tenant, commit_.text, depth);
      const auto space = prefixes_.spaces_.find(commit_.text.model().ns);
      if (own_ || !Failed(i) || space == prefixes_.spaces_.end()) continue;
      space->second.cache->Lost(commit_.text.tokens().first(depth));
    }
    commit_.keep.reset();
    for (size_t i = 0; i < outcomes_.size(); ++i) {
      prefixes_.observer_.Committed(tenant, outcomes_[i], own_, commit_.checkpoints[i].depth);
    }
    done_(std::move(outcomes_));
    prefixes_.drain_.End(session_);
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

// The states before the last two are of no use any more; their blocks are the later ones' as well.
void Prefixes::Remember(TenantId tenant, const PrefixText& text, uint64_t depth) {
  const ConversationName name{text.model().ns, text.conversation()};
  const Mark mark{depth, text.own()->Checkpoint(depth)};
  Conversations& table = Of(tenant);
  Conversation conversation;
  if (const Conversation* const known = table.Find(name)) conversation = *known;
  if (conversation.last.key == mark.key) return;
  if (conversation.before.depth > 0 && conversation.before.key != mark.key) {
    pool_.Evict(tenant, conversation.before.key, PolicyKind::kPrice);
  }
  table.Put(name, {.last = mark, .before = conversation.last});
}

void Prefixes::Commit(SessionId session, TenantId tenant, PrefixCommit commit, CommitDone done) {
  const size_t count = commit.checkpoints.size();
  bool own = commit.provenance == Provenance::kComposed;
  if (own && !commit.text.own()) return done(std::vector<CommitOutcome>(count, CommitOutcome::kBadSource));
  std::vector<bool> keep(count, true);
  if (!own) {
    keep = Decide(Of(tenant, commit.text.model()), commit);
    // What the namespace has no use for, its conversation may have.
    if (count > 0 && !keep.back() && commit.text.own() && std::ranges::count(keep, true) == 0) {
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
