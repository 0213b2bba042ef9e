// SPDX-License-Identifier: Apache-2.0
#include "storage/prefix/checkpoint_budget.h"

#include <algorithm>
#include <array>
#include <limits>
#include <utility>

namespace ashlar::storage {
namespace {

void Prefetch(const PrefixNode& node) {
  constexpr size_t kLine = 64;
  for (size_t at = 0; at < sizeof(node); at += kLine) __builtin_prefetch(reinterpret_cast<const char*>(&node) + at);
}

}  // namespace

const PrefixNode& CheckpointBudget::Before(const PrefixNode& node) {
  const PrefixNode* at = node.parent();
  while (at->parent() != nullptr && !at->data.kept) at = at->parent();
  return *at;
}

uint64_t CheckpointBudget::StateBytes(const PrefixNode& node) const {
  return costs_.StateBytes(node.depth());
}

// Returns the deepest ancestor whose pages are kept independently of this checkpoint, or the root.
const PrefixNode& CheckpointBudget::Paged(const PrefixNode& node) {
  const uint32_t own = node.data.kept && node.data.span == nullptr ? 1 : 0;
  const PrefixNode* at = &node;
  while (at->parent() != nullptr && at->data.needs == own) at = at->parent();
  return *at;
}

uint64_t CheckpointBudget::Bytes(const PrefixNode& node, const PrefixNode& paged) const {
  if (node.data.span != nullptr) return node.data.span->bytes;
  const uint64_t pages = node.depth() / costs_.page_tokens - paged.depth() / costs_.page_tokens;
  return StateBytes(node) + pages * costs_.page_bytes;
}

double CheckpointBudget::Worth(const PrefixNode& node, const PrefixNode& before, const PrefixNode& paged) const {
  const double saved = costs_.Flops(node.depth()) - costs_.Flops(before.depth());
  return saved / static_cast<double>(Bytes(node, paged));
}

double CheckpointBudget::Price(const PrefixNode& node, const PrefixNode& before, const PrefixNode& paged,
                               RequestTime now) const {
  const PrefixEntry& entry = node.data;
  return model_.Rate({*entry.kind, entry.uses, entry.fresh}, now - entry.used) * Worth(node, before, paged);
}

double CheckpointBudget::Price(const Kept& kept, RequestTime now) const {
  return model_.Rate(kept.model, static_cast<uint32_t>(now) - kept.used) * kept.worth;
}

void CheckpointBudget::Refresh(PrefixNode& node) {
  if (!node.data.kept) return;
  const PrefixEntry& entry = node.data;
  Kept& kept = kept_[entry.kept_place];
  kept.worth = static_cast<float>(Worth(node, Before(node), Paged(node)));
  kept.used = static_cast<uint32_t>(entry.used);
  kept.model = ReuseModel::ClassOf({*entry.kind, entry.uses, entry.fresh});
}

double CheckpointBudget::Price(const PrefixNode& node, RequestTime now) const {
  return Price(node, Before(node), Paged(node), now);
}

// None of them is kept, so all have the same checkpoint before them. A node after the first one without needs has none
// either.
std::vector<double> CheckpointBudget::Prices(std::span<const PrefixNode* const> way, RequestTime now) const {
  std::vector<double> prices;
  if (way.empty()) return prices;
  const PrefixNode& before = Before(*way.front());
  const PrefixNode* paged = nullptr;  // of nodes without needs
  for (const PrefixNode* node : way) {
    if (node->data.needs == 0 && paged == nullptr) paged = &Paged(*node);
    prices.push_back(Price(*node, before, node->data.needs == 0 ? *paged : *node, now));
  }
  return prices;
}

void CheckpointBudget::Lease(PrefixNode& node) {
  ++node.data.leases;
  NoteHeld(node);
}

void CheckpointBudget::Release(PrefixNode& node) {
  --node.data.leases;
  NoteHeld(node);
}

void CheckpointBudget::NoteHeld(PrefixNode& node) {
  if (!node.data.kept) return;
  const size_t place = node.data.kept_place;
  kept_[place].held = !MayGo(node);
  if (kept_[place].held && kept_[place].cheap) DropCheap(place);
}

void CheckpointBudget::ReduceLimit() {
  limit_ = std::max(bytes_, capacity_ / kLeastShare);
}

void CheckpointBudget::RaiseLimit() {
  limit_ = std::min(capacity_, limit_ + capacity_ / kStep);
}

void CheckpointBudget::Put(PrefixNode& node) {
  bytes_ += Bytes(node, Paged(node));
  if (const KeptSpan* const span = node.data.span.get()) {
    span->base->data.hanging.push_back(&node);
    NoteHeld(*span->base);
    ++spans_;
    saved_bytes_ += StateBytes(node) - std::min(StateBytes(node), span->bytes);
  } else {
    for (PrefixNode* at = &node; at->parent() != nullptr && ++at->data.needs == 1; at = at->parent()) {
    }
  }
  node.data.kept = true;
  node.data.kept_place = kept_.size();
  kept_.push_back({.node = &node, .held = !MayGo(node)});
  Refresh(node);
  RefreshAround(node);
}

// The checkpoint before it has more or fewer exclusive pages; the ones after it save less or more.
void CheckpointBudget::RefreshAround(PrefixNode& node) {
  PrefixNode* before = node.parent();
  while (before->parent() != nullptr && !before->data.kept) before = before->parent();
  Refresh(*before);
  if (node.leaf()) return;
  std::array<PrefixNode*, kNearby> nearby = {&node};
  size_t known = 1;
  for (size_t i = 0; i < known; ++i) {
    nearby[i]->ForSomeChildren(kNearby, [&](PrefixNode& child) {
      if (child.data.needs == 0 && !child.data.kept) return;
      Refresh(child);
      if (!child.data.kept && known < kNearby) nearby[known++] = &child;
    });
  }
}

void CheckpointBudget::Drop(PrefixNode& node) {
  Remove(node);
  node.data.span.reset();
}

void CheckpointBudget::Remove(PrefixNode& node) {
  bytes_ -= Bytes(node, Paged(node));
  if (const KeptSpan* const span = node.data.span.get()) {
    std::erase(span->base->data.hanging, &node);
    NoteHeld(*span->base);
    --spans_;
    saved_bytes_ -= StateBytes(node) - std::min(StateBytes(node), span->bytes);
  } else {
    for (PrefixNode* at = &node; at->parent() != nullptr && --at->data.needs == 0; at = at->parent()) {
    }
  }
  node.data.kept = false;
  const size_t place = node.data.kept_place, last = kept_.size() - 1;
  if (kept_[place].cheap) DropCheap(place);
  if (place != last) {
    kept_[place] = kept_[last];
    kept_[place].node->data.kept_place = place;
    for (Cheap& cheap : cheap_) cheap.place = cheap.place == last ? place : cheap.place;
  }
  kept_.pop_back();
  RefreshAround(node);
}

void CheckpointBudget::DropCheap(size_t place) {
  kept_[place].cheap = false;
  std::erase_if(cheap_, [place](const Cheap& cheap) { return cheap.place == place; });
}

PrefixNode* CheckpointBudget::CheapestOfAll(const PrefixNode* spared, RequestTime now, double& price) const {
  PrefixNode* cheapest = nullptr;
  price = std::numeric_limits<double>::infinity();
  for (const Kept& kept : kept_) {
    PrefixNode* const node = kept.node;
    if (node == spared || kept.held) continue;
    const double its = Price(*node, now);
    if (its >= price) continue;
    cheapest = node;
    price = its;
  }
  return cheapest;
}

void CheckpointBudget::DrawAhead() {
  for (uint32_t& draw : ahead_) {
    draw = static_cast<uint32_t>(random_() >> 32);
    __builtin_prefetch(&kept_[PlaceOf(draw)]);
    __builtin_prefetch(&kept_[PlaceOf(draw) + kNeighbours - 1]);
  }
}

void CheckpointBudget::DrawCheap(RequestTime now) {
  const auto dearer = [](const Cheap& a, const Cheap& b) { return a.price < b.price; };
  for (size_t rounds = cheap_.size() < kCheap / 2 ? kSamples / kFresh : 1; rounds > 0; --rounds) {
    const std::array<uint32_t, kFresh / kNeighbours> draws = ahead_;
    DrawAhead();
    for (size_t i = 0; i < kFresh; ++i) {
      const size_t place = PlaceOf(draws[i / kNeighbours]) + i % kNeighbours;
      Kept& kept = kept_[place];
      const Cheap drawn{Price(kept, now), place};
      const bool full = cheap_.size() == kCheap;
      if (kept.cheap || kept.held || (full && drawn.price >= dearest_)) continue;
      if (full) {
        Cheap& dearest = *std::max_element(cheap_.begin(), cheap_.end(), dearer);
        kept_[dearest.place].cheap = false;
        dearest = drawn;
      } else {
        cheap_.push_back(drawn);
      }
      kept.cheap = true;
      Prefetch(*kept.node);  // may be evicted soon
      dearest_ = std::max_element(cheap_.begin(), cheap_.end(), dearer)->price;
    }
  }
}

std::vector<CheckpointBudget::Cheap>::iterator CheckpointBudget::CheapestDrawn() {
  return std::min_element(cheap_.begin(), cheap_.end(),
                          [](const Cheap& a, const Cheap& b) { return a.price < b.price; });
}

PrefixNode* CheckpointBudget::Cheapest(const PrefixNode* spared, RequestTime now, double& price) {
  if (kept_.size() <= kSamples) return CheapestOfAll(spared, now, price);
  if (!cheap_.empty()) Prefetch(*kept_[CheapestDrawn()->place].node->parent());
  DrawCheap(now);
  PrefixNode* seen = nullptr;
  bool again = true;
  while (true) {  // repeats until the cheapest one has the recorded price; each is examined once or does not become
                  // more expensive
    if (cheap_.empty() && std::exchange(again, false)) DrawCheap(now);  // only the spared one was left
    const auto cheapest = CheapestDrawn();
    price = cheapest == cheap_.end() ? std::numeric_limits<double>::infinity() : cheapest->price;
    PrefixNode* const node = cheapest == cheap_.end() ? nullptr : kept_[cheapest->place].node;
    if (node == nullptr || node == seen) return seen;
    if (node == spared) {  // stands before evictable ones
      DropCheap(cheapest->place);
      continue;
    }
    seen = node;
    Refresh(*node);
    cheapest->price = Price(kept_[cheapest->place], now);
  }
}

double CheckpointBudget::LeastPrice(RequestTime now) {
  if (bytes_ + costs_.checkpoint_bytes + costs_.page_bytes <= limit_) return 0;
  double price = 0;
  Cheapest(nullptr, now, price);
  return price;
}

bool CheckpointBudget::AdmitSpan(PrefixNode& node, PrefixNode& base, uint64_t bytes, RequestTime now) {
  node.data.span = std::make_unique<KeptSpan>(KeptSpan{.base = &base, .bytes = bytes});
  if (Admit(node, now)) return true;
  node.data.span.reset();
  return false;
}

// It is added first, so that the pages before it count as needed. Until enough is evicted, the sum may exceed the
// capacity on paper; it never does on return.
bool CheckpointBudget::Admit(PrefixNode& node, RequestTime now) {
  if (Bytes(node, Paged(node)) > limit_) {
    ++refusals_;
    return false;
  }
  const double worth = Price(node, now);
  std::vector<PrefixNode*> gone;
  double price = 0, paid = going_price_;
  Put(node);
  while (bytes_ > limit_) {
    PrefixNode* const cheapest = Cheapest(&node, now, price);
    if (cheapest == nullptr || price >= worth) break;
    paid = paid * kPriceMemory + price * (1 - kPriceMemory);
    Remove(*cheapest);
    gone.push_back(cheapest);
  }
  if (bytes_ > limit_) {
    Remove(node);
    for (auto back = gone.rbegin(); back != gone.rend(); ++back) Put(**back);
    ++refusals_;
    return false;
  }
  going_price_ = paid;
  evictions_ += gone.size();
  peak_bytes_ = std::max(peak_bytes_, bytes_);
  for (PrefixNode* const dropped : gone) {
    dropped->data.span.reset();
    if (gone_) gone_(*dropped);
  }
  return true;
}

}  // namespace ashlar::storage
