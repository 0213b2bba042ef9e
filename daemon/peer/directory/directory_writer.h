// SPDX-License-Identifier: Apache-2.0
// DirectoryWriter: writes of this node's entries to etcd, and the sweep of entries whose node is gone. One transaction
// at a time, which keeps the order of writes on an object, and within the node's share of the cluster's rate.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "daemon/peer/directory/directory_connection.h"

namespace ashlar::daemon {

// Used by the directory's thread.
class DirectoryWriter {
 public:
  static constexpr size_t kTxnOps = 128;  // etcd's default limit of operations per transaction

  explicit DirectoryWriter(DirectoryConnection& connection)
      : connection_(connection), filled_at_(connection.clock.Now()) {}
  DirectoryWriter(const DirectoryWriter&) = delete;
  DirectoryWriter& operator=(const DirectoryWriter&) = delete;

  // Key writes per second of one of `members` members.
  static double Rate(const EtcdDirectoryOptions& options, size_t members);

  // Sends a transaction if possible. Returns when to call again.
  storage::Nanos Write();
  bool writing() const { return writing_; }

  // The sweep starts at this time, or no later than it.
  void SweepAt(storage::Nanos at) { sweep_at_ = at; }
  void SweepBy(storage::Nanos at) { sweep_at_ = std::min(sweep_at_, at); }

  // The connection has ended: queues the writes in flight again. Returns whether there were any, because etcd may
  // still do them.
  bool Disconnected();

 private:
  // events per second that etcd sends to all nodes if each follows everything
  static constexpr double kMostEvents = 2e6;
  static constexpr storage::Nanos kSweepPeriod = storage::Nanos{3600} * 1'000'000'000;

  struct Doomed {
    std::string key;
    uint64_t incarnation = 0;
  };

  void SendQueued(size_t most);
  void WrittenQueued(const absl::Status& status, const etcdserverpb::TxnResponse& response);
  bool TooManyOps(const absl::Status& status);
  void ReadDoomed();
  void DeleteDoomed(size_t most);
  void EndSweepPage();
  storage::Nanos FillBucket(size_t wanted);  // returns 0 if enough is available, else when it will be

  DirectoryConnection& connection_;
  size_t txn_ops_ = kTxnOps;
  bool writing_ = false;
  std::vector<DirectoryWrite> in_flight_;
  double tokens_ = 0;
  storage::Nanos filled_at_;
  storage::Nanos sweep_at_ = 0;
  bool sweep_reading_ = false, swept_last_ = false;
  std::string sweep_from_;     // empty: start at the first entry
  uint32_t sweep_slices_ = 0;  // slices of the namespace in sweep_from_; 0: find the next namespace
  std::vector<Doomed> doomed_;
};

}  // namespace ashlar::daemon
