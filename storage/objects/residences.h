// SPDX-License-Identifier: Apache-2.0
// Residences: reports where the objects of this node are.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>

#include "proto/object.h"
#include "proto/outcome.h"
#include "storage/objects/entry.h"
#include "storage/objects/object_index.h"
#include "storage/slice.h"

namespace ashlar::storage {

// Where an object of this node is.
struct Residence {
  TierKind nearest = TierKind::kNone;    // the first tier that has a whole copy; kNone: no tier has one
  bool saved = false;                    // a disk has a whole copy
  uint32_t uses = 0;                     // number of lookups that found it
  TierKind announced = TierKind::kNone;  // what the last call returned
  TierKind was = TierKind::kNone;        // `nearest` at the last call
  uint8_t level = 0, was_level = 0;      // index of `nearest` and of `was` in Tiers::memory: each GPU has a tier
};

// The progress of a walk through all objects that reports their residences again.
struct ReportWalk {
  bool lost = false;             // the other side has lost the earlier reports
  ObjectId after = 0, last = 0;  // the last object reported, and the last one to report; 0: the walk has not begun
};

// Called when the nearest tier of an object changes, when a disk has a copy of it, and when it is found for the second
// time. Returns what it has announced: kNone, or the tier. Must not call the cache. May be empty.
using ReportResidence = std::function<TierKind(const TenantPool&, const ObjectHeader&, const Residence&)>;

class Residences {
 public:
  static constexpr uint32_t kReportedUses = 2;  // uses after which an object is reported again

  // The index must outlive this object.
  Residences(ReportResidence report, const ObjectIndex& index) : report_(std::move(report)), index_(index) {}

  void Report(Entry& entry) const;
  // Reports all objects again, one slice at a time. False: call again.
  bool ReportAll(ReportWalk& walk, Slice& slice) const;

 private:
  const ReportResidence report_;
  const ObjectIndex& index_;
};

}  // namespace ashlar::storage
