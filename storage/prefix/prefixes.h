// SPDX-License-Identifier: Apache-2.0
// Prefixes: stores exact prefixes as objects, as PrefixPlanner (storage/prefix/prefix_planner.h) decides for each
// namespace.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "proto/key.h"
#include "proto/layout.h"
#include "proto/outcome.h"
#include "proto/prefix.h"
#include "proto/shard.h"
#include "storage/history/bounded_table.h"
#include "storage/history/explanation.h"
#include "storage/ids.h"
#include "storage/objects/object_table.h"
#include "storage/observer.h"
#include "storage/policy/compute_cost.h"
#include "storage/prefix/prefix_planner.h"
#include "storage/session_transfers.h"
#include "storage/transfer/publisher.h"
#include "storage/transfer/transfer.h"

namespace ashlar::storage {

// The properties of an opened model that prefixes need. Immutable and shared between sessions and threads.
struct PrefixModel {
  NamespaceId ns;
  TensorShard shard;
  std::shared_ptr<const Layout> layout;  // layout of the shard
  uint32_t block_tokens = 0;
  uint32_t capture_tokens = 1;  // the engine checkpoints inside a prompt at multiples of it
  uint64_t span_tokens = 0;     // longest span that the engine captures and rebuilds from; 0: none
  DType span_dtype = DType::kF32;
  bool paged = false;        // some layer has keys and values, so there are blocks
  uint64_t block_bytes = 0;  // bytes of a block of the shard; 0 without blocks
  PrefixCosts costs;         // of all shards, with allocated bytes
};
struct SpanUse {
  uint64_t tokens = 0;
  DType dtype = DType::kF32;
};
// `declared` as in CostOf. Errors are those of PlanPrefixCheckpoint and PlanPrefixSpan.
absl::StatusOr<std::shared_ptr<const PrefixModel>> MakePrefixModel(const NamespaceId& ns, const TensorShard& shard,
                                                                   std::shared_ptr<const Layout> shared_layout,
                                                                   uint32_t capture_tokens, const ComputeCost& declared,
                                                                   const SpanUse& spans = {});

// A prompt or computed text with its keys. Created outside the metadata thread, because it hashes every token.
class PrefixText {
 public:
  PrefixText(std::shared_ptr<const PrefixModel> model, std::vector<int32_t> tokens,
             const ConversationId& conversation = {}, std::vector<MediaHash> media = {}, const Salt& salt = {});
  PrefixText(PrefixText&&) = default;  // spans into the tokens stay valid

  const PrefixModel& model() const { return *model_; }
  // Tokens for the planner, not for keys: the token where media begin contains part of their hash, and the first
  // kSaltedTokens contain the salt, so that texts with other media or another salt diverge there. If two texts look
  // alike anyway, their keys differ.
  std::span<const int32_t> tokens() const { return planned_.empty() ? tokens_ : planned_; }
  // Longest span in tokens. 0 with media, because a span's overlap with a prompt is determined by tokens only.
  uint64_t span_tokens() const { return media_.empty() ? model_->span_tokens : 0; }
  // Where the first span may begin. A span is found by the tokens before it, which must contain the whole salt.
  uint64_t first_span() const { return salted_ ? kSaltedTokens : 1; }
  // With a salt, the conversation id under that salt.
  const ConversationId& conversation() const { return conversation_; }
  bool salted() const { return salted_; }
  const PrefixKeys& shared() const { return shared_; }
  const std::optional<PrefixKeys>& own() const { return own_; }  // only with a conversation

  Nanos needed_at = 0;           // as in Query::needed_at
  double tokens_per_second = 0;  // prefill rate of the engine; 0: unknown

 private:
  static constexpr size_t kSaltedTokens = sizeof(Salt) / sizeof(int32_t);

  void Show(const MediaHash& input);
  void Show(const Salt& salt);

