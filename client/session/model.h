// SPDX-License-Identifier: Apache-2.0
// Model: an opened model, and its calls to the daemon: lookups, landings, publishing, commits, composition, admission.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/session/composition.h"
#include "client/session/landing.h"
#include "client/session/match.h"
#include "client/session/opened_model.h"
#include "client/session/prefill.h"
#include "client/session/reconnector.h"
#include "client/session/region.h"
#include "client/session/shared_pages.h"
#include "client/session/span.h"
#include "proto/key.h"
#include "proto/layout.h"
#include "proto/object.h"
#include "proto/outcome.h"
#include "proto/prefix.h"

namespace ashlar::v1 {
class PublishObject;
}

namespace ashlar {

// The match that Model::LookupAndLand found, and the landing of all its hits.
struct MatchAndLanding {
  Match match;
  std::vector<LandSegment> segments;  // as for Land: the prefix, then every hit segment
  Landing landing;
};

// The right and the duty to publish one object. An engine that cannot publish it calls Model::Abandon. The daemon
// reclaims an unused reservation after leases.reservation_seconds. Each Publish of the session renews its other
// reservations, up to ten times that.
struct Reservation {
  ReserveOutcome outcome = ReserveOutcome::kUnavailable;
  uint64_t id = 0;
  uint64_t generation = 0;  // connection that granted it; the daemon does not know it after a reconnect
  bool granted() const { return outcome == ReserveOutcome::kGranted; }
};
struct ObjectRun {
  ObjectKind kind = ObjectKind::kSegment;  // kSegment, or kCheckpoint for a prompt's first segment
  std::span<const int32_t> tokens;
  std::span<const MediaHash> media;  // offsets count from the run's start
  Salt salt = {};                    // zero: the prompt has no salt
};

// The sources of a finished object. The daemon reads them only during Publish: when Publish returns, the engine owns
// them again.
struct PublishParts {
  struct Linear {
    uint32_t layer = 0;
    // All heads' transitions in the layer's own form (docs/formats.md §4). Dense transitions are fp32 with fp32 states,
    // otherwise fp16. Null for a checkpoint, and for a layer with runs below.
    const std::byte* transition = nullptr;
    const std::byte* state = nullptr;          // heads × [d_k, d_v] or [d_v, d_k], in the layout's state_dtype
    const int32_t* state_exponents = nullptr;  // [heads], only for fp16 states
    const std::byte* conv_tail = nullptr;      // has conv_order and ConvType; null if the layer has no convolution
  };
  // Consecutive heads whose transitions are stored in one form.
  struct Run {
    TransitionRun heads;
    const std::byte* units = nullptr;  // consecutive; null for zero transitions
  };
  std::vector<Linear> linear;           // every linear layer
  std::vector<Run> runs;                // layers with runs only: each head is in exactly one run
  Region region;                        // contains all pointers above
  std::span<const int32_t> page_table;  // pages of the run's keys and values in the declared pages
  uint64_t first_position = 0;          // slot position of the run's token 0
  Provenance provenance = Provenance::kExact;
  std::span<const uint32_t> group_pages = {};  // table entries of each group (PagedCache::groups)
};

// One finished object: its reservation, and its sources.
struct Publication {
  Reservation reservation;
  PublishParts parts;
};

// The states of all linear layers after `depth` tokens of a text.
struct CapturedState {
  uint64_t depth = 0;
  std::vector<PublishParts::Linear> linear;  // every linear layer, without transitions
};

// A text that has run through the model, and the places of its states, keys and values. Read only during Commit.
struct CommitParts {
  std::span<const int32_t> tokens;  // the prompt, and the decoded tokens that ran through the model
  uint64_t prompt_tokens = 0;       // tokens of the prompt, before the decoded ones
  Provenance provenance = Provenance::kExact;
  std::vector<CapturedState> checkpoints;      // depths ascend; the last one is the text's end
  CapturedSpan span;                           // with PrefixUse::span_tokens; may be empty
  Region region;                               // contains the states and the span
  std::span<const int32_t> page_table;         // page table of the text from position 0, in the declared pages
  ConversationId conversation{};               // needed where it is composed
  std::span<const MediaHash> media;            // media of the text; with media its span is not kept
  std::span<const uint32_t> group_pages = {};  // see PublishParts
  Salt salt = {};                              // zero: the prompt has no salt
};

// An open identity and layout. Copies share it. It is closed with the last copy; calls in progress keep what they need.
// A session has at most 64 open models (RESOURCE_EXHAUSTED). Lookup, Reserve and Publish take any number of items, and
// make as few calls for them as proto/limits.h allows, all within one timeout.
class Model {
 public:
  const Layout& layout() const { return opened_->layout(); }  // layout of this process's shard
  NamespaceId ns() const { return opened_->ns(); }

