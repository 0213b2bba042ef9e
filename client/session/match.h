// SPDX-License-Identifier: Apache-2.0
// Prompt, and Match, the result of its lookup.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "client/session/connection.h"
#include "client/session/deadline.h"
#include "client/session/landing.h"
#include "client/session/mapped_object.h"
#include "client/session/mapped_tuple.h"
#include "client/session/process_bound.h"
#include "client/session/span.h"
#include "proto/key.h"
#include "proto/object.h"
#include "proto/outcome.h"
#include "proto/prefix.h"

namespace ashlar::v1 {
class PrefixMatch;
class PromptMatch;
}  // namespace ashlar::v1

namespace ashlar {

// One prompt: consecutive segments from position 0. The first segment is a prefix (cached whole); the others are
// position-independent. Tokens after the last segment (the query) are always computed.
struct Prompt {
  std::span<const int32_t> tokens;
  std::span<const uint64_t> segment_lengths;
  // For Lookup: the time until the engine will need the hits, for example because the request waits for its turn; at
  // most limits::kMaxNeededInNanos. Objects of lower tiers are promoted meanwhile, after objects that are needed
  // earlier. The match is valid as long as the engine holds it.
  std::chrono::nanoseconds needed_in{0};
  // For Lookup, with PrefixUse: chosen at random by the engine. The prompt may resume from this conversation's own
  // states. All zero: none.
  ConversationId conversation{};
  // The prompt's multimodal inputs, by their content's hashes; at most limits::kMaxMedia. A daemon of protocol 2 does
  // not support media: a prompt with media then misses everything (kInvalidRequest), and its runs are not reserved.
  std::span<const MediaHash> media;
  // Prompts with different salts (MakeSalt) share nothing, nor do prompts with and without a salt. A daemon of protocol
  // 3 does not support salts: a prompt with a salt then misses everything (kInvalidRequest), and its runs are not
  // reserved.
  Salt salt;
};

struct SegmentResult {
  MissReason reason = MissReason::kNeverSeen;  // kNone: hit
  TierKind tier = TierKind::kNone;
  ObjectKind kind = ObjectKind::kSegment;
  uint64_t start = 0;  // position of the segment's token 0 in the prompt
  uint64_t tokens = 0;
  uint64_t bytes = 0;  // bytes of the cached object
  bool hit() const { return reason == MissReason::kNone; }
  bool remote() const { return tier == TierKind::kRemote; }
};

// The prefix of a prompt to resume from, beyond its first segment: the one that saves most together with the segments
// after it. It covers segments whose interiors begin before its end. It may end inside the head of the next segment,
// hit or missed; then only the rest of that head is computed.
struct PrefixResult {
  uint64_t depth = 0;  // tokens; 0: no prefix
  Provenance provenance = Provenance::kExact;
  TierKind tier = TierKind::kNone;  // the slowest tier that a part of the prefix is in
  bool own = false;                 // whether it belongs to the prompt's conversation
  uint64_t bytes = 0;               // bytes of all its objects
  // Number of its first blocks of keys and values (PrefixBlockTokens) that requests can share (Model::Admit). 0 with
  // daemons before protocol 5.
  uint32_t blocks = 0;
  // The number of the depth's last tokens that the states must still run through: prefix_states() are the states before
  // these tokens, and prefix_span() has the tokens' inputs. Keys and values land up to `depth`. 0: prefix_states() are
  // at `depth`.
  uint32_t span_tokens = 0;
};

// The result of a lookup, under a lease. The lease ends when the Match is destroyed or Release is called, and no
// landing of it is in progress; the daemon is told in the background. Threads may share a Match except for Release and
// destruction.
class Match {
 public:
  uint64_t prefix_depth() const { return prefix_depth_; }  // depth of the prefix, or else of the first segment
  const std::vector<uint64_t>& checkpoint_positions() const { return checkpoint_positions_; }
  const std::vector<SegmentResult>& segments() const { return segments_; }
  const PrefixResult& prefix() const { return prefix_; }
  // Depths that could have been chosen for the prefix, ascending. If there are very many, only the deepest.
  const std::vector<uint64_t>& resumable() const { return resumable_; }

