// SPDX-License-Identifier: Apache-2.0
// DrainHandOver: in a drain, gives other nodes what this one's memory alone has, while the disk takes its part.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "daemon/peer/directory/directory.h"
#include "daemon/peer/offers/offerer.h"
#include "storage/cache.h"

namespace ashlar::daemon {

// Disk and nodes take from one row, the hottest first, so the faster one takes more. Each object is offered to one node
// after another until one has it. Objects of one group (a text's blocks and checkpoints) go to one node as long as it
// takes them. What none takes is the disk's again. The metadata thread only.
class DrainHandOver {
 public:
  struct Options {
    uint64_t bytes_of_a_node = uint64_t{32} << 20;  // offered to it at a time, and not yet answered
    uint64_t bytes_of_an_offer = uint64_t{8} << 20;
    uint32_t patience_ms = 10'000;           // of one offer
    storage::Nanos pause = 50'000'000;       // before a node that is busy is asked again
    storage::Nanos row_again = 500'000'000;  // before row and members are looked at again
    storage::Nanos home = 1'000'000'000;     // a group's node that takes no more, and does not answer, is waited for
    uint32_t refusals = 8;  // calls in a row of which a node takes nothing: it is not asked any more in this drain
  };

  // All must outlive it.
  DrainHandOver(const storage::Clock& clock, const Directory& directory, Offerer& offerer, storage::Cache& cache,
                const Options& options)
      : clock_(clock), directory_(directory), offerer_(offerer), cache_(cache), options_(options) {}

  // The cache has begun to drain, or has ended that. Again: begins anew.
  void Start();
  void End();
  // Call it many times a second.
  void Tick();
  // Objects wait for other nodes, or may have to.
  bool busy() const { return running_ && (under_way_ > 0 || !again_.empty() || !row_ended_); }

 private:
  struct Handed {
    storage::Offering offering;
    uint32_t failures = 0;     // of fetches
    std::set<uint64_t> asked;  // incarnations of nodes that have not taken it
  };
  struct Node {
    uint64_t bytes = 0;  // offered, and not yet answered
    storage::Nanos not_before = 0;
    storage::Nanos answered_at = 0;  // or offered something when nothing was under way
    uint32_t refusals = 0;
    std::set<storage::TenantId> not_shared;  // it has refused objects of these tenants
    bool out = false;
  };
  // Returns whether the node may still take it, now or later.
  bool MayTake(const Member& member, const Handed& handed);
  std::optional<Handed> Next();
  void LookAround();
  std::shared_ptr<const Member> NodeFor(const Handed& handed);
  // The node that others of its group were offered to; null: there is none, or it does not take this one.
  std::shared_ptr<const Member> HomeOf(const Handed& handed);
  bool IsFull(const Member& member, const Handed& handed);
  void Offer(const std::shared_ptr<const Member>& to, std::vector<Handed> some);
  void Answered(uint64_t round, const std::shared_ptr<const Member>& from, std::vector<Handed> some,
                const absl::StatusOr<std::vector<TakeOutcome>>& reply);

  const storage::Clock& clock_;
  const Directory& directory_;
  Offerer& offerer_;
  storage::Cache& cache_;
  const Options options_;
  bool running_ = false, row_ended_ = false;
  uint64_t round_ = 0;  // answers of an earlier drain change nothing of this one
  uint64_t under_way_ = 0;
  storage::Nanos row_ended_at_ = 0, looked_at_ = 0;
  std::deque<Handed> again_;                            // to be offered to another node
  std::map<uint64_t, Node> nodes_;                      // by incarnation
  std::map<uint64_t, uint64_t> homes_;                  // of groups: incarnations
  std::vector<std::shared_ptr<const Member>> members_;  // others
};

}  // namespace ashlar::daemon
