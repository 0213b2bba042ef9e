// SPDX-License-Identifier: Apache-2.0
#include "proto/layout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <ostream>
#include <random>

#include "proto/limits.h"
#include "proto/testing/sample_layouts.h"

namespace ashlar {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr uint32_t kHuge = std::numeric_limits<uint32_t>::max();

// Layer 0 of the example is gdn with a convolution, layer 1 attention with RoPE.
LinearLayer& Linear(Layout& layout) {
  return std::get<LinearLayer>(layout.layers[0]);
}
AttentionLayer& Attention(Layout& layout) {
  return std::get<AttentionLayer>(layout.layers[1]);
}

struct Refusal {
  const char* name;
  const char* field;  // that the message begins with
  std::function<void(Layout&)> spoil;
};

void PrintTo(const Refusal& refusal, std::ostream* out) {
  *out << refusal.name;
}

class LayoutRefusal : public testing::TestWithParam<Refusal> {};

TEST_P(LayoutRefusal, NamesTheField) {
  Layout layout = ExampleLayout();
  ASSERT_TRUE(Validate(layout).ok());
  GetParam().spoil(layout);
  const absl::Status status = Validate(layout);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), testing::StartsWith(std::string(GetParam().field) + ": "));
  // The decoder refuses every layout that Validate refuses.
  EXPECT_FALSE(DecodeLayout(EncodeLayout(layout)).ok());
}

TEST(Layout, OpaqueLayersAreRefusedByTheirField) {
  const auto message = [](const OpaqueLayer& opaque) {
    Layout layout = ExampleLayout();
    layout.layers.push_back(opaque);
    EXPECT_FALSE(DecodeLayout(EncodeLayout(layout)).ok());
    return std::string(Validate(layout).message());
  };
  EXPECT_TRUE(Validate(OpaqueLayout()).ok());
  EXPECT_THAT(message({}), testing::StartsWith("layout.layers[2].token_bytes: 0, and state_bytes is 0"));
  EXPECT_THAT(message({.token_bytes = kHuge}), testing::StartsWith("layout.layers[2].token_bytes: "));
  EXPECT_THAT(message({.state_bytes = ~uint64_t{0}}), testing::StartsWith("layout.layers[2].state_bytes: "));
}

// Makes layer 0 a member of `family` that is valid except for the test's change.
void MakeScalar(Layout& l, Family family = Family::kLightning) {
  Linear(l).family = family;
  Linear(l).transition = TransitionForm::kScalar;
  Linear(l).decay_table.assign(Linear(l).value_heads, 0.5f);
}

const Refusal kWholeLayout[] = {
    {"NoPageTokens", "layout.page_tokens", [](Layout& l) { l.page_tokens = 0; }},
    {"HugePageTokens", "layout.page_tokens", [](Layout& l) { l.page_tokens = kHuge; }},
    {"PageLargerThanAnObject", "layout.page_tokens",
     [](Layout& l) {
       l.page_tokens = limits::kMaxPageTokens;
       AttentionLayer wide{.kv_heads = 64, .key_dim = 1024, .value_dim = 1024};
       l.layers.assign(64, wide);
     }},
    {"HugeHead", "layout.head", [](Layout& l) { l.head = limits::kMaxSeam + 1; }},
    {"HugeTail", "layout.tail", [](Layout& l) { l.tail = kHuge; }},
    {"HeadNarrowerThanConvolution", "layout.head", [](Layout& l) { l.head = Linear(l).conv_kernel - 2; }},
    {"NoLayers", "layout.layers", [](Layout& l) { l.layers.clear(); }},
    {"TooManyLayers", "layout.layers", [](Layout& l) { l.layers.resize(limits::kMaxLayers + 1, l.layers[1]); }},
    {"TablesLargerThanAMessage", "layout.layers",
     [](Layout& l) {
       LinearLayer wide{.family = Family::kMamba1,
                        .key_heads = 1,
                        .value_heads = 128,
                        .d_k = 256,
                        .d_v = 256,
                        .transition = TransitionForm::kElementwise};
       wide.decay_table.assign(size_t{128} * 256 * 256, 1.0f);
       l.layers.assign(2, wide);
     }},
};
INSTANTIATE_TEST_SUITE_P(WholeLayout, LayoutRefusal, testing::ValuesIn(kWholeLayout),
                         [](const auto& instance) { return instance.param.name; });

