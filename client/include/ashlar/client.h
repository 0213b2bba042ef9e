// SPDX-License-Identifier: Apache-2.0
// The client library. One Client is one session with the daemon of this node; all methods are thread-safe.
//
// Errors. A cache failure is a miss: matching, landing, composing and publishing never fail a request, they return each
// segment's outcome. Only connecting, opening a model and registering memory return errors. Every call has a deadline
// (ClientOptions::timeout) and returns by then.
//
// Prefixes. A prompt that begins as an earlier one did resumes from the earlier one's checkpoint (PrefixUse). The
// engine lands the match's prefix, goes on from its states, computes the rest, and captures the states at
// Match::checkpoint_positions() and at the end of all tokens that ran through the model; then it commits these states.
// A text is exact if it began with an exact prefix or with nothing, and landed no interior; every text of the namespace
// may resume from it. Any other text is composed, and serves only the conversation that it is committed with. If an
// exact prompt landed interiors, its tokens before the first interior, the head of that interior's segment among them,
// are still exact; the engine may commit them as a text of their own, without the match.
//
// Life. The client notices the daemon's end at once. Calls then answer kDaemonUnavailable without waiting, and the
// client reconnects in the background: it opens models, registers regions and declares pages again. A region for which
// the daemon has no room waits; landings into it and publications out of it are kBusy, and the rest is served. A Match
// from before a reconnect can be used without a fault: tuples stay mapped, and its landings are misses (kLeaseLost).
// But its lease ended with the session, and a daemon that lives may have given the memory to other objects: values read
// from tuples count only if Match::valid() says so after reading. Objects may be destroyed in any order: destroying the
// Client ends all calls, but the session with the daemon, and the leases in it, stay until the last Match and Landing
// is gone.
//
// Fork. A client belongs to the process that connected it. In a child its copy refuses every call with
// FAILED_PRECONDITION (misses: kDaemonUnavailable; landings never get quiet), and destroying it there releases nothing.
// The child does not keep the session alive: the session ends with the parent. A child cannot connect anew, because
// gRPC does not survive fork: it must exec first, or be forked before the parent's first Connect.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ashlar/match.h"
#include "ashlar/prefill.h"
#include "ashlar/region.h"
#include "ashlar/span.h"
#include "kernels/gpu.h"
#include "kernels/kernels.h"
#include "proto/key.h"
#include "proto/layout.h"
#include "proto/object.h"
#include "proto/outcome.h"
#include "proto/prefix.h"

