// SPDX-License-Identifier: Apache-2.0
#include "storage/prefix/prefix_planner.h"

#include <algorithm>
#include <iterator>
#include <memory>
#include <utility>

namespace ashlar::storage {
namespace {

ReuseModel::Subject Prefix(const PrefixEntry& entry) {
  return {*entry.kind, entry.uses, entry.fresh};
}
constexpr ReuseModel::Subject kEdge{.kind = ReuseKind::kEdge};

}  // namespace

PrefixPlanner::PrefixPlanner(const PrefixCosts& costs, const PrefixPlannerOptions& options,
                             OverlapPlans::Background background)
    : costs_(costs),
      options_(options),
      history_(costs.page_tokens),
      overlaps_(costs, options.capture_tokens, std::min(options.most_placed, options.most_checkpoints),
                std::move(background)),
      budget_(costs, options.capacity_bytes, reuse_, options.seed) {}

PrefixPlanner::Match PrefixPlanner::Lookup(std::span<const int32_t> prompt, bool rebuilds) {
  ++now_;
  overlaps_.BeginRequest();
  Sweep();
  Trim();
  std::vector<PrefixNode*> passed, candidates;
  PrefixNode* resume = nullptr;
  Match match;
  const auto reached = tree().Walk(prompt, [&](PrefixNode& node) {
    passed.push_back(&node);
    if (node.data.kind) candidates.push_back(&node);
    if (!node.data.kept || node.data.span != nullptr) return;
    resume = &node;
    match.resumable.push_back(node.depth());
    match.kept.push_back(&node);
  });
  match.resume = resume == nullptr ? 0 : resume->depth();
  if (rebuilds) match.spans = Spans(reached, passed);
  for (const Match::Span& span : match.spans) {
    if (span.depth <= match.resume) continue;
    match.resume = span.depth;
    resume = span.end;
  }
  match.shared = reached.depth;
  match.lease = resume;
  if (reached.inside != nullptr) LearnParting(reached.inside->data, reached.depth);
  if (!candidates.empty() && candidates.back()->depth() > match.resume) match.missed = candidates.back();
  Credit(candidates, resume, match.resume);
  // A prompt that diverges from known prompts here creates a branch, whether or not it is ever computed.
  const uint64_t grid = CheckpointGrid(reached.depth, options_.capture_tokens);
  const uint64_t branch = reached.depth / grid * grid;
  const bool parts = reached.depth < prompt.size() || reached.inside != nullptr;
  const bool served = std::ranges::any_of(candidates, [&](const PrefixNode* node) {
    return node->depth() >= branch && node->depth() % options_.capture_tokens == 0;
  });
  if (parts && branch > match.resume && !served) {
    PrefixNode& node = history_.NodeAt(prompt.first(branch));
    MakeCandidate(node, ReuseKind::kBranch);
    candidates.push_back(&node);
  }
  const std::vector<uint64_t> placed =
      Placed({.resume = match.resume, .shared = reached.depth, .tokens = prompt.size()});
  match.checkpoint_at = Wanted(candidates, match.resume, options_.most_checkpoints - placed.size());
  match.checkpoint_at.insert(match.checkpoint_at.end(), placed.begin(), placed.end());
  if (resume != nullptr) budget_.Lease(*resume);
  return match;
}

std::vector<PrefixPlanner::Match::Span> PrefixPlanner::Spans(const PrefixTree<PrefixEntry>::Reached& reached,
                                                             std::span<PrefixNode* const> passed) {
  const auto is_passed = [&](const PrefixNode* node) { return Tree::NodeOn(passed, node->depth()) == node; };
  std::vector<Match::Span> spans;
  for (const PrefixNode* const base : passed) {
    for (PrefixNode* const end : base->data.hanging) {
      const PrefixNode* at = end;  // the prompt diverges from the span's text in its edge or after it
      while (at != reached.inside && !is_passed(at)) at = at->parent();
      const uint64_t depth = at == reached.inside ? reached.depth : at->depth();
      if (depth > base->depth()) spans.push_back({.end = end, .begin = base->depth(), .depth = depth});
    }
  }
  return spans;
}

void PrefixPlanner::LearnParting(PrefixEntry& edge, uint64_t depth) {
  PromptTail& brought = *edge.brought;
  if (brought.parted || depth <= brought.begin) return;
  brought.parted = true;
  reuse_.Ended(kEdge, now_ - brought.came, true);
  overlaps_.Observe(depth, brought.prompt_end);
}

void PrefixPlanner::Use(PrefixNode& node) {
  reuse_.Ended(Prefix(node.data), now_ - node.data.used, true);
  ++node.data.uses;
  node.data.used = now_;
  budget_.Refresh(node);
}

// The prompt uses the prefix that it resumes from. Of the missing ones after it, it would have used the deepest, and
// the one that is most worth keeping: it counts too, so that uses are not spread over prefixes of nearly the same
// depth. A kept prefix that the prompt passes gets a use without ending its spell: if texts are used five times, all
// checkpoints of a text are then known to be done.
void PrefixPlanner::Credit(std::span<PrefixNode* const> passed, PrefixNode* resume, uint64_t depth) {
  if (resume != nullptr) Use(*resume);
  if (passed.empty()) return;
  std::vector<const PrefixNode*> missing;
  for (const PrefixNode* const node : passed) {
    if (node->depth() > depth && !node->data.kept && !IsEnd(node->data)) missing.push_back(node);
  }
  const std::vector<double> prices = budget_.prices().Prices(missing, now_);
  const auto best = std::ranges::max_element(prices);
  const PrefixNode* const dearest =
      best == prices.end() ? nullptr : missing[static_cast<size_t>(best - prices.begin())];
  for (PrefixNode* const node : passed) {
    if (node == resume) continue;
    if (node == dearest || node == passed.back()) {
      Use(*node);
    } else if (node->data.kept && !IsEnd(node->data)) {
      ++node->data.uses;
      budget_.Refresh(*node);
    }
  }
}

void PrefixPlanner::MakeCandidate(PrefixNode& node, ReuseKind kind) {
  if (node.data.kind) return;
  const PrefixNode* before = node.parent();
  while (before->parent() != nullptr && !IsEnd(before->data)) before = before->parent();
  node.data.kind = kind;
  node.data.fresh = node.depth() - before->depth();
  node.data.used = now_;
}

// Returns the known prefixes on the path whose missing checkpoint would be worth its space.
std::vector<uint64_t> PrefixPlanner::Wanted(std::span<PrefixNode* const> passed, uint64_t resume, size_t most) {
  const double least = budget_.LeastPrice(now_);
  std::vector<const PrefixNode*> missing;
  for (const PrefixNode* node : passed) {
    const bool asked = node->depth() > resume && node->depth() % options_.capture_tokens == 0;
    if (asked && !node->data.kept) missing.push_back(node);
  }
  const std::vector<double> prices = budget_.prices().Prices(missing, now_);
  std::vector<std::pair<double, uint64_t>> worth;
  for (size_t i = 0; i < missing.size(); ++i) {
    if (prices[i] >= least) worth.push_back({prices[i], missing[i]->depth()});
  }
  std::stable_sort(worth.begin(), worth.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
  if (worth.size() > most) worth.resize(most);
  std::vector<uint64_t> depths;
  for (const auto& [price, depth] : worth) depths.push_back(depth);
  std::sort(depths.begin(), depths.end());
  return depths;
}

// Chooses checkpoints in the new part of a prompt. The first one also needs the pages before it, the next ones only
// their states.
std::vector<uint64_t> PrefixPlanner::Placed(const CheckpointPlan::Prompt& prompt) {
  const uint64_t guesses = options_.most_placed * costs_.checkpoint_bytes;
  const bool ample = guesses <= (budget_.limit_bytes() - budget_.bytes()) / kAmple;
  const CheckpointPlan::Placement plan = overlaps_.For(prompt, ample);
  const double rate = reuse_.Rate(kEdge, 1), going = budget_.going_price() * kPlacedMargin;
  size_t pays = 0;
  double before = plan.Expected(0);
  for (size_t m = 1; m <= plan.most(); ++m) {
    const double expected = plan.Expected(m), saves = rate * (std::exchange(before, expected) - expected);
    if (saves <= 0) break;
    uint64_t bytes = costs_.checkpoint_bytes;
    if (m == 1) bytes += (plan.Positions(1).back() - prompt.resume) / costs_.page_tokens * costs_.page_bytes;
    if (bytes > budget_.capacity_bytes() || saves < going * static_cast<double>(m * m * bytes)) break;
    pays = m;
  }
  std::vector<uint64_t> positions = plan.Positions(pays);
  std::erase_if(positions, [&prompt](uint64_t depth) { return depth <= prompt.shared; });
  return positions;
}

size_t PrefixPlanner::Commit(Match match, std::span<const int32_t> tokens, uint64_t prompt,
                             std::span<const uint64_t> captured, const std::optional<SpanOffer>& span) {
  const uint64_t shared = match.shared;
  Release(std::move(match));
  return Keep(tokens, prompt, captured, span, shared);
}

size_t PrefixPlanner::Commit(std::span<const int32_t> tokens, uint64_t prompt, std::span<const uint64_t> captured,
                             const std::optional<SpanOffer>& span) {
  return Keep(tokens, prompt, captured, span, std::nullopt);
}

size_t PrefixPlanner::Keep(std::span<const int32_t> tokens, uint64_t prompt, std::span<const uint64_t> captured,
                           const std::optional<SpanOffer>& span, std::optional<uint64_t> shared) {
  if (tokens.empty()) return 0;
  budget_.RaiseLimit();
  const Tree::Inserted text = history_.Extend(tokens, prompt, captured, now_);
  for (PrefixNode* const node : text.at) {
    const bool prompt_end = span && node->depth() == span->begin;
    MakeCandidate(*node, prompt_end                                    ? ReuseKind::kRequestEnd
                         : node->depth() > shared.value_or(text.known) ? ReuseKind::kPlaced
                                                                       : ReuseKind::kBranch);
  }
  PrefixNode& end = *text.node;
  // A prompt longer than the tokens so far continues: these tokens end with a prefill step, not with a request.
  const bool goes_on = prompt > tokens.size();
  MakeCandidate(end, !goes_on                                    ? ReuseKind::kRequestEnd
                     : end.depth() > shared.value_or(text.known) ? ReuseKind::kPlaced
                                                                 : ReuseKind::kBranch);
  if (!goes_on) Continue(end);
  size_t kept = 0;
  for (PrefixNode* const node : text.at) kept += !node->data.kept && budget_.Admit(*node, now_) ? 1 : 0;
  kept += !end.data.kept && AdmitEnd(end, span) ? 1 : 0;
  Trim();
  return kept;
}

// The next turn resumes at `end`. The ends before it are hardly ever used again, so they must not count as ends whose
// next turn is due.
void PrefixPlanner::Continue(PrefixNode& end) {
  const auto set = [this](PrefixNode& node, ReuseKind kind) {
    node.data.kind = kind;
    budget_.Refresh(node);
  };
  if (end.data.kind == ReuseKind::kContinued) set(end, ReuseKind::kRequestEnd);
  for (PrefixNode* node = end.parent(); node->parent() != nullptr; node = node->parent()) {
    if (node->data.kind == ReuseKind::kRequestEnd) set(*node, ReuseKind::kContinued);
  }
}

bool PrefixPlanner::AdmitEnd(PrefixNode& end, const std::optional<SpanOffer>& span) {
  PrefixNode* base = &end;
  while (span && base->depth() > span->begin) base = base->parent();
  const bool hangs = span && base->depth() == span->begin && MayBear(*base);
  if (!hangs || span->bytes >= budget_.prices().Bytes(end)) return budget_.Admit(end, now_);
  return budget_.AdmitSpan(end, *base, span->bytes, now_);
}

bool PrefixPlanner::MayBear(const PrefixNode& base) {
  return IsKept(base) == Kept::kByStates && base.data.hanging.size() < kHanging;
}

// Kept leaves move to the back of the list; a request examines only some of them.
void PrefixPlanner::Trim() {
  for (size_t stayed = 0; tree().bytes() > options_.history_bytes && history_.oldest() != nullptr && stayed < kSweep;) {
    if (!DropOldest()) ++stayed;
  }
}

void PrefixPlanner::Release(Match match) {
  if (match.lease != nullptr) budget_.Release(*match.lease);
}

void PrefixPlanner::WhenGone(std::function<void(PrefixNode&)> gone) {
  gone_ = gone;
  budget_.WhenGone(std::move(gone));
}

void PrefixPlanner::Lost(std::span<const int32_t> prefix) {
  const auto reached = tree().Walk(prefix);
  if (reached.inside == nullptr && reached.depth == prefix.size()) Lost(*reached.node);
}

void PrefixPlanner::Lost(PrefixNode& node) {
  if (!node.data.kept) return;
  while (!node.data.hanging.empty()) Lost(*node.data.hanging.back());
  budget_.Drop(node);
  budget_.ReduceLimit();
  if (gone_) gone_(node);
}

PrefixPlanner::Kept PrefixPlanner::IsKept(std::span<const int32_t> prefix) const {
  const auto reached = tree().Walk(prefix);
  return reached.inside != nullptr || reached.depth < prefix.size() ? Kept::kNot : IsKept(*reached.node);
}

bool PrefixPlanner::IsEnd(const PrefixEntry& entry) {
  return entry.kind == ReuseKind::kRequestEnd || entry.kind == ReuseKind::kContinued;
}

PrefixPlanner::Kept PrefixPlanner::IsKept(const PrefixNode& node) {
  if (!node.data.kept) return Kept::kNot;
  return node.data.span == nullptr ? Kept::kByStates : Kept::kBySpan;
}

std::vector<PrefixPlanner::Recovery> PrefixPlanner::Recover(std::span<const int32_t> tokens,
                                                            std::span<const Found> found) {
  std::vector<Recovery> outcomes(found.size(), Recovery::kDeclined);
  const std::vector<PrefixNode*> way = tree().Way(tokens);
  std::vector<uint64_t> cuts;
  std::vector<size_t> wanted;
  for (size_t i = 0; i < found.size(); ++i) {
    const PrefixNode* const known = Tree::NodeOn(way, found[i].depth);
    if (known != nullptr && known->data.kept) {
      outcomes[i] = Recovery::kKnown;
      continue;
    }
    const PrefixNode* const base = found[i].span ? Tree::NodeOn(way, found[i].span->begin) : nullptr;
    if (found[i].span && (base == nullptr || !MayBear(*base))) continue;
    if (cuts.empty() || cuts.back() != found[i].depth) cuts.push_back(found[i].depth);
    wanted.push_back(i);
  }
  if (cuts.empty()) return outcomes;
  const Tree::Inserted text = history_.Extend(tokens.first(cuts.back()), cuts.back(), cuts, now_);
  for (const size_t i : wanted) {
    PrefixNode& node = *Tree::NodeOn(text.at, found[i].depth);
    MakeCandidate(node, ReuseKind::kRequestEnd);
    PrefixNode* const base = found[i].span ? Tree::NodeOn(way, found[i].span->begin) : nullptr;
    if (node.data.kept) {
      outcomes[i] = Recovery::kKnown;
    } else if (base == nullptr ? budget_.Admit(node, now_)
                               : MayBear(*base) && budget_.AdmitSpan(node, *base, found[i].span->bytes, now_)) {
      outcomes[i] = Recovery::kKept;
    }
  }
  return outcomes;
}

bool PrefixPlanner::DropOldest() {
  PrefixNode& leaf = *history_.oldest();
  // A kept leaf is worth its tokens, unless tokens are most of all bytes, as for a model without keys and values.
  if (leaf.data.leases > 0 || (leaf.data.kept && tree().bytes() <= 2 * options_.history_bytes)) {
    history_.Visit(leaf, now_);
    return false;
  }
  if (leaf.data.kept) {
    budget_.Drop(leaf);
    if (gone_) gone_(leaf);
  }
  PromptTail& brought = *leaf.data.brought;
  if (!std::exchange(brought.parted, true)) reuse_.Ended(kEdge, now_ - brought.came, false);
  if (leaf.data.kind) reuse_.Ended(Prefix(leaf.data), now_ - leaf.data.used, false);
  history_.Erase(leaf);
  return true;
}

// Each request reports some of the unfinished spells to the model, so that no request processes all of them.
void PrefixPlanner::Sweep() {
  const size_t some = std::min(kSweep, history_.size() / kLeastRefresh + 1);
  for (size_t i = 0; i < some && swept_ < history_.size(); ++i, ++swept_) {
    PrefixNode& node = history_[swept_];
    const PrefixEntry& entry = node.data;
    if (swept_ % kRefreshed == 0) budget_.Refresh(node);
    if (entry.kind) reuse_.GoesOn(Prefix(entry), now_ - entry.used);
    const PromptTail& brought = *entry.brought;
    if (!brought.parted && brought.end == node.depth()) reuse_.GoesOn(kEdge, now_ - brought.came);
  }
  if (swept_ < history_.size() || now_ - refreshed_ < kLeastRefresh) return;
  reuse_.Refresh();
  refreshed_ = now_;
  swept_ = 0;
}

}  // namespace ashlar::storage
