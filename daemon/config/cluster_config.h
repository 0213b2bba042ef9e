// SPDX-License-Identifier: Apache-2.0
// The part of the configuration that is about other nodes.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace ashlar::v1 {
class Cluster;
class Config;
}  // namespace ashlar::v1

namespace ashlar::daemon {

// Puts the documented default in place of every zero or missing field.
void FillClusterDefaults(v1::Cluster* cluster);

// INVALID_ARGUMENT names the field.
absl::Status CheckCluster(const v1::Cluster& cluster);

// Checks what the cluster's part says of peers, and of tenants that the rest names. INVALID_ARGUMENT names the field.
absl::Status CheckPeers(const v1::Config& config);

// Of a tenant, a node or a cluster: letters, digits, '.', '_' and '-', at most 64.
absl::Status CheckName(absl::string_view field, const std::string& name);

}  // namespace ashlar::daemon
