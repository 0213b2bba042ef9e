// SPDX-License-Identifier: Apache-2.0
// Part of DirectorySession: erasures for all nodes. An erasure is a key under a lease that is not renewed; each node
// writes into its member key up to which one it has completed them.
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/peer/directory/directory_session.h"

namespace ashlar::daemon {

void DirectorySession::GotErasures(const etcdserverpb::RangeResponse& response) {
  erasures_revision_ = response.header().revision();
  bool changed = false;
  {
    MutexLock lock(shared_.mutex);
    const std::map<int64_t, ClusterErasure> before = std::exchange(shared_.erasures, {});
    for (const mvccpb::KeyValue& pair : response.kvs()) PutErasure(pair);
    changed = before != shared_.erasures;
  }
  if (changed && events_.erasures_changed) events_.erasures_changed();
}

bool DirectorySession::PutErasure(const mvccpb::KeyValue& pair) {
  const std::optional<ClusterErasure::Id> id = keys_.ReadErasure(pair.key());
  std::optional<ClusterErasure> erasure = DecodeErasure(pair.value());
  if (!id.has_value() || !erasure.has_value()) return false;
  erasure->id = *id;
  erasure->revision = pair.mod_revision();
  shared_.erasures[pair.mod_revision()] = *std::move(erasure);
  return true;
}

void DirectorySession::GotErasureEvent(const mvccpb::Event& event) {
  MutexLock lock(shared_.mutex);
  const std::optional<ClusterErasure::Id> id = keys_.ReadErasure(event.kv().key());
  if (!id.has_value()) return;
  std::erase_if(shared_.erasures, [&](const auto& one) { return one.second.id == *id; });
  if (event.type() == mvccpb::Event::PUT && !PutErasure(event.kv())) ++shared_.counted.entries_unread;
}

void DirectorySession::TellErasures() {
  if (!erasure_.empty()) return;
  {
    MutexLock lock(shared_.mutex);
    if (shared_.to_erase.empty()) return;
    erasure_.push_back(std::move(shared_.to_erase.front()));
    shared_.to_erase.erase(shared_.to_erase.begin());
  }
  etcdserverpb::LeaseGrantRequest grant;
  grant.set_ttl(kErasureLifeSeconds);
  client_->LeaseGrant(grant, [this](const absl::Status& status, const auto& granted) {
    if (!status.ok()) return Fail("cannot get a lease for an erasure", status);
    etcdserverpb::TxnRequest request;
    const ClusterErasure& erasure = erasure_.front().erasure;
    etcdserverpb::PutRequest* put = request.add_success()->mutable_request_put();
    put->set_key(keys_.ErasureKey(erasure.id));
    put->set_value(EncodeErasure(erasure));
    put->set_lease(granted.id());
    client_->Txn(request, [this](const absl::Status& told, const etcdserverpb::TxnResponse& response) {
      if (!told.ok()) return Fail("cannot record an erasure", told);
      DirectoryShared::ToErase wish = std::move(erasure_.front());
      erasure_.clear();
      {
        // Stored immediately, so that the requester finds it; the watch delivers the same again.
        MutexLock lock(shared_.mutex);
        wish.erasure.revision = response.header().revision();
        shared_.erasures[wish.erasure.revision] = wish.erasure;
      }
      if (events_.erasures_changed) events_.erasures_changed();
      wish.done(absl::OkStatus());
    });
  });
}

void DirectorySession::TellErased() {
  int64_t erased = 0;
  {
    MutexLock lock(shared_.mutex);
    erased = shared_.erased;
  }
  // Not during a write, which compares the revision of the member key.
  if (telling_erased_ || writing_ || erased == self_->erased) return;
  Member self = *self_;
  self.erased = erased;
  etcdserverpb::TxnRequest request;
  etcdserverpb::Compare* registered = request.add_compare();
  registered->set_target(etcdserverpb::Compare::CREATE);
  registered->set_key(keys_.MemberKey(self.incarnation));
  registered->set_create_revision(registered_);
  etcdserverpb::PutRequest* put = request.add_success()->mutable_request_put();
  put->set_key(keys_.MemberKey(self.incarnation));
  put->set_value(EncodeMember(self));
  put->set_lease(lease_);
  telling_erased_ = true;
  client_->Txn(request, [this, self](const absl::Status& status, const etcdserverpb::TxnResponse& told) {
    if (!status.ok()) return Fail("cannot acknowledge an erasure", status);
    telling_erased_ = false;
    if (!told.succeeded()) {
      lease_ = 0;
      return Fail(absl::UnavailableError("the lease has expired"));
    }
    fence_ = told.header().revision();
    self_ = std::make_shared<const Member>(self);
    records_[self.incarnation].member = self_;
    PublishMembers();
  });
}

void DirectorySession::RefuseErasures(const absl::Status& why) {
  std::vector<DirectoryShared::ToErase> refused = std::exchange(erasure_, {});
  {
    MutexLock lock(shared_.mutex);
    for (DirectoryShared::ToErase& wish : shared_.to_erase) refused.push_back(std::move(wish));
    shared_.to_erase.clear();
  }
  for (const DirectoryShared::ToErase& wish : refused) wish.done(why);
}

}  // namespace ashlar::daemon
