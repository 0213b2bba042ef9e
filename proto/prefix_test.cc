// SPDX-License-Identifier: Apache-2.0
#include "proto/prefix.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <set>

#include "proto/limits.h"
#include "proto/object.h"
#include "proto/testing/golden.h"
#include "proto/testing/sample_layouts.h"

namespace ashlar {
namespace {

constexpr uint32_t kBlock = 256;
const NamespaceId kNamespace = MakeNamespace("default", ExampleIdentity(), ExampleLayout());

// A block of ids 0 to 255, and then the five tokens of docs/formats.md.
std::vector<int32_t> Text() {
  std::vector<int32_t> tokens(kBlock);
  std::iota(tokens.begin(), tokens.end(), 0);
  tokens.insert(tokens.end(), {1, 2, 3, -1, 2147483647});
  return tokens;
}

ConversationId ExampleConversation() {
  ConversationId id;
  std::iota(id.begin(), id.end(), uint8_t{0});
  return id;
}

absl::string_view Bytes(const Digest& digest) {
  return {reinterpret_cast<const char*>(digest.bytes.data()), digest.bytes.size()};
}

TEST(PrefixKeys, Golden) {
  const std::vector<int32_t> text = Text();
  const PrefixKeys keys(kNamespace, kBlock, text);
  ASSERT_EQ(keys.blocks().size(), 1u);
  ExpectGolden("key_prefix_block", Bytes(keys.blocks()[0]));
  ExpectGolden("key_prefix_checkpoint", Bytes(keys.Checkpoint(text.size())));
  ExpectGolden("key_prefix_span", Bytes(keys.Span(kBlock + 2, text.size())));
  const PrefixKeys own(kNamespace, kBlock, std::span(text).subspan(kBlock), ExampleConversation());
  ExpectGolden("key_own_checkpoint", Bytes(own.Checkpoint(5)));
}

TEST(PrefixKeys, GoldenWithSalt) {
  const std::vector<int32_t> text = Text();
  const Digest salted = Salted(kNamespace, MakeSalt("user 7"));
  const PrefixKeys keys(salted, kBlock, text), plain(kNamespace, kBlock, text);
  ExpectGolden("key_prefix_checkpoint_salt", Bytes(keys.Checkpoint(text.size())));
  EXPECT_NE(keys.blocks()[0], plain.blocks()[0]);
  EXPECT_NE(keys.Span(2, text.size()), plain.Span(2, text.size()));
  const PrefixKeys own(salted, kBlock, text, ExampleConversation()),
      other(kNamespace, kBlock, text, ExampleConversation());
  EXPECT_NE(own.Checkpoint(1), other.Checkpoint(1));
}

// One input in the block, and one after it.
std::vector<MediaHash> ExampleMedia() {
  std::vector<MediaHash> media = {{.offset = 2}, {.offset = kBlock + 1}};
  for (MediaHash& input : media) std::iota(input.hash.begin(), input.hash.end(), uint8_t{0});
  return media;
}

TEST(PrefixKeys, GoldenWithMedia) {
  const std::vector<int32_t> text = Text();
  const std::vector<MediaHash> media = ExampleMedia();
  const PrefixKeys keys(kNamespace, kBlock, text, {}, media);
  ExpectGolden("key_prefix_block_media", Bytes(keys.blocks()[0]));
  ExpectGolden("key_prefix_checkpoint_media", Bytes(keys.Checkpoint(text.size())));
}

// Keys before an input do not depend on it; all keys after it do.
TEST(PrefixKeys, MediaCountFromTheirBeginning) {
  const std::vector<int32_t> text = Text();
  const std::vector<MediaHash> media = ExampleMedia();
  const PrefixKeys plain(kNamespace, kBlock, text), both(kNamespace, kBlock, text, {}, media);
  EXPECT_EQ(both.Checkpoint(2), plain.Checkpoint(2));
  EXPECT_NE(both.Checkpoint(3), plain.Checkpoint(3));
  EXPECT_NE(both.blocks()[0], plain.blocks()[0]);

  std::vector<MediaHash> later = media;
  later[1].hash[31] ^= 1;
  const PrefixKeys other(kNamespace, kBlock, text, {}, later);
  EXPECT_EQ(other.blocks()[0], both.blocks()[0]);
  EXPECT_EQ(other.Checkpoint(kBlock + 1), both.Checkpoint(kBlock + 1));
  EXPECT_NE(other.Checkpoint(kBlock + 2), both.Checkpoint(kBlock + 2));
  EXPECT_NE(other.Span(kBlock, text.size()), both.Span(kBlock, text.size()));
  EXPECT_EQ(other.Span(2, kBlock + 1), both.Span(2, kBlock + 1));

  const PrefixKeys behind(kNamespace, kBlock, text, {}, std::span(media).subspan(1));
  EXPECT_EQ(behind.blocks()[0], plain.blocks()[0]);
  EXPECT_NE(behind.Checkpoint(text.size()), plain.Checkpoint(text.size()));
  std::vector<MediaHash> elsewhere = media;
  elsewhere[1].offset += 1;
  const PrefixKeys moved(kNamespace, kBlock, text, {}, elsewhere);
  EXPECT_NE(moved.Checkpoint(text.size()), both.Checkpoint(text.size()));
}

TEST(PrefixKeys, BlocksAreWholePagesAndNotTooShort) {
  for (const uint32_t page : {1u, 16u, 48u, 256u, 300u, limits::kMaxPageTokens}) {
    Layout layout = ExampleLayout();
    layout.page_tokens = page;
    const uint32_t block = PrefixBlockTokens(layout);
    EXPECT_EQ(block % page, 0u);
    EXPECT_GE(block, limits::kPrefixBlockTokens);
    EXPECT_LT(block, limits::kPrefixBlockTokens + page);
  }
}

// Texts share the keys of their common prefix and no others; every depth has its own key.
TEST(PrefixKeys, DependOnAllEarlierTokens) {
  std::mt19937_64 random(1);
  std::vector<int32_t> one(4 * kBlock + 17);
  for (int32_t& token : one) token = static_cast<int32_t>(random() % 8);
  std::set<Key> all;
  const PrefixKeys keys(kNamespace, kBlock, one);
  for (const Key& key : keys.blocks()) all.insert(key);
  for (uint64_t depth = 1; depth <= one.size(); ++depth) all.insert(keys.Checkpoint(depth));
  EXPECT_EQ(all.size(), one.size() + 4);
  for (const size_t parts : {size_t{0}, size_t{255}, size_t{256}, size_t{700}, one.size() - 1}) {
    std::vector<int32_t> other = one;
    other[parts] += 1;
    const PrefixKeys others(kNamespace, kBlock, other);
    for (size_t block = 0; block < 4; ++block) {
      EXPECT_EQ(keys.blocks()[block] == others.blocks()[block], (block + 1) * kBlock <= parts) << parts;
    }
    for (uint64_t depth = 1; depth <= one.size(); ++depth) {
      ASSERT_EQ(keys.Checkpoint(depth) == others.Checkpoint(depth), depth <= parts) << parts << ", " << depth;
    }
  }
}

// A span's key depends on its begin, its end, and every token up to there.
TEST(PrefixKeys, SpansDependOnTheirTokensAndCheckpoint) {
  const std::vector<int32_t> same(3 * kBlock, 5);
  const PrefixKeys keys(kNamespace, kBlock, same);
  std::set<Key> all;
  for (uint64_t begin = kBlock - 3; begin < kBlock + 3; ++begin) {
    for (uint64_t end = begin + 1; end < begin + 20; ++end) all.insert(keys.Span(begin, end));
  }
  EXPECT_EQ(all.size(), 6u * 19u);
  for (const size_t changed : {size_t{0}, size_t{kBlock}, size_t{kBlock + 9}, size_t{kBlock + 10}}) {
    std::vector<int32_t> other = same;
    other[changed] += 1;
    const PrefixKeys others(kNamespace, kBlock, other);
    EXPECT_EQ(others.Span(kBlock + 1, kBlock + 10) == keys.Span(kBlock + 1, kBlock + 10), changed >= kBlock + 10);
  }
}

TEST(PrefixKeys, NamespacesAndConversationsShareNoKeys) {
  const std::vector<int32_t> text = Text();
  const NamespaceId other = MakeNamespace("other", ExampleIdentity(), ExampleLayout());
  ConversationId second = ExampleConversation();
  second[15] ^= 1;
  std::set<Key> blocks, ends;
  for (const PrefixKeys& keys :
       {PrefixKeys(kNamespace, kBlock, text), PrefixKeys(other, kBlock, text),
        PrefixKeys(kNamespace, kBlock, text, ExampleConversation()), PrefixKeys(kNamespace, kBlock, text, second)}) {
    blocks.insert(keys.blocks()[0]);
    ends.insert(keys.Checkpoint(text.size()));
  }
  EXPECT_EQ(blocks.size(), 4u);
  EXPECT_EQ(ends.size(), 4u);
  EXPECT_NE(PrefixKeys(kNamespace, kBlock, text).Checkpoint(5),
            MakeKey(kNamespace, ObjectKind::kCheckpoint, std::span(text).first(5)));
}

// Blocks and the checkpoint after them have every token's rows once, and the checkpoint all states; planned objects can
// be encoded and read.
TEST(PlanPrefix, BlocksAndCheckpointHaveEveryTokenOnce) {
  std::mt19937_64 random(2);
  for (int round = 0; round < 200; ++round) {
    const Layout layout = RandomLayout(random);
    const uint32_t block = PrefixBlockTokens(layout);
    const uint64_t depth = 1 + random() % (3 * block);
    const bool paged = std::ranges::any_of(
        layout.layers, [](const Layer& layer) { return std::holds_alternative<AttentionLayer>(layer); });
    uint64_t stored = 0;
    for (uint64_t end = block; paged && end <= depth; end += block) {
      const auto header = PlanPrefixBlock(layout, kNamespace, Key{}, block, end);
      ASSERT_TRUE(header.ok()) << header.status();
      EXPECT_EQ(header->first_token, stored);
      EXPECT_EQ(header->tokens, end);
      for (const Part& part : header->parts) EXPECT_TRUE(IsPaged(part.form));
      EXPECT_EQ(*DecodeHeader(EncodeHeader(*header)), *header);
      stored += header->stored_tokens;
    }
    const auto checkpoint = PlanPrefixCheckpoint(layout, kNamespace, Key{}, block, depth);
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    EXPECT_EQ(*DecodeHeader(EncodeHeader(*checkpoint)), *checkpoint);
    if (paged) {
      EXPECT_EQ(stored + checkpoint->stored_tokens, depth);
    }
    for (uint32_t i = 0; i < layout.layers.size(); ++i) {
      const bool linear = std::holds_alternative<LinearLayer>(layout.layers[i]);
      EXPECT_EQ(checkpoint->Find(i, PartForm::kState) != nullptr, linear);
      EXPECT_EQ(checkpoint->Find(i, PartForm::kKeys) != nullptr, !linear && depth % block != 0);
    }
    for (const Part& part : checkpoint->parts) EXPECT_FALSE(IsTransition(part.form));
  }
}

// Rows of every token, with the inputs of each family; planned objects can be encoded and read.
TEST(PlanPrefix, SpansStoreTheRecurrencesInputs) {
  std::mt19937_64 random(3);
  for (int round = 0; round < 200; ++round) {
    const Layout layout = RandomLayout(random);
    if (std::ranges::none_of(layout.layers, [](const Layer& l) { return std::holds_alternative<LinearLayer>(l); })) {
      continue;
    }
    const uint64_t begin = 1 + random() % 500, tokens = 1 + random() % limits::kMaxSpanTokens;
    const auto span = PlanPrefixSpan(layout, kNamespace, Key{}, DType::kBF16, begin, begin + tokens);
    ASSERT_TRUE(span.ok()) << span.status();
    EXPECT_EQ(*DecodeHeader(EncodeHeader(*span)), *span);
    EXPECT_EQ(span->first_token, begin);
    EXPECT_EQ(span->stored_tokens, tokens);
    for (uint32_t i = 0; i < layout.layers.size(); ++i) {
      const auto bytes = [&](PartForm form) { return span->Find(i, form) ? span->Find(i, form)->Bytes() / tokens : 0; };
      const auto* const linear = std::get_if<LinearLayer>(&layout.layers[i]);
      if (linear == nullptr) {
        EXPECT_GT(bytes(PartForm::kKeys), 0u);
        continue;
      }
      const uint64_t heads = linear->value_heads;
      const bool vector = linear->family == Family::kGla || linear->family == Family::kKda;
      const bool gated = vector || linear->family == Family::kGdn;
      const bool fixed =
          linear->family == Family::kRetnet || linear->family == Family::kLightning || linear->family == Family::kGla;
      const bool wide = linear->family == Family::kMamba1;
      EXPECT_EQ(bytes(PartForm::kSpanKeys), 2u * linear->key_heads * linear->d_k);
      EXPECT_EQ(bytes(PartForm::kSpanValues), 2 * heads * linear->d_v);
      EXPECT_EQ(bytes(PartForm::kSpanGates), gated ? 4 * heads * (vector ? linear->d_k : 1) : 0);
      EXPECT_EQ(bytes(PartForm::kSpanBetas), fixed ? 0 : 4 * heads * (wide ? linear->d_v : 1));
      EXPECT_EQ(bytes(PartForm::kSpanConvInputs), uint64_t{ElementBytes(ConvType(*linear))} * linear->conv_channels);
      EXPECT_EQ(span->Find(i, PartForm::kState), nullptr);
    }
  }
}

TEST(PlanPrefix, RefusesSpansThatAreInvalid) {
  const auto refused = [](const Layout& layout, DType dtype, uint64_t begin, uint64_t end) {
    return std::string(PlanPrefixSpan(layout, kNamespace, Key{}, dtype, begin, end).status().message());
  };
  const Layout layout = ExampleLayout();
  EXPECT_THAT(refused(layout, DType::kF32, 0, 5), testing::StartsWith("begin: "));
  EXPECT_THAT(refused(layout, DType::kF32, 5, 5), testing::StartsWith("begin: "));
  EXPECT_THAT(refused(layout, DType::kF32, 1, 2 + limits::kMaxSpanTokens), testing::StartsWith("begin: "));
  EXPECT_THAT(refused(layout, DType::kF8E4M3, 1, 5), testing::StartsWith("dtype: "));
  EXPECT_THAT(refused(layout, DType::kF32, 1, limits::kMaxPromptTokens + 1), testing::StartsWith("tokens: "));
  Layout wide = layout;
  std::get<LinearLayer>(wide.layers[0]) = {
      .family = Family::kKda, .key_heads = 1024, .value_heads = 1024, .d_k = 128, .d_v = 4};
  EXPECT_THAT(refused(wide, DType::kF16, 1, 5), testing::StartsWith("layout.layers[0]: span_gates"));
  Layout attention = layout;
  attention.layers.erase(attention.layers.begin());
  EXPECT_THAT(refused(attention, DType::kF32, 1, 5), testing::StartsWith("layout.layers: "));
}

TEST(PlanPrefix, RefusesWhatIsInvalid) {
  const Layout layout = ExampleLayout();
  EXPECT_TRUE(absl::IsInvalidArgument(PlanPrefixBlock(layout, kNamespace, Key{}, kBlock, 0).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(PlanPrefixBlock(layout, kNamespace, Key{}, kBlock, kBlock + 1).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(PlanPrefixCheckpoint(layout, kNamespace, Key{}, kBlock, 0).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(
      PlanPrefixCheckpoint(layout, kNamespace, Key{}, kBlock, limits::kMaxPromptTokens + 1).status()));
  Layout linear = layout;
  std::erase_if(linear.layers, [](const Layer& layer) { return std::holds_alternative<AttentionLayer>(layer); });
  EXPECT_TRUE(absl::IsFailedPrecondition(PlanPrefixBlock(linear, kNamespace, Key{}, kBlock, kBlock).status()));
  EXPECT_TRUE(PlanPrefixCheckpoint(linear, kNamespace, Key{}, kBlock, kBlock).ok());
}

}  // namespace
}  // namespace ashlar
