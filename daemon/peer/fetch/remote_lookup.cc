#include "daemon/peer/fetch/remote_lookup.h"

#include <algorithm>
#include <functional>
#include <iterator>
#include <utility>

#include "proto/limits.h"

namespace ashlar::daemon {
namespace {

// Depths at which a prompt's checkpoint is looked for where others have blocks of it, some at a time until one is
// found; and at which it is looked for where blocks before it are missing there. Spans that are looked for.
constexpr size_t kMostDepths = 1024, kDepthsAtOnce = 256, kMostDepthsBehind = 64, kMostSpans = 256;

using storage::Query;

// An order for holders of which nothing else is known: one whose transport does not reach its GPUs sends what lies
// there by way of dram.
int Farness(TierKind tier) {
  return tier == TierKind::kDram ? 0 : tier == TierKind::kHbm ? 1 : 2;
}

storage::PoolKind PoolOf(bool own) {
  return own ? storage::PoolKind::kPrivate : storage::PoolKind::kPublic;
}

}  // namespace

// One Find. It goes on when the last of its objects is settled, or its time is over. What nobody took by the time that
// both its look-ups have ended and all answers are there is given back.
class RemoteLookup::Call {
 public:
  Call(RemoteLookup& lookup, storage::TenantId tenant, std::function<void(Adopted)> then)
      : tenant(tenant), lookup_(lookup), then_(std::move(then)) {}

  bool waits() const { return then_ != nullptr; }
  void Settle(const std::shared_ptr<Call>& self) {
    if (--open_ > 0) return;
    if (waits()) return GoOn(self);
    if (ended_) GiveBack();
  }
  // The look-ups keep the call alive; its end gives back whatever they left.
  void GoOn(const std::shared_ptr<Call>& self) {
    auto ended = [self](const void*) {
      self->lookup_.loop_.PostCompletion(self->tenant, [self] {
        self->ended_ = true;
        if (self->open_ == 0) self->GiveBack();
      });
    };
    std::exchange(then_, nullptr)(Adopted(static_cast<const void*>(this), std::move(ended)));
  }
  // An object that this call's look-ups may use.
  void Add(const Key& key, uint32_t shards) {
    ++lookup_.using_[{tenant, key}];
    objects_.emplace_back(key, shards);
  }
  void Expect() { ++open_; }

  const storage::TenantId tenant;

 private:
  void GiveBack() {
    for (const auto& [key, shards] : std::exchange(objects_, {})) {
      const auto used = lookup_.using_.find({tenant, key});
      if (--used->second > 0) continue;  // another one's look-ups may want it still
      lookup_.using_.erase(used);
      for (uint32_t rank = 0; rank < shards; ++rank) {
        lookup_.cache_->SettleRemote(tenant, key, {.rank = rank, .size = shards});
      }
    }
  }

