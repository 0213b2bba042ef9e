// SPDX-License-Identifier: Apache-2.0
// RemotePrefill: gives the router access to engines on other nodes that offer prefill.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "daemon/peer/channels/peer_rates.h"
#include "daemon/peer/channels/prefill_asker.h"
#include "daemon/peer/directory/directory.h"
#include "daemon/peer/fetch/opener.h"
#include "daemon/peer/fetch/remote_objects.h"
#include "daemon/router/elsewhere.h"
#include "daemon/runtime/event_loop.h"
#include "storage/cache.h"

namespace ashlar::daemon {

// Used by the metadata thread only.
class RemotePrefill final : public PrefillElsewhere {
 public:
  // All must outlive the object. `names` are the tenant names by number.
  RemotePrefill(EventLoop& loop, const storage::Clock& clock, Directory& directory, PrefillAsker& asker, Opener& opener,
                RemoteObjects& objects, PeerRates& rates, std::vector<std::string> names, std::string self)
      : loop_(loop),
        clock_(clock),
        directory_(directory),
        asker_(asker),
        opener_(opener),
        objects_(objects),
        rates_(rates),
        names_(std::move(names)),
        self_(std::move(self)) {}
  void Start(storage::Cache& cache) { cache_ = &cache; }

  void Find(storage::TenantId tenant, const NamespaceId& ns,
            std::function<void(std::vector<RemoteWorker>)> done) override;
  void Prefill(const RemoteWorker& worker, const PrefillWork& work, storage::Nanos patience,
               std::function<void(absl::Status)> done) override;
  storage::Nanos Estimate(const RemoteWorker& worker, uint64_t bytes) const override;
  void Probe(storage::TenantId tenant, const NamespaceId& ns, std::shared_ptr<const v1::Prompt> prompt,
             std::function<void(std::vector<v1::NodeProbe>)> done) override;
  // Continues plans and probes that have waited long enough for other nodes. Call it many times per second.
  void Tick();

 private:
  // Answers of several nodes.
  template <typename Answer>
  struct Search {
    storage::Nanos deadline = 0;
    size_t open = 1;  // nodes without a reply, plus one until all are asked
    std::vector<Answer> found;
    std::function<void(std::vector<Answer>)> done;
  };
  template <typename Answer>
  using Searches = std::vector<std::shared_ptr<Search<Answer>>>;
  template <typename Answer>
  static void Settle(Searches<Answer>& searches, const std::shared_ptr<Search<Answer>>& search);
  template <typename Answer>
  void EndLate(Searches<Answer>& searches);
  // Key: incarnation of the member, namespace. Value: when the node may be asked again.
  using NotBefore = std::map<std::pair<uint64_t, NamespaceId>, storage::Nanos>;
  // Calls ask(member, place) for each node that shares the directory, except nodes that `none` excludes for now.
  template <typename Ask>
  void AskAll(const NotBefore& none, const NamespaceId& ns, Ask ask);
  void Remember(NotBefore& none, const NotBefore::key_type& place);
  absl::Status Adopt(const std::shared_ptr<const Member>& member, const PrefillWork& work, PeerOpened opened,
                     storage::Nanos asked_at);

  static constexpr storage::Nanos kPatience = 100'000'000;   // wait for replies about workers and prompts
  static constexpr storage::Nanos kNoneFor = 1'000'000'000;  // a node without workers is not asked again for this time
  static constexpr size_t kMostNodes = 256;                  // nodes asked per plan or probe
  static constexpr size_t kMostNone = 65536;

  EventLoop& loop_;
  const storage::Clock& clock_;
  Directory& directory_;
  PrefillAsker& asker_;
  Opener& opener_;
  RemoteObjects& objects_;
  PeerRates& rates_;
  const std::vector<std::string> names_;
  const std::string self_;
  storage::Cache* cache_ = nullptr;
  Searches<RemoteWorker> searches_;
  Searches<v1::NodeProbe> probes_;
  NotBefore none_, no_model_;  // nodes without workers, and without an engine of the model
};

}  // namespace ashlar::daemon
