// SPDX-License-Identifier: Apache-2.0
#include "examples/rag/prompt.h"

#include <numeric>

#include "examples/refengine/tokenizer.h"

namespace ashlar::rag {
namespace {

constexpr std::string_view kInstructions =
    "You answer questions about documents. Below are sections of documents, each behind a line that names it, and then "
    "a "
    "question. Answer from the sections alone, name the section that an answer comes from, and say so plainly when the "
    "sections do not contain the answer.\n\n";

}  // namespace

std::span<const int32_t> RagPrompt::Segment(size_t segment) const {
  return std::span(tokens).subspan(SegmentStart(segment), segment_lengths[segment]);
}

std::span<const int32_t> RagPrompt::Query() const {
  return std::span(tokens).subspan(SegmentStart(segment_lengths.size()));
}

uint64_t RagPrompt::SegmentStart(size_t segment) const {
  return std::accumulate(segment_lengths.begin(), segment_lengths.begin() + static_cast<ptrdiff_t>(segment),
                         uint64_t{0});
}

RagPrompt MakePrompt(const std::vector<Section>& sections, std::span<const int32_t> retrieved,
                     std::string_view question) {
  std::vector<std::string> parts = {std::string(kInstructions)};
  for (int32_t index : retrieved) {
    const Section& section = sections[index];
    parts.push_back("[" + section.document + ", section " + std::to_string(section.number + 1) + "]\n" + section.text +
                    "\n");
  }
  parts.push_back("Question: " + std::string(question) + "\nAnswer:");

  RagPrompt prompt;
  prompt.tokens.push_back(refengine::kBeginToken);
  for (size_t i = 0; i < parts.size(); ++i) {
    const size_t before = i == 0 ? 0 : prompt.tokens.size();
    const std::vector<int32_t> tokens = refengine::Tokenize(parts[i]);
    prompt.tokens.insert(prompt.tokens.end(), tokens.begin(), tokens.end());
    if (i + 1 < parts.size()) prompt.segment_lengths.push_back(prompt.tokens.size() - before);
  }
  return prompt;
}

}  // namespace ashlar::rag