const Refusal kAttention[] = {
    {"Kind", "layout.layers[1].kind", [](Layout& l) { Attention(l).kind = AttentionKind{3}; }},
    {"NoHeads", "layout.layers[1].kv_heads", [](Layout& l) { Attention(l).kv_heads = 0; }},
    {"HugeHeads", "layout.layers[1].kv_heads", [](Layout& l) { Attention(l).kv_heads = kHuge; }},
    {"MlaWithManyHeads", "layout.layers[1].kv_heads", [](Layout& l) { Attention(l).kind = AttentionKind::kMla; }},
    {"NoKeyDim", "layout.layers[1].key_dim", [](Layout& l) { Attention(l).key_dim = 0; }},
    {"HugeKeyDim", "layout.layers[1].key_dim", [](Layout& l) { Attention(l).key_dim = kHuge; }},
    {"NoValueDim", "layout.layers[1].value_dim", [](Layout& l) { Attention(l).value_dim = 0; }},
    {"HugeValueDim", "layout.layers[1].value_dim", [](Layout& l) { Attention(l).value_dim = kHuge; }},
    {"KeysOfATokenLargerThanAnExtent", "layout.layers[1].key_dim",
     [](Layout& l) {
       Attention(l).kv_heads = 128;
       Attention(l).key_dim = 513;
     }},
    {"ValuesOfATokenLargerThanAnExtent", "layout.layers[1].value_dim",
     [](Layout& l) {
       Attention(l).kv_heads = 1024;
       Attention(l).value_dim = 65;
     }},
    {"DType", "layout.layers[1].dtype", [](Layout& l) { Attention(l).dtype = DType{0}; }},
    {"ScalesWithoutFp8", "layout.layers[1].scales", [](Layout& l) { Attention(l).scales = true; }},
    {"Stored", "layout.layers[1].stored", [](Layout& l) { Attention(l).stored = StoredKeys{0}; }},
};
INSTANTIATE_TEST_SUITE_P(Attention, LayoutRefusal, testing::ValuesIn(kAttention),
                         [](const auto& instance) { return instance.param.name; });

