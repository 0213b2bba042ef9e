// Where an object's bytes lie in this process.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "proto/object.h"
#include "storage/tier/tier.h"

namespace ashlar::storage {

// Addresses in a memory tier, valid as long as the slot. Any thread may read them.
class ObjectBytes {
 public:
  ObjectBytes(const Tier& tier, const Slot& slot);

  std::byte* start() const { return extents_.front(); }
  std::byte* Unit(const Part& part, uint32_t unit) const;
  const std::vector<std::byte*>& extents() const { return extents_; }  // in the object's order

 private:
  std::vector<std::byte*> extents_;
};

}  // namespace ashlar::storage
