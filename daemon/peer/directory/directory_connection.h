// SPDX-License-Identifier: Apache-2.0
// DirectoryConnection: what the parts of a DirectorySession share: the connection to etcd, the member keys, and the
// state that the directory's callers see.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "daemon/peer/directory/directory.h"
#include "daemon/peer/directory/directory_keys.h"
#include "daemon/peer/directory/etcd_client.h"
#include "daemon/peer/directory/mirror.h"
#include "daemon/peer/directory/options.h"
#include "daemon/peer/directory/write_queue.h"
#include "kernels/mutex.h"

namespace ashlar::daemon {

// Shared by the directory's callers and its thread.
struct DirectoryShared {
  explicit DirectoryShared(const EtcdDirectoryOptions& options)
      : queue(options.queued_writes), mirror(options.mirror_entries) {}

  Mutex mutex;
  bool stopping ABSL_GUARDED_BY(mutex) = false;
  WriteQueue queue ABSL_GUARDED_BY(mutex);
  std::map<ShortDigest, uint32_t> followed ABSL_GUARDED_BY(mutex);  // followed namespaces and their counts
  std::vector<std::shared_ptr<const Member>> members ABSL_GUARDED_BY(mutex);
  DirectoryHealth health ABSL_GUARDED_BY(mutex);
  DirectoryStats counted ABSL_GUARDED_BY(mutex);  // counters; sizes are computed on request
  Mirror mirror;                                  // thread-safe

  struct ToErase {
    ClusterErasure erasure;
    std::function<void(const absl::Status&)> done;
  };
  std::vector<ToErase> to_erase ABSL_GUARDED_BY(mutex);               // erasures not yet written to etcd
  std::map<int64_t, ClusterErasure> erasures ABSL_GUARDED_BY(mutex);  // keyed by etcd's revision
  int64_t erased ABSL_GUARDED_BY(mutex) = 0;                          // this node has done all up to this revision
};

// The member keys of etcd, and this node's own.
struct DirectoryMembership {
  struct Record {  // a member key
    std::shared_ptr<const Member> member;
    int64_t create_revision = 0;
  };

  std::shared_ptr<const Member> self;
  int64_t lease = 0;                   // 0 without a lease
  int64_t registered = 0;              // create_revision of this node's member key
  int64_t fence = 0;                   // mod_revision of the member key; writes that compare an older one fail
  std::map<uint64_t, Record> records;  // keyed by incarnation
  // Members that etcd lost, possibly together with this node. Their entries are used for another lease.
  std::map<uint64_t, Record> lost;
  storage::Nanos believe_until = 0;  // 0: only etcd's members are used

  bool IsOldest() const;  // returns whether no member key is older than this node's
};

// Used by the directory's thread.
struct DirectoryConnection {
  // Ids of watches; the ids of namespaces follow.
  static constexpr int64_t kMemberWatch = 1, kErasureWatch = 2;
  static constexpr int64_t kPageEntries = 4096, kLeastPageEntries = 64;

  const EtcdDirectoryOptions options;
  const DirectoryKeys keys;
  const DirectoryEvents events;
  const storage::Clock& clock;
  DirectoryShared& shared;
  const std::unique_ptr<EtcdClient> client;
  const std::function<void(const absl::Status&)> fail;  // closes the connection because of this error
  DirectoryMembership membership;
  etcdserverpb::ResponseHeader known;   // the latest header from etcd
  int64_t page_entries = kPageEntries;  // entries per page when many are read

  void Fail(absl::string_view during, const absl::Status& status);
  void LeaseExpired();
  void Note(const etcdserverpb::ResponseHeader& header);
  // A page has been read, or was not. Pages shrink if they take a large part of a call's time limit.
  void FitPage(const absl::Status& status, storage::Nanos took, storage::Nanos limit);
  void StartWatch(const std::string& prefix, int64_t revision, int64_t id);
};

}  // namespace ashlar::daemon