const Refusal kRope[] = {
    {"Kind", "layout.layers[1].rope.kind", [](Layout& l) { Attention(l).rope.kind = RopeStyle{9}; }},
    {"RotaryDimZero", "layout.layers[1].rope.rotary_dim", [](Layout& l) { Attention(l).rope.rotary_dim = 0; }},
    {"RotaryDimOdd", "layout.layers[1].rope.rotary_dim", [](Layout& l) { Attention(l).rope.rotary_dim = 5; }},
    {"RotaryDimTooLarge", "layout.layers[1].rope.rotary_dim", [](Layout& l) { Attention(l).rope.rotary_dim = 18; }},
    {"RotaryDimLargerThanMlaRotaryPart", "layout.layers[1].rope.rotary_dim",
     [](Layout& l) {
       Attention(l) = {
           .kind = AttentionKind::kMla, .kv_heads = 1, .key_dim = 64, .value_dim = 2, .rope = Attention(l).rope};
     }},
    {"TooFewFrequencies", "layout.layers[1].rope.frequencies", [](Layout& l) { Attention(l).rope.frequencies = {1}; }},
    {"TooManyFrequencies", "layout.layers[1].rope.frequencies",
     [](Layout& l) { Attention(l).rope.frequencies.push_back(1); }},
    {"FrequencyNan", "layout.layers[1].rope.frequencies[1]",
     [](Layout& l) { Attention(l).rope.frequencies[1] = kNan; }},
    {"FrequencyInfinite", "layout.layers[1].rope.frequencies[0]",
     [](Layout& l) { Attention(l).rope.frequencies[0] = kInfinity; }},
    {"FrequencyNegative", "layout.layers[1].rope.frequencies[0]",
     [](Layout& l) { Attention(l).rope.frequencies[0] = -1; }},
    {"FrequencyNegativeZero", "layout.layers[1].rope.frequencies[0]",
     [](Layout& l) { Attention(l).rope.frequencies[0] = -0.0; }},
    {"ScaleNan", "layout.layers[1].rope.scale", [](Layout& l) { Attention(l).rope.scale = kNan; }},
    {"ScaleZero", "layout.layers[1].rope.scale", [](Layout& l) { Attention(l).rope.scale = 0; }},
    {"ScaleInfinite", "layout.layers[1].rope.scale", [](Layout& l) { Attention(l).rope.scale = kInfinity; }},
    {"NoneWithRotaryDim", "layout.layers[1].rope.rotary_dim", [](Layout& l) { Attention(l).rope = {.rotary_dim = 2}; }},
    {"NoneWithScale", "layout.layers[1].rope.scale", [](Layout& l) { Attention(l).rope = {.scale = 2}; }},
    {"NoneWithFrequencies", "layout.layers[1].rope.frequencies",
     [](Layout& l) { Attention(l).rope = {.frequencies = {1}}; }},
    {"InNonScalarLinearLayer", "layout.layers[0].rope.kind",
     [](Layout& l) { Linear(l).rope = {.kind = RopeStyle::kHalfSplit, .rotary_dim = 2, .frequencies = {1}}; }},
    {"InScalarLinearLayerTooLarge", "layout.layers[0].rope.rotary_dim",
     [](Layout& l) {
       MakeScalar(l);
       Linear(l).rope = {.kind = RopeStyle::kInterleaved, .rotary_dim = 10, .frequencies = {1, 1, 1, 1, 1}};
     }},
};
INSTANTIATE_TEST_SUITE_P(Rope, LayoutRefusal, testing::ValuesIn(kRope),
                         [](const auto& instance) { return instance.param.name; });

