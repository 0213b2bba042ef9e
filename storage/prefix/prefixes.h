// SPDX-License-Identifier: Apache-2.0
// Prefixes: exact prefixes as objects. It carries out for bytes what storage/prefix/prefix_planner.h decides for each
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

// The properties of an opened model that prefixes need. Immutable: sessions and threads share it.
struct PrefixModel {
  NamespaceId ns;
  TensorShard shard;
  std::shared_ptr<const Layout> layout;  // of the shard
  uint32_t block_tokens = 0;
  uint32_t capture_tokens = 1;  // its engine checkpoints inside a prompt at multiples of it
  uint64_t span_tokens = 0;     // its engine captures, and rebuilds from, spans of at most so many; 0: none
  DType span_dtype = DType::kF32;
  bool paged = false;        // some layer has keys and values, so there are blocks
  uint64_t block_bytes = 0;  // of a block of the shard; 0: there are none
  PrefixCosts costs;         // of all shards; bytes as they are allocated
};
struct SpanUse {
  uint64_t tokens = 0;
  DType dtype = DType::kF32;
};
// `declared`: as CostOf has it. Errors are PlanPrefixCheckpoint's and PlanPrefixSpan's.
absl::StatusOr<std::shared_ptr<const PrefixModel>> MakePrefixModel(const NamespaceId& ns, const TensorShard& shard,
                                                                   std::shared_ptr<const Layout> shared_layout,
                                                                   uint32_t capture_tokens, const ComputeCost& declared,
                                                                   const SpanUse& spans = {});

// A prompt, or a text that was computed, with its keys. Made off the metadata thread: it hashes every token.
class PrefixText {
 public:
  PrefixText(std::shared_ptr<const PrefixModel> model, std::vector<int32_t> tokens,
             const ConversationId& conversation = {}, std::vector<MediaHash> media = {}, const Salt& salt = {});
  PrefixText(PrefixText&&) = default;  // spans into the tokens stay right

  const PrefixModel& model() const { return *model_; }
  // For the planner, not for keys: a token at which media begin shows some of their hash, and the first kSaltedTokens
  // show the salt, so that texts with other media or another salt part there. Where two texts look alike nevertheless,
  // their keys differ.
  std::span<const int32_t> tokens() const { return planned_.empty() ? tokens_ : planned_; }
  // Tokens of the longest span. None with media: what a span shares with a prompt is told by tokens alone.
  uint64_t span_tokens() const { return media_.empty() ? model_->span_tokens : 0; }
  // Where the first span may begin. A span is found by the tokens before it: they must show all of the salt.
  uint64_t first_span() const { return salted_ ? kSaltedTokens : 1; }
  // With a salt, the conversation's name under that salt.
  const ConversationId& conversation() const { return conversation_; }
  bool salted() const { return salted_; }
  const PrefixKeys& shared() const { return shared_; }
  const std::optional<PrefixKeys>& own() const { return own_; }  // with a conversation

  Nanos needed_at = 0;           // as Query::needed_at
  double tokens_per_second = 0;  // that the engine computes; 0: not known

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

// A text that an engine has computed, with the states that it offers.
struct PrefixCommit {
  struct Checkpoint {
    uint64_t depth = 0;                          // they ascend; the last one is the text's end
    std::vector<PublishSource::Tensor> tensors;  // states and convolution tails, in the order of layers and forms
  };
  // The inputs of the text's last tokens.
  struct Span {
    uint64_t begin = 0;  // behind 0, before the end; at most the model's span_tokens of it
    std::vector<PublishSource::Tensor> tensors;
  };
  PrefixText text;
  uint64_t prompt_tokens = 0;  // of the text; decoded ones follow
  // Composed: some of it was set from segments, or resumed from what was. Only its conversation resumes from it.
  Provenance provenance = Provenance::kExact;
  LeaseId lease{};  // of the match that it began with; all zero: none
  std::vector<Checkpoint> checkpoints;
  std::optional<Span> span;
  std::vector<PagedRows> rows;                             // one for every attention layer
  std::shared_ptr<const std::vector<int32_t>> page_table;  // of the text
  Nanos deadline = 0;                                      // as PublishSource::deadline
  std::shared_ptr<const void> keep;
};

// The prefixes of all namespaces. One thread.
//
// A checkpoint and the blocks before it are objects like any other: in the levels, on the disk, leased and landed. A
// namespace's PrefixPlanner decides which of its exact prefixes are kept, within a capacity; a prefix that it gives up
// ends when nobody uses it any more. An object that is lost otherwise (segments needed its space, a copy was corrupt,
// an operator evicted it) is noticed at the next look-up that would have used it. Composed states are kept under their
// conversation's own keys in the private pool, the latest two of each, and are evicted as other objects are.
//
// If an engine offers a span up to a text's end, behind a kept checkpoint, and the span takes less than the states
// there, the span is kept in their place. Prompts that share any of its tokens resume behind the last shared one, from
// the checkpoint and the span. The namespace pays for its bytes as for a checkpoint's; without the checkpoint it is
// lost.
//
// Of tensor-parallel ranks, rank 0 looks up and decides. Objects that other ranks commit are kept until the deciding
// rank, or lack of space, ends them: look-ups do not find a bundle that is not whole.
class Prefixes {
 public:
  using IsOpen = std::function<bool(SessionId)>;
  // `capacity`: the default bytes of a tenant.
  Prefixes(ObjectTable& table, Publisher& publisher, SessionTransfers& transfers, const Clock& clock,
           Observer& observer, IsOpen is_open, std::function<uint64_t(TenantId)> capacity);

