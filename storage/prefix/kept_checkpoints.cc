// SPDX-License-Identifier: Apache-2.0
#include "storage/prefix/kept_checkpoints.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace ashlar::storage {
namespace {

void Prefetch(const PrefixNode& node) {
  constexpr size_t kLine = 64;
  for (size_t at = 0; at < sizeof(node); at += kLine) __builtin_prefetch(reinterpret_cast<const char*>(&node) + at);
}

}  // namespace

void KeptCheckpoints::Refresh(PrefixNode& node) {
  if (!node.data.kept) return;
  const PrefixEntry& entry = node.data;
  Kept& kept = kept_[entry.kept_place];
  kept.worth = static_cast<float>(prices_.Worth(node));
  kept.used = static_cast<uint32_t>(entry.used);
  kept.model = ReuseModel::ClassOf({*entry.kind, entry.uses, entry.fresh});
}

void KeptCheckpoints::NoteHeld(const PrefixNode& node) {
  if (!node.data.kept) return;
  const size_t place = node.data.kept_place;
  kept_[place].held = !MayGo(node);
  if (kept_[place].held && kept_[place].cheap) DropCheap(place);
}

void KeptCheckpoints::Add(PrefixNode& node) {
  node.data.kept = true;
  node.data.kept_place = kept_.size();
  kept_.push_back({.node = &node, .held = !MayGo(node)});
  Refresh(node);
  RefreshAround(node);
}

void KeptCheckpoints::Remove(PrefixNode& node) {
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

// The checkpoint before it has more or fewer exclusive pages; the ones after it save less or more.
void KeptCheckpoints::RefreshAround(PrefixNode& node) {
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

void KeptCheckpoints::DropCheap(size_t place) {
  kept_[place].cheap = false;
  std::erase_if(cheap_, [place](const Cheap& cheap) { return cheap.place == place; });
}

PrefixNode* KeptCheckpoints::CheapestOfAll(const PrefixNode* spared, RequestTime now, double& price) const {
  PrefixNode* cheapest = nullptr;
  price = std::numeric_limits<double>::infinity();
  for (const Kept& kept : kept_) {
    PrefixNode* const node = kept.node;
    if (node == spared || kept.held) continue;
    const double its = prices_.Price(*node, now);
    if (its >= price) continue;
    cheapest = node;
    price = its;
  }
  return cheapest;
}

void KeptCheckpoints::DrawAhead() {
  for (uint32_t& draw : ahead_) {
    draw = static_cast<uint32_t>(random_() >> 32);
    __builtin_prefetch(&kept_[PlaceOf(draw)]);
    __builtin_prefetch(&kept_[PlaceOf(draw) + kNeighbours - 1]);
  }
}

void KeptCheckpoints::DrawCheap(RequestTime now) {
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

std::vector<KeptCheckpoints::Cheap>::iterator KeptCheckpoints::CheapestDrawn() {
  return std::min_element(cheap_.begin(), cheap_.end(),
                          [](const Cheap& a, const Cheap& b) { return a.price < b.price; });
}

PrefixNode* KeptCheckpoints::Cheapest(const PrefixNode* spared, RequestTime now, double& price) {
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
    if (node == spared) {  // before evictable ones
      DropCheap(cheapest->place);
      continue;
    }
    seen = node;
    Refresh(*node);
    cheapest->price = Price(kept_[cheapest->place], now);
  }
}

}  // namespace ashlar::storage
