// SPDX-License-Identifier: Apache-2.0
// CommitText: offers a text that an engine has run through its model for later texts to resume from.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "ashlar/engine.h"
#include "client/engine/cache_state.h"
#include "client/engine/prompt_run.h"

namespace ashlar::engine {

// kInvalidArgument names the field, with prefix `field`. kFailedPrecondition for a cache that was opened without
// capture_tokens.
Status CheckText(CacheState& cache, const Text& text, const std::string& field);

// A text as it was when it was committed. The structs that point to tensors are copied; tokens, tensors and outcomes
// belong to the caller. The request's lease is held meanwhile. Later changes of the request have no effect.
struct CommittedText {
  // `began`: finished; may be null.
  CommittedText(const Text& given, std::shared_ptr<PromptRun> began);
  ~CommittedText();
  CommittedText(CommittedText&& other) noexcept = default;
  CommittedText& operator=(CommittedText&&) = delete;

  Text text;
  bool exact = true;
  // Whether the text was computed from everything that was landed under the lease. False if the plan has dropped hits:
  // the daemon would otherwise take the text for one that contains them.
  bool under_lease = true;
  std::shared_ptr<PromptRun> began;
  std::vector<MediaHash> media;
  Salt salt;
  GroupedPages pages;

 private:
  std::vector<Checkpoint> checkpoints_;
  std::vector<std::vector<LinearTensors>> linear_;
  std::vector<SpanRows> span_;
};

// Waits. The text has been checked; its outcomes are written.
void CommitText(CacheState& cache, const CommittedText& committed);
// Writes the same outcome for all checkpoints, without asking the daemon.
void SetOutcomes(const Text& text, CommitOutcome outcome);

// Checks a committed text, and the node that receives it.
Status CheckHandoff(const CacheState& cache, const Text& text, const char* node);
// The arguments of a handoff of a checked text: everything but its tokens is copied.
struct HandedText {
  HandedText(const Text& text, const char* node);
  std::span<const int32_t> tokens;
  ConversationId conversation{};
  std::vector<MediaHash> media;
  Salt salt;
  std::string node;
};
HandoffOutcome HandTextOff(CacheState& cache, const HandedText& text, std::chrono::milliseconds wait);

}  // namespace ashlar::engine
