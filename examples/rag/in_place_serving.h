// SPDX-License-Identifier: Apache-2.0
// Serving with segments shared in place (MEPIC §3.2): running requests read one copy of each segment's keys and values,
// in pages that the daemon allocates.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "ashlar/engine.h"
#include "examples/rag/engine_model.h"
#include "examples/rag/local_pages.h"
#include "examples/rag/prompt.h"
#include "examples/rag/serving.h"
#include "examples/rag/staging.h"
#include "examples/refengine/kv_pages.h"
#include "examples/refengine/sequence.h"

namespace ashlar::rag {

// Pages that hold the keys and values of this many tokens.
constexpr size_t PagesOf(size_t tokens) {
  return (tokens + kPageTokens - 1) / kPageTokens;
}

class InPlaceServing {
 public:
  struct Options {
    std::string rpc_socket, session_socket;
    refengine::SeamWidths seams;
    int32_t pages = 0;  // pages of the pool
    std::chrono::milliseconds land{5000};
  };
  static absl::StatusOr<std::unique_ptr<InPlaceServing>> Open(const Runtime& runtime, const Options& options);

  // A request after its prefill. It holds its pages until it is destroyed.
  struct Running {
    engine::Request request;
    std::unique_ptr<refengine::Sequence> sequence;
    std::vector<float> logits;   // logits of the first token
    std::vector<int32_t> pages;  // all pages of the request, ascending: shared and own
    uint64_t own_pages = 0;      // pages of the request that are not shared
    uint64_t missed = 0;         // segments that the request computed
  };
  // RESOURCE_EXHAUSTED: the pool has too few pages. `prompt` must outlive the result.
  absl::StatusOr<std::unique_ptr<Running>> Serve(const RagPrompt& prompt);

 private:
  InPlaceServing(const Runtime& runtime, const Options& options)
      : runtime_(runtime), seams_(options.seams), tuples_(runtime.model.config()) {}

  absl::Status Admit(Running& running, size_t own_pages);
  absl::Status PublishMissing(Running& running);
  // Computes the prompt along the plan. False: the plan has changed.
  absl::StatusOr<bool> Compute(const RagPrompt& prompt, Running& running);
  void Place(const RagPrompt& prompt, const std::vector<bool>& shared, Running& running);

  const Runtime runtime_;
  const refengine::SeamWidths seams_;
  TupleMemory tuples_;
  engine::Cache cache_;
  std::unique_ptr<refengine::KvPages> pool_;
};

}  // namespace ashlar::rag
