// SPDX-License-Identifier: Apache-2.0
// The GPUs of a configuration, and the hbm tiers on them.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "ashlar/v1/config.pb.h"

namespace ashlar::daemon {

// Tiers without a capacity are none. A tier that names no device lies on the GPU of its own place in the list.
void FillGpuDefaults(v1::Config* config);

// INVALID_ARGUMENT naming the field: devices that are given twice or are out of range, tiers on GPUs that are none of
// the configuration's, more tiers than GPUs.
absl::Status CheckGpus(const v1::Config& config);

// The name of an hbm tier's field, as errors say it: "hbm" where it is the only one.
std::string HbmField(const v1::Config& config, int index);

// Returns the least capacity of the hbm tiers; 0: there is none.
uint64_t LeastHbm(const v1::Config& config);

}  // namespace ashlar::daemon
