// SPDX-License-Identifier: Apache-2.0
#include "tools/replay/trace.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>
#include <zstd.h>

#include <filesystem>
#include <fstream>

#include "tools/replay/lines.h"

namespace ashlar::replay {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class TraceTest : public ::testing::Test {
 protected:
  TraceTest() { std::filesystem::create_directories(folder_); }
  ~TraceTest() override { std::filesystem::remove_all(folder_); }

  std::string Write(const std::string& name, const std::string& text) {
    std::ofstream(folder_ / name, std::ios::binary) << text;
    return (folder_ / name).string();
  }
  std::string Path(const std::string& name) const { return (folder_ / name).string(); }
  static std::vector<int32_t> Tokens(const Trace& trace, size_t request, uint64_t* prompt = nullptr) {
    std::vector<int32_t> tokens;
    const uint64_t count = trace.Tokens(trace.requests()[request], tokens);
    if (prompt != nullptr) *prompt = count;
    return tokens;
  }

  const std::filesystem::path folder_ =
      std::filesystem::path(::testing::TempDir()) / ("trace_test_" + std::to_string(getpid()));
};

TEST_F(TraceTest, StfAssemblesPromptsFromSegmentsInTimeOrder) {
  Write("t.segs.jsonl",
        "{\"id\":0,\"kind\":\"system\",\"n\":2,\"tok\":[7,8]}\n{\"id\":1,\"tok\":[9]}\n{\"id\":2,\"tok\":[]}\n");
  Write("t.reqs.jsonl",
        "{\"sid\":4,\"turn\":1,\"ts\":2.5,\"ins\":[0,1,0],\"outs\":[1]}\n{\"sid\":3,\"turn\":0,\"ts\":1,\"ins\":[1,2],"
        "\"outs\":[]}\n");
  const absl::StatusOr<Trace> trace = ReadTrace("stf", Path("t"));
  ASSERT_TRUE(trace.ok()) << trace.status();
  ASSERT_EQ(trace->requests().size(), 2u);
  EXPECT_EQ(trace->requests()[0].session, 3u);
  uint64_t prompt = 0;
  EXPECT_THAT(Tokens(*trace, 0), ElementsAre(9));
  EXPECT_THAT(Tokens(*trace, 1, &prompt), ElementsAre(7, 8, 9, 7, 8, 9));
  EXPECT_EQ(prompt, 5u);
  EXPECT_TRUE(trace->has_boundaries());
}

TEST_F(TraceTest, MooncakeBlocksWithOneNameHaveTheSameTokens) {
  Write("m.jsonl",
        "{\"timestamp\":0,\"input_length\":600,\"output_length\":3,\"hash_ids\":[5,6]}\n"
        "{\"timestamp\":1500,\"input_length\":520,\"output_length\":3,\"hash_ids\":[5,9]}\n");
  const absl::StatusOr<Trace> trace = ReadTrace("mooncake", Path("m"));
  ASSERT_TRUE(trace.ok()) << trace.status();
  EXPECT_EQ(trace->requests()[1].seconds, 1.5);
  EXPECT_FALSE(trace->has_boundaries());
  uint64_t prompt = 0;
  const std::vector<int32_t> first = Tokens(*trace, 0, &prompt), second = Tokens(*trace, 1);
  EXPECT_EQ(prompt, 600u);
  EXPECT_EQ(first.size(), 603u);
  EXPECT_EQ(second.size(), 523u);
  const auto parted = std::mismatch(first.begin(), first.end(), second.begin(), second.end());
  EXPECT_EQ(parted.first - first.begin(), 512);
  EXPECT_NE(first[600], second[520]);
}

TEST_F(TraceTest, CcRequestsContinueFromEarlierOnesOfTheirSession) {
  Write("c.jsonl",
        "{\"session\":\"a\",\"block\":4,\"n\":2}\n{\"t\":0,\"i\":9,\"o\":1,\"b\":-1,\"l\":0,\"n\":[[1,2]]}\n"
        "{\"t\":1,\"i\":12,\"o\":1,\"b\":0,\"l\":2,\"n\":[[7,1]]}\n{\"session\":\"b\",\"block\":4,\"n\":1}\n"
        "{\"t\":0,\"i\":8,\"o\":0,\"b\":-1,\"l\":0,\"n\":[[1,2]]}\n");
  const absl::StatusOr<Trace> trace = ReadTrace("cc", Path("c"));
  ASSERT_TRUE(trace.ok()) << trace.status();
  const std::vector<int32_t> first = Tokens(*trace, 0), second = Tokens(*trace, 1), other = Tokens(*trace, 2);
  EXPECT_EQ(first.size(), 10u);
  EXPECT_TRUE(std::equal(first.begin(), first.begin() + 8, second.begin())) << "two blocks in common";
  EXPECT_NE(first[8], second[8]);
  EXPECT_NE(first[0], other[0]) << "names are a session's own";
}

TEST_F(TraceTest, MarconisTracesHaveTheirTokens) {
  Write("p.jsonl",
        "{\"session_id\":1,\"turn_id\":0,\"ts\":0.5,\"num_input_tokens\":2,\"input_tokens\":[1,2],\"output_tokens\":[3]"
        "}\n");
  const absl::StatusOr<Trace> trace = ReadTrace("marconi", Path("p.jsonl"));
  ASSERT_TRUE(trace.ok()) << trace.status();
  EXPECT_EQ(trace->name(), "p");
  EXPECT_THAT(Tokens(*trace, 0), ElementsAre(1, 2, 3));
}

TEST_F(TraceTest, BadFilesAreNamedWithTheirLineAndField) {
  EXPECT_TRUE(absl::IsNotFound(ReadTrace("stf", Path("absent")).status()));
  EXPECT_THAT(std::string(ReadTrace("csv", Path("absent")).status().message()), HasSubstr("format: csv"));
  Write("m.jsonl", "{\"timestamp\":0,\"input_length\":6,\"output_length\":3,\"hash_ids\":[5]}\n{\"timestamp\":0}\n");
  EXPECT_THAT(std::string(ReadTrace("mooncake", Path("m")).status().message()),
              ::testing::AllOf(HasSubstr("m.jsonl:2: "), HasSubstr("input_length")));
  Write("t.segs.jsonl", "{\"id\":0,\"tok\":[7,8]}\n");
  Write("t.reqs.jsonl", "{\"sid\":4,\"ts\":2.5,\"ins\":[1],\"outs\":[]}\n");
  EXPECT_THAT(std::string(ReadTrace("stf", Path("t")).status().message()), HasSubstr("ins: unknown segment 1"));
  Write("e.jsonl", "");
  EXPECT_THAT(std::string(ReadTrace("mooncake", Path("e")).status().message()), HasSubstr("has no requests"));
  Write("n.segs.jsonl", "{\"id\":0,\"tok\":[]}\n");
  Write("n.reqs.jsonl", "{\"sid\":4,\"ts\":2.5,\"ins\":[0],\"outs\":[]}\n");
  EXPECT_THAT(std::string(ReadTrace("stf", Path("n")).status().message()), HasSubstr("all prompts are empty"));
}

TEST_F(TraceTest, ImpossibleNumbersAreRefused) {
  const struct {
    std::string format, lines, field;
  } cases[] = {
      {"mooncake", R"({"timestamp":0,"input_length":-1,"output_length":3,"hash_ids":[5]})", "input_length"},
      {"mooncake", R"({"timestamp":0,"input_length":1e3,"output_length":3,"hash_ids":[5]})", "input_length"},
      {"mooncake", R"({"timestamp":0,"input_length":6,"output_length":99999999999,"hash_ids":[5]})", "output_length"},
      {"mooncake", R"({"timestamp":1e300,"input_length":6,"output_length":3,"hash_ids":[5]})", "timestamp"},
      {"mooncake", R"({"timestamp":"now","input_length":6,"output_length":3,"hash_ids":[5]})", "timestamp"},
      {"mooncake", R"({"timestamp":0,"input_length":6,"output_length":3,"hash_ids":7})", "hash_ids"},
      {"mooncake", R"({"timestamp":0,"input_length":64,"output_length":3,"hash_ids":[1,2,3,4]})",
       "hash_ids: 4 blocks for input_length 64; expected 1 blocks of 512 tokens"},
      {"mooncake", R"({"timestamp":0,"input_length":1025,"output_length":3,"hash_ids":[1,2]})", "hash_ids: 2 blocks"},
      {"cc", R"({"session":"a","block":0})", "block"},
      {"cc", R"({"t":0,"i":9,"o":1,"b":-1,"l":0,"n":[]})", "session"},
      {"cc",
       "{\"session\":\"a\",\"block\":4}\n"
       R"({"t":0,"i":9,"o":1,"b":0,"l":0,"n":[[0,99999999999]]})",
       "n: "},
      {"marconi", R"({"session_id":1,"ts":0,"input_tokens":[-1],"output_tokens":[]})", "input_tokens"},
  };
  for (const auto& each : cases) {
    Write("x.jsonl", each.lines + "\n");
    const absl::Status status = ReadTrace(each.format, Path("x")).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << each.lines;
    EXPECT_THAT(std::string(status.message()), HasSubstr(each.field));
  }
}

TEST_F(TraceTest, PackedLinesAreReadCompletely) {
  std::string text;
  for (int i = 0; i < 100000; ++i) text += std::to_string(i) + "\n";
  std::string packed(ZSTD_compressBound(text.size()), '\0');
  packed.resize(ZSTD_compress(packed.data(), packed.size(), text.data(), text.size(), 3));
  Write("numbers.zst", packed);
  int next = 0;
  const auto count = [&](const std::string& line) {
    return line == std::to_string(next++) ? absl::OkStatus() : absl::InvalidArgumentError("not " + line);
  };
  EXPECT_TRUE(ReadLines(Path("numbers"), count).ok());
  EXPECT_EQ(next, 100000);
  Write("cut.zst", packed.substr(0, packed.size() / 2));
  next = 0;
  EXPECT_TRUE(absl::IsDataLoss(ReadLines(Path("cut"), count)));
}

}  // namespace
}  // namespace ashlar::replay
