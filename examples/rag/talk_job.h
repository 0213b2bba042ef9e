// SPDX-License-Identifier: Apache-2.0
// Conversations that take turns, each resumed where it was left, against full recompute and against never leaving.
#pragma once

#include "absl/status/statusor.h"
#include "examples/rag/main_job.h"
#include "examples/rag/talk_report.h"

namespace ashlar::talk {

struct TalkOptions {
  rag::JobOptions job;  // requests: not read
  int64_t conversations = 0, turns = 4;
  int64_t decode = 8;  // tokens a turn
  // Every next turn parts from the text inside the last answer, in the middle of it, as where an answer is edited or
  // its end is tokenised anew: the engine captures spans, and states are rebuilt.
  bool regenerate = false;
  DType span_dtype = DType::kF16;  // of the spans' keys and values: kF32, kF16 or kBF16
};

// Starts a daemon of its own, has the conversations, and prints their results on the way.
absl::StatusOr<TalkResult> RunTalkJob(const TalkOptions& options);

}  // namespace ashlar::talk
