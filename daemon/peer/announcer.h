// SPDX-License-Identifier: Apache-2.0
// Announcer: tells the directory what this node holds, as far as that is worth telling.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "daemon/peer/directory/directory.h"
#include "proto/object.h"
#include "storage/objects/object_table.h"

namespace ashlar::daemon {

// Which objects others are told of. kUsedTwice: those that a look-up has found a second time, and those on the disk.
enum class AnnounceMode : uint8_t { kUsedTwice, kAll };

// The metadata thread only. What leaves this node is withdrawn at once. A tier is told anew only where memory has
// become disk, or disk memory, or a GPU's memory another one's or dram: an entry must not name a GPU that has nothing.
//
// An object that finds no room in the directory's queue is said later. When everything is to be said again, that goes
// on as etcd makes room. What was refused or given up is looked for among all objects once the queue is empty: sooner
// it would only push out other announcements.
class Announcer {
 public:
  // Says again of objects where they reside (Cache::TellAll): through Resides.
  using TellAll = absl::FunctionRef<bool(storage::Telling&, storage::Slice&)>;

  // `gpus`: the number of each memory tier's GPU, by its level; of levels behind the last one there is none.
  Announcer(Directory& directory, AnnounceMode mode, std::vector<std::optional<uint8_t>> gpus)
      : directory_(directory), mode_(mode), gpus_(std::move(gpus)) {}

  // Returns the tier that others have been told; kNone: nothing.
  TierKind Resides(const storage::TenantPool& pool, const ObjectHeader& header, const storage::Residence& residence);
  // The others know nothing any more.
  void Again() { telling_ = storage::Telling{.lost = true}; }
  // Goes on with what is to be said again: call it many times a second.
  void Flush(TellAll tell_all);
  void Tick();  // call it about once a second

 private:
  static constexpr size_t kSaidAtOnce = 128;  // objects

  Directory& directory_;
  const AnnounceMode mode_;
  const std::vector<std::optional<uint8_t>> gpus_;
  std::optional<storage::Telling> telling_;
  uint64_t dropped_ = 0;  // announcements, ever, of which all objects were asked
};

}  // namespace ashlar::daemon
