#include "storage/object_bytes.h"

#include "proto/limits.h"

namespace ashlar::storage {

ObjectBytes::ObjectBytes(const Tier& tier, const Slot& slot) {
  extents_.reserve(slot.Extents());
  for (const ExtentRun& run : slot.runs) {
    for (uint32_t i = 0; i < run.count; ++i) extents_.push_back(tier.Address(run.arena, run.first + i));
  }
}

std::byte* ObjectBytes::Unit(const Part& part, uint32_t unit) const {
  const uint64_t offset = part.UnitOffset(unit);
  return extents_[offset / limits::kExtentBytes] + offset % limits::kExtentBytes;
}

}  // namespace ashlar::storage
