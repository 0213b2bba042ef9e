// SPDX-License-Identifier: Apache-2.0
#include "proto/object.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <future>
#include <random>
#include <thread>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "proto/limits.h"
#include "proto/prefix.h"
#include "proto/testing/golden.h"
#include "proto/testing/sample_layouts.h"

namespace ashlar {
namespace {

constexpr uint64_t kExtent = limits::kExtentBytes;

ObjectHeader ExampleHeader(ObjectKind kind, uint64_t tokens = 100) {
  const std::vector<int32_t> run(tokens, 7);
  const NamespaceId ns = MakeNamespace("default", ExampleIdentity(), ExampleLayout());
  ObjectHeader header = *PlanObject(ExampleLayout(), ns, MakeKey(ns, kind, run), kind, tokens);
  for (size_t i = 0; i < header.parts.size(); ++i) header.parts[i].checksum = 0x0101010101010101u * (i + 1);
  return header;
}

TEST(ObjectHeader, FindsOnlyStoredParts) {
  const ObjectHeader checkpoint = ExampleHeader(ObjectKind::kCheckpoint);
  EXPECT_EQ(checkpoint.Find(0, PartForm::kTransitionDense), nullptr);
  ASSERT_NE(checkpoint.Find(0, PartForm::kConvTail), nullptr);
  EXPECT_EQ(checkpoint.Find(1, PartForm::kState), nullptr);
  ASSERT_NE(checkpoint.Find(1, PartForm::kValues), nullptr);
  EXPECT_EQ(checkpoint.Find(2, PartForm::kKeys), nullptr);
}

TEST(ObjectHeader, GoldenSegment) {
  ExpectGolden("segment_header", EncodeHeader(ExampleHeader(ObjectKind::kSegment)));
}
TEST(ObjectHeader, GoldenOpaqueCheckpoint) {
  const NamespaceId ns = MakeNamespace("default", ExampleIdentity(), OpaqueLayout());
  const std::vector<int32_t> tokens(100, 7);
  const Key key = PrefixKeys(ns, 256, tokens).Checkpoint(100);
  ObjectHeader header = *PlanPrefixCheckpoint(OpaqueLayout(), ns, key, 256, 100);
  for (size_t i = 0; i < header.parts.size(); ++i) header.parts[i].checksum = 0x0101010101010101u * (i + 1);
  ExpectGolden("opaque_header", EncodeHeader(header));
}
TEST(ObjectHeader, OpaquePartsAreRefusedInSegments) {
  ObjectHeader header = ExampleHeader(ObjectKind::kSegment);
  header.parts.back().form = PartForm::kOpaqueRows;
  EXPECT_EQ(DecodeHeader(EncodeHeader(header)).status().message(), "object header: opaque part in a segment");
}
TEST(ObjectHeader, GoldenCheckpoint) {
  ObjectHeader header = ExampleHeader(ObjectKind::kCheckpoint);
  header.provenance = Provenance::kComposed;
  ExpectGolden("checkpoint_header", EncodeHeader(header));
}

TEST(ObjectHeader, GoldenSpan) {
  const ObjectHeader example = ExampleHeader(ObjectKind::kCheckpoint);
  ObjectHeader header = *PlanPrefixSpan(ExampleLayout(), example.ns, example.key, DType::kF16, 90, 100);
  header.provenance = Provenance::kComposed;
  for (size_t i = 0; i < header.parts.size(); ++i) header.parts[i].checksum = 0x0101010101010101 * (i + 1);
  ExpectGolden("span_header", EncodeHeader(header));
}

// A span has only its rows, and keys and values; no other object has such rows.
TEST(ObjectHeader, PartsOfOtherKindsAreRefused) {
  const auto refusal = [](const ObjectHeader& header) {
    return std::string(DecodeHeader(EncodeHeader(header)).status().message());
  };
  ObjectHeader span = *PlanPrefixSpan(ExampleLayout(), {}, {}, DType::kF16, 90, 100);
  EXPECT_EQ(refusal(span), "");
  span.kind = ObjectKind::kCheckpoint;
  EXPECT_THAT(refusal(span), testing::HasSubstr("not allowed in this kind of object"));
  ObjectHeader checkpoint = ExampleHeader(ObjectKind::kCheckpoint);
  checkpoint.kind = ObjectKind::kSpan;
  EXPECT_THAT(refusal(checkpoint), testing::HasSubstr("not allowed in this kind of object"));
  span.kind = ObjectKind::kSpan;
  const auto betas = std::ranges::find(span.parts, PartForm::kSpanBetas, &Part::form);
  ASSERT_NE(betas, span.parts.end());
  betas->dtype = DType::kF16;
  EXPECT_THAT(refusal(span), testing::HasSubstr("must be fp32"));
  betas->dtype = DType::kF32;
  span.stored_tokens -= 1;
  EXPECT_THAT(refusal(span), testing::HasSubstr("units do not cover the stored tokens"));
}

// An engine reads headers in place; after its lease has expired they may be other objects' headers.
TEST(ObjectHeader, DecodesVerifiedBytesDespiteConcurrentWrites) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "is a race";
#endif
  const ObjectHeader header = ExampleHeader(ObjectKind::kSegment);
  std::string bytes = EncodeHeader(header);
  std::atomic<bool> stop = false;
  std::promise<void> begun;
  std::thread writer([&] {
    volatile char* const byte = &bytes[bytes.size() - 24];  // of the last part's checksum
    // Each value stays for a while, because readers would miss a value that is replaced at once.
    const auto write = [byte, was = *byte](char value) {
      *byte = static_cast<char>(was + value);
      for (int i = 0; i < 50; ++i) (void)*byte;
    };
    for (write(1), begun.set_value(); !stop; write(1)) write(0);
  });
  begun.get_future().wait();
  for (int i = 0; i < 1'000'000; ++i) {
    const auto decoded = DecodeHeader(bytes);
    if (decoded.ok()) {
      EXPECT_EQ(*decoded, header);
    }
  }
  stop = true;
  writer.join();
}

TEST(ObjectHeader, DecodesFromTheStartOfALongerRun) {
  const ObjectHeader header = ExampleHeader(ObjectKind::kSegment);
  std::string bytes = EncodeHeader(header);
  bytes.resize(kExtent, '\x5a');
  const auto decoded = DecodeHeader(bytes);
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  EXPECT_EQ(*decoded, header);
}

TEST(ObjectHeader, EveryTruncationIsDataLoss) {
  const std::string bytes = EncodeHeader(ExampleHeader(ObjectKind::kSegment));
  for (size_t size = 0; size < bytes.size(); ++size) {
    ASSERT_EQ(DecodeHeader(absl::string_view(bytes).substr(0, size)).status().code(), absl::StatusCode::kDataLoss);
  }
}

TEST(ObjectHeader, EveryChangedByteIsDataLoss) {
  const std::string bytes = EncodeHeader(ExampleHeader(ObjectKind::kSegment));
  for (size_t i = 0; i < bytes.size(); ++i) {
    for (int change = 1; change < 256; ++change) {
      std::string changed = bytes;
      changed[i] = static_cast<char>(changed[i] ^ change);
      ASSERT_EQ(DecodeHeader(changed).status().code(), absl::StatusCode::kDataLoss) << "byte " << i;
    }
  }
}

// Writes the valid checksum of the bytes, so that the checks after it are tested.
void Seal(std::string& bytes) {
  std::memset(bytes.data() + 16, 0, 8);
  const uint64_t checksum = XXH3_64bits(bytes.data(), bytes.size());
  std::memcpy(bytes.data() + 16, &checksum, 8);
}

// Even with a valid checksum, no decoded header points outside the object, and bytes are canonical.
TEST(ObjectHeader, ChangedAndSealedHeadersAreRefusedOrSafe) {
  const ObjectHeader original = ExampleHeader(ObjectKind::kSegment);
  const std::string bytes = EncodeHeader(original);
  int accepted = 0;
  for (size_t i = 0; i < bytes.size(); ++i) {
    for (int change = 1; change < 256; ++change) {
      std::string changed = bytes;
      changed[i] = static_cast<char>(changed[i] ^ change);
      Seal(changed);
      const auto decoded = DecodeHeader(changed);
      if (!decoded.ok()) {
        ASSERT_EQ(decoded.status().code(), absl::StatusCode::kDataLoss) << i;
        continue;
      }
      if (i >= 16 && i < 24) continue;  // the checksum itself, which Seal restored
      ++accepted;
      ASSERT_FALSE(*decoded == original) << i;
      ASSERT_EQ(EncodeHeader(*decoded), changed) << i;
      uint64_t end = EncodedHeaderBytes(decoded->parts.size());
      for (const Part& part : decoded->parts) {
        for (uint32_t unit = 0; unit < part.units; ++unit) {
          ASSERT_GE(part.UnitOffset(unit), end) << i;
          end = part.UnitOffset(unit) + part.UnitBytes(unit);
          ASSERT_EQ(part.UnitOffset(unit) / kExtent, (end - 1) / kExtent) << i;
        }
      }
      ASSERT_LE(end, decoded->bytes) << i;
    }
  }
  EXPECT_GT(accepted, 0);
}

struct Fault {
  const char* what;  // end of the error message
  std::function<void(ObjectHeader&)> spoil;
};

TEST(ObjectHeader, NamesWhatIsWrong) {
  const Fault faults[] = {
      {"unknown kind 0; expected 1 to 4", [](ObjectHeader& h) { h.kind = ObjectKind{0}; }},
      {"unknown provenance 3; expected 1 or 2", [](ObjectHeader& h) { h.provenance = Provenance{3}; }},
      {"too many tokens", [](ObjectHeader& h) { h.tokens = limits::kMaxPromptTokens + 1; }},
      {"stored tokens out of range", [](ObjectHeader& h) { h.first_token = h.tokens + 1; }},
      {"stored tokens out of range", [](ObjectHeader& h) { h.stored_tokens = ~uint64_t{0}; }},
      {"wrong object size", [](ObjectHeader& h) { h.bytes = 10; }},
      {"wrong object size", [](ObjectHeader& h) { h.bytes = limits::kMaxObjectBytes + 1; }},
      {"part outside the object", [](ObjectHeader& h) { h.bytes -= 1; }},
      {"part outside the object", [](ObjectHeader& h) { h.parts[4].offset = h.bytes / 64 * 64 + 64; }},
      {"part outside the object", [](ObjectHeader& h) { h.parts[4].offset = ~uint64_t{0} / kExtent * kExtent; }},
      {"part outside the object", [](ObjectHeader& h) { h.parts[1].units = ~uint32_t{0}; }},
      {"parts out of order", [](ObjectHeader& h) { std::swap(h.parts[0], h.parts[1]); }},
      {"parts out of order", [](ObjectHeader& h) { h.parts[1].form = PartForm::kTransitionDense; }},
      {"parts overlap", [](ObjectHeader& h) { h.parts[1].offset = h.parts[0].offset; }},
      {"parts overlap", [](ObjectHeader& h) { h.parts[0].offset = 0; }},
      {"unknown form 21; expected 1 to 20", [](ObjectHeader& h) { h.parts[0].form = PartForm{21}; }},
      {"unknown dtype 9; expected 1 to 5", [](ObjectHeader& h) { h.parts[0].dtype = DType{9}; }},
      {"too many layers", [](ObjectHeader& h) { h.parts[4].layer = limits::kMaxLayers; }},
      {"head group in a form without head groups", [](ObjectHeader& h) { h.parts[1].head_group = 1; }},
      {"rank in a form without a rank", [](ObjectHeader& h) { h.parts[0].rank = 1; }},
      {"wrong unit size", [](ObjectHeader& h) { h.parts[0].units = 0; }},
      {"wrong unit size", [](ObjectHeader& h) { h.parts[0].unit_bytes = 0; }},
      {"wrong unit size", [](ObjectHeader& h) { h.parts[0].unit_bytes = kExtent + 1; }},
      {"wrong size of the last unit", [](ObjectHeader& h) { h.parts[0].last_unit_bytes = 0; }},
      {"wrong size of the last unit", [](ObjectHeader& h) { h.parts[0].last_unit_bytes = h.parts[0].unit_bytes + 1; }},
      {"matrices of different sizes", [](ObjectHeader& h) { h.parts[0].last_unit_bytes -= 4; }},
      {"matrices of different sizes", [](ObjectHeader& h) { h.parts[0].unit_tokens = 1; }},
      {"offset not aligned", [](ObjectHeader& h) { h.parts[0].offset += 4; }},
      {"unit crosses an extent boundary", [](ObjectHeader& h) { h.parts[4].offset = kExtent - 64; }},
      {"wrong number of tokens per unit", [](ObjectHeader& h) { h.parts[3].unit_tokens = 0; }},
      {"wrong number of tokens per unit", [](ObjectHeader& h) { h.parts[3].unit_tokens = 3; }},
      {"units do not cover the stored tokens", [](ObjectHeader& h) { h.stored_tokens -= 1; }},
      {"units do not cover the stored tokens", [](ObjectHeader& h) { h.parts[3].last_unit_bytes -= 1; }},
      {"units do not cover the stored tokens", [](ObjectHeader& h) { h.parts[3].units += 1; }},
  };
  for (const Fault& fault : faults) {
    SCOPED_TRACE(fault.what);
    ObjectHeader header = ExampleHeader(ObjectKind::kSegment);
    fault.spoil(header);
    const auto decoded = DecodeHeader(EncodeHeader(header));
    EXPECT_EQ(decoded.status().code(), absl::StatusCode::kDataLoss);
    EXPECT_EQ(decoded.status().message(), std::string("object header: ") + fault.what);
  }
}

TEST(ObjectHeader, NamesWhatIsWrongInTheFixedFields) {
  const std::string bytes = EncodeHeader(ExampleHeader(ObjectKind::kSegment));
  const auto message = [&bytes](size_t offset, char value, bool seal) {
    std::string changed = bytes;
    changed[offset] = value;
    if (seal) Seal(changed);
    return std::string(DecodeHeader(changed).status().message());
  };
  EXPECT_EQ(message(0, 'X', true), "object header: wrong magic");
  EXPECT_EQ(message(8, 2, true), "object header: format version 2; expected 1");
  EXPECT_EQ(message(12, 7, true), "object header: wrong header size");
  EXPECT_EQ(message(24, 9, true), "object header: wrong header size");
  EXPECT_EQ(message(30, 1, true), "object header: tensor-parallel rank out of range");
  EXPECT_EQ(message(128 + 28, 1, true), "object header: reserved bytes are not 0");
  EXPECT_EQ(message(128 + 63, 1, true), "object header: reserved bytes are not 0");
  EXPECT_EQ(message(40, 'X', false), "object header: wrong checksum");
}

TEST(ObjectHeader, RandomBytesAreDataLoss) {
  const auto seed = std::random_device()();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  const std::string start = EncodeHeader(ExampleHeader(ObjectKind::kSegment)).substr(0, 12);
  for (int i = 0; i < 2000; ++i) {
    std::string bytes(random() % 1024, '\0');
    for (char& byte : bytes) byte = static_cast<char>(random());
    if (i % 2 == 0 && bytes.size() >= start.size()) bytes.replace(0, start.size(), start);
    ASSERT_EQ(DecodeHeader(bytes).status().code(), absl::StatusCode::kDataLoss);
  }
}

}  // namespace
}  // namespace ashlar
