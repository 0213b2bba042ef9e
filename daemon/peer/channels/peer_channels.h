// SPDX-License-Identifier: Apache-2.0
// PeerChannels: keeps a connection to each member of the cluster that the directory lists.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "daemon/peer/channels/peer_asker.h"
#include "daemon/peer/channels/prefill_asker.h"
#include "daemon/peer/control/peer_client.h"
#include "daemon/security/peer_policy.h"
#include "daemon/security/refusals.h"
#include "daemon/security/tls.h"
#include "kernels/mutex.h"

namespace ashlar::daemon {

class PeerChannels final : public PeerAsker, public PrefillAsker {
 public:
  static constexpr size_t kMostPeers = 512;  // further members are not connected

  // All arguments must outlive the object; `tls` may be null. `gone` is called with nodes whose connection has ended,
  // on any thread.
  PeerChannels(PeerHello self, storage::Nanos timeout, const Tls* tls, const PeerPolicy& policy, Refusals& refusals,
               std::function<void(const Member&)> gone)
      : self_(std::move(self)),
        timeout_(timeout),
        tls_(tls),
        policy_(policy),
        refusals_(refusals),
        gone_(std::move(gone)) {}

  // Connects to new members, and closes connections to members that have left. Blocks until both are done. One call at
  // a time.
  void Update(const std::vector<std::shared_ptr<const Member>>& members);
  size_t connected() const;
  bool Connected(const Member& member) const;

  bool Shares(const Member& member, const std::string& tenant) const override {
    return policy_.Tenant(member.node, tenant).has_value();
  }
  void Open(const Member& member, const std::string& tenant, PeerOpen open,
            PeerCalls::Done<std::vector<PeerOpened>> done) override;
  void Renew(const Member& member, PeerRenew renew, PeerCalls::Done<std::vector<uint32_t>> done) override;
  void Offer(const Member& member, const std::string& tenant, PeerOffer offer,
             PeerCalls::Done<std::vector<TakeOutcome>> done) override;
  void Close(const Member& member, std::vector<PeerLease> leases, std::function<void(absl::Status)> done) override;
  void Workers(const Member& member, const std::string& tenant, const NamespaceId& ns,
               PeerCalls::Done<std::vector<PeerWorker>> done) override;
  void Prefill(const Member& member, const std::string& tenant, PeerPrefill prefill,
               PeerCalls::Done<PeerOpened> done) override;
  void Probe(const Member& member, const std::string& tenant, const PeerProbe& probe,
             PeerCalls::Done<v1::NodeProbe> done) override;

 private:
  std::shared_ptr<PeerClient> Find(const Member& member) const;  // null without a connection

  const PeerHello self_;
  const storage::Nanos timeout_;
  const Tls* const tls_;
  const PeerPolicy& policy_;
  Refusals& refusals_;
  const std::function<void(const Member&)> gone_;
  mutable Mutex mutex_;
  std::map<uint64_t, std::shared_ptr<PeerClient>> clients_ ABSL_GUARDED_BY(mutex_);  // key is the incarnation
};

}  // namespace ashlar::daemon