  // For namespaces that are first seen from now on.
  void SetCapacity(TenantId tenant, uint64_t bytes) { capacities_[tenant] = bytes; }
  // An object that a restart found on the disk: prompts that it is a prefix of will find it.
  void Adopt(TenantId tenant, const ObjectHeader& header);
  // The same of one that another node has. Nobody says when it has gone, so its depth is counted once.
  void AdoptRemote(TenantId tenant, const ObjectHeader& header);
  // Erases the prompts and conversations of a tenant, or of one of its namespaces. Their objects stay the caller's
  // concern.
  void Erase(TenantId tenant, const NamespaceId* ns);

  // A depth at which a prompt may resume: every object that it needs is there. At least the prompt's last token is left
  // to compute.
  struct Candidate {
    uint64_t depth = 0;
    bool own = false;  // the conversation's, else the namespace's
    // If it resumes by a span: the span's begin and key; 0: there is a checkpoint at `depth`.
    uint64_t span_begin = 0;
    Key span;
    uint64_t checkpoint() const { return span_begin > 0 ? span_begin : depth; }
  };
  struct Asked {
    std::vector<Candidate> candidates;    // by depth, rising; one a depth
    std::vector<uint64_t> checkpoint_at;  // that are worth capturing, rising
  };
  // A request comes: once a request, the cache learns from it.
  Asked Ask(TenantId tenant, const PrefixText& text);
  // Returns the objects that a candidate needs: its blocks, in order, then the checkpoint, then the span if it has one.
  static std::vector<Query> Objects(const PrefixText& text, const Candidate& candidate);

  // Says for the objects of the chosen candidate which of them are not to be written to the disk for being found.
  void DeferWrites(TenantId tenant, const PrefixText& text, std::span<const Candidate> candidates,
                   const Candidate& chosen, std::span<Query> objects) const;

  // Returns the objects from which a text can be gone on with at its very end, in the order of Objects: its
  // conversation's, else the namespace's. Empty: not all of them are here. Teaches the cache nothing.
  std::vector<Query> AtEnd(TenantId tenant, const PrefixText& text) const;

  // The parts of a text's prefixes that are here, wherever the blocks before them are.
  struct Parts {
    std::vector<uint64_t> checkpoints;  // depths, rising
    std::vector<Candidate> spans;
  };
  // `own`: of its conversation. Checkpoints up to `end`; spans behind these, and behind checkpoints at the depths
  // `elsewhere`. Teaches the cache nothing.
  Parts Here(TenantId tenant, const PrefixText& text, bool own, uint64_t end,
             std::span<const uint64_t> elsewhere) const;

  // Decides what to keep of it and copies that in; one outcome a checkpoint, when nothing of the engine's memory is
  // read any more. `done` may be called before this returns.
  using CommitDone = std::function<void(std::vector<CommitOutcome>)>;
  void Commit(SessionId session, TenantId tenant, PrefixCommit commit, CommitDone done);

  struct Stats {
    uint64_t namespaces = 0;
    uint64_t checkpoints = 0, bytes = 0;  // that are to be kept, of exact prefixes
    uint64_t spans = 0;                   // likewise; in these bytes
    uint64_t span_saved_bytes = 0;        // that states in their place would take more
    uint64_t history_bytes = 0;           // that knowing of prompts takes
  };
  Stats stats(TenantId tenant) const;

 private:
  static constexpr size_t kNamespaces = 16;          // of a tenant; then the one that was asked longest ago is erased
  static constexpr size_t kConversations = 1 << 16;  // of a tenant, likewise
  static constexpr size_t kProbes = 64;              // depths of recovered checkpoints that a look-up tries, and spans
  static constexpr size_t kListed = 64;              // depths inside a span that a look-up lists, the deepest
  static constexpr size_t kCommits = 16;             // under way, of one session
  static constexpr Nanos kRanks = 60'000'000'000;    // how long the other ranks have to commit what one of them has

