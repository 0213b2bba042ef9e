// SPDX-License-Identifier: Apache-2.0
#include "client/session/mapped_object.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "client/testing/fixtures.h"
#include "proto/limits.h"
#include "proto/testing/sample_layouts.h"

namespace ashlar::internal {
namespace {

constexpr uint64_t kTokens = 100, kStart = 700;
constexpr uint32_t kHeads = 6;
constexpr uint32_t kDk = 128, kDv = 96;  // 64 KiB a transition: an object of several extents
constexpr uint32_t kChannels = 40, kConv = 4;

Layout TestLayout() {
  Layout layout{.page_tokens = 16, .head = 4, .tail = 4, .layers = {}};
  layout.layers.push_back(LinearLayer{
      .key_heads = 2, .value_heads = kHeads, .d_k = kDk, .d_v = kDv, .conv_channels = kChannels, .conv_kernel = kConv});
  layout.layers.push_back(AttentionLayer{.kv_heads = 2, .key_dim = 32, .value_dim = 32});
  layout.layers.push_back(LinearLayer{.key_heads = 2, .value_heads = kHeads, .d_k = kDk, .d_v = kDv});
  return layout;
}

// One arena with an object in extents that are neither adjacent nor ordered.
class MappedObjectTest : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(Validate(layout_).ok()) << Validate(layout_);
    ns_ = MakeNamespace("tenant", {.model_id = "m", .weights_digest = "w"}, layout_);
    Store(ObjectKind::kSegment);
  }

  void Store(ObjectKind kind) {
    auto plan = PlanObject(layout_, ns_, Key{}, kind, kTokens);
    ASSERT_TRUE(plan.ok()) << plan.status();
    ASSERT_GE(plan->Extents(), 3u);
    Store(*std::move(plan));
  }
  void Store(ObjectHeader header) {
    header_ = std::move(header);
    const uint64_t extents = header_.Extents();
    const uint64_t bytes = 2 * extents * limits::kExtentBytes;
    memfd_ = MakeMemfd(bytes, F_SEAL_SHRINK);
    auto writer = Mapping::Map(memfd_.get(), bytes, Mapping::Access::kReadWrite);
    auto reader = Mapping::Map(memfd_.get(), bytes, Mapping::Access::kRead);
    ASSERT_TRUE(writer.ok() && reader.ok());
    memory_ = *std::move(writer);
    auto arena = std::make_shared<const SharedMemory>(*std::move(reader));
    runs_.clear();
    for (uint32_t i = 0; i < extents; ++i) {  // the object's extent i is the arena's 2 × (extents − 1 − i)
      runs_.push_back({arena, static_cast<uint32_t>(2 * (extents - 1 - i)), 1});
    }
    WriteHeader();
  }

  std::byte* At(uint64_t offset) {
    const MappedRun& run = runs_[offset / limits::kExtentBytes];
    return memory_.data() + run.first * limits::kExtentBytes + offset % limits::kExtentBytes;
  }

  void WriteHeader() {
    const std::string bytes = EncodeHeader(header_);
    std::memcpy(At(0), bytes.data(), bytes.size());
  }

  void Write(const Part& part, uint32_t unit, size_t index, float value) {
    std::memcpy(At(part.UnitOffset(unit)) + index * sizeof value, &value, sizeof value);
  }

  ExpectedObject Expected(ObjectKind kind = ObjectKind::kSegment) { return {&layout_, ns_, kind, kTokens, kStart}; }

  void ExpectDataLoss(const ExpectedObject& expected) {
    EXPECT_EQ(MappedObject::Open(runs_, expected).status().code(), absl::StatusCode::kDataLoss);
  }

  Layout layout_ = TestLayout();
  NamespaceId ns_;
  ObjectHeader header_;
  Descriptor memfd_;
  Mapping memory_;
  std::vector<MappedRun> runs_;
};

