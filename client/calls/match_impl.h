// SPDX-License-Identifier: Apache-2.0
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
  // The numbers in the lease of the objects that a landing of this segment names; or why it cannot be landed.
  struct Objects {
    MissReason reason = MissReason::kNone;
    std::vector<uint32_t> numbers;
  };
  Objects ObjectsOf(const LandSegment& segment) const;
  // Returns the object that has the tuples of a segment of the match; null: there is none.
  std::shared_ptr<internal::MappedObject> TuplesIn(uint32_t segment) const;
  // Lists all that can be landed, each at its position in the prompt: the prefix, then the hit segments.
  std::vector<LandSegment> WhatToLand() const;
  // Returns the index in WhatToLand() of each object that the daemon answered as a hit (segments, then the prefix's).
  // Nothing if one of these objects could not be mapped.
  std::optional<std::vector<size_t>> PlacesOf(const v1::PromptMatch& answer) const;
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
  std::shared_ptr<internal::MappedObject> checkpoint;  // the prefix's states; null: no prefix
  std::unique_ptr<internal::MappedObject> span;        // null: there is none
  // Numbers in the lease. kPrefix, which no lease has, stands for none.
  std::vector<uint32_t> block_numbers;
  uint32_t checkpoint_number = LandSegment::kPrefix;
  uint32_t span_number = LandSegment::kPrefix;
  internal::CreatorProcess creator;
};

}  // namespace ashlar