const Refusal kLinear[] = {
    {"Family", "layout.layers[0].family", [](Layout& l) { Linear(l).family = Family{0}; }},
    {"NoKeyHeads", "layout.layers[0].key_heads", [](Layout& l) { Linear(l).key_heads = 0; }},
    {"HugeKeyHeads", "layout.layers[0].key_heads", [](Layout& l) { Linear(l).key_heads = kHuge; }},
    {"NoValueHeads", "layout.layers[0].value_heads", [](Layout& l) { Linear(l).value_heads = 0; }},
    {"HugeValueHeads", "layout.layers[0].value_heads", [](Layout& l) { Linear(l).value_heads = kHuge; }},
    {"ValueHeadsNotAMultiple", "layout.layers[0].value_heads",
     [](Layout& l) {
       Linear(l).key_heads = 2;
       Linear(l).value_heads = 3;
     }},
    {"FewerValueHeadsThanKeyHeads", "layout.layers[0].value_heads", [](Layout& l) { Linear(l).key_heads = 4; }},
    {"NoKeyDim", "layout.layers[0].d_k", [](Layout& l) { Linear(l).d_k = 0; }},
    {"KeyDimTooLarge", "layout.layers[0].d_k", [](Layout& l) { Linear(l).d_k = limits::kMaxLinearHeadDim + 1; }},
    {"NoValueDim", "layout.layers[0].d_v", [](Layout& l) { Linear(l).d_v = 0; }},
    {"HugeValueDim", "layout.layers[0].d_v", [](Layout& l) { Linear(l).d_v = kHuge; }},
    {"DecayTableWhereNoneBelongs", "layout.layers[0].decay_table",
     [](Layout& l) {
       Linear(l).decay_table = {1, 1};
     }},
    {"DecayTableMissing", "layout.layers[0].decay_table",
     [](Layout& l) {
       MakeScalar(l);
       Linear(l).decay_table.clear();
     }},
    {"DecayTableNan", "layout.layers[0].decay_table[1]",
     [](Layout& l) {
       MakeScalar(l);
       Linear(l).decay_table[1] = std::nanf("");
     }},
    {"DecayTableNegativeZero", "layout.layers[0].decay_table[0]",
     [](Layout& l) {
       MakeScalar(l, Family::kRetnet);
       Linear(l).decay_table[0] = -0.0f;
     }},
    {"Mamba1TableOfTheWrongSize", "layout.layers[0].decay_table",
     [](Layout& l) {
       Linear(l).family = Family::kMamba1;
       Linear(l).transition = TransitionForm::kElementwise;
       Linear(l).decay_table.assign(2 * 8 * 4 - 1, 1);
     }},
    {"StateDType", "layout.layers[0].state_dtype", [](Layout& l) { Linear(l).state_dtype = DType{77}; }},
    {"StateDTypeFp8", "layout.layers[0].state_dtype", [](Layout& l) { Linear(l).state_dtype = DType::kF8E4M3; }},
    {"TransitionNotOfTheFamily", "layout.layers[0].transition",
     [](Layout& l) { Linear(l).transition = TransitionForm::kScalar; }},
    {"TransitionOfScalarFamily", "layout.layers[0].transition",
     [](Layout& l) {
       MakeScalar(l, Family::kMamba2);
       Linear(l).transition = TransitionForm::kDense;
     }},
    {"TransitionOfGla", "layout.layers[0].transition", [](Layout& l) { Linear(l).family = Family::kGla; }},
    {"Order", "layout.layers[0].order", [](Layout& l) { Linear(l).order = StateOrder{0}; }},
    {"ConvKernelWithoutChannels", "layout.layers[0].conv_channels", [](Layout& l) { Linear(l).conv_channels = 0; }},
    {"ConvChannelsWithoutKernel", "layout.layers[0].conv_kernel", [](Layout& l) { Linear(l).conv_kernel = 0; }},
    {"ConvKernelOfOne", "layout.layers[0].conv_kernel", [](Layout& l) { Linear(l).conv_kernel = 1; }},
    {"ConvKernelTooLarge", "layout.layers[0].conv_kernel", [](Layout& l) { Linear(l).conv_kernel = kHuge; }},
    {"ConvChannelsTooMany", "layout.layers[0].conv_channels", [](Layout& l) { Linear(l).conv_channels = kHuge; }},
    {"ConvTypeIsNone", "layout.layers[0].conv_dtype", [](Layout& l) { Linear(l).conv_dtype = DType{77}; }},
    {"ConvTypeFp8", "layout.layers[0].conv_dtype", [](Layout& l) { Linear(l).conv_dtype = DType::kF8E5M2; }},
    {"ConvTypeOfTheState", "layout.layers[0].conv_dtype", [](Layout& l) { Linear(l).conv_dtype = DType::kF32; }},
    {"ConvTypeWithoutConvolution", "layout.layers[0].conv_dtype",
     [](Layout& l) {
       Linear(l).conv_channels = Linear(l).conv_kernel = 0;
       Linear(l).conv_dtype = DType::kBF16;
     }},
    {"ConvOrder", "layout.layers[0].conv_order", [](Layout& l) { Linear(l).conv_order = TailOrder{0}; }},
    {"ConvOrderWithoutConvolution", "layout.layers[0].conv_order",
     [](Layout& l) {
       Linear(l).conv_channels = Linear(l).conv_kernel = 0;
       Linear(l).conv_order = TailOrder::kChannelFirst;
     }},
    {"ConvTailLargerThanAnExtent", "layout.layers[0].conv_channels",
     [](Layout& l) { Linear(l).conv_channels = limits::kExtentBytes / (3 * 4) + 1; }},
};
INSTANTIATE_TEST_SUITE_P(Linear, LayoutRefusal, testing::ValuesIn(kLinear),
                         [](const auto& instance) { return instance.param.name; });

// The tail's own type counts, not the state's.
TEST(Layout, AcceptsALongerTailOfASmallerType) {
  Layout layout = ExampleLayout();
  Linear(layout).conv_channels = limits::kExtentBytes / (3 * 2);
  EXPECT_FALSE(Validate(layout).ok());
  Linear(layout).conv_dtype = DType::kBF16;
  EXPECT_EQ(Validate(layout), absl::OkStatus());
}

