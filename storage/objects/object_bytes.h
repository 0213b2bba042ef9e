// SPDX-License-Identifier: Apache-2.0
// ObjectBytes: the addresses of an object's bytes in this process.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "proto/object.h"
#include "storage/tier/tier.h"

namespace ashlar::storage {

// Addresses in a memory tier, valid as long as the slot. Any thread may read them.
class ObjectBytes {
 public:
  ObjectBytes(const Tier& tier, const Slot& slot);

  std::byte* start() const { return extents_.front(); }
  std::byte* Unit(const Part& part, uint32_t unit) const;
  const std::vector<std::byte*>& extents() const { return extents_; }  // ordered as the object's bytes

 private:
  std::vector<std::byte*> extents_;
};

// An object begins with its header, which the CPU reads and writes in any memory tier.
void WriteStart(const Tier& tier, const Slot& slot, absl::string_view bytes);
// Returns the first `bytes` of a slot, at most one extent: in place or, for GPU memory, as a copy in `buffer`.
absl::string_view ReadStart(const Tier& tier, const Slot& slot, uint64_t bytes, std::string& buffer);

}  // namespace ashlar::storage