  // Declares the engine's pages, before Publish and Land. A second declaration replaces the first: landings into the
  // earlier pages and publications from them may then be misses.
  absl::Status DeclarePages(const Region& region, const PagedCache& pages);

  std::vector<Match> Lookup(std::span<const Prompt> prompts);
  Match Lookup(const Prompt& prompt);
  // Returns the match that another process of this tenant has under `lease`, for the same prompt and this model's
  // shard. Processes of the same shard share the lease; another shard gets a separate lease. Objects of another model,
  // or of shards of another size, are missed (kInvalidRequest); all are missed if the lease has ended (kLeaseLost).
  // Before this process reads tuples it must land them too, at least with LandSegment::tuples_only.
  Match Attach(const std::string& lease, std::span<const uint64_t> segment_lengths);

  // At most one engine computes a segment: a second engine gets kBeingPublished or kAlreadyPresent. kDeclined: the
  // daemon does not want it, because computing takes less time (CostModel) than landing; compute it, and do not publish
  // it.
  std::vector<Reservation> Reserve(std::span<const ObjectRun> runs);
  // Returns one independent outcome per object. After kUnavailable the object may or may not be published; a published
  // object is always whole. kBusy: the object was not published, and its reservation stays; publish it again, or
  // abandon it.
  std::vector<PublishOutcome> Publish(std::span<const Publication> objects);
  PublishOutcome Publish(const Reservation& reservation, const PublishParts& parts);
  // Skips reservations that were not granted.
  void Abandon(std::span<const Reservation> reservations);
  void Abandon(const Reservation& reservation) { Abandon(std::span(&reservation, 1)); }

  // Offers a text's states, and the keys and values that they need, for later texts to resume from. The daemon decides
  // which to keep. Returns one outcome per checkpoint; kKeptAsSpan for the last one if the span is kept instead.
  // `match`: the match from which the text resumed; may be null. For models opened with PrefixUse, otherwise
  // kBadSource.
  std::vector<CommitOutcome> Commit(const Match* match, const CommitParts& text);

  // Sends a committed text to the daemon of a named node, so that an engine there can continue it (docs/router.md).
  // Only tokens, conversation, media and salt of `text` are read. Waits for at most `wait` (up to a minute) and a
  // call's time.
  HandoffOutcome Handoff(const CommitParts& text, const std::string& node, std::chrono::milliseconds wait);

  // Cold prompts in parallel (docs/router.md). PlanPrefill assigns missed segments to engines that offer prefill, if
  // that is faster. This engine must not reserve the kPending ones meanwhile, and reserves and computes the kOwn ones.
  // Without a daemon all are kOwn. `warm`: this engine computes none; kOwn segments then remain uncomputed. At most 64
  // plans of a session are open.
  PrefillPlan PlanPrefill(std::span<const ObjectRun> runs, bool warm = false);
  // Waits, for at most a minute, until a segment has become kOwn, or none is kPending any longer. Returns whether any
  // is still pending. If the daemon is gone, pending segments become kOwn.
  bool AwaitPrefill(PrefillPlan& plan, std::chrono::milliseconds wait);
  // Call it after the lookup that finds the computed segments; the daemon need not keep them for this engine any
  // longer.
  void EndPrefill(const PrefillPlan& plan);
  // Offers to prefill for other engines: reports results and waits, for at most a minute, for the next assignment, if
  // any. This engine is busy while it computes one, and stays available to other engines if it calls again within a
  // second. One call at a time: a second call ends the first, which returns none. UNAVAILABLE: no daemon.
  absl::StatusOr<std::optional<PrefillWork>> ServePrefill(std::span<const PrefillResult> results,
                                                          std::chrono::milliseconds wait);

