// The implementation behind Match: the daemon's answer, checked, and mapped.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "ashlar/client.h"
#include "client/session/connection.h"
#include "client/session/deadline.h"
#include "client/session/mapped_object.h"
#include "client/session/process_bound.h"

namespace ashlar::v1 {
class PrefixMatch;
class PromptMatch;
}  // namespace ashlar::v1

namespace ashlar {

struct Match::Impl {
  // Makes a match in which every segment is a miss.
  static std::unique_ptr<Impl> Missed(std::span<const uint64_t> segment_lengths, MissReason reason);
  // Maps the hits in the daemon's answer for a prompt of these segments. A hit that cannot be mapped, or that is
  // another object than was asked for, becomes a miss.
  static std::unique_ptr<Impl> Answered(const v1::PromptMatch& answer,
                                        const std::shared_ptr<internal::Connection>& connection, const Layout& layout,
                                        const NamespaceId& ns, std::span<const uint64_t> segment_lengths,
                                        internal::Deadline deadline);

  // The prefix that the daemon answered, unless it cannot be mapped.
  void TakePrefix(const v1::PrefixMatch& answer, const Layout& layout, internal::Deadline deadline);
  // The lease's objects that a landing of this segment names, [first, last); or why it cannot be landed.
  struct Objects {
    MissReason reason = MissReason::kNone;
    uint32_t first = 0, last = 0;
  };
  Objects ObjectsOf(const LandSegment& segment) const;
  // Returns the object that has the tuples of a segment of the match; null: there is none.
  std::shared_ptr<internal::MappedObject> TuplesIn(uint32_t segment) const;
  // Lists all that can be landed, each at its position in the prompt: the prefix, then the hit segments.
  std::vector<LandSegment> WhatToLand() const;
  // Returns the index in WhatToLand() of each object that the daemon answered as a hit (segments, then the prefix's).
  // Nothing if one of these objects could not be mapped.
  std::optional<std::vector<size_t>> PlacesOf(const v1::PromptMatch& answer) const;
  // Returns the index in the lease of the prefix's states; without a prefix kPrefix, which is no lease's index.
  uint32_t CheckpointInLease() const {
    const uint32_t behind = span == nullptr ? 1 : 2;
    return prefix_objects == 0 ? LandSegment::kPrefix
                               : static_cast<uint32_t>(segments.size()) + prefix_objects - behind;
  }
  // The tuples of a mapped object, or null where they must not be read (any more).
  const std::vector<MappedTuple>* TuplesOf(const internal::MappedObject* object) const;

  std::shared_ptr<internal::Connection> connection;  // null: nothing was found
  std::shared_ptr<internal::LeaseHold> lease;        // null: nothing is held (any more)
  NamespaceId ns;
  uint64_t prefix_depth = 0;
  std::vector<uint64_t> checkpoint_positions;
  std::vector<SegmentResult> segments;
  std::vector<std::shared_ptr<internal::MappedObject>> objects;  // one a segment; null for a miss
  PrefixResult prefix;
  std::vector<uint64_t> resumable;
  uint32_t prefix_objects = 0;                         // in the lease, behind the segments
  std::shared_ptr<internal::MappedObject> checkpoint;  // among them, the last or before the span; null: no prefix
  std::unique_ptr<internal::MappedObject> span;        // the last of them; null: there is none
  internal::CreatorProcess creator;
};

}  // namespace ashlar
