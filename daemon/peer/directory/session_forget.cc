// Of a DirectorySession: what all nodes are to forget. A forgetting is a key under a lease that nobody keeps; a node
// says in its member key up to which one it has done them.
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/peer/directory/session.h"

namespace ashlar::daemon {

void DirectorySession::GotForgettings(const etcdserverpb::RangeResponse& response) {
  forgettings_revision_ = response.header().revision();
  bool changed = false;
  {
    std::lock_guard lock(shared_.mutex);
    const std::map<int64_t, ClusterForgetting> before = std::exchange(shared_.forgettings, {});
    for (const mvccpb::KeyValue& pair : response.kvs()) PutForgetting(pair);
    changed = before != shared_.forgettings;
  }
  if (changed && events_.forgettings_changed) events_.forgettings_changed();
}

bool DirectorySession::PutForgetting(const mvccpb::KeyValue& pair) {
  const std::optional<ClusterForgetting::Id> id = keys_.ReadForgetting(pair.key());
  std::optional<ClusterForgetting> forgetting = DecodeForgetting(pair.value());
  if (!id.has_value() || !forgetting.has_value()) return false;
  forgetting->id = *id;
  forgetting->revision = pair.mod_revision();
  shared_.forgettings[pair.mod_revision()] = *std::move(forgetting);
  return true;
}

void DirectorySession::GotForgettingEvent(const mvccpb::Event& event) {
  std::lock_guard lock(shared_.mutex);
  const std::optional<ClusterForgetting::Id> id = keys_.ReadForgetting(event.kv().key());
  if (!id.has_value()) return;
  std::erase_if(shared_.forgettings, [&](const auto& one) { return one.second.id == *id; });
  if (event.type() == mvccpb::Event::PUT && !PutForgetting(event.kv())) ++shared_.counted.entries_unread;
}

void DirectorySession::TellForgettings() {
  if (!forgetting_.empty()) return;
  {
    std::lock_guard lock(shared_.mutex);
    if (shared_.to_forget.empty()) return;
    forgetting_.push_back(std::move(shared_.to_forget.front()));
    shared_.to_forget.erase(shared_.to_forget.begin());
  }
  etcdserverpb::LeaseGrantRequest grant;
  grant.set_ttl(kForgettingLifeSeconds);
  client_->LeaseGrant(grant, [this](const absl::Status& status, const auto& granted) {
    if (!status.ok()) return Fail("asking for a forgetting's lease", status);
    etcdserverpb::TxnRequest request;
    const ClusterForgetting& forgetting = forgetting_.front().forgetting;
    etcdserverpb::PutRequest* put = request.add_success()->mutable_request_put();
    put->set_key(keys_.ForgettingKey(forgetting.id));
    put->set_value(EncodeForgetting(forgetting));
    put->set_lease(granted.id());
    client_->Txn(request, [this](const absl::Status& told, const etcdserverpb::TxnResponse& response) {
      if (!told.ok()) return Fail("telling what is to be forgotten", told);
      DirectoryShared::ToForget wish = std::move(forgetting_.front());
      forgetting_.clear();
      {
        // At once, so that whoever asked finds it; the watch brings the same again.
        std::lock_guard lock(shared_.mutex);
        wish.forgetting.revision = response.header().revision();
        shared_.forgettings[wish.forgetting.revision] = wish.forgetting;
      }
      if (events_.forgettings_changed) events_.forgettings_changed();
      wish.done(absl::OkStatus());
    });
  });
}

void DirectorySession::TellForgot() {
  int64_t forgot = 0;
  {
    std::lock_guard lock(shared_.mutex);
    forgot = shared_.forgot;
  }
  // Not beside a write, which compares the member key's revision.
  if (telling_forgot_ || writing_ || forgot == self_->forgotten) return;
  Member self = *self_;
  self.forgotten = forgot;
  etcdserverpb::TxnRequest request;
  etcdserverpb::Compare* registered = request.add_compare();
  registered->set_target(etcdserverpb::Compare::CREATE);
  registered->set_key(keys_.MemberKey(self.incarnation));
  registered->set_create_revision(registered_);
  etcdserverpb::PutRequest* put = request.add_success()->mutable_request_put();
  put->set_key(keys_.MemberKey(self.incarnation));
  put->set_value(EncodeMember(self));
  put->set_lease(lease_);
  telling_forgot_ = true;
  client_->Txn(request, [this, self](const absl::Status& status, const etcdserverpb::TxnResponse& told) {
    if (!status.ok()) return Fail("telling what was forgotten", status);
    telling_forgot_ = false;
    if (!told.succeeded()) {
      lease_ = 0;
      return Fail(absl::UnavailableError("the lease had ended"));
    }
    fence_ = told.header().revision();
    self_ = std::make_shared<const Member>(self);
    records_[self.incarnation].member = self_;
    PublishMembers();
  });
}

void DirectorySession::RefuseForgettings(const absl::Status& why) {
  std::vector<DirectoryShared::ToForget> refused = std::exchange(forgetting_, {});
  {
    std::lock_guard lock(shared_.mutex);
    for (DirectoryShared::ToForget& wish : shared_.to_forget) refused.push_back(std::move(wish));
    shared_.to_forget.clear();
  }
  for (const DirectoryShared::ToForget& wish : refused) wish.done(why);
}

}  // namespace ashlar::daemon
