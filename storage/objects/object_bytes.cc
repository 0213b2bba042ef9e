// SPDX-License-Identifier: Apache-2.0
#include "storage/objects/object_bytes.h"

#include <cstring>

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

void WriteStart(const Tier& tier, const Slot& slot, absl::string_view bytes) {
  std::byte* const at = tier.Address(slot.runs.front().arena, slot.runs.front().first);
  if (tier.gpu() != nullptr) return tier.gpu()->CopyToDevice(at, bytes.data(), bytes.size());
  std::memcpy(at, bytes.data(), bytes.size());
}

absl::string_view ReadStart(const Tier& tier, const Slot& slot, uint64_t bytes, std::string& buffer) {
  const std::byte* const at = tier.Address(slot.runs.front().arena, slot.runs.front().first);
  if (tier.gpu() == nullptr) return {reinterpret_cast<const char*>(at), bytes};
  buffer.resize(bytes);
  tier.gpu()->CopyToHost(buffer.data(), at, bytes);
  return buffer;
}

}  // namespace ashlar::storage
