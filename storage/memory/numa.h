// SPDX-License-Identifier: Apache-2.0
// Binds shared memory to NUMA nodes. Makes the system call directly, because libnuma would only add a dependency.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace ashlar::storage {

struct NumaPolicy {
  enum class Mode : uint8_t {
    kAny,         // the node of the allocating thread
    kBind,        // only from `nodes`
    kPreferred,   // from the one node while it has free memory
    kInterleave,  // from `nodes` in turn
  };
  static constexpr uint32_t kMaxNodes = 1024;  // the kernel's limit

  Mode mode = Mode::kAny;
  std::vector<uint32_t> nodes;  // less than kMaxNodes; one for kPreferred, none for kAny

  bool operator==(const NumaPolicy&) const = default;
};

// INVALID_ARGUMENT names the first of `policy.nodes` ("nodes[0]: …") without memory for this process (cpuset). `root`
// is prepended to the paths that are read.
absl::Status CheckNodes(const NumaPolicy& policy, const std::string& root = "");

// Returns the free bytes and cached file bytes of `nodes`; UINT64_MAX if they cannot be read.
uint64_t AvailableOnNodes(const std::vector<uint32_t>& nodes, const std::string& root = "");

// Binds future page allocations of a memfd, mapped completely and shared at `mapping`, in any process.
// FAILED_PRECONDITION with the kernel's reason: it has no NUMA, or a sandbox forbids the call.
absl::Status SetNumaPolicy(void* mapping, uint64_t bytes, const NumaPolicy& policy);

}  // namespace ashlar::storage
