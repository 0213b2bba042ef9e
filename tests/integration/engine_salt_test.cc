// SPDX-License-Identifier: Apache-2.0
// Salts of the engine API over a real daemon: prompts hit only what was stored under their own salt.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "proto/limits.h"
#include "tests/integration/grouped_engine.h"

namespace ashlar::integration {
namespace {

using engine::Request;

class EngineSalt : public testing::Test {
 protected:
  static void Put(const std::string& salt, engine::Prompt& prompt) {
    prompt.salt = salt.data();
    prompt.salt_bytes = salt.size();
  }
  // Tokens of a prompt that are found in the cache.
  static uint64_t Cached(GroupedEngine& engine, Asked& asked, const std::string& salt) {
    Put(salt, asked.prompt);
    const GroupedEngine::Tables pages = engine.Take(asked.tokens.size());
    engine.Put(pages, asked.prompt);
    Request request;
    const engine::Status status = engine.cache.Begin(&asked.prompt, 1, &request);
    EXPECT_EQ(status.code, engine::Code::kOk) << status.message;
    const uint64_t cached = request.plan().cached_tokens;
    EXPECT_EQ(request.Finish().code, engine::Code::kOk);
    return cached;
  }

  DaemonProcess daemon_;
  const std::vector<std::string> salts_ = {"", "one", "another", std::string("one\0", 4)};
};

TEST_F(EngineSalt, SegmentsHitOnlyUnderTheirSalt) {
  const std::vector<Tokens> segments = {{1, 2, 3, 4, 5, 6, 7, 8}, Tokens(40, 9), Tokens(50, 11)};
  GroupedEngine writer(daemon_, Grouping::kOne), reader(daemon_, Grouping::kOne);
  for (size_t stored = 0; stored < salts_.size(); ++stored) {
    for (size_t i = 0; i < salts_.size(); ++i) {
      Asked asked(segments);
      EXPECT_EQ(Cached(reader, asked, salts_[i]), i < stored ? 8u + 32 + 42 : 0u) << salts_[i];
    }
    Asked asked(segments);
    asked.prompt.fill = asked.prompt.store_only = true;
    Put(salts_[stored], asked.prompt);
    Request request;
    ASSERT_GOOD(writer.cache.Begin(&asked.prompt, 1, &request));
    uint32_t missing = 0;
    request.missing(&missing);
    EXPECT_EQ(missing, 3u);
    writer.PublishMissing(request);
  }
}

TEST_F(EngineSalt, ATextIsCommittedUnderItsPromptsSalt) {
  GroupedEngine engine(daemon_, Grouping::kOne);
  const Tokens text(40, 5);
  Asked asked({text});
  const std::string one = "one";  // the prompt points to it
  Put(one, asked.prompt);
  const GroupedEngine::Tables pages = engine.Take(asked.tokens.size());
  engine.Put(pages, asked.prompt);
  Request request;
  ASSERT_GOOD(engine.cache.Begin(&asked.prompt, 1, &request));
  ASSERT_GOOD(request.Finish());
  engine.Compute(pages, text);
  const engine::LinearTensors state = engine.State(3);
  const engine::Checkpoint checkpoint{.depth = text.size(), .linear = &state, .linear_count = 1};
  uint8_t outcome = 0;
  engine::Text committed{.request = &request,
                         .tokens = text.data(),
                         .token_count = text.size(),
                         .prompt_tokens = text.size(),
                         .checkpoints = &checkpoint,
                         .checkpoint_count = 1,
                         .outcomes = &outcome};
  engine.Put(pages, committed);
  const std::string refused = "3 texts[0].salt: differs from the salt of the request's prompt";
  EXPECT_EQ(Say(engine.cache.Commit(&committed, 1)), refused) << "erased";
  committed.salt = "two";
  committed.salt_bytes = 3;
  EXPECT_EQ(Say(engine.cache.Commit(&committed, 1)), refused);
  committed.salt = "one";
  ASSERT_GOOD(engine.cache.Commit(&committed, 1));
  EXPECT_STREQ(engine::CommitName(outcome), "kept");
  for (const std::string& salt : salts_) {
    Asked longer({text});
    longer.prompt.segment_count = 0;
    EXPECT_EQ(Cached(engine, longer, salt), salt == "one" ? text.size() : 0) << salt;
  }
}

TEST_F(EngineSalt, AnInvalidSaltIsRefusedByName) {
  GroupedEngine engine(daemon_, Grouping::kOne);
  Asked asked({Tokens(40, 5)});
  Request request;
  asked.prompt.salt_bytes = 1;
  EXPECT_EQ(Say(engine.cache.Begin(&asked.prompt, 1, &request)), "3 prompts[0].salt: null");
  const std::string longest(limits::kMaxSaltBytes + 1, 's');
  Put(longest, asked.prompt);
  EXPECT_EQ(Say(engine.cache.Begin(&asked.prompt, 1, &request)),
            "3 prompts[0].salt_bytes: out of range; expected at most 4096");
  asked.prompt.salt_bytes = limits::kMaxSaltBytes;
  ASSERT_GOOD(engine.cache.Begin(&asked.prompt, 1, &request));
}

}  // namespace
}  // namespace ashlar::integration
