// Serving with Ashlar: what an engine does around its own layers to have a prompt set from cached segments.
// Match and land, fill the misses, compute the seams (HYPIC §4; docs/architecture.md, "A request").
#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "ashlar/client.h"
#include "examples/rag/daemon_advancer.h"
#include "examples/rag/serving.h"
#include "examples/rag/staging.h"
#include "examples/refengine/held_checkpoint.h"
#include "examples/refengine/page_pool.h"
#include "examples/refengine/sequence.h"
#include "examples/refengine/stored_segment.h"

namespace ashlar::rag {

// A prompt as it was set. What it points to lives as long as it does.
struct SetPrompt {
  std::unique_ptr<refengine::Sequence> sequence;
  std::optional<Match> match;
  uint64_t resumed = 0;                                     // tokens of the prefix that was landed
  std::vector<refengine::CachedLayer> prefix_layers;        // its states
  std::optional<refengine::HeldCheckpoint> rebuilt;         // these, where they were rebuilt from a span
  std::vector<bool> landed;                                 // one a segment
  std::vector<std::vector<refengine::CachedLayer>> layers;  // of landed segments
  std::vector<refengine::Step> chain;
  std::vector<refengine::Snapshot> snapshots;  // where the daemon asks for checkpoints, with PrefixUse

  // What is said to be landed.
  bool any_landed() const;
  void SetLanded(uint32_t segment, bool value);  // LandSegment::kPrefix: the prefix
  void SetNothingLanded();
};

// How long a request waits for the cache before it goes on without.
struct Patience {
  // For each layer of a landing, and then for its verdict; what has none by then is computed instead.
  std::chrono::milliseconds land{5000};
  // For slots in quarantine, when there are too few others.
  std::chrono::milliseconds quiet{10000};
};

// Whose kernels compose: the engine's, or the daemon's, layer by layer (Model::Advance).
enum class ComposeBy : uint8_t { kEngine, kDaemon };

// ‖T − T̃‖₂ that a published transition may be wrong by. The tuples are fp32: a state behind an interior errs by about
// this much of its norm, and is to stay as near to full recompute (1e-5) as it is without. What 16 bits round away
// alone is three hundred times as much (kernels::kDefaultEpsilon).
inline constexpr double kPublishedEpsilon = 1e-6;

struct ServingOptions {
  Patience patience;
  ComposeBy compose = ComposeBy::kEngine;
  double epsilon = kPublishedEpsilon;  // 0: every transition is stored as it is
  PrefixUse prefixes = {};
};

// What an engine's segments take in the cache.
struct StoredSegments {
  uint64_t segments = 0;
  uint64_t bytes = 0;                        // of all of them
  uint64_t own_bytes = 0;                    // if every transition had its layer's own form
  std::map<TransitionForm, uint64_t> heads;  // how many transitions are stored in which form
};

class CachedServing {
 public:
  // `region` has RegionBytes, the first tuple's for this object, and begins with the memory of `pool`; the client hosts
  // or registered it.
  static absl::StatusOr<std::unique_ptr<CachedServing>> Open(Client& client, const Runtime& runtime,
                                                             refengine::PagePool& pool, const Region& region,
                                                             refengine::SeamWidths seams,
                                                             const ServingOptions& options = {});

  // What cannot be had from the cache is computed, with the engine's own kernels. RESOURCE_EXHAUSTED: the pool has too
  // few pages, also when what is missing stayed in quarantine for longer than Patience::quiet. `prompt` must outlive
  // last(). With a conversation, whose own states may be resumed from, too.
  absl::StatusOr<Served> Serve(const RagPrompt& prompt, const ConversationId& conversation = {});

  // From now on, what a prompt's linear layers see goes to `tape`, too; it outlives this object. Null: not any more.
  void Record(const refengine::SpanTape* tape) { tape_ = tape; }

  // The prompt that was served last, for looking at it again.
  SetPrompt& last() { return *last_; }
  Model& model() { return model_; }
  // Of the segments that this engine has published.
  const StoredSegments& stored() const { return stored_; }
  // Layers that the daemon has advanced so far.
  uint64_t daemon_advances() const { return advancer_ == nullptr ? 0 : advancer_->advances(); }

 private:
  // Slots that the daemon may still write into: they are kept until the landing is quiet.
  struct Quarantined {
    std::unique_ptr<refengine::Sequence> sequence;
    Landing landing;  // goes first, and waits
  };

  CachedServing(const Runtime& runtime, refengine::PagePool& pool, const Region& region, refengine::SeamWidths seams,
                const ServingOptions& options)
      : runtime_(runtime),
        pool_(pool),
        region_(region),
        seams_(seams),
        options_(options),
        staging_(runtime.model.config(), pool, region, 0) {}

  // What is landing in the pages of a prompt's new sequence.
  struct Found {
    std::vector<LandSegment> segments;
    Landing landing;
  };
  // A new sequence, what the cache has for it, and the landing of all of that.
  absl::StatusOr<Found> Find(const RagPrompt& prompt, const ConversationId& conversation, SetPrompt& set);
  // Gives the sequence's pages up, at once if nothing can write there any more.
  void PutAside(std::unique_ptr<refengine::Sequence> sequence, Landing landing);
  // The missed segments that a publish would mend.
  static std::vector<ObjectRun> WhatToFill(const RagPrompt& prompt, const Match& match);
  // Prefills and publishes them, as far as nobody else does.
  absl::Status Fill(std::span<const ObjectRun> runs);
  absl::Status Prefill(ObjectKind kind, std::span<const int32_t> tokens, refengine::Sequence& scratch);
  // Says where the prefilled run's parts lie; a segment's transitions in the forms that `tokens` tokens leave them.
  PublishParts Staged(ObjectKind kind, uint64_t tokens, const refengine::Sequence& scratch) const;
  void Count(uint64_t tokens, const PublishParts& published);

  void FreeQuietSlots();
  // With pages for all of the prompt. Waits for pages in quarantine where others do not suffice.
  absl::Status NewSequence(const RagPrompt& prompt, SetPrompt& set);
  void BuildChain(const RagPrompt& prompt, SetPrompt& set) const;
  // Sets the prompt from what is said to be landed, each layer when it has come. CANCELLED: one did not come in time.
  absl::Status AdvanceWhileLanding(Landing& landing, const RagPrompt& prompt, SetPrompt& set,
                                   refengine::AdvanceOptions& options);
  // The same of what was found, and again where not all of it landed.
  absl::Status AdvanceBehind(Found found, const RagPrompt& prompt, SetPrompt& set, std::vector<float>& logits);
  // Sets the prompt from what has landed, of which nothing moves any more; without any of it where the lease ends
  // meanwhile.
  absl::Status AdvanceAgain(const RagPrompt& prompt, SetPrompt& set, std::vector<float>& logits);

  const Runtime runtime_;
  refengine::PagePool& pool_;
  const Region region_;
  const refengine::SeamWidths seams_;
  const ServingOptions options_;
  Staging staging_;
  Model model_;
  std::unique_ptr<DaemonAdvancer> advancer_;  // null: the engine composes
  const refengine::SpanTape* tape_ = nullptr;
  StoredSegments stored_;
  std::unique_ptr<SetPrompt> last_;
  std::vector<Quarantined> quarantined_;
};

}  // namespace ashlar::rag
