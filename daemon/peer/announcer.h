// SPDX-License-Identifier: Apache-2.0
// Announcer: announces to the directory the objects that this node holds and that other nodes can use.
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

// Which objects are announced. kUsedTwice: objects that a lookup has found a second time, and objects on the disk.
enum class AnnounceMode : uint8_t { kUsedTwice, kAll };

// The metadata thread only. An object that leaves this node is withdrawn immediately. A tier change is announced only
// between memory and disk, or between a GPU's memory and another memory, because an entry must not name a GPU without
// the object.
//
// An object that does not fit into the directory's queue is announced later. A full re-announcement proceeds as etcd
// makes space. Refused and abandoned announcements are searched among all objects once the queue is empty; earlier they
// would only displace other announcements.
class Announcer {
 public:
  // Reports the tier of every object again (Residences::ReportAll), through Resides.
  using ReportAll = absl::FunctionRef<bool(storage::ReportWalk&, storage::Slice&)>;

  // `gpus` has the GPU number of each memory tier by level. Levels past its end have no GPU.
  Announcer(Directory& directory, AnnounceMode mode, std::vector<std::optional<uint8_t>> gpus)
      : directory_(directory), mode_(mode), gpus_(std::move(gpus)) {}

  // Returns the announced tier; kNone if nothing is announced.
  TierKind Resides(const storage::TenantPool& pool, const ObjectHeader& header, const storage::Residence& residence);
  // Starts a full re-announcement after the directory lost all entries.
  void Again() { walk_ = storage::ReportWalk{.lost = true}; }
  // Continues the re-announcement. Call it many times per second.
  void Flush(ReportAll report_all);
  void Tick();  // call about once per second

 private:
  static constexpr size_t kSaidAtOnce = 128;  // objects announced per Flush

  Directory& directory_;
  const AnnounceMode mode_;
  const std::vector<std::optional<uint8_t>> gpus_;
  std::optional<storage::ReportWalk> walk_;
  uint64_t dropped_ = 0;  // dropped announcements up to the last full search
};

}  // namespace ashlar::daemon