  std::shared_ptr<const PrefixModel> model_;
  std::vector<int32_t> tokens_;
  std::vector<MediaHash> media_;
  std::vector<int32_t> planned_;  // empty without media and salt
  bool salted_;
  ConversationId conversation_;
  PrefixKeys shared_;
  std::optional<PrefixKeys> own_;
};

// A computed text with the states that the engine offers.
struct PrefixCommit {
  struct Checkpoint {
    uint64_t depth = 0;                          // ascending; the last one is the end of the text
    std::vector<PublishSource::Tensor> tensors;  // states and convolution tails, in the order of layers and forms
  };
  // The inputs of the recurrence for the last tokens of the text.
  struct Span {
    uint64_t begin = 0;  // greater than 0, less than the end, at most span_tokens of the model before it
    std::vector<PublishSource::Tensor> tensors;
  };
  PrefixText text;
  uint64_t prompt_tokens = 0;  // tokens of the prompt; decoded ones follow
  // Composed: part of it was assembled from segments, or resumed from such a text. Only its conversation may resume
  // from it.
  Provenance provenance = Provenance::kExact;
  LeaseId lease{};  // lease of the match it began with; all zero for none
  std::vector<Checkpoint> checkpoints;
  std::optional<Span> span;
  std::vector<PagedRows> rows;                             // one per attention layer
  std::shared_ptr<const std::vector<int32_t>> page_table;  // of the text
  Nanos deadline = 0;                                      // as in PublishSource::deadline
  std::shared_ptr<const void> keep;
};

// The prefixes of all namespaces. One thread only.
//
// Checkpoints and blocks are ordinary objects: in the tiers, on the disk, leased and landed. The PrefixPlanner of a
// namespace decides which exact prefixes are kept within a capacity; an evicted prefix ends when it is no longer in
// use. An object that is lost otherwise (evicted for segments, corrupt, evicted by an operator) is noticed by the next
// lookup that would have used it. Composed states are kept under their conversation's keys in the private pool, the
// latest two of each, and are evicted like other objects.
//
// If an engine offers a span that ends at the end of a text and follows a kept checkpoint, and the span takes fewer
// bytes than the states, the span is kept instead. Prompts that share some of its tokens resume after the last shared
// one, from the checkpoint and the span. The span is charged to the namespace like a checkpoint, and is lost with its
// checkpoint.
//
// Of tensor-parallel ranks, rank 0 looks up and decides. Objects that other ranks commit are kept until rank 0 or lack
// of space ends them: lookups do not find incomplete bundles.
class Prefixes {
 public:
  using IsOpen = std::function<bool(SessionId)>;
  // `capacity` is the default per tenant, in bytes.
  Prefixes(ObjectTable& table, Publisher& publisher, SessionTransfers& transfers, const Clock& clock,
           Observer& observer, IsOpen is_open, std::function<uint64_t(TenantId)> capacity);

  // Applies to namespaces seen later.
  void SetCapacity(TenantId tenant, uint64_t bytes) { capacities_[tenant] = bytes; }
  // Adds an object recovered from the disk, so that prompts with that prefix find it.
  void Adopt(TenantId tenant, const ObjectHeader& header);
  // The same for an object of another node. Its loss is not reported, so its depth is counted once.
  void AdoptRemote(TenantId tenant, const ObjectHeader& header);
  // Erases the prompts and conversations of a tenant, or of one of its namespaces. The caller erases their objects.
  void Erase(TenantId tenant, const NamespaceId* ns);

  // A depth at which a prompt may resume, with every needed object here. At least the last token of the prompt must be
  // computed.
  struct Candidate {
    uint64_t depth = 0;
    bool own = false;  // private to the conversation; otherwise shared in the namespace
    // If it resumes from a span: the span's begin and key. 0: there is a checkpoint at `depth`.
    uint64_t span_begin = 0;
    Key span;
    uint64_t checkpoint() const { return span_begin > 0 ? span_begin : depth; }
  };
  struct Asked {
    std::vector<Candidate> candidates;    // one per depth, ascending
    std::vector<uint64_t> checkpoint_at;  // depths worth capturing, ascending
  };
  // Handles a request. Call once per request, because the cache learns from it.
  Asked Ask(TenantId tenant, const PrefixText& text);
  // Returns the objects that a candidate needs: its blocks in order, then the checkpoint, then the span if any.
  static std::vector<Query> Objects(const PrefixText& text, const Candidate& candidate);

