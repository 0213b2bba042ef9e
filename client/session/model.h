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

// The match that Model::LookupAndLand found, and the landing of all of it.
struct MatchAndLanding {
  Match match;
  std::vector<LandSegment> segments;  // in Land's form: the prefix, then every segment that was hit
  Landing landing;
};

// The right and the duty to publish one object. An engine that cannot publish it calls Model::Abandon. The daemon
// reclaims an unused reservation after leases.reservation_seconds. Each Publish of the session renews its other
// reservations, up to ten times that.
struct Reservation {
  ReserveOutcome outcome = ReserveOutcome::kUnavailable;
  uint64_t id = 0;
  uint64_t generation = 0;  // connection that granted it; after a reconnect the daemon does not know it
  bool granted() const { return outcome == ReserveOutcome::kGranted; }
};
struct ObjectRun {
  ObjectKind kind = ObjectKind::kSegment;  // kSegment, or kCheckpoint for a prompt's first segment
  std::span<const int32_t> tokens;
  std::span<const MediaHash> media;  // offsets count from the run's start
  Salt salt = {};                    // zero: the prompt has no salt
};

// The sources of a finished object. The daemon reads them during Publish only: when Publish returns, they are the
// engine's again.
struct PublishParts {
  struct Linear {
    uint32_t layer = 0;
    // All heads' transitions in the layer's own form (docs/formats.md §4), dense ones fp32 beside fp32 states and else
    // fp16. Null for a checkpoint, and for a layer that has runs below.
    const std::byte* transition = nullptr;
    const std::byte* state = nullptr;          // heads × [d_k, d_v] or [d_v, d_k], in the layout's state_dtype
    const int32_t* state_exponents = nullptr;  // [heads], of fp16 states alone
    const std::byte* conv_tail = nullptr;      // in conv_order and ConvType; null where the layer has no convolution
  };
  // Consecutive heads whose transitions are stored in one form.
  struct Run {
    TransitionRun heads;
    const std::byte* units = nullptr;  // consecutive; null for zero transitions
  };
  std::vector<Linear> linear;           // every linear layer
  std::vector<Run> runs;                // for layers with runs: each head is in exactly one run
  Region region;                        // contains all pointers above
  std::span<const int32_t> page_table;  // of the run's keys and values in the declared pages
  uint64_t first_position = 0;          // slot position of the run's token 0
  Provenance provenance = Provenance::kExact;
  std::span<const uint32_t> group_pages = {};  // table entries of each group (PagedCache::groups)
};

// One finished object: its reservation, and its sources.
struct Publication {
  Reservation reservation;
  PublishParts parts;
};

// The states of all linear layers behind `depth` tokens of a text.
struct CapturedState {
  uint64_t depth = 0;
  std::vector<PublishParts::Linear> linear;  // every linear layer, without transitions
};

// A text that has been run through the model, and where its states and its keys and values lie. Everything is read
// during Commit only.
struct CommitParts {
  std::span<const int32_t> tokens;  // the prompt, and the decoded tokens that were run through the model
  uint64_t prompt_tokens = 0;       // tokens of the prompt, before the decoded ones
  Provenance provenance = Provenance::kExact;
  std::vector<CapturedState> checkpoints;      // depths ascend; the last one is the text's end
  CapturedSpan span;                           // with PrefixUse::span_tokens; may be empty
  Region region;                               // contains the states and the span
  std::span<const int32_t> page_table;         // of the text from position 0, in the declared pages
  ConversationId conversation{};               // needed where it is composed
  std::span<const MediaHash> media;            // of the text; its span is not kept if there are any
  std::span<const uint32_t> group_pages = {};  // as in PublishParts
  Salt salt = {};                              // zero: the prompt has no salt
};

// An opened identity and layout. Copies share it; it is closed when the last one is gone, and what is under way keeps
// what it needs. A session has at most 64 open ones (RESOURCE_EXHAUSTED). Lookup, Reserve and Publish take as many
// items as there are and make as few calls of them as proto/limits.h allows, all within one timeout.
class Model {
 public:
  const Layout& layout() const { return opened_->layout(); }  // of this process's shard
  NamespaceId ns() const { return opened_->ns(); }

