// SPDX-License-Identifier: Apache-2.0
// A request's prompt: instructions, retrieved sections in the order of their rank, question. Every part is tokenized
// separately, so that a section's tokens do not depend on its position.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "examples/rag/documents.h"

namespace ashlar::rag {

struct RagPrompt {
  std::vector<int32_t> tokens;
  std::vector<uint64_t> segment_lengths;  // lengths of the instructions and of each section; the question follows them

  std::span<const int32_t> Segment(size_t segment) const;
  std::span<const int32_t> Query() const;
  uint64_t SegmentStart(size_t segment) const;
};

RagPrompt MakePrompt(const std::vector<Section>& sections, std::span<const int32_t> retrieved,
                     std::string_view question);

}  // namespace ashlar::rag
