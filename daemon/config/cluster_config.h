// SPDX-License-Identifier: Apache-2.0
// Defaults and checks of the configuration field `cluster`.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace ashlar::v1 {
class Cluster;
class Config;
}  // namespace ashlar::v1

namespace ashlar::daemon {

// Sets the documented default in every zero or missing field.
void FillClusterDefaults(v1::Cluster* cluster);

// INVALID_ARGUMENT names the field.
absl::Status CheckCluster(const v1::Cluster& cluster);

// Checks cluster.peers against the tenants of the configuration. INVALID_ARGUMENT names the field.
absl::Status CheckPeers(const v1::Config& config);

// Checks the name of a tenant, node or cluster: letters, digits, '.', '_' and '-', at most 64.
absl::Status CheckName(absl::string_view field, const std::string& name);

}  // namespace ashlar::daemon
