// SPDX-License-Identifier: Apache-2.0
// Transfers between two processes over the daemons' transport, on loopback and between two network namespaces.
#pragma once

#include "absl/status/status.h"
#include "tools/bench/bench.h"

namespace ashlar::bench {

absl::Status Transfer(const Options& options, nlohmann::json& figures);

// The process that holds the bytes; it listens at `host` and ends with its standard input.
int RunTransferHolder(const char* host);
// The process that measures: reads from the holder that `holder` describes, and writes the cases as JSON.
int RunTransferAsker(const char* host, const char* holder, const char* repetitions, const char* quick);

}  // namespace ashlar::bench