TEST_F(MappedObjectTest, PointsAtEveryHeadsMatrices) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  auto object = MappedObject::Open(runs_, Expected());
  ASSERT_TRUE(object.ok()) << object.status();
  const std::vector<MappedTuple>& tuples = (*object)->tuples();
  ASSERT_EQ(tuples.size(), layout_.layers.size());
  for (uint32_t layer : {0u, 2u}) {
    for (uint32_t head = 0; head < kHeads; ++head) {
      const float transition = std::uniform_real_distribution<float>()(random);
      const float state = std::uniform_real_distribution<float>()(random);
      Write(*header_.Find(layer, PartForm::kTransitionDense), head, kDk * kDk - 1, transition);
      Write(*header_.Find(layer, PartForm::kState), head, kDk * kDv - 1, state);
      const kernels::HeadTuple& tuple = tuples[layer].view.heads[head];
      EXPECT_EQ(tuple.form, TransitionForm::kDense);
      EXPECT_EQ(static_cast<const float*>(tuple.transition)[kDk * kDk - 1], transition);
      EXPECT_EQ(static_cast<const float*>(tuple.state)[kDk * kDv - 1], state);
    }
  }
  Write(*header_.Find(0, PartForm::kConvTail), 0, (kConv - 1) * kChannels - 1, 7.5f);
  EXPECT_EQ(static_cast<const float*>(tuples[0].conv_tail)[(kConv - 1) * kChannels - 1], 7.5f);
  EXPECT_EQ(tuples[0].view.position, kStart);
  EXPECT_EQ(tuples[1].view.heads, nullptr);
  EXPECT_EQ(tuples[2].conv_tail, nullptr);
}

TEST_F(MappedObjectTest, CheckpointsHaveNoTransitions) {
  Store(ObjectKind::kCheckpoint);
  auto object = MappedObject::Open(runs_, Expected(ObjectKind::kCheckpoint));
  ASSERT_TRUE(object.ok()) << object.status();
  for (uint32_t head = 0; head < kHeads; ++head) {
    const kernels::HeadTuple& tuple = (*object)->tuples()[0].view.heads[head];
    EXPECT_EQ(tuple.form, TransitionForm::kZero);
    EXPECT_EQ(tuple.transition, nullptr);
    EXPECT_NE(tuple.state, nullptr);
  }
}

// An exact prefix, with or without the keys and values of its tail.
TEST_F(MappedObjectTest, PointsAtTheStatesAfterAPrefix) {
  constexpr uint32_t kBlock = 256;
  for (const uint64_t depth : {uint64_t{2 * kBlock}, uint64_t{2 * kBlock + 7}, uint64_t{7}}) {
    Store(*PlanPrefixCheckpoint(layout_, ns_, Key{}, kBlock, depth));
    const auto object = MappedObject::Open(runs_, {&layout_, ns_, ObjectKind::kCheckpoint, depth, 0});
    ASSERT_TRUE(object.ok()) << object.status();
    EXPECT_EQ((*object)->header().stored_tokens, depth % kBlock);
    for (const uint32_t layer : {0u, 2u}) {
      Write(*header_.Find(layer, PartForm::kState), kHeads - 1, kDk * kDv - 1, 2.5f);
      const kernels::HeadTuple& last = (*object)->tuples()[layer].view.heads[kHeads - 1];
      EXPECT_EQ(last.form, TransitionForm::kZero);
      EXPECT_EQ(static_cast<const float*>(last.state)[kDk * kDv - 1], 2.5f);
    }
    EXPECT_EQ((*object)->tuples()[0].view.position, 0);
  }
}

// If an object is still in promotion, the exponents read when it was mapped may be wrong.
TEST_F(MappedObjectTest, ReadsExponentsAgainOnceTheyHaveArrived) {
  for (Layer& layer : layout_.layers) {
    if (auto* linear = std::get_if<LinearLayer>(&layer)) linear->state_dtype = DType::kF16;
  }
  Store(ObjectKind::kSegment);
  const auto write = [&](uint32_t layer, int32_t first) {
    for (uint32_t head = 0; head < kHeads; ++head) {
      const int32_t exponent = first + static_cast<int32_t>(head);
      std::memcpy(At(header_.Find(layer, PartForm::kStateExponents)->offset) + head * sizeof exponent, &exponent,
                  sizeof exponent);
    }
  };
  const auto object = MappedObject::Open(runs_, Expected());
  ASSERT_TRUE(object.ok()) << object.status();
  const auto exponent = [&](uint32_t layer, uint32_t head) {
    return (*object)->tuples()[layer].view.heads[head].state_exponent;
  };
  write(0, 5);
  (*object)->Arrived(1);
  write(2, -7);
  for (uint32_t head = 0; head < kHeads; ++head) {
    EXPECT_EQ(exponent(0, head), 5 + static_cast<int32_t>(head));
    EXPECT_EQ(exponent(2, head), 0) << "it has not arrived";
  }
  write(0, 50);
  (*object)->Arrived(UINT32_MAX);
  for (uint32_t head = 0; head < kHeads; ++head) {
    EXPECT_EQ(exponent(0, head), 5 + static_cast<int32_t>(head)) << "once";
    EXPECT_EQ(exponent(2, head), -7 + static_cast<int32_t>(head));
  }
}

