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
    : connection_{.options = options,
                  .keys = DirectoryKeys(options.prefix, options.cluster),
                  .events = std::move(events),
                  .clock = clock,
                  .shared = *shared,
                  .client = std::move(client),
                  .fail = [this](const absl::Status& why) { Close(why); },
                  .membership = {.self = std::move(self)}},
      writer_(connection_),
      follower_(connection_),
      erasures_(connection_, [this] { PublishMembers(); }),
      random_(seed) {}

RoundTrips::Bounds DirectorySession::Limits(const EtcdDirectoryOptions& options) {
  const storage::Nanos lease = options.lease_seconds * kSecond;
  return {std::max(kSecond, lease / 3), std::max(kLongestCall, lease)};
}

storage::Nanos DirectorySession::LeaseTime() const {
  return connection_.options.lease_seconds * kSecond;
}

void DirectorySession::Wake() {
  client_.Wake();
}

void DirectorySession::Run() {
  for (;;) {
    {
      MutexLock lock(shared_.mutex);
      if (shared_.stopping) break;
    }
    client_.Poll(Step());
  }
  Leave();
}

storage::Nanos DirectorySession::Step() {
  if (phase_ == Phase::kAway) {
    if (connection_.clock.Now() < retry_at_) return retry_at_;
    Connect();
  }
  if (phase_ == Phase::kJoined) KeepLease();
  if (phase_ == Phase::kJoined && membership_.believe_until > 0 && connection_.clock.Now() >= membership_.believe_until)
    EndBelief();
  if (phase_ == Phase::kJoined) follower_.Reconcile();
  if (phase_ == Phase::kJoined) erasures_.WriteQueued();
  if (phase_ == Phase::kJoined && !writer_.writing()) erasures_.Acknowledge();
  if (phase_ == Phase::kJoined) {
    const storage::Nanos write_at = erasures_.acknowledging() ? INT64_MAX : writer_.Write();
    return std::min({write_at, membership_.believe_until > 0 ? membership_.believe_until : INT64_MAX, keep_alive_at_,
                     unanswered_since_ > 0 ? unanswered_since_ + client_.Limit() : INT64_MAX});
  }
  // While it joins, the call's deadline ends the wait.
  return phase_ == Phase::kAway ? retry_at_ : INT64_MAX;
}

