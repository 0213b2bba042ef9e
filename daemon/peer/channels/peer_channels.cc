// SPDX-License-Identifier: Apache-2.0
#include "daemon/peer/channels/peer_channels.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "ashlar/v1/prompt.pb.h"

namespace ashlar::daemon {
namespace {

// A lookup waits for much less. A peer that replies so late is faulty, unless it is distant.
constexpr storage::Nanos kCallTimeout = 1'000'000'000, kLongestCall = 5'000'000'000;

absl::Status NotConnected(const Member& member) {
  return absl::UnavailableError(absl::StrCat("node ", member.node, ": not connected; see ashlarctl peers"));
}

}  // namespace

void PeerChannels::Update(const std::vector<std::shared_ptr<const Member>>& members) {
  std::map<uint64_t, std::shared_ptr<PeerClient>> ended;  // destroyed after the lock, because it waits for callbacks
  {
    MutexLock lock(mutex_);
    ended = std::exchange(clients_, {});
    for (const std::shared_ptr<const Member>& member : members) {
      if (member->node == self_.node || !policy_.Member(member->node)) continue;
      if (clients_.size() >= kMostPeers) break;
      if (auto known = ended.extract(member->incarnation)) {
        clients_.insert(std::move(known));
        continue;
      }
      PeerClient::Options options{.node = member->node,
                                  .address = member->control_address,
                                  .self = self_,
                                  .timeout = timeout_,
                                  .call_timeout = kCallTimeout,
                                  .longest_call = kLongestCall,
                                  .gone = [this, member] { gone_(*member); }};
      clients_[member->incarnation] = std::make_shared<PeerClient>(std::move(options), tls_, refusals_);
    }
  }
}

size_t PeerChannels::connected() const {
  MutexLock lock(mutex_);
  size_t count = 0;
  for (const auto& [incarnation, client] : clients_) count += client->connected();
  return count;
}

bool PeerChannels::Connected(const Member& member) const {
  const std::shared_ptr<PeerClient> client = Find(member);
  return client != nullptr && client->connected();
}

std::shared_ptr<PeerClient> PeerChannels::Find(const Member& member) const {
  MutexLock lock(mutex_);
  const auto found = clients_.find(member.incarnation);
  return found == clients_.end() ? nullptr : found->second;
}

void PeerChannels::Open(const Member& member, const std::string& tenant, PeerOpen open,
                        PeerCalls::Done<std::vector<PeerOpened>> done) {
  const std::shared_ptr<PeerClient> client = Find(member);
  if (client == nullptr) return done(NotConnected(member));
  if (!Shares(member, tenant)) {
    return done(absl::PermissionDeniedError("the tenant is not shared with this peer"));
  }
  client->Open(tenant, std::move(open), std::move(done));
}

void PeerChannels::Offer(const Member& member, const std::string& tenant, PeerOffer offer,
                         PeerCalls::Done<std::vector<TakeOutcome>> done) {
  const std::shared_ptr<PeerClient> client = Find(member);
  if (client == nullptr) return done(NotConnected(member));
  if (!Shares(member, tenant)) {
    return done(absl::PermissionDeniedError("the tenant is not shared with this peer"));
  }
  client->Offer(tenant, std::move(offer), std::move(done));
}

void PeerChannels::Renew(const Member& member, PeerRenew renew, PeerCalls::Done<std::vector<uint32_t>> done) {
  const std::shared_ptr<PeerClient> client = Find(member);
  if (client == nullptr) return done(NotConnected(member));
  client->Renew(std::move(renew), std::move(done));
}

// If the node has gone, the leases have ended with the connection.
void PeerChannels::Close(const Member& member, std::vector<PeerLease> leases, std::function<void(absl::Status)> done) {
  const std::shared_ptr<PeerClient> client = Find(member);
  if (client == nullptr) return done(NotConnected(member));
  client->Close(leases, std::move(done));
}

void PeerChannels::Workers(const Member& member, const std::string& tenant, const NamespaceId& ns,
                           PeerCalls::Done<std::vector<PeerWorker>> done) {
  const std::shared_ptr<PeerClient> client = Find(member);
  if (client == nullptr) return done(NotConnected(member));
  if (!Shares(member, tenant)) {
    return done(absl::PermissionDeniedError("the tenant is not shared with this peer"));
  }
  client->Workers(tenant, ns, std::move(done));
}

void PeerChannels::Prefill(const Member& member, const std::string& tenant, PeerPrefill prefill,
                           PeerCalls::Done<PeerOpened> done) {
  const std::shared_ptr<PeerClient> client = Find(member);
  if (client == nullptr) return done(NotConnected(member));
  if (!Shares(member, tenant)) {
    return done(absl::PermissionDeniedError("the tenant is not shared with this peer"));
  }
  client->Prefill(tenant, std::move(prefill), std::move(done));
}

void PeerChannels::Probe(const Member& member, const std::string& tenant, const PeerProbe& probe,
                         PeerCalls::Done<v1::NodeProbe> done) {
  const std::shared_ptr<PeerClient> client = Find(member);
  if (client == nullptr) return done(NotConnected(member));
  if (!Shares(member, tenant)) {
    return done(absl::PermissionDeniedError("the tenant is not shared with this peer"));
  }
  client->Probe(tenant, probe, std::move(done));
}

}  // namespace ashlar::daemon
