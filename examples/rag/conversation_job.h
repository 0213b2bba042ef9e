// SPDX-License-Identifier: Apache-2.0
// Conversations that take turns. Each resumes from its kept state; the baselines are full recompute, and an engine that
// keeps every conversation in memory.
#pragma once

#include "absl/status/statusor.h"
#include "examples/rag/conversation_report.h"
#include "examples/rag/main_job.h"

namespace ashlar::rag {

struct ConversationOptions {
  JobOptions job;  // requests: not read
  int64_t conversations = 0, turns = 4;
  int64_t decode = 8;  // tokens a turn
  // Every next turn diverges from the text in the middle of the last answer, as if an answer is edited or its end is
  // tokenised differently: the engine captures spans, and states are rebuilt.
  bool regenerate = false;
  DType span_dtype = DType::kF16;  // type of the spans' keys and values: kF32, kF16 or kBF16
};

// Starts its own daemon, runs the conversations, and prints their results as they arrive.
absl::StatusOr<ConversationResult> RunConversationJob(const ConversationOptions& options);

}  // namespace ashlar::rag
