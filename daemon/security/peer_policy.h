// SPDX-License-Identifier: Apache-2.0
// PeerPolicy: which nodes are peers of this one, and which tenants each peer shares.
//
// A tenant has the same name on all nodes, because the name is part of the namespace. Both ends check their own policy:
// the caller before a call, and the callee.
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

// Immutable and thread-safe.
class PeerPolicy {
 public:
  // `config` must come from ParseConfig and have a cluster.
  explicit PeerPolicy(const v1::Config& config);

  // Returns whether a node of this name may be a peer. This node itself is not one.
  bool Member(const std::string& node) const;
  // Returns this node's tenant with the name if it exists and is shared with the node.
  std::optional<storage::TenantId> Tenant(const std::string& node, const std::string& name) const;

 private:
  using Shared = std::set<std::string>;  // names; empty: all tenants
  // Null if the node is not a peer.
  const Shared* Find(const std::string& node) const;

  std::string self_;
  std::map<std::string, storage::TenantId> tenants_;
  std::map<std::string, Shared> peers_;
};

}  // namespace ashlar::daemon
