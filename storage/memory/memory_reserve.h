// SPDX-License-Identifier: Apache-2.0
// ReservePages: allocates memory in advance, so that a shortage is an error now instead of a signal later.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace ashlar::storage {

// Returns the bytes that this process can allocate without an OOM kill: the smaller of the kernel's estimate for the
// machine and the limits of the process's cgroups (both versions); UINT64_MAX if neither can be read. `root` is
// prepended to the paths that are read.
uint64_t AvailableMemory(const std::string& root = "");

// Allocates the pages of the first `bytes` of a memfd of that size. They are zero, and touching them later cannot fail.
// RESOURCE_EXHAUSTED if the machine does not have them plus `keep_free`: with the default overcommit policy, the kernel
// kills a process instead of refusing the last page.
inline constexpr uint64_t kKeptFree = uint64_t{256} << 20;
struct ReserveOptions {
  void* advised = nullptr;           // if set: a mapping of those bytes whose advice (huge pages) is applied
  uint64_t present_bytes = 0;        // bytes already allocated
  uint64_t keep_free = kKeptFree;    // at least kKeptFree
  std::vector<uint32_t> only_nodes;  // if set: the NUMA nodes that the memfd is bound to
};
absl::Status ReservePages(int memfd, uint64_t bytes, const ReserveOptions& options = {});

// Maps allocated pages of a memfd's mapping, so that writing causes no page faults, if the kernel supports it (5.14).
// Works in pieces, because other threads' mapping changes wait meanwhile. Unmapped ranges are ignored.
void MapPages(std::byte* data, uint64_t bytes);

}  // namespace ashlar::storage
