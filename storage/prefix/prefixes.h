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

#include "proto/key.h"
#include "proto/outcome.h"
#include "storage/executor.h"
#include "storage/history/explanation.h"
#include "storage/ids.h"
#include "storage/objects/object_table.h"
#include "storage/observer.h"
#include "storage/prefix/conversations.h"
#include "storage/prefix/prefix_planner.h"
#include "storage/prefix/prefix_text.h"
#include "storage/prefix/stored_prefixes.h"
#include "storage/session_transfers.h"
#include "storage/transfer/publisher.h"
#include "storage/transfer/transfer.h"

namespace ashlar::storage {

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
  std::shared_ptr<const std::vector<int32_t>> page_table;  // page table of the text
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
  // `capacity` is the default per tenant, in bytes. `background` plans the checkpoints of new prompts.
  Prefixes(ObjectTable& table, Publisher& publisher, SessionTransfers& transfers, Executor& background,
           const Clock& clock, Observer& observer, IsOpen is_open, std::function<uint64_t(TenantId)> capacity);

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
  struct Answer {
    std::vector<Candidate> candidates;    // one per depth, ascending
    std::vector<uint64_t> checkpoint_at;  // depths worth capturing, ascending
  };
  // Handles a request. Call once per request, because the cache learns from it.
  Answer Ask(TenantId tenant, const PrefixText& text);
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

  // Checkpoints that no tree knows: their number by depth and first stored token, which distinguishes those of chains
  // from others.
  using Depths = std::map<std::pair<uint64_t, uint64_t>, uint64_t>;

  struct Space {
    TenantId tenant = 0;
    std::unique_ptr<PrefixPlanner> planner;
    uint64_t asked = 0;  // last request
  };
  using There = StoredPrefixes::There;
  class CommitJob;  // commit_job.h

  Space& Of(TenantId tenant, const PrefixModel& model);
  void Probe(Space& space, const PrefixText& text);
  void Recover(Space& space, const PrefixText& text, std::span<const uint64_t> there, Depths& depths);
  void ProbeSpans(Space& space, const PrefixText& text);
  static std::vector<uint64_t> Checkpoints(const Space& space, const PrefixText& text);
  void RecoverSpans(Space& space, const PrefixText& text, Depths& spans);
  void Erase(std::map<NamespaceId, Space>::iterator space);
  void NoteMissed(TenantId tenant, const PrefixText& text, const PrefixKeys& keys, uint64_t depth);
  void AddSpans(Space& space, const PrefixText& text, std::span<const PrefixPlanner::Match::Span> spans, Answer& asked);
  void AddOwn(TenantId tenant, const PrefixText& text, Answer& asked);
  void EvictState(TenantId tenant, PrefixNode& node);
  // The states of a commit to keep, and whether to keep its span.
  struct Keep {
    std::vector<bool> states;
    bool span = false;
    std::vector<uint64_t> known;  // depths with known states of the text, ascending
    uint32_t turns = 0;           // earlier requests that the text continues
    bool any() const { return span || std::ranges::count(states, true) > 0; }
  };
  Keep Decide(Space& space, const PrefixCommit& commit);
  Keep KeepOwn(TenantId tenant, const PrefixCommit& commit);
  // Records the keys under which the kept prefixes of a text are stored.
  static void Name(const Space& space, const PrefixText& text, uint64_t depth);
  static void Name(const PrefixText& text, PrefixNode& node);
  // Returns whether a checkpoint or span is not worth writing to the disk yet: it takes more bytes than the keys and
  // values of the tokens since the previous available checkpoint. So a conversation writes less than twice the bytes of
  // its keys, and after a crash recomputes no more tokens than a checkpoint's bytes are worth. `depths` are those of
  // the text's other checkpoints, ascending.
  bool Defers(TenantId tenant, const PrefixText& text, const ObjectHeader& header, bool own,
              std::span<const uint64_t> depths) const;
  // Ends a written checkpoint that is no longer kept, and the blocks after `needed` tokens, which have no other user.
  void EvictCheckpoint(TenantId tenant, const PrefixText& text, uint64_t needed, uint64_t depth);

  ObjectTable& table_;
  Publisher& publisher_;
  SessionTransfers& transfers_;
  Executor& background_;
  Observer& observer_;
  const IsOpen is_open_;
  const std::function<uint64_t(TenantId)> capacity_;
  StoredPrefixes stored_;
  Conversations conversations_;
  std::map<TenantId, uint64_t> capacities_;
  std::map<NamespaceId, Space> spaces_;
  std::map<NamespaceId, Depths> recovered_;
  std::map<NamespaceId, Depths> recovered_spans_;  // sorted by end and begin
  std::map<NamespaceId, TenantId> recovered_of_;   // their tenants
  std::map<SessionId, size_t> commits_;            // number of commits in flight
  uint64_t asked_ = 0;
};

}  // namespace ashlar::storage
