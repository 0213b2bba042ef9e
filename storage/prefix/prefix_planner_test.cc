// SPDX-License-Identifier: Apache-2.0
#include "storage/prefix/prefix_planner.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "proto/key.h"
#include "storage/testing/prefix_recount.h"
#include "storage/testing/tokens.h"

namespace ashlar::storage {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr PrefixCosts kTokenCosts{.page_tokens = 1, .page_bytes = 10, .checkpoint_bytes = 1000, .flops_per_token = 1};
constexpr PrefixCosts kPageCosts{.page_tokens = 16, .page_bytes = 160, .checkpoint_bytes = 1000, .flops_per_token = 1};
constexpr uint64_t kAmple = uint64_t{1} << 40;

// As an engine does that captures all it is asked for.
PrefixPlanner::Match Request(PrefixPlanner& planner, const Tokens& prompt, const Tokens& decoded = {}) {
  const PrefixPlanner::Match match = planner.Lookup(prompt);
  planner.Commit(match, Join(prompt, decoded), prompt.size(), match.checkpoint_at);
  return match;
}

TEST(PrefixPlannerTest, ResumesAConversationAtItsLastToken) {
  PrefixPlanner planner(kPageCosts, {.capacity_bytes = kAmple});
  Tokens conversation = Numbers(0, 77);
  for (int turn = 0; turn < 20; ++turn) {
    const Tokens decoded = Numbers(1000 * turn + 500, 13);
    const PrefixPlanner::Match match = Request(planner, conversation, decoded);
    if (turn > 0) {
      EXPECT_EQ(match.resume, conversation.size() - 5) << "where the answer ended, in the middle of a page";
      EXPECT_EQ(match.shared, match.resume);
    }
    conversation = Join(Join(conversation, decoded), Numbers(1000 * turn + 800, 5));
  }
  EXPECT_EQ(planner.budget().checkpoints(), 20u);
}

// An engine that cuts its prompts offers each step's end.
TEST(PrefixPlannerTest, APrefillStepsEndIsNotARequestsEnd) {
  PrefixPlanner planner(kPageCosts, {.capacity_bytes = kAmple});
  const Tokens prompt = Numbers(0, 96), other = Join(Numbers(0, 64), Numbers(500, 32));
  const auto kind = [&](const Tokens& text) {
    std::optional<ReuseKind> found;
    planner.tree().Walk(text, [&](const PrefixNode& node) {
      if (node.depth() == text.size()) found = node.data.kind;
    });
    return found;
  };
  const auto first = [](const Tokens& text, size_t count) { return Tokens(text.begin(), text.begin() + count); };
  planner.Commit(first(prompt, 32), prompt.size(), {});
  planner.Commit(prompt, prompt.size(), {});
  EXPECT_EQ(kind(first(prompt, 32)), ReuseKind::kPlaced);
  EXPECT_EQ(kind(prompt), ReuseKind::kRequestEnd);
  planner.Commit(other, other.size(), {});
  planner.Commit(first(other, 64), other.size(), {});
  EXPECT_EQ(kind(first(other, 64)), ReuseKind::kBranch) << "shared with an earlier prompt";
}

TEST(PrefixPlannerTest, OnlyTheLastEndOfAConversationCountsAsOne) {
  PrefixPlanner planner(kPageCosts, {.capacity_bytes = kAmple});
  const Tokens first = Numbers(0, 40), second = Join(first, Numbers(100, 30)), third = Join(second, Numbers(200, 20));
  const auto kind = [&](const Tokens& text) { return planner.tree().Walk(text).node->data.kind; };
  Request(planner, first);
  EXPECT_EQ(kind(first), ReuseKind::kRequestEnd);
  Request(planner, second);
  Request(planner, third);
  EXPECT_EQ(kind(first), ReuseKind::kContinued);
  EXPECT_EQ(kind(second), ReuseKind::kContinued);
  EXPECT_EQ(kind(third), ReuseKind::kRequestEnd);
  Request(planner, second);
  EXPECT_EQ(kind(second), ReuseKind::kRequestEnd) << "the last turn is asked again";
  EXPECT_EQ(kind(third), ReuseKind::kRequestEnd);
}

uint32_t UsesOf(const PrefixPlanner& planner, const Tokens& prefix) {
  return planner.tree().Walk(prefix).node->data.uses;
}

// Checkpoints of one text wear out together: what passes one of them counts for it, too.
TEST(PrefixPlannerTest, PassingAKeptCheckpointCountsAsAUse) {
  PrefixPlanner planner(kPageCosts, {.capacity_bytes = kAmple});
  const Tokens text = Numbers(0, 512), longer = Join(text, Numbers(1000, 48));
  for (int32_t question = 0; question < 2; ++question) Request(planner, Join(text, Numbers(-100 * question - 1, 9)));
  for (int32_t question = 2; question < 4; ++question) Request(planner, Join(longer, Numbers(-100 * question - 1, 9)));
  const uint32_t before = UsesOf(planner, text);
  EXPECT_EQ(Request(planner, Join(longer, Numbers(-1000, 9))).resume, longer.size());
  EXPECT_EQ(UsesOf(planner, text), before + 1);
}

// Of several missing checkpoints, the prompt would have used the one that is kept when there is space.
TEST(PrefixPlannerTest, TheMissingCheckpointThatIsWorthMostCountsAsUsed) {
  PrefixPlanner planner(kPageCosts, {.capacity_bytes = 1});
  const Tokens text = Numbers(0, 512), longer = Join(text, Numbers(1000, 6));  // a page more, which is partial
  for (int32_t question = 0; question < 2; ++question) Request(planner, Join(text, Numbers(-100 * question - 1, 9)));
  for (int32_t question = 2; question < 4; ++question) Request(planner, Join(longer, Numbers(-100 * question - 1, 9)));
  const uint32_t before = UsesOf(planner, text), longer_before = UsesOf(planner, longer);
  EXPECT_EQ(Request(planner, Join(longer, Numbers(-1000, 9))).resume, 0u);
  EXPECT_EQ(UsesOf(planner, text), before + 1);
  EXPECT_EQ(UsesOf(planner, longer), longer_before + 1) << "the deepest";
}

// Marconi's speculative insertion: what two prompts share is known when the second comes, and there for the third.
TEST(PrefixPlannerTest, TheSecondPromptRevealsABranch) {
  PrefixPlanner planner(kTokenCosts, {.capacity_bytes = kAmple});
  const Tokens instructions = Numbers(0, 300);
  const PrefixPlanner::Match first = Request(planner, Join(instructions, Numbers(1000, 50)));
  EXPECT_EQ(first.shared, 0u);
  EXPECT_EQ(first.lease, nullptr);
  const PrefixPlanner::Match second = Request(planner, Join(instructions, Numbers(2000, 50)));
  EXPECT_EQ(second.shared, 300u);
  EXPECT_EQ(second.resume, 0u);
  EXPECT_THAT(second.checkpoint_at, Contains(300u));
  const PrefixPlanner::Match third = Request(planner, Join(instructions, Numbers(3000, 50)));
  EXPECT_EQ(third.resume, 300u);
  EXPECT_THAT(third.checkpoint_at, ::testing::Each(::testing::Gt(300u)));
}

// Otherwise each prompt would leave a checkpoint of its own, without the uses of the others.
TEST(PrefixPlannerTest, PromptsThatDivergeAFewTokensApartUseOneCheckpoint) {
  PrefixPlanner planner(kTokenCosts, {.capacity_bytes = kAmple, .most_placed = 0});
  const Tokens text = Numbers(0, 4109);
  const auto ask = [&](size_t shared, int32_t question) {
    return Request(planner, Join(Tokens(text.begin(), text.begin() + shared), Numbers(-100 * question, 9)));
  };
  Request(planner, text);
  EXPECT_THAT(ask(4100, 1).checkpoint_at, ElementsAre(4096u));
  const PrefixPlanner::Match second = ask(4105, 2), third = ask(4099, 3);
  EXPECT_EQ(second.resume, 4096u);
  EXPECT_THAT(second.checkpoint_at, IsEmpty());
  EXPECT_EQ(third.resume, 4096u);
  EXPECT_EQ(UsesOf(planner, Tokens(text.begin(), text.begin() + 4096)), 2u);
  EXPECT_EQ(Request(planner, Join(text, Numbers(9000, 9))).resume, text.size()) << "conversations continue exactly";
}

// Documents of any length, asked about twice by short questions: from the second document on, the model of where
// prompts part puts a checkpoint close before the question, on the first visit.
TEST(PrefixPlannerTest, APlacedCheckpointHitsOnADocumentsSecondPrompt) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  PrefixPlanner planner(kTokenCosts, {.capacity_bytes = kAmple, .seed = seed});
  uint64_t resumed = 0, could = 0;
  for (int document = 0; document < 60; ++document) {
    const Tokens text = Numbers(10'000 * (document + 1), static_cast<int32_t>(2000 + random() % 5000));
    for (int question = 0; question < 2; ++question) {
      const auto length = static_cast<int32_t>(20 + random() % 4);
      const PrefixPlanner::Match match =
          Request(planner, Join(text, Numbers(-1000 * (2 * document + question + 1), length)));
      EXPECT_EQ(match.shared, question == 0 ? 0 : text.size());
      if (document < 20 || question == 0) continue;
      resumed += match.resume;
      could += text.size();
    }
  }
  EXPECT_GT(static_cast<double>(resumed) / static_cast<double>(could), 0.95);
}

// After one divergence, that of the instructions: where questions about a document diverge is not known yet.
TEST(PrefixPlannerTest, GuessesDivergencesWhileSpaceIsAmple) {
  for (const uint64_t capacity : {kAmple, uint64_t{128 * 8 * 1000}}) {
    SCOPED_TRACE(capacity);
    PrefixPlanner planner(kTokenCosts, {.capacity_bytes = capacity});
    const Tokens instructions = Numbers(0, 20), document = Join(instructions, Numbers(10'000, 5000));
    Request(planner, Join(instructions, Numbers(1000, 5000)));
    EXPECT_EQ(Request(planner, Join(document, Numbers(2000, 50))).shared, 20u);
    const PrefixPlanner::Match second = Request(planner, Join(document, Numbers(3000, 50)));
    EXPECT_EQ(second.shared, 5020u);
    if (capacity == kAmple) {
      EXPECT_GT(second.resume, 4500u);
    } else {
      EXPECT_LE(second.resume, 100u);
    }
  }
}

TEST(PrefixPlannerTest, PositionsAreWhereTheEngineCanCapture) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  PrefixPlanner planner(kTokenCosts, {.capacity_bytes = kAmple, .capture_tokens = 64, .seed = seed});
  const Tokens instructions = Numbers(0, 300);
  Request(planner, Join(instructions, Numbers(1000, 50)));
  EXPECT_THAT(Request(planner, Join(instructions, Numbers(2000, 50))).checkpoint_at, ElementsAre(256, 320))
      << "320 is guessed";
  EXPECT_EQ(Request(planner, Join(instructions, Numbers(3000, 50))).resume, 256u);
  for (int document = 0; document < 50; ++document) {
    const Tokens text = Numbers(10'000 * (document + 1), static_cast<int32_t>(500 + random() % 2000));
    for (int question = 0; question < 3; ++question) {
      const Tokens prompt = Join(text, Numbers(-1000 * (3 * document + question + 1), 30));
      for (const uint64_t at : Request(planner, prompt).checkpoint_at) EXPECT_EQ(at % 64, 0u);
    }
  }
}

TEST(PrefixPlannerTest, RequestsAtMostThePermittedCheckpoints) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  size_t most = 0;
  PrefixPlanner planner(kTokenCosts, {.capacity_bytes = kAmple, .most_checkpoints = 6, .most_placed = 4, .seed = seed});
  for (int i = 0; i < 400; ++i) {
    // Partings at many depths of one text, most of which were seen, and never computed.
    const Tokens prompt = Join(Numbers(0, static_cast<int32_t>(random() % 2000)), Numbers(5000 + 3000 * i, 2500));
    const PrefixPlanner::Match match = planner.Lookup(prompt);
    EXPECT_LE(match.checkpoint_at.size(), 6u);
    EXPECT_TRUE(std::is_sorted(match.checkpoint_at.begin(), match.checkpoint_at.end()));
    EXPECT_LE(std::count_if(match.checkpoint_at.begin(), match.checkpoint_at.end(),
                            [&](uint64_t at) { return at > match.shared; }),
              4);
    most = std::max(most, match.checkpoint_at.size());
    planner.Commit(match, prompt, prompt.size(), {});
  }
  EXPECT_EQ(most, 6u);
}

TEST(PrefixPlannerTest, LeasedPrefixStaysUntilRequestEnds) {
  // Space for one conversation's end.
  PrefixPlanner planner(kTokenCosts, {.capacity_bytes = 2500});
  const Tokens conversation = Numbers(0, 100);
  Request(planner, conversation);
  const PrefixPlanner::Match held = planner.Lookup(Join(conversation, Numbers(900, 10)));
  ASSERT_EQ(held.resume, 100u);
  for (int i = 1; i < 60; ++i) Request(planner, Numbers(1000 * i, 110));
  const PrefixPlanner::Match again = planner.Lookup(Join(conversation, Numbers(900, 10)));
  EXPECT_EQ(again.resume, 100u);
  planner.Release(held);
  planner.Release(again);
  for (int i = 60; i < 600; ++i) Request(planner, Numbers(1000 * i, 110));
  EXPECT_EQ(planner.Lookup(Join(conversation, Numbers(900, 10))).resume, 0u);
}

TEST(PrefixPlannerTest, OversizedCheckpointIsNeitherRequestedNorKept) {
  PrefixPlanner planner(kTokenCosts, {.capacity_bytes = 999});
  for (int i = 0; i < 10; ++i) {
    const PrefixPlanner::Match match = planner.Lookup(Join(Numbers(0, 50), Numbers(1000 * (i + 1), 20)));
    EXPECT_THAT(match.checkpoint_at, IsEmpty());
    EXPECT_EQ(planner.Commit(match, Join(Numbers(0, 50), Numbers(1000 * (i + 1), 20)), 70, match.checkpoint_at), 0u);
    // New text, in which an earlier divergence is expected again.
    const PrefixPlanner::Match fresh = planner.Lookup(Numbers(1'000'000 + 1000 * i, 70));
    EXPECT_THAT(fresh.checkpoint_at, IsEmpty());
    planner.Release(fresh);
  }
  EXPECT_EQ(planner.budget().bytes(), 0u);
  EXPECT_EQ(planner.budget().refusals(), 10u);
}

TEST(PrefixPlannerTest, EmptyPromptsAreNothing) {
  PrefixPlanner planner(kTokenCosts, {.capacity_bytes = kAmple});
  EXPECT_EQ(Request(planner, {}).resume, 0u);
  EXPECT_EQ(planner.nodes(), 0u);
  Request(planner, {}, Numbers(0, 5));
  EXPECT_EQ(planner.Lookup(Numbers(0, 6)).resume, 5u);
}

TEST(PrefixPlannerTest, ErasesPromptsButKeepsCheckpoints) {
  constexpr uint64_t kHistory = 200'000;
  // Space for some thirty ends; history for some eighty prompts.
  PrefixPlanner planner(kTokenCosts, {.capacity_bytes = 30 * (1000 + 500 * 10), .history_bytes = kHistory});
  for (int i = 0; i < 2000; ++i) {
    Request(planner, Numbers(1000 * i, 500));
    ASSERT_LE(planner.history_bytes(), kHistory) << "request " << i;
    const PrefixRecount count = Recount(planner.tree().root(), kTokenCosts);
    ASSERT_EQ(count.kept.size(), planner.budget().checkpoints());
    ASSERT_EQ(count.bytes, planner.budget().bytes());
  }
  EXPECT_GE(planner.budget().checkpoints(), 25u);
  EXPECT_EQ(planner.Lookup(Numbers(0, 500)).shared, 0u) << "long erased";
}

// Most known prefixes are kept, so that nearly every leaf that the planner comes to has to stay.
TEST(PrefixPlannerTest, ErasesNodesBetweenCheckpoints) {
  constexpr uint64_t kHistory = 200'000;
  PrefixPlanner planner(kTokenCosts, {.capacity_bytes = 75 * (1000 + 500 * 10), .history_bytes = kHistory});
  for (int i = 0; i < 2000; ++i) {
    Request(planner, Numbers(1000 * i, 500));
    ASSERT_LE(planner.history_bytes(), kHistory + 5 * 500) << "request " << i;
  }
  EXPECT_GE(planner.budget().checkpoints(), 60u);
}

// Engines may ask and never compute.
TEST(PrefixPlannerTest, LookupsAloneDoNotGrowTheHistory) {
  constexpr uint64_t kHistory = 250'000;
  PrefixPlanner planner(kTokenCosts, {.capacity_bytes = 0, .history_bytes = kHistory});
  for (int i = 0; i < 8; ++i) Request(planner, Numbers(100'000 * i, 3'000));
  for (int i = 0; i < 3'000; ++i) {
    planner.Release(planner.Lookup(Join(Numbers(100'000 * (i % 8), i % 2'999 + 1), {-1})));
    ASSERT_LE(planner.tree().bytes(), kHistory + 1000) << "lookup " << i;
  }
}

// Compares with a list of sequences and the depths at which each was offered: what prompts share and where they resume,
// when nothing has to leave.
TEST(PrefixPlannerTest, MatchesSequenceListWithoutEviction) {
  for (int round = 0; round < 20; ++round) {
    const uint64_t seed = std::random_device()();
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    PrefixPlanner planner(kPageCosts, {.capacity_bytes = kAmple, .seed = seed});
    std::vector<Tokens> known, kept;
    for (int i = 0; i < 150; ++i) {
      Tokens prompt;
      if (!known.empty() && random() % 4 != 0) {
        const Tokens& some = known[random() % known.size()];
        prompt.assign(some.begin(), some.begin() + static_cast<ptrdiff_t>(random() % (some.size() + 1)));
      }
      for (uint64_t more = 1 + random() % 9; more > 0; --more) prompt.push_back(static_cast<int32_t>(random() % 3));
      size_t shared = 0, resume = 0;
      for (const Tokens& other : known) {
        const auto parted = std::mismatch(prompt.begin(), prompt.end(), other.begin(), other.end()).first;
        shared = std::max(shared, static_cast<size_t>(parted - prompt.begin()));
      }
      for (const Tokens& other : kept) {
        if (other.size() <= prompt.size() && std::equal(other.begin(), other.end(), prompt.begin())) {
          resume = std::max(resume, other.size());
        }
      }
      const PrefixPlanner::Match match = planner.Lookup(prompt);
      ASSERT_EQ(match.shared, shared);
      ASSERT_EQ(match.resume, resume);
      ASSERT_EQ(match.lease != nullptr, resume > 0);
      uint64_t before = resume;
      for (const uint64_t at : match.checkpoint_at) {
        ASSERT_GT(at, before);
        ASSERT_LE(at, prompt.size());
        before = at;
      }
      if (random() % 5 == 0) {
        planner.Release(match);
        continue;
      }
      const Tokens tokens = Join(prompt, Tokens(random() % 3, 1));
      ASSERT_LE(planner.Commit(match, tokens, prompt.size(), match.checkpoint_at), match.checkpoint_at.size() + 1);
      known.push_back(tokens);
      kept.push_back(tokens);
      for (const uint64_t at : match.checkpoint_at) {
        kept.emplace_back(tokens.begin(), tokens.begin() + static_cast<ptrdiff_t>(at));
      }
    }
    const PrefixRecount count = Recount(planner.tree().root(), kPageCosts);
    ASSERT_EQ(count.bytes, planner.budget().bytes());
    ASSERT_EQ(count.nodes.size(), planner.nodes());
  }
}

// Random requests, some of which overlap in time: all that is decided, in figures.
std::vector<uint64_t> Traffic(const PrefixCosts& costs, uint64_t traffic, uint64_t seed) {
  std::mt19937_64 random(traffic);
  const PrefixPlannerOptions options{.capacity_bytes = 3000 + random() % 60'000,
                                     .history_bytes = 5000 + random() % 100'000,
                                     .capture_tokens = random() % 2 == 0 ? 1u : 8u,
                                     .seed = seed};
  PrefixPlanner planner(costs, options);
  std::vector<std::pair<Tokens, PrefixPlanner::Match>> running;
  std::vector<uint64_t> decided;
  for (int i = 0; i < 400; ++i) {
    Tokens prompt = Numbers(static_cast<int32_t>(1000 * (random() % 12)), static_cast<int32_t>(random() % 200));
    prompt = Join(prompt, Numbers(static_cast<int32_t>(random() % 50), static_cast<int32_t>(random() % 60)));
    PrefixPlanner::Match match = planner.Lookup(prompt);
    decided.insert(decided.end(), {match.resume, match.shared, planner.budget().bytes(), planner.nodes()});
    decided.insert(decided.end(), match.checkpoint_at.begin(), match.checkpoint_at.end());
    running.emplace_back(std::move(prompt), std::move(match));
    while (running.size() > 4 || (!running.empty() && random() % 2 == 0)) {
      const size_t which = random() % running.size();
      auto [tokens, ended] = std::move(running[which]);
      running.erase(running.begin() + static_cast<ptrdiff_t>(which));
      if (random() % 8 == 0) {
        planner.Release(ended);
      } else {
        decided.push_back(planner.Commit(ended, Join(tokens, Numbers(7, 3)), tokens.size(), ended.checkpoint_at));
      }
      const PrefixRecount count = Recount(planner.tree().root(), costs);
      EXPECT_TRUE(count.needs_hold);
      EXPECT_EQ(count.bytes, planner.budget().bytes());
      EXPECT_EQ(count.kept.size(), planner.budget().checkpoints());
      EXPECT_EQ(count.nodes.size(), planner.nodes());
      EXPECT_LE(planner.budget().peak_bytes(), options.capacity_bytes);
      for (const auto& [other, open] : running) EXPECT_TRUE(open.lease == nullptr || open.lease->data.kept);
      if (::testing::Test::HasFailure()) return decided;
    }
  }
  return decided;
}

TEST(PrefixPlannerTest, RandomTrafficKeepsTheBudgetAndIsDeterministic) {
  for (int round = 0; round < 3; ++round) {
    const uint64_t seed = round == 0 ? 2746265446 : std::random_device()();  // erased a prefix that was leased
    SCOPED_TRACE("seed " + std::to_string(seed));
    for (const PrefixCosts& costs : {kTokenCosts, kPageCosts}) {
      const std::vector<uint64_t> decided = Traffic(costs, seed, 5);
      ASSERT_FALSE(HasFailure());
      ASSERT_EQ(decided, Traffic(costs, seed, 5));
    }
  }
}

// All blocks that end in a node's edge, by the key of everything before the block's end.
std::vector<Key> BlocksIn(const PrefixNode& node) {
  Tokens prefix;
  for (const PrefixNode* at = &node; at->parent() != nullptr; at = at->parent()) {
    prefix.insert(prefix.begin(), at->edge().begin(), at->edge().end());
  }
  const uint64_t block = kPageCosts.page_tokens;
  std::vector<Key> keys;
  for (uint64_t i = node.begin() / block; i < node.depth() / block; ++i) {
    keys.push_back(MakeKey({}, ObjectKind::kPrefixBlock, First(prefix, (i + 1) * block)));
  }
  return keys;
}

// Texts that part anywhere from known ones, with states before and after that place, committed or recovered. As the
// owner of the bytes does, the test notes the keys of what a text passes.
TEST(PrefixPlannerTest, BlockKeysFollowTheirEdgesForAnySplit) {
  for (int round = 0; round < 40; ++round) {
    const uint64_t seed = std::random_device()();
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    PrefixPlanner planner(
        kPageCosts, {.capacity_bytes = kAmple, .history_bytes = round % 2 == 0 ? uint64_t{1} << 30 : uint64_t{20'000}});
    std::vector<Tokens> texts = {{}};
    for (int32_t step = 1; step <= 40; ++step) {
      const Tokens& known = texts[random() % texts.size()];
      const Tokens text = Join(First(known, random() % (known.size() + 1)),
                               Numbers(1000 * step, 1 + static_cast<int32_t>(random() % 200)));
      std::vector<uint64_t> cuts;
      std::vector<PrefixPlanner::Found> found;
      for (uint64_t depth = 1; depth < text.size(); ++depth) {
        if (random() % 60 != 0) continue;
        cuts.push_back(depth);
        found.push_back({.depth = depth});
      }
      if (random() % 2 == 0) {
        planner.Commit(text, text.size(), cuts);
      } else {
        planner.Recover(text, found);
      }
      planner.tree().Walk(text, [](PrefixNode& node) {
        if (node.data.stored == nullptr) node.data.stored = std::make_unique<StoredKeys>();
        if (node.data.stored->blocks.empty()) node.data.stored->blocks = BlocksIn(node);
      });
      texts.push_back(text);
      std::vector<PrefixNode*> open = {&planner.tree().root()};
      while (!open.empty()) {
        PrefixNode& node = *open.back();
        open.pop_back();
        node.ForEachChild([&open](PrefixNode& child) { open.push_back(&child); });
        if (node.data.stored == nullptr || node.data.stored->blocks.empty()) continue;
        ASSERT_EQ(node.data.stored->blocks, BlocksIn(node)) << "from " << node.begin() << " to " << node.depth();
      }
    }
  }
}

}  // namespace
}  // namespace ashlar::storage
