// SPDX-License-Identifier: Apache-2.0
// Eraser: performs the cluster's erasures on this node, each once and in order, and records its progress in the
// directory. It also performs erasures of tenants that are not configured here, because the disk may hold their
// objects. Completed erasures are recorded next to the disk's objects, which survive a restart.
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

// Repeating an erasure after its record was lost only costs misses. The metadata thread only.
class Eraser {
 public:
  // All must outlive the object. `names` are the tenant names by number. `folder` is that of the ssd tier; its file is
  // read and written on `disk_io` from now on. Without a disk, they are empty and null.
  Eraser(storage::Executor* disk_io, const storage::Clock& clock, Directory& directory, std::vector<std::string> names,
         std::string folder);
  // Call once, first. `erase_texts_and_pages` as in AdminParts.
  void Start(storage::Cache& cache,
             std::function<void(storage::TenantId, const std::optional<NamespaceId>&)> erase_texts_and_pages);

  void Changed();  // the directory's erasures or this node's registration changed
  void Tick();     // makes progress; call it many times per second
  // Returns null if this process has not started the erasure, or if the directory does not have it.
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
  std::function<void(storage::TenantId, const std::optional<NamespaceId>&)> erase_texts_and_pages_;
  std::vector<ClusterErasure> known_;          // ascending
  std::deque<ClusterErasure> todo_;            // subset of known_; the first one is running
  std::shared_ptr<storage::Erasure> running_;  // null before the start
  bool read_ = false;                          // the record is loaded; no erasure starts earlier
  bool changed_ = false;                       // the directory has reported its erasures
  bool reading_ = false;
  bool saving_ = false;
  bool reported_failure_ = false;
  storage::Nanos retry_at_ = 0;
  std::set<ClusterErasure::Id> recorded_;
  std::map<ClusterErasure::Id, storage::Erasure::Progress> progress_;
};

}  // namespace ashlar::daemon
