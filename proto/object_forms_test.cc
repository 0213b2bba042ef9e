// SPDX-License-Identifier: Apache-2.0
// The forms in which heads' transitions are stored: plans with them, and headers that say something else.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <random>

#include "proto/limits.h"
#include "proto/object.h"
#include "proto/testing/golden.h"
#include "proto/testing/sample_layouts.h"
#include "proto/tuple_parts.h"

namespace ashlar {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

using limits::kExtentBytes;

LinearLayer KdaLayer() {
  return {.family = Family::kKda,
          .key_heads = 2,
          .value_heads = 4,
          .d_k = 8,
          .d_v = 4,
          .state_dtype = DType::kF16,
          .conv_channels = 40,
          .conv_kernel = 4};
}

// A kda layer in fp16 and a lightning layer in bf16 (docs/formats.md, section 4).
Layout FormsLayout() {
  Layout layout{.page_tokens = 16, .head = 8, .tail = 4};
  layout.layers.push_back(KdaLayer());
  layout.layers.push_back(LinearLayer{.family = Family::kLightning,
                                      .key_heads = 2,
                                      .value_heads = 2,
                                      .d_k = 8,
                                      .d_v = 4,
                                      .decay_table = {-0.5f, -0.25f},
                                      .state_dtype = DType::kBF16,
                                      .transition = TransitionForm::kScalar});
  return layout;
}

std::vector<TransitionRun> FormsRuns() {
  return {{.layer = 0, .first_head = 0, .heads = 1, .form = TransitionForm::kZero},
          {.layer = 0, .first_head = 1, .heads = 1, .form = TransitionForm::kLowRank, .rank = 2},
          {.layer = 0, .first_head = 2, .heads = 1, .form = TransitionForm::kDense},
          {.layer = 0, .first_head = 3, .heads = 1, .form = TransitionForm::kZero}};
}

ObjectHeader NaturalHeader(const Layout& layout) {
  const std::vector<int32_t> run(100, 7);
  const NamespaceId ns = MakeNamespace("default", ExampleIdentity(), layout);
  return *PlanObject(layout, ns, MakeKey(ns, ObjectKind::kSegment, run), ObjectKind::kSegment, 100);
}

ObjectHeader FormsHeader() {
  ObjectHeader header = *PlanForms(NaturalHeader(FormsLayout()), FormsRuns());
  for (size_t i = 0; i < header.parts.size(); ++i) {
    if (!header.parts[i].Empty()) header.parts[i].checksum = 0x0101010101010101u * (i + 1);
  }
  return header;
}

// Returns the form and rank of every head in the table, by (layer, head).
std::map<std::pair<uint32_t, uint32_t>, std::tuple<TransitionForm, uint32_t>> HeadsOf(const ObjectHeader& header) {
  std::map<std::pair<uint32_t, uint32_t>, std::tuple<TransitionForm, uint32_t>> heads;
  for (const Part& part : header.parts) {
    const auto kind = TransitionFormOf(part.form);
    for (uint32_t unit = 0; kind.has_value() && unit < part.units; ++unit) {
      const bool fresh =
          heads.emplace(std::pair(part.layer, part.head_group + unit), std::tuple(*kind, part.rank)).second;
      EXPECT_TRUE(fresh) << "layer " << part.layer << " head " << part.head_group + unit;
    }
  }
  return heads;
}

TEST(PlanForms, StoresEveryHeadInItsRunsForm) {
  const auto seed = std::random_device()();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  int planned = 0;
  for (int i = 0; i < 200; ++i) {
    const Layout layout = RandomLayout(random);
    const auto natural =
        PlanObject(layout, {}, {}, ObjectKind::kSegment, layout.head + layout.tail + 1 + random() % 500);
    ASSERT_TRUE(natural.ok());
    const std::vector<TransitionRun> runs = RandomRuns(random, layout);
    const auto header = PlanForms(*natural, runs);
    if (!header.ok()) {  // only possible if many small runs take more extents
      EXPECT_THAT(std::string(header.status().message()), HasSubstr("extents"));
      continue;
    }
    ++planned;
    EXPECT_LE(header->Extents(), natural->Extents());
    auto expected = HeadsOf(*natural);
    for (const TransitionRun& run : runs) {
      for (uint32_t head = run.first_head; head < run.first_head + run.heads; ++head) {
        expected[{run.layer, head}] = {run.form, run.rank};
      }
    }
    EXPECT_EQ(HeadsOf(*header), expected);
    uint64_t end = EncodedHeaderBytes(header->parts.size());
    for (const Part& part : header->parts) {
      for (uint32_t unit = 0; !part.Empty() && unit < part.units; ++unit) {
        ASSERT_GE(part.UnitOffset(unit), end);
        end = part.UnitOffset(unit) + part.UnitBytes(unit);
        ASSERT_EQ(part.UnitOffset(unit) / kExtentBytes, (end - 1) / kExtentBytes);
      }
    }
    EXPECT_EQ(header->bytes, end);
    const auto decoded = DecodeHeader(EncodeHeader(*header));
    ASSERT_TRUE(decoded.ok()) << decoded.status();
    EXPECT_EQ(*decoded, *header);
    for (uint32_t layer = 0; layer < layout.layers.size(); ++layer) {
      const auto* linear = std::get_if<LinearLayer>(&layout.layers[layer]);
      if (linear == nullptr) continue;
      EXPECT_TRUE(FindTuple(*decoded, layer, TupleShapeOf(*linear)).ok());
    }
  }
  EXPECT_GT(planned, 100);
}

TEST(PlanForms, NoRunsKeepsPlan) {
  const ObjectHeader natural = NaturalHeader(FormsLayout());
  EXPECT_EQ(*PlanForms(natural, {}), natural);
}

TEST(PlanForms, ZeroHeadsTakeNoBytes) {
  Layout layout = FormsLayout();
  auto& kda = std::get<LinearLayer>(layout.layers[0]);
  kda.d_k = 256, kda.state_dtype = DType::kF32;
  const ObjectHeader natural = NaturalHeader(layout);
  const TransitionRun all{.layer = 0, .heads = 4, .form = TransitionForm::kZero};
  const ObjectHeader zero = *PlanForms(natural, {&all, 1});
  EXPECT_EQ(natural.Extents(), 6u) << "each of the four heads takes a whole one";
  EXPECT_EQ(zero.Extents(), 1u);
}

TEST(PlanForms, RefusesByFieldWhatIsInvalid) {
  struct Case {
    const char* message;
    std::vector<TransitionRun> runs;
  };
  using enum TransitionForm;
  const Case cases[] = {
      {"layer: 2 has no transitions", {{.layer = 2, .heads = 1}}},
      {"first_head: 4 is out of range; the layer has 4 heads", {{.first_head = 4, .heads = 1}}},
      {"heads: first_head + heads is 0 + 0; the layer has 4 heads", {{.heads = 0}}},
      {"heads: first_head + heads is 0 + 5; the layer has 4 heads", {{.heads = 5}}},
      {"heads: first_head + heads is 1 + 4294967295; the layer has 4 heads",
       {{.heads = 1}, {.first_head = 1, .heads = ~uint32_t{0}}}},
      {"layer 0: head 3 has no transition", {{.heads = 3}}},
      {"layer 0: head 0 has no transition", {{.first_head = 1, .heads = 3}}},
      {"layer 0: head 1 has no transition", {{.heads = 1}, {.first_head = 2, .heads = 2}}},
      {"layer 0: head 1 has two transitions", {{.heads = 2}, {.first_head = 1, .heads = 3}}},
      {"layer 0: head 0 has two transitions", {{.heads = 4}, {.heads = 4}}},
      {"rank: must be at least 1", {{.heads = 4, .form = kLowRank}}},
      {"rank: 3 takes as many bytes as dense; use dense", {{.heads = 4, .form = kLowRank, .rank = 3}}},
      {"rank: 9 takes as many bytes as dense; use dense", {{.heads = 4, .form = kLowRank, .rank = 9}}},
      {"rank: 4294967295 takes as many bytes as dense; use dense",
       {{.heads = 4, .form = kLowRank, .rank = ~uint32_t{0}}}},
      {"rank: 2147483648 takes as many bytes", {{.heads = 4, .form = kLowRank, .rank = 0x80000000}}},
      {"rank: 2147483649 takes as many bytes", {{.heads = 4, .form = kLowRank, .rank = 0x80000001}}},
      {"rank: must be 0; only low rank has a rank", {{.heads = 4, .form = kZero, .rank = 1}}},
      {"form: 8 does not match the family of the layer; expected 1", {{.heads = 4, .form = kScalar}}},
      {"form: 1 does not match the family of the layer; expected ", {{.layer = 1, .heads = 2, .form = kDense}}},
      {"form: low rank requires a layer", {{.layer = 1, .heads = 2, .form = kLowRank, .rank = 1}}},
  };
  const ObjectHeader natural = NaturalHeader(FormsLayout());
  for (const Case& refused : cases) {
    const auto header = PlanForms(natural, refused.runs);
    EXPECT_EQ(header.status().code(), absl::StatusCode::kInvalidArgument) << refused.message;
    EXPECT_THAT(std::string(header.status().message()), StartsWith(refused.message));
  }
}

TEST(PlanForms, ACheckpointHasNoForms) {
  const ObjectHeader checkpoint = *PlanObject(FormsLayout(), {}, {}, ObjectKind::kCheckpoint, 100);
  const TransitionRun run{.heads = 4, .form = TransitionForm::kZero};
  EXPECT_THAT(std::string(PlanForms(checkpoint, {&run, 1}).status().message()),
              StartsWith("layer: 0 has no transitions"));
}

TEST(PlanForms, RefusesMoreRunsThanATableHolds) {
  Layout layout{.page_tokens = 16};
  layout.layers.assign(100, LinearLayer{.key_heads = 1, .value_heads = 64, .d_k = 16, .d_v = 4});
  std::vector<TransitionRun> runs;
  for (uint32_t layer = 0; layer < layout.layers.size(); ++layer) {
    for (uint32_t head = 0; head < 64; ++head) {
      runs.push_back({layer, head, 1, head % 2 == 0 ? TransitionForm::kZero : TransitionForm::kDense});
    }
  }
  const ObjectHeader natural = *PlanObject(layout, {}, {}, ObjectKind::kSegment, 1);
  EXPECT_THAT(std::string(PlanForms(natural, runs).status().message()), HasSubstr("parts; an object has at most 4094"));
  runs.resize(60 * 64);
  EXPECT_TRUE(PlanForms(natural, runs).ok());
}

// One small head less does not pay for the table entries that it needs.
TEST(PlanForms, RefusesAPlanOfMoreExtents) {
  Layout layout{.page_tokens = 16};
  layout.layers.push_back(LinearLayer{.key_heads = 1, .value_heads = 40, .d_k = 1, .d_v = 1});
  layout.layers.push_back(LinearLayer{.key_heads = 1, .value_heads = 1, .d_k = 1, .d_v = 1});
  layout.layers.push_back(AttentionLayer{.kv_heads = 1, .key_dim = 1, .value_dim = 1});
  std::vector<TransitionRun> runs;
  for (uint32_t head = 0; head < 40; ++head) runs.push_back({0, head, 1, TransitionForm::kDense});
  // The last token that still fits an extent.
  uint64_t tokens = 1;
  while (PlanObject(layout, {}, {}, ObjectKind::kSegment, tokens + 64)->Extents() == 1) tokens += 64;
  const auto header = PlanForms(*PlanObject(layout, {}, {}, ObjectKind::kSegment, tokens), runs);
  EXPECT_EQ(header.status().message(), "the given forms take 2 extents; the natural forms take only 1");
}

TEST(FormsHeader, Golden) {
  ExpectGolden("forms_header", EncodeHeader(FormsHeader()));
}

// In the order of the table: layer 0's dense, state, conv tail, low rank, zero, zero, exponents; layer 1's state,
// scalar.
TEST(FormsHeader, NamesWhatIsWrong) {
  struct Fault {
    const char* what;
    std::function<void(ObjectHeader&)> spoil;
  };
  const Fault faults[] = {
      {"low rank without a rank", [](ObjectHeader& h) { h.parts[3].rank = 0; }},
      {"rank in a form without a rank", [](ObjectHeader& h) { h.parts[4].rank = 1; }},
      {"head group in a form without head groups", [](ObjectHeader& h) { h.parts[6].head_group = 1; }},
      {"two transitions for one head", [](ObjectHeader& h) { h.parts[3].head_group = 0; }},
      {"two transitions for one head", [](ObjectHeader& h) { h.parts[4].units = 2; }},
      {"transition head out of range", [](ObjectHeader& h) { h.parts[5].head_group = 4; }},
      {"transition head out of range", [](ObjectHeader& h) { h.parts[5].units = ~uint32_t{0}; }},
      {"head without a transition", [](ObjectHeader& h) { h.parts.erase(h.parts.begin() + 5); }},
      {"head without a transition", [](ObjectHeader& h) { h.parts.pop_back(); }},
      {"transition head out of range", [](ObjectHeader& h) { h.parts.erase(h.parts.begin() + 7); }},
      {"transition in a kind of object without transitions", [](ObjectHeader& h) { h.kind = ObjectKind::kCheckpoint; }},
      {"states without exponents", [](ObjectHeader& h) { h.parts.erase(h.parts.begin() + 6); }},
      {"exponents for states without exponents", [](ObjectHeader& h) { h.parts[1].dtype = DType::kBF16; }},
      {"exponents do not match the states", [](ObjectHeader& h) { h.parts[6].dtype = DType::kF32; }},
      {"exponents do not match the states",
       [](ObjectHeader& h) { h.parts[6].unit_bytes = h.parts[6].last_unit_bytes = 12; }},
      {"wrong transition dtype", [](ObjectHeader& h) { h.parts[0].dtype = DType::kBF16; }},
      {"wrong transition dtype", [](ObjectHeader& h) { h.parts[3].dtype = DType::kF32; }},
      {"wrong transition dtype", [](ObjectHeader& h) { h.parts[4].dtype = DType::kF32; }},
      {"wrong transition dtype", [](ObjectHeader& h) { h.parts[8].dtype = DType::kF16; }},
      {"wrong unit size", [](ObjectHeader& h) { h.parts[4].units = 0; }},
      {"wrong unit size", [](ObjectHeader& h) { h.parts[4].unit_bytes = h.parts[4].last_unit_bytes = 4; }},
      {"wrong unit size", [](ObjectHeader& h) { h.parts[3].unit_bytes = h.parts[3].last_unit_bytes = 0; }},
      {"wrong size of the last unit", [](ObjectHeader& h) { h.parts[4].last_unit_bytes = 4; }},
      {"part with bytes but size 0", [](ObjectHeader& h) { h.parts[4].offset = 64; }},
      {"part with bytes but size 0", [](ObjectHeader& h) { h.parts[4].checksum = 1; }},
      {"parts out of order", [](ObjectHeader& h) { std::swap(h.parts[4], h.parts[5]); }},
  };
  ASSERT_EQ(FormsHeader().parts.size(), 9u);
  for (const Fault& fault : faults) {
    SCOPED_TRACE(fault.what);
    ObjectHeader header = FormsHeader();
    fault.spoil(header);
    const auto decoded = DecodeHeader(EncodeHeader(header));
    EXPECT_EQ(decoded.status().code(), absl::StatusCode::kDataLoss);
    EXPECT_EQ(decoded.status().message(), std::string("object header: ") + fault.what);
  }
}

}  // namespace
}  // namespace ashlar
