// SPDX-License-Identifier: Apache-2.0
// ReservePages: takes memory before it is promised, so that a lack of memory is an error now, and not a signal later.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace ashlar::storage {

// Bytes that this process could take now without any process being killed for them: what the kernel estimates for the
// machine, and what the process's cgroups (of either version) leave, whichever is less; UINT64_MAX where neither can be
// read. `root` stands before the paths that are read.
uint64_t AvailableMemory(const std::string& root = "");

// Allocates the pages of the first `bytes` of a memfd, which has that size. They are zero, and touching them later
// cannot fail. RESOURCE_EXHAUSTED when the machine does not have them and `keep_free` more: with the default overcommit
// the kernel does not refuse the last page, it kills for it.
inline constexpr uint64_t kKeptFree = uint64_t{256} << 20;
struct ReserveOptions {
  void* advised = nullptr;           // unless null: a mapping of those bytes whose advice (huge pages) is heeded
  uint64_t present_bytes = 0;        // that are there already
  uint64_t keep_free = kKeptFree;    // at least kKeptFree
  std::vector<uint32_t> only_nodes;  // unless empty: the NUMA nodes that the memfd is bound to
};
absl::Status ReservePages(int memfd, uint64_t bytes, const ReserveOptions& options = {});

// Maps pages that a memfd's mapping has, so that writing there takes no page faults, where the kernel can (5.14). Piece
// by piece, because other threads' changes of mappings wait meanwhile. Harmless where nothing is mapped any more.
void MapPages(std::byte* data, uint64_t bytes);

}  // namespace ashlar::storage
