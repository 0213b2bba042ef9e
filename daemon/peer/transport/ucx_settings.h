// SPDX-License-Identifier: Apache-2.0
// The UCX_* settings of a transport: what the code sets, what the operator may change, and what came of it.
#pragma once

#include <ucp/api/ucp.h>

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "daemon/peer/transport/transport.h"

namespace ashlar::daemon {

// Sets the code's settings in `config`, `transports` as UCX_TLS among them, but for those that the configuration or the
// environment names; fills `in_force`. INVALID_ARGUMENT names a setting that UCX refuses, or that may not be changed.
absl::Status ApplyUcxSettings(const TransportOptions& options, const std::string& transports, ucp_config_t* config,
                              std::vector<UcxSetting>& in_force);

// The network interface that has this address; empty: none, or the address means all.
std::string InterfaceOf(const std::string& address);

}  // namespace ashlar::daemon