// Every form that a head may have, in every type, is at the place that the table gives.
TEST_F(MappedObjectTest, ReadsEveryFormFromTheTable) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937_64 random(seed);
  std::set<std::pair<TransitionForm, DType>> seen;
  for (int trial = 0; trial < 100; ++trial) {
    layout_ = RandomLayout(random);
    layout_.head = std::min<uint32_t>(layout_.head, kTokens / 2 - 1);
    layout_.tail = std::min<uint32_t>(layout_.tail, kTokens / 2 - 1);
    const auto plan =
        PlanForms(*PlanObject(layout_, ns_, Key{}, ObjectKind::kSegment, kTokens), RandomRuns(random, layout_));
    if (!plan.ok()) continue;  // more extents than in its layers' own forms
    Store(*plan);
    for (const Part& part : header_.parts) {
      if (part.form != PartForm::kStateExponents) continue;
      for (uint32_t head = 0; head < part.Bytes() / sizeof(int32_t); ++head) {
        const int32_t exponent = static_cast<int32_t>(head) - 2;
        std::memcpy(At(part.offset) + head * sizeof(int32_t), &exponent, sizeof(int32_t));
      }
    }
    const auto object = MappedObject::Open(runs_, Expected());
    ASSERT_TRUE(object.ok()) << object.status();
    const std::byte* const first = runs_.front().arena->data;
    for (const Part& part : header_.parts) {
      const auto* linear = std::get_if<LinearLayer>(&layout_.layers[part.layer]);
      if (linear == nullptr) continue;
      const MappedTuple& tuple = (*object)->tuples()[part.layer];
      EXPECT_EQ(tuple.view.position, kStart);
      const auto place = [&](uint32_t unit) { return first + (At(part.UnitOffset(unit)) - memory_.data()); };
      if (part.form == PartForm::kConvTail) {
        EXPECT_EQ(tuple.conv_tail, place(0));
      }
      for (uint32_t unit = 0; unit < part.units; ++unit) {
        const kernels::HeadTuple& head = tuple.view.heads[part.head_group + unit];
        if (part.form == PartForm::kState) {
          EXPECT_EQ(tuple.view.state_dtype, linear->state_dtype);
          EXPECT_EQ(head.state, place(unit));
          EXPECT_EQ(head.state_exponent, linear->state_dtype == DType::kF16 ? static_cast<int32_t>(unit) - 2 : 0);
        } else if (const auto form = TransitionFormOf(part.form); form.has_value()) {
          seen.emplace(*form, linear->state_dtype);
          EXPECT_EQ(head.form, *form);
          EXPECT_EQ(head.rank, static_cast<int32_t>(part.rank));
          EXPECT_EQ(head.transition, part.Empty() ? nullptr : place(unit));
          EXPECT_EQ(tuple.view.transition_dtype, TransitionType(linear->state_dtype));
        }
      }
    }
  }
  EXPECT_EQ(seen.size(), 6u * 3) << "forms and types that came up";
}

// A misread form is never composed: a table that gives a different form for a head is refused, even with a valid
// checksum.
TEST_F(MappedObjectTest, RefusesAnotherForm) {
  using enum TransitionForm;
  const ObjectHeader natural = *PlanObject(layout_, ns_, Key{}, ObjectKind::kSegment, kTokens);
  const std::vector<TransitionRun> runs = {
      {0, 0, 1, kZero}, {0, 1, kHeads - 2, kDense}, {0, kHeads - 1, 1, kLowRank, 2}};
  const ObjectHeader stored = *PlanForms(natural, runs);
  Store(stored);
  ASSERT_TRUE(MappedObject::Open(runs_, Expected()).ok());
  const auto find = [&](PartForm form) -> Part& {
    return *std::ranges::find_if(header_.parts, [&](const Part& part) { return part.form == form; });
  };
  const std::function<void()> misread[] = {
      [&] { find(PartForm::kTransitionLowRank).rank = 1; },
      [&] { find(PartForm::kTransitionLowRank).rank = 3; },
      [&] { find(PartForm::kTransitionLowRank).form = PartForm::kTransitionDiagonal; },
      [&] { find(PartForm::kTransitionLowRank).head_group = 0; },
      [&] { find(PartForm::kTransitionZero).head_group = 1; },
      [&] { find(PartForm::kTransitionZero).units = 2; },
      [&] { find(PartForm::kTransitionZero).form = PartForm::kTransitionScalar; },
      [&] { find(PartForm::kTransitionDense).units -= 1; },
      [&] { find(PartForm::kTransitionDense).head_group = 0; },
      [&] { find(PartForm::kTransitionDense).dtype = DType::kF16; },
      [&] { find(PartForm::kState).dtype = DType::kBF16; },
      [&] { std::erase_if(header_.parts, [](const Part& part) { return part.form == PartForm::kTransitionZero; }); },
  };
  for (const std::function<void()>& change : misread) {
    header_ = stored;
    change();
    WriteHeader();
    ExpectDataLoss(Expected());
  }
}

