// SPDX-License-Identifier: Apache-2.0
// RemoteLookup: finds what a prompt may use on other nodes, before this node's cache looks it up.
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

// One prompt's questions. What they point at must live until the answer.
struct RemoteQuestion {
  std::span<const storage::Query> segments;
  const storage::PrefixText* text = nullptr;  // null: none
};

class RemoteLookup {
 public:
  struct Options {
    storage::Nanos deadline = 100'000'000;  // after which a look-up goes on with what it has
    size_t most_waiting = 4096;             // objects that are being asked for; more are not
  };
  struct Stats {
    uint64_t asked = 0;    // objects that other nodes were asked for
    uint64_t opened = 0;   // that a node leased to this one
    uint64_t missed = 0;   // that it had not any more, or refused
    uint64_t failed = 0;   // no answer in time, or one that is none
    uint64_t late = 0;     // look-ups that went on without all answers
    uint64_t joined = 0;   // that another look-up was asking for already
    uint64_t adopted = 0;  // that this node's look-ups could find from then on
  };

  // All must outlive it. Nothing is asked for before Start.
  RemoteLookup(EventLoop& loop, const storage::Clock& clock, Directory& directory, Opener& opener, PeerRates& rates,
               const Options& options)
      : loop_(loop), clock_(clock), directory_(directory), opener_(opener), rates_(rates), options_(options) {}
  void Start(storage::Cache& cache, RemoteObjects& objects) {
    cache_ = &cache;
    objects_ = &objects;
  }

  // What other nodes have for a call's lookups.
  class Found {
   public:
    // Tells the cache which of these queries only unreachable nodes could serve.
    void Mark(std::span<storage::Query> queries) const;

   private:
    friend class RemoteLookup;
    std::set<Key> unreachable_;  // other nodes have these objects, and none of them answered in time
  };

  // Calls `then` once: at once and on this thread, with null, if no other node is known to have anything that these
  // prompts may use, else on the metadata thread when all answers, or the deadline, have come. Keep what it is given
  // until the lookups have ended: then what they did not take is given back. Any thread.
  using Adopted = std::shared_ptr<const Found>;
  void Find(storage::TenantId tenant, std::span<const RemoteQuestion> prompts, std::function<void(Adopted)> then);

  // Lets those go on whose deadline is over. Call it many times a second. The metadata thread only, as the next one.
  void Tick();
  const Stats& stats() const { return stats_; }

 private:
  // An object that another node has, with all shards of its bundle.
  struct Want {
    size_t index = 0;  // of the query that it answers, among those asked for together
    ObjectKind kind = ObjectKind::kSegment;
    NamespaceId ns;
    Key key;
    storage::PoolKind pool = storage::PoolKind::kPublic;
    uint32_t shards = 1;
    uint64_t bytes = 0;  // of all of them
    uint64_t group = 0;  // storage::Offering::group
    std::vector<std::shared_ptr<const Member>> holders;
    bool unreachable = false;  // a holder was left out, or did not answer
  };
  // What other nodes have of one prompt's prefixes; what is here is looked up on the metadata thread. The text lives
  // until the answer.
  struct Prefix {
    struct End {
      uint64_t depth = 0;
      size_t blocks = 0;  // that it needs, from the first one on
      Want checkpoint;
      std::optional<Want> span;
    };
    const storage::PrefixText* text = nullptr;
    bool own = false;          // of its conversation
    std::vector<Want> blocks;  // by index
    size_t leading = 0;        // of these, from the text's beginning on
    std::vector<End> ends;     // the deepest first
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
  // Adds the checkpoints and spans that are here, up to `end`, and spans of other nodes behind these.
  void AddHere(storage::TenantId tenant, const Prefix& prefix, uint64_t end, std::vector<Prefix::End>& ends) const;
  void Choose(storage::TenantId tenant, Prefix prefix, std::vector<Want>& wants) const;
  void Begin(const std::shared_ptr<Call>& call, Wants located);
  void Ask(storage::TenantId tenant, std::vector<Want> wants);
  // Asks the next holders for what did not come, as long as a look-up waits for it: also one that has joined later.
  void Answered(storage::TenantId tenant, const std::vector<Want>& wants, Opener::Opened opened);
  bool AnyoneWaits(storage::TenantId tenant, const Key& key) const;
  bool Adopt(storage::TenantId tenant, const Want& want, std::span<absl::StatusOr<OpenedObject>> shards);
  // No further node is asked for it. `unreachable`: because none answered.
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
  std::map<Place, uint32_t> using_;  // calls whose look-ups may use what was adopted
  std::deque<std::pair<storage::Nanos, std::shared_ptr<Call>>> deadlines_;  // rising
  Stats stats_;
};

}  // namespace ashlar::daemon
