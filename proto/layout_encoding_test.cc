// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <string>
#include <variant>

#include "proto/layout.h"
#include "proto/layout_fields.h"
#include "proto/limits.h"
#include "proto/testing/golden.h"
#include "proto/testing/sample_layouts.h"

namespace ashlar {
namespace {

TEST(LayoutEncoding, GoldenLayout) {
  ExpectGolden("layout", EncodeLayout(ExampleLayout()));
}
TEST(LayoutEncoding, GoldenLayoutOfOwnTails) {
  ExpectGolden("layout_tails", EncodeLayout(TailsLayout()));
}
TEST(LayoutEncoding, GoldenLayoutOfOpaqueLayers) {
  ExpectGolden("layout_opaque", EncodeLayout(OpaqueLayout()));
}
TEST(LayoutEncoding, GoldenIdentity) {
  ExpectGolden("identity", EncodeIdentity(ExampleIdentity()));
}

uint32_t VersionOf(const std::string& bytes) {
  uint32_t version = 0;
  std::memcpy(&version, bytes.data() + 4, sizeof version);
  return version;
}

// A layout without newer features keeps the encoding, and so the namespace, of builds of version 1.
TEST(LayoutEncoding, UsesLowestSufficientVersion) {
  Layout layout = ExampleLayout();
  EXPECT_EQ(VersionOf(EncodeLayout(layout)), 1u);
  auto& linear = std::get<LinearLayer>(layout.layers[0]);
  linear.conv_order = TailOrder::kChannelFirst;
  EXPECT_EQ(VersionOf(EncodeLayout(layout)), 2u);
  linear.conv_order = TailOrder::kTokenFirst;
  linear.conv_dtype = DType::kBF16;
  EXPECT_EQ(VersionOf(EncodeLayout(layout)), 2u);
  layout.layers.push_back(OpaqueLayer{.token_bytes = 1});
  EXPECT_EQ(VersionOf(EncodeLayout(layout)), 3u);
}

// Otherwise a layout would have two encodings, and two namespaces.
TEST(LayoutEncoding, RefusesALaterVersionThanTheLayoutNeeds) {
  const auto decoded = DecodeLayout(EncodeLayoutAs(2, ExampleLayout()));
  EXPECT_EQ(decoded.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(decoded.status().message(),
            "layout.version: 2; expected 1, the lowest version that can express the layout");
}

TEST(LayoutEncoding, OtherVersionsAreReportedByNumber) {
  for (const uint32_t version : {0u, 4u}) {
    std::string bytes = EncodeLayout(TailsLayout());
    std::memcpy(bytes.data() + 4, &version, sizeof version);
    EXPECT_EQ(DecodeLayout(bytes).status().message(), absl::StrCat("layout.version: ", version, "; expected 1 to 3"));
  }
  std::string identity = EncodeIdentity(ExampleIdentity());
  identity[4] = 2;
  EXPECT_EQ(DecodeIdentity(identity).status().message(), "identity.version: 2; expected 1");
}

TEST(LayoutEncoding, RoundTripsRandomLayouts) {
  const auto seed = std::random_device()();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  for (int i = 0; i < 200; ++i) {
    const Layout layout = RandomLayout(random);
    const std::string bytes = EncodeLayout(layout);
    const absl::StatusOr<Layout> decoded = DecodeLayout(bytes);
    ASSERT_TRUE(decoded.ok()) << decoded.status();
    ASSERT_EQ(*decoded, layout);
    ASSERT_EQ(EncodeLayout(*decoded), bytes);
  }
}

TEST(LayoutEncoding, RefusesEveryTruncation) {
  const auto seed = std::random_device()();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  const std::string layout = EncodeLayout(RandomLayout(random));
  for (size_t size = 0; size < layout.size(); size += size < 2048 ? 1 : 997) {
    const auto decoded = DecodeLayout(absl::string_view(layout).substr(0, size));
    ASSERT_EQ(decoded.status().code(), absl::StatusCode::kInvalidArgument) << size;
    ASSERT_THAT(std::string(decoded.status().message()), testing::StartsWith("layout")) << size;
  }
  const std::string identity = EncodeIdentity(ExampleIdentity());
  for (size_t size = 0; size < identity.size(); ++size) {
    const auto decoded = DecodeIdentity(absl::string_view(identity).substr(0, size));
    ASSERT_EQ(decoded.status().code(), absl::StatusCode::kInvalidArgument) << size;
    ASSERT_THAT(std::string(decoded.status().message()), testing::StartsWith("identity.")) << size;
  }
}

TEST(LayoutEncoding, RefusesTrailingBytes) {
  EXPECT_FALSE(DecodeLayout(EncodeLayout(ExampleLayout()) + '\0').ok());
  EXPECT_FALSE(DecodeIdentity(EncodeIdentity(ExampleIdentity()) + '\0').ok());
}

// The encoding is canonical: bytes that differ are refused or mean something else.
TEST(LayoutEncoding, EveryChangedByteIsRefusedOrAnotherLayout) {
  for (const Layout& original : {ExampleLayout(), TailsLayout(), OpaqueLayout()}) {
    const std::string bytes = EncodeLayout(original);
    int accepted = 0;
    for (size_t i = 0; i < bytes.size(); ++i) {
      for (int change = 1; change < 256; ++change) {
        std::string changed = bytes;
        changed[i] = static_cast<char>(changed[i] ^ change);
        const auto decoded = DecodeLayout(changed);
        if (!decoded.ok()) {
          ASSERT_EQ(decoded.status().code(), absl::StatusCode::kInvalidArgument) << i;
          continue;
        }
        ++accepted;
        ASSERT_FALSE(*decoded == original) << "byte " << i << " xor " << change;
        ASSERT_EQ(EncodeLayout(*decoded), changed) << "byte " << i << " xor " << change;
      }
    }
    EXPECT_GT(accepted, 0);
  }
}

TEST(LayoutEncoding, EveryChangedByteOfAnIdentityIsRefusedOrADifferentIdentity) {
  const Identity original = ExampleIdentity();
  const std::string bytes = EncodeIdentity(original);
  int accepted = 0;
  for (size_t i = 0; i < bytes.size(); ++i) {
    for (int change = 1; change < 256; ++change) {
      std::string changed = bytes;
      changed[i] = static_cast<char>(changed[i] ^ change);
      const auto decoded = DecodeIdentity(changed);
      if (!decoded.ok()) continue;
      ++accepted;
      ASSERT_FALSE(*decoded == original) << "byte " << i << " xor " << change;
      ASSERT_EQ(EncodeIdentity(*decoded), changed) << "byte " << i << " xor " << change;
    }
  }
  EXPECT_GT(accepted, 0);
}

TEST(LayoutEncoding, RandomlyChangedRandomLayoutsStayCanonical) {
  const auto seed = std::random_device()();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  for (int i = 0; i < 100; ++i) {
    const Layout layout = RandomLayout(random);
    const std::string bytes = EncodeLayout(layout);
    for (int j = 0; j < 50; ++j) {
      std::string changed = bytes;
      changed[random() % changed.size()] ^= static_cast<char>(1 + random() % 255);
      const auto decoded = DecodeLayout(changed);
      if (!decoded.ok()) continue;
      ASSERT_FALSE(*decoded == layout);
      ASSERT_EQ(EncodeLayout(*decoded), changed);
    }
  }
}

TEST(LayoutEncoding, NamesWhatIsWrong) {
  const std::string bytes = EncodeLayout(ExampleLayout());
  const auto message = [](absl::string_view encoding) {
    return std::string(DecodeLayout(encoding).status().message());
  };
  const auto changed = [&bytes](size_t offset, char value) {
    std::string copy = bytes;
    copy[offset] = value;
    return copy;
  };
  EXPECT_THAT(message(""), testing::StartsWith("layout.tag: "));
  EXPECT_THAT(message(changed(0, 'X')), testing::StartsWith("layout.tag: "));
  EXPECT_THAT(message(changed(4, 4)), testing::StartsWith("layout.version: 4; expected 1 to 3"));
  EXPECT_THAT(message(changed(20, 9)), testing::StartsWith("layout.layers[2].type: truncated"));
  EXPECT_THAT(message(changed(24, 4)), testing::StartsWith("layout.layers[0].type: 4"));
  EXPECT_THAT(message(bytes.substr(0, 30)), testing::StartsWith("layout.layers[0].value_heads: truncated"));
}

// A few bytes that announce a large table must not cost its memory.
TEST(LayoutEncoding, RefusesCountsThatTheBytesCannotHold) {
  std::string bytes = EncodeLayout(ExampleLayout());
  bytes.replace(20, 4, "\xff\xff\xff\xff", 4);
  EXPECT_THAT(std::string(DecodeLayout(bytes).status().message()), testing::StartsWith("layout.layers: "));
  std::string many = EncodeLayout(ExampleLayout()) + std::string(1 << 20, '\1');
  many.replace(20, 4, std::string("\0\0\10\0", 4));
  EXPECT_THAT(std::string(DecodeLayout(many).status().message()), testing::StartsWith("layout.layers: "));
}

}  // namespace
}  // namespace ashlar