  RemoteLookup& lookup_;
  std::function<void(Adopted)> then_;
  size_t open_ = 1;  // objects that are being asked for, and one until all are
  bool ended_ = false;
  std::vector<std::pair<Key, uint32_t>> objects_;
};

void RemoteLookup::Find(storage::TenantId tenant, std::span<const RemoteQuestion> prompts,
                        std::function<void(Adopted)> then) {
  Wants wants = Locate(prompts);
  if (wants.segments.empty() && wants.prefixes.empty()) return then(nullptr);
  const auto call = std::make_shared<Call>(*this, tenant, then);
  const bool posted =
      loop_.Post(tenant, [this, call, wants = std::move(wants)]() mutable { Begin(call, std::move(wants)); });
  if (!posted) then(nullptr);
}

RemoteLookup::Wants RemoteLookup::Locate(std::span<const RemoteQuestion> prompts) const {
  Wants wants;
  for (const RemoteQuestion& prompt : prompts) {
    LocateSegments(prompt.segments, storage::PoolKind::kPublic, wants.segments);
    if (prompt.text == nullptr) continue;
    LocatePrefix(*prompt.text, /*own=*/false, wants.prefixes);
    if (prompt.text->own()) LocatePrefix(*prompt.text, /*own=*/true, wants.prefixes);
  }
  return wants;
}

void RemoteLookup::LocateSegments(std::span<const Query> queries, storage::PoolKind pool,
                                  std::vector<Want>& wants) const {
  if (queries.empty()) return;
  std::vector<Key> keys;
  keys.reserve(queries.size());
  for (const Query& query : queries) keys.push_back(query.storable ? query.key : Key{});
  const std::vector<Located> located = directory_.Locate(queries.front().ns, keys);
  for (auto at = located.begin(); at != located.end();) {
    const size_t index = at->index;
    const Query& query = queries[index];
    Want want{
        .index = index, .kind = query.kind, .ns = query.ns, .key = query.key, .pool = pool, .shards = query.shard.size};
    struct Having {
      uint32_t shards = 0;  // of this bundle
      int farness = 0;      // the farthest shard's
    };
    std::map<uint64_t, Having> having;  // by the member's incarnation
    std::vector<std::pair<int, std::shared_ptr<const Member>>> holders;
    for (; at != located.end() && at->index == index; ++at) {
      if (at->holding.kind != query.kind || at->holding.shard.size != query.shard.size) continue;
      want.bytes = std::max(want.bytes, at->holding.bytes * query.shard.size);
      Having& there = having[at->member->incarnation];
      there.farness = std::max(there.farness, Farness(at->holding.tier));
      if (++there.shards == query.shard.size) holders.emplace_back(there.farness, at->member);
    }
    std::ranges::stable_sort(holders, {}, [](const auto& holder) { return holder.first; });
    for (auto& [farness, member] : holders) want.holders.push_back(std::move(member));
    if (!want.holders.empty()) wants.push_back(std::move(want));
  }
}

// Blocks tell how far others have this very prompt: depths are those of all texts. All blocks are looked for, because
// one that no other node has may be here.
void RemoteLookup::LocatePrefix(const storage::PrefixText& text, bool own, std::vector<Prefix>& prefixes) const {
  const storage::PrefixModel& model = text.model();
  if (text.tokens().size() < 2) return;  // the last token is left to compute
  Prefix prefix{.keys = own ? &*text.own() : &text.shared()};
  std::vector<Query> blocks;
  if (model.paged) {
    for (const Key& key : prefix.keys->blocks().first((text.tokens().size() - 1) / model.block_tokens)) {
      blocks.push_back({.kind = ObjectKind::kPrefixBlock, .key = key, .shard = model.shard, .ns = model.ns});
    }
  }
  LocateSegments(blocks, PoolOf(own), prefix.blocks);
  prefix.ends = LocateEnds(text, own, prefix.blocks);
  if (!prefix.ends.empty()) prefixes.push_back(std::move(prefix));
}

// A checkpoint lies less than a block behind the last block that it needs. So the first ones to try are the deepest of
// those before which others have all blocks: the first one found there is whole. Of the deeper ones a few are tried,
// because blocks that others have not may be here.
std::vector<RemoteLookup::Prefix::End> RemoteLookup::LocateEnds(const storage::PrefixText& text, bool own,
                                                                std::span<const Want> blocks) const {
  const storage::PrefixModel& model = text.model();
  const uint64_t last = text.tokens().size() - 1;
  size_t leading = 0;
  while (leading < blocks.size() && blocks[leading].index == leading) ++leading;
  const size_t behind = blocks.empty() ? 0 : blocks.back().index + 1;
  const auto reach = [&](size_t count) {
    return model.paged ? std::min((count + 1) * model.block_tokens - 1, last) : last;
  };
  std::vector<Prefix::End> ends;
  const size_t most = leading > 0 ? kMostDepths : kDepthsAtOnce;
  uint64_t left = reach(leading);
  for (size_t tried = 0; tried < most && left > 0 && ends.empty(); tried += kDepthsAtOnce) {
    left = LocateCheckpoints(text, own, 0, left, kDepthsAtOnce, ends);
  }
  LocateCheckpoints(text, own, reach(leading), reach(behind), kMostDepthsBehind, ends);
  LocateCheckpoints(text, own, reach(behind), last, kMostDepthsBehind, ends);
  LocateSpans(text, own, ends);
  std::ranges::stable_sort(ends, std::ranges::greater(), &Prefix::End::depth);
  return ends;
}

// Tries the `most` deepest ones behind `above` and up to `end`; returns the depth up to which others are left.
uint64_t RemoteLookup::LocateCheckpoints(const storage::PrefixText& text, bool own, uint64_t above, uint64_t end,
                                         size_t most, std::vector<Prefix::End>& ends) const {
  if (end <= above) return above;
  const storage::PrefixModel& model = text.model();
  const PrefixKeys& keys = own ? *text.own() : text.shared();
  const std::vector<uint64_t> depths = directory_.Depths(model.ns, end, most);
  std::vector<Query> queries;
  for (const uint64_t depth : depths) {
    if (depth <= above) break;
    queries.push_back(
        {.kind = ObjectKind::kCheckpoint, .key = keys.Checkpoint(depth), .shard = model.shard, .ns = model.ns});
  }
  std::vector<Want> located;
  LocateSegments(queries, PoolOf(own), located);
  for (Want& want : located) {
    const uint64_t depth = depths[want.index];
    const uint64_t blocks = model.paged ? depth / model.block_tokens : 0;
    ends.push_back({.depth = depth, .blocks = static_cast<size_t>(blocks), .checkpoint = std::move(want)});
  }
  return queries.size() < most ? above : depths.back() - 1;
}

// Adds the spans behind these checkpoints.
void RemoteLookup::LocateSpans(const storage::PrefixText& text, bool own, std::vector<Prefix::End>& ends) const {
  if (text.span_tokens() == 0) return;
  const storage::PrefixModel& model = text.model();
  const PrefixKeys& keys = own ? *text.own() : text.shared();
  std::vector<Prefix::End> tried;
  std::vector<Query> queries;
  for (const Prefix::End& base : ends) {
    const uint64_t last = std::min<uint64_t>(text.tokens().size() - 1, base.depth + limits::kMaxSpanTokens);
    for (const uint64_t depth : directory_.SpanEnds(model.ns, base.depth, last, kMostSpans - queries.size())) {
      if (depth <= base.depth) continue;
      queries.push_back(
          {.kind = ObjectKind::kSpan, .key = keys.Span(base.depth, depth), .shard = model.shard, .ns = model.ns});
      tried.push_back({.depth = depth, .blocks = base.blocks, .checkpoint = base.checkpoint});
    }
  }
  std::vector<Want> located;
  LocateSegments(queries, PoolOf(own), located);
  for (Want& want : located) {
    Prefix::End& end = tried[want.index];
    end.span = std::move(want);
    ends.push_back(std::move(end));
  }
}

// The deepest end whose objects are all here or elsewhere, as far as is known.
void RemoteLookup::Choose(storage::TenantId tenant, Prefix prefix, std::vector<Want>& wants) const {
  size_t needed = 0, whole = 0;
  for (const Prefix::End& end : prefix.ends) needed = std::max(needed, end.blocks);
  const Want like = prefix.ends.front().checkpoint;
  std::vector<Want> chain;
  for (auto next = prefix.blocks.begin(); whole < needed; ++whole) {
    const Key& key = prefix.keys->blocks()[whole];
    if (next != prefix.blocks.end() && next->index == whole) {
      chain.push_back(std::move(*next++));
    } else if (cache_->Knows(tenant, key)) {
      chain.push_back(
          {.kind = ObjectKind::kPrefixBlock, .ns = like.ns, .key = key, .pool = like.pool, .shards = like.shards});
    } else {
      break;
    }
  }
  const auto end = std::ranges::find_if(prefix.ends, [whole](const Prefix::End& one) { return one.blocks <= whole; });
  if (end == prefix.ends.end()) return;
  chain.resize(end->blocks);
  std::ranges::move(chain, std::back_inserter(wants));
  wants.push_back(std::move(end->checkpoint));
  if (end->span) wants.push_back(*std::move(end->span));
}

void RemoteLookup::Begin(const std::shared_ptr<Call>& call, Wants located) {
  std::vector<Want> wants = std::move(located.segments), asked;
  for (Prefix& prefix : located.prefixes) Choose(call->tenant, std::move(prefix), wants);
  for (Want& want : wants) {
    const Place key{call->tenant, want.key};
    if (cache_->Knows(call->tenant, want.key)) {
      if (using_.contains(key)) call->Add(want.key, want.shards);  // it came for another one, who may give it back
      continue;
    }
    const auto [place, first] = asking_.try_emplace(key);
    if (first && (asking_.size() > options_.most_waiting || want.shards > limits::kMaxPeerKeysPerCall)) {
      asking_.erase(place);
      continue;
    }
    if (!first && std::ranges::count(place->second, call) > 0) continue;
    place->second.push_back(call);
    call->Expect();
    call->Add(want.key, want.shards);
    if (!first) ++stats_.joined;
    if (first) asked.push_back(std::move(want));
  }
  deadlines_.emplace_back(clock_.Now() + options_.deadline, call);
  Ask(call->tenant, std::move(asked));
  call->Settle(call);
}

void RemoteLookup::Tick() {
  const storage::Nanos now = clock_.Now();
  for (; !deadlines_.empty(); deadlines_.pop_front()) {
    const auto& [deadline, call] = deadlines_.front();
    if (call->waits() && deadline > now) return;
    if (!call->waits()) continue;
    ++stats_.late;
    call->GoOn(call);
  }
}

// The nearest holder of each object is asked, as far as is known; one call a node.
void RemoteLookup::Ask(storage::TenantId tenant, std::vector<Want> wants) {
  std::map<std::string, std::vector<Want>> by_node;
  const storage::Nanos now = clock_.Now();
  for (Want& want : wants) {
    std::erase_if(want.holders, [&](const auto& member) {
      return !rates_.MayAsk(member->node, now) || !opener_.Shares(*member, tenant);
    });
    if (want.holders.empty()) {
      Settled(tenant, want.key);
      continue;
    }
    std::ranges::stable_sort(want.holders, {}, [&](const std::shared_ptr<const Member>& member) {
      return std::tuple(objects_->Distrusts(*member, want.key), rates_.failures(member->node),
                        rates_.Estimate(member->node, want.bytes));
    });
    by_node[want.holders.front()->node].push_back(std::move(want));
  }
  for (auto& [node, of_node] : by_node) {
    for (size_t begin = 0; begin < of_node.size();) {
      std::vector<Want> some;
      std::vector<PeerObject> objects;
      for (; begin < of_node.size(); ++begin) {
        Want& want = of_node[begin];
        if (!objects.empty() && objects.size() + want.shards > limits::kMaxPeerKeysPerCall) break;
        for (uint32_t rank = 0; rank < want.shards; ++rank) {
          objects.push_back({want.key, {.rank = rank, .size = want.shards}});
        }
        some.push_back(std::move(want));
      }
      stats_.asked += objects.size();
      const std::shared_ptr<const Member> member = some.front().holders.front();
      opener_.Open(tenant, member, std::move(objects), [this, tenant, some = std::move(some)](Opener::Opened opened) {
        Answered(tenant, some, std::move(opened));
      });
    }
  }
}

void RemoteLookup::Answered(storage::TenantId tenant, const std::vector<Want>& wants, Opener::Opened opened) {
  std::vector<Want> again;
  size_t next = 0;
  for (const Want& want : wants) {
    const std::span shards(opened.begin() + static_cast<ptrdiff_t>(next), want.shards);
    next += want.shards;
    if (Adopt(tenant, want, shards) || want.holders.size() == 1 || !AnyoneWaits(tenant, want.key)) {
      Settled(tenant, want.key);
      continue;
    }
    again.push_back(want);
    again.back().holders.erase(again.back().holders.begin());
  }
  if (!again.empty()) Ask(tenant, std::move(again));
}

bool RemoteLookup::AnyoneWaits(storage::TenantId tenant, const Key& key) const {
  return std::ranges::any_of(asking_.at({tenant, key}), [](const auto& call) { return call->waits(); });
}

bool RemoteLookup::Adopt(storage::TenantId tenant, const Want& want, std::span<absl::StatusOr<OpenedObject>> shards) {
  const bool here = cache_->Knows(tenant, want.key);  // an engine was quicker
  bool whole = true;
  for (absl::StatusOr<OpenedObject>& shard : shards) {
    if (shard.ok() && (shard->header.ns != want.ns || shard->header.kind != want.kind)) {
      opener_.Close(shard->member, shard->lease);
      shard = absl::DataLossError("header: of another namespace or kind than was asked for");
    }
    whole &= shard.ok();
    ++(shard.ok() ? stats_.opened : absl::IsNotFound(shard.status()) ? stats_.missed : stats_.failed);
  }
  for (absl::StatusOr<OpenedObject>& shard : shards) {
    if (!shard.ok()) continue;
    const std::shared_ptr<const Member> member = shard->member;
    if (!whole || here) {
      opener_.Close(member, shard->lease);
      continue;
    }
    ObjectHeader header = shard->header;
    const storage::Nanos cost = rates_.Estimate(member->node, header.bytes);
    const storage::RemoteCopyId copy = objects_->Add(tenant, *std::move(shard), want.holders);
    if (cache_->AdoptRemote({tenant, want.pool}, std::move(header), copy, cost)) {
      ++stats_.adopted;
    } else {
      objects_->Release(copy);
    }
  }
  return whole || here;
}

void RemoteLookup::Settled(storage::TenantId tenant, const Key& key) {
  const auto waiting = asking_.extract({tenant, key});
  for (const std::shared_ptr<Call>& call : waiting.mapped()) call->Settle(call);
}

}  // namespace ashlar::daemon