TEST(Layout, AcceptsSeamsOfZeroWithoutConvolution) {
  Layout layout = ExampleLayout();
  layout.head = layout.tail = 0;
  Linear(layout).conv_channels = Linear(layout).conv_kernel = 0;
  EXPECT_EQ(Validate(layout), absl::OkStatus());
}

TEST(Layout, AcceptsTheNarrowestHeadThatCoversTheConvolution) {
  Layout layout = ExampleLayout();
  layout.head = Linear(layout).conv_kernel - 1;
  EXPECT_EQ(Validate(layout), absl::OkStatus());
}

TEST(Layout, AcceptsTheShapesOfQwen3Next) {
  Layout layout{.page_tokens = 16, .head = 8, .tail = 8};
  Rope rope{.kind = RopeStyle::kHalfSplit, .rotary_dim = 64, .frequencies = std::vector<double>(32, 0.5)};
  for (int i = 0; i < 48; ++i) {
    if (i % 4 == 3) {
      layout.layers.push_back(
          AttentionLayer{.kv_heads = 2, .key_dim = 256, .value_dim = 256, .dtype = DType::kBF16, .rope = rope});
    } else {
      layout.layers.push_back(LinearLayer{
          .key_heads = 16, .value_heads = 32, .d_k = 128, .d_v = 128, .conv_channels = 8192, .conv_kernel = 4});
    }
  }
  EXPECT_EQ(Validate(layout), absl::OkStatus());
}

TEST(Layout, AcceptsRopeInScalarLinearLayers) {
  Layout layout = ExampleLayout();
  MakeScalar(layout);
  Linear(layout).rope = {.kind = RopeStyle::kHalfSplit, .rotary_dim = 8, .frequencies = {1, 0.5, 0.25, 0}};
  EXPECT_EQ(Validate(layout), absl::OkStatus());
}

TEST(Layout, AcceptsRandomValidLayouts) {
  const auto seed = std::random_device()();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  for (int i = 0; i < 200; ++i) {
    ASSERT_EQ(Validate(RandomLayout(random)), absl::OkStatus());
  }
}

struct IdentityRefusal {
  const char* field;
  std::string Identity::*member;
};

TEST(Identity, RefusesAnEmptyWeightsDigest) {
  Identity identity = ExampleIdentity();
  identity.weights_digest.clear();
  const absl::Status status = Validate(identity);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), testing::StartsWith("identity.weights_digest: "));
}

TEST(Identity, RefusesStringsThatAreTooLong) {
  for (const IdentityRefusal& refusal : {
           IdentityRefusal{"identity.model_id", &Identity::model_id},
           IdentityRefusal{"identity.weights_digest", &Identity::weights_digest},
           IdentityRefusal{"identity.dtype", &Identity::dtype},
           IdentityRefusal{"identity.quantization", &Identity::quantization},
           IdentityRefusal{"identity.tokenizer_digest", &Identity::tokenizer_digest},
           IdentityRefusal{"identity.lora", &Identity::lora},
       }) {
    SCOPED_TRACE(refusal.field);
    Identity identity = ExampleIdentity();
    identity.*refusal.member = std::string(limits::kMaxStringBytes, 'x');
    EXPECT_EQ(Validate(identity), absl::OkStatus());
    identity.*refusal.member += 'x';
    const absl::Status status = Validate(identity);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), testing::StartsWith(std::string(refusal.field) + ": "));
    EXPECT_FALSE(DecodeIdentity(EncodeIdentity(identity)).ok());
  }
}

TEST(DType, HasElementBytes) {
  EXPECT_EQ(ElementBytes(DType::kF32), 4u);
  EXPECT_EQ(ElementBytes(DType::kF16), 2u);
  EXPECT_EQ(ElementBytes(DType::kBF16), 2u);
  EXPECT_EQ(ElementBytes(DType::kF8E4M3), 1u);
  EXPECT_EQ(ElementBytes(DType::kF8E5M2), 1u);
  EXPECT_EQ(ElementBytes(DType{6}), 0u);
}

}  // namespace
}  // namespace ashlar
