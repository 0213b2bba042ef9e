// SPDX-License-Identifier: Apache-2.0
// The three ways of serving that Ashlar is compared with (HYPIC §6.1), each in this process with the same engine.
#pragma once

#include <list>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "examples/rag/serving.h"
#include "examples/refengine/held_checkpoint.h"
#include "examples/refengine/kv_pages.h"
#include "examples/refengine/sequence.h"
#include "examples/refengine/stored_segment.h"

namespace ashlar::rag {

// Every token is computed.
class FullRecompute {
 public:
  FullRecompute(const Runtime& runtime, refengine::KvPages& pool) : runtime_(runtime), pool_(pool) {}
  absl::StatusOr<Served> Serve(const RagPrompt& prompt);

 private:
  const Runtime runtime_;
  refengine::KvPages& pool_;
};

// Exact prefixes only: states are kept at the end of every segment of the latest prompts, keys and values of all
// tokens.
class ExactPrefixes {
 public:
  // `pool` holds the cached prompts as well as the running one.
  ExactPrefixes(const Runtime& runtime, refengine::KvPages& pool, size_t prompts)
      : runtime_(runtime), pool_(pool), capacity_(prompts) {}
  absl::StatusOr<Served> Serve(const RagPrompt& prompt);

 private:
  struct Entry {
    std::vector<int32_t> tokens;
    std::unique_ptr<refengine::Sequence> sequence;
    std::map<uint64_t, refengine::HeldCheckpoint> checkpoints;  // keyed by depth
  };
  struct Hit {
    Entry* entry = nullptr;
    uint64_t depth = 0;
  };
  Hit Longest(const RagPrompt& prompt);

  const Runtime runtime_;
  refengine::KvPages& pool_;
  const size_t capacity_;
  std::list<Entry> entries_;  // latest first
};

// Position-independent caching without the transition: states are added, keys and values spliced, no seam is computed.
class NaiveAddition {
 public:
  NaiveAddition(const Runtime& runtime, refengine::KvPages& pool);
  absl::StatusOr<Served> Serve(const RagPrompt& prompt);

 private:
  struct First {
    refengine::HeldCheckpoint checkpoint;
    refengine::StoredSegment rows;
  };
  absl::StatusOr<First*> FirstSegment(std::span<const int32_t> tokens);
  absl::StatusOr<refengine::StoredSegment*> Segment(std::span<const int32_t> tokens);

  const Runtime runtime_;
  refengine::KvPages& pool_;
  refengine::ReplacedTransitions identity_;
  std::map<std::vector<int32_t>, First> first_;
  std::map<std::vector<int32_t>, refengine::StoredSegment> segments_;
};

}  // namespace ashlar::rag
