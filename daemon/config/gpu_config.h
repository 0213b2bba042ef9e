// SPDX-License-Identifier: Apache-2.0
// Defaults and checks of the configuration fields `gpu` and `hbm`.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "ashlar/v1/config.pb.h"

namespace ashlar::daemon {

// Removes tiers without a capacity. A tier without a device uses the GPU with the same index in the list.
void FillGpuDefaults(v1::Config* config);

// INVALID_ARGUMENT names the field: a device is repeated or out of range, a tier is on a GPU that `gpu` does not list,
// or there are more tiers than GPUs.
absl::Status CheckGpus(const v1::Config& config);

// Returns the name of an hbm tier's field for error messages: "hbm" if it is the only one.
std::string HbmField(const v1::Config& config, int index);

// Returns the smallest capacity of the hbm tiers; 0 without one.
uint64_t LeastHbm(const v1::Config& config);

}  // namespace ashlar::daemon