TEST_F(MappedObjectTest, RefusesObjectsThatWereNotRequested) {
  ExpectDataLoss(Expected(ObjectKind::kCheckpoint));
  ExpectedObject other = Expected();
  other.tokens = kTokens + 1;
  ExpectDataLoss(other);
  other = Expected();
  other.ns.bytes[31] ^= 1;
  ExpectDataLoss(other);
  Layout wider = layout_;
  std::get<LinearLayer>(wider.layers[2]).d_v += 1;
  other = Expected();
  other.layout = &wider;
  ExpectDataLoss(other);
}

TEST_F(MappedObjectTest, RefusesACorruptHeader) {
  const size_t bytes = EncodeHeader(header_).size();
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  for (int trial = 0; trial < 50; ++trial) {
    const size_t at = random() % bytes;
    *At(at) ^= std::byte(1 << random() % 8);
    ExpectDataLoss(Expected());
    WriteHeader();
  }
  EXPECT_TRUE(MappedObject::Open(runs_, Expected()).ok());
}

TEST_F(MappedObjectTest, RefusesMissingExtentsAndForeignMemory) {
  std::vector<MappedRun> runs(runs_.begin(), runs_.end() - 1);
  EXPECT_EQ(MappedObject::Open(runs, Expected()).status().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(MappedObject::Open({}, Expected()).status().code(), absl::StatusCode::kOutOfRange);
  runs = runs_;
  runs.back().count = UINT32_MAX;
  EXPECT_EQ(MappedObject::Open(runs, Expected()).status().code(), absl::StatusCode::kOutOfRange);
  runs.back() = {runs_.back().arena, UINT32_MAX, 1};
  EXPECT_EQ(MappedObject::Open(runs, Expected()).status().code(), absl::StatusCode::kOutOfRange);
}

// A match may share fewer tokens with a span than the span has. Rows are in units spread over the object.
TEST_F(MappedObjectTest, ReadsTheRowsOfASpan) {
  Store(*PlanPrefixSpan(layout_, ns_, Key{}, DType::kF16, 90, 300));
  ASSERT_GE(header_.Extents(), 2u);
  const auto at = [&](PartForm form, uint64_t token, uint64_t index) {
    const Part& part = *header_.Find(0, form);
    const uint64_t row = part.unit_bytes / part.unit_tokens;
    return At(part.UnitOffset(static_cast<uint32_t>(token / part.unit_tokens)) + token % part.unit_tokens * row) +
           index * ElementBytes(part.dtype);
  };
  for (uint64_t token = 0; token < 210; ++token) {
    for (uint64_t i = 0; i < 2 * kDk; ++i) {
      kernels::WriteElement(DType::kF16, at(PartForm::kSpanKeys, token, i), 0, static_cast<float>(token + i));
    }
    for (uint64_t i = 0; i < kChannels; ++i) {
      const auto input = static_cast<float>(1000 * token + i);
      std::memcpy(at(PartForm::kSpanConvInputs, token, i), &input, sizeof input);
    }
  }
  const std::vector<float> before((kConv - 1) * kChannels, -1.0f);
  for (const uint64_t tokens : {uint64_t{1}, uint64_t{2}, uint64_t{3}, uint64_t{200}, uint64_t{210}}) {
    SCOPED_TRACE(tokens);
    const auto object = MappedObject::Open(runs_, {&layout_, ns_, ObjectKind::kSpan, 90 + tokens, 90, tokens});
    ASSERT_TRUE(object.ok()) << object.status();
    const MappedSpan& span = (*object)->span();
    EXPECT_TRUE(span.layers[1].keys.empty());
    EXPECT_TRUE(span.layers[2].conv_inputs.empty());
    const SpanInputs read(std::get<LinearLayer>(layout_.layers[0]), span, 0);
    const kernels::TokenInputs inputs = read.inputs();
    ASSERT_EQ(inputs.tokens, static_cast<int64_t>(tokens));
    EXPECT_EQ(inputs.k_stride, 2 * kDk);
    EXPECT_EQ(inputs.v_stride, kHeads * kDv);
    EXPECT_EQ(inputs.g_stride, kHeads);
    EXPECT_EQ(inputs.beta_stride, kHeads);
    EXPECT_EQ(inputs.k[(tokens - 1) * 2 * kDk + 7], static_cast<float>(tokens - 1 + 7));
    const std::vector<std::byte> tail = read.ConvTail(before.data());
    ASSERT_EQ(tail.size(), before.size() * sizeof(float));
    const auto* const numbers = reinterpret_cast<const float*>(tail.data());
    for (uint64_t i = 0; i < kConv - 1; ++i) {
      const float expected = tokens + i < kConv - 1 ? -1.0f : static_cast<float>(1000 * (tokens + i - (kConv - 1)) + 5);
      EXPECT_EQ(numbers[i * kChannels + 5], expected) << i;
    }
  }
}

// 16-bit tails with fp32 states, in both orders of their axes.
TEST_F(MappedObjectTest, ASpansTailHasTheLayoutsTypeAndOrder) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  constexpr uint64_t kRows = kConv - 1, kSpan = 210;
  for (const TailOrder order : {TailOrder::kTokenFirst, TailOrder::kChannelFirst}) {
    SCOPED_TRACE(static_cast<int>(order));
    auto& linear = std::get<LinearLayer>(layout_.layers[0]);
    linear.conv_dtype = DType::kBF16;
    linear.conv_order = order;
    Store(*PlanPrefixSpan(layout_, ns_, Key{}, DType::kF16, 90, 90 + kSpan));
    const auto place = [&](uint64_t row, uint64_t channel) {
      return order == TailOrder::kTokenFirst ? row * kChannels + channel : channel * kRows + row;
    };
    // The convolution inputs of the checkpoint's last tokens, then the span's.
    std::vector<uint16_t> all((kRows + kSpan) * kChannels), before(kRows * kChannels);
    for (uint16_t& input : all) input = static_cast<uint16_t>(random());
    const Part& part = *header_.Find(0, PartForm::kSpanConvInputs);
    ASSERT_EQ(part.unit_bytes / part.unit_tokens, kChannels * sizeof(uint16_t));
    for (uint64_t row = 0; row < kRows + kSpan; ++row) {
      const uint16_t* const inputs = all.data() + row * kChannels;
      if (row < kRows) {
        for (uint64_t c = 0; c < kChannels; ++c) before[place(row, c)] = inputs[c];
        continue;
      }
      const uint64_t token = row - kRows, size = kChannels * sizeof(uint16_t);
      std::memcpy(
          At(part.UnitOffset(static_cast<uint32_t>(token / part.unit_tokens)) + token % part.unit_tokens * size),
          inputs, size);
    }
    for (const uint64_t tokens : {uint64_t{1}, uint64_t{2}, uint64_t{3}, kSpan}) {
      SCOPED_TRACE(tokens);
      const auto object = MappedObject::Open(runs_, {&layout_, ns_, ObjectKind::kSpan, 90 + tokens, 90, tokens});
      ASSERT_TRUE(object.ok()) << object.status();
      const std::vector<std::byte> tail = SpanInputs(linear, (*object)->span(), 0).ConvTail(before.data());
      ASSERT_EQ(tail.size(), ConvTailBytes(linear));
      std::vector<uint16_t> numbers(kRows * kChannels);
      std::memcpy(numbers.data(), tail.data(), tail.size());
      for (uint64_t row = 0; row < kRows; ++row) {
        for (uint64_t c = 0; c < kChannels; ++c) {
          ASSERT_EQ(numbers[place(row, c)], all[(tokens + row) * kChannels + c]) << row << ", " << c;
        }
      }
    }
  }
}

TEST_F(MappedObjectTest, TailsOfAnotherTypeAreDataLoss) {
  ASSERT_TRUE(MappedObject::Open(runs_, Expected()).ok());
  std::get<LinearLayer>(layout_.layers[0]).conv_dtype = DType::kBF16;
  ExpectDataLoss(Expected());
}

TEST_F(MappedObjectTest, OtherSpansThanRequestedAreDataLoss) {
  Store(*PlanPrefixSpan(layout_, ns_, Key{}, DType::kF16, 90, 300));
  ExpectDataLoss({&layout_, ns_, ObjectKind::kSpan, 301, 90, 211});
  ExpectDataLoss({&layout_, ns_, ObjectKind::kSpan, 120, 89, 31});
  ExpectDataLoss({&layout_, ns_, ObjectKind::kCheckpoint, 300, 0});
  Layout other = layout_;
  std::get<LinearLayer>(other.layers[0]).d_k = kDk / 2;
  ExpectDataLoss({&other, ns_, ObjectKind::kSpan, 120, 90, 30});
}

}  // namespace
}  // namespace ashlar::internal
