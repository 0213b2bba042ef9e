// SPDX-License-Identifier: Apache-2.0
// The UCX_* settings of a transport: the defaults of the code, the operator's settings, and the result.
#pragma once

#include <ucp/api/ucp.h>

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "daemon/peer/transport/transport.h"

namespace ashlar::daemon {

// Sets the code's settings in `config`, including UCX_TLS = `transports`, except those that the configuration or the
// environment sets. Fills `in_force`. INVALID_ARGUMENT names a setting that UCX refuses, or that must not be changed.
absl::Status ApplyUcxSettings(const TransportOptions& options, const std::string& transports, ucp_config_t* config,
                              std::vector<UcxSetting>& in_force);

// Returns the network interface with this address; empty if there is none, or for the wildcard address.
std::string InterfaceOf(const std::string& address);

}  // namespace ashlar::daemon
