// SPDX-License-Identifier: Apache-2.0
// PeerPolicy: which nodes are peers of this one, and which tenants each of them shares with it.
//
// A tenant's name is the same on all nodes, because it enters the namespace of its keys. Both ends consult their own
// policy: who asks, before it asks, and who is asked.
#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>

#include "storage/ids.h"

namespace ashlar::v1 {
class Config;
}

namespace ashlar::daemon {

// Immutable, and so thread-safe.
class PeerPolicy {
 public:
  // `config` as ParseConfig accepted it, with a cluster.
  explicit PeerPolicy(const v1::Config& config);

  // Returns whether a node of this name may be a peer. This node itself is none.
  bool Member(const std::string& node) const;
  // Returns this node's tenant of the name, if it has one and shares it with the node.
  std::optional<storage::TenantId> Tenant(const std::string& node, const std::string& name) const;

 private:
  using Shared = std::set<std::string>;  // names; empty: all
  // Null: the node is no peer.
  const Shared* Find(const std::string& node) const;

  std::string self_;
  std::map<std::string, storage::TenantId> tenants_;
  std::map<std::string, Shared> peers_;
};

}  // namespace ashlar::daemon
