// SPDX-License-Identifier: Apache-2.0
// LandUnder: lands an object at a test node and compares every byte.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "daemon/peer/testing/peer_node.h"
#include "storage/testing/engine.h"

namespace ashlar::daemon {

// Lands a match's first object in host memory, and releases the match.
inline MissReason LandUnder(PeerNode& node, const storage::Match& match, const ObjectHeader& plan, uint64_t text) {
  const storage::TestPages pages(storage::TestPages::Holding(plan.tokens + 100));
  const std::vector<MissReason> verdict = node.Land(match.lease, storage::TestTarget(pages, {{0, 100}}));
  if (verdict[0] == MissReason::kNone) {
    EXPECT_LT(storage::LandingError(pages, plan, text, 100), 1e-4);
    EXPECT_EQ(storage::TupleError(*node.tier, *match.found[0].slot, *match.found[0].header, text), 0.0);
  }
  node.Release(match.lease);
  return verdict[0];
}

}  // namespace ashlar::daemon
