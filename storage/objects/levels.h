// SPDX-License-Identifier: Apache-2.0
// Levels: the tiers of a node as levels, top to bottom, and where among them an object's copies are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "proto/outcome.h"
#include "storage/objects/entry.h"
#include "storage/objects/level.h"
#include "storage/observer.h"
#include "storage/policy/eviction.h"
#include "storage/policy/promotion.h"
#include "storage/policy/reuse_models.h"
#include "storage/tier/tiers.h"

namespace ashlar::storage {

// Memory tiers come first, with the tiers of several GPUs at the top, as siblings; then the disk; then other nodes,
// which are a level for copies and have no `Level`.
class Levels {
 public:
  static constexpr size_t kNowhere = SIZE_MAX;

  // `uses`: the cheapest copy is evicted first; null: the least recently used one. `costs` of loading, by tenant.
  Levels(const Tiers& tiers, const ReuseModels* uses, const PromotionCosts& costs, Observer& observer);

  size_t size() const { return levels_.size(); }            // levels of this node
  size_t sibling_count() const { return sibling_count_; }   // number of sibling levels at the top
  size_t below_siblings() const { return sibling_count_; }  // index of the level below the siblings
  size_t memory() const { return memory_; }                 // levels that engines can map
  size_t common() const { return common_; }                 // the level of sessions that do not choose one
  size_t disk() const { return disk_level_; }               // kNowhere: this node has no disk
  size_t remote() const { return levels_.size(); }
  size_t Below(size_t level) const { return level < sibling_count_ ? sibling_count_ : level + 1; }
  bool IsDisk(size_t level) const { return level == disk_level_; }
  TierKind kind(size_t level) const { return level == remote() ? TierKind::kRemote : levels_[level]->kind(); }

  Level& operator[](size_t level) { return *levels_[level]; }
  const Tier& TierAt(size_t level) const { return levels_[level]->tier(); }
  SsdTier* ssd() const { return ssd_; }             // null: none
  RemoteSource* source() const { return source_; }  // source of other nodes' copies; null: none
  PoolShares pools() const;

  // The nearest readable copy of an object; kNone: there is none yet. `NearestTo` a level: at the level, below it, or
  // elsewhere.
  TierKind Nearest(const Entry& entry) const;
  TierKind NearestTo(const Entry& entry, size_t level) const;
  // The level from which the object is sent to another node: the common level, or a GPU's if only a GPU has a whole
  // copy.
  size_t LevelToSendFrom(const Entry& entry) const;
  // The nearest lower level from which a copy at this level can be read, or another GPU's with a whole copy; kNowhere
  // if there is none.
  size_t SourceBelow(const Entry& entry, size_t level) const;
  // The nearest lower tier that keeps a whole copy; otherwise kRemote if a peer keeps one, and kNone if none does. A
  // peer may evict its copy at any time without notice. Its copy therefore counts only while it is leased for this
  // node, after the peer has accepted the object in a drain, or after this node has fetched the object and until a
  // lookup finds it here again.
  TierKind Lower(const Entry& entry, size_t level) const;
  size_t OnAnotherGpu(const Entry& entry, size_t level) const;
  static bool IsCopiedFrom(const Entry& entry, size_t level, size_t source);
  static bool IsCopiedFromBelow(const Entry& entry, size_t level);
  // The tiers that have a whole copy, top to bottom, of a published object; empty for null.
  std::vector<TierKind> TiersOf(const Entry* entry) const;
  // Returns whether the disk has a copy or a part of one.
  bool OnDisk(const Entry& entry) const;

  // Returns whether the copy at the level comes from a disk that is stalled.
  bool IsStalled(const Entry& entry, size_t level) const;
  // Returns whether only a stalled disk has the object.
  bool OnStalledDiskAlone(const Entry& entry) const;
  // Returns why the missing rest of a copy will not arrive: the object is gone, or the disk is stalled. kNone: it will
  // arrive, or nothing is missing.
  MissReason Lost(const Entry& entry, size_t level) const;

  // Records a use: the object's copies become the most recent ones of their levels.
  void Touch(Entry& entry);

 private:
  const size_t sibling_count_, common_, memory_;
  SsdTier* const ssd_;
  const size_t disk_level_;
  RemoteSource* const source_;
  std::vector<std::unique_ptr<EvictionPolicy>> policies_;
  std::vector<std::unique_ptr<Level>> levels_;
};

}  // namespace ashlar::storage
