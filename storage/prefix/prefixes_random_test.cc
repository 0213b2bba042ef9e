// SPDX-License-Identifier: Apache-2.0
// Exact prefixes under random calls and completions, disk errors, engine deaths and power cuts: landed bytes were
// computed for exactly these tokens, and composed states land only for their conversation.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <list>
#include <map>
#include <memory>
#include <random>
#include <tuple>
#include <utility>
#include <vector>

#include "storage/prefix/prefixes.h"
#include "storage/testing/offered_prefixes.h"
#include "storage/testing/prefix_engine.h"
#include "storage/testing/tiered_rig.h"
#include "storage/testing/tokens.h"

namespace ashlar::storage {
namespace {

class PrefixWorld {
 public:
  explicit PrefixWorld(uint64_t seed) : random_(seed), rig_(Options(seed)) { Open(); }

  void Run(int operations) {
    for (int i = 0; i < operations && !::testing::Test::HasFatalFailure(); ++i) {
      Step();
      for (const TenantId tenant : {1, 2}) {
        for (const Tier* tier : {static_cast<const Tier*>(rig_.hbm.get()), static_cast<const Tier*>(rig_.dram.get())}) {
          if (tier == nullptr) continue;
          ASSERT_LE(tier->Usage(tenant).used_bytes, tier->Usage(tenant).capacity_bytes);
        }
      }
    }
    rig_.disk.set_faults({});
    rig_.Settle();
    Judge();
    EXPECT_EQ(commits_, 0) << "every commit is answered";
    EXPECT_TRUE(landings_.empty()) << "and every landing";
    for (const SessionId session : sessions_) rig_.cache->CloseSession(session, [] {});
    rig_.Settle();
    EXPECT_EQ(rig_.cache->stats().leases, 0u);
    EXPECT_EQ(rig_.cache->stats().reservations, 0u);
  }

  uint64_t landed() const { return landed_; }
  uint64_t landed_own() const { return landed_own_; }
  uint64_t landed_spans() const { return landed_spans_; }

 private:
  struct Lease {
    SessionId session;
    Match match;
    Tokens prompt;
    ConversationId conversation;
  };
  struct Spanned {  // offered with a span
    ConversationId conversation;
    Tokens text;
    uint64_t begin;
  };
  struct Landing {
    std::unique_ptr<TestPages> pages;
    std::shared_ptr<Rig::Landing> landing;
    Lease* lease;
    SessionId session;
  };

  static TieredOptions Options(uint64_t seed) {
    std::mt19937_64 random(seed ^ 0x5EED);
    return {.hbm = random() % 2 == 0 ? 24 + random() % 16 : 0,
            .dram = 32 + random() % 32,
            .ssd = random() % 4 == 0 ? 0 : 48 + random() % 48,
            .seed = seed};
  }

  uint64_t Draw(uint64_t below) { return random_() % below; }
  static TenantId TenantOf(SessionId session) { return 1 + session % 2; }
  // Every third cannot rebuild from spans.
  static bool Rebuilds(SessionId session) { return session % 3 != 0; }
  const PrefixEngine& EngineOf(SessionId session) const {
    if (TenantOf(session) == 1) return Rebuilds(session) ? one_ : plain_one_;
    return Rebuilds(session) ? two_ : plain_two_;
  }
  const Tier& Top() const { return rig_.hbm != nullptr ? *rig_.hbm : *rig_.dram; }

  void Open() {
    sessions_.clear();
    for (int i = 0; i < 3; ++i) AddSession();
  }
  void AddSession() {
    sessions_.push_back(next_session_++);
    rig_.cache->OpenSession(sessions_.back(), TenantOf(sessions_.back()));
  }

  static constexpr int32_t kOther = 3;  // in no text that is drawn
  // Over three tokens, so that texts part and meet everywhere.
  Tokens AnyText() {
    Tokens text;
    if (!known_.empty()) text = known_[Draw(known_.size())];
    if (Draw(2) == 0) text.resize(Draw(text.size() + 1));
    for (uint64_t chunk = Draw(4); chunk > 0 || text.size() < 2; chunk -= chunk > 0 ? 1 : 0) {
      text.insert(text.end(), 40 + Draw(4) * 73, static_cast<int32_t>(Draw(3)));
    }
    if (text.size() > 900) text.resize(900);
    known_.push_back(text);
    if (known_.size() > 24) known_.erase(known_.begin());
    return text;
  }
  ConversationId AnyConversation() {
    return Draw(3) == 0 ? ConversationId{static_cast<uint8_t>(1 + Draw(3))} : ConversationId{};
  }

