// SPDX-License-Identifier: Apache-2.0
// Reads, checks and writes messages about offers.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "ashlar/v1/peer.pb.h"
#include "daemon/peer/control/peer_messages.h"
#include "proto/invalid.h"
#include "proto/limits.h"

namespace ashlar::daemon {
namespace {

absl::Status ReadDigest(absl::string_view field, const std::string& bytes, std::array<uint8_t, 32>* read) {
  if (bytes.size() != read->size()) return Invalid(field, ": wrong length; expected ", read->size(), " bytes");
  std::ranges::copy(bytes, read->begin());
  return absl::OkStatus();
}

absl::Status ReadOffered(const std::string& field, const v1::PeerOffered& message, PeerOffered* offered) {
  if (absl::Status status = ReadDigest(field + ".key", message.key(), &offered->key.bytes); !status.ok()) return status;
  if (absl::Status status = ReadDigest(field + ".namespace", message.namespace_(), &offered->ns.bytes); !status.ok()) {
    return status;
  }
  offered->shards = std::max(1u, message.shards());
  if (offered->shards > limits::kMaxTensorShards) {
    return Invalid(field, ".shards: too many; expected at most ", limits::kMaxTensorShards);
  }
  if (message.kind() == 0 || Name(static_cast<ObjectKind>(message.kind())) == "unknown" || message.kind() > 255) {
    return Invalid(field, ".kind: ", message.kind(), " is unknown; expected 1 to 4");
  }
  offered->kind = static_cast<ObjectKind>(message.kind());
  if (message.pool() > 1) return Invalid(field, ".pool: ", message.pool(), " is unknown; expected 0 or 1");
  offered->own = message.pool() == 1;
  if (message.bytes() == 0 || message.bytes() > limits::kMaxObjectBytes)
    return Invalid(field, ".bytes: out of range; expected at most ", limits::kMaxObjectBytes);
  offered->bytes = message.bytes();
  offered->uses = message.uses();
  offered->idle = message.idle();
  offered->saves_a_byte = message.saves_a_byte();
  offered->group = message.group();
  if (!std::isfinite(offered->saves_a_byte) || offered->saves_a_byte < 0) {
    return Invalid(field, ".saves_a_byte: must be a number of at least 0");
  }
  return absl::OkStatus();
}

}  // namespace

void Write(const PeerOffer& offer, const std::string& tenant, v1::PeerOfferRequest* message) {
  message->set_tenant(tenant);
  message->set_kind(static_cast<uint32_t>(offer.kind));
  message->set_patience_ms(offer.patience_ms);
  for (const PeerOffered& offered : offer.objects) {
    v1::PeerOffered* const object = message->add_objects();
    object->set_key({offered.key.bytes.begin(), offered.key.bytes.end()});
    object->set_namespace_({offered.ns.bytes.begin(), offered.ns.bytes.end()});
    object->set_shards(offered.shards);
    object->set_kind(static_cast<uint32_t>(offered.kind));
    object->set_pool(offered.own ? 1 : 0);
    object->set_bytes(offered.bytes);
    object->set_uses(offered.uses);
    object->set_idle(offered.idle);
    object->set_saves_a_byte(offered.saves_a_byte);
    object->set_group(offered.group);
  }
}

absl::StatusOr<PeerOffer> Read(const v1::PeerOfferRequest& message) {
  if (message.objects().empty()) return Invalid("objects: empty; expected at least one");
  if (message.kind() < static_cast<uint32_t>(OfferKind::kDrain) ||
      message.kind() > static_cast<uint32_t>(OfferKind::kHandoff)) {
    return Invalid("kind: ", message.kind(), " is unknown; expected 1 to 3");
  }
  if (message.patience_ms() == 0 || message.patience_ms() > limits::kMaxPeerPatienceMillis) {
    return Invalid("patience_ms: out of range; expected 1 to ", limits::kMaxPeerPatienceMillis);
  }
  PeerOffer offer{.objects = {}, .kind = static_cast<OfferKind>(message.kind()), .patience_ms = message.patience_ms()};
  uint64_t shards = 0;
  for (int i = 0; i < message.objects_size(); ++i) {
    absl::Status status =
        ReadOffered(absl::StrCat("objects[", i, "]"), message.objects(i), &offer.objects.emplace_back());
    if (!status.ok()) return status;
    shards += offer.objects.back().shards;
    if (shards > limits::kMaxPeerKeysPerCall) {
      return Invalid("objects: too many; expected at most ", limits::kMaxPeerKeysPerCall, " shards");
    }
  }
  return offer;
}

void Write(const std::vector<TakeOutcome>& outcomes, v1::PeerOfferReply* message) {
  for (const TakeOutcome outcome : outcomes) message->add_outcomes(static_cast<uint32_t>(outcome));
}

absl::StatusOr<std::vector<TakeOutcome>> Read(const v1::PeerOfferReply& message, const PeerOffer& asked) {
  if (static_cast<size_t>(message.outcomes_size()) != asked.objects.size()) {
    return Invalid("outcomes: ", message.outcomes_size(), " for ", asked.objects.size(), " objects");
  }
  std::vector<TakeOutcome> outcomes;
  for (int i = 0; i < message.outcomes_size(); ++i) {
    const uint32_t outcome = message.outcomes(i);
    if (outcome == 0) return Invalid("outcomes[", i, "]: 0 is unknown; expected 1 to 8");
    // A later version may report other outcomes; any of them means that the object was not taken.
    const bool known = outcome <= static_cast<uint32_t>(TakeOutcome::kTimedOut);
    outcomes.push_back(known ? static_cast<TakeOutcome>(outcome) : TakeOutcome::kNoSpace);
  }
  return outcomes;
}

}  // namespace ashlar::daemon