  // Marks which objects of the chosen candidate are not written to the disk because of this lookup.
  void DeferWrites(TenantId tenant, const PrefixText& text, std::span<const Candidate> candidates,
                   const Candidate& chosen, std::span<Query> objects) const;

  // Returns the objects from which a text can be continued at its very end, in the order of Objects: those of its
  // conversation, or else of its namespace. Empty if not all are here. Has no side effect.
  std::vector<Query> AtEnd(TenantId tenant, const PrefixText& text) const;

  // The parts of a text's prefixes that are here, regardless of the blocks before them.
  struct Parts {
    std::vector<uint64_t> checkpoints;  // depths, ascending
    std::vector<Candidate> spans;
  };
  // `own`: of its conversation. Returns checkpoints up to `end`, and spans after these and after checkpoints at the
  // depths `elsewhere`. Has no side effect.
  Parts Here(TenantId tenant, const PrefixText& text, bool own, uint64_t end,
             std::span<const uint64_t> elsewhere) const;

  // Decides what to keep of the commit, and copies that. One outcome per checkpoint, when the engine's memory is no
  // longer read. `done` may be called before this returns.
  using CommitDone = std::function<void(std::vector<CommitOutcome>)>;
  void Commit(SessionId session, TenantId tenant, PrefixCommit commit, CommitDone done);

  struct Stats {
    uint64_t namespaces = 0;
    uint64_t checkpoints = 0, bytes = 0;  // kept for exact prefixes
    uint64_t spans = 0;                   // kept spans; included in `bytes`
    uint64_t span_saved_bytes = 0;        // bytes that states would take more
    uint64_t history_bytes = 0;           // memory of the knowledge of prompts
  };
  Stats stats(TenantId tenant) const;

 private:
  static constexpr size_t kNamespaces = 16;  // per tenant; beyond that, the least recently requested one is dropped
  static constexpr size_t kConversations = 1 << 16;  // per tenant, likewise
  static constexpr size_t kProbes = 64;            // depths of recovered checkpoints, and of spans, that a lookup tries
  static constexpr size_t kListed = 64;            // deepest depths inside a span that a lookup lists
  static constexpr size_t kCommits = 16;           // in flight per session
  static constexpr Nanos kRanks = 60'000'000'000;  // time for other ranks to commit what one of them has

  // Checkpoints that no tree knows: their number by depth and first stored token, which distinguishes those of chains
  // from others.
  using Depths = std::map<std::pair<uint64_t, uint64_t>, uint64_t>;

  struct Space {
    TenantId tenant = 0;
    std::unique_ptr<PrefixPlanner> planner;
    uint64_t asked = 0;  // last request
  };
  struct ConversationName {
    NamespaceId ns;
    ConversationId id{};
    bool operator==(const ConversationName&) const = default;
    template <typename H>
    friend H AbslHashValue(H state, const ConversationName& name) {
      return H::combine(std::move(state), name.ns, name.id);
    }
  };
  struct Mark {
    uint64_t depth = 0;  // 0: none
    Key key;             // of the checkpoint or the span
    // For a span: the checkpoint before it and its tokens, for prompts that share only some of them.
    uint64_t span_begin = 0;
    Key base;
    std::vector<int32_t> tokens;
    uint64_t checkpoint() const { return span_begin > 0 ? span_begin : depth; }
    const Key& checkpoint_key() const { return span_begin > 0 ? base : key; }
  };
  struct Conversation {
    Mark last, before;  // the earlier one is used when the last turn is repeated
    Mark saved;         // the latest earlier one on the disk, if writes are deferred
  };
  using Conversations = BoundedTable<ConversationName, Conversation>;
  enum class There : uint8_t { kGone, kComing, kWhole };
  class CommitJob;  // commit_job.h

