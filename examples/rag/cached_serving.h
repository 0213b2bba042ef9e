// SPDX-License-Identifier: Apache-2.0
// Serving with Ashlar: what an engine does around its own layers to assemble a prompt from cached segments. Look up and
// land, fill the misses, compute the seams (HYPIC §4; docs/architecture.md, "A request").
#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "ashlar/engine.h"
#include "examples/rag/serving.h"
#include "examples/rag/staging.h"
#include "examples/refengine/held_checkpoint.h"
#include "examples/refengine/kv_pages.h"
#include "examples/refengine/sequence.h"
#include "examples/refengine/stored_segment.h"
#include "proto/prefix.h"

namespace ashlar::rag {

// An assembled prompt. What it points to lives as long as it does.
struct SetPrompt {
  std::unique_ptr<refengine::Sequence> sequence;
  engine::Request request;
  uint64_t resumed = 0;      // tokens of the prefix that was landed
  std::vector<bool> landed;  // by segment
  // The states after that prefix, if they were rebuilt from a span or the prefix lacks only the prompt's last token.
  std::optional<refengine::RecurrentState> prefix_state;
  std::vector<StepTuples> tuples;              // by step; empty for computed steps
  std::vector<refengine::Step> chain;          // by step
  std::vector<refengine::Snapshot> snapshots;  // where the daemon asks for checkpoints, with PrefixUse

  const engine::Plan& plan() const { return request.plan(); }
};

// How long a request waits for the cache before it goes on without.
struct Patience {
  // For each layer of a landing, and then for its verdict; what has none by then is computed instead.
  std::chrono::milliseconds land{5000};
  // For slots in quarantine, when there are too few others.
  std::chrono::milliseconds quiet{10000};
  // For segments that other engines compute, with ServingOptions::cold_parallel; what has not come then is computed.
  std::chrono::milliseconds cold{60000};
};

// The kernels that compose are the engine's, or the daemon's, layer by layer (Request::Advance).
enum class ComposeBy : uint8_t { kEngine, kDaemon };

// ‖T − T̃‖₂ that a published transition may be wrong by. The tuples are fp32: a state behind an interior errs by about
// this much of its norm, and is to stay as near to full recompute (1e-5) as it is without. What 16 bits round away
// alone is three hundred times as much (kernels::kDefaultEpsilon).
inline constexpr double kPublishedEpsilon = 1e-6;

// The engine's use of exact prefixes, as in engine::OpenOptions.
struct PrefixUse {
  uint32_t capture_tokens = 0;  // 0: prefixes are not used
  uint32_t span_tokens = 0;
  DType span_dtype = DType::kF32;
};

class CachedServing;

struct ServingOptions {
  std::string rpc_socket, session_socket;
  std::chrono::milliseconds timeout{5000};  // limit of one call to the daemon
  refengine::SeamWidths seams;
  int32_t pages = 0;  // of the pool, of kPageTokens tokens each
  // Shares this one's session, pages and pool; sockets, timeout and pages are then ignored.
  const CachedServing* beside = nullptr;
  Patience patience;
  ComposeBy compose = ComposeBy::kEngine;
  double epsilon = kPublishedEpsilon;  // 0: every transition is stored as it is
  PrefixUse prefixes = {};
  bool cold_parallel = false;  // other engines compute a part of what is missed, where that is faster
};

// The sizes of an engine's segments in the cache.
struct StoredSegments {
  uint64_t segments = 0;
  uint64_t bytes = 0;                        // of all of them
  uint64_t own_bytes = 0;                    // if every transition had its layer's own form
  std::map<TransitionForm, uint64_t> heads;  // how many transitions are stored in which form
};

class CachedServing {
 public:
  static absl::StatusOr<std::unique_ptr<CachedServing>> Open(const Runtime& runtime, const ServingOptions& options);

  // Computes with the engine's own kernels where the cache has nothing. RESOURCE_EXHAUSTED: the pool has too few pages,
  // also when missing ones stayed in quarantine for longer than Patience::quiet. `prompt` must outlive last(). A prompt
  // of a conversation may resume from the conversation's own states, too.
  absl::StatusOr<Served> Serve(const RagPrompt& prompt, const ConversationId& conversation = {});

  // Waits for a segment to compute for another engine, and computes and publishes it. False: none came in time.
  absl::StatusOr<bool> ServePrefill(std::chrono::milliseconds wait);

  // From now on, what a prompt's linear layers see goes to `tape`, too; it outlives this object. Null: not any more.
  void Record(const refengine::SpanTape* tape) { tape_ = tape; }

  // The prompt that was served last, for looking at it again.
  SetPrompt& last() { return *last_; }
  engine::Cache& cache() { return cache_; }
  refengine::KvPages& pages() { return *pool_; }
  // Of the segments that this engine has published.
  StoredSegments stored() const;

 private:
  CachedServing(const Runtime& runtime, const ServingOptions& options)
      : runtime_(runtime), options_(options), room_(runtime.model.config()) {}

  // Prefills and publishes what is missing, from run `filled` on.
  absl::Status Fill(engine::Request& request, uint32_t& filled);
  // The same with what other engines compute at the same time.
  absl::Status FillTogether(engine::Request& request);
  absl::Status Prefill(const engine::Run& run, refengine::Sequence& scratch);
  // Looks up and lands; fills what is missing, and again.
  absl::Status Begin(const RagPrompt& prompt, const ConversationId& conversation, SetPrompt& set, Served& served);

  // Pages that the cache has kept and needs no more are the pool's again. Waits up to so long for the first.
  void TakeQuiescedPages(std::chrono::milliseconds patience);
  // With pages for all of the prompt. Waits for those that the cache keeps where others do not suffice.
  absl::Status NewSequence(const RagPrompt& prompt, SetPrompt& set);
  // The pages of the sequence are the pool's again, or the cache's.
  void EndSequence(SetPrompt& set);
  // The same of a prompt that could not be served; without waiting.
  void Abandon(SetPrompt& set);
  void BuildChain(const RagPrompt& prompt, SetPrompt& set) const;
  // Computes along the plan, and along the next one where something did not land.
  absl::Status Compute(const RagPrompt& prompt, SetPrompt& set, std::vector<float>& logits);

  const Runtime runtime_;
  const ServingOptions options_;
  TupleRoom room_;
  engine::Cache cache_;
  std::shared_ptr<refengine::KvPages> pool_;  // in the cache's memory
  const refengine::SpanTape* tape_ = nullptr;
  uint64_t kept_pages_ = 0;  // by the cache
  std::unique_ptr<SetPrompt> last_;
};

}  // namespace ashlar::rag
