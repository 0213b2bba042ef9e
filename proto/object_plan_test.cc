// SPDX-License-Identifier: Apache-2.0
// Planning objects: the parts that a layout gives, and the places of their units.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <random>
#include <tuple>
#include <vector>

#include "proto/limits.h"
#include "proto/object.h"
#include "proto/testing/sample_layouts.h"

namespace ashlar {
namespace {

using limits::kExtentBytes;

// Returns the offsets that UnitOffset promises, computed one unit after the other.
std::vector<uint64_t> NaiveUnitOffsets(const Part& part) {
  std::vector<uint64_t> offsets;
  uint64_t next = part.offset;
  for (uint32_t i = 0; i < part.units; ++i) {
    if (next / kExtentBytes != (next + part.unit_bytes - 1) / kExtentBytes)
      next = (next / kExtentBytes + 1) * kExtentBytes;
    offsets.push_back(next);
    next += part.unit_bytes;
    while (next % limits::kUnitAlignment != 0) ++next;
  }
  return offsets;
}

TEST(Part, UnitOffsetEqualsANaiveWalk) {
  const auto seed = std::random_device()();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  for (int i = 0; i < 300; ++i) {
    Part part;
    // All orders of magnitude, the largest included.
    part.unit_bytes = static_cast<uint32_t>(std::min<uint64_t>(kExtentBytes, 1 + random() % (2 << (random() % 18))));
    part.units = 1 + random() % 300;
    part.last_unit_bytes = 1 + random() % part.unit_bytes;
    const uint64_t offsets_in_extent = (kExtentBytes - part.unit_bytes) / limits::kUnitAlignment + 1;
    part.offset = random() % 4 * kExtentBytes + random() % offsets_in_extent * limits::kUnitAlignment;
    const std::vector<uint64_t> offsets = NaiveUnitOffsets(part);
    for (uint32_t unit = 0; unit < part.units; ++unit) {
      ASSERT_EQ(part.UnitOffset(unit), offsets[unit]) << "unit " << unit << " of " << part.unit_bytes << " bytes";
    }
  }
}

TEST(PlanPrefix, OpaqueRowsAreInBlocksAndOpaqueStatesInCheckpoints) {
  const Layout layout = OpaqueLayout();
  const auto block = PlanPrefixBlock(layout, {}, {}, 256, 512);
  ASSERT_TRUE(block.ok()) << block.status();
  EXPECT_EQ(block->Find(2, PartForm::kOpaqueRows)->Bytes(), 256u * 48);
  EXPECT_TRUE(block->Layer(3).empty());
  EXPECT_EQ(block->Find(2, PartForm::kOpaqueState), nullptr);
  const auto checkpoint = PlanPrefixCheckpoint(layout, {}, {}, 256, 600);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ(checkpoint->Find(2, PartForm::kOpaqueRows)->Bytes(), (600u - 512) * 48);
  const Part* const state = checkpoint->Find(2, PartForm::kOpaqueState);
  ASSERT_NE(state, nullptr);
  EXPECT_EQ(state->units, 4u);
  EXPECT_EQ(state->last_unit_bytes, 100'000u - 3 * 32 * 1024);
  EXPECT_EQ(checkpoint->Find(3, PartForm::kOpaqueState)->Bytes(), 6u);
  for (const auto& plan : {*block, *checkpoint}) {
    const auto decoded = DecodeHeader(EncodeHeader(plan));
    ASSERT_TRUE(decoded.ok()) << decoded.status();
    EXPECT_EQ(*decoded, plan);
  }
}

TEST(PlanObject, RefusesSegmentsOfOpaqueLayersByTheLayer) {
  for (const ObjectKind kind : {ObjectKind::kSegment, ObjectKind::kCheckpoint}) {
    const auto plan = PlanObject(OpaqueLayout(), {}, {}, kind, 100);
    EXPECT_EQ(plan.status().code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(plan.status().message()), testing::StartsWith("layout.layers[2]: is opaque"));
  }
}

TEST(PlanPrefix, RefusesSpansOfOpaqueStates) {
  const auto plan = PlanPrefixSpan(OpaqueLayout(), {}, {}, DType::kF32, 90, 100);
  EXPECT_EQ(plan.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(plan.status().message()), testing::StartsWith("layout.layers[2].state_bytes: "));
}

// The parts that a layout should have, written independently.
std::vector<std::tuple<uint32_t, PartForm, DType, uint64_t>> ExpectedParts(const Layout& layout,
                                                                           const ObjectHeader& header) {
  std::vector<std::tuple<uint32_t, PartForm, DType, uint64_t>> parts;  // layer, form, dtype, bytes
  for (uint32_t i = 0; i < layout.layers.size(); ++i) {
    if (const auto* l = std::get_if<LinearLayer>(&layout.layers[i])) {
      const bool wide = l->state_dtype == DType::kF32;
      const uint64_t element = wide ? 4 : 2;
      if (header.kind == ObjectKind::kSegment) {
        switch (l->transition) {
          case TransitionForm::kScalar:
            parts.emplace_back(i, PartForm::kTransitionScalar, DType::kF32, uint64_t{4} * l->value_heads);
            break;
          case TransitionForm::kDiagonal:
            parts.emplace_back(i, PartForm::kTransitionDiagonal, DType::kF32, uint64_t{4} * l->value_heads * l->d_k);
            break;
          case TransitionForm::kElementwise:
            parts.emplace_back(i, PartForm::kTransitionElementwise, DType::kF32, uint64_t{4} * l->value_heads * l->d_v);
            break;
          default:
            parts.emplace_back(i, PartForm::kTransitionDense, wide ? DType::kF32 : DType::kF16,
                               element * l->value_heads * l->d_k * l->d_k);
        }
      }
      parts.emplace_back(i, PartForm::kState, l->state_dtype, element * l->value_heads * l->d_k * l->d_v);
      if (l->conv_kernel > 0) {
        const uint64_t inputs = uint64_t{l->conv_kernel - 1} * l->conv_channels;
        parts.emplace_back(i, PartForm::kConvTail, ConvType(*l), ElementBytes(ConvType(*l)) * inputs);
      }
      if (l->state_dtype == DType::kF16) {
        parts.emplace_back(i, PartForm::kStateExponents, DType::kF16, uint64_t{4} * l->value_heads);
      }
    } else {
      const auto& a = std::get<AttentionLayer>(layout.layers[i]);
      const uint64_t row = header.stored_tokens * a.kv_heads * ElementBytes(a.dtype);
      parts.emplace_back(i, PartForm::kKeys, a.dtype, row * a.key_dim);
      parts.emplace_back(i, PartForm::kValues, a.dtype, row * a.value_dim);
      if (a.scales) {
        parts.emplace_back(i, PartForm::kKeyScales, DType::kF32, header.stored_tokens * a.kv_heads * 4);
        parts.emplace_back(i, PartForm::kValueScales, DType::kF32, header.stored_tokens * a.kv_heads * 4);
      }
    }
  }
  std::ranges::sort(parts);
  return parts;
}

void CheckPlan(const Layout& layout, const ObjectHeader& header) {
  std::vector<std::tuple<uint32_t, PartForm, DType, uint64_t>> parts;
  uint64_t end = EncodedHeaderBytes(header.parts.size());
  ASSERT_LE(end, kExtentBytes);
  for (const Part& part : header.parts) {
    parts.emplace_back(part.layer, part.form, part.dtype, part.Bytes());
    ASSERT_EQ(part.head_group, 0);
    ASSERT_EQ(part.rank, 0u);
    ASSERT_EQ(part.checksum, 0u);
    if (IsScales(part.form)) {
      const Part& rows =
          *header.Find(part.layer, part.form == PartForm::kKeyScales ? PartForm::kKeys : PartForm::kValues);
      ASSERT_EQ(part.dtype, DType::kF32);
      ASSERT_EQ(part.unit_tokens, rows.unit_tokens) << "a unit of scales belongs to the unit of rows of its number";
      ASSERT_EQ(part.units, rows.units);
    }
    if (IsRows(part.form)) {
      ASSERT_TRUE(std::has_single_bit(part.unit_tokens));
      ASSERT_TRUE(part.unit_tokens == 1 || part.unit_bytes <= limits::kRowUnitBytes);
      ASSERT_GT(2 * part.unit_bytes, limits::kRowUnitBytes) << "a larger unit would have fitted";
      ASSERT_EQ(part.units, (header.stored_tokens + part.unit_tokens - 1) / part.unit_tokens);
    }
    for (uint32_t unit = 0; unit < part.units; ++unit) {
      const uint64_t offset = part.UnitOffset(unit);
      ASSERT_EQ(offset % limits::kUnitAlignment, 0u);
      ASSERT_GE(offset, end);
      end = offset + part.UnitBytes(unit);
      ASSERT_EQ(offset / kExtentBytes, (end - 1) / kExtentBytes) << "straddles two extents";
    }
    ASSERT_EQ(header.Find(part.layer, part.form), &part);
  }
  ASSERT_EQ(header.bytes, end);
  ASSERT_EQ(header.Extents(), (end - 1) / kExtentBytes + 1);
  ASSERT_EQ(parts, ExpectedParts(layout, header));
}

TEST(PlanObject, HoldsItsInvariantsOnRandomLayouts) {
  const auto seed = std::random_device()();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  for (int i = 0; i < 100; ++i) {
    const Layout layout = RandomLayout(random);
    const uint64_t seams = layout.head + layout.tail;
    const uint64_t tokens = seams + 1 + random() % 2000;
    const absl::StatusOr<ObjectHeader> segment = PlanObject(layout, {}, {}, ObjectKind::kSegment, tokens);
    ASSERT_TRUE(segment.ok()) << segment.status();
    EXPECT_EQ(segment->first_token, layout.head);
    EXPECT_EQ(segment->stored_tokens, tokens - seams);
    ASSERT_NO_FATAL_FAILURE(CheckPlan(layout, *segment));
    const absl::StatusOr<ObjectHeader> checkpoint = PlanObject(layout, {}, {}, ObjectKind::kCheckpoint, tokens);
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    EXPECT_EQ(checkpoint->first_token, 0u);
    EXPECT_EQ(checkpoint->stored_tokens, tokens);
    ASSERT_NO_FATAL_FAILURE(CheckPlan(layout, *checkpoint));
    for (const ObjectHeader& header : {*segment, *checkpoint}) {
      const absl::StatusOr<ObjectHeader> decoded = DecodeHeader(EncodeHeader(header));
      ASSERT_TRUE(decoded.ok()) << decoded.status();
      ASSERT_EQ(*decoded, header);
    }
  }
}

TEST(PlanObject, TheDeepestLayoutHasItsTableInOneExtent) {
  Layout layout{.page_tokens = 16, .head = 1};
  layout.layers.assign(
      limits::kMaxLayers,
      LinearLayer{.key_heads = 1, .value_heads = 1, .d_k = 1, .d_v = 1, .conv_channels = 1, .conv_kernel = 2});
  ASSERT_EQ(Validate(layout), absl::OkStatus());
  const auto header = PlanObject(layout, {}, {}, ObjectKind::kSegment, 2);
  ASSERT_TRUE(header.ok()) << header.status();
  EXPECT_EQ(header->parts.size(), 3 * limits::kMaxLayers);
  ASSERT_NO_FATAL_FAILURE(CheckPlan(layout, *header));
  EXPECT_EQ(*DecodeHeader(EncodeHeader(*header)), *header);
}

TEST(PlanObject, RefusesALayoutWhoseTableIsLargerThanAnExtent) {
  Layout layout{.page_tokens = 16};
  layout.layers.assign(
      limits::kMaxLayers,
      AttentionLayer{.kv_heads = 1, .key_dim = 1, .value_dim = 1, .dtype = DType::kF8E4M3, .scales = true});
  ASSERT_EQ(Validate(layout), absl::OkStatus());
  const auto refused = PlanObject(layout, {}, {}, ObjectKind::kCheckpoint, 1);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(refused.status().message()), testing::StartsWith("layout.layers: "));
  layout.layers.pop_back();
  EXPECT_TRUE(PlanObject(layout, {}, {}, ObjectKind::kCheckpoint, 1).ok());
}

TEST(PlanObject, ASegmentWithoutInteriorIsRefused) {
  const Layout layout = ExampleLayout();
  for (const uint64_t tokens : {uint64_t{1}, uint64_t{layout.head} + layout.tail}) {
    const auto header = PlanObject(layout, {}, {}, ObjectKind::kSegment, tokens);
    EXPECT_EQ(header.status().code(), absl::StatusCode::kFailedPrecondition);
  }
  const auto one = PlanObject(layout, {}, {}, ObjectKind::kSegment, layout.head + layout.tail + 1);
  ASSERT_TRUE(one.ok());
  EXPECT_EQ(one->stored_tokens, 1u);
  EXPECT_TRUE(PlanObject(layout, {}, {}, ObjectKind::kCheckpoint, 1).ok());
}

TEST(PlanObject, RefusesImpossibleTokenCounts) {
  const auto refused = [](const Layout& layout, uint64_t tokens) {
    const auto header = PlanObject(layout, {}, {}, ObjectKind::kCheckpoint, tokens);
    return header.status().code() == absl::StatusCode::kInvalidArgument &&
           header.status().message().find("tokens: ") == 0;
  };
  EXPECT_TRUE(refused(ExampleLayout(), 0));
  EXPECT_TRUE(refused(ExampleLayout(), limits::kMaxPromptTokens + 1));
  EXPECT_TRUE(refused(ExampleLayout(), ~uint64_t{0}));
  Layout wide{.page_tokens = 1};
  wide.layers.assign(limits::kMaxLayers, AttentionLayer{.kv_heads = 64, .key_dim = 1024, .value_dim = 1024});
  ASSERT_EQ(Validate(wide), absl::OkStatus());
  EXPECT_TRUE(refused(wide, limits::kMaxPromptTokens)) << "larger than any object";
}

TEST(PlanObject, NamesTheKindThatHasNoStoredForm) {
  for (const auto& [kind, name] : {std::pair(ObjectKind::kPrefixBlock, "prefix_page"), {ObjectKind::kSpan, "span"}}) {
    const auto header = PlanObject(ExampleLayout(), {}, {}, kind, 100);
    EXPECT_EQ(header.status().code(), absl::StatusCode::kUnimplemented);
    EXPECT_THAT(std::string(header.status().message()), testing::StartsWith(std::string("kind: ") + name));
  }
}

// vLLM holds 16-bit tails with fp32 states.
TEST(PlanObject, TailsHaveTheirOwnType) {
  const Layout layout = TailsLayout();
  const auto& linear = std::get<LinearLayer>(layout.layers[0]);
  const auto object = PlanObject(layout, {}, {}, ObjectKind::kSegment, 100);
  ASSERT_TRUE(object.ok()) << object.status();
  const Part* const tail = object->Find(0, PartForm::kConvTail);
  ASSERT_NE(tail, nullptr);
  EXPECT_EQ(tail->dtype, DType::kBF16);
  EXPECT_EQ(tail->Bytes(), uint64_t{linear.conv_kernel - 1} * linear.conv_channels * 2);
  EXPECT_EQ(object->Find(0, PartForm::kState)->dtype, DType::kF32);
  const auto span = PlanPrefixSpan(layout, {}, {}, DType::kF16, 10, 20);
  ASSERT_TRUE(span.ok()) << span.status();
  EXPECT_EQ(span->Find(0, PartForm::kSpanConvInputs)->dtype, DType::kBF16);
  EXPECT_EQ(span->Find(0, PartForm::kSpanConvInputs)->Bytes(), uint64_t{10} * linear.conv_channels * 2);
}

}  // namespace
}  // namespace ashlar