  // Declares the engine's pages, before Publish and Land. Declared again, they take the place of the earlier ones: what
  // lands or is published in these meanwhile may be a miss.
  absl::Status DeclarePages(const Region& region, const PagedCache& pages);

  std::vector<Match> Lookup(std::span<const Prompt> prompts);
  Match Lookup(const Prompt& prompt);
  // Returns the match that another process of this tenant has under `lease`, for the same prompt and this model's
  // shard. A lease of the same shard is held together with that process; another shard gets a lease of its own. Objects
  // of another model, or of shards of another size, are missed (kInvalidRequest); all are missed if the lease has ended
  // (kLeaseLost). Before this process reads tuples it must land them too, at least with LandSegment::tuples_only.
  Match Attach(const std::string& lease, std::span<const uint64_t> segment_lengths);

  // At most one engine computes a segment: a second one is told kBeingPublished or kAlreadyPresent. kDeclined: the
  // daemon does not want it, as computing it takes less (CostModel) than landing it; compute it, publish nothing.
  std::vector<Reservation> Reserve(std::span<const ObjectRun> runs);
  // Returns one outcome for each object; no outcome depends on another. kUnavailable may leave open whether the object
  // was published; a published object is always whole. kBusy: it was not taken, and its reservation stays; publish it
  // again, or abandon it.
  std::vector<PublishOutcome> Publish(std::span<const Publication> objects);
  PublishOutcome Publish(const Reservation& reservation, const PublishParts& parts);
  // Those that are not granted are left out.
  void Abandon(std::span<const Reservation> reservations);
  void Abandon(const Reservation& reservation) { Abandon(std::span(&reservation, 1)); }

  // Offers a text's states, and the keys and values that they need, for later texts to resume from; the daemon keeps
  // what is worth it. One outcome a checkpoint; kKeptAsSpan for the last one where the span is kept instead. `match`:
  // what the text began with; may be null. For models opened with PrefixUse, else kBadSource.
  std::vector<CommitOutcome> Commit(const Match* match, const CommitParts& text);

  // Hands a text that was committed to the daemon of a named node, for an engine there to go on with (docs/router.md).
  // Of `text` tokens, conversation, media and salt count. Waits for at most `wait` (up to a minute) and a call's time.
  HandOffOutcome HandOff(const CommitParts& text, const std::string& node, std::chrono::milliseconds wait);

  // Cold prompts in parallel (docs/router.md). PlanPrefill has segments that a look-up missed computed by engines that
  // offer prefill, as far as that is faster: those it calls kPending must not be reserved here meanwhile, and kOwn are
  // for this engine to reserve and compute. Without a daemon all are kOwn. `warm`: this engine computes none; kOwn are
  // then nobody's. At most 64 plans of a session are open.
  PrefillPlan PlanPrefill(std::span<const ObjectRun> runs, bool warm = false);
  // Waits, for at most a minute, until a segment has become kOwn that was not, or none is kPending any more. Returns
  // whether any is pending still. Where the daemon has gone, what was pending is kOwn.
  bool AwaitPrefill(PrefillPlan& plan, std::chrono::milliseconds wait);
  // After the look-up that finds what has come; it need not stay for this engine's sake any more.
  void EndPrefill(const PrefillPlan& plan);
  // Offers to prefill for others: reports results and waits, for at most a minute, for the next assignment; none may
  // come. While this engine computes one it is busy; it is offered again to whom asks for workers as long as it comes
  // back within a second. One call at a time: a second one ends the first, which returns none. UNAVAILABLE: no daemon.
  absl::StatusOr<std::optional<PrefillWork>> ServePrefill(std::span<const PrefillResult> results,
                                                          std::chrono::milliseconds wait);

