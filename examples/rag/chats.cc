// SPDX-License-Identifier: Apache-2.0
#include "examples/rag/chats.h"

#include <algorithm>
#include <string>
#include <utility>

#include "examples/rag/retrieval.h"
#include "examples/refengine/tokenizer.h"

namespace ashlar::rag {
namespace {

constexpr size_t kExamples = 3;        // sections that the instructions quote
constexpr size_t kMessageBytes = 240;  // of a section, that a message quotes

RagPrompt SharedOpening(const std::vector<Section>& sections) {
  std::string text =
      "You explain documents to people who have not read them. Stay with what a document says, name the passage that "
      "you rely on, and answer in a few plain sentences. The passages below show the tone in which these are "
      "written.\n\n";
  for (size_t i = 0; i < std::min(kExamples, sections.size()); ++i) text += sections[i].text + "\n";
  RagPrompt opening{.tokens = refengine::Tokenize(text)};
  opening.tokens.insert(opening.tokens.begin(), refengine::kBeginToken);
  return opening;
}

std::vector<int32_t> Message(const Section& section, int64_t turn) {
  static constexpr const char* kAsk[] = {"What does this mean?", "And this, does it contradict what you said?",
                                         "Say in one sentence what follows from this."};
  return refengine::Tokenize("\nUser: " + std::string(kAsk[turn % std::size(kAsk)]) + "\n" +
                             section.text.substr(0, kMessageBytes) + "\nAssistant:");
}

}  // namespace

std::vector<Chat> MakeChats(const std::vector<Section>& sections, const ChatOptions& options) {
  const Bm25 index(sections);
  const std::vector<std::string> questions =
      MakeQuestions(sections, index, static_cast<size_t>(options.chats), options.seed);
  const RagPrompt shared = SharedOpening(sections);
  std::vector<Chat> chats;
  for (int64_t i = 0; i < options.chats; ++i) {
    const std::string& question = questions[static_cast<size_t>(i)];
    Chat& chat = chats.emplace_back(Chat{.composed = i % 2 == 1});
    chat.opening =
        chat.composed
            ? MakePrompt(sections, index.Search(question, static_cast<size_t>(options.sections_per_prompt)), question)
            : shared;
    for (int64_t turn = 0; turn < options.turns; ++turn) {
      const auto quoted = static_cast<size_t>(kExamples + i + turn * options.chats) % sections.size();
      const bool asked = chat.composed && turn == 0;
      chat.messages.push_back(asked ? std::vector<int32_t>() : Message(sections[quoted], turn));
    }
  }
  return chats;
}

}  // namespace ashlar::rag
