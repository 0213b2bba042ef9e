// SPDX-License-Identifier: Apache-2.0
// DrainTransfer: during a drain, transfers what is in memory only to other nodes, while the disk writes its part.
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

// Disk and nodes take objects from one queue, most valuable first, so the faster one takes more. An object is offered
// to one node after another until one takes it. Objects of one group (a text's blocks and checkpoints) go to the same
// node as long as it takes them. What no node takes returns to the disk. The metadata thread only.
class DrainTransfer {
 public:
  struct Options {
    uint64_t bytes_of_a_node = uint64_t{32} << 20;  // unanswered offers per node
    uint64_t bytes_of_an_offer = uint64_t{8} << 20;
    uint32_t patience_ms = 10'000;           // per offer
    storage::Nanos pause = 50'000'000;       // before a busy node is asked again
    storage::Nanos row_again = 500'000'000;  // before queue and members are read again
    storage::Nanos home = 1'000'000'000;  // how long to wait for a group's node that takes no more or does not answer
    uint32_t refusals = 8;  // after this many refused calls in a row a node is not asked again in this drain
  };

  // All must outlive the object.
  DrainTransfer(const storage::Clock& clock, const Directory& directory, Offerer& offerer, storage::Cache& cache,
                const Options& options)
      : clock_(clock), directory_(directory), offerer_(offerer), cache_(cache), options_(options) {}

  // The cache has begun to drain, or has ended draining. A second start begins again.
  void Start();
  void End();
  // Call it many times per second.
  void Tick();
  // Returns whether objects wait for other nodes, or may have to.
  bool busy() const { return running_ && (under_way_ > 0 || !again_.empty() || !row_ended_); }

 private:
  struct Transferred {
    storage::Offering offering;
    uint32_t failures = 0;     // failed fetches
    std::set<uint64_t> asked;  // incarnations of nodes that did not take it
  };
  struct Node {
    uint64_t bytes = 0;  // bytes of unanswered offers
    storage::Nanos not_before = 0;
    storage::Nanos answered_at = 0;  // last reply, or first offer after an idle time
    uint32_t refusals = 0;
    std::set<storage::TenantId> not_shared;  // tenants whose objects the node refused
    bool out = false;
  };
  // Returns whether the node may still take the object, now or later.
  bool MayTake(const Member& member, const Transferred& object);
  std::optional<Transferred> Next();
  void LookAround();
  std::shared_ptr<const Member> NodeFor(const Transferred& object);
  // Returns the node that got other objects of the group; null without one, or if it does not take this object.
  std::shared_ptr<const Member> HomeOf(const Transferred& object);
  bool IsFull(const Member& member, const Transferred& object);
  void Offer(const std::shared_ptr<const Member>& to, std::vector<Transferred> some);
  void Answered(uint64_t round, const std::shared_ptr<const Member>& from, std::vector<Transferred> some,
                const absl::StatusOr<std::vector<TakeOutcome>>& reply);

  const storage::Clock& clock_;
  const Directory& directory_;
  Offerer& offerer_;
  storage::Cache& cache_;
  const Options options_;
  bool running_ = false, row_ended_ = false;
  uint64_t round_ = 0;  // replies of an earlier drain are ignored
  uint64_t under_way_ = 0;
  storage::Nanos row_ended_at_ = 0, looked_at_ = 0;
  std::deque<Transferred> again_;                       // objects to offer to another node
  std::map<uint64_t, Node> nodes_;                      // key: incarnation
  std::map<uint64_t, uint64_t> homes_;                  // key: group; value: incarnation
  std::vector<std::shared_ptr<const Member>> members_;  // other members
};

}  // namespace ashlar::daemon