namespace ashlar {

struct Admitted;  // ashlar/shared_pages.h

struct ClientOptions {
  std::string rpc_socket;                   // the daemon's listen.rpc_socket
  std::string session_socket;               // the daemon's listen.session_socket
  std::chrono::milliseconds timeout{5000};  // of every call; at most an hour
  std::string name = "libashlar";           // for the daemon's logs
  // The engine's GPU (kernels::FindGpu): that regions are registered on, where the daemon serves several; and it maps
  // arenas of an hbm tier that lies there.
  const kernels::Gpu* gpu = nullptr;
};

// This process's part of the model, and its computing cost; not part of the namespace. Heads are divided as
// proto/shard.h says; layers keep their numbers. A segment is a hit when every rank has published its part of it. So
// that ranks agree, one of them looks up, and the others attach to its lease.
struct Shard {
  uint32_t first_layer = 0;  // 0: pipeline stages are refused
  uint32_t layer_count = 0;  // 0: all
  uint32_t tensor_parallel_rank = 0;
  uint32_t tensor_parallel_size = 1;
};
struct CostModel {
  // Of the whole model, for eviction. If flops_per_token is 0, the daemon estimates both from the layout.
  double flops_per_token = 0;
  double flops_per_token_squared = 0;
  double tokens_per_second = 0;  // of prefill, for the break-even check; 0: every hit is taken
};

// The engine's use of exact prefixes.
struct PrefixUse {
  // The engine can checkpoint inside a prompt at multiples of capture_tokens, and always at a text's end. 0: it does
  // not use prefixes.
  uint32_t capture_tokens = 0;
  // The engine captures spans of at most this many last tokens (ashlar/span.h), and rebuilds states from spans. 0:
  // neither. The checkpoint before a span may then be at any depth. Opening the model is refused if a layer's rows do
  // not fit in an extent.
  uint32_t span_tokens = 0;
  DType span_dtype = DType::kF32;  // of the keys and values that it captures: kF32, kF16 or kBF16
};

// One segment to land: its index in the match, and the position of its token 0.
struct LandSegment {
  // The match's prefix, at position 0. Land takes it whole, with one verdict. Advance and Compose take its cached
  // states, which are those before its span if it has one.
  static constexpr uint32_t kPrefix = UINT32_MAX;
  uint32_t segment = 0;
  uint64_t first_position = 0;
  // For Land: the segment's keys and values stand in pages already (another request has filled them,
  // ashlar/shared_pages.h), or are not wanted. Only its tuples are promoted and verified, and no slot is written. If
  // this is set for all segments, no pages need be declared.
  bool tuples_only = false;
  // For Land: by how much the position that turns the segment's keys exceeds first_position. Rotary positions of
  // several axes count an image's tokens otherwise than slots do; a segment that stands elsewhere has moved by one
  // number on all of them, and turns by that. A daemon that speaks protocol 2 cannot: such segments miss
  // (kInvalidRequest).
  int64_t rotary_shift = 0;
  // For Land of the match's prefix: its first blocks whose keys and values stand in the pages already. They are neither
  // verified nor written.
  uint32_t present_blocks = 0;
};

// The match that Model::LookupAndLand found, and the landing of all of it.
struct MatchAndLanding {
  Match match;
  std::vector<LandSegment> segments;  // as Land would be given them: the prefix, then every segment that was hit
  Landing landing;
};

// The right, and the duty, to publish one object. An engine that cannot fill it calls Model::Abandon; one that is
// erased is reclaimed after the daemon's leases.reservation_seconds. Each Publish of the session renews its other
// reservations, up to ten times that.
struct Reservation {
  ReserveOutcome outcome = ReserveOutcome::kUnavailable;
  uint64_t id = 0;
  uint64_t generation = 0;  // of the connection that granted it: after a reconnect it is unknown
  bool granted() const { return outcome == ReserveOutcome::kGranted; }
};
struct ObjectRun {
  ObjectKind kind = ObjectKind::kSegment;  // kSegment, or kCheckpoint for a prompt's first segment
  std::span<const int32_t> tokens;
  std::span<const MediaHash> media;  // offsets count from the run's start
  Salt salt = {};                    // of the prompt
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
    const std::byte* units = nullptr;  // one behind the other; null for zero
  };
  std::vector<Linear> linear;           // every linear layer
  std::vector<Run> runs;                // of some layers: every head of these in exactly one
  Region region;                        // that the pointers above lie in
  std::span<const int32_t> page_table;  // of the run's keys and values in the declared pages
  uint64_t first_position = 0;          // slot position of the run's token 0
  Provenance provenance = Provenance::kExact;
  std::span<const uint32_t> group_pages = {};  // of pages in groups (PagedCache::groups): the entries of each's table
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
  uint64_t prompt_tokens = 0;       // of these
  Provenance provenance = Provenance::kExact;
  std::vector<CapturedState> checkpoints;      // depths ascend; the last one is the text's end
  CapturedSpan span;                           // with PrefixUse::span_tokens; may be empty
  Region region;                               // that the states lie in, and the span
  std::span<const int32_t> page_table;         // of the text from position 0, in the declared pages
  ConversationId conversation{};               // needed where it is composed
  std::span<const MediaHash> media;            // of the text; its span is not kept if there are any
  std::span<const uint32_t> group_pages = {};  // as in PublishParts
  Salt salt = {};                              // of the prompt
};

// The running states of one linear layer's value heads, one behind the other: [d_k, d_v] or [d_v, d_k] each, in the
// layout's order.
struct RunningState {
  std::byte* data = nullptr;
  DType dtype = DType::kF32;     // kF32, kF16 or kBF16
  int32_t* exponents = nullptr;  // [value_heads], of kF16 alone: a state is its numbers × 2^exponent
};

// One step of a prompt's chain in one layer, as kernels::SeamStep: composes a segment's cached interior, or runs tokens
// [begin, end) of the inputs through the recurrence.
struct AdvanceStep {
  std::optional<LandSegment> segment;  // none: a run. A prefix comes first, and replaces the state
  int64_t begin = 0, end = 0;
  RunningState checkpoint = {};  // out: a copy of the state behind this step; null data: not wanted
};

// One layer of a prompt's chain, in order: HYPIC §4.3 and equations 2, 4, 6, as kernels::AdvanceSeamArgs. All pointers
// lie in `region`. At most limits::kMaxStepsPerComposition steps and limits::kMaxTokensPerComposition tokens; a longer
// chain is cut, and continues from the state of the call before.
struct LayerAdvance {
  uint32_t layer = 0;  // index into layout.layers
  std::span<const AdvanceStep> steps;
  Region region;
  RunningState state;           // in and out
  kernels::TokenInputs inputs;  // strides in floats
  float* out = nullptr;         // [tokens][value_heads, d_v] of tokens in runs; may be null
  int64_t out_stride = 0;       // in floats
};

