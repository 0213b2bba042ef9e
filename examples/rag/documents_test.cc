// SPDX-License-Identifier: Apache-2.0
#include "examples/rag/documents.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <set>

#include "examples/rag/prompt.h"
#include "examples/rag/retrieval.h"
#include "examples/refengine/tokenizer.h"

namespace ashlar::rag {
namespace {

namespace fs = std::filesystem;

class Documents : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::temp_directory_path() / ("ashlar-documents-" + std::to_string(getpid()));
    fs::remove_all(folder_);
    fs::create_directory(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }

  void Write(const std::string& name, const std::string& text) { std::ofstream(folder_ / name) << text; }

  fs::path folder_;
};

std::string Lines(int count, const std::string& word) {
  std::string text;
  for (int i = 0; i < count; ++i) text += word + std::to_string(i) + " is a line of some length\n";
  return text;
}

TEST_F(Documents, SplitsAtLinesWithoutLoss) {
  const std::string text = Lines(60, "oak");
  Write("oak", text);
  const auto sections = ReadSections(folder_, {.section_bytes = 256});
  ASSERT_TRUE(sections.ok()) << sections.status();
  std::string joined;
  for (const Section& section : *sections) {
    EXPECT_LE(section.text.size(), 256u);
    EXPECT_EQ(section.text.back(), '\n');
    joined += section.text;
  }
  EXPECT_EQ(joined, text.substr(0, joined.size()));
  EXPECT_LT(text.size() - joined.size(), 64u) << "only a last section too short to keep is dropped";
}

TEST_F(Documents, ReadsEachTextFileOnce) {
  Write("a", Lines(20, "ash"));
  Write("b", std::string("\0\1\2", 3) + Lines(20, "beech"));
  fs::create_symlink(folder_ / "a", folder_ / "c");
  const auto sections = ReadSections(folder_, {.section_bytes = 256});
  ASSERT_TRUE(sections.ok());
  for (const Section& section : *sections) EXPECT_EQ(section.document, "a");
}

TEST_F(Documents, TakesSectionsEvenlyFromAllDocuments) {
  Write("a", Lines(100, "ash"));
  Write("b", Lines(20, "beech"));
  const auto sections = ReadSections(folder_, {.section_bytes = 256, .max_sections = 4});
  ASSERT_TRUE(sections.ok());
  std::multiset<std::string> documents;
  for (const Section& section : *sections) documents.insert(section.document);
  EXPECT_EQ(documents, (std::multiset<std::string>{"a", "a", "b", "b"}));
}

TEST_F(Documents, ReportsAnEmptyFolder) {
  EXPECT_TRUE(absl::IsNotFound(ReadSections(folder_, {}).status()));
  EXPECT_TRUE(absl::IsNotFound(ReadSections(folder_ / "missing", {}).status()));
}

TEST(Retrieval, RanksTheSectionWithTheWordsFirst) {
  const std::vector<Section> sections = {{"d", 0, "the cat sat on the mat"},
                                         {"d", 1, "a licence grants permission to copy"},
                                         {"d", 2, "permission to copy, copy and copy again the licence"}};
  const Bm25 index(sections);
  EXPECT_EQ(index.Search("cat and mat", 1), std::vector<int32_t>{0});
  EXPECT_EQ(index.Search("copy", 2), (std::vector<int32_t>{2, 1}));
  EXPECT_EQ(index.Search("nothing of this", 3).size(), 3u);
  EXPECT_EQ(index.Idf("unknown"), 0);
  EXPECT_GT(index.Idf("cat"), index.Idf("copy"));
}

TEST(Retrieval, AsksAboutEverySectionOnceBeforeAnyAgain) {
  std::vector<Section> sections;
  for (int i = 0; i < 6; ++i) {
    const std::string name(1, static_cast<char>('a' + i));
    sections.push_back({"d", i, name + "one " + name + "two " + name + "three " + name + "four"});
  }
  const Bm25 index(sections);
  const std::vector<std::string> questions = MakeQuestions(sections, index, 6, /*seed=*/7);
  std::set<int32_t> asked;
  for (const std::string& question : questions) asked.insert(index.Search(question, 1)[0]);
  EXPECT_EQ(asked.size(), 6u);
  EXPECT_EQ(questions, MakeQuestions(sections, index, 6, 7));
  EXPECT_NE(questions, MakeQuestions(sections, index, 6, 8));
}

TEST(Prompt, TokenizesASectionTheSameAtAnyPosition) {
  const std::vector<Section> sections = {{"oak", 0, "text of the oak"}, {"ash", 3, "text of the ash"}};
  const RagPrompt there = MakePrompt(sections, std::vector<int32_t>{0, 1}, "why?");
  const RagPrompt here = MakePrompt(sections, std::vector<int32_t>{1, 0}, "why?");
  ASSERT_EQ(there.segment_lengths.size(), 3u);
  EXPECT_THAT(there.Segment(1), testing::ElementsAreArray(here.Segment(2)));
  EXPECT_THAT(there.Segment(0), testing::ElementsAreArray(here.Segment(0)));
  EXPECT_EQ(refengine::Detokenize(there.Segment(2)), "[ash, section 4]\ntext of the ash\n");
  EXPECT_EQ(refengine::Detokenize(there.Query()), "Question: why?\nAnswer:");
  EXPECT_EQ(there.tokens[0], refengine::kBeginToken);
}

}  // namespace
}  // namespace ashlar::rag
