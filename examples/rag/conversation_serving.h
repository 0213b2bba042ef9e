// SPDX-License-Identifier: Apache-2.0
// Conversations with Ashlar: every turn resumes from the longest kept part of its text.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "examples/rag/cached_serving.h"
#include "examples/rag/prompt.h"
#include "examples/rag/serving.h"
#include "examples/rag/span_staging.h"
#include "proto/object.h"

namespace ashlar::rag {

// A conversation's text so far. The caller appends the user's message to text.tokens before the next turn.
struct Conversation {
  explicit Conversation(RagPrompt text = {});  // with a random id

  ConversationId id;
  RagPrompt text;
};

struct Turn {
  Served served;
  uint64_t prompt_tokens = 0;
  SetPrompt* set = nullptr;  // until the next turn; its sequence ends with the decoded tokens
  bool own = false;          // the prefix was the conversation's own
  Provenance provenance = Provenance::kExact;
  std::vector<int64_t> runs;            // ends of the runs that were computed of the prompt, rising
  std::vector<uint64_t> offered;        // depths of checkpoints; the last one is the text's end
  uint64_t span_tokens = 0;             // tokens of the offered span up to there; 0: none was offered
  std::vector<CommitOutcome> outcomes;  // outcomes of these
  double commit_ms = 0;
};

// A turn is served as CachedServing serves a prompt, and its states are committed. Texts that resumed from an exact
// prefix or from none may be resumed by every conversation; texts after retrieved sections only by this one.
class ConversationServing {
 public:
  // Limit of checkpoints captured in one turn; beyond it only the first ones are captured.
  static constexpr size_t kCheckpoints = 34;
  // With options.prefixes. A turn that computes at most span_tokens from the prompt's last token offers a span, and
  // states before that token. The engine resumes with the same bits as one that never stopped if its passes have
  // capture_tokens.
  static absl::StatusOr<std::unique_ptr<ConversationServing>> Open(const Runtime& runtime,
                                                                   const ServingOptions& options);

  // Computes the text so far, decodes the given number of tokens greedily, appends them, and commits the requested
  // states. Errors are CachedServing::Serve's; the text is then unchanged.
  absl::StatusOr<Turn> Serve(Conversation& conversation, int64_t decode);
  // After Serve: engines of that node continue the conversation from the end of this turn. UNAVAILABLE: the text did
  // not arrive in time; those engines compute it.
  absl::Status Handoff(const Conversation& conversation, const std::string& node, std::chrono::milliseconds wait);
  engine::Cache& cache() { return serving_->cache(); }
  refengine::KvPages& pages() { return serving_->pages(); }

 private:
  ConversationServing(const Runtime& runtime, std::unique_ptr<CachedServing> serving)
      : runtime_(runtime), serving_(std::move(serving)) {}

  absl::Status Decode(std::vector<int32_t>& text, int64_t count, std::vector<float> logits);
  void Commit(const Conversation& conversation, Turn& turn);

  const Runtime runtime_;
  const std::unique_ptr<CachedServing> serving_;
  uint64_t span_tokens_ = 0;
  std::unique_ptr<SpanStaging> span_staging_;  // null: without spans
};

}  // namespace ashlar::rag
