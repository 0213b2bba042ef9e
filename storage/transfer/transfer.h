// SPDX-License-Identifier: Apache-2.0
// The ends of transfers between an engine's memory and an object: a publish's sources, a landing's targets.
//
// Tensors and pages lie in the processor's memory or in a GPU's; those of one transfer in the memory of one GPU at
// most. The caller has checked that all pointers here lie inside memory that `keep` keeps mapped: tensors and, for
// every page id in `page_table`, the whole page. It has also checked that objects and pages are of one namespace.
// Storage itself checks that shapes and the length of the page table fit the object.
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

// One attention layer's keys and values in an engine's pages.
struct PagedRows {
  uint32_t layer = 0;                             // index into layout.layers
  int32_t heads = 0, key_dim = 0, value_dim = 0;  // of one token's row
  kernels::PagedSlots keys, values;               // page_table: a part of the vector below; null: all of it
  const kernels::Gpu* gpu = nullptr;              // in whose memory both lie; null: the processor's
  bool latent = false;                            // mla: keys are latents, values the rotary parts of keys
  kernels::Rotation rotation;  // of keys that are landed, mla: of their rotary parts (frequencies live as long as
                               // `keep`); a publish takes them as they stand
};

struct PublishSource {
  struct Tensor {
    uint32_t layer = 0;
    PartForm form = PartForm::kState;
    const std::byte* data = nullptr;    // the part's units, densely
    uint16_t first_head = 0;            // the part's head group
    const kernels::Gpu* gpu = nullptr;  // in whose memory it lies; null: the processor's
  };
  Provenance provenance = Provenance::kExact;
  // The reservation's plan with the forms that heads' transitions have (PlanForms). None: their layers' own.
  std::optional<ObjectHeader> plan;
  std::vector<Tensor> tensors;  // every part that has bytes and is no rows, in the plan's order
  std::vector<PagedRows> rows;  // one for every attention layer
  std::shared_ptr<const std::vector<int32_t>> page_table;  // where there are rows; sources of one text share it
  uint64_t first_position = 0;                             // slot position at which the run's token 0 stands
  Nanos deadline = 0;  // 0: none. When the copy ends later, the sources may have changed under it: the object
                       // is dropped, the reservation ends, and the outcome is kUnavailable
  std::shared_ptr<const void> keep;
};

struct LandTarget {
  struct Segment {
    uint32_t index = 0;           // in the match
    uint64_t first_position = 0;  // where the segment's token 0 stands
    // The number of its stored tokens to land, from the first on: the part of a span that it shares with the prompt.
    // The other tokens are still verified; with 0 only tuples are.
    uint64_t tokens = UINT64_MAX;
    // Keys turn by first_position + rotary_shift, which is not negative.
    int64_t rotary_shift = 0;
  };
  std::vector<PagedRows> rows;  // one for every attention layer, ascending
  std::vector<Segment> segments;
  std::vector<int32_t> page_table;
  std::shared_ptr<const void> keep;
};

// The GPU whose memory they lie in, or some of it; null: none of it lies on a GPU.
const kernels::Gpu* GpuOf(const PublishSource& source);
const kernels::Gpu* GpuOf(const LandTarget& target);
// Returns whether all of it lies in that GPU's memory.
bool LiesOn(const PublishSource& source, const kernels::Gpu& gpu);

// The tensor that a part is copied from; null: there is none.
const PublishSource::Tensor* FindTensor(const PublishSource& source, const Part& part);

// Returns whether the source has something for every part of the object that `plan` describes, in its shape.
bool Fits(const PublishSource& source, const ObjectHeader& plan);

// Returns whether as many of the object's keys and values as the segment says, and no others, fit the target's layers.
bool Fits(const LandTarget& target, const ObjectHeader& object, const LandTarget::Segment& segment);

}  // namespace ashlar::storage
