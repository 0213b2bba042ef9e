// SPDX-License-Identifier: Apache-2.0
// Etcd: an etcd of one member in simulated time: revisions, transactions, ranges in the past, leases, watches,
// compaction. It keeps what it has over a restart, unless it is told to erase it.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "etcd/v3/rpc.pb.h"
#include "tests/simulation/nodes/nodes.h"
#include "tests/simulation/nodes/schedule.h"

namespace ashlar::simulation::nodes {

// A connection on etcd's side: where events of its watches go.
struct EtcdConnection {
  std::function<void(etcdserverpb::WatchResponse)> watched;
  std::function<void()> broken;  // etcd has died
};

class Etcd {
 public:
  Etcd(Schedule& schedule, Bug bug) : schedule_(schedule), bug_(bug) {}

  bool up() const { return up_; }
  void Stop();
  void Start();
  void Erase();    // loses everything, as if it was installed again; it must be down
  void Compact();  // drops all but the current state
  Nanos slow = 0;  // maximum delay of each answer
  Nanos Late() { return slow > 0 ? schedule_.DrawTime(slow) : 0; }
  void Connect(const std::shared_ptr<EtcdConnection>& connection) { connections_.push_back(connection); }
  void Disconnect(const std::shared_ptr<EtcdConnection>& connection) {
    std::erase(connections_, connection);
    std::erase_if(watchers_, [&](const Watcher& watcher) { return watcher.connection == connection; });
  }

  // Requests that arrive while it is up.
  absl::Status Range(const etcdserverpb::RangeRequest& request, etcdserverpb::RangeResponse* response) const;
  absl::Status Txn(const etcdserverpb::TxnRequest& request, etcdserverpb::TxnResponse* response);
  void LeaseGrant(const etcdserverpb::LeaseGrantRequest& request, etcdserverpb::LeaseGrantResponse* response);
  void LeaseRevoke(int64_t lease);
  etcdserverpb::LeaseKeepAliveResponse KeepAlive(int64_t lease);
  void Watch(const std::shared_ptr<EtcdConnection>& connection, const etcdserverpb::WatchRequest& request);

  std::vector<std::string> Keys() const;
  size_t Count() const { return present_; }  // number of keys
  int64_t revision() const { return revision_; }
  struct Counts {
    uint64_t transactions = 0, written = 0, keep_alives = 0, events = 0, event_bytes = 0, compactions = 0, expired = 0;
    uint64_t refused = 0;  // transactions whose comparisons did not hold
  };
  const Counts& counts() const { return counts_; }

 private:
  struct Version {
    int64_t mod = 0, create = 0, version = 0, lease = 0;
    std::string value;
    bool deleted = false;
  };
  struct Lease {
    Nanos ttl = 0, ends_at = 0;
  };
  struct Watcher {
    std::shared_ptr<EtcdConnection> connection;
    int64_t id = 0;
    std::string key, end;
    int64_t next = 0;  // the first revision whose events it has not been sent
  };
  struct Change {
    int64_t revision;
    mvccpb::Event event;
  };

  const Version* Latest(const std::string& key) const;  // null: the key does not exist
  void Put(const std::string& key, const std::string& value, int64_t lease);
  int64_t Delete(const std::string& key, const std::string& end);
  void Commit();  // makes pending puts and deletions the next revision
  void Notify(Watcher& watcher);
  void Expire(int64_t lease);
  void AwaitEnd(int64_t lease);
  void Write(etcdserverpb::ResponseHeader* header) const;

  Schedule& schedule_;
  const Bug bug_;
  bool up_ = true;
  uint64_t cluster_ = 77, term_ = 2;
  size_t present_ = 0;
  int64_t revision_ = 1, compacted_ = 0, drawn_lease_ = 1000;
  std::map<std::string, std::vector<Version>> keys_;
  std::vector<Change> changes_;  // after the compaction, ascending
  std::vector<mvccpb::Event> pending_;
  std::map<int64_t, Lease> leases_;
  std::vector<Watcher> watchers_;
  std::vector<std::shared_ptr<EtcdConnection>> connections_;
  Counts counts_;
};

}  // namespace ashlar::simulation::nodes
