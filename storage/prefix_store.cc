#include "storage/prefix_store.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace ashlar::storage {

const PrefixNode& PrefixStore::Before(const PrefixNode& node) {
  const PrefixNode* at = node.parent();
  while (at->parent() != nullptr && !at->data.kept) at = at->parent();
  return *at;
}

// With a tail that is no whole page, so that one resumes at the very token.
uint64_t PrefixStore::StateBytes(const PrefixNode& node) const {
  return costs_.checkpoint_bytes + (node.depth() % costs_.page_tokens != 0 ? costs_.page_bytes : 0);
}

// On the way to it, the deepest prefix whose pages are kept whether it is or not; the root.
const PrefixNode& PrefixStore::Paged(const PrefixNode& node) {
  const uint32_t own = node.data.kept ? 1 : 0;
  const PrefixNode* at = &node;
  while (at->parent() != nullptr && at->data.needs == own) at = at->parent();
  return *at;
}

uint64_t PrefixStore::Bytes(const PrefixNode& node, const PrefixNode& paged) const {
  const uint64_t pages = node.depth() / costs_.page_tokens - paged.depth() / costs_.page_tokens;
  return StateBytes(node) + pages * costs_.page_bytes;
}

double PrefixStore::Price(const PrefixNode& node, const PrefixNode& before, const PrefixNode& paged,
                          RequestTime now) const {
  const PrefixEntry& entry = node.data;
  const double rate = law_.Rate({*entry.kind, entry.uses, entry.fresh}, now - entry.used);
  const double saved = costs_.Flops(node.depth()) - costs_.Flops(before.depth());
  return rate * saved / static_cast<double>(Bytes(node, paged));
}

double PrefixStore::Price(const PrefixNode& node, RequestTime now) const {
  return Price(node, Before(node), Paged(node), now);
}

// None is kept, so they have the same one before them, and what is behind the first without needs has none either.
std::vector<double> PrefixStore::Prices(std::span<const PrefixNode* const> way, RequestTime now) const {
  std::vector<double> prices;
  if (way.empty()) return prices;
  const PrefixNode& before = Before(*way.front());
  const PrefixNode* paged = nullptr;  // of those without needs
  for (const PrefixNode* node : way) {
    if (node->data.needs == 0 && paged == nullptr) paged = &Paged(*node);
    prices.push_back(Price(*node, before, node->data.needs == 0 ? *paged : *node, now));
  }
  return prices;
}

void PrefixStore::Put(PrefixNode& node) {
  bytes_ += Bytes(node, Paged(node));
  for (PrefixNode* at = &node; at->parent() != nullptr && ++at->data.needs == 1; at = at->parent()) {
  }
  node.data.kept = true;
  node.data.kept_place = kept_.size();
  kept_.push_back(&node);
}

void PrefixStore::Drop(PrefixNode& node) {
  bytes_ -= Bytes(node, Paged(node));
  for (PrefixNode* at = &node; at->parent() != nullptr && --at->data.needs == 0; at = at->parent()) {
  }
  node.data.kept = false;
  if (std::exchange(node.data.cheap, false)) {
    std::erase_if(cheap_, [&node](const Cheap& cheap) { return cheap.node == &node; });
  }
  PrefixNode* const last = kept_.back();
  kept_[node.data.kept_place] = last;
  last->data.kept_place = node.data.kept_place;
  kept_.pop_back();
}

PrefixNode* PrefixStore::CheapestOfAll(const PrefixNode* spared, RequestTime now, double& price) const {
  PrefixNode* cheapest = nullptr;
  price = std::numeric_limits<double>::infinity();
  for (PrefixNode* const node : kept_) {
    if (node == spared || node->data.leases > 0) continue;
    const double its = Price(*node, now);
    if (its >= price) continue;
    cheapest = node;
    price = its;
  }
  return cheapest;
}

void PrefixStore::DrawCheap(const PrefixNode* spared, RequestTime now) {
  const auto dearer = [](const Cheap& a, const Cheap& b) { return a.price < b.price; };
  std::erase_if(cheap_, [](const Cheap& cheap) {  // else they would be in the way of those that may go
    cheap.node->data.cheap = cheap.node->data.leases == 0;
    return !cheap.node->data.cheap;
  });
  for (size_t i = cheap_.size() < kCheap / 2 ? kSamples : kFresh; i > 0; --i) {
    PrefixNode* const node = kept_[random_() % kept_.size()];
    if (node == spared || node->data.leases > 0 || node->data.cheap) continue;
    const Cheap drawn{Price(*node, now), node};
    if (cheap_.size() < kCheap) {
      cheap_.push_back(drawn);
    } else {
      Cheap& dearest = *std::max_element(cheap_.begin(), cheap_.end(), dearer);
      if (drawn.price >= dearest.price) continue;
      dearest.node->data.cheap = false;
      dearest = drawn;
    }
    node->data.cheap = true;
  }
}

PrefixNode* PrefixStore::Cheapest(const PrefixNode* spared, RequestTime now, double& price) {
  if (kept_.size() <= kSamples) return CheapestOfAll(spared, now, price);
  DrawCheap(spared, now);
  PrefixNode* seen = nullptr;
  while (true) {  // until the cheapest is what it was said to be; each is looked at once, or gets no dearer
    Cheap* cheapest = nullptr;
    for (Cheap& cheap : cheap_) {
      if (cheapest == nullptr || cheap.price < cheapest->price) cheapest = &cheap;
    }
    price = cheapest == nullptr ? std::numeric_limits<double>::infinity() : cheapest->price;
    if (cheapest == nullptr || cheapest->node == seen) return seen;
    seen = cheapest->node;
    cheapest->price = Price(*seen, now);
  }
}

double PrefixStore::LeastPrice(RequestTime now) {
  if (bytes_ + costs_.checkpoint_bytes + costs_.page_bytes <= capacity_) return 0;
  double price = 0;
  Cheapest(nullptr, now, price);
  return price;
}

// It is put there first, so that the pages before it count as needed; until it fits, the sum may pass the capacity on
// paper, and never does when this returns.
bool PrefixStore::Admit(PrefixNode& node, RequestTime now) {
  if (Bytes(node, Paged(node)) > capacity_) {
    ++refusals_;
    return false;
  }
  const double worth = Price(node, now);
  std::vector<PrefixNode*> gone;
  double price = 0, paid = going_price_;
  Put(node);
  while (bytes_ > capacity_) {
    PrefixNode* const cheapest = Cheapest(&node, now, price);
    if (cheapest == nullptr || price >= worth) break;
    paid = paid * kPriceMemory + price * (1 - kPriceMemory);
    Drop(*cheapest);
    gone.push_back(cheapest);
  }
  if (bytes_ > capacity_) {
    Drop(node);
    for (auto back = gone.rbegin(); back != gone.rend(); ++back) Put(**back);
    ++refusals_;
    return false;
  }
  going_price_ = paid;
  evictions_ += gone.size();
  peak_bytes_ = std::max(peak_bytes_, bytes_);
  for (PrefixNode* const dropped : gone) {
    if (gone_) gone_(*dropped);
  }
  return true;
}

}  // namespace ashlar::storage
