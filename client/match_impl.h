// What is behind a Match: the daemon's answer, checked, and mapped.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "client/client.h"
#include "client/connection.h"
#include "client/deadline.h"
#include "client/mapped_object.h"
#include "client/process_bound.h"

namespace ashlar::v1 {
class PromptMatch;
}

namespace ashlar {

struct Match::Impl {
  // Every segment a miss.
  static std::unique_ptr<Impl> Missed(std::span<const uint64_t> segment_lengths, MissReason reason);
  // What the daemon answered for a prompt of these segments. Maps what was hit; what cannot be mapped, or is not what
  // was asked for, becomes a miss.
  static std::unique_ptr<Impl> Answered(const v1::PromptMatch& answer,
                                        const std::shared_ptr<internal::Connection>& connection, const Layout& layout,
                                        const NamespaceId& ns, std::span<const uint64_t> segment_lengths,
                                        internal::Deadline deadline);

  std::shared_ptr<internal::Connection> connection;  // null: nothing was found
  std::shared_ptr<internal::LeaseHold> lease;        // null: nothing is held (any more)
  NamespaceId ns;
  uint64_t prefix_depth = 0;
  std::vector<uint64_t> checkpoint_positions;
  std::vector<SegmentResult> segments;
  std::vector<std::unique_ptr<internal::MappedObject>> objects;  // one a segment; null for a miss
  internal::Birthplace birthplace;
};

}  // namespace ashlar
