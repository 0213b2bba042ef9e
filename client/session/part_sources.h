// SPDX-License-Identifier: Apache-2.0
// PartSources: writes the places of linear layers' tensors in a region into the daemon's message.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "client/session/model.h"
#include "client/session/region_memory.h"
#include "proto/layout.h"
#include "proto/object.h"

namespace ashlar::v1 {
class PartSource;
}
namespace google::protobuf {
template <typename Message>
class RepeatedPtrField;
}

namespace ashlar::internal {

class PartSources {
 public:
  using Parts = google::protobuf::RepeatedPtrField<v1::PartSource>;

  // All must outlive it. `region_id`: the region's id on the current connection.
  PartSources(const Layout& layout, const RegionMemory& region, uint64_t region_id)
      : layout_(layout), region_(region), region_id_(region_id) {}

  // Add returns false if a tensor does not fit the layout or is not in the region. Null pointers are skipped. The
  // daemon checks that the forms fit the layer.
  bool Add(const PublishParts::Linear& tensors, Parts& parts) const;
  bool Add(const PublishParts::Run& run, Parts& parts) const;
  // Adds the rows of a span of this number of tokens, with keys and values in `dtype`.
  bool Add(const CapturedSpan::Linear& rows, uint64_t tokens, DType dtype, Parts& parts) const;

 private:
  // Returns null if the data are not in the region.
  v1::PartSource* Place(uint32_t layer, PartForm form, const std::byte* data, uint64_t bytes, Parts& parts) const;

  const Layout& layout_;
  const RegionMemory& region_;
  const uint64_t region_id_;
};

}  // namespace ashlar::internal