  Space& Of(TenantId tenant, const PrefixModel& model);
  Conversations& Of(TenantId tenant);
  There Find(TenantId tenant, const Key& key, const TensorShard& shard) const;
  // Number of leading blocks that are here; all if the model has no blocks.
  size_t WholeBlocks(TenantId tenant, const PrefixModel& model, const PrefixKeys& keys) const;
  // Returns whether all objects that a depth needs are here. `whole` counts the leading blocks; pass it from one depth
  // to the next, ascending.
  There Find(TenantId tenant, const PrefixModel& model, const PrefixKeys& keys, uint64_t depth, size_t& whole) const;
  There FindSpan(TenantId tenant, const PrefixModel& model, const Key& key) const;
  void Probe(Space& space, const PrefixText& text);
  void Recover(Space& space, const PrefixText& text, std::span<const uint64_t> there, Depths& depths);
  void ProbeSpans(Space& space, const PrefixText& text);
  static std::vector<uint64_t> Checkpoints(const Space& space, const PrefixText& text);
  std::vector<uint64_t> OwnCheckpoints(TenantId tenant, const PrefixText& text);
  static std::vector<Depths::key_type> Tried(const Depths& spans, std::span<const uint64_t> begins,
                                             const PrefixText& text);
  void RecoverSpans(Space& space, const PrefixText& text, Depths& spans);
  void Erase(std::map<NamespaceId, Space>::iterator space);
  static void Erase(Depths& depths, const Depths::key_type& place);  // the place must exist
  // Adds the depths after the span's begin, up to `depth`, except known ones.
  static void AddSpan(Asked& asked, uint64_t begin, uint64_t depth, bool own, const Key& key);
  void AddSpans(Space& space, const PrefixText& text, std::span<const PrefixPlanner::Match::Span> spans, Asked& asked);
  void AddOwn(TenantId tenant, const PrefixText& text, Asked& asked);
  void GiveUp(TenantId tenant, PrefixNode& node);
  // The states of a commit to keep, and whether to keep its span.
  struct Keep {
    std::vector<bool> states;
    bool span = false;
    std::vector<uint64_t> known;  // depths with known states of the text, ascending
    bool any() const { return span || std::ranges::count(states, true) > 0; }
  };
  Keep Decide(Space& space, const PrefixCommit& commit);
  Keep KeepOwn(TenantId tenant, const PrefixCommit& commit);
  static std::optional<PrefixPlanner::SpanOffer> Offered(const PrefixCommit& commit);
  // Records the keys under which the kept prefixes of a text are stored.
  static void Name(const Space& space, const PrefixText& text, uint64_t depth);
  static void Name(const PrefixText& text, PrefixNode& node);
  // Remembers the state at `depth`, or with `span_begin` the span from there. Returns false if it was known.
  bool Remember(TenantId tenant, const PrefixText& text, uint64_t depth, uint64_t span_begin = 0);
  // The mark's checkpoint is on the disk, or being written.
  bool IsSaved(TenantId tenant, const PrefixModel& model, const Mark& mark) const;
  // Returns whether a checkpoint or span is not worth writing to the disk yet: it takes more bytes than the keys and
  // values of the tokens since the previous available checkpoint. So a conversation writes less than twice the bytes of
  // its keys, and after a crash recomputes no more tokens than a checkpoint's bytes are worth. `depths` are those of
  // the text's other checkpoints, ascending.
  bool Defers(TenantId tenant, const PrefixText& text, const ObjectHeader& header, bool own,
              std::span<const uint64_t> depths) const;
  static Mark MarkOf(const PrefixText& text, uint64_t depth, uint64_t span_begin);
  // Ends a written checkpoint that is no longer kept, and the blocks after `needed` tokens, which have no other user.
  void GiveUp(TenantId tenant, const PrefixText& text, uint64_t needed, uint64_t depth);

  ObjectTable& table_;
  Publisher& publisher_;
  SessionTransfers& transfers_;
  const Clock& clock_;
  Observer& observer_;
  const IsOpen is_open_;
  const std::function<uint64_t(TenantId)> capacity_;
  std::map<TenantId, uint64_t> capacities_;
  std::map<NamespaceId, Space> spaces_;
  std::map<TenantId, std::unique_ptr<Conversations>> conversations_;
  std::map<NamespaceId, Depths> recovered_;
  std::map<NamespaceId, Depths> recovered_spans_;  // by end and begin
  std::map<NamespaceId, TenantId> recovered_of_;   // their tenants
  absl::flat_hash_map<Key, size_t> writing_;       // checkpoints or their blocks that are being copied
  std::map<SessionId, size_t> commits_;            // in flight
  uint64_t asked_ = 0;
};

}  // namespace ashlar::storage
