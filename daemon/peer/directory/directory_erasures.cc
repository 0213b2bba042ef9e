// SPDX-License-Identifier: Apache-2.0
#include "daemon/peer/directory/directory_erasures.h"

#include <map>
#include <memory>
#include <optional>
#include <utility>

namespace ashlar::daemon {

void DirectoryErasures::Replace(const etcdserverpb::RangeResponse& response) {
  revision_ = response.header().revision();
  bool changed = false;
  {
    MutexLock lock(connection_.shared.mutex);
    const std::map<int64_t, ClusterErasure> before = std::exchange(connection_.shared.erasures, {});
    for (const mvccpb::KeyValue& pair : response.kvs()) Put(pair);
    changed = before != connection_.shared.erasures;
  }
  if (changed && connection_.events.erasures_changed) connection_.events.erasures_changed();
}

bool DirectoryErasures::Put(const mvccpb::KeyValue& pair) {
  const std::optional<ClusterErasure::Id> id = connection_.keys.ReadErasure(pair.key());
  std::optional<ClusterErasure> erasure = DecodeErasure(pair.value());
  if (!id.has_value() || !erasure.has_value()) return false;
  erasure->id = *id;
  erasure->revision = pair.mod_revision();
  connection_.shared.erasures[pair.mod_revision()] = *std::move(erasure);
  return true;
}

void DirectoryErasures::Got(const etcdserverpb::WatchResponse& response) {
  if (response.events().empty()) return;
  {
    MutexLock lock(connection_.shared.mutex);
    for (const mvccpb::Event& event : response.events()) {
      const std::optional<ClusterErasure::Id> id = connection_.keys.ReadErasure(event.kv().key());
      if (!id.has_value()) continue;
      std::erase_if(connection_.shared.erasures, [&](const auto& one) { return one.second.id == *id; });
      if (event.type() == mvccpb::Event::PUT && !Put(event.kv())) ++connection_.shared.counted.entries_unread;
    }
  }
  if (connection_.events.erasures_changed) connection_.events.erasures_changed();
}

void DirectoryErasures::WriteQueued() {
  if (!writing_.empty()) return;
  {
    MutexLock lock(connection_.shared.mutex);
    if (connection_.shared.to_erase.empty()) return;
    writing_.push_back(std::move(connection_.shared.to_erase.front()));
    connection_.shared.to_erase.erase(connection_.shared.to_erase.begin());
  }
  etcdserverpb::LeaseGrantRequest grant;
  grant.set_ttl(kErasureLifeSeconds);
  connection_.client->LeaseGrant(grant, [this](const absl::Status& status, const auto& granted) {
    if (!status.ok()) return connection_.Fail("cannot get a lease for an erasure", status);
    etcdserverpb::TxnRequest request;
    const ClusterErasure& erasure = writing_.front().erasure;
    etcdserverpb::PutRequest* put = request.add_success()->mutable_request_put();
    put->set_key(connection_.keys.ErasureKey(erasure.id));
    put->set_value(EncodeErasure(erasure));
    put->set_lease(granted.id());
    connection_.client->Txn(request, [this](const absl::Status& told, const etcdserverpb::TxnResponse& response) {
      if (!told.ok()) return connection_.Fail("cannot record an erasure", told);
      DirectoryShared::ToErase wish = std::move(writing_.front());
      writing_.clear();
      {
        // Stored immediately, so that the requester finds it; the watch delivers the same again.
        MutexLock lock(connection_.shared.mutex);
        wish.erasure.revision = response.header().revision();
        connection_.shared.erasures[wish.erasure.revision] = wish.erasure;
      }
      if (connection_.events.erasures_changed) connection_.events.erasures_changed();
      wish.done(absl::OkStatus());
    });
  });
}

void DirectoryErasures::Acknowledge() {
  int64_t erased = 0;
  {
    MutexLock lock(connection_.shared.mutex);
    erased = connection_.shared.erased;
  }
  if (acknowledging_ || erased == connection_.membership.self->erased) return;
  Member self = *connection_.membership.self;
  self.erased = erased;
  etcdserverpb::TxnRequest request;
  etcdserverpb::Compare* registered = request.add_compare();
  registered->set_target(etcdserverpb::Compare::CREATE);
  registered->set_key(connection_.keys.MemberKey(self.incarnation));
  registered->set_create_revision(connection_.membership.registered);
  etcdserverpb::PutRequest* put = request.add_success()->mutable_request_put();
  put->set_key(connection_.keys.MemberKey(self.incarnation));
  put->set_value(EncodeMember(self));
  put->set_lease(connection_.membership.lease);
  acknowledging_ = true;
  connection_.client->Txn(request, [this, self](const absl::Status& status, const etcdserverpb::TxnResponse& told) {
    if (!status.ok()) return connection_.Fail("cannot acknowledge an erasure", status);
    acknowledging_ = false;
    if (!told.succeeded()) return connection_.LeaseExpired();
    connection_.membership.fence = told.header().revision();
    connection_.membership.self = std::make_shared<const Member>(self);
    connection_.membership.records[self.incarnation].member = connection_.membership.self;
    acknowledged_();
  });
}

void DirectoryErasures::Refuse(const absl::Status& why) {
  std::vector<DirectoryShared::ToErase> refused = std::exchange(writing_, {});
  {
    MutexLock lock(connection_.shared.mutex);
    for (DirectoryShared::ToErase& wish : connection_.shared.to_erase) refused.push_back(std::move(wish));
    connection_.shared.to_erase.clear();
  }
  for (const DirectoryShared::ToErase& wish : refused) wish.done(why);
}

}  // namespace ashlar::daemon