// The outcome of an Advance or a Compose. While quiet() is false, all memory named in the call belongs to the daemon.
class Composition {
 public:
  Composition(Composition&&) noexcept;
  Composition& operator=(Composition&&) noexcept;
  ~Composition();  // waits until the memory is quiet, however long the daemon takes

  // kNone: done. Otherwise no state was changed, unless it is kCancelled, kTimedOut or kDaemonUnavailable: then states
  // and outputs may hold anything. Compute without the cache, or without what segments() says is lost.
  MissReason reason() const;
  // One reason a segment of the request, in order; kNone: no miss.
  const std::vector<MissReason>& segments() const;

  // True once nothing reads or writes the memory any more: the daemon answered, confirmed that it has ceased, or is
  // dead.
  bool quiet() const;
  bool WaitQuiet(std::chrono::milliseconds timeout);

 private:
  friend class Model;
  struct Impl;
  explicit Composition(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// An opened identity and layout. Copies share it; it is closed when the last one is gone, and what is under way keeps
// what it needs. A session has at most 64 open ones (RESOURCE_EXHAUSTED). Lookup, Reserve and Publish take as many
// items as there are and make as few calls of them as proto/limits.h allows, all within one timeout.
class Model {
 public:
  const Layout& layout() const;  // of this process's shard
  NamespaceId ns() const;

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

  // In-place sharing, on pages declared with `allocate` (ashlar/shared_pages.h). Admits a request with the pages that
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
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

class Client {
 public:
  // Connects, or says why not (UNAVAILABLE: no daemon; FAILED_PRECONDITION: no protocol version in common, or forked
  // after an earlier Connect; PERMISSION_DENIED: this user belongs to no tenant; RESOURCE_EXHAUSTED: the daemon, or the
  // tenant, has as many sessions as it may).
  static absl::StatusOr<std::unique_ptr<Client>> Connect(const ClientOptions& options);
  ~Client();
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  bool connected() const;
  const std::string& tenant() const;

  absl::StatusOr<Model> OpenModel(const Identity& identity, const Layout& layout, const Shard& shard = {},
                                  const CostModel& cost = {}, const PrefixUse& prefixes = {});

  // Registers a memfd of the engine's (sealed with F_SEAL_SHRINK, else INVALID_ARGUMENT). The descriptor stays the
  // caller's; the client maps it too. Touch the memory before, or call fallocate: pages that are not there the daemon
  // takes out of what it has to spare, and refuses where that is not enough (RESOURCE_EXHAUSTED).
  absl::StatusOr<Region> RegisterRegion(int memfd, size_t bytes);
  // Memory that the daemon allocates for this engine. It outlives the session and the daemon, and is emptied when the
  // last copy of the Region is destroyed: processes that were forked meanwhile then read zeros there.
  absl::StatusOr<Region> HostRegion(size_t bytes);

  // Registers memory of a GPU that the daemon serves: `gpu`, for a process whose library has no back end for it; else
  // ClientOptions::gpu, or the daemon's only one. FAILED_PRECONDITION if it serves none, or not that one. All regions
  // of a client that lie on a GPU lie on the same one: a process that works on two has two clients. If an hbm tier lies
  // there, all of its regions must, and the two calls above are refused. Keys and values land in such a region,
  // published objects may lie in it, and the composition service works there, on the GPU.
  //
  // `descriptor`: an allocation of CUDA's virtual memory management (cuMemCreate) of exactly `bytes` bytes, exported as
  // a POSIX file descriptor. The engine has mapped it at `data`, and keeps owning that mapping; the client neither maps
  // nor touches it.
  absl::StatusOr<Region> RegisterGpuRegion(int descriptor, std::byte* data, size_t bytes,
                                           const kernels::GpuId& gpu = {});
  // Allocates memory on a GPU that the daemon serves, all zero, and maps it here by `gpu`, which says which; its number
  // may differ between the processes. The memory stays the engine's as long as any process has it mapped.
  absl::StatusOr<Region> HostGpuRegion(const kernels::Gpu& gpu, size_t bytes);

 private:
  Client();
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

// Splits text at a separator (HYPIC §5, PIC_SEPARATOR): the pieces between separators, empty ones dropped. Tokenise
// each by itself, so that a segment's tokens do not depend on its neighbours.
inline constexpr const char* kDefaultSeparator = "<|pic|>";
std::vector<std::string_view> SplitBySeparator(std::string_view text, std::string_view separator = kDefaultSeparator);
// Splits tokens likewise: returns the lengths of the runs between separator tokens, and removes the separators.
std::vector<uint64_t> SplitBySeparator(std::vector<int32_t>& tokens, int32_t separator);

}  // namespace ashlar
