// SPDX-License-Identifier: Apache-2.0
#include "kernels/decoding_costs.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <string_view>

namespace ashlar::kernels {
namespace {

constexpr LinearShape kShape = {.family = Family::kGdn, .heads = 4, .key_heads = 2, .d_k = 16, .d_v = 16};

// The seconds that scripted kernels take for a token of one request.
struct Script {
  double advance = 0, read = 0, copy_read = 0, slot = 0, flush = 0, copy_flush = 0, flush_slot = 0, stateless = 0;
};

// Kernels that do nothing, but advance a clock by the time in their script.
class ScriptedKernels final : public Kernels {
 public:
  explicit ScriptedKernels(const Script& script) : script_(script) {}

  std::string_view name() const override { return "scripted"; }
  std::unique_ptr<Queue> MakeQueue(Workers* workers) const override { return Host().MakeQueue(workers); }
  double now() const { return now_; }
  size_t calls() const { return calls_; }

 protected:
  Event DoCompose(const ComposeArgs&, Queue&) const override { return {}; }
  Event DoComposeTransitions(const ComposeTransitionsArgs&, Queue&) const override { return {}; }
  Event DoCapture(const CaptureArgs&, Queue&) const override { return {}; }
  Event DoVerifyDrafts(const VerifyDraftsArgs&, Queue&) const override { return {}; }
  Event DoRebuildState(const RebuildStateArgs&, Queue&) const override { return {}; }
  Event DoRotateKeys(const RotateKeysArgs&, Queue&) const override { return {}; }
  Event DoLand(const LandArgs&, Queue&) const override { return {}; }
  Event DoGather(const GatherArgs&, Queue&) const override { return {}; }
  Event DoChecksum(const ChecksumArgs&, Queue&) const override { return {}; }
  Event DoAttendLanded(const AttendArgs&, Queue&) const override { return {}; }
  Event DoAttendUnrotated(const AttendArgs&, Queue&) const override { return {}; }
  Event DoAttendRotatedQuery(const AttendArgs&, Queue&) const override { return {}; }

  Event DoAdvanceSeam(const AdvanceSeamArgs&, Queue&) const override {
    now_ += script_.advance;
    return {};
  }
  Event DoDecodeBuffered(const DecodeBufferedArgs& args, Queue&) const override {
    ++calls_;
    for (const BufferedRequest& request : args.requests) {
      const bool copy = request.rounded.heads != nullptr;
      const double state =
          request.flush ? (copy ? script_.copy_flush : script_.flush) : (copy ? script_.copy_read : script_.read);
      now_ += request.state.heads == nullptr ? script_.stateless : state;
      now_ += request.buffer.filled * (request.flush ? script_.flush_slot : script_.slot);
    }
    return {};
  }

 private:
  const Script script_;
  mutable double now_ = 0;
  mutable size_t calls_ = 0;
};

DecodeCosts Measure(const ScriptedKernels& kernels, std::optional<DType> rounded, int32_t requests = 3,
                    int32_t layers = 5) {
  const std::unique_ptr<Queue> queue = kernels.MakeQueue(nullptr);
  return MeasureDecoding(kernels, *queue, {.shape = kShape, .rounded = rounded, .requests = requests, .layers = layers},
                         [&] { return kernels.now(); });
}

TEST(DecodingCostsTest, MatchTheKernelsCosts) {
  const Script script = {.advance = 9,
                         .read = 5,
                         .copy_read = 3,
                         .slot = 0.25,
                         .flush = 8,
                         .copy_flush = 12,
                         .flush_slot = 0.5,
                         .stateless = 2};
  for (const bool copies : {false, true}) {
    const ScriptedKernels kernels(script);
    const DecodeCosts costs = Measure(kernels, copies ? std::optional(DType::kF16) : std::nullopt);
    EXPECT_NEAR(costs.advance, 9, 1e-9);
    EXPECT_NEAR(costs.recurrent, 8, 1e-9) << "without copies";
    EXPECT_NEAR(costs.read, copies ? 3 : 5, 1e-9);
    EXPECT_NEAR(costs.flush, copies ? 12 : 8, 1e-9);
    EXPECT_NEAR(costs.slot, 0.25, 1e-9);
    EXPECT_NEAR(costs.flush_slot, 0.5, 1e-9);
    EXPECT_NEAR(costs.stateless, 2, 1e-9);
  }
}

TEST(DecodingCostsTest, DecideWhetherABufferPays) {
  // A CPU with free writes: only reading less saves time.
  const Script free_writes = {.advance = 10,
                              .read = 9.5,
                              .copy_read = 5,
                              .slot = 0.2,
                              .flush = 11,
                              .copy_flush = 18,
                              .flush_slot = 0.1,
                              .stateless = 1};
  const DecodeChoice plain = ChooseDecoding(Measure(ScriptedKernels(free_writes), std::nullopt), std::nullopt);
  EXPECT_EQ(plain.form, DecodeForm::kRecurrent);
  EXPECT_EQ(plain.capacity, 0) << "AdvanceSeam is faster than flushing";
  const DecodeChoice copies = ChooseDecoding(Measure(ScriptedKernels(free_writes), DType::kF16), std::nullopt);
  EXPECT_EQ(copies.form, DecodeForm::kChunkwise);
  EXPECT_EQ(copies.capacity, 11);
}

// No more states than kTrialBytes, and at least one layer's.
TEST(DecodingCostsTest, ManyLayersAreMeasuredByAFew) {
  const auto calls_of = [](int32_t layers, int32_t requests) {
    const ScriptedKernels kernels({.advance = 1, .read = 1, .flush = 1});
    Measure(kernels, std::nullopt, requests, layers);
    return kernels.calls();
  };
  const size_t one = calls_of(1, 1);
  EXPECT_EQ(calls_of(6, 1), 6 * one);
  const auto most = static_cast<size_t>(kTrialBytes / (4096 * 4 * 16 * 16 * 4));
  EXPECT_EQ(calls_of(1000, 4096), most * one);
}

// Real kernels take some time for everything, and all of it is plausible.
TEST(DecodingCostsTest, OfThisMachine) {
  const std::unique_ptr<Queue> queue = Host().MakeQueue(nullptr);
  for (const Family family : {Family::kGdn, Family::kKda, Family::kDeltanet, Family::kGla}) {
    LinearShape shape = kShape;
    shape.family = family;
    for (const DType state : {DType::kF32, DType::kF16}) {
      const std::optional<DType> rounded = state == DType::kF32 ? std::optional(DType::kF16) : std::nullopt;
      const DecodeCosts costs =
          MeasureDecoding(Host(), *queue, {.shape = shape, .state = state, .rounded = rounded, .requests = 2});
      for (const double cost : {costs.advance, costs.recurrent, costs.read, costs.flush, costs.stateless}) {
        EXPECT_GT(cost, 1e-9);
        EXPECT_LT(cost, 1);
      }
      EXPECT_GE(costs.slot, 0);
      EXPECT_GE(costs.flush_slot, 0);
    }
  }
}

}  // namespace
}  // namespace ashlar::kernels
