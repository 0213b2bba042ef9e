// SPDX-License-Identifier: Apache-2.0
// Conversations about documents: their first turns, and the user's later messages.
#pragma once

#include <cstdint>
#include <vector>

#include "examples/rag/documents.h"
#include "examples/rag/prompt.h"

namespace ashlar::rag {

struct Chat {
  bool composed = false;  // true: begins with retrieved sections; false: with instructions that all plain chats share
  RagPrompt opening;
  std::vector<std::vector<int32_t>> messages;  // one per turn; the opening of a composed chat contains the first
};

struct ChatOptions {
  int64_t chats = 6;  // every second chat is composed
  int64_t turns = 4;
  int64_t sections_per_prompt = 4;  // at the start of a composed chat
  uint64_t seed = 1;                // seed of the questions
};

// The same sections and options give the same chats.
std::vector<Chat> MakeChats(const std::vector<Section>& sections, const ChatOptions& options);

}  // namespace ashlar::rag
