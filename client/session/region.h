// SPDX-License-Identifier: Apache-2.0
// Region: memory that engine and daemon share; PagedCache: the places of paged keys and values in it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/device.h"

namespace ashlar::internal {
class RegionMemory;
}

namespace ashlar {

// Memory that engine and daemon share. Copies share one mapping; it is unmapped when the last copy is destroyed.
//
// A region may be on the daemon's GPU: then data(), and every pointer into the region, is an address for that GPU's
// kernels and copies, and CPU threads must not access it. The engine's own kernels must have finished there (wait for
// their stream) before the memory is published, or before a hit lands in it; landed bytes are visible to all work that
// starts after the verdict.
class Region {
 public:
  std::byte* data() const;
  size_t size() const;
  kernels::MemoryKind memory() const;

 private:
  friend class Client;
  friend class Model;
  std::shared_ptr<internal::RegionMemory> memory_;
};

// The place of an engine's paged keys and values inside a region. Offsets and strides in bytes; a token's row of head
// h: offset + page × page_stride + slot × token_stride + h × head_stride.
struct PagedLayer {
  uint32_t layer = 0;  // index into layout.layers
  uint64_t key_offset = 0, value_offset = 0;
  uint64_t page_stride = 0, token_stride = 0;
  uint64_t key_head_stride = 0, value_head_stride = 0;
  // fp8 with scales: one fp32 per token and head, with the same layout.
  uint64_t key_scale_offset = 0, value_scale_offset = 0;
  uint64_t scale_page_stride = 0, scale_token_stride = 0, scale_head_stride = 0;
  uint32_t group = 0;  // index into PagedCache::groups
};
// Attention layers with a separate page table.
struct PageGroup {
  uint32_t page_tokens = 0;
  uint32_t pages = 0;
};
struct PagedCache {
  uint32_t page_tokens = 0;
  uint32_t pages = 0;
  // The daemon allocates page numbers (Model::Admit, shared_pages.h). Only in a hosted region.
  bool allocate = false;
  std::vector<PagedLayer> layers;  // every attention layer, ascending
  // Empty: one page table serves all layers. Otherwise page_tokens and pages above are ignored, and calls take the
  // groups' tables concatenated, and the number of entries of each (`group_pages`). Not with `allocate`. A daemon
  // without support for groups refuses them.
  std::vector<PageGroup> groups;
  // Page numbers are one set for all groups, which have as many pages each; a page belongs to one group at a time. Rows
  // of layers of different groups may share memory, page by page.
  bool common_pages = false;
};

}  // namespace ashlar
