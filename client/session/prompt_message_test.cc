// SPDX-License-Identifier: Apache-2.0
#include "client/session/prompt_message.h"

#include <gtest/gtest.h>

#include <vector>

#include "ashlar/v1/cache.pb.h"
#include "proto/limits.h"

namespace ashlar::internal {
namespace {

// A daemon of protocol 2 would ignore the media, and treat texts with different images as equal.
TEST(PromptMessage, MediaNeedADaemonThatReadsThem) {
  const std::vector<int32_t> tokens = {1, 2, 3};
  const std::vector<MediaHash> media = {{2, {7}}};
  Prompt prompt{.tokens = tokens};
  EXPECT_TRUE(FitsMessage(prompt, limits::kProtocolMin));
  EXPECT_TRUE(FitsProtocol({}, {}, limits::kProtocolMin));
  prompt.media = media;
  EXPECT_FALSE(FitsMessage(prompt, limits::kProtocolWithMedia - 1));
  EXPECT_FALSE(FitsProtocol(media, {}, limits::kProtocolWithMedia - 1));
  EXPECT_TRUE(FitsMessage(prompt, limits::kProtocolWithMedia));
  EXPECT_TRUE(FitsProtocol(media, {}, limits::kProtocolMax));
}

// A daemon of protocol 3 would ignore the salt, and share the text with all users.
TEST(PromptMessage, SaltsNeedADaemonThatReadsThem) {
  const std::vector<int32_t> tokens = {1, 2, 3};
  const Prompt prompt{.tokens = tokens, .salt = MakeSalt("user 7")};
  EXPECT_FALSE(FitsMessage(prompt, limits::kProtocolWithSalt - 1));
  EXPECT_TRUE(FitsMessage(prompt, limits::kProtocolWithSalt));
  v1::Prompt message;
  Describe(prompt, true, message);
  const auto read = UnpackSalt("salt", message.salt());
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(*read, prompt.salt);
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