  // Checkpoints that no tree knows of: how many there are of a depth, and of a first stored token, which tells those of
  // chains from others.
  using Depths = std::map<std::pair<uint64_t, uint64_t>, uint64_t>;

  struct Space {
    TenantId tenant = 0;
    std::unique_ptr<PrefixPlanner> planner;
    uint64_t asked = 0;  // when last
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
    Key key;             // of the checkpoint, or of the span
    // For a span: the checkpoint before it, and its tokens, for prompts that share only some of them.
    uint64_t span_begin = 0;
    Key base;
    std::vector<int32_t> tokens;
    uint64_t checkpoint() const { return span_begin > 0 ? span_begin : depth; }
    const Key& checkpoint_key() const { return span_begin > 0 ? base : key; }
  };
  struct Conversation {
    Mark last, before;  // one resumes from the state before when the last turn is asked again
    Mark saved;         // the one before these that the disk has, where writes are deferred
  };
  using Conversations = BoundedTable<ConversationName, Conversation>;
  enum class There : uint8_t { kGone, kComing, kWhole };
  class CommitJob;  // commit_job.h

  Space& Of(TenantId tenant, const PrefixModel& model);
  Conversations& Of(TenantId tenant);
  There Find(TenantId tenant, const Key& key, const TensorShard& shard) const;
  // Leading blocks that are there; all, where there are none.
  size_t WholeBlocks(TenantId tenant, const PrefixModel& model, const PrefixKeys& keys) const;
  // Returns whether all objects that a depth needs are there. `whole` counts the leading whole blocks; pass it on from
  // one depth to the next, rising.
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
  static void Erase(Depths& depths, const Depths::key_type& place);  // one of those there
  // The depths behind the span's begin, up to `depth`, but for those that are known.
  static void AddSpan(Asked& asked, uint64_t begin, uint64_t depth, bool own, const Key& key);
  void AddSpans(Space& space, const PrefixText& text, std::span<const PrefixPlanner::Match::Span> spans, Asked& asked);
  void AddOwn(TenantId tenant, const PrefixText& text, Asked& asked);
  void GiveUp(TenantId tenant, PrefixNode& node);
  // The states of a commit that are to be kept, and whether its span is.
  struct Keep {
    std::vector<bool> states;
    bool span = false;
    std::vector<uint64_t> known;  // depths, rising, at which states of the text are known
    bool any() const { return span || std::ranges::count(states, true) > 0; }
  };
  Keep Decide(Space& space, const PrefixCommit& commit);
  Keep KeepOwn(TenantId tenant, const PrefixCommit& commit);
  static std::optional<PrefixPlanner::SpanOffer> Offered(const PrefixCommit& commit);
  // Notes under which keys the prefixes of a text are stored that are to be kept.
  static void Name(const Space& space, const PrefixText& text, uint64_t depth);
  static void Name(const PrefixText& text, PrefixNode& node);
  // Remembers the state at `depth`, or with `span_begin` the span from there. False: it was known.
  bool Remember(TenantId tenant, const PrefixText& text, uint64_t depth, uint64_t span_begin = 0);
  // The disk has the mark's checkpoint, or is being given it.
  bool IsSaved(TenantId tenant, const PrefixModel& model, const Mark& mark) const;
  // Returns whether a checkpoint or span is not worth writing to the disk yet: it takes more bytes than the keys and
  // values of the tokens since the last checkpoint that is there. So a conversation writes less than twice the bytes of
  // its keys, and after a crash it never computes more tokens again than a checkpoint's bytes are worth. `depths`: of
  // the text's other checkpoints, rising.
  bool Defers(TenantId tenant, const PrefixText& text, const ObjectHeader& header, bool own,
              std::span<const uint64_t> depths) const;
  static Mark MarkOf(const PrefixText& text, uint64_t depth, uint64_t span_begin);
  // Ends a checkpoint that was written and is not kept any more, and the blocks behind `needed` tokens, which nothing
  // else needs.
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
  std::map<NamespaceId, Depths> recovered_spans_;  // likewise, by their ends and where they begin
  std::map<NamespaceId, TenantId> recovered_of_;   // whose these are
  absl::flat_hash_map<Key, size_t> writing_;       // checkpoints that are being copied in, or their blocks
  std::map<SessionId, size_t> commits_;            // under way
  uint64_t asked_ = 0;
};

}  // namespace ashlar::storage
