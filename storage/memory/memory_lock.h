// SPDX-License-Identifier: Apache-2.0
// AllowLocking, LockPages: keep memory from being swapped out.
#pragma once

#include <cstdint>

#include "absl/status/status.h"

namespace ashlar::storage {

// Raises the soft limit on locked memory (RLIMIT_MEMLOCK) up to the hard limit, and checks that this process can lock
// `bytes` more. FAILED_PRECONDITION, with the limit, otherwise.
absl::Status AllowLocking(uint64_t bytes);

// RESOURCE_EXHAUSTED with the kernel's reason. Pages stay locked until they are unmapped.
absl::Status LockPages(const void* mapping, uint64_t bytes);

}  // namespace ashlar::storage
