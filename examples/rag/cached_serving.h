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

// An assembled prompt. The objects to which it points live as long as it does.
struct SetPrompt {
  std::unique_ptr<refengine::Sequence> sequence;
  engine::Request request;
  uint64_t resumed = 0;      // tokens of the prefix that was landed
  std::vector<bool> landed;  // indexed by segment
  // The states after that prefix, if they were rebuilt from a span or the prefix lacks only the prompt's last token.
  std::optional<refengine::RecurrentState> prefix_state;
  std::vector<StepTuples> tuples;              // indexed by step; empty for computed steps
  std::vector<refengine::Step> chain;          // indexed by step
  std::vector<refengine::Snapshot> snapshots;  // where the daemon asks for checkpoints, with PrefixUse

  const engine::Plan& plan() const { return request.plan(); }
};

// How long a request waits for the cache before it continues without it.
struct Patience {
  // For each layer of a landing, and then for its verdict; what is not there by then is computed instead.
  std::chrono::milliseconds land{5000};
  // For slots in quarantine, if there are too few others.
  std::chrono::milliseconds quiet{10000};
  // For segments that other engines compute, with ServingOptions::cold_parallel; missing ones are computed afterwards.
  std::chrono::milliseconds cold{60000};
};

// Composition by the engine's kernels, or by the daemon, layer by layer (Request::Advance).
enum class ComposeBy : uint8_t { kEngine, kDaemon };

// Accepted error ‖T − T̃‖₂ of a published transition. The tuples are fp32: a state after an interior has about this
// relative error, small enough to stay as near to full recompute (1e-5) as without it. Rounding to 16 bits alone costs
// three hundred times as much (kernels::kDefaultEpsilon).
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
  int32_t pages = 0;  // pages of the pool, of kPageTokens tokens each
  // Shares this one's session, pages and pool; sockets, timeout and pages are then ignored.
  const CachedServing* share_with = nullptr;
  Patience patience;
  ComposeBy compose = ComposeBy::kEngine;
  double epsilon = kPublishedEpsilon;  // 0: every transition is stored as it is
  PrefixUse prefixes = {};
  bool cold_parallel = false;  // other engines compute a part of the missed segments, if that is faster
};

// The sizes of an engine's segments in the cache.
struct StoredSegments {
  uint64_t segments = 0;
  uint64_t bytes = 0;                        // bytes of all of them
  uint64_t own_bytes = 0;                    // if every transition had its layer's own form
  std::map<TransitionForm, uint64_t> heads;  // how many transitions are stored in which form
};

class CachedServing {
 public:
  static absl::StatusOr<std::unique_ptr<CachedServing>> Open(const Runtime& runtime, const ServingOptions& options);

  // Computes with the engine's own kernels what the cache does not have. RESOURCE_EXHAUSTED: the pool has too few
  // pages, also when missing ones stayed in quarantine for longer than Patience::quiet. `prompt` must outlive last(). A
  // prompt of a conversation may resume from the conversation's own states, too.
  absl::StatusOr<Served> Serve(const RagPrompt& prompt, const ConversationId& conversation = {});

  // Waits for a segment to compute for another engine, and computes and publishes it. Returns false if none arrives in
  // time.
  absl::StatusOr<bool> ServePrefill(std::chrono::milliseconds wait);

  // From now on, also records the linear layers' inputs of prompts on `tape`, which must outlive this object. Null:
  // stops recording.
  void Record(const refengine::SpanTape* tape) { tape_ = tape; }

  // The last served prompt, for further inspection.
  SetPrompt& last() { return *last_; }
  engine::Cache& cache() { return cache_; }
  refengine::KvPages& pages() { return *pool_; }
  // The segments that this engine has published.
  StoredSegments stored() const;

 private:
  CachedServing(const Runtime& runtime, const ServingOptions& options)
      : runtime_(runtime), options_(options), tuple_memory_(runtime.model.config()) {}

  // Prefills and publishes what is missing, starting with run `filled`.
  absl::Status Fill(engine::Request& request, uint32_t& filled);
  // The same, while other engines compute a part.
  absl::Status FillTogether(engine::Request& request);
  absl::Status Prefill(const engine::Run& run, refengine::Sequence& scratch);
  // Looks up and lands; fills what is missing, and repeats.
  absl::Status Begin(const RagPrompt& prompt, const ConversationId& conversation, SetPrompt& set, Served& served);

  // Returns quiesced pages that the cache kept to the pool. Waits up to `patience` for the first.
  void TakeQuiescedPages(std::chrono::milliseconds patience);
  // With pages for the whole prompt. Waits for pages that the cache keeps if there are too few others.
  absl::Status NewSequence(const RagPrompt& prompt, SetPrompt& set);
  // The pages of the sequence return to the pool, or belong to the cache.
  void EndSequence(SetPrompt& set);
  // The same for a prompt that could not be served; does not wait.
  void Abandon(SetPrompt& set);
  void BuildChain(const RagPrompt& prompt, SetPrompt& set) const;
  // Computes along the plan, and along the next plan if a hit failed to land.
  absl::Status Compute(const RagPrompt& prompt, SetPrompt& set, std::vector<float>& logits);

  const Runtime runtime_;
  const ServingOptions options_;
  TupleMemory tuple_memory_;
  engine::Cache cache_;
  std::shared_ptr<refengine::KvPages> pool_;  // lies in the cache's memory
  const refengine::SpanTape* tape_ = nullptr;
  uint64_t kept_pages_ = 0;  // number of pages kept by the cache
  std::unique_ptr<SetPrompt> last_;
};

}  // namespace ashlar::rag