  // In-place sharing, on pages declared with `allocate` (shared_pages.h). Admits a request with the pages that
  // its segments share with other requests and `own_pages` of its own, or returns its shortage at once.
  Admitted Admit(const Prompt& prompt, uint32_t own_pages);
  // Returns the request behind a lease that another process of this tenant passed on, for a prompt with these segments.
  Admitted AttachAdmission(const std::string& lease, uint32_t page_tokens, std::span<const uint64_t> segment_lengths);

  // Starts the landing of all that one request needs, and does not wait. Each landing has its own progress and verdict.
  // `group_pages`: as in PublishParts.
  Landing Land(const Match& match, std::span<const int32_t> page_table, std::span<const LandSegment> segments,
               std::span<const uint32_t> group_pages = {});
  // Lookup and Land in one call, for a prompt that is served now: every hit lands at its position in the prompt
  // (`page_table` is the prompt's, from position 0). Waits for the match, not for the landing. Whatever the match says,
  // the prompt's slots are the engine's only once the landing is quiet(): if the match did not come in time, the daemon
  // may be landing objects that the engine never learns of.
  MatchAndLanding LookupAndLand(const Prompt& prompt, std::span<const int32_t> page_table,
                                std::span<const uint32_t> group_pages = {});

  // The composition service, for engines that bring no kernels: the daemon does what kernels::AdvanceSeam and
  // kernels::Compose do in the engine's process, with the same bits where both use the same units of the processor.
  // Both wait, within the client's timeout, and vouch for the tuples used: what no landing verified, they verify. Where
  // the region lies on a GPU, the GPU does it, by kernels that round as the back end `cuda` does. One call takes there
  // at most 8 MiB of pointers (heads × (32 bytes a segment and 8 a checkpoint)), and, of states and checkpoints in f16,
  // 64 million numbers; more is kInvalidRequest.
  //
  // Advances one layer. `match` may be null where no step is a segment.
  Composition Advance(const Match* match, const LayerAdvance& advance);
  // Composes segments' interiors, ascending, onto the running states of all linear layers, `states` in the layout's
  // order, all in `region`. Only for layouts without seams (head = tail = 0), else kInvalidRequest.
  Composition Compose(const Match& match, std::span<const LandSegment> segments, const Region& region,
                      std::span<const RunningState> states);

 private:
  friend class Client;
  // All that was found, where it stands.
  MatchAndLanding LandAll(Match match, std::span<const int32_t> page_table, std::span<const uint32_t> group_pages);
  // The model's handles on the current connection.
  absl::StatusOr<internal::ModelBinding> Bind() const {
    if (absl::Status status = reconnector_->CheckProcess(); !status.ok()) return status;
    return opened_->binding();
  }

  // A request's pages under a lease that is held from here on, but not granted yet; none while an earlier release of it
  // is still on its way.
  std::optional<Admission> NewAdmission(const internal::ModelBinding& binding,
                                        std::span<const uint64_t> segment_lengths, const std::string& lease,
                                        internal::Deadline deadline) const;

  // Looks up and lands in one call. Empty if that takes two calls: the daemon is too old, the prompt is too long, or
  // the pages cannot be landed in now.
  std::optional<MatchAndLanding> TryLookupAndLand(const Prompt& prompt, std::span<const int32_t> page_table,
                                                  std::span<const uint32_t> group_pages);

  // Says in `object` what the daemon is told of one finished object. Its outcome where the daemon need not be asked.
  std::optional<PublishOutcome> Describe(const Publication& publication, const internal::ModelBinding& binding,
                                         v1::PublishObject& object) const;

  // Asks the composition service and waits for its answer. `match`: under whose lease `segments` of the request lie;
  // null where there are none. `fill` completes the request; false: it makes no sense.
  template <typename Request, typename Fill>
  Composition AskToCompose(const Match* match, size_t segments, const std::shared_ptr<internal::RegionMemory>& region,
                           Fill fill) const;

  std::shared_ptr<internal::Reconnector> reconnector_;
  std::shared_ptr<internal::OpenedModel> opened_;
};

}  // namespace ashlar
