// SPDX-License-Identifier: Apache-2.0
// PrefixesTest: the fixture of the tests of exact prefixes, a cache of three tiers and engines of two tenants.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "storage/prefix/prefixes.h"
#include "storage/testing/prefix_engine.h"
#include "storage/testing/tenants.h"
#include "storage/testing/tiered_rig.h"
#include "storage/testing/tokens.h"

namespace ashlar::storage {

inline constexpr uint64_t kBlock = 256;

inline ConversationId Conversation(uint8_t number) {
  return {number, 1};
}

class PrefixesTest : public ::testing::Test {
 protected:
  explicit PrefixesTest(const TieredOptions& options = {.hbm = 0, .dram = 256, .ssd = 0}) : rig_(options) { Open(); }

  void Open() {
    rig_.cache->OpenSession(kAnn, 1);
    rig_.cache->OpenSession(kBob, 1);
    rig_.cache->OpenSession(kEve, 2);
  }

  Match Ask(const Tokens& prompt, SessionId session = kAnn, const ConversationId& conversation = {},
            std::span<const Query> segments = {}) {
    const PrefixEngine& engine = session == kEve ? others_ : engine_;
    return rig_.cache->Lookup(session, segments, engine.Text(prompt, conversation), nullptr);
  }

  std::vector<CommitOutcome> Commit(PrefixCommit commit, SessionId session = kAnn) {
    std::vector<CommitOutcome> outcomes;
    rig_.cache->Commit(session, std::move(commit), [&](std::vector<CommitOutcome> o) { outcomes = std::move(o); });
    rig_.Settle();
    return outcomes;
  }

  // Lands a match's prefix and compares it; 0: everything is as it was committed.
  double Landed(const Match& match, const Tokens& prompt, SessionId session = kAnn) {
    const TestPages pages(TestPages::Holding(prompt.size()));
    const auto landing =
        rig_.StartLanding(session, ++landings_, match.lease, PrefixEngine::Target(pages, match.prefix));
    rig_.Settle();
    EXPECT_TRUE(landing->verdict);
    EXPECT_THAT(*landing->verdict, ::testing::Each(MissReason::kNone));
    return engine_.Error(pages, top(), match, prompt);
  }

  // Serves a request like an engine: captures what is requested, and commits all of it.
  uint64_t Serve(const Tokens& prompt, const Tokens& decoded = {}, const ConversationId& conversation = {}) {
    const Match match = Ask(prompt, kAnn, conversation);
    if (match.prefix.depth > 0) {
      EXPECT_EQ(Landed(match, prompt), 0.0);
    }
    PrefixCommit commit = engine_.Offer(Join(prompt, decoded), prompt.size(), match.prefix.checkpoint_at, conversation);
    commit.lease = match.lease;
    if (match.prefix.depth > 0) commit.provenance = match.prefix.provenance;
    Commit(std::move(commit));
    rig_.cache->Release(kAnn, match.lease);
    return match.prefix.depth;
  }

  const Tier& top() const { return rig_.hbm != nullptr ? *rig_.hbm : *rig_.dram; }

  TieredRig rig_;
  PrefixEngine engine_{1}, others_{2};
  LandingId landings_ = 0;
};

}  // namespace ashlar::storage
