// SPDX-License-Identifier: Apache-2.0
// Part of DirectorySession: writes to etcd. One transaction at a time, which keeps the order of writes on an object,
// and within the node's share of the cluster's rate.
#include <algorithm>
#include <set>
#include <utility>

#include "daemon/peer/directory/directory_session.h"

namespace ashlar::daemon {
namespace {

constexpr double kNanosPerSecond = 1e9;

}  // namespace

double DirectorySession::Rate(const EtcdDirectoryOptions& options, size_t members) {
  const double nodes = static_cast<double>(std::max<size_t>(members, 1));
  const double all = std::min(static_cast<double>(options.cluster_writes_per_second), kMostEvents / nodes);
  return std::min(static_cast<double>(options.writes_per_second), all / nodes);
}

storage::Nanos DirectorySession::FillBucket(size_t wanted) {
  const double rate = Rate(options_, records_.size());
  const storage::Nanos now = clock_.Now();
  tokens_ += rate * static_cast<double>(now - filled_at_) / kNanosPerSecond;
  tokens_ = std::min(tokens_, std::max(rate, 1.0));  // at most one second's worth
  filled_at_ = now;
  // At a low rate a transaction has a quarter of a second's worth, so that the first writes need not wait for many
  // others.
  const double least = std::min(static_cast<double>(wanted), std::max(1.0, rate / 4));
  if (tokens_ >= least) return 0;
  return now + 1 + static_cast<storage::Nanos>((least - tokens_) / rate * kNanosPerSecond);
}

storage::Nanos DirectorySession::Write() {
  if (writing_ || telling_erased_) return INT64_MAX;
  const storage::Nanos sweep_at = IsSweeper() ? sweep_at_ : INT64_MAX;
  const bool sweeps = clock_.Now() >= sweep_at;
  if (sweeps && doomed_.empty() && !sweep_reading_) ReadDoomed();
  size_t queued = 0;
  {
    MutexLock lock(shared_.mutex);
    queued = shared_.queue.size();
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

void DirectorySession::SendQueued(size_t most) {
  {
    MutexLock lock(shared_.mutex);
    in_flight_ = shared_.queue.Take(most);
  }
  if (in_flight_.empty()) return;
  // The comparison refuses writes of a node that is no longer a member, because nothing would delete its entries. It
  // also refuses a delayed transaction after a later write on the same object.
  etcdserverpb::TxnRequest request;
  etcdserverpb::Compare* registered = request.add_compare();
  registered->set_target(etcdserverpb::Compare::MOD);
  registered->set_key(keys_.MemberKey(self_->incarnation));
  registered->set_mod_revision(fence_);
  for (const DirectoryWrite& write : in_flight_) {
    const std::string key = keys_.EntryKey(write.id, self_->incarnation);
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
  client_->Txn(request, [this](const absl::Status& status, const auto& response) { WrittenQueued(status, response); });
}

void DirectorySession::WrittenQueued(const absl::Status& status, const etcdserverpb::TxnResponse& response) {
  writing_ = false;
  if (status.ok() && response.succeeded()) {
    Note(response.header());
    const std::vector<DirectoryWrite> written = std::exchange(in_flight_, {});
    MutexLock lock(shared_.mutex);
    for (const DirectoryWrite& write : written) {
      ++(write.holding.has_value() ? shared_.counted.sent_announcements : shared_.counted.sent_withdrawals);
    }
    return;
  }
  if (TooManyOps(status)) {
    MutexLock lock(shared_.mutex);
    return shared_.queue.Return(std::exchange(in_flight_, {}));
  }
  if (!status.ok()) return Fail("writing", status);
  lease_ = 0;
  Fail(absl::UnavailableError("the lease has expired"));
}

// etcd is configured to accept fewer operations than by default, so the next transaction has half as many.
bool DirectorySession::TooManyOps(const absl::Status& status) {
  if (!absl::IsInvalidArgument(status) || txn_ops_ <= 1) return false;
  txn_ops_ /= 2;
  return true;
}

bool DirectorySession::IsSweeper() const {
  for (const auto& [incarnation, record] : records_) {
    if (record.create_revision < registered_) return false;
  }
  return true;
}

void DirectorySession::ReadDoomed() {
  sweep_reading_ = true;
  const std::string last_end = RangeEnd(keys_.Entries());
  const bool finds = sweep_slices_ == 0;
  const std::string end = finds ? last_end : *keys_.SliceEnd(sweep_from_, sweep_slices_);
  etcdserverpb::RangeRequest request;
  request.set_key(sweep_from_.empty() ? keys_.Entries() : sweep_from_);
  request.set_range_end(end);
  request.set_limit(page_entries_);
  request.set_keys_only(true);
  client_->Range(request, [=, this](const absl::Status& status, const auto& response) {
    if (!status.ok()) return Fail("sweeping", status);
    sweep_reading_ = false;
    std::optional<DirectoryKeys::Entry> entry;
    for (const mvccpb::KeyValue& pair : response.kvs()) {
      entry = keys_.ReadEntry(pair.key());
      if (entry.has_value() && !records_.contains(entry->incarnation)) {
        doomed_.push_back({pair.key(), entry->incarnation});
      }
    }
    const bool more = response.more() && !response.kvs().empty();
    if (more) {
      sweep_from_ = response.kvs(response.kvs_size() - 1).key() + '\0';
      if (finds) sweep_slices_ = entry.has_value() ? SlicesFor(response.count()) : 0;
    } else {
      // At the end of a namespace, searches for the next one.
      if (!finds && end == keys_.SliceEnd(sweep_from_, 1)) sweep_slices_ = 0;
      sweep_from_ = finds ? "" : end;
    }
    if (sweep_from_.empty()) sweep_at_ = INT64_MAX;  // continues after this page
    EndSweepPage();
  });
}

void DirectorySession::EndSweepPage() {
  if (doomed_.empty() && sweep_from_.empty()) sweep_at_ = std::min(sweep_at_, clock_.Now() + kSweepPeriod);
}

void DirectorySession::DeleteDoomed(size_t most) {
  etcdserverpb::TxnRequest request;
  std::set<uint64_t> absent;
  const size_t count = std::min(most, doomed_.size());
  const std::vector<Doomed> taken(doomed_.end() - static_cast<ptrdiff_t>(count), doomed_.end());
  for (const Doomed& doomed : taken) {
    request.add_success()->mutable_request_delete_range()->set_key(doomed.key);
    if (!absent.insert(doomed.incarnation).second) continue;
    etcdserverpb::Compare* compare = request.add_compare();  // it has not returned
    compare->set_target(etcdserverpb::Compare::CREATE);
    compare->set_key(keys_.MemberKey(doomed.incarnation));
    compare->set_create_revision(0);
  }
  doomed_.resize(doomed_.size() - count);
  tokens_ -= static_cast<double>(count);
  writing_ = true;
  client_->Txn(request, [this, taken](const absl::Status& status, const auto& response) {
    writing_ = false;
    if (TooManyOps(status)) {
      doomed_.insert(doomed_.end(), taken.begin(), taken.end());
      return;
    }
    if (!status.ok()) return Fail("sweeping", status);
    EndSweepPage();
    MutexLock lock(shared_.mutex);
    if (response.succeeded()) shared_.counted.swept += taken.size();
  });
}

}  // namespace ashlar::daemon
