// SPDX-License-Identifier: Apache-2.0
// The ends of transfers between an engine's memory and an object: the source of a publish, the target of a landing.
//
// Tensors and pages are in host memory or GPU memory; those of one transfer are on one GPU at most. The caller has
// checked that all pointers lie in memory that `keep` keeps mapped: tensors and, for every page id in `page_table`, the
// whole page; and that objects and pages are of one namespace. Storage checks that shapes and the length of the page
// table fit the object.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "kernels/gpu.h"
#include "kernels/kernels.h"
#include "proto/object.h"
#include "storage/executor.h"

namespace ashlar::storage {

// The keys and values of one attention layer in an engine's pages.
struct PagedRows {
  uint32_t layer = 0;                             // index into layout.layers
  int32_t heads = 0, key_dim = 0, value_dim = 0;  // dimensions of one token's row; opaque: 1, the row's bytes, and 0
  kernels::PagedSlots keys, values;               // page_table: part of the vector below; null for all of it
  const kernels::Gpu* gpu = nullptr;              // GPU of both; null for host memory
  bool latent = false;                            // mla: keys are latents, values are the rotary parts of keys
  // rotation of landed keys (mla: of their rotary parts); its frequencies live as long as `keep`; a publish copies keys
  // unchanged
  kernels::Rotation rotation;
};

struct PublishSource {
  struct Tensor {
    uint32_t layer = 0;
    PartForm form = PartForm::kState;
    const std::byte* data = nullptr;    // units of the part, dense
    uint16_t first_head = 0;            // head group of the part
    const kernels::Gpu* gpu = nullptr;  // GPU of the data; null for host memory
  };
  Provenance provenance = Provenance::kExact;
  // The plan of the reservation with the forms of the heads' transitions (PlanForms). Empty: natural forms.
  std::optional<ObjectHeader> plan;
  std::vector<Tensor> tensors;  // every part with bytes that is not rows, in the order of the plan
  std::vector<PagedRows> rows;  // one per attention layer
  std::shared_ptr<const std::vector<int32_t>> page_table;  // set if there are rows; shared by the sources of one text
  uint64_t first_position = 0;                             // slot position of the run's token 0
  // 0: none. If the copy ends later, the sources may have changed: the object is dropped, the reservation ends, and the
  // outcome is kUnavailable
  Nanos deadline = 0;
  std::shared_ptr<const void> keep;
};

struct LandTarget {
  struct Segment {
    uint32_t index = 0;           // index in the match
    uint64_t first_position = 0;  // position of the segment's token 0
    // Number of stored tokens to land, from the first: the part of a span shared with the prompt. The other tokens are
    // still verified; with 0 only tuples are.
    uint64_t tokens = UINT64_MAX;
    // Keys are rotated by first_position + rotary_shift, which is not negative.
    int64_t rotary_shift = 0;
  };
  std::vector<PagedRows> rows;  // one per attention layer, ascending
  std::vector<Segment> segments;
  std::vector<int32_t> page_table;
  std::shared_ptr<const void> keep;
};

// Returns the GPU with any of the memory; null if all is host memory.
const kernels::Gpu* GpuOf(const PublishSource& source);
const kernels::Gpu* GpuOf(const LandTarget& target);
// Returns whether everything is in that GPU's memory.
bool LiesOn(const PublishSource& source, const kernels::Gpu& gpu);

// Returns the tensor that a part is copied from; null if there is none.
const PublishSource::Tensor* FindTensor(const PublishSource& source, const Part& part);

// Returns whether the source has something for every part of the object that `plan` describes, in its shape.
bool Fits(const PublishSource& source, const ObjectHeader& plan);

// Returns whether exactly the keys and values that the segment specifies fit the target's layers.
bool Fits(const LandTarget& target, const ObjectHeader& object, const LandTarget::Segment& segment);

}  // namespace ashlar::storage
