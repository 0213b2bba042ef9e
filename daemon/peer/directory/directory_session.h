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
#include <map>
#include <memory>
#include <random>
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
  std::map<int64_t, ClusterErasure> erasures ABSL_GUARDED_BY(mutex);  // by revision, as etcd has them
  int64_t erased ABSL_GUARDED_BY(mutex) = 0;                          // this node has done all up to this revision
};

class DirectorySession {
 public:
  static constexpr size_t kTxnOps = 128;  // etcd's default limit of operations per transaction
  // events per second that etcd sends to all nodes if each follows everything
  static constexpr double kMostEvents = 2e6;
  // Entries per page when a namespace is read completely. The page shrinks if it takes a large part of a call's time
  // limit.
  static constexpr int64_t kPageEntries = 4096, kLeastPageEntries = 64;
  static constexpr storage::Nanos kSweepPeriod = storage::Nanos{3600} * 1'000'000'000;
  static constexpr storage::Nanos kLongestBackOff = storage::Nanos{5} * 1'000'000'000;

  // `seed` is for the retry times.
  DirectorySession(const EtcdDirectoryOptions& options, std::shared_ptr<const Member> self, DirectoryEvents events,
                   const storage::Clock& clock, std::unique_ptr<EtcdClient> client, uint64_t seed,
                   DirectoryShared* shared);

  // Ids of watches; the ids of namespaces follow.
  static constexpr int64_t kMemberWatch = 1, kErasureWatch = 2;

  void Run();   // returns when `stopping` is set
  void Wake();  // any thread; wakes the session
  // Does what is due after callbacks ran. Returns when the next step is due. Used by Run.
  storage::Nanos Step();
  void Leave();  // the last step

  // Bounds of the time limit of an etcd call.
  static RoundTrips::Bounds Limits(const EtcdDirectoryOptions& options);
  // Key writes per second of one of `members` members.
  static double Rate(const EtcdDirectoryOptions& options, size_t members);

 private:
  enum class Phase { kAway, kJoining, kJoined };
  struct Record {  // a member key
    std::shared_ptr<const Member> member;
    int64_t create_revision = 0;
  };
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
  struct Doomed {
    std::string key;
    uint64_t incarnation = 0;
  };

  // session.cc: joining and closing connections.
  void Connect();
  void NoteTerm(const std::string& certificate);
  void Authenticated();
  void ReadMembers();
  void GotMembers(const etcdserverpb::RangeResponse& response);
  // `again`: rewrites the existing member key, so that writes of an earlier connection fail.
  void Register(bool again);
  void Joined();
  void KeepLease();
  void Fail(const absl::Status& status);
  void Fail(absl::string_view during, const absl::Status& status);
  void SetHealth(bool connected, const std::string& reason);
  void Note(const etcdserverpb::ResponseHeader& header);
  void PublishMembers();
  void EndBelief();
  storage::Nanos Third() const { return lease_time_ / 3; }  // a third of a lease

  // session_mirror.cc: watching, and reading complete namespaces.
  void Reconcile();  // starts and ends watches to match `followed`
  void StopWatch(Follow* follow);
  void StartWatch(const std::string& prefix, int64_t revision, int64_t id);
  void GotWatch(const etcdserverpb::WatchResponse& response);
  void GotMemberEvent(const mvccpb::Event& event);
  void GotEntryEvent(const mvccpb::Event& event);
  void PutEntry(const mvccpb::KeyValue& pair);
  // Reads a namespace from a key, at a revision (0: the latest), in slices (0: not known yet).
  void ReadPage(const ShortDigest& ns, uint64_t number, const std::string& from, int64_t revision, uint32_t slices);
  void FitPage(const absl::Status& status, storage::Nanos took, storage::Nanos limit);

  // session_erase.cc: erasures.
  void GotErasures(const etcdserverpb::RangeResponse& response);
  void GotErasureEvent(const mvccpb::Event& event);
  // Returns false if it is not an erasure.
  bool PutErasure(const mvccpb::KeyValue& pair) ABSL_EXCLUSIVE_LOCKS_REQUIRED(shared_.mutex);
  void TellErasures();  // writes queued erasures to etcd one by one
  void TellErased();
  void RefuseErasures(const absl::Status& why);

  // session_write.cc: transactions.
  storage::Nanos Write();  // sends one if possible; returns when to call again
  void SendQueued(size_t most);
  void WrittenQueued(const absl::Status& status, const etcdserverpb::TxnResponse& response);
  bool TooManyOps(const absl::Status& status);
  bool IsSweeper() const;
  void ReadDoomed();
  void DeleteDoomed(size_t most);
  void EndSweepPage();
  storage::Nanos FillBucket(size_t wanted);  // returns 0 if enough is available, else when it will be

  const EtcdDirectoryOptions options_;
  const DirectoryKeys keys_;
  std::shared_ptr<const Member> self_;
  const DirectoryEvents events_;
  const storage::Clock& clock_;
  const storage::Nanos lease_time_;
  DirectoryShared& shared_;
  std::mt19937_64 random_;
  const std::unique_ptr<EtcdClient> client_;

  Phase phase_ = Phase::kAway;
  storage::Nanos retry_at_ = 0, joined_at_ = 0;
  uint32_t attempts_ = 0;
  size_t endpoint_ = 0;

  etcdserverpb::ResponseHeader known_;  // the latest header from etcd
  int64_t lease_ = 0;                   // 0 without a lease
  int64_t registered_ = 0;              // create_revision of this node's member key
  int64_t fence_ = 0;                   // mod_revision of the member key; writes that compare an older one fail
  bool in_doubt_ = false;               // a write was not answered, and etcd may still do it
  bool leaving_ = false;
  int64_t members_revision_ = 0;
  std::map<uint64_t, Record> records_;  // by incarnation
  // Members that etcd lost, possibly together with this node. Their entries are used for another lease.
  std::map<uint64_t, Record> lost_;
  storage::Nanos believe_until_ = 0;  // 0: only etcd's members are used
  storage::Nanos keep_alive_at_ = 0, unanswered_since_ = 0;

  std::map<ShortDigest, Follow> follows_;
  std::map<int64_t, ShortDigest> watches_;
  int64_t last_watch_ = 0;
  uint64_t last_read_ = 0;
  int64_t page_entries_ = kPageEntries;

  size_t txn_ops_ = kTxnOps;
  bool writing_ = false;
  std::vector<DirectoryWrite> in_flight_;
  double tokens_ = 0;
  storage::Nanos filled_at_ = 0;
  storage::Nanos sweep_at_ = 0;
  int64_t erasures_revision_ = 0;
  std::vector<DirectoryShared::ToErase> erasure_;  // the erasure being written; at most one
  bool telling_erased_ = false;
  bool sweep_reading_ = false, swept_last_ = false;
  std::string sweep_from_;     // empty: start at the first entry
  uint32_t sweep_slices_ = 0;  // slices of the namespace in sweep_from_; 0: find the next namespace
  std::vector<Doomed> doomed_;
};

}  // namespace ashlar::daemon
