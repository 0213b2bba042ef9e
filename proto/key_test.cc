// SPDX-License-Identifier: Apache-2.0
#include "proto/key.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>

#include "proto/limits.h"
#include "proto/testing/golden.h"
#include "proto/testing/sample_layouts.h"

namespace ashlar {
namespace {

NamespaceId ExampleNamespace() {
  return MakeNamespace("default", ExampleIdentity(), ExampleLayout());
}
const std::vector<int32_t> kTokens = {1, 2, 3, -1, 2147483647};

absl::string_view Bytes(const Digest& digest) {
  return {reinterpret_cast<const char*>(digest.bytes.data()), digest.bytes.size()};
}

std::vector<MediaHash> ExampleMedia() {
  MediaHash media{.offset = 2};
  for (size_t i = 0; i < media.hash.size(); ++i) media.hash[i] = static_cast<uint8_t>(i);
  return {media};
}

TEST(Key, GoldenNamespace) {
  ExpectGolden("namespace", Bytes(ExampleNamespace()));
}
TEST(Key, GoldenSegment) {
  ExpectGolden("key_segment", Bytes(MakeKey(ExampleNamespace(), ObjectKind::kSegment, kTokens)));
}
TEST(Key, GoldenCheckpointWithMedia) {
  ExpectGolden("key_checkpoint_media",
               Bytes(MakeKey(ExampleNamespace(), ObjectKind::kCheckpoint, kTokens, ExampleMedia())));
}

TEST(Key, GoldenSalt) {
  const Salt salt = MakeSalt("user 7");
  ExpectGolden("salt", Bytes(salt));
  ExpectGolden("key_segment_salt", Bytes(MakeKey(Salted(ExampleNamespace(), salt), ObjectKind::kSegment, kTokens)));
}

TEST(Key, NoSaltChangesNoKey) {
  EXPECT_EQ(MakeSalt(""), Salt{});
  EXPECT_EQ(Salted(ExampleNamespace(), {}), ExampleNamespace());
}

TEST(Key, HexIsLowerCaseInByteOrder) {
  Digest digest;
  digest.bytes[0] = 0xab;
  digest.bytes[31] = 0x01;
  EXPECT_EQ(digest.Hex(), "ab" + std::string(60, '0') + "01");
}

TEST(Key, EqualInputsGiveEqualKeys) {
  EXPECT_EQ(MakeKey(ExampleNamespace(), ObjectKind::kSegment, kTokens),
            MakeKey(ExampleNamespace(), ObjectKind::kSegment, kTokens));
}

// Every input changes the key, and encodings of different inputs never coincide.
TEST(Key, SeparatesEveryInput) {
  std::set<Key> keys;
  size_t made = 0;
  const auto add = [&](const Key& key) {
    keys.insert(key);
    ++made;
  };
  const NamespaceId ns = ExampleNamespace();
  for (const auto kind : {ObjectKind::kSegment, ObjectKind::kPrefixBlock, ObjectKind::kCheckpoint, ObjectKind::kSpan}) {
    add(MakeKey(ns, kind, kTokens));
  }
  add(MakeKey(MakeNamespace("other", ExampleIdentity(), ExampleLayout()), ObjectKind::kSegment, kTokens));
  for (size_t n = 0; n < kTokens.size(); ++n) {
    add(MakeKey(ns, ObjectKind::kSegment, std::span(kTokens).first(n)));
  }
  // Trailing zeros, and tokens that look like the media count after fewer tokens.
  add(MakeKey(ns, ObjectKind::kSegment, std::vector<int32_t>{0}));
  add(MakeKey(ns, ObjectKind::kSegment, std::vector<int32_t>{0, 0}));
  add(MakeKey(ns, ObjectKind::kSegment, std::vector<int32_t>{0, 0, 0}));
  add(MakeKey(ns, ObjectKind::kSegment, std::vector<int32_t>{2, 1}));
  std::vector<MediaHash> media = ExampleMedia();
  add(MakeKey(ns, ObjectKind::kSegment, kTokens, media));
  media[0].offset = 3;
  add(MakeKey(ns, ObjectKind::kSegment, kTokens, media));
  media[0].hash[31] ^= 1;
  add(MakeKey(ns, ObjectKind::kSegment, kTokens, media));
  media.push_back(media[0]);
  add(MakeKey(ns, ObjectKind::kSegment, kTokens, media));
  for (const absl::string_view given : {"a", "b", "aa"}) {
    add(MakeKey(Salted(ns, MakeSalt(given)), ObjectKind::kSegment, kTokens));
  }
  EXPECT_EQ(keys.size(), made);
}

TEST(Key, EveryTokenCounts) {
  const auto seed = std::random_device()();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  std::vector<int32_t> tokens(1 + random() % 1000);
  for (int32_t& token : tokens) token = static_cast<int32_t>(random());
  const Key key = MakeKey(ExampleNamespace(), ObjectKind::kSegment, tokens);
  for (int i = 0; i < 100; ++i) {
    std::vector<int32_t> changed = tokens;
    changed[random() % changed.size()] ^= 1 << (random() % 31);
    ASSERT_NE(MakeKey(ExampleNamespace(), ObjectKind::kSegment, changed), key);
  }
}

TEST(TextDigest, SeparatesKindsAndTexts) {
  const std::vector<int32_t> text = {1, 2, 3}, other = {1, 2, 4};
  EXPECT_EQ(MakeTextDigest(ObjectKind::kSegment, text), MakeTextDigest(ObjectKind::kSegment, text));
  EXPECT_NE(MakeTextDigest(ObjectKind::kSegment, text), MakeTextDigest(ObjectKind::kSegment, other));
  EXPECT_NE(MakeTextDigest(ObjectKind::kSegment, text), MakeTextDigest(ObjectKind::kCheckpoint, text));
  EXPECT_NE(MakeTextDigest(ObjectKind::kSegment, text), MakeTextDigest(ObjectKind::kSegment, std::span(text).first(2)));
}

TEST(Namespace, SeparatesTenantIdentityAndLayout) {
  std::set<NamespaceId> all;
  size_t made = 0;
  const auto add = [&](absl::string_view tenant, const Identity& identity, const Layout& layout) {
    all.insert(MakeNamespace(tenant, identity, layout));
    ++made;
  };
  const Identity identity = ExampleIdentity();
  const Layout layout = ExampleLayout();
  add("", identity, layout);
  add("a", identity, layout);
  add("ab", identity, layout);
  add("b", identity, layout);
  for (std::string Identity::*member : {&Identity::model_id, &Identity::weights_digest, &Identity::dtype,
                                        &Identity::quantization, &Identity::tokenizer_digest, &Identity::lora}) {
    Identity changed = identity;
    changed.*member += "x";
    add("a", changed, layout);
  }
  // Moving a character from one field to the next changes the identity.
  add("a", {.model_id = "xy", .weights_digest = "z"}, layout);
  add("a", {.model_id = "x", .weights_digest = "yz"}, layout);
  Layout changed = layout;
  ++changed.tail;
  add("a", identity, changed);
  changed = layout;
  std::get<AttentionLayer>(changed.layers[1]).rope.frequencies[1] = 0.010000000000000002;
  add("a", identity, changed);
  changed = layout;
  std::swap(changed.layers[0], changed.layers[1]);
  add("a", identity, changed);
  EXPECT_EQ(all.size(), made);
}

TEST(Media, RoundTripPacked) {
  const std::vector<MediaHash> media = {{0, {1}}, {3, {2}}, {4, {3}}};
  const auto back = UnpackMedia("media", PackMedia(media), 5);
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(*back, media);
  EXPECT_EQ(MediaWithin(media, 3, 5), (std::vector<MediaHash>{{0, {2}}, {1, {3}}}));
  EXPECT_EQ(MediaWithin(media, 1, 3), std::vector<MediaHash>());
  EXPECT_EQ(MediaWithin(media, 0, 4), (std::vector<MediaHash>{{0, {1}}, {3, {2}}}));
}

TEST(Media, RefusesByTheField) {
  const auto message = [](const std::vector<MediaHash>& media, size_t cut = 0) {
    std::string bytes = PackMedia(media);
    bytes.resize(bytes.size() - cut);
    return std::string(UnpackMedia("prompt.media", bytes, 5).status().message());
  };
  EXPECT_EQ(message({{0, {}}, {4, {}}}), "");
  EXPECT_EQ(message({{0, {}}}, 1), "prompt.media: length is not a multiple of 40 bytes (offset and hash)");
  EXPECT_EQ(message({{0, {}}, {5, {}}}), "prompt.media[1].offset: must be less than the number of tokens");
  EXPECT_EQ(message({{2, {}}, {2, {1}}}), "prompt.media[1].offset: must be greater than the previous offset");
  EXPECT_EQ(message({{2, {}}, {1, {}}}), "prompt.media[1].offset: must be greater than the previous offset");
  EXPECT_EQ(message(std::vector<MediaHash>(limits::kMaxMedia + 1)), "prompt.media: too many; expected at most 4096");
}

TEST(Key, SaltsRoundTrip) {
  for (const Salt& salt : {Salt{}, MakeSalt("user 7")}) {
    const auto back = UnpackSalt("salt", PackSalt(salt));
    ASSERT_TRUE(back.ok()) << back.status();
    EXPECT_EQ(*back, salt);
  }
  EXPECT_EQ(UnpackSalt("prompt.salt", "short").status().message(),
            "prompt.salt: wrong length; expected 32 bytes, or empty");
  EXPECT_EQ(UnpackSalt("prompt.salt", std::string(32, '\0')).status().message(),
            "prompt.salt: all zero; expected a salt, or empty for none");
}

TEST(Key, DifferentSaltsAreDifferentTexts) {
  const std::vector<MediaHash> media = {{1, {1}}};
  for (const std::span<const MediaHash> inputs : {std::span<const MediaHash>(), std::span<const MediaHash>(media)}) {
    const auto of = [&](absl::string_view given) {
      return MakeTextDigest(ObjectKind::kSegment, kTokens, inputs, MakeSalt(given));
    };
    EXPECT_EQ(of("a"), of("a"));
    EXPECT_FALSE(of("a") == of("b"));
    EXPECT_FALSE(of("a") == of(""));
    EXPECT_EQ(of(""), MakeTextDigest(ObjectKind::kSegment, kTokens, inputs));
  }
}

TEST(Key, DifferentMediaAreDifferentTexts) {
  const std::vector<MediaHash> one = {{1, {1}}}, other = {{1, {2}}}, elsewhere = {{2, {1}}};
  const TextDigest none = MakeTextDigest(ObjectKind::kSegment, kTokens);
  const TextDigest first = MakeTextDigest(ObjectKind::kSegment, kTokens, one);
  EXPECT_FALSE(first == none);
  EXPECT_FALSE(first == MakeTextDigest(ObjectKind::kSegment, kTokens, other));
  EXPECT_FALSE(first == MakeTextDigest(ObjectKind::kSegment, kTokens, elsewhere));
  EXPECT_EQ(first, MakeTextDigest(ObjectKind::kSegment, kTokens, one));
}

}  // namespace
}  // namespace ashlar
