// SPDX-License-Identifier: Apache-2.0
#include "client/session/prompt_message.h"

#include <gtest/gtest.h>

#include <vector>

#include "absl/strings/str_cat.h"
#include "ashlar/v1/cache.pb.h"
#include "proto/limits.h"

namespace ashlar::internal {
namespace {

// A daemon of protocol 2 would ignore the media, and treat texts with different images as equal.
TEST(PromptMessage, MediaNeedADaemonThatReadsThem) {
  const std::vector<int32_t> tokens = {1, 2, 3};
  const std::vector<MediaHash> media = {{2, {7}}};
  Prompt prompt{.tokens = tokens};
  EXPECT_TRUE(CheckMessage(prompt, limits::kProtocolMin).ok());
  EXPECT_TRUE(CheckProtocol("text", {}, {}, limits::kProtocolMin).ok());
  prompt.media = media;
  EXPECT_EQ(CheckMessage(prompt, limits::kProtocolWithMedia - 1),
            absl::InvalidArgumentError("prompt.media: needs protocol 3, the daemon has 2; upgrade the daemon"));
  EXPECT_EQ(CheckProtocol("text", media, {}, limits::kProtocolWithMedia - 1),
            absl::InvalidArgumentError("text.media: needs protocol 3, the daemon has 2; upgrade the daemon"));
  EXPECT_TRUE(CheckMessage(prompt, limits::kProtocolWithMedia).ok());
  EXPECT_TRUE(CheckProtocol("text", media, {}, limits::kProtocolMax).ok());
}

// A daemon of protocol 3 would ignore the salt, and share the text with all users.
TEST(PromptMessage, SaltsNeedADaemonThatReadsThem) {
  const std::vector<int32_t> tokens = {1, 2, 3};
  const Prompt prompt{.tokens = tokens, .salt = MakeSalt("user 7")};
  EXPECT_EQ(CheckMessage(prompt, limits::kProtocolWithSalt - 1),
            absl::InvalidArgumentError("prompt.salt: needs protocol 4, the daemon has 3; upgrade the daemon"));
  EXPECT_TRUE(CheckMessage(prompt, limits::kProtocolWithSalt).ok());
  v1::Prompt message;
  Describe(prompt, true, message);
  const auto read = UnpackSalt("salt", message.salt());
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(*read, prompt.salt);
}

TEST(PromptMessage, NamesTheLimitThatAPromptExceeds) {
  const std::vector<uint64_t> lengths(limits::kMaxSegments + 1, 1);
  EXPECT_EQ(
      CheckMessage({.segment_lengths = lengths}, limits::kProtocolMax).message(),
      absl::StrCat("prompt.segment_lengths: ", lengths.size(), " segments; expected at most ", limits::kMaxSegments));
  const std::vector<MediaHash> media(limits::kMaxMedia + 1);
  EXPECT_EQ(CheckMessage({.media = media}, limits::kProtocolMin).message(),
            absl::StrCat("prompt.media: ", media.size(), " entries; expected at most ", limits::kMaxMedia));
}

TEST(PromptMessage, ListsWhereMediaBegin) {
  const std::vector<int32_t> tokens = {1, 2, 3};
  const std::vector<MediaHash> media = {{0, {7}}, {2, {8}}};
  v1::Prompt message;
  Describe({.tokens = tokens, .media = media}, true, message);
  const auto read = UnpackMedia("media", message.media(), tokens.size());
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(*read, media);
}

}  // namespace
}  // namespace ashlar::internal