void DirectorySession::Connect() {
  phase_ = Phase::kJoining;
  const absl::StatusOr<EtcdTls> tls = ReadTls(connection_.options);
  if (!tls.ok()) return Close(tls.status());
  const absl::StatusOr<std::string> password = ReadFile("password_file", connection_.options.password_file);
  if (!password.ok()) return Close(password.status());
  NoteTerm(tls->certificate);
  client_.Connect(connection_.options.endpoints[endpoint_], *tls);
  if (connection_.options.user.empty()) return Authenticated();
  etcdserverpb::AuthenticateRequest request;
  request.set_name(connection_.options.user);
  request.set_password(password->substr(0, password->find_first_of("\r\n")));
  client_.Authenticate(request, [this](const absl::Status& status, const auto& response) {
    if (!status.ok()) return connection_.Fail("cannot authenticate", status);
    client_.set_token(response.token());
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
  request.set_key(connection_.keys.Erasures());
  request.set_range_end(RangeEnd(connection_.keys.Erasures()));
  client_.Range(request, [this](const absl::Status& status, const auto& response) {
    if (!status.ok()) return connection_.Fail("cannot read erasures", status);
    erasures_.Replace(response);
    ReadMembers();
  });
}

void DirectorySession::ReadMembers() {
  etcdserverpb::RangeRequest request;
  request.set_key(connection_.keys.Members());
  request.set_range_end(RangeEnd(connection_.keys.Members()));
  client_.Range(request, [this](const absl::Status& status, const auto& response) {
    if (!status.ok()) return connection_.Fail("cannot read members", status);
    GotMembers(response);
  });
}

void DirectorySession::GotMembers(const etcdserverpb::RangeResponse& response) {
  const etcdserverpb::ResponseHeader& now = response.header();
  const bool same = now.cluster_id() == connection_.known.cluster_id() &&
                    now.raft_term() >= connection_.known.raft_term() && now.revision() >= connection_.known.revision();
  connection_.known = now;
  members_revision_ = now.revision();
  std::map<uint64_t, DirectoryMembership::Record> before = std::exchange(membership_.records, {});
  for (const mvccpb::KeyValue& pair : response.kvs()) {
    const std::optional<uint64_t> incarnation = connection_.keys.ReadMember(pair.key());
    if (!incarnation.has_value()) continue;
    std::optional<Member> member = DecodeMember(pair.value(), *incarnation);
    if (!member.has_value()) continue;
    membership_.records[*incarnation] = {std::make_shared<const Member>(*std::move(member)), pair.create_revision()};
  }
  const auto own = membership_.records.find(membership_.self->incarnation);
  const bool registered = own != membership_.records.end() && own->second.create_revision == membership_.registered;
  writer_.SweepAt(connection_.clock.Now() + LeaseTime());  // members that lost their connection return earlier
  if (same && membership_.lease != 0 && registered) return unresolved_ ? Register(/*again=*/true) : Joined();
  if (membership_.registered != 0) {
    membership_.lost.merge(before);
    membership_.lost.erase(membership_.self->incarnation);
    membership_.believe_until = connection_.clock.Now() + LeaseTime();
  }
  membership_.lease = 0;
  follower_.ReadAgain();
  etcdserverpb::LeaseGrantRequest grant;
  grant.set_ttl(connection_.options.lease_seconds);
  client_.LeaseGrant(grant, [this](const absl::Status& status, const auto& granted) {
    if (!status.ok()) return connection_.Fail("cannot get a lease", status);
    membership_.lease = granted.id();
    Register(/*again=*/false);
  });
}

void DirectorySession::Register(bool again) {
  etcdserverpb::TxnRequest request;
  const std::string key = connection_.keys.MemberKey(membership_.self->incarnation);
  if (again) {
    etcdserverpb::Compare* registered = request.add_compare();
    registered->set_target(etcdserverpb::Compare::CREATE);
    registered->set_key(key);
    registered->set_create_revision(membership_.registered);
  }
  etcdserverpb::PutRequest* put = request.add_success()->mutable_request_put();
  put->set_key(key);
  // It may be another etcd, whose state is unknown: everything is written again.
  Member self = *membership_.self;
  if (!again) self.erased = 0;
  membership_.self = std::make_shared<const Member>(std::move(self));
  put->set_value(EncodeMember(*membership_.self));
  put->set_lease(membership_.lease);
  request.add_success()->mutable_request_range()->set_key(key);
  client_.Txn(request, [=, this](const absl::Status& status, const etcdserverpb::TxnResponse& response) {
    if (status.ok() && !response.succeeded()) return connection_.LeaseExpired();
    if (status.ok() && (response.responses_size() != 2 || response.responses(1).response_range().kvs().empty())) {
      return Close(absl::InternalError("cannot register this node: unexpected reply"));
    }
    if (!status.ok()) {
      if (!again || absl::IsNotFound(status)) membership_.lease = 0;
      return connection_.Fail("cannot register this node", status);
    }
    const mvccpb::KeyValue& member = response.responses(1).response_range().kvs(0);
    membership_.registered = member.create_revision();
    membership_.fence = member.mod_revision();
    unresolved_ = false;
    membership_.records[membership_.self->incarnation] = {membership_.self, membership_.registered};
    if (again) return Joined();
    {
      MutexLock lock(shared_.mutex);
      shared_.erased = 0;
    }
    Joined();
    if (connection_.events.announce_again) connection_.events.announce_again();
    if (connection_.events.erasures_changed) connection_.events.erasures_changed();
  });
}

void DirectorySession::Joined() {
  phase_ = Phase::kJoined;
  joined_at_ = connection_.clock.Now();
  keep_alive_at_ = joined_at_;
  unanswered_since_ = 0;
  {
    MutexLock lock(shared_.mutex);
    ++shared_.counted.connections;
  }
  PublishMembers();
  client_.OpenWatch([this](const auto& response) { GotWatch(response); },
                    [this](const absl::Status& status) { connection_.Fail("cannot watch", status); });
  client_.OpenKeepAlive(
      [this](const etcdserverpb::LeaseKeepAliveResponse& response) {
        // Of several in flight, the earliest is measured.
        if (unanswered_since_ > 0) client_.Answered(unanswered_since_);
        unanswered_since_ = 0;
        if (response.ttl() > 0) return;
        connection_.LeaseExpired();
      },
      [this](const absl::Status& status) { connection_.Fail("cannot keep the lease alive", status); });
  connection_.StartWatch(connection_.keys.Members(), members_revision_, DirectoryConnection::kMemberWatch);
  connection_.StartWatch(connection_.keys.Erasures(), erasures_.revision(), DirectoryConnection::kErasureWatch);
}

void DirectorySession::KeepLease() {
  const storage::Nanos now = connection_.clock.Now();
  if (unanswered_since_ > 0 && now >= unanswered_since_ + client_.Limit()) {
    client_.Unanswered(unanswered_since_);
    return Close(absl::DeadlineExceededError("etcd does not answer"));
  }
  if (now < keep_alive_at_) return;
  if (unanswered_since_ == 0) unanswered_since_ = now;
  keep_alive_at_ = now + LeaseTime() / 3;
  // The connection may outlive the file of its certificate; the next connection uses the renewed one.
  if (const absl::StatusOr<std::string> certificate = ReadFile("cert_file", connection_.options.cert_file);
      certificate.ok()) {
    NoteTerm(*certificate);
  }
  etcdserverpb::LeaseKeepAliveRequest request;
  request.set_id(membership_.lease);
  client_.KeepAlive(request);
}

void DirectorySession::Close(const absl::Status& why) {
  if (phase_ == Phase::kAway) return;
  const storage::Nanos longest = std::min(kLongestBackOff, LeaseTime() / 3);
  const storage::Nanos now = connection_.clock.Now();
  if (phase_ == Phase::kJoined && now - joined_at_ > longest) attempts_ = 0;
  const storage::Nanos most = std::min(longest, kFirstBackOff << std::min(attempts_, 16u));
  ++attempts_;
  retry_at_ = now + std::uniform_int_distribution<storage::Nanos>(0, most)(random_);
  phase_ = Phase::kAway;
  const std::string endpoint = connection_.options.endpoints[endpoint_];
  endpoint_ = (endpoint_ + 1) % connection_.options.endpoints.size();
  client_.Disconnect();
  follower_.Disconnected();
  const bool writing = writer_.Disconnected();
  unresolved_ |= writing || erasures_.acknowledging();
  erasures_.Disconnected();
  SetHealth(false, absl::StrCat(endpoint, ": ", why.message()));
  erasures_.Refuse(absl::UnavailableError(absl::StrCat("the directory is not reachable: ", why.message())));
}

void DirectorySession::SetHealth(bool connected, const std::string& reason) {
  if (leaving_) return;  // it revokes its lease; that is not a failure
  DirectoryHealth health;
  {
    MutexLock lock(shared_.mutex);
    if (shared_.health.connected == connected && shared_.health.reason == reason) return;
    if (shared_.health.connected != connected) shared_.health.since = connection_.clock.Now();
    shared_.health.connected = connected;
    shared_.health.reason = reason;
    health = shared_.health;
  }
  if (connection_.events.health_changed) connection_.events.health_changed(health);
}

void DirectorySession::PublishMembers() {
  // Of several entries with one name the latest is valid: the earlier ones are of a daemon that restarted, and their
  // leases have not ended.
  std::map<std::string, const DirectoryMembership::Record*> by_node;
  for (const auto& [incarnation, record] : membership_.records) {
    const DirectoryMembership::Record*& latest = by_node[record.member->node];
    if (latest == nullptr || latest->create_revision < record.create_revision) latest = &record;
  }
  for (const auto& [incarnation, record] : membership_.lost) {
    if (!by_node.contains(record.member->node)) by_node[record.member->node] = &record;
  }
  std::vector<std::shared_ptr<const Member>> others;
  bool doubled = false;
  for (const auto& [node, record] : by_node) {
    if (record->member->incarnation == membership_.self->incarnation) continue;
    doubled |= node == membership_.self->node;
    others.push_back(record->member);
  }
  std::vector<std::shared_ptr<const Member>> all = others;
  all.insert(all.begin(), membership_.self);
  bool changed = false;
  {
    // Set before its entries are used, so that a member with pending erasures is known (BeingErased).
    MutexLock lock(shared_.mutex);
    changed = !std::ranges::equal(all, shared_.members, [](const auto& a, const auto& b) { return *a == *b; });
    shared_.members = std::move(all);
  }
  shared_.mirror.members().SetPresent(others);
  SetHealth(true,
            doubled ? absl::StrCat("another daemon registered later under the same node name, ", membership_.self->node)
                    : "");
  if (changed && connection_.events.members_changed) connection_.events.members_changed();
}

void DirectorySession::EndBelief() {
  membership_.believe_until = 0;
  membership_.lost.clear();
  follower_.Restart();  // and entries that etcd does not have are removed
  PublishMembers();
}

void DirectorySession::GotWatch(const etcdserverpb::WatchResponse& response) {
  connection_.Note(response.header());
  const int64_t watch = response.watch_id();
  const bool entries = follower_.Watches(watch);
  const bool members = !entries && watch <= DirectoryConnection::kMemberWatch;
  const bool erasures = watch == DirectoryConnection::kErasureWatch;
  if (!entries && !members && !erasures) return;  // no longer followed
  if (response.canceled()) {
    if (entries && response.compact_revision() > 0) return follower_.Compacted(watch);
    return Close(absl::UnavailableError(absl::StrCat("etcd ended a watch: ", response.cancel_reason())));
  }
  if (response.created()) return;
  // etcd reports its revision from time to time, even without changes.
  int64_t last = response.events().empty() ? response.header().revision() : 0;
  for (const mvccpb::Event& event : response.events()) last = std::max(last, event.kv().mod_revision());
  if (entries) follower_.Got(response, last);
  if (erasures) erasures_.Got(response);
  if (members && !response.events().empty()) {
    for (const mvccpb::Event& event : response.events()) {
      GotMemberEvent(event);
      if (phase_ != Phase::kJoined) return;
    }
    PublishMembers();
  }
  MutexLock lock(shared_.mutex);
  shared_.counted.watch_events += response.events_size();
  shared_.counted.revision_lag = response.header().revision() - last;
}

void DirectorySession::GotMemberEvent(const mvccpb::Event& event) {
  const std::optional<uint64_t> incarnation = connection_.keys.ReadMember(event.kv().key());
  if (!incarnation.has_value()) return;
  if (event.type() == mvccpb::Event::DELETE) {
    if (*incarnation == membership_.self->incarnation) return connection_.LeaseExpired();
    membership_.records.erase(*incarnation);
    writer_.SweepBy(connection_.clock.Now() + LeaseTime());  // time limit for its return
    return;
  }
  std::optional<Member> member = DecodeMember(event.kv().value(), *incarnation);
  if (!member.has_value()) return;
  membership_.records[*incarnation] = {std::make_shared<const Member>(*std::move(member)),
                                       event.kv().create_revision()};
}

void DirectorySession::Leave() {
  leaving_ = true;
  erasures_.Refuse(absl::UnavailableError("this node is stopping"));
  if (phase_ != Phase::kJoined) return;
  bool left = false;
  etcdserverpb::LeaseRevokeRequest request;
  request.set_id(membership_.lease);
  client_.LeaseRevoke(request, kLeaveTimeout, [&](const absl::Status&, const auto&) { left = true; });
  // The end of the connection ends the wait; the lease then expires.
  const storage::Nanos end = connection_.clock.Now() + kLeaveTimeout;
  while (!left && phase_ == Phase::kJoined && connection_.clock.Now() < end) client_.Poll(end);
  client_.Disconnect();
}

}  // namespace ashlar::daemon
