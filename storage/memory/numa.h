// SPDX-License-Identifier: Apache-2.0
// The choice of NUMA nodes from which shared memory comes. The one system call is made directly: libnuma would add only
// a dependency, because it reads the same kernel files to learn which nodes there are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace ashlar::storage {

struct NumaPolicy {
  enum class Mode : uint8_t {
    kAny,         // wherever the thread that allocates runs
    kBind,        // from `nodes`, or not at all
    kPreferred,   // from the one node while it has any
    kInterleave,  // from `nodes` in turn
  };
  static constexpr uint32_t kMaxNodes = 1024;  // of any kernel

  Mode mode = Mode::kAny;
  std::vector<uint32_t> nodes;  // below kMaxNodes; kPreferred: one; kAny: none

  bool operator==(const NumaPolicy&) const = default;
};

// INVALID_ARGUMENT naming the first of `policy.nodes` ("nodes[0]: …") that has no memory, or none for this process
// (cpuset). `root` stands before the paths that are read.
absl::Status CheckNodes(const NumaPolicy& policy, const std::string& root = "");

// Bytes that `nodes` could give now: free, or cached files. UINT64_MAX where that cannot be read.
uint64_t AvailableOnNodes(const std::vector<uint32_t>& nodes, const std::string& root = "");

// Pages of a memfd, mapped whole and shared at `mapping`, that are allocated from now on, by whomever and however, come
// from where the policy says. FAILED_PRECONDITION with the kernel's reason: it has no NUMA, or a sandbox forbids the
// call.
absl::Status SetNumaPolicy(void* mapping, uint64_t bytes, const NumaPolicy& policy);

}  // namespace ashlar::storage
