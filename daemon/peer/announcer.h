// Announcer: tells the directory what this node holds, as far as that is worth telling.
#pragma once

#include "daemon/peer/directory/directory.h"
#include "proto/object.h"
#include "storage/objects/object_table.h"

namespace ashlar::daemon {

// Which objects others are told of. kUsedTwice: those that a look-up has found a second time, and those on the disk.
enum class AnnounceMode : uint8_t { kUsedTwice, kAll };

// The metadata thread only. What leaves this node is withdrawn at once. A tier is told anew only where memory has
// become disk, or disk memory: which memory it is changes little for those who fetch.
class Announcer {
 public:
  Announcer(Directory& directory, AnnounceMode mode) : directory_(directory), mode_(mode) {}

  // Returns the tier that others have been told; kNone: nothing.
  TierKind Resides(const storage::TenantPool& pool, const ObjectHeader& header, const storage::Residence& residence);

 private:
  Directory& directory_;
  const AnnounceMode mode_;
};

}  // namespace ashlar::daemon
