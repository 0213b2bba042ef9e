#include "daemon/peer/opener.h"

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ashlar/v1/peer.pb.h"
#include "proto/limits.h"
#include "proto/outcome.h"

namespace ashlar::daemon {
namespace {

// What another node says of an object, checked: it must be the object that was asked for.
absl::StatusOr<OpenedObject> Read(const v1::PeerOpened& answer, const WantedObject& wanted) {
  if (answer.miss_reason() != 0) {
    return absl::NotFoundError(Name(static_cast<MissReason>(answer.miss_reason())));
  }
  absl::StatusOr<ObjectHeader> header = DecodeHeader(answer.header());
  if (!header.ok()) return header.status();
  if (header->key != wanted.key || header->shard != wanted.shard) {
    return absl::DataLossError("header: of another object than was asked for");
  }
  if (answer.header().size() != EncodedHeaderBytes(header->parts.size())) {
    return absl::DataLossError("header: has bytes behind it");
  }
  OpenedObject opened{.header = *std::move(header), .encoded = answer.header(), .lease = answer.lease()};
  opened.grant.number = answer.grant().number();
  if (answer.grant().secret().size() != opened.grant.secret.size() || answer.lease().empty()) {
    return absl::DataLossError("grant or lease: missing");
  }
  std::memcpy(opened.grant.secret.data(), answer.grant().secret().data(), opened.grant.secret.size());
  return opened;
}

}  // namespace

void Opener::Open(storage::TenantId tenant, std::shared_ptr<const Member> member, std::vector<WantedObject> wanted,
                  storage::Nanos deadline, std::function<void(Opened)> done) {
  v1::PeerOpenRequest request;
  request.set_tenant(names_.at(tenant));
  request.set_lease_ms(kLeaseMillis);
  for (const WantedObject& one : wanted) {
    v1::PeerKey* const key = request.add_keys();
    key->set_key(one.key.bytes.data(), one.key.bytes.size());
    key->set_shard_rank(one.shard.rank);
    key->set_shard_size(one.shard.size);
  }
  const storage::Nanos asked_at = clock_.Now();
  const auto answered = [this, member, wanted = std::move(wanted), asked_at,
                         done = std::move(done)](const absl::StatusOr<v1::PeerOpenReply>& reply) {
    Opened opened;
    const bool whole = reply.ok() && static_cast<size_t>(reply->objects_size()) == wanted.size();
    if (reply.ok()) rates_.Answered(member->node, clock_.Now() - asked_at);
    for (size_t i = 0; i < wanted.size(); ++i) {
      if (!whole) {
        opened.push_back(reply.ok() ? absl::DataLossError("objects: not as many as were asked for") : reply.status());
        continue;
      }
      opened.push_back(Read(reply->objects(static_cast<int>(i)), wanted[i]));
      if (!opened.back().ok()) continue;
      opened.back()->member = member;
      opened.back()->leased_until =
          asked_at + storage::Nanos{1'000'000} * reply->objects(static_cast<int>(i)).lease_ms();
    }
    done(std::move(opened));
  };
  asker_.Open(*member, request, deadline, [this, tenant, answered](absl::StatusOr<v1::PeerOpenReply> reply) {
    const auto shared = std::make_shared<const absl::StatusOr<v1::PeerOpenReply>>(std::move(reply));
    loop_.PostCompletion(tenant, [answered, shared] { answered(*shared); });
  });
}

void Opener::Close(const std::shared_ptr<const Member>& member, std::string lease) {
  Closing& closing = closing_[member->incarnation];
  closing.member = member;
  closing.leases.push_back(std::move(lease));
  if (closing.leases.size() >= limits::kMaxPeerLeasesPerCall) Flush();
}

void Opener::Flush() {
  for (auto& [incarnation, closing] : std::exchange(closing_, {})) {
    v1::PeerCloseRequest request;
    for (std::string& lease : closing.leases) request.add_leases(std::move(lease));
    asker_.Close(*closing.member, request);
  }
}

}  // namespace ashlar::daemon
