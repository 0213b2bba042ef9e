// SPDX-License-Identifier: Apache-2.0
#include "storage/lookup/prober.h"

#include <algorithm>

namespace ashlar::storage {

Prober::Part& Prober::Part::operator+=(const Part& other) {
  load += other.load;
  for (size_t tier = 0; tier < tokens.size(); ++tier) tokens[tier] += other.tokens[tier];
  return *this;
}

Prober::Prober(ObjectTable& table, const ObjectFinder& finder, const Prefixes& prefixes, const Clock& clock,
               TenantId tenant, size_t level, std::span<const Query> queries, const PrefixText* prompt, uint64_t head,
               uint64_t tail, bool refused)
    : table_(table),
      finder_(finder),
      prefixes_(prefixes),
      stored_(table, clock),
      tenant_(tenant),
      level_(level),
      queries_(queries),
      prompt_(prompt),
      head_(head),
      tail_(tail),
      stage_(refused ? Stage::kDone : Stage::kAsk) {}

bool Prober::Run(Slice& slice) {
  if (stage_ == Stage::kAsk) {
    if (!slice.Take()) return false;
    if (prompt_ != nullptr && prompt_->tokens().size() > 1) {
      AddCandidates(/*own=*/false);
      if (prompt_->own()) AddCandidates(/*own=*/true);
    }
    stage_ = Stage::kBlocks;
  }
  if (stage_ == Stage::kBlocks) {
    if (!SumBlocks(/*own=*/false, slice) || !SumBlocks(/*own=*/true, slice)) return false;
    ExcludeSlow();
    stage_ = Stage::kSegments;
  }
  if (stage_ == Stage::kSegments) {
    for (; next_ < queries_.size(); ++next_) {
      if (!slice.Take()) return false;
      const Query& query = queries_[next_];
      const uint64_t end = begin_ + query.tokens;
      const uint64_t used = next_ == 0 ? query.tokens : query.tokens - std::min(query.tokens, head_ + tail_);
      const bool hit = query.storable && stored_.Find(tenant_, query.key, query.shard) == StoredPrefixes::There::kWhole;
      of_segments_.push_back(hit ? PartOf(query, used) : Part());
      const Nanos fetch = table_.costs()[tenant_].Estimate(of_segments_.back().load, 0);
      segments_.push_back({begin_, end, hit && (query.recompute == 0 || fetch <= query.recompute)});
      begin_ = end;
    }
    stage_ = Stage::kChoose;
  }
  if (stage_ == Stage::kChoose) {
    Choose();
    stage_ = Stage::kDone;
  }
  return true;
}

// As Prefixes::Ask, which learns.
void Prober::AddCandidates(bool own) {
  using There = StoredPrefixes::There;
  const PrefixModel& model = prompt_->model();
  const PrefixKeys& keys = own ? *prompt_->own() : prompt_->shared();
  const uint64_t last = prompt_->tokens().size() - 1;
  size_t whole = stored_.WholeBlocks(tenant_, model, keys);
  const uint64_t end = model.paged ? std::min<uint64_t>(last, (whole + 1) * model.block_tokens - 1) : last;
  const Prefixes::Parts parts = prefixes_.Here(tenant_, *prompt_, own, end, {});
  const auto place = [this](uint64_t depth) {
    return std::ranges::lower_bound(candidates_, depth, {}, &Prefixes::Candidate::depth);
  };
  const auto add = [&](const Prefixes::Candidate& candidate) {
    const auto at = place(candidate.depth);
    if (at == candidates_.end() || at->depth != candidate.depth) candidates_.insert(at, candidate);
  };
  for (const uint64_t depth : parts.checkpoints) {
    if (stored_.FindState(tenant_, model, keys, depth, whole) == There::kWhole) add({.depth = depth, .own = own});
  }
  if (prompt_->span_tokens() == 0) return;
  for (const Prefixes::Candidate& span : parts.spans) {
    const auto base = place(span.span_begin);
    if (base != candidates_.end() && base->depth == span.span_begin && base->own == own) add(span);
  }
}

Prober::Part Prober::PartOf(const Query& query, uint64_t tokens) const {
  Part part;
  const Entry* const entry = table_.index().keys().Find(tenant_, query.key, query.shard);
  if (entry == nullptr) return part;
  part.load = finder_.LoadOf(tenant_, query, level_);
  part.tokens[static_cast<size_t>(table_.levels().NearestTo(*entry, level_))] = tokens;
  return part;
}

bool Prober::SumBlocks(bool own, Slice& slice) {
  uint64_t depth = 0;
  for (const Prefixes::Candidate& candidate : candidates_) {
    if (candidate.own == own) depth = std::max(depth, candidate.checkpoint());
  }
  if (depth == 0) return true;
  const PrefixModel& model = prompt_->model();
  const size_t blocks = model.paged ? depth / model.block_tokens : 0;
  std::vector<Part>& sums = blocks_[own ? 1 : 0];
  if (sums.empty()) sums.emplace_back();
  Query query{.kind = ObjectKind::kPrefixBlock, .shard = model.shard, .ns = model.ns};
  while (sums.size() <= blocks) {
    if (!slice.Take()) return false;
    query.key = (own ? *prompt_->own() : prompt_->shared()).blocks()[sums.size() - 1];
    Part sum = sums.back();
    sum += PartOf(query, model.block_tokens);
    sums.push_back(sum);
  }
  return true;
}

Prober::Part Prober::PartOf(const Prefixes::Candidate& candidate) const {
  const PrefixModel& model = prompt_->model();
  const PrefixKeys& keys = candidate.own ? *prompt_->own() : prompt_->shared();
  const uint64_t depth = candidate.checkpoint();
  const size_t blocks = model.paged ? depth / model.block_tokens : 0;
  Part part = blocks_[candidate.own ? 1 : 0][blocks];
  Query query{.kind = ObjectKind::kCheckpoint, .key = keys.Checkpoint(depth), .shard = model.shard, .ns = model.ns};
  part += PartOf(query, depth - blocks * model.block_tokens);
  if (candidate.span_begin == 0) return part;
  query.kind = ObjectKind::kSpan;
  query.key = candidate.span;
  part += PartOf(query, candidate.depth - depth);
  return part;
}

// As Search::ExcludeSlow, which also tries a slow one from time to time.
void Prober::ExcludeSlow() {
  if (prompt_ == nullptr || prompt_->tokens_per_second <= 0) return;
  const PromotionCost& costs = table_.costs()[tenant_];
  double most_saved = 0;  // ns
  std::erase_if(candidates_, [&](const Prefixes::Candidate& candidate) {
    const double saved = 1e9 * static_cast<double>(candidate.depth) / prompt_->tokens_per_second -
                         static_cast<double>(costs.Estimate(PartOf(candidate).load, 0));
    if (saved < most_saved) return true;
    most_saved = saved;
    return false;
  });
}

void Prober::Choose() {
  std::vector<uint64_t> depths;
  for (const Prefixes::Candidate& candidate : candidates_) depths.push_back(candidate.depth);
  const Cover cover = BestCover(depths, segments_, head_, tail_, [this](uint64_t depth) {
    return prompt_ == nullptr ? static_cast<double>(depth) : prompt_->model().costs.Flops(depth);
  });
  Part all;
  const auto chosen = std::ranges::find(candidates_, cover.prefix, &Prefixes::Candidate::depth);
  if (chosen != candidates_.end()) {
    all += PartOf(*chosen);
  } else if (cover.prefix > 0) {
    all += of_segments_.front();
  }
  probed_.prefix_tokens = cover.prefix;
  for (const size_t segment : cover.segments) {
    all += of_segments_[segment];
    probed_.segment_tokens += segments_[segment].end - segments_[segment].begin - head_ - tail_;
  }
  probed_.tokens = all.tokens;
  probed_.fetch = table_.costs()[tenant_].Estimate(all.load, 0);
}

}  // namespace ashlar::storage
