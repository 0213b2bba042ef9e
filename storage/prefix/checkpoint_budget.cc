// SPDX-License-Identifier: Apache-2.0
#include "storage/prefix/checkpoint_budget.h"

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

namespace ashlar::storage {

void CheckpointBudget::Lease(PrefixNode& node) {
  ++node.data.leases;
  kept_.NoteHeld(node);
}

void CheckpointBudget::Release(PrefixNode& node) {
  --node.data.leases;
  kept_.NoteHeld(node);
}

void CheckpointBudget::ReduceLimit() {
  limit_ = std::max(bytes_, capacity_ / kLeastShare);
}

void CheckpointBudget::RaiseLimit() {
  limit_ = std::min(capacity_, limit_ + capacity_ / kStep);
}

void CheckpointBudget::Put(PrefixNode& node) {
  bytes_ += prices_.Bytes(node);
  if (const KeptSpan* const span = node.data.span.get()) {
    span->base->data.hanging.push_back(&node);
    kept_.NoteHeld(*span->base);
    ++spans_;
    saved_bytes_ += prices_.StateBytes(node) - std::min(prices_.StateBytes(node), span->bytes);
  } else {
    for (PrefixNode* at = &node; at->parent() != nullptr && ++at->data.needs == 1; at = at->parent()) {
    }
  }
  kept_.Add(node);
}

void CheckpointBudget::Drop(PrefixNode& node) {
  Remove(node);
  node.data.span.reset();
}

void CheckpointBudget::Remove(PrefixNode& node) {
  bytes_ -= prices_.Bytes(node);
  if (const KeptSpan* const span = node.data.span.get()) {
    std::erase(span->base->data.hanging, &node);
    kept_.NoteHeld(*span->base);
    --spans_;
    saved_bytes_ -= prices_.StateBytes(node) - std::min(prices_.StateBytes(node), span->bytes);
  } else {
    for (PrefixNode* at = &node; at->parent() != nullptr && --at->data.needs == 0; at = at->parent()) {
    }
  }
  kept_.Remove(node);
}

double CheckpointBudget::LeastPrice(RequestTime now) {
  if (bytes_ + prices_.costs().checkpoint_bytes + prices_.costs().page_bytes <= limit_) return 0;
  double price = 0;
  kept_.Cheapest(nullptr, now, price);
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
  if (prices_.Bytes(node) > limit_) {
    ++refusals_;
    return false;
  }
  const double worth = prices_.Price(node, now);
  std::vector<PrefixNode*> gone;
  double price = 0, paid = going_price_;
  Put(node);
  while (bytes_ > limit_) {
    PrefixNode* const cheapest = kept_.Cheapest(&node, now, price);
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
