// SPDX-License-Identifier: Apache-2.0
#include "kernels/decoding_choice.h"

#include <gtest/gtest.h>

#include <optional>

namespace ashlar::kernels {
namespace {

LinearShape Shape(Family family, int32_t heads, int32_t key_heads, int32_t dim = 128) {
  return {.family = family, .heads = heads, .key_heads = key_heads, .d_k = dim, .d_v = dim};
}

double Saved(const DecodeBytes& bytes) {
  return 100 * (1 - ChunkwiseBytes(bytes, BestCapacity(bytes)) / RecurrentBytes(bytes));
}

TEST(DecodingChoiceTest, CountsBytes) {
  const DecodeBytes qwen = DecodeBytesOf(Shape(Family::kGdn, 32, 16), DType::kF32, DType::kF16);
  EXPECT_EQ(qwen.state, 2 << 20);
  EXPECT_EQ(qwen.slot, 16 * 128 * 2 + 32 * 128 * 2 + 32 * 4);
  const DecodeBytes kda = DecodeBytesOf(Shape(Family::kKda, 1, 1), DType::kBF16, DType::kF32);
  EXPECT_EQ(kda.state, 128 * 128 * 2);
  EXPECT_EQ(kda.slot, 3 * 128 * 4);
}

// States of fp32, buffers of fp16, d = 128.
TEST(DecodingChoiceTest, BestCapacities) {
  const DecodeBytes own_key = DecodeBytesOf(Shape(Family::kGdn, 32, 32), DType::kF32, DType::kF16);
  const DecodeBytes shared_key = DecodeBytesOf(Shape(Family::kGdn, 32, 16), DType::kF32, DType::kF16);
  const DecodeBytes gates = DecodeBytesOf(Shape(Family::kKda, 32, 32), DType::kF32, DType::kF16);
  EXPECT_EQ(BestCapacity(own_key), 16);
  EXPECT_EQ(BestCapacity(shared_key), 18);
  EXPECT_EQ(BestCapacity(gates), 11);
  EXPECT_NEAR(Saved(own_key), 43.6, 0.1);
  EXPECT_NEAR(Saved(shared_key), 44.5, 0.1);
  EXPECT_NEAR(Saved(gates), 40.8, 0.1);
}

TEST(DecodingChoiceTest, TheBestCapacityIsTheLeastOfAll) {
  for (const int32_t dim : {8, 32, 128, 256}) {
    for (const Family family : {Family::kGdn, Family::kKda}) {
      for (const DType state : {DType::kF32, DType::kBF16}) {
        const DecodeBytes bytes = DecodeBytesOf(Shape(family, 2, 1, dim), state, DType::kF16);
        int32_t best = 1;
        for (int32_t c = 2; c < 200; ++c) {
          if (ChunkwiseBytes(bytes, c) < ChunkwiseBytes(bytes, best)) best = c;
        }
        EXPECT_EQ(BestCapacity(bytes), best) << dim;
      }
    }
  }
}

// A third of the recurrence's bytes, and longer buffers, because a token that does not flush reads half.
TEST(DecodingChoiceTest, RoundedCopies) {
  const LinearShape shape = Shape(Family::kGdn, 32, 16);
  const DecodeBytes bytes = DecodeBytesOf(shape, DType::kF32, DType::kF16, DType::kF16);
  EXPECT_EQ(bytes.rounded, bytes.state / 2);
  EXPECT_EQ(ChunkwiseBytes(bytes, 1), RecurrentBytes(bytes) + bytes.rounded);
  EXPECT_EQ(ChunkwiseBytes(bytes, 4), (3 * bytes.rounded + 2 * bytes.state + bytes.rounded) / 4 + 2.25 * bytes.slot);
  const int32_t best = BestCapacity(bytes);
  EXPECT_EQ(best, 26);
  for (int32_t c = 2; c < 200; ++c) EXPECT_GE(ChunkwiseBytes(bytes, c), ChunkwiseBytes(bytes, best)) << c;
  EXPECT_NEAR(RecurrentBytes(bytes) / ChunkwiseBytes(bytes, best), 3.05, 0.01);
  // A copy that is written with every token, but never read, is no gain.
  const DecodeBytes small = DecodeBytesOf(Shape(Family::kKda, 1, 1, 3), DType::kF32, DType::kF32, DType::kF16);
  const DecodeChoice choice = ChooseDecoding(CostsOf(small), std::nullopt);
  EXPECT_EQ(choice.form, DecodeForm::kRecurrent);
  EXPECT_EQ(choice.cost, RecurrentBytes(small));
}

TEST(DecodingChoiceTest, TheMinimumIsFlat) {
  const DecodeBytes bytes = DecodeBytesOf(Shape(Family::kGdn, 32, 32), DType::kF32, DType::kF16);
  for (const int32_t capacity : {11, 24}) {
    EXPECT_LE(ChunkwiseBytes(bytes, capacity), 1.01 * ChunkwiseBytes(bytes, 16)) << capacity;
  }
}

TEST(DecodingChoiceTest, BytesAreCosts) {
  for (const std::optional<DType> rounded : {std::optional<DType>(), std::optional(DType::kF16)}) {
    const DecodeBytes bytes = DecodeBytesOf(Shape(Family::kGdn, 32, 16), DType::kF32, DType::kF16, rounded);
    const DecodeCosts costs = CostsOf(bytes);
    for (const int32_t capacity : {2, 3, 8, 26, kMostCapacity}) {
      EXPECT_NEAR(ChunkwiseCost(costs, capacity), ChunkwiseBytes(bytes, capacity), 1e-6) << capacity;
    }
    EXPECT_EQ(ChooseDecoding(costs, std::nullopt).capacity, BestCapacity(bytes));
    EXPECT_EQ(costs.stateless + 7 * costs.slot, 8 * bytes.slot) << "reads seven slots and fills one";
  }
}

TEST(DecodingChoiceTest, ChoosesTheFewestBytes) {
  const DecodeBytes bytes = DecodeBytesOf(Shape(Family::kGdn, 32, 16), DType::kF32, DType::kF16);
  const DecodeCosts costs = CostsOf(bytes);
  EXPECT_EQ(ChooseDecoding(costs, std::nullopt).form, DecodeForm::kChunkwise);
  EXPECT_EQ(ChooseDecoding(costs, std::nullopt).capacity, 18);
  EXPECT_EQ(ChooseDecoding(costs, 0).form, DecodeForm::kKvOnly);
  EXPECT_EQ(ChooseDecoding(costs, 186).form, DecodeForm::kKvOnly);
  EXPECT_EQ(ChooseDecoding(costs, 186).cost, 187 * bytes.slot);
  EXPECT_EQ(ChooseDecoding(costs, 187).form, DecodeForm::kChunkwise);
  // Slots as large as the state: deferring gains nothing.
  const DecodeBytes small = DecodeBytesOf(Shape(Family::kKda, 1, 1, 3), DType::kBF16, DType::kF32);
  EXPECT_EQ(ChooseDecoding(CostsOf(small), std::nullopt).form, DecodeForm::kRecurrent);
  EXPECT_EQ(ChooseDecoding(CostsOf(small), std::nullopt).cost, RecurrentBytes(small));
}

// A gain that measurements could not distinguish from none does not count.
TEST(DecodingChoiceTest, ASmallGainIsNotWorthABuffer) {
  DecodeCosts costs = {.advance = 100, .recurrent = 120, .read = 90, .flush = 100};
  EXPECT_EQ(ChooseDecoding(costs, std::nullopt).form, DecodeForm::kRecurrent);
  EXPECT_EQ(ChooseDecoding(costs, std::nullopt).capacity, 0) << "by AdvanceSeam";
  EXPECT_EQ(ChooseDecoding(costs, std::nullopt).cost, 100);
  costs.read = 80;
  EXPECT_EQ(ChooseDecoding(costs, std::nullopt).form, DecodeForm::kChunkwise);
}

}  // namespace
}  // namespace ashlar::kernels
