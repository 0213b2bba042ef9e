// Recovery: look-ups find prefixes again that an earlier run of the daemon left on its disk, or of a namespace that was
// forgotten.
#include <algorithm>
#include <ranges>

#include "proto/limits.h"
#include "storage/prefix/prefixes.h"

namespace ashlar::storage {

// Checkpoints of an earlier run of the daemon, on its disk: their tokens are not known, but their depths are.
void Prefixes::Probe(Space& space, const PrefixText& text) {
  const auto found = recovered_.find(text.model().ns);
  if (found == recovered_.end()) return;
  const uint64_t block = text.model().block_tokens;
  Depths& depths = found->second;
  for (const bool own : {false, true}) {
    if (own && !text.own()) continue;
    const PrefixKeys& keys = own ? *text.own() : text.shared();
    // Deeper ones lack a block; the last token is left to compute.
    const uint64_t behind =
        std::min<uint64_t>(text.tokens().size(), (WholeBlocks(space.tenant, text.model(), keys) + 1) * block);
    std::vector<uint64_t> tried;
    for (auto at = depths.lower_bound({behind, 0}); at != depths.begin() && tried.size() < kProbes;) {
      --at;
      const auto [depth, first] = at->first;
      if (first == depth / block * block) {
        tried.push_back(depth);
      } else {
        at = depths.erase(at);  // no chain's
      }
    }
    for (const uint64_t depth : tried | std::views::reverse) {
      if (!Recover(space, text, own, depth)) continue;
      const auto count = depths.find({depth, depth / block * block});
      if (--count->second == 0) depths.erase(count);
    }
  }
  if (depths.empty()) recovered_.erase(found);
}

// False: it is not there, or known already; then one of the same depth that is there is another text's.
bool Prefixes::Recover(Space& space, const PrefixText& text, bool own, uint64_t depth) {
  const PrefixKeys& keys = own ? *text.own() : text.shared();
  if (Find(space.tenant, keys.Checkpoint(depth), text.model().shard) != There::kWhole) return false;
  if (own) return Remember(space.tenant, text, depth);
  const auto prefix = text.tokens().first(depth);
  if (space.cache->IsKept(prefix) != PrefixPlanner::Kept::kNot) return false;
  if (space.cache->Recover(prefix)) Name(space, text, depth);
  return true;
}

// The same of spans that hang on what is known: only a prompt that has all of one in common finds it.
void Prefixes::ProbeSpans(Space& space, const PrefixText& text) {
  const auto found = recovered_spans_.find(text.model().ns);
  if (found == recovered_spans_.end()) return;
  Depths& spans = found->second;
  for (const bool own : {false, true}) {
    if (own && !text.own()) continue;
    size_t tries = kProbes;
    for (const uint64_t begin : own ? OwnCheckpoints(space.tenant, text) : Checkpoints(space, text)) {
      const uint64_t last = std::min<uint64_t>(begin + limits::kMaxSpanTokens, text.tokens().size() - 1);
      for (auto at = spans.lower_bound({begin + 1, 0}); at != spans.end() && at->first.first <= last && tries > 0;) {
        const bool recovered = at->first.second == begin && tries-- > 0 &&
                               RecoverSpan(space, text, own, begin, at->first.first) && --at->second == 0;
        at = recovered ? spans.erase(at) : std::next(at);
      }
    }
  }
  if (spans.empty()) recovered_spans_.erase(found);
}

// Depths at which states of the text are known, the deepest first.
std::vector<uint64_t> Prefixes::Checkpoints(const Space& space, const PrefixText& text) {
  std::vector<uint64_t> depths;
  space.cache->tree().Walk(text.tokens(), [&depths](PrefixNode& node) {
    if (node.data.kept && node.data.span == nullptr) depths.push_back(node.depth());
  });
  std::ranges::reverse(depths);
  return depths;
}

std::vector<uint64_t> Prefixes::OwnCheckpoints(TenantId tenant, const PrefixText& text) {
  std::vector<uint64_t> depths;
  const Conversation* const conversation = Of(tenant).Find({text.model().ns, text.conversation()});
  if (conversation == nullptr) return depths;
  for (const Mark* const mark : {&conversation->last, &conversation->before}) {
    if (mark->depth > 0 && mark->span_begin == 0 && mark->depth < text.tokens().size()) depths.push_back(mark->depth);
  }
  return depths;
}

bool Prefixes::RecoverSpan(Space& space, const PrefixText& text, bool own, uint64_t begin, uint64_t end) {
  const PrefixKeys& keys = own ? *text.own() : text.shared();
  const Key key = keys.Span(begin, end);
  const PrefixModel& model = text.model();
  if (Find(space.tenant, key, model.shard) != There::kWhole) return false;
  if (own) return Remember(space.tenant, text, end, begin);
  const auto prefix = text.tokens().first(end);
  if (space.cache->IsKept(prefix) != PrefixPlanner::Kept::kNot) return false;
  const ObjectHeader& header = table_.Peek(space.tenant, key, model.shard)->header;
  const PrefixPlanner::SpanOffer span{begin, header.Extents() * limits::kExtentBytes * model.shard.size};
  // Without the states that it hangs on it stays among those that are tried: they may be committed again.
  if (!space.cache->Recover(prefix, span)) return false;
  Name(space, text, end);
  return true;
}

}  // namespace ashlar::storage
