// SPDX-License-Identifier: Apache-2.0
// AllowLocking, LockPages: keep memory out of swap.
#pragma once

#include <cstdint>

#include "absl/status/status.h"

namespace ashlar::storage {

// Raises the soft limit on locked memory (RLIMIT_MEMLOCK) up to the hard one, and asks the kernel whether this process
// may lock `bytes` beside what it has locked. FAILED_PRECONDITION, with the limit, if it may not.
absl::Status AllowLocking(uint64_t bytes);

// RESOURCE_EXHAUSTED with the kernel's reason. Pages are locked until they are unmapped.
absl::Status LockPages(const void* mapping, uint64_t bytes);

}  // namespace ashlar::storage
