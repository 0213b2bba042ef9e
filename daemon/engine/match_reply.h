// SPDX-License-Identifier: Apache-2.0
// MatchReplyWriter: writes matches into a reply that always fits a message.
#pragma once

#include <cstddef>

#include "proto/limits.h"
#include "proto/object.h"
#include "storage/cache.h"

namespace ashlar::v1 {
class PromptMatch;
}  // namespace ashlar::v1

namespace ashlar::daemon {

// Writes the matches of one call. A hit lists a run of extents for every fragment of its object, and one prompt may hit
// one object thousands of times, so the hits of a call get a budget of encoded bytes. The first hit beyond the budget
// and all behind it are answered as misses with kBusy; the lease, if there is one, stays as the cache made it.
class MatchReplyWriter {
 public:
  // The bytes that a message has left for hits beside every prompt's own fields and a miss for every other segment.
  static constexpr size_t kMaxDepths = limits::kMaxCheckpointsPerCommit;  // to resume from, or to capture at
  static constexpr size_t kPromptBytes = 64 + 2 * kMaxDepths * sizeof(uint32_t), kMissBytes = 8;
  static constexpr size_t kHitBudget =
      limits::kMaxReplyBytes - limits::kMaxPromptsPerCall * kPromptBytes - limits::kMaxLookupsPerMatch * kMissBytes;

  explicit MatchReplyWriter(size_t hit_budget = kHitBudget) : budget_left_(hit_budget) {}

  // Returns whether there is room for this hit, and takes the room. After one hit without room every later one is
  // refused.
  bool Take(const storage::Found& hit);
  // Writes a match whose hits have all been taken, from its object number `written` on, a step for each. A prefix that
  // is not whole is answered as none. False: there is more.
  static bool Write(const storage::Match& match, size_t& written, storage::Slice& slice, v1::PromptMatch* out);

 private:
  size_t budget_left_;
};

static_assert(MatchReplyWriter::kHitBudget > limits::kMaxReplyBytes / 4 * 3, "a reply has room for hits");
static_assert(limits::kMaxSegments * MatchReplyWriter::kMissBytes + MatchReplyWriter::kPromptBytes +
                      limits::kMaxObjectsPerLanding * 2 + 64 <=
                  limits::kMaxReplyBytes - MatchReplyWriter::kHitBudget,
              "a LookupAndLand's one prompt leaves room for its verdict beside its hits");

}  // namespace ashlar::daemon
