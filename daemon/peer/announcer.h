// Announcer: tells the directory what this node holds, as far as that is worth telling.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "daemon/peer/directory/directory.h"
#include "proto/object.h"
#include "storage/objects/object_table.h"

namespace ashlar::daemon {

// Which objects others are told of. kUsedTwice: those that a look-up has found a second time, and those on the disk.
enum class AnnounceMode : uint8_t { kUsedTwice, kAll };

// The metadata thread only. What leaves this node is withdrawn at once. A tier is told anew only where memory has
// become disk, or disk memory, or a GPU's memory another one's or dram: an entry must not name a GPU that has nothing.
class Announcer {
 public:
  // `gpus`: the number of each memory tier's GPU, by its level; of levels behind the last one there is none.
  Announcer(Directory& directory, AnnounceMode mode, std::vector<std::optional<uint8_t>> gpus)
      : directory_(directory), mode_(mode), gpus_(std::move(gpus)) {}

  // Returns the tier that others have been told; kNone: nothing.
  TierKind Resides(const storage::TenantPool& pool, const ObjectHeader& header, const storage::Residence& residence);

 private:
  Directory& directory_;
  const AnnounceMode mode_;
  const std::vector<std::optional<uint8_t>> gpus_;
};

}  // namespace ashlar::daemon