  void Step() {
    const uint64_t choice = Draw(1000);
    if (choice < 150) {
      Ask();
    } else if (choice < 270) {
      Commit();
    } else if (choice < 370) {
      Land();
    } else if (choice < 450) {
      Release();
    } else if (choice < 455) {
      Die();
    } else if (choice < 457) {
      Crash();
    } else if (choice < 475) {
      rig_.disk.set_faults(Draw(2) == 0
                               ? SimulatedDisk::Faults{}
                               : SimulatedDisk::Faults{.read_error = 0.05, .write_error = 0.05, .bit_flip = 0.05});
    } else if (choice < 490) {
      rig_.clock.Advance(1'000'000'000);
      rig_.cache->Tick();
    } else if (choice < 510) {
      rig_.Settle();
    } else if (ManualExecutor& executor = Draw(3) == 0 ? rig_.io : rig_.executor; executor.pending() > 0) {
      executor.Complete(Draw(executor.pending()));
    }
    Judge();
  }

  void Ask() {
    Lease lease{.session = sessions_[Draw(sessions_.size())], .prompt = AnyText(), .conversation = AnyConversation()};
    if (!talks_.empty() && Draw(3) == 0) {  // a conversation goes on
      std::tie(lease.conversation, lease.prompt) = talks_[Draw(talks_.size())];
      lease.prompt.insert(lease.prompt.end(), 1 + Draw(50), static_cast<int32_t>(Draw(3)));
    } else if (!spanned_.empty() && Draw(2) == 0) {  // an answer is given once more, from somewhere inside
      const Spanned& answer = spanned_[Draw(spanned_.size())];
      lease.conversation = answer.conversation;
      lease.prompt = answer.text;
      lease.prompt.resize(answer.begin + 1 + Draw(answer.text.size() - answer.begin));
      lease.prompt.push_back(kOther);
    }
    lease.match =
        rig_.cache->Lookup(lease.session, {}, EngineOf(lease.session).Text(lease.prompt, lease.conversation), nullptr);
    const MatchedPrefix& prefix = lease.match.prefix;
    if (prefix.depth > 0) {
      ASSERT_LT(prefix.depth, lease.prompt.size());
      ASSERT_TRUE(offered_[TenantOf(lease.session)].Has(prefix, lease.prompt, lease.conversation))
          << "no session committed it, or another conversation did";
      const uint64_t checkpoint = prefix.checkpoint_depth();
      ASSERT_EQ(prefix.objects.size(), checkpoint / 256 + (prefix.span_tokens > 0 ? 2 : 1));
      ASSERT_TRUE(prefix.span_tokens == 0 || Rebuilds(lease.session)) << "to an engine that cannot rebuild";
    }
    leases_.push_back(std::move(lease));
    if (leases_.back().match.prefix.span_tokens > 0 && Draw(2) == 0) Land(leases_.back());
  }

  void Commit() {
    SessionId session = sessions_[Draw(sessions_.size())];
    Tokens text = AnyText();
    ConversationId conversation = AnyConversation();
    Provenance provenance =
        conversation != ConversationId{} && Draw(2) == 0 ? Provenance::kComposed : Provenance::kExact;
    LeaseId name{};
    if (!leases_.empty() && Draw(2) == 0) {  // as an engine goes on from what it matched
      const Lease& lease = *std::next(leases_.begin(), static_cast<ptrdiff_t>(Draw(leases_.size())));
      session = lease.session;
      text = lease.prompt;
      conversation = lease.conversation;
      name = lease.match.lease;
      if (lease.match.prefix.depth > 0) provenance = lease.match.prefix.provenance;
      if (conversation == ConversationId{}) provenance = Provenance::kExact;
    }
    std::vector<uint64_t> depths;
    for (uint64_t depth = 1 + Draw(300); depth < text.size() && depths.size() < 4; depth += 1 + Draw(300)) {
      depths.push_back(depth);
    }
    uint64_t span = 0;  // from one of these depths on
    if (!depths.empty() && text.size() - depths.back() <= 256 && Draw(2) == 0) span = depths.back();
    PrefixCommit commit = EngineOf(session).Offer(text, 1 + Draw(text.size()), depths, conversation, span);
    commit.provenance = provenance;
    commit.lease = name;
    if (provenance == Provenance::kComposed) talks_.emplace_back(conversation, text);
    if (talks_.size() > 6) talks_.erase(talks_.begin());
    offered_[TenantOf(session)].Add(commit);
    if (span > 0) spanned_.push_back({conversation, text, span});
    if (spanned_.size() > 6) spanned_.erase(spanned_.begin());
    ++commits_;
    const size_t checkpoints = commit.checkpoints.size();
    rig_.cache->Commit(session, std::move(commit), [this, checkpoints](const std::vector<CommitOutcome>& outcomes) {
      EXPECT_EQ(outcomes.size(), checkpoints);
      --commits_;
    });
  }

  void Land() {
    if (!leases_.empty()) Land(*std::next(leases_.begin(), static_cast<ptrdiff_t>(Draw(leases_.size()))));
  }
  void Land(Lease& lease) {
    if (lease.match.prefix.depth == 0) return;
    Landing landing{.pages = std::make_unique<TestPages>(TestPages::Holding(lease.prompt.size())),
                    .lease = &lease,
                    .session = lease.session};
    landing.landing = rig_.StartLanding(lease.session, ++landing_ids_, lease.match.lease,
                                        PrefixEngine::Target(*landing.pages, lease.match.prefix));
    landings_.push_back(std::move(landing));
  }

  // Bytes of a whole landing are right, and stay so while the lease holds.
  void Judge() {
    for (auto next = landings_.begin(); next != landings_.end();) {
      const auto landing = next++;
      if (!landing->landing->verdict) continue;
      const auto& verdict = *landing->landing->verdict;
      const bool whole = std::ranges::all_of(verdict, [](MissReason reason) { return reason == MissReason::kNone; });
      if (whole && landing->lease != nullptr) {
        const Lease& lease = *landing->lease;
        ASSERT_EQ(EngineOf(lease.session).Error(*landing->pages, Top(), lease.match, lease.prompt), 0.0)
            << "bytes landed are not the bytes committed";
        ++landed_;
        landed_own_ += lease.match.prefix.own ? 1 : 0;
        landed_spans_ += lease.match.prefix.span_tokens > 0 ? 1 : 0;
      }
      landings_.erase(landing);
    }
  }

  void Erase(std::list<Lease>::iterator lease) {
    for (Landing& landing : landings_) {
      if (landing.lease == &*lease) landing.lease = nullptr;
    }
    leases_.erase(lease);
  }

  void Release() {
    if (leases_.empty()) return;
    const auto lease = std::next(leases_.begin(), static_cast<ptrdiff_t>(Draw(leases_.size())));
    rig_.cache->Release(lease->session, lease->match.lease);
    Erase(lease);
  }

  void Die() {
    const size_t i = Draw(sessions_.size());
    const SessionId session = sessions_[i];
    for (auto next = leases_.begin(); next != leases_.end();) {
      const auto lease = next++;
      if (lease->session == session) Erase(lease);
    }
    sessions_.erase(sessions_.begin() + static_cast<ptrdiff_t>(i));
    rig_.cache->CloseSession(session, [] {});
    AddSession();
  }

  void Crash() {
    landings_.clear();
    leases_.clear();
    commits_ = 0;
    rig_.disk.set_faults({});
    rig_.disk.Crash();
    rig_.Restart();
    Open();
  }

  std::mt19937_64 random_;
  TieredRig rig_;
  PrefixEngine one_{1, 1, 256}, two_{2, 1, 256}, plain_one_{1}, plain_two_{2};
  std::map<TenantId, OfferedPrefixes> offered_;
  std::vector<Tokens> known_;
  std::vector<std::pair<ConversationId, Tokens>> talks_;
  std::vector<Spanned> spanned_;
  std::vector<SessionId> sessions_;
  SessionId next_session_ = 1;
  std::list<Lease> leases_;
  std::list<Landing> landings_;
  LandingId landing_ids_ = 0;
  int commits_ = 0;
  uint64_t landed_ = 0, landed_own_ = 0, landed_spans_ = 0;
};

TEST(PrefixesRandomTest, LandsCommittedBytes) {
  const char* const given = std::getenv("ASHLAR_PREFIXES_SEED");
  const uint64_t first = given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device()();
  std::printf("ASHLAR_PREFIXES_SEED=%llu\n", static_cast<unsigned long long>(first));  // a crash tells nothing else
  std::fflush(stdout);
  uint64_t landed = 0, landed_own = 0, landed_spans = 0;
  // Of some seeds hardly an answer is kept as a span: then a few more are run.
  for (uint64_t seed = first; seed < first + 6 || (landed_spans <= 5 && seed < first + 40); ++seed) {
    SCOPED_TRACE(seed);
    PrefixWorld world(seed);
    world.Run(1500);
    if (::testing::Test::HasFailure()) return;
    landed += world.landed();
    landed_own += world.landed_own();
    landed_spans += world.landed_spans();
  }
  EXPECT_GT(landed, 100u);
  EXPECT_GT(landed_own, 5u);
  EXPECT_GT(landed_spans, 5u);
}

}  // namespace
}  // namespace ashlar::storage
