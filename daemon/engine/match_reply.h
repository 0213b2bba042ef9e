// SPDX-License-Identifier: Apache-2.0
// MatchReplyWriter: writes matches into a reply of bounded size.
#pragma once

#include <cstddef>

#include "proto/limits.h"
#include "proto/object.h"
#include "storage/cache.h"

namespace ashlar::v1 {
class PromptMatch;
}  // namespace ashlar::v1

namespace ashlar::daemon {

// Writes the matches of one call. A hit lists the extents of every fragment of its object, and a prompt may hit one
// object thousands of times, so the hits of a call share a budget of encoded bytes. The first hit beyond the budget,
// and all later ones, become misses with kBusy. The lease stays as the cache made it.
class MatchReplyWriter {
 public:
  // The bytes of a message that remain for hits after the fixed fields of every prompt and a miss for every segment.
  // checkpoints to resume from, and depths to capture at
  static constexpr size_t kMaxDepths = limits::kMaxCheckpointsPerCommit;
  static constexpr size_t kPromptBytes = 64 + 2 * kMaxDepths * sizeof(uint32_t), kMissBytes = 8;
  static constexpr size_t kHitBudget =
      limits::kMaxReplyBytes - limits::kMaxPromptsPerCall * kPromptBytes - limits::kMaxLookupsPerMatch * kMissBytes;

  explicit MatchReplyWriter(size_t hit_budget = kHitBudget) : budget_left_(hit_budget) {}

  // Reserves space for a hit. Returns false without space, and then for every later hit.
  bool Take(const storage::Found& hit);
  // Writes a match whose hits were all accepted by Take, one step per object, starting at object `written`. An
  // incomplete prefix is reported as none. Returns false if more is left.
  static bool Write(const storage::Match& match, size_t& written, storage::Slice& slice, v1::PromptMatch* out);

 private:
  size_t budget_left_;
};

static_assert(MatchReplyWriter::kHitBudget > limits::kMaxReplyBytes / 4 * 3, "a reply has space for hits");
static_assert(limits::kMaxSegments * MatchReplyWriter::kMissBytes + MatchReplyWriter::kPromptBytes +
                      limits::kMaxObjectsPerLanding * 2 + 64 <=
                  limits::kMaxReplyBytes - MatchReplyWriter::kHitBudget,
              "a LookupAndLand reply has space for its verdict and its hits");

}  // namespace ashlar::daemon