  // Tuples of a hit segment, one entry per layer of the layout (empty views for attention layers). Mapping costs
  // microseconds, whatever the size. Null for a miss, and after Release.
  const std::vector<MappedTuple>* tuples(size_t segment) const;
  // The states to resume from after the prefix: heads of form kZero, position 0. Null without a prefix, or if they can
  // no longer be read.
  const std::vector<MappedTuple>* prefix_states() const;
  // The span's inputs to run through these states, if prefix().span_tokens > 0; otherwise null.
  const MappedSpan* prefix_span() const;
  // Call it after reading tuples in place. True: the session that holds the lease has not ended, so the bytes that a
  // landing verified have not changed. False: the bytes read may belong to other objects, so compute instead; also
  // false after Release, and if nothing was found. It costs one system call. valid() does not detect the end of a match
  // that was never landed.
  bool valid() const;

  // 16 bytes from which another process of the same tenant makes its own Match (Model::Attach).
  std::string lease() const;
  void Release();

 private:
  friend class Model;
  Match() = default;
  // Returns a match in which every segment is a miss.
  static Match Missed(std::span<const uint64_t> segment_lengths, MissReason reason);
  // Maps the hits in the daemon's answer for a prompt of these segments. A hit that cannot be mapped, or that is not
  // the requested object, becomes a miss.
  static Match Answered(const v1::PromptMatch& answer, const std::shared_ptr<internal::Connection>& connection,
                        const Layout& layout, const NamespaceId& ns, std::span<const uint64_t> segment_lengths,
                        internal::Deadline deadline);

  // The prefix that the daemon answered, unless it cannot be mapped.
  void TakePrefix(const v1::PrefixMatch& answer, const Layout& layout, internal::Deadline deadline);
  // The numbers in the lease of the objects that a landing of this segment names; or why it cannot be landed.
  struct Objects {
    MissReason reason = MissReason::kNone;
    std::vector<uint32_t> numbers;
  };
  Objects ObjectsOf(const LandSegment& segment) const;
  // Returns the object with the tuples of a segment of the match, or null.
  std::shared_ptr<internal::MappedObject> TuplesIn(uint32_t segment) const;
  // Lists everything that can be landed, with its position in the prompt: the prefix, then the hit segments.
  std::vector<LandSegment> WhatToLand() const;
  // Returns the index in WhatToLand() of each object that the daemon reported as a hit (segments, then the prefix's).
  // Nothing if one of these objects could not be mapped.
  std::optional<std::vector<size_t>> PlacesOf(const v1::PromptMatch& answer) const;
  // The tuples of a mapped object, or null if they can no longer be read.
  const std::vector<MappedTuple>* TuplesOf(const internal::MappedObject* object) const;

  std::shared_ptr<internal::Connection> connection_;  // null: nothing was found
  std::shared_ptr<internal::LeaseHold> lease_;        // null: nothing is held
  NamespaceId ns_;
  uint64_t prefix_depth_ = 0;
  std::vector<uint64_t> checkpoint_positions_;
  std::vector<SegmentResult> segments_;
  std::vector<std::shared_ptr<internal::MappedObject>> objects_;  // one object per segment; null for a miss
  PrefixResult prefix_;
  std::vector<uint64_t> resumable_;
  std::shared_ptr<internal::MappedObject> checkpoint_;  // the prefix's states; null: no prefix
  std::unique_ptr<internal::MappedObject> span_;        // null: no span
  // Object numbers in the lease. kPrefix, which is never such a number, means none.
  std::vector<uint32_t> block_numbers_;
  uint32_t checkpoint_number_ = LandSegment::kPrefix;
  uint32_t span_number_ = LandSegment::kPrefix;
  internal::CreatorProcess creator_;
};

}  // namespace ashlar
