// SPDX-License-Identifier: Apache-2.0
// Locates a lookup's prompts in the directory and on this node.
#include <algorithm>
#include <functional>
#include <iterator>
#include <utility>

#include "daemon/peer/fetch/remote_lookup.h"
#include "proto/limits.h"

namespace ashlar::daemon {
namespace {

// Depths at which a prompt's checkpoint is searched where others have its blocks (in groups, until one is found) and
// where they lack blocks before it. Also the number of spans, and the largest number of this node's checkpoints after
// which other nodes' spans are searched.
constexpr size_t kMostDepths = 1024, kDepthsAtOnce = 256, kMostDepthsAfter = 64, kMostSpans = 256, kMostBases = 4;

using storage::Query;

// Order for holders without measurements: a holder whose transport cannot reach its GPUs sends their data through dram.
int Farness(TierKind tier) {
  return tier == TierKind::kDram ? 0 : tier == TierKind::kHbm ? 1 : 2;
}

storage::PoolKind PoolOf(bool own) {
  return own ? storage::PoolKind::kPrivate : storage::PoolKind::kPublic;
}

// Returns the depth of the deepest checkpoint that needs `blocks` whole blocks.
uint64_t Reach(const storage::PrefixText& text, size_t blocks) {
  const storage::PrefixModel& model = text.model();
  const uint64_t last = text.tokens().size() - 1;
  return model.paged ? std::min<uint64_t>((blocks + 1) * model.block_tokens - 1, last) : last;
}

}  // namespace

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
      uint32_t shards = 0;  // shards in this bundle
      int farness = 0;      // farness of the farthest shard
    };
    std::map<uint64_t, Having> having;  // by incarnation of the member
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

// Blocks show how far others have this prompt; depths cover all texts. All blocks are located, because a block that no
// other node has may be here, and so may the checkpoint after it.
void RemoteLookup::LocatePrefix(const storage::PrefixText& text, bool own, std::vector<Prefix>& prefixes) const {
  const storage::PrefixModel& model = text.model();
  if (text.tokens().size() < 2) return;  // the last token is never looked up
  Prefix prefix{.text = &text, .own = own};
  std::vector<Query> blocks;
  if (model.paged) {
    for (const Key& key : prefix.keys().blocks().first((text.tokens().size() - 1) / model.block_tokens)) {
      blocks.push_back({.kind = ObjectKind::kPrefixBlock, .key = key, .shard = model.shard, .ns = model.ns});
    }
  }
  LocateSegments(blocks, PoolOf(own), prefix.blocks);
  while (prefix.leading < prefix.blocks.size() && prefix.blocks[prefix.leading].index == prefix.leading) {
    ++prefix.leading;
  }
  prefix.ends = LocateEnds(prefix);
  if (!prefix.ends.empty() || !prefix.blocks.empty()) prefixes.push_back(std::move(prefix));
}

// A checkpoint is less than a block after the last block that it needs. So the search starts with the deepest depths
// before which others have all blocks: the first checkpoint found there is complete. A few deeper depths are tried too,
// because blocks that others lack may be here.
std::vector<RemoteLookup::Prefix::End> RemoteLookup::LocateEnds(const Prefix& prefix) const {
  const storage::PrefixText& text = *prefix.text;
  const bool own = prefix.own;
  const uint64_t last = text.tokens().size() - 1;
  const size_t behind = prefix.blocks.empty() ? 0 : prefix.blocks.back().index + 1;
  std::vector<Prefix::End> ends;
  const size_t most = prefix.leading > 0 ? kMostDepths : kDepthsAtOnce;
  const uint64_t whole = Reach(text, prefix.leading);
  uint64_t left = whole;
  for (size_t tried = 0; tried < most && left > 0 && ends.empty(); tried += kDepthsAtOnce) {
    left = LocateCheckpoints(text, own, 0, left, kDepthsAtOnce, ends);
  }
  LocateCheckpoints(text, own, whole, Reach(text, behind), kMostDepthsAfter, ends);
  LocateCheckpoints(text, own, Reach(text, behind), last, kMostDepthsAfter, ends);
  LocateSpans(text, own, ends);
  std::ranges::stable_sort(ends, std::ranges::greater(), &Prefix::End::depth);
  return ends;
}

