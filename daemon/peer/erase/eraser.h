// SPDX-License-Identifier: Apache-2.0
// Eraser: ends on this node what the cluster is to erase, each erasure once, and says so in the directory. They
// are begun in their order, those of tenants that are not configured here as well: the disk may have objects of theirs.
// What was done is remembered beside the disk's objects, which a restart brings back.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "daemon/peer/directory/directory.h"
#include "daemon/runtime/event_loop.h"
#include "storage/cache.h"

namespace ashlar::daemon {

// An erasure that was done once more, because its record was lost, only costs misses. The metadata thread only.
class Eraser {
 public:
  // All must outlive it. `names`: the tenants' names, by number. `folder`: the ssd tier's, whose file is read and
  // written on `disk_io`, from now on; without a disk: empty, and null.
  Eraser(storage::Executor* disk_io, const storage::Clock& clock, Directory& directory, std::vector<std::string> names,
         std::string folder);
  // Once, before anything else. `erase_beside` as in AdminParts.
  void Start(storage::Cache& cache,
             std::function<void(storage::TenantId, const std::optional<NamespaceId>&)> erase_beside);

  void Changed();  // the directory's erasures, or this node's registration
  void Tick();     // goes on; call it many times a second
  // Null: this process has not begun it. Of those that the directory remembers.
  const storage::Erasure::Progress* Find(const ClusterErasure::Id& id) const;

 private:
  void Read();
  void Begin();
  void Save();
  void Record(const ClusterErasure::Id& id);
  void TryLater(const char* what, const absl::Status& why);

  storage::Executor* const disk_io_;
  const storage::Clock& clock_;
  Directory& directory_;
  const std::vector<std::string> names_;
  const std::string folder_;
  storage::Cache* cache_ = nullptr;
  std::function<void(storage::TenantId, const std::optional<NamespaceId>&)> erase_beside_;
  std::vector<ClusterErasure> known_;          // rising
  std::deque<ClusterErasure> todo_;            // of these; the first is under way
  std::shared_ptr<storage::Erasure> running_;  // null: it has not begun
  bool read_ = false;                          // what was recorded: nothing begins before
  bool changed_ = false;                       // the directory has told its erasures
  bool reading_ = false;
  bool saving_ = false;
  bool told_failure_ = false;
  storage::Nanos retry_at_ = 0;
  std::set<ClusterErasure::Id> recorded_;
  std::map<ClusterErasure::Id, storage::Erasure::Progress> progress_;
};

}  // namespace ashlar::daemon
