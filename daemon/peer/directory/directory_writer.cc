// SPDX-License-Identifier: Apache-2.0
#include "daemon/peer/directory/directory_writer.h"

#include <algorithm>
#include <set>
#include <utility>

namespace ashlar::daemon {
namespace {

constexpr double kNanosPerSecond = 1e9;

}  // namespace

double DirectoryWriter::Rate(const EtcdDirectoryOptions& options, size_t members) {
  const double nodes = static_cast<double>(std::max<size_t>(members, 1));
  const double all = std::min(static_cast<double>(options.cluster_writes_per_second), kMostEvents / nodes);
  return std::min(static_cast<double>(options.writes_per_second), all / nodes);
}

storage::Nanos DirectoryWriter::FillBucket(size_t wanted) {
  const double rate = Rate(connection_.options, connection_.membership.records.size());
  const storage::Nanos now = connection_.clock.Now();
  tokens_ += rate * static_cast<double>(now - filled_at_) / kNanosPerSecond;
  tokens_ = std::min(tokens_, std::max(rate, 1.0));  // at most one second's worth
  filled_at_ = now;
  // At a low rate a transaction has a quarter of a second's worth, so that the first writes need not wait for many
  // others.
  const double least = std::min(static_cast<double>(wanted), std::max(1.0, rate / 4));
  if (tokens_ >= least) return 0;
  return now + 1 + static_cast<storage::Nanos>((least - tokens_) / rate * kNanosPerSecond);
}

storage::Nanos DirectoryWriter::Write() {
  if (writing_) return INT64_MAX;
  const storage::Nanos sweep_at = connection_.membership.IsOldest() ? sweep_at_ : INT64_MAX;
  const bool sweeps = connection_.clock.Now() >= sweep_at;
  if (sweeps && doomed_.empty() && !sweep_reading_) ReadDoomed();
  size_t queued = 0;
  {
    MutexLock lock(connection_.shared.mutex);
    queued = connection_.shared.queue.size();
  }
  const size_t wanted = std::min(txn_ops_, queued + doomed_.size());
  if (wanted == 0) return sweeps ? INT64_MAX : sweep_at;  // a page of the sweep calls back
  if (const storage::Nanos at = FillBucket(wanted); at > 0) return at;
  const size_t most = std::min(txn_ops_, static_cast<size_t>(tokens_));
  // Alternates if there are both.
  if (!doomed_.empty() && (queued == 0 || !std::exchange(swept_last_, true))) {
    DeleteDoomed(most);
  } else {
    swept_last_ = false;
    SendQueued(most);
  }
  return INT64_MAX;
}

void DirectoryWriter::SendQueued(size_t most) {
  {
    MutexLock lock(connection_.shared.mutex);
    in_flight_ = connection_.shared.queue.Take(most);
  }
  if (in_flight_.empty()) return;
  // The comparison refuses writes of a node that is no longer a member, because nothing would delete its entries. It
  // also refuses a delayed transaction after a later write on the same object.
  etcdserverpb::TxnRequest request;
  etcdserverpb::Compare* registered = request.add_compare();
  registered->set_target(etcdserverpb::Compare::MOD);
  registered->set_key(connection_.keys.MemberKey(connection_.membership.self->incarnation));
  registered->set_mod_revision(connection_.membership.fence);
  for (const DirectoryWrite& write : in_flight_) {
    const std::string key = connection_.keys.EntryKey(write.id, connection_.membership.self->incarnation);
    if (write.holding.has_value()) {
      etcdserverpb::PutRequest* put = request.add_success()->mutable_request_put();
      put->set_key(key);
      put->set_value(EncodeHolding(*write.holding));
    } else {
      request.add_success()->mutable_request_delete_range()->set_key(key);
    }
  }
  tokens_ -= static_cast<double>(in_flight_.size());
  writing_ = true;
  connection_.client->Txn(
      request, [this](const absl::Status& status, const auto& response) { WrittenQueued(status, response); });
}

void DirectoryWriter::WrittenQueued(const absl::Status& status, const etcdserverpb::TxnResponse& response) {
  writing_ = false;
  if (status.ok() && response.succeeded()) {
    connection_.Note(response.header());
    const std::vector<DirectoryWrite> written = std::exchange(in_flight_, {});
    MutexLock lock(connection_.shared.mutex);
    for (const DirectoryWrite& write : written) {
      ++(write.holding.has_value() ? connection_.shared.counted.sent_announcements
                                   : connection_.shared.counted.sent_withdrawals);
    }
    return;
  }
  if (TooManyOps(status)) {
    MutexLock lock(connection_.shared.mutex);
    return connection_.shared.queue.Return(std::exchange(in_flight_, {}));
  }
  if (!status.ok()) return connection_.Fail("cannot write", status);
  connection_.LeaseExpired();
}

// etcd is configured to accept fewer operations than by default, so the next transaction has half as many.
bool DirectoryWriter::TooManyOps(const absl::Status& status) {
  if (!absl::IsInvalidArgument(status) || txn_ops_ <= 1) return false;
  txn_ops_ /= 2;
  return true;
}

void DirectoryWriter::ReadDoomed() {
  sweep_reading_ = true;
  const std::string last_end = RangeEnd(connection_.keys.Entries());
  const bool finds = sweep_slices_ == 0;
  const std::string end = finds ? last_end : *connection_.keys.SliceEnd(sweep_from_, sweep_slices_);
  etcdserverpb::RangeRequest request;
  request.set_key(sweep_from_.empty() ? connection_.keys.Entries() : sweep_from_);
  request.set_range_end(end);
  request.set_limit(connection_.page_entries);
  request.set_keys_only(true);
  connection_.client->Range(request, [=, this](const absl::Status& status, const auto& response) {
    if (!status.ok()) return connection_.Fail("cannot delete stale keys", status);
    sweep_reading_ = false;
    std::optional<DirectoryKeys::Entry> entry;
    for (const mvccpb::KeyValue& pair : response.kvs()) {
      entry = connection_.keys.ReadEntry(pair.key());
      if (entry.has_value() && !connection_.membership.records.contains(entry->incarnation)) {
        doomed_.push_back({pair.key(), entry->incarnation});
      }
    }
    const bool more = response.more() && !response.kvs().empty();
    if (more) {
      sweep_from_ = response.kvs(response.kvs_size() - 1).key() + '\0';
      if (finds) sweep_slices_ = entry.has_value() ? SlicesFor(response.count()) : 0;
    } else {
      // At the end of a namespace, searches for the next one.
      if (!finds && end == connection_.keys.SliceEnd(sweep_from_, 1)) sweep_slices_ = 0;
      sweep_from_ = finds ? "" : end;
    }
    if (sweep_from_.empty()) sweep_at_ = INT64_MAX;  // continues after this page
    EndSweepPage();
  });
}

void DirectoryWriter::EndSweepPage() {
  if (doomed_.empty() && sweep_from_.empty()) sweep_at_ = std::min(sweep_at_, connection_.clock.Now() + kSweepPeriod);
}

void DirectoryWriter::DeleteDoomed(size_t most) {
  etcdserverpb::TxnRequest request;
  std::set<uint64_t> absent;
  const size_t count = std::min(most, doomed_.size());
  const std::vector<Doomed> taken(doomed_.end() - static_cast<ptrdiff_t>(count), doomed_.end());
  for (const Doomed& doomed : taken) {
    request.add_success()->mutable_request_delete_range()->set_key(doomed.key);
    if (!absent.insert(doomed.incarnation).second) continue;
    etcdserverpb::Compare* compare = request.add_compare();  // it has not returned
    compare->set_target(etcdserverpb::Compare::CREATE);
    compare->set_key(connection_.keys.MemberKey(doomed.incarnation));
    compare->set_create_revision(0);
  }
  doomed_.resize(doomed_.size() - count);
  tokens_ -= static_cast<double>(count);
  writing_ = true;
  connection_.client->Txn(request, [this, taken](const absl::Status& status, const auto& response) {
    writing_ = false;
    if (TooManyOps(status)) {
      doomed_.insert(doomed_.end(), taken.begin(), taken.end());
      return;
    }
    if (!status.ok()) return connection_.Fail("cannot delete stale keys", status);
    EndSweepPage();
    MutexLock lock(connection_.shared.mutex);
    if (response.succeeded()) connection_.shared.counted.swept += taken.size();
  });
}

bool DirectoryWriter::Disconnected() {
  writing_ = sweep_reading_ = false;
  doomed_.clear();
  sweep_from_.clear();
  sweep_slices_ = 0;
  const std::vector<DirectoryWrite> unanswered = std::exchange(in_flight_, {});
  MutexLock lock(connection_.shared.mutex);
  connection_.shared.queue.Return(unanswered);
  return !unanswered.empty();
}

}  // namespace ashlar::daemon
