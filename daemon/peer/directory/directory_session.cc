// SPDX-License-Identifier: Apache-2.0
#include "daemon/peer/directory/directory_session.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "daemon/security/certificate.h"
#include "proto/invalid.h"
#include "proto/regular_file.h"

namespace ashlar::daemon {
namespace {

constexpr storage::Nanos kSecond = 1'000'000'000;
constexpr storage::Nanos kFirstBackOff = kSecond / 10;
constexpr storage::Nanos kLongestCall = 5 * kSecond;  // or a lease if that is longer
constexpr storage::Nanos kLeaveTimeout = kSecond;

// An empty path means no file; an empty file is an error.
absl::StatusOr<std::string> ReadFile(absl::string_view field, const std::string& path) {
  if (path.empty()) return std::string();
  absl::StatusOr<std::string> text = ReadRegularFile(absl::StrCat("cluster.etcd.", field), path, kMaxConfigFileBytes);
  if (text.ok() && text->empty()) return Invalid("cluster.etcd.", field, ": ", path, " is empty");
  return text;
}

absl::StatusOr<EtcdTls> ReadTls(const EtcdDirectoryOptions& options) {
  EtcdTls tls;
  const std::tuple<absl::string_view, const std::string&, std::string*> files[] = {
      {"ca_file", options.ca_file, &tls.authority},
      {"cert_file", options.cert_file, &tls.certificate},
      {"key_file", options.key_file, &tls.key}};
  for (const auto& [field, path, text] : files) {
    absl::StatusOr<std::string> read = ReadFile(field, path);
    if (!read.ok()) return read.status();
    *text = *std::move(read);
  }
  return tls;
}

}  // namespace

DirectorySession::DirectorySession(const EtcdDirectoryOptions& options, std::shared_ptr<const Member> self,
                                   DirectoryEvents events, const storage::Clock& clock,
                                   std::unique_ptr<EtcdClient> client, uint64_t seed, DirectoryShared* shared)
    : options_(options),
      keys_(options.prefix, options.cluster),
      self_(std::move(self)),
      events_(std::move(events)),
      clock_(clock),
      lease_time_(options.lease_seconds * kSecond),
      shared_(*shared),
      random_(seed),
      client_(std::move(client)) {
  last_watch_ = kErasureWatch;
  filled_at_ = clock.Now();
}

RoundTrips::Bounds DirectorySession::Limits(const EtcdDirectoryOptions& options) {
  const storage::Nanos lease = options.lease_seconds * kSecond;
  return {std::max(kSecond, lease / 3), std::max(kLongestCall, lease)};
}

void DirectorySession::Wake() {
  client_->Wake();
}

void DirectorySession::Run() {
  for (;;) {
    {
      MutexLock lock(shared_.mutex);
      if (shared_.stopping) break;
    }
    client_->Poll(Step());
  }
  Leave();
}

storage::Nanos DirectorySession::Step() {
  if (phase_ == Phase::kAway) {
    if (clock_.Now() < retry_at_) return retry_at_;
    Connect();
  }
  if (phase_ == Phase::kJoined) KeepLease();
  if (phase_ == Phase::kJoined && believe_until_ > 0 && clock_.Now() >= believe_until_) EndBelief();
  if (phase_ == Phase::kJoined) Reconcile();
  if (phase_ == Phase::kJoined) TellErasures();
  if (phase_ == Phase::kJoined) TellErased();
  if (phase_ == Phase::kJoined) {
    const storage::Nanos write_at = Write();
    return std::min({write_at, believe_until_ > 0 ? believe_until_ : INT64_MAX, keep_alive_at_,
                     unanswered_since_ > 0 ? unanswered_since_ + client_->Limit() : INT64_MAX});
  }
  // While it joins, the call's deadline ends the wait.
  return phase_ == Phase::kAway ? retry_at_ : INT64_MAX;
}

void DirectorySession::Connect() {
  phase_ = Phase::kJoining;
  const absl::StatusOr<EtcdTls> tls = ReadTls(options_);
  if (!tls.ok()) return Fail(tls.status());
  const absl::StatusOr<std::string> password = ReadFile("password_file", options_.password_file);
  if (!password.ok()) return Fail(password.status());
  NoteTerm(tls->certificate);
  client_->Connect(options_.endpoints[endpoint_], *tls);
  if (options_.user.empty()) return Authenticated();
  etcdserverpb::AuthenticateRequest request;
  request.set_name(options_.user);
  request.set_password(password->substr(0, password->find_first_of("\r\n")));
  client_->Authenticate(request, [this](const absl::Status& status, const auto& response) {
    if (!status.ok()) return Fail("authenticating", status);
    client_->set_token(response.token());
    Authenticated();
  });
}

void DirectorySession::NoteTerm(const std::string& certificate) {
  const CertificateTerm term = certificate.empty() ? CertificateTerm() : TermOf(certificate);
  if (term.ends == 0 && !certificate.empty()) return;  // possibly incomplete
  MutexLock lock(shared_.mutex);
  shared_.counted.certificate_expiry = term.ends;
  shared_.counted.certificate_seconds = term.seconds;
}

// Erasures come first, so that a registered node knows all earlier ones.
void DirectorySession::Authenticated() {
  etcdserverpb::RangeRequest request;
  request.set_key(keys_.Erasures());
  request.set_range_end(RangeEnd(keys_.Erasures()));
  client_->Range(request, [this](const absl::Status& status, const auto& response) {
    if (!status.ok()) return Fail("cannot read erasures", status);
    GotErasures(response);
    ReadMembers();
  });
}

void DirectorySession::ReadMembers() {
  etcdserverpb::RangeRequest request;
  request.set_key(keys_.Members());
  request.set_range_end(RangeEnd(keys_.Members()));
  client_->Range(request, [this](const absl::Status& status, const auto& response) {
    if (!status.ok()) return Fail("cannot read members", status);
    GotMembers(response);
  });
}

void DirectorySession::GotMembers(const etcdserverpb::RangeResponse& response) {
  const etcdserverpb::ResponseHeader& now = response.header();
  const bool same = now.cluster_id() == known_.cluster_id() && now.raft_term() >= known_.raft_term() &&
                    now.revision() >= known_.revision();
  known_ = now;
  members_revision_ = now.revision();
  std::map<uint64_t, Record> before = std::exchange(records_, {});
  for (const mvccpb::KeyValue& pair : response.kvs()) {
    const std::optional<uint64_t> incarnation = keys_.ReadMember(pair.key());
    if (!incarnation.has_value()) continue;
    std::optional<Member> member = DecodeMember(pair.value(), *incarnation);
    if (!member.has_value()) continue;
    records_[*incarnation] = {std::make_shared<const Member>(*std::move(member)), pair.create_revision()};
  }
  const auto own = records_.find(self_->incarnation);
  const bool registered = own != records_.end() && own->second.create_revision == registered_;
  sweep_at_ = clock_.Now() + lease_time_;  // others that lost their connection also return before then
  if (same && lease_ != 0 && registered) return in_doubt_ ? Register(/*again=*/true) : Joined();
  if (registered_ != 0) {
    lost_.merge(before);
    lost_.erase(self_->incarnation);
    believe_until_ = clock_.Now() + lease_time_;
  }
  lease_ = 0;
  for (auto& [ns, follow] : follows_) follow.ReadAgain();
  etcdserverpb::LeaseGrantRequest grant;
  grant.set_ttl(options_.lease_seconds);
  client_->LeaseGrant(grant, [this](const absl::Status& status, const auto& granted) {
    if (!status.ok()) return Fail("cannot get a lease", status);
    lease_ = granted.id();
    Register(/*again=*/false);
  });
}

void DirectorySession::Register(bool again) {
  etcdserverpb::TxnRequest request;
  const std::string key = keys_.MemberKey(self_->incarnation);
  if (again) {
    etcdserverpb::Compare* registered = request.add_compare();
    registered->set_target(etcdserverpb::Compare::CREATE);
    registered->set_key(key);
    registered->set_create_revision(registered_);
  }
  etcdserverpb::PutRequest* put = request.add_success()->mutable_request_put();
  put->set_key(key);
  // It may be another etcd, whose state is unknown: everything is written again.
  Member self = *self_;
  if (!again) self.erased = 0;
  self_ = std::make_shared<const Member>(std::move(self));
  put->set_value(EncodeMember(*self_));
  put->set_lease(lease_);
  request.add_success()->mutable_request_range()->set_key(key);
  client_->Txn(request, [=, this](const absl::Status& status, const etcdserverpb::TxnResponse& response) {
    if (status.ok() && !response.succeeded()) {
      lease_ = 0;
      return Fail(absl::UnavailableError("the lease has expired"));
    }
    if (status.ok() && (response.responses_size() != 2 || response.responses(1).response_range().kvs().empty())) {
      return Fail(absl::InternalError("cannot register: unexpected reply"));
    }
    if (!status.ok()) {
      if (!again || absl::IsNotFound(status)) lease_ = 0;
      return Fail("registering", status);
    }
    const mvccpb::KeyValue& member = response.responses(1).response_range().kvs(0);
    registered_ = member.create_revision();
    fence_ = member.mod_revision();
    in_doubt_ = false;
    records_[self_->incarnation] = {self_, registered_};
    if (again) return Joined();
    {
      MutexLock lock(shared_.mutex);
      shared_.erased = 0;
    }
    Joined();
    if (events_.announce_again) events_.announce_again();
    if (events_.erasures_changed) events_.erasures_changed();
  });
}

void DirectorySession::Joined() {
  phase_ = Phase::kJoined;
  joined_at_ = clock_.Now();
  keep_alive_at_ = joined_at_;
  unanswered_since_ = 0;
  {
    MutexLock lock(shared_.mutex);
    ++shared_.counted.connections;
  }
  PublishMembers();
  client_->OpenWatch([this](const auto& response) { GotWatch(response); },
                     [this](const absl::Status& status) { Fail("watching", status); });
  client_->OpenKeepAlive(
      [this](const etcdserverpb::LeaseKeepAliveResponse& response) {
        // Of several in flight, the earliest is measured.
        if (unanswered_since_ > 0) client_->Answered(unanswered_since_);
        unanswered_since_ = 0;
        if (response.ttl() > 0) return;
        lease_ = 0;
        Fail(absl::UnavailableError("the lease has expired"));
      },
      [this](const absl::Status& status) { Fail("cannot keep the lease alive", status); });
  StartWatch(keys_.Members(), members_revision_, kMemberWatch);
  StartWatch(keys_.Erasures(), erasures_revision_, kErasureWatch);
}

void DirectorySession::KeepLease() {
  const storage::Nanos now = clock_.Now();
  if (unanswered_since_ > 0 && now >= unanswered_since_ + client_->Limit()) {
    client_->Unanswered(unanswered_since_);
    return Fail(absl::DeadlineExceededError("etcd does not answer"));
  }
  if (now < keep_alive_at_) return;
  if (unanswered_since_ == 0) unanswered_since_ = now;
  keep_alive_at_ = now + Third();
  // The connection may outlive the file of its certificate; the next connection uses the renewed one.
  if (const absl::StatusOr<std::string> certificate = ReadFile("cert_file", options_.cert_file); certificate.ok()) {
    NoteTerm(*certificate);
  }
  etcdserverpb::LeaseKeepAliveRequest request;
  request.set_id(lease_);
  client_->KeepAlive(request);
}

void DirectorySession::Fail(absl::string_view during, const absl::Status& status) {
  const std::string what = status.ok() ? "etcd closed the stream" : std::string(status.message());
  Fail(absl::UnavailableError(absl::StrCat(during, ": ", what)));
}

void DirectorySession::Fail(const absl::Status& status) {
  if (phase_ == Phase::kAway) return;
  const storage::Nanos longest = std::min(kLongestBackOff, Third());
  const storage::Nanos now = clock_.Now();
  if (phase_ == Phase::kJoined && now - joined_at_ > longest) attempts_ = 0;
  const storage::Nanos most = std::min(longest, kFirstBackOff << std::min(attempts_, 16u));
  ++attempts_;
  retry_at_ = now + std::uniform_int_distribution<storage::Nanos>(0, most)(random_);
  phase_ = Phase::kAway;
  const std::string endpoint = options_.endpoints[endpoint_];
  endpoint_ = (endpoint_ + 1) % options_.endpoints.size();
  client_->Disconnect();
  watches_.clear();
  for (auto& [ns, follow] : follows_) {
    follow.watch = 0;
    follow.reading = 0;
  }
  in_doubt_ |= !in_flight_.empty() || telling_erased_;
  writing_ = sweep_reading_ = telling_erased_ = false;
  doomed_.clear();
  sweep_from_.clear();
  sweep_slices_ = 0;
  {
    MutexLock lock(shared_.mutex);
    shared_.queue.Return(std::exchange(in_flight_, {}));
  }
  SetHealth(false, absl::StrCat(endpoint, ": ", status.message()));
  RefuseErasures(absl::UnavailableError(absl::StrCat("the directory is not reachable: ", status.message())));
}

void DirectorySession::SetHealth(bool connected, const std::string& reason) {
  if (leaving_) return;  // it revokes its lease; that is not a failure
  DirectoryHealth health;
  {
    MutexLock lock(shared_.mutex);
    if (shared_.health.connected == connected && shared_.health.reason == reason) return;
    if (shared_.health.connected != connected) shared_.health.since = clock_.Now();
    shared_.health.connected = connected;
    shared_.health.reason = reason;
    health = shared_.health;
  }
  if (events_.health_changed) events_.health_changed(health);
}

void DirectorySession::Note(const etcdserverpb::ResponseHeader& header) {
  if (header.revision() > known_.revision()) known_.set_revision(header.revision());
  if (header.raft_term() > known_.raft_term()) known_.set_raft_term(header.raft_term());
  MutexLock lock(shared_.mutex);
  shared_.counted.revision = known_.revision();
}

void DirectorySession::PublishMembers() {
  // Of several entries with one name the latest is valid: the earlier ones are of a daemon that restarted, and their
  // leases have not ended.
  std::map<std::string, const Record*> by_node;
  for (const auto& [incarnation, record] : records_) {
    const Record*& latest = by_node[record.member->node];
    if (latest == nullptr || latest->create_revision < record.create_revision) latest = &record;
  }
  for (const auto& [incarnation, record] : lost_) {
    if (!by_node.contains(record.member->node)) by_node[record.member->node] = &record;
  }
  std::vector<std::shared_ptr<const Member>> others;
  bool doubled = false;
  for (const auto& [node, record] : by_node) {
    if (record->member->incarnation == self_->incarnation) continue;
    doubled |= node == self_->node;
    others.push_back(record->member);
  }
  std::vector<std::shared_ptr<const Member>> all = others;
  all.insert(all.begin(), self_);
  bool changed = false;
  {
    // Set before its entries are used, so that a member with pending erasures is known (BeingErased).
    MutexLock lock(shared_.mutex);
    changed = !std::ranges::equal(all, shared_.members, [](const auto& a, const auto& b) { return *a == *b; });
    shared_.members = std::move(all);
  }
  shared_.mirror.members().SetPresent(others);
  SetHealth(true,
            doubled ? absl::StrCat("another daemon registered later under the same node name, ", self_->node) : "");
  if (changed && events_.members_changed) events_.members_changed();
}

void DirectorySession::EndBelief() {
  believe_until_ = 0;
  lost_.clear();
  for (auto& [ns, follow] : follows_) {
    StopWatch(&follow);
    follow.ReadAgain();  // and entries that etcd does not have are removed
    follow.reading = 0;
  }
  PublishMembers();
}

void DirectorySession::Leave() {
  leaving_ = true;
  RefuseErasures(absl::UnavailableError("this node is stopping"));
  if (phase_ != Phase::kJoined) return;
  bool left = false;
  etcdserverpb::LeaseRevokeRequest request;
  request.set_id(lease_);
  client_->LeaseRevoke(request, kLeaveTimeout, [&](const absl::Status&, const auto&) { left = true; });
  // The end of the connection ends the wait; the lease then expires.
  const storage::Nanos end = clock_.Now() + kLeaveTimeout;
  while (!left && phase_ == Phase::kJoined && clock_.Now() < end) client_->Poll(end);
  client_->Disconnect();
}

}  // namespace ashlar::daemon
