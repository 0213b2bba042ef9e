// SPDX-License-Identifier: Apache-2.0
#include "daemon/rpc/request_gate.h"

#include <gmock/gmock.h>
#include <google/protobuf/descriptor.h>
#include <google/protobuf/io/zero_copy_stream_impl_lite.h>
#include <gtest/gtest.h>

#include <random>
#include <set>

#include "ashlar/v1/cache.pb.h"
#include "proto/limits.h"

namespace ashlar::daemon {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using ::testing::HasSubstr;

// In small blocks, so that every item straddles some.
absl::Status Check(const google::protobuf::Message& message, const std::string& bytes) {
  google::protobuf::io::ArrayInputStream stream(bytes.data(), static_cast<int>(bytes.size()), 7);
  return CheckCounts(*message.GetDescriptor(), stream);
}
absl::Status Check(const google::protobuf::Message& message) {
  return Check(message, message.SerializeAsString());
}

std::string Session(const std::string& bytes) {
  google::protobuf::io::ArrayInputStream stream(bytes.data(), static_cast<int>(bytes.size()), 7);
  return FindSession(stream);
}

void AddMessages(const Descriptor* message, std::set<const Descriptor*>& messages) {
  if (!messages.insert(message).second) return;
  for (int i = 0; i < message->field_count(); ++i) {
    if (message->field(i)->message_type() != nullptr) AddMessages(message->field(i)->message_type(), messages);
  }
}

TEST(RequestGate, CoversEveryField) {
  const auto* cache = v1::MatchRequest::descriptor()->file()->FindServiceByName("Cache");
  std::set<const Descriptor*> messages;
  for (int i = 0; i < cache->method_count(); ++i) {
    const Descriptor* request = cache->method(i)->input_type();
    AddMessages(request, messages);
    ASSERT_GT(request->field_count(), 0);
    EXPECT_EQ(request->field(0)->name(), "session") << request->name();
    EXPECT_EQ(request->field(0)->number(), 1) << request->name();
  }
  EXPECT_GT(messages.size(), 12u);
  for (const Descriptor* message : messages) {
    for (int i = 0; i < message->field_count(); ++i) {
      const FieldDescriptor& field = *message->field(i);
      EXPECT_GT(MaxCount(field), 0u) << field.full_name() << " has no limit";
      const bool varint = field.cpp_type() == FieldDescriptor::CPPTYPE_INT32 ||
                          field.cpp_type() == FieldDescriptor::CPPTYPE_UINT32 ||
                          field.cpp_type() == FieldDescriptor::CPPTYPE_UINT64;
      EXPECT_TRUE(!field.is_packable() || varint) << field.full_name() << " cannot be counted by its varints";
    }
  }
}

TEST(RequestGate, EnforcesLimits) {
  v1::LandRequest land;
  for (uint64_t i = 0; i < limits::kMaxObjectsPerLanding; ++i) land.add_segments()->set_segment(i);
  land.mutable_page_table()->Resize(1000, -1);
  EXPECT_TRUE(Check(land).ok()) << Check(land);
  land.add_segments();
  EXPECT_THAT(Check(land).message(), HasSubstr("segments: too many; expected at most 32770"));

  v1::MatchRequest match;
  for (uint64_t i = 0; i < limits::kMaxPromptsPerCall; ++i) {
    match.add_prompts()->mutable_segment_lengths()->Resize(limits::kMaxSegments, 1 << 20);
  }
  EXPECT_TRUE(Check(match).ok()) << Check(match);
  match.mutable_prompts(5)->add_segment_lengths(1);
  EXPECT_THAT(Check(match).message(), HasSubstr("prompts[5].segment_lengths: too many; expected at most 16384"));

  v1::LandRequest table;
  table.mutable_page_table()->Resize(limits::kMaxPromptTokens, 1 << 20);
  EXPECT_TRUE(Check(table).ok());
  table.add_page_table(0);
  EXPECT_THAT(Check(table).message(), HasSubstr("page_table: too many; expected at most"));
}

// The parser accepts both encodings of repeated numbers, in any number of pieces.
TEST(RequestGate, CountsItemsOfSplitFields) {
  std::string bytes;
  v1::AbandonRequest packed;
  packed.mutable_reservations()->Resize(limits::kMaxObjectsPerCall / 2, 300);
  for (int i = 0; i < 2; ++i) bytes += packed.SerializeAsString();
  EXPECT_TRUE(Check(packed, bytes).ok());
  v1::AbandonRequest parsed;
  const std::string unpacked("\x10\x05", 2);
  ASSERT_TRUE(parsed.ParseFromString(bytes + unpacked));
  EXPECT_EQ(parsed.reservations_size(), static_cast<int>(limits::kMaxObjectsPerCall) + 1);
  EXPECT_THAT(Check(packed, bytes + unpacked).message(), HasSubstr("reservations: too many; expected at most 64"));

  // A message that is given twice is merged: neither half shows the size of the result.
  v1::AdvanceRequest twice;
  twice.mutable_state();
  EXPECT_TRUE(Check(twice).ok());
  EXPECT_THAT(Check(twice, twice.SerializeAsString() + twice.SerializeAsString()).message(),
              HasSubstr("state: too many"));
}

TEST(RequestGate, BoundsUnknownFields) {
  const std::string unknown("\xf8\x07\x01", 3);  // number 127, a varint
  const std::string mistyped("\x30\x01", 2);     // `segments` as a number: unknown to the parser as well
  v1::LandRequest land;
  std::string bytes;
  for (size_t i = 0; i < kMaxUnknownFields / 2; ++i) bytes += unknown + mistyped;
  EXPECT_TRUE(Check(land, bytes).ok());
  EXPECT_THAT(Check(land, bytes + unknown).message(), HasSubstr("unknown fields"));
  EXPECT_THAT(Check(land, bytes + mistyped).message(), HasSubstr("unknown fields"));
  const std::string group("\xfb\x07\xfc\x07", 4);
  EXPECT_EQ(Check(land, group).code(), absl::StatusCode::kInvalidArgument);
}

TEST(RequestGate, FindsTheSessionSecret) {
  v1::LandRequest land;
  land.mutable_page_table()->Resize(100, 3);
  EXPECT_EQ(Session(land.SerializeAsString()), "");
  const std::string rest = land.SerializeAsString();
  land.set_session("sixteen bytes ok");
  EXPECT_EQ(Session(land.SerializeAsString()), "sixteen bytes ok");
  v1::LandRequest alone;
  alone.set_session("sixteen bytes ok");
  EXPECT_EQ(Session(rest + alone.SerializeAsString()), "sixteen bytes ok") << "fields may come in any order";
  land.set_session(std::string(17, 'x'));
  EXPECT_EQ(Session(land.SerializeAsString()), "");
  EXPECT_EQ(Session(std::string("\x0a\x10 too short", 12)), "");
}

// A request that passes the gate is within the limits once it is parsed, whatever its bytes.
TEST(RequestGate, SurvivesAnyBytes) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  int passed = 0;
  for (int trial = 0; trial < 20'000; ++trial) {
    v1::AbandonRequest request;
    for (size_t i = random() % 100; i > 0; --i) request.add_reservations(random());
    std::string bytes = request.SerializeAsString();
    for (size_t flips = random() % 4; flips > 0 && !bytes.empty(); --flips) {
      bytes[random() % bytes.size()] ^= static_cast<char>(1 << random() % 8);
    }
    Session(bytes);
    if (!Check(request, bytes).ok()) continue;
    ++passed;
    request.Clear();
    request.ParsePartialFromString(bytes);
    ASSERT_LE(request.reservations_size(), static_cast<int>(limits::kMaxObjectsPerCall));
  }
  EXPECT_GT(passed, 1000);
}

}  // namespace
}  // namespace ashlar::daemon
