// SPDX-License-Identifier: Apache-2.0
// DirectorySession: the conversation of an EtcdDirectory with etcd, on the directory's thread.
//
// To join, it gets a token (with a user), reads all members, gets a lease, and writes this node's member key under it.
// The key is written again if a write of an earlier connection may still be in flight. Then it runs a stream of
// watches, a stream of keep-alives, and one transaction at a time. Any failure closes the connection. The next
// connection continues at the revisions that were reached, unless etcd has changed: another cluster, an older revision
// or term, or a different member key. In that case namespaces are read completely, and this node registers and
// announces again.
#pragma once

#include <cstdint>
#include <memory>
#include <random>
#include <string>

#include "absl/status/status.h"
#include "daemon/peer/directory/directory.h"
#include "daemon/peer/directory/directory_connection.h"
#include "daemon/peer/directory/directory_erasures.h"
#include "daemon/peer/directory/directory_follower.h"
#include "daemon/peer/directory/directory_writer.h"
#include "daemon/peer/directory/etcd_client.h"
#include "daemon/peer/directory/options.h"

namespace ashlar::daemon {

class DirectorySession {
 public:
  static constexpr storage::Nanos kLongestBackOff = storage::Nanos{5} * 1'000'000'000;

  // `seed` is for the retry times.
  DirectorySession(const EtcdDirectoryOptions& options, std::shared_ptr<const Member> self, DirectoryEvents events,
                   const storage::Clock& clock, std::unique_ptr<EtcdClient> client, uint64_t seed,
                   DirectoryShared* shared);

  void Run();   // returns when `stopping` is set
  void Wake();  // any thread; wakes the session
  // Does what is due after callbacks ran. Returns when the next step is due. Used by Run.
  storage::Nanos Step();
  void Leave();  // the last step

  // Bounds of the time limit of an etcd call.
  static RoundTrips::Bounds Limits(const EtcdDirectoryOptions& options);

 private:
  enum class Phase { kAway, kJoining, kJoined };
  void Connect();
  void NoteTerm(const std::string& certificate);
  void Authenticated();
  void ReadMembers();
  void GotMembers(const etcdserverpb::RangeResponse& response);
  // `again`: rewrites the existing member key, so that writes of an earlier connection fail.
  void Register(bool again);
  void Joined();
  void KeepLease();
  void Close(const absl::Status& why);
  void SetHealth(bool connected, const std::string& reason);
  void PublishMembers();
  void EndBelief();
  void GotWatch(const etcdserverpb::WatchResponse& response);
  void GotMemberEvent(const mvccpb::Event& event);
  storage::Nanos LeaseTime() const;

  DirectoryConnection connection_;
  DirectoryMembership& membership_ = connection_.membership;
  DirectoryShared& shared_ = connection_.shared;
  EtcdClient& client_ = *connection_.client;
  DirectoryWriter writer_;
  DirectoryFollower follower_;
  DirectoryErasures erasures_;
  std::mt19937_64 random_;

  Phase phase_ = Phase::kAway;
  storage::Nanos retry_at_ = 0, joined_at_ = 0;
  uint32_t attempts_ = 0;
  size_t endpoint_ = 0;

  bool unresolved_ = false;  // a write was not answered, and etcd may still do it
  bool leaving_ = false;
  int64_t members_revision_ = 0;
  storage::Nanos keep_alive_at_ = 0, unanswered_since_ = 0;
};

}  // namespace ashlar::daemon
