// SPDX-License-Identifier: Apache-2.0
#include "daemon/security/peer_policy.h"

#include "ashlar/v1/config.pb.h"

namespace ashlar::daemon {

namespace {
constexpr char kAllOthers[] = "*";
}  // namespace

PeerPolicy::PeerPolicy(const v1::Config& config) : self_(config.cluster().node()) {
  for (int i = 0; i < config.tenants_size(); ++i) {
    tenants_.emplace(config.tenants(i).name(), static_cast<storage::TenantId>(i));
  }
  for (const v1::ClusterPeer& peer : config.cluster().peers()) {
    peers_.emplace(peer.node(), Shared(peer.tenants().begin(), peer.tenants().end()));
  }
  if (peers_.empty()) peers_.emplace(kAllOthers, Shared());
}

const PeerPolicy::Shared* PeerPolicy::Find(const std::string& node) const {
  if (node == self_) return nullptr;
  auto found = peers_.find(node);
  if (found == peers_.end()) found = peers_.find(kAllOthers);
  return found == peers_.end() ? nullptr : &found->second;
}

bool PeerPolicy::Member(const std::string& node) const {
  return Find(node) != nullptr;
}

std::optional<storage::TenantId> PeerPolicy::Tenant(const std::string& node, const std::string& name) const {
  const Shared* shared = Find(node);
  const auto tenant = tenants_.find(name);
  if (shared == nullptr || tenant == tenants_.end()) return std::nullopt;
  if (!shared->empty() && !shared->contains(name)) return std::nullopt;
  return tenant->second;
}

}  // namespace ashlar::daemon