// Tries the `most` deepest depths in (above, end]; returns the depth up to which depths are untried.
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

// Adds the spans after these checkpoints.
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

void RemoteLookup::AddHere(storage::TenantId tenant, const Prefix& prefix, uint64_t end,
                           std::vector<Prefix::End>& ends) const {
  const storage::PrefixText& text = *prefix.text;
  const storage::PrefixModel& model = text.model();
  const auto here = [&](ObjectKind kind, const Key& key) {
    return Want{.kind = kind, .ns = model.ns, .key = key, .pool = PoolOf(prefix.own), .shards = model.shard.size};
  };
  std::vector<uint64_t> elsewhere;
  for (const Prefix::End& one : ends) {
    if (!one.span) elsewhere.push_back(one.depth);
  }
  const storage::Prefixes::Parts parts = cache_->prefixes().Here(tenant, text, prefix.own, end, elsewhere);
  std::vector<Prefix::End> own;
  for (const uint64_t depth : parts.checkpoints) {
    own.push_back({.depth = depth,
                   .blocks = static_cast<size_t>(model.paged ? depth / model.block_tokens : 0),
                   .checkpoint = here(ObjectKind::kCheckpoint, prefix.keys().Checkpoint(depth))});
  }
  std::ranges::move(own, std::back_inserter(ends));
  const size_t deepest = ends.size() - std::min(own.size(), kMostBases);
  std::vector<Prefix::End> bases(ends.begin() + static_cast<ptrdiff_t>(deepest), ends.end()), spans = bases;
  LocateSpans(text, prefix.own, spans);
  ends.insert(ends.end(), spans.begin() + static_cast<ptrdiff_t>(bases.size()), spans.end());
  for (const storage::Prefixes::Candidate& span : parts.spans) {
    const auto base =
        std::ranges::find_if(ends, [&](const Prefix::End& one) { return !one.span && one.depth == span.span_begin; });
    if (base == ends.end()) continue;
    Prefix::End by_span = *base;
    by_span.depth = span.depth;
    by_span.span = here(ObjectKind::kSpan, span.span);
    ends.push_back(std::move(by_span));
  }
}

// Chooses the deepest end with all objects here or on other nodes, as far as is known.
void RemoteLookup::Choose(storage::TenantId tenant, Prefix prefix, std::vector<Want>& wants) const {
  const storage::PrefixText& text = *prefix.text;
  const storage::PrefixModel& model = text.model();
  const size_t most = model.paged ? (text.tokens().size() - 1) / model.block_tokens : 0;
  size_t whole = 0;
  std::vector<Want> chain;
  for (auto next = prefix.blocks.begin(); whole < most; ++whole) {
    const Key& key = prefix.keys().blocks()[whole];
    if (next != prefix.blocks.end() && next->index == whole) {
      chain.push_back(std::move(*next++));
    } else if (cache_->adoption().Knows(tenant, key)) {
      chain.push_back({.kind = ObjectKind::kPrefixBlock,
                       .ns = model.ns,
                       .key = key,
                       .pool = PoolOf(prefix.own),
                       .shards = model.shard.size});
    } else {
      break;
    }
  }
  std::vector<Prefix::End>& ends = prefix.ends;
  const uint64_t end = Reach(text, whole);
  if (whole > prefix.leading)
    LocateCheckpoints(text, prefix.own, Reach(text, prefix.leading), end, kDepthsAtOnce, ends);
  AddHere(tenant, prefix, end, ends);
  std::ranges::stable_sort(ends, std::ranges::greater(), &Prefix::End::depth);
  const auto chosen = std::ranges::find_if(ends, [whole](const Prefix::End& one) { return one.blocks <= whole; });
  if (chosen == ends.end()) return;
  chain.resize(chosen->blocks);
  chain.push_back(std::move(chosen->checkpoint));
  if (chosen->span) chain.push_back(*std::move(chosen->span));
  for (Want& want : chain) want.group = prefix.keys().Group();
  std::ranges::move(chain, std::back_inserter(wants));
}

}  // namespace ashlar::daemon
