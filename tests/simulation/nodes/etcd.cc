// SPDX-License-Identifier: Apache-2.0
#include "tests/simulation/nodes/etcd.h"

#include <algorithm>

namespace ashlar::simulation::nodes {

namespace pb = etcdserverpb;

void Etcd::Write(pb::ResponseHeader* header) const {
  header->set_cluster_id(cluster_);
  header->set_member_id(1);
  header->set_revision(revision_);
  header->set_raft_term(term_);
}

void Etcd::Stop() {
  up_ = false;
  watchers_.clear();
  for (const auto& connection : std::exchange(connections_, {})) connection->broken();
}

// Its clock starts again, and with it the time of all leases.
void Etcd::Start() {
  up_ = true;
  ++term_;
  for (auto& [id, lease] : leases_) {
    lease.ends_at = schedule_.now() + lease.ttl;
    AwaitEnd(id);
  }
}

void Etcd::Erase() {
  keys_.clear();
  changes_.clear();
  leases_.clear();
  present_ = 0;
  revision_ = 1;
  compacted_ = 0;
  term_ = 1;
  if (schedule_.Chance(50)) ++cluster_;  // it has the same configuration, so it is the same cluster
}

void Etcd::Compact() {
  ++counts_.compactions;
  compacted_ = revision_;
  std::erase_if(changes_, [this](const Change& change) { return change.revision <= compacted_; });
  for (auto at = keys_.begin(); at != keys_.end();) {
    std::vector<Version>& versions = at->second;
    versions.erase(versions.begin(), versions.end() - 1);
    at = versions.back().deleted ? keys_.erase(at) : std::next(at);
  }
}

const Etcd::Version* Etcd::Latest(const std::string& key) const {
  const auto found = keys_.find(key);
  return found == keys_.end() || found->second.back().deleted ? nullptr : &found->second.back();
}

absl::Status Etcd::Range(const pb::RangeRequest& request, pb::RangeResponse* response) const {
  Write(response->mutable_header());
  if (request.revision() > 0 && request.revision() < compacted_) return absl::OutOfRangeError("compacted");
  if (request.revision() > revision_) return absl::OutOfRangeError("a future revision");
  const int64_t at_revision = request.revision() > 0 ? request.revision() : revision_;
  const auto begin = keys_.lower_bound(request.key());
  const auto end =
      request.range_end().empty() ? keys_.upper_bound(request.key()) : keys_.lower_bound(request.range_end());
  int64_t count = 0;
  for (auto at = begin; at != end; ++at) {
    const auto behind = std::ranges::upper_bound(at->second, at_revision, {}, &Version::mod);
    if (behind == at->second.begin() || std::prev(behind)->deleted) continue;
    const Version& version = *std::prev(behind);
    if (++count > request.limit() && request.limit() > 0) continue;
    mvccpb::KeyValue* const pair = response->add_kvs();
    pair->set_key(at->first);
    pair->set_create_revision(version.create);
    pair->set_mod_revision(version.mod);
    pair->set_version(version.version);
    pair->set_lease(version.lease);
    if (!request.keys_only()) pair->set_value(version.value);
  }
  response->set_count(count);
  response->set_more(request.limit() > 0 && count > request.limit());
  return absl::OkStatus();
}

void Etcd::Put(const std::string& key, const std::string& value, int64_t lease) {
  ++counts_.written;
  const Version* const before = Latest(key);
  Version version{.mod = revision_ + 1,
                  .create = before == nullptr ? revision_ + 1 : before->create,
                  .version = before == nullptr ? 1 : before->version + 1,
                  .lease = lease,
                  .value = value};
  mvccpb::Event& event = pending_.emplace_back();
  event.set_type(mvccpb::Event::PUT);
  event.mutable_kv()->set_key(key);
  event.mutable_kv()->set_value(value);
  event.mutable_kv()->set_create_revision(version.create);
  event.mutable_kv()->set_mod_revision(version.mod);
  event.mutable_kv()->set_version(version.version);
  event.mutable_kv()->set_lease(lease);
  present_ += before == nullptr ? 1 : 0;
  keys_[key].push_back(std::move(version));
}

int64_t Etcd::Delete(const std::string& key, const std::string& end) {
  int64_t deleted = 0;
  const auto last = end.empty() ? keys_.upper_bound(key) : keys_.lower_bound(end);
  for (auto at = keys_.lower_bound(key); at != last; ++at) {
    if (at->second.back().deleted) continue;
    ++deleted;
    --present_;
    ++counts_.written;
    at->second.push_back({.mod = revision_ + 1, .deleted = true});
    mvccpb::Event& event = pending_.emplace_back();
    event.set_type(mvccpb::Event::DELETE);
    event.mutable_kv()->set_key(at->first);
    event.mutable_kv()->set_mod_revision(revision_ + 1);
  }
  return deleted;
}

void Etcd::Commit() {
  if (pending_.empty()) return;
  ++revision_;
  for (mvccpb::Event& event : pending_) changes_.push_back({revision_, std::move(event)});
  pending_.clear();
  for (Watcher& watcher : watchers_) Notify(watcher);
}

absl::Status Etcd::Txn(const pb::TxnRequest& request, pb::TxnResponse* response) {
  ++counts_.transactions;
  bool succeeds = true;
  for (const pb::Compare& compare : request.compare()) {
    const Version* const version = Latest(compare.key());
    succeeds &= compare.target() == pb::Compare::MOD
                    ? compare.mod_revision() == (version == nullptr ? 0 : version->mod)
                    : compare.create_revision() == (version == nullptr ? 0 : version->create);
  }
  response->set_succeeded(succeeds);
  counts_.refused += succeeds ? 0 : 1;
  const auto& operations = succeeds ? request.success() : request.failure();
  if (bug_ == Bug::kLosesTransactions && operations.size() > 2 && schedule_.Chance(25)) {
    Write(response->mutable_header());
    return absl::OkStatus();
  }
  for (const pb::RequestOp& operation : operations) {
    if (operation.has_request_put()) {
      const pb::PutRequest& put = operation.request_put();
      if (put.lease() != 0 && !leases_.contains(put.lease())) {
        pending_.clear();  // a put with a lease that is gone is the first one of its transaction
        return absl::NotFoundError("etcdserver: requested lease not found");
      }
      Put(put.key(), put.value(), put.lease());
    } else if (operation.has_request_delete_range()) {
      const pb::DeleteRangeRequest& range = operation.request_delete_range();
      if (bug_ != Bug::kKeepsDeletedKeys || !schedule_.Chance(25)) Delete(range.key(), range.range_end());
    }
  }
  Commit();
  for (const pb::RequestOp& operation : operations) {
    pb::ResponseOp* const answer = response->add_responses();
    if (operation.has_request_range()) {
      if (const absl::Status s = Range(operation.request_range(), answer->mutable_response_range()); !s.ok()) return s;
    } else if (operation.has_request_put()) {
      answer->mutable_response_put();
    } else {
      answer->mutable_response_delete_range();
    }
  }
  Write(response->mutable_header());
  return absl::OkStatus();
}

void Etcd::LeaseGrant(const pb::LeaseGrantRequest& request, pb::LeaseGrantResponse* response) {
  const int64_t id = ++drawn_lease_;
  const Nanos ttl = request.ttl() * kSecond;
  leases_[id] = {.ttl = ttl, .ends_at = schedule_.now() + ttl};
  AwaitEnd(id);
  Write(response->mutable_header());
  response->set_id(id);
  response->set_ttl(request.ttl());
}

void Etcd::AwaitEnd(int64_t id) {
  const auto lease = leases_.find(id);
  if (lease == leases_.end() || bug_ == Bug::kNeverEndsLeases) return;
  // A tenth of a second late, because etcd checks periodically.
  schedule_.After(lease->second.ends_at - schedule_.now() + kSecond / 10, [this, id] {
    const auto found = leases_.find(id);
    if (!up_ || found == leases_.end()) return;
    if (found->second.ends_at <= schedule_.now()) return Expire(id);
    AwaitEnd(id);
  });
}

void Etcd::Expire(int64_t id) {
  ++counts_.expired;
  LeaseRevoke(id);
}

void Etcd::LeaseRevoke(int64_t id) {
  if (leases_.erase(id) == 0) return;
  std::vector<std::string> under;
  for (const auto& [key, versions] : keys_) {
    if (!versions.back().deleted && versions.back().lease == id) under.push_back(key);
  }
  for (const std::string& key : under) Delete(key, "");
  Commit();
}

pb::LeaseKeepAliveResponse Etcd::KeepAlive(int64_t id) {
  ++counts_.keep_alives;
  pb::LeaseKeepAliveResponse response;
  Write(response.mutable_header());
  response.set_id(id);
  const auto lease = leases_.find(id);
  if (lease == leases_.end()) return response;
  // A lease that is checked after its end is not extended.
  lease->second.ends_at = schedule_.now() + lease->second.ttl;
  response.set_ttl(lease->second.ttl / kSecond);
  return response;
}

void Etcd::Watch(const std::shared_ptr<EtcdConnection>& connection, const pb::WatchRequest& request) {
  pb::WatchResponse response;
  Write(response.mutable_header());
  if (request.has_cancel_request()) {
    const int64_t id = request.cancel_request().watch_id();
    std::erase_if(watchers_, [&](const Watcher& each) { return each.connection == connection && each.id == id; });
    response.set_watch_id(id);
    response.set_canceled(true);
    return connection->watched(std::move(response));
  }
  const pb::WatchCreateRequest& create = request.create_request();
  response.set_watch_id(create.watch_id());
  response.set_created(true);
  connection->watched(response);
  if (create.start_revision() <= compacted_) {
    response.set_created(false);
    response.set_canceled(true);
    response.set_compact_revision(compacted_ + 1);
    return connection->watched(std::move(response));
  }
  Watcher watcher{connection, create.watch_id(), create.key(), create.range_end(), create.start_revision()};
  Notify(watcher);
  watchers_.push_back(std::move(watcher));
}

void Etcd::Notify(Watcher& watcher) {
  pb::WatchResponse response;
  const auto first = std::ranges::lower_bound(changes_, watcher.next, {}, &Change::revision);
  for (auto change = first; change != changes_.end(); ++change) {
    const std::string& key = change->event.kv().key();
    if (key < watcher.key || key >= watcher.end) continue;
    if (bug_ == Bug::kLosesWatchEvents && schedule_.Chance(5)) continue;
    *response.add_events() = change->event;
  }
  watcher.next = revision_ + 1;
  if (response.events().empty()) return;
  Write(response.mutable_header());
  response.set_watch_id(watcher.id);
  counts_.events += static_cast<uint64_t>(response.events_size());
  counts_.event_bytes += response.ByteSizeLong();
  watcher.connection->watched(std::move(response));
}

std::vector<std::string> Etcd::Keys() const {
  std::vector<std::string> keys;
  for (const auto& [key, versions] : keys_) {
    if (!versions.back().deleted) keys.push_back(key);
  }
  return keys;
}

}  // namespace ashlar::simulation::nodes
