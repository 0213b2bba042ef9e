// SPDX-License-Identifier: Apache-2.0
// CheckpointPrices: what a checkpoint takes, and what it is worth.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "storage/policy/reuse_model.h"
#include "storage/prefix/prefix_entry.h"

namespace ashlar::storage {

// The price is the FLOPs that a checkpoint saves, per byte that evicting it would free, per expected request. It saves
// the FLOPs since the previous kept checkpoint, from which a prompt would resume otherwise. Evicting it frees its
// states, and the pages that no deeper checkpoint needs. There is no joint price for all checkpoints and pages of a
// text.
class CheckpointPrices {
 public:
  CheckpointPrices(const PrefixCosts& costs, const ReuseModel& model) : costs_(costs), model_(model) {}

  const PrefixCosts& costs() const { return costs_; }
  // The deepest kept prefix before it, or the root.
  static const PrefixNode& Before(const PrefixNode& node);
  uint64_t StateBytes(const PrefixNode& node) const { return costs_.StateBytes(node.depth()); }
  // The bytes that keeping the checkpoint takes or evicting it frees. A page in which an edge begins belongs to that
  // edge completely, because its first part may belong to another prompt's tail.
  uint64_t Bytes(const PrefixNode& node) const { return Bytes(node, Paged(node)); }
  // The FLOPs that the checkpoint saves, per byte that it takes.
  double Worth(const PrefixNode& node) const { return Worth(node, Before(node), Paged(node)); }
  // The price of a checkpoint, kept or not: FLOPs per byte per request.
  double Price(const PrefixNode& node, RequestTime now) const { return Price(node, Before(node), Paged(node), now); }
  // The prices of several checkpoints on one path, by depth. None of them is kept, nor any checkpoint between them. One
  // pass over the path.
  std::vector<double> Prices(std::span<const PrefixNode* const> way, RequestTime now) const;
  double Rate(const ReuseModel::Class& model, uint32_t idle) const { return model_.Rate(model, idle); }

 private:
  static const PrefixNode& Paged(const PrefixNode& node);
  uint64_t Bytes(const PrefixNode& node, const PrefixNode& paged) const;
  double Worth(const PrefixNode& node, const PrefixNode& before, const PrefixNode& paged) const;
  double Price(const PrefixNode& node, const PrefixNode& before, const PrefixNode& paged, RequestTime now) const;

  const PrefixCosts costs_;
  const ReuseModel& model_;
};

}  // namespace ashlar::storage
