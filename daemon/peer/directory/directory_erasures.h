// SPDX-License-Identifier: Apache-2.0
// DirectoryErasures: erasures for all nodes, as keys of etcd. An erasure is a key under a lease that is not renewed;
// each node writes into its member key up to which one it has completed them.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "daemon/peer/directory/directory_connection.h"

namespace ashlar::daemon {

// Used by the directory's thread.
class DirectoryErasures {
 public:
  // Calls `acknowledged` when this node's member key has changed.
  DirectoryErasures(DirectoryConnection& connection, std::function<void()> acknowledged)
      : connection_(connection), acknowledged_(std::move(acknowledged)) {}
  DirectoryErasures(const DirectoryErasures&) = delete;
  DirectoryErasures& operator=(const DirectoryErasures&) = delete;

  // Replaces all erasures by those that etcd has.
  void Replace(const etcdserverpb::RangeResponse& response);
  void Got(const etcdserverpb::WatchResponse& response);
  int64_t revision() const { return revision_; }  // revision of the state that Replace took

  void WriteQueued();  // writes queued erasures to etcd one by one
  // Writes into the member key up to which erasure this node has completed them. Not during a DirectoryWriter's write,
  // which compares the revision of that key.
  void Acknowledge();
  bool acknowledging() const { return acknowledging_; }
  // The connection has ended.
  void Disconnected() { acknowledging_ = false; }
  // Answers all requests for erasures that etcd does not have with this error.
  void Refuse(const absl::Status& why);

 private:
  // Returns false if it is not an erasure.
  bool Put(const mvccpb::KeyValue& pair) ABSL_EXCLUSIVE_LOCKS_REQUIRED(connection_.shared.mutex);

  DirectoryConnection& connection_;
  const std::function<void()> acknowledged_;
  int64_t revision_ = 0;
  std::vector<DirectoryShared::ToErase> writing_;  // the erasure being written; at most one
  bool acknowledging_ = false;
};

}  // namespace ashlar::daemon
