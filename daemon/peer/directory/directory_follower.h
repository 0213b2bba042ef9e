// SPDX-License-Identifier: Apache-2.0
// DirectoryFollower: keeps the mirror of the followed namespaces current. It reads a namespace completely, and then
// watches it.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "absl/status/status.h"
#include "daemon/peer/directory/directory_connection.h"

namespace ashlar::daemon {

// Used by the directory's thread.
class DirectoryFollower {
 public:
  explicit DirectoryFollower(DirectoryConnection& connection) : connection_(connection) {}
  DirectoryFollower(const DirectoryFollower&) = delete;
  DirectoryFollower& operator=(const DirectoryFollower&) = delete;

  // Starts and ends reads and watches to match DirectoryShared::followed.
  void Reconcile();

  bool Watches(int64_t watch) const { return watches_.contains(watch); }
  // A response to one of the watches, which etcd did not end, has reached this revision.
  void Got(const etcdserverpb::WatchResponse& response, int64_t revision);
  // etcd has ended the watch, because it no longer has the revision.
  void Compacted(int64_t watch);

  // Reads every namespace completely with the next connection.
  void ReadAgain();
  // The same, during a connection: ends reads and watches.
  void Restart();
  // The connection has ended.
  void Disconnected();

 private:
  struct Follow {
    int64_t watch = 0;     // watch id; 0 without a watch
    int64_t revision = 0;  // the mirror has the state of this revision; 0 if it must be read completely
    uint64_t reading = 0;  // number of the read in progress; 0 without one
    // Progress of the last read, so that a lost connection costs at most one page. Revision 0: no progress.
    std::string read_to;
    int64_t read_at = 0;
    uint32_t slices = 0;
    void ReadAgain() { revision = read_at = 0; }  // read the namespace completely
  };

  void StopWatch(Follow* follow);
  void PutEntry(const mvccpb::KeyValue& pair);
  // Reads a namespace from a key, at a revision (0: the latest), in slices (0: not known yet).
  void ReadPage(const ShortDigest& ns, uint64_t number, const std::string& from, int64_t revision, uint32_t slices);

  DirectoryConnection& connection_;
  std::map<ShortDigest, Follow> follows_;
  std::map<int64_t, ShortDigest> watches_;
  int64_t last_watch_ = DirectoryConnection::kErasureWatch;
  uint64_t last_read_ = 0;
};

}  // namespace ashlar::daemon
