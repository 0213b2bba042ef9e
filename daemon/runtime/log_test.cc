#include "daemon/runtime/log.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>

#include "ashlar/v1/peer.pb.h"

namespace ashlar::daemon {
namespace {

TEST(Log, TextIsOneLineWhateverAnEngineSends) {
  EXPECT_EQ(FormatLogLine(false, "session opened", {{"pid", 12}, {"client", "libashlar/1"}}),
            "session opened pid=12 client=libashlar/1");
  EXPECT_EQ(FormatLogLine(false, "m", {{"client", "a b\n\"c\" x=1"}}), "m client=\"a b\\n\\\"c\\\" x=1\"");
  EXPECT_EQ(FormatLogLine(false, "m", {{"client", ""}}), "m client=\"\"");
  EXPECT_EQ(FormatLogLine(false, "m", {{"client", "\xff"}}), "m client=\"\\xff\"");
}

TEST(Log, JsonParsesAndKeepsNumbers) {
  const std::string line =
      FormatLogLine(true, "say \"hi\"", {{"pid", -3}, {"client", "a\nb\xff"}, {"bytes", uint64_t{1} << 40}});
  EXPECT_EQ(line.find('\n'), std::string::npos);
  const nlohmann::json parsed = nlohmann::json::parse("{" + line + "}");
  EXPECT_EQ(parsed["message"], "say \"hi\"");
  EXPECT_EQ(parsed["pid"], -3);
  EXPECT_EQ(parsed["bytes"], int64_t{1} << 40);
  EXPECT_EQ(parsed["client"].get<std::string>().substr(0, 3), "a\nb");
}

TEST(Log, ASendersTextThatIsNoUtf8LeavesNoLine) {
  ConfigureLog("info", "json");
  testing::internal::CaptureStderr();
  v1::PeerGreeting greeting;
  EXPECT_FALSE(greeting.ParseFromString("\x1a\x01\xff"));
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
  ConfigureLog("debug", "text");
  testing::internal::CaptureStderr();
  EXPECT_FALSE(greeting.ParseFromString("\x1a\x01\xff"));
  EXPECT_NE(testing::internal::GetCapturedStderr().find(" debug protobuf says="), std::string::npos);
  ConfigureLog("info", "text");
}

}  // namespace
}  // namespace ashlar::daemon
