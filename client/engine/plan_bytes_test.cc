// SPDX-License-Identifier: Apache-2.0
#include "client/engine/plan_bytes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "kernels/checksum.h"
#include "proto/limits.h"

namespace ashlar::engine {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

PlannedLanding Sample() {
  PlannedLanding plan{.tensor_parallel_size = 4,
                      .tokens = 1000,
                      .segment_lengths = {100, 300, 400},
                      .prefix_tokens = 80,
                      .segments = {1, 2},
                      .captures = {256, 999}};
  plan.ns.bytes.fill(7);
  plan.lease.fill(9);
  return plan;
}

absl::StatusOr<PlannedLanding> Decode(const std::string& bytes) {
  return DecodePlan({reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()});
}
std::string Refusal(const std::string& bytes) {
  const auto plan = Decode(bytes);
  EXPECT_EQ(plan.status().code(), absl::StatusCode::kInvalidArgument);
  return std::string(plan.status().message());
}
// Appends a valid checksum.
std::string Sealed(std::string bytes) {
  bytes.resize(bytes.size() - 8);
  const uint64_t checksum = kernels::UnitChecksum(bytes.data(), bytes.size());
  for (int i = 0; i < 8; ++i) bytes.push_back(static_cast<char>(checksum >> (8 * i)));
  return bytes;
}

TEST(PlanBytes, RoundTrip) {
  for (const PlannedLanding& plan : {Sample(), PlannedLanding{}}) {
    const auto decoded = Decode(EncodePlan(plan));
    ASSERT_TRUE(decoded.ok()) << decoded.status();
    EXPECT_EQ(*decoded, plan);
  }
}

TEST(PlanBytes, AreRefusedByName) {
  const std::string good = EncodePlan(Sample());
  EXPECT_THAT(Refusal(""), StartsWith("magic: "));
  EXPECT_THAT(Refusal(std::string(100, 'x')), StartsWith("magic: "));
  std::string other = good;
  other[4] = 2;
  EXPECT_EQ(Refusal(other), "version: 2; this build reads version 1 only");
  EXPECT_THAT(Refusal(good.substr(0, good.size() - 1)), StartsWith("bytes: "));
  EXPECT_THAT(Refusal(good + "x"), StartsWith("bytes: "));
  other = good;
  other[40] ^= 1;
  EXPECT_THAT(Refusal(other), StartsWith("checksum: "));
}

TEST(PlanBytes, RefusesInvalidFieldsByName) {
  const auto refusal = [](auto change) {
    PlannedLanding plan = Sample();
    change(plan);
    return Refusal(EncodePlan(plan));
  };
  EXPECT_THAT(refusal([](PlannedLanding& p) { p.tensor_parallel_size = 0; }), StartsWith("tensor_parallel_size: 0"));
  EXPECT_THAT(refusal([](PlannedLanding& p) { p.tokens = limits::kMaxPromptTokens + 1; }), StartsWith("tokens: "));
  EXPECT_THAT(refusal([](PlannedLanding& p) { p.segment_lengths[1] = UINT64_MAX; }),
              StartsWith("segment_lengths[1]: "));
  EXPECT_THAT(refusal([](PlannedLanding& p) { p.prefix_tokens = 1001; }), StartsWith("prefix_tokens: "));
  EXPECT_THAT(refusal([](PlannedLanding& p) { p.segments = {2, 1}; }), StartsWith("segments[1]: "));
  EXPECT_THAT(refusal([](PlannedLanding& p) { p.segments = {3}; }), StartsWith("segments[0]: "));
  EXPECT_THAT(refusal([](PlannedLanding& p) { p.captures = {5, 5}; }), StartsWith("captures[1]: "));
}

// Changes every byte and cuts every length: decoding fails, or, with a valid checksum, checks the fields.
TEST(PlanBytes, ReadsAnyBytesSafely) {
  const std::string good = EncodePlan(Sample());
  for (size_t size = 0; size < good.size(); ++size) EXPECT_FALSE(Decode(good.substr(0, size)).ok());
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE(seed);
  std::mt19937_64 random(seed);
  for (int i = 0; i < 20'000; ++i) {
    std::string changed = good;
    for (uint64_t n = random() % 4; n < 4; ++n)
      changed[16 + random() % (good.size() - 24)] = static_cast<char>(random());
    const auto plan = Decode(Sealed(changed));
    if (plan.ok()) {
      EXPECT_EQ(EncodePlan(*plan), Sealed(changed));
    }
  }
}

}  // namespace
}  // namespace ashlar::engine
