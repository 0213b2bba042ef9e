// SPDX-License-Identifier: Apache-2.0
// RemoteLookup: finds objects for a prompt on other nodes before this node's cache looks it up.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <tuple>
#include <vector>

#include "daemon/peer/channels/peer_rates.h"
#include "daemon/peer/directory/directory.h"
#include "daemon/peer/fetch/opener.h"
#include "daemon/peer/fetch/remote_objects.h"
#include "daemon/runtime/event_loop.h"
#include "storage/cache.h"

namespace ashlar::daemon {

// The queries of one prompt. The pointed-to data must live until the answer.
struct RemoteQuestion {
  std::span<const storage::Query> segments;
  const storage::PrefixText* text = nullptr;  // may be null
};

class RemoteLookup {
 public:
  struct Options {
    storage::Nanos deadline = 100'000'000;  // time after which a lookup continues with what it has
    size_t most_waiting = 4096;             // limit of requested objects in flight
  };
  struct Stats {
    uint64_t asked = 0;    // objects requested from other nodes
    uint64_t opened = 0;   // objects that a node leased to this one
    uint64_t missed = 0;   // objects that the node no longer had, or refused
    uint64_t failed = 0;   // no reply in time, or an invalid one
    uint64_t late = 0;     // lookups that continued without all replies
    uint64_t joined = 0;   // objects that another lookup had already requested
    uint64_t adopted = 0;  // objects that became available to lookups of this node
  };

  // All must outlive the object. No object is requested before Start.
  RemoteLookup(EventLoop& loop, const storage::Clock& clock, Directory& directory, Opener& opener, PeerRates& rates,
               const Options& options)
      : loop_(loop), clock_(clock), directory_(directory), opener_(opener), rates_(rates), options_(options) {}
  void Start(storage::Cache& cache, RemoteObjects& objects) {
    cache_ = &cache;
    objects_ = &objects;
  }

  // What other nodes have for the lookups of a call.
  class Found {
   public:
    // Marks the queries that only unreachable nodes could serve.
    void Mark(std::span<storage::Query> queries) const;

   private:
    friend class RemoteLookup;
    std::set<Key> unreachable_;  // objects of nodes that did not answer in time
  };

  // Calls `then` once: immediately on this thread, with null, if no other node is known to have anything for these
  // prompts; otherwise on the metadata thread, when all replies have come or the deadline has passed. Keep the argument
  // of `then` until the lookups have ended; afterwards unused objects are released. Any thread.
  using Adopted = std::shared_ptr<const Found>;
  void Find(storage::TenantId tenant, std::span<const RemoteQuestion> prompts, std::function<void(Adopted)> then);

  // Continues lookups whose deadline has passed. Call it many times per second. The metadata thread only, like Stop.
  void Tick();
  const Stats& stats() const { return stats_; }

 private:
  // An object on another node, with all shards of its bundle.
  struct Want {
    size_t index = 0;  // index of its query in the request
    ObjectKind kind = ObjectKind::kSegment;
    NamespaceId ns;
    Key key;
    storage::PoolKind pool = storage::PoolKind::kPublic;
    uint32_t shards = 1;
    uint64_t bytes = 0;  // bytes of all shards
    uint64_t group = 0;  // storage::Offering::group
    std::vector<std::shared_ptr<const Member>> holders;
    bool unreachable = false;  // a holder was skipped or did not answer
  };
  // What other nodes have of the prefixes of one prompt. Local objects are looked up on the metadata thread. The text
  // must live until the answer.
  struct Prefix {
    struct End {
      uint64_t depth = 0;
      size_t blocks = 0;  // needed blocks, from the first one
      Want checkpoint;
      std::optional<Want> span;
    };
    const storage::PrefixText* text = nullptr;
    bool own = false;          // private to its conversation
    std::vector<Want> blocks;  // indexed by block
    size_t leading = 0;        // consecutive blocks from the start of the text
    std::vector<End> ends;     // deepest first
    const PrefixKeys& keys() const { return own ? *text->own() : text->shared(); }
  };
  struct Wants {
    std::vector<Want> segments;
    std::vector<Prefix> prefixes;
  };
  class Call;
  using Place = std::pair<storage::TenantId, Key>;

  Wants Locate(std::span<const RemoteQuestion> prompts) const;
  void LocateSegments(std::span<const storage::Query> queries, storage::PoolKind pool, std::vector<Want>& wants) const;
  void LocatePrefix(const storage::PrefixText& text, bool own, std::vector<Prefix>& prefixes) const;
  std::vector<Prefix::End> LocateEnds(const Prefix& prefix) const;
  uint64_t LocateCheckpoints(const storage::PrefixText& text, bool own, uint64_t above, uint64_t end, size_t most,
                             std::vector<Prefix::End>& ends) const;
  void LocateSpans(const storage::PrefixText& text, bool own, std::vector<Prefix::End>& ends) const;
  // Adds local checkpoints and spans up to `end`, and spans of other nodes after them.
  void AddHere(storage::TenantId tenant, const Prefix& prefix, uint64_t end, std::vector<Prefix::End>& ends) const;
  void Choose(storage::TenantId tenant, Prefix prefix, std::vector<Want>& wants) const;
  void Begin(const std::shared_ptr<Call>& call, Wants located);
  void Ask(storage::TenantId tenant, std::vector<Want> wants);
  // Requests missing objects from the next holders, as long as a lookup waits for them, including later ones.
  void Answered(storage::TenantId tenant, const std::vector<Want>& wants, Opener::Opened opened);
  bool AnyoneWaits(storage::TenantId tenant, const Key& key) const;
  bool Adopt(storage::TenantId tenant, const Want& want, std::span<absl::StatusOr<OpenedObject>> shards);
  // No further node is asked for the object. `unreachable`: because none answered.
  void Settled(storage::TenantId tenant, const Key& key, bool unreachable);

  EventLoop& loop_;
  const storage::Clock& clock_;
  Directory& directory_;
  Opener& opener_;
  PeerRates& rates_;
  const Options options_;
  storage::Cache* cache_ = nullptr;
  RemoteObjects* objects_ = nullptr;
  std::map<Place, std::vector<std::shared_ptr<Call>>> asking_;
  std::map<Place, uint32_t> using_;  // number of calls whose lookups may use the adopted object
  std::deque<std::pair<storage::Nanos, std::shared_ptr<Call>>> deadlines_;  // ascending
  Stats stats_;
};

}  // namespace ashlar::daemon
