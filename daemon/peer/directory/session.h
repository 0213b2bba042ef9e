// SPDX-License-Identifier: Apache-2.0
// DirectorySession: an EtcdDirectory's dealings with etcd, on its thread.
//
// Joining: a token (where there is a user), all members, a lease, this node's member key under it, which is written
// again where a write of an earlier connection may still be on its way. Then a stream of
// watches, one of keep-alives, and one transaction at a time. Any failure ends the connection; the next one goes on
// from the revisions that were reached, unless etcd is not the one that it was: another cluster, an older revision or
// term, or this node's member key is not as it was written. Then namespaces are read as a whole, and this node
// registers and announces again.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
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

namespace ashlar::daemon {

// The directory's callers and its thread share this.
struct DirectoryShared {
  explicit DirectoryShared(const EtcdDirectoryOptions& options)
      : queue(options.queued_writes), mirror(options.mirror_entries) {}

  std::mutex mutex;  // of all but the mirror
  bool stopping = false;
  WriteQueue queue;
  std::map<ShortDigest, uint32_t> followed;  // and how often
  std::vector<std::shared_ptr<const Member>> members;
  DirectoryHealth health;
  DirectoryStats counted;  // what happened; sizes are taken when somebody asks
  Mirror mirror;

  struct ToErase {
    ClusterErasure erasure;
    std::function<void(const absl::Status&)> done;
  };
  std::vector<ToErase> to_erase;               // that etcd has not been told
  std::map<int64_t, ClusterErasure> erasures;  // by revision, as etcd has them
  int64_t erased = 0;                          // up to which this node has done them
};

class DirectorySession {
 public:
  static constexpr size_t kTxnOps = 128;      // etcd's default limit on the operations of a transaction
  static constexpr double kMostEvents = 2e6;  // a second that etcd sends to all nodes, if each follows everything
  // Of a namespace that is read as a whole: a page holds fewer where one takes a good part of a call's time.
  static constexpr int64_t kPageEntries = 4096, kLeastPageEntries = 64;
  static constexpr storage::Nanos kSweepPeriod = storage::Nanos{3600} * 1'000'000'000;
  static constexpr storage::Nanos kLongestBackOff = storage::Nanos{5} * 1'000'000'000;

  // `seed`: of the times after which it tries again.
  DirectorySession(const EtcdDirectoryOptions& options, std::shared_ptr<const Member> self, DirectoryEvents events,
                   const storage::Clock& clock, std::unique_ptr<EtcdClient> client, uint64_t seed,
                   DirectoryShared* shared);

  // Numbers of watches; those of namespaces follow.
  static constexpr int64_t kMemberWatch = 1, kErasureWatch = 2;

  void Run();   // until `stopping`
  void Wake();  // by any thread: something is to be looked at
  // Of Run: does what is due, after anything has called back. Returns when something is again.
  storage::Nanos Step();
  void Leave();  // the last step

  // Of the time that a call of etcd has.
  static RoundTrips::Bounds Limits(const EtcdDirectoryOptions& options);
  // Keys a second that one of so many members may write.
  static double Rate(const EtcdDirectoryOptions& options, size_t members);

 private:
  enum class Phase { kAway, kJoining, kJoined };
  struct Record {  // a member key
    std::shared_ptr<const Member> member;
    int64_t create_revision = 0;
  };
  struct Follow {
    int64_t watch = 0;     // its id; 0: none
    int64_t revision = 0;  // the mirror is as etcd was then; 0: it is to be read as a whole
    uint64_t reading = 0;  // the number of the read that goes on; 0: none
    // How far the last read has come: a connection that ends costs no more than its page. Revision 0: nowhere.
    std::string read_to;
    int64_t read_at = 0;
    uint32_t slices = 0;
    void ReadAgain() { revision = read_at = 0; }  // as a whole
  };
  struct Doomed {
    std::string key;
    uint64_t incarnation = 0;
  };

  // session.cc: joining, and what ends a connection.
  void Connect();
  void NoteTerm(const std::string& certificate);
  void Authenticated();
  void ReadMembers();
  void GotMembers(const etcdserverpb::RangeResponse& response);
  // `again`: writes the member key that there is, so that writes of an earlier connection come to nothing.
  void Register(bool again);
  void Joined();
  void KeepLease();
  void Fail(const absl::Status& status);
  void Fail(absl::string_view during, const absl::Status& status);
  void SetHealth(bool connected, const std::string& reason);
  void Note(const etcdserverpb::ResponseHeader& header);
  void PublishMembers();
  void EndBelief();
  storage::Nanos Third() const { return lease_time_ / 3; }  // of a lease

  // session_mirror.cc: watching, and reading namespaces as a whole.
  void Reconcile();  // with what is followed
  void StopWatch(Follow* follow);
  void StartWatch(const std::string& prefix, int64_t revision, int64_t id);
  void GotWatch(const etcdserverpb::WatchResponse& response);
  void GotMemberEvent(const mvccpb::Event& event);
  void GotEntryEvent(const mvccpb::Event& event);
  void PutEntry(const mvccpb::KeyValue& pair);
  // One namespace from a key on, at a revision (0: the latest), in slices (0: not known yet).
  void ReadPage(const ShortDigest& ns, uint64_t number, const std::string& from, int64_t revision, uint32_t slices);
  void FitPage(const absl::Status& status, storage::Nanos took, storage::Nanos limit);

  // session_erase.cc: what all nodes are to erase.
  void GotErasures(const etcdserverpb::RangeResponse& response);
  void GotErasureEvent(const mvccpb::Event& event);
  bool PutErasure(const mvccpb::KeyValue& pair);  // the mutex is held; false: it is none
  void TellErasures();                            // to etcd, one after another
  void TellErased();
  void RefuseErasures(const absl::Status& why);

  // session_write.cc: transactions.
  storage::Nanos Write();  // sends one, where it may; returns when to look again
  void SendQueued(size_t most);
  void WrittenQueued(const absl::Status& status, const etcdserverpb::TxnResponse& response);
  bool TooManyOps(const absl::Status& status);
  bool IsSweeper() const;
  void ReadDoomed();
  void DeleteDoomed(size_t most);
  void EndSweepPage();
  storage::Nanos FillBucket(size_t wanted);  // 0: there is enough; else when there will be

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

  etcdserverpb::ResponseHeader known_;  // of etcd, the latest
  int64_t lease_ = 0;                   // 0: none
  int64_t registered_ = 0;              // create_revision of this node's member key
  int64_t fence_ = 0;                   // its mod_revision; writes that compare another one come to nothing
  bool in_doubt_ = false;               // a write was not answered, and etcd may do it yet
  bool leaving_ = false;
  int64_t members_revision_ = 0;
  std::map<uint64_t, Record> records_;  // by incarnation
  // Where etcd lost this node, it may have lost others, too, and what they announced. They are believed for another
  // lease.
  std::map<uint64_t, Record> lost_;
  storage::Nanos believe_until_ = 0;  // 0: etcd alone is believed
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
  std::vector<DirectoryShared::ToErase> erasure_;  // that etcd is being told: at most one
  bool telling_erased_ = false;
  bool sweep_reading_ = false, swept_last_ = false;
  std::string sweep_from_;     // empty: from the first entry
  uint32_t sweep_slices_ = 0;  // of the namespace that it names; 0: the next namespace is to be found
  std::vector<Doomed> doomed_;
};

}  // namespace ashlar::daemon
