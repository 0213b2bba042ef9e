// SPDX-License-Identifier: Apache-2.0
// Recovery: lookups find prefixes that an earlier run of the daemon left on its disk, or those of an erased namespace.
#include <algorithm>
#include <ranges>
#include <set>

#include "proto/limits.h"
#include "storage/prefix/prefixes.h"

namespace ashlar::storage {
namespace {

using Place = std::pair<uint64_t, uint64_t>;
using Depths = std::map<Place, uint64_t>;  // depths by place, as in Prefixes

constexpr size_t kProbes = 64;  // depths of recovered checkpoints, and of spans, that a lookup tries

// The place must exist.
void EraseOne(Depths& depths, const Place& place) {
  const auto count = depths.find(place);
  if (--count->second == 0) depths.erase(count);
}

// Returns the positions of spans that may belong to the text, in the order of `begins`.
std::vector<Place> Tried(const Depths& spans, std::span<const uint64_t> begins, const PrefixText& text) {
  std::vector<Place> tried;
  for (const uint64_t begin : begins) {
    const uint64_t last = std::min<uint64_t>(begin + limits::kMaxSpanTokens, text.tokens().size() - 1);
    for (auto at = spans.lower_bound({begin + 1, 0}); at != spans.end() && at->first.first <= last; ++at) {
      if (tried.size() == kProbes) break;
      if (at->first.second == begin) tried.push_back(at->first);
    }
  }
  return tried;
}

}  // namespace

// Finds checkpoints of an earlier run on the disk. Their depths are known, but not their tokens.
void Prefixes::Probe(Space& space, const PrefixText& text) {
  const auto found = recovered_.find(text.model().ns);
  if (found == recovered_.end()) return;
  const uint64_t block = text.model().block_tokens;
  Depths& depths = found->second;
  for (const bool own : {false, true}) {
    if (own && !text.own()) continue;
    const PrefixKeys& keys = own ? *text.own() : text.shared();
    // Deeper ones lack a block. The last token is never looked up.
    const uint64_t behind =
        std::min<uint64_t>(text.tokens().size(), (stored_.WholeBlocks(space.tenant, text.model(), keys) + 1) * block);
    std::vector<uint64_t> tried;
    for (auto at = depths.lower_bound({behind, 0}); at != depths.begin() && tried.size() < kProbes;) {
      --at;
      const auto [depth, first] = at->first;
      if (first == depth / block * block) {
        tried.push_back(depth);
      } else {
        at = depths.erase(at);  // not part of a chain
      }
    }
    std::erase_if(tried, [&](uint64_t depth) {
      return stored_.Find(space.tenant, keys.Checkpoint(depth), text.model().shard) != There::kWhole;
    });
    std::ranges::reverse(tried);
    if (own) {
      for (const uint64_t depth : tried) {
        if (conversations_.Remember(space.tenant, text, depth)) EraseOne(depths, {depth, depth / block * block});
      }
    } else {
      Recover(space, text, tried, depths);
    }
  }
  if (depths.empty()) recovered_.erase(found);
}

// A known one belongs to another text of the same depth.
void Prefixes::Recover(Space& space, const PrefixText& text, std::span<const uint64_t> there, Depths& depths) {
  if (there.empty()) return;
  std::vector<PrefixPlanner::Found> found;
  for (const uint64_t depth : there) found.push_back({.depth = depth});
  const std::vector<PrefixPlanner::Recovery> outcomes = space.planner->Recover(text.tokens(), found);
  const uint64_t block = text.model().block_tokens;
  for (size_t i = 0; i < found.size(); ++i) {
    if (outcomes[i] != PrefixPlanner::Recovery::kKnown) EraseOne(depths, {there[i], there[i] / block * block});
  }
  Name(space, text, there.back());
}

// Finds spans that start from known states: only a prompt that contains the whole span finds it.
void Prefixes::ProbeSpans(Space& space, const PrefixText& text) {
  const auto found = recovered_spans_.find(text.model().ns);
  if (found == recovered_spans_.end()) return;
  Depths& spans = found->second;
  RecoverSpans(space, text, spans);
  if (text.own()) {
    for (const auto& [end, begin] : Tried(spans, conversations_.Checkpoints(space.tenant, text), text)) {
      if (stored_.FindSpan(space.tenant, text.model(), text.own()->Span(begin, end)) != There::kWhole) continue;
      if (conversations_.Remember(space.tenant, text, end, begin)) EraseOne(spans, {end, begin});
    }
  }
  if (spans.empty()) recovered_spans_.erase(found);
}

// A span without the states that it starts from stays a candidate, because they may be committed again.
void Prefixes::RecoverSpans(Space& space, const PrefixText& text, Depths& spans) {
  const PrefixModel& model = text.model();
  std::vector<Place> there;
  std::vector<PrefixPlanner::Found> found;
  std::vector<Place> tried = Tried(spans, Checkpoints(space, text), text);
  std::ranges::stable_sort(tried, {}, [](const Place& place) { return place.first; });
  for (const auto& [end, begin] : tried) {
    const Key key = text.shared().Span(begin, end);
    if (stored_.Find(space.tenant, key, model.shard) != There::kWhole) continue;
    const ObjectHeader& header = table_.index().keys().Find(space.tenant, key, model.shard)->header;
    there.push_back({end, begin});
    found.push_back(
        {.depth = end,
         .span = PrefixPlanner::SpanOffer{begin, header.Extents() * limits::kExtentBytes * model.shard.size}});
  }
  if (found.empty()) return;
  const std::vector<PrefixPlanner::Recovery> outcomes = space.planner->Recover(text.tokens(), found);
  for (size_t i = 0; i < found.size(); ++i) {
    if (outcomes[i] == PrefixPlanner::Recovery::kKept) EraseOne(spans, there[i]);
  }
  Name(space, text, there.back().first);
}

// Returns the depths of the text's known states, deepest first.
std::vector<uint64_t> Prefixes::Checkpoints(const Space& space, const PrefixText& text) {
  std::vector<uint64_t> depths;
  space.planner->tree().Walk(text.tokens(), [&depths](PrefixNode& node) {
    if (node.data.kept && node.data.span == nullptr) depths.push_back(node.depth());
  });
  std::ranges::reverse(depths);
  return depths;
}

Prefixes::Parts Prefixes::Here(TenantId tenant, const PrefixText& text, bool own, uint64_t end,
                               std::span<const uint64_t> elsewhere) const {
  const PrefixModel& model = text.model();
  const PrefixKeys& keys = own ? *text.own() : text.shared();
  const uint64_t last = text.tokens().size() - 1;
  std::set<uint64_t> depths;
  std::vector<Candidate> spans;
  const auto add_span = [&](uint64_t begin, uint64_t depth) {
    spans.push_back({.depth = depth, .own = own, .span_begin = begin, .span = keys.Span(begin, depth)});
  };
  if (const auto space = spaces_.find(model.ns); !own && space != spaces_.end()) {
    space->second.planner->tree().Walk(text.tokens().first(last), [&](PrefixNode& node) {
      const KeptSpan* const span = node.data.span.get();
      if (node.data.kept && span == nullptr) depths.insert(node.depth());
      if (node.data.kept && span != nullptr) add_span(span->base->depth(), node.depth());
    });
  }
  const Conversations::States* const talk = own ? conversations_.Find(tenant, text) : nullptr;
  const Conversations::States none;
  const Conversations::States& known = talk == nullptr ? none : *talk;
  for (const Conversations::Mark* const mark : {&known.last, &known.before, &known.saved}) {
    if (mark->depth == 0 || mark->depth > last) continue;
    depths.insert(mark->checkpoint());
    if (mark->span_begin > 0) add_span(mark->span_begin, mark->depth);
  }
  if (const auto found = recovered_.find(model.ns); found != recovered_.end()) {
    size_t tried = 0;
    for (auto at = found->second.lower_bound({end + 1, 0}); at != found->second.begin() && tried < kProbes;) {
      const auto [depth, first] = (--at)->first;
      if (first != depth / model.block_tokens * model.block_tokens || depth > last) continue;  // not part of a chain
      depths.insert(depth);
      ++tried;
    }
  }
  Parts parts;
  for (const uint64_t depth : depths) {
    if (depth > end) break;
    if (stored_.Find(tenant, keys.Checkpoint(depth), model.shard) == There::kWhole) parts.checkpoints.push_back(depth);
  }
  std::vector<uint64_t> begins(parts.checkpoints.rbegin(), parts.checkpoints.rend());
  begins.insert(begins.end(), elsewhere.begin(), elsewhere.end());
  if (const auto found = recovered_spans_.find(model.ns); found != recovered_spans_.end() && text.span_tokens() > 0) {
    for (const auto& [depth, begin] : Tried(found->second, begins, text)) add_span(begin, depth);
  }
  for (Candidate& span : spans) {
    const bool based = std::ranges::find(begins, span.span_begin) != begins.end();
    if (based && stored_.FindSpan(tenant, model, span.span) == There::kWhole) parts.spans.push_back(span);
  }
  return parts;
}

}  // namespace ashlar::storage