  // In-place sharing, on pages declared with `allocate` (shared_pages.h). Admits a request with the pages that its
  // segments and the first `prefix_blocks` blocks of its prefix share with other requests, and `own_pages` own pages,
  // or returns the shortage at once. `unshared_segments`: indices of segments that the request does not read; they have
  // no pages, and the request does not have to fill them. `fills_later`: it fills no segments until Refresh names
  // them; other requests may fill them. Earlier daemons ignore it.
  Admitted Admit(const Prompt& prompt, uint32_t own_pages, uint32_t prefix_blocks = 0,
                 std::span<const uint32_t> unshared_segments = {}, bool fills_later = false);

  // Starts landing everything that one request needs, and does not wait. Each landing has its own progress and verdict.
  // `group_pages`: see PublishParts.
  Landing Land(const Match& match, std::span<const int32_t> page_table, std::span<const LandSegment> segments,
               std::span<const uint32_t> group_pages = {});
  // Lookup and Land in one call, for a prompt that is served now: every hit lands at its position in the prompt
  // (`page_table` is the prompt's, from position 0). Waits for the match, not for the landing. Whatever the match
  // contains, the engine owns the prompt's slots only once the landing is quiesced(): if the match did not arrive in
  // time, the daemon may be landing objects that the engine never learns of.
  MatchAndLanding LookupAndLand(const Prompt& prompt, std::span<const int32_t> page_table,
                                std::span<const uint32_t> group_pages = {});

  // The composition service, for engines without kernels: the daemon runs kernels::AdvanceSeam,
  // with bit-identical results if both processes use the same CPU instruction sets. The call waits, within the client's
  // timeout, and verifies the tuples that no landing has verified. If the region is on a GPU, the GPU runs it, with the
  // rounding of the back end `cuda`. One call there takes at most 8 MiB of pointers (heads × (32 bytes per segment and
  // 8 per checkpoint)), and 64 million numbers of f16 states and checkpoints; more is kInvalidRequest.
  //
  // Advances one layer. `match` may be null where no step is a segment.
  Composition Advance(const Match* match, const LayerAdvance& advance);

 private:
  friend class Client;
  // Lands everything that was found, at its position in the prompt.
  MatchAndLanding LandAll(Match match, std::span<const int32_t> page_table, std::span<const uint32_t> group_pages);
  // The model's handles on the current connection.
  absl::StatusOr<internal::ModelBinding> Bind() const {
    if (absl::Status status = reconnector_->CheckProcess(); !status.ok()) return status;
    return opened_->binding();
  }

  // A request's pages under a new lease, which is held from now on, but not granted yet.
  std::optional<Admission> NewAdmission(const internal::ModelBinding& binding,
                                        std::span<const uint64_t> segment_lengths, internal::Deadline deadline) const;

  // Looks up and lands in one call. Empty if two calls are needed: the daemon is too old, the prompt is too long, or
  // the pages cannot be used now.
  std::optional<MatchAndLanding> TryLookupAndLand(const Prompt& prompt, std::span<const int32_t> page_table,
                                                  std::span<const uint32_t> group_pages);

  // Describes one finished object to the daemon in `object`. Returns its outcome if the daemon need not be asked.
  std::optional<PublishOutcome> Describe(const Publication& publication, const internal::ModelBinding& binding,
                                         v1::PublishObject& object) const;

  std::shared_ptr<internal::Reconnector> reconnector_;
  std::shared_ptr<internal::OpenedModel> opened_;
};

}  // namespace ashlar
