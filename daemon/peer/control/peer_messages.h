// SPDX-License-Identifier: Apache-2.0
// The messages between daemons as plain structs, converted from and to Protobuf. Every Read function validates, and
// returns INVALID_ARGUMENT that begins with the field's name. Replies are validated like requests.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "proto/key.h"
#include "proto/object.h"
#include "proto/outcome.h"
#include "proto/shard.h"

namespace ashlar::v1 {
class PeerCloseRequest;
class PeerGreeting;
class PeerOfferReply;
class PeerOfferRequest;
class PeerOpenReply;
class PeerOpenRequest;
class PeerPrefillReply;
class PeerPrefillRequest;
class PeerRenewReply;
class PeerRenewRequest;
class NodeProbe;
class Prompt;
class PeerProbeReply;
class PeerProbeRequest;
class PeerWorkersReply;
class PeerWorkersRequest;
}  // namespace ashlar::v1

namespace ashlar::daemon {

using PeerIncarnation = std::array<uint8_t, 16>;  // random, drawn when a daemon starts
using PeerLease = std::array<uint8_t, 16>;
using PeerSecret = std::array<uint8_t, 16>;

struct PeerHello {
  std::string node;
  PeerIncarnation incarnation{};
  std::string transport_address;  // host:port; may be empty
  uint32_t protocol = 0;          // negotiated version; unused in this node's own hello
};

struct PeerGrant {
  uint64_t number = 0;
  PeerSecret secret{};
};

// Where an object lies at its holder, for RDMA reads. Empty: the bytes come by messages only.
inline constexpr size_t kMaxPeerRemoteKeyBytes = 512, kMaxPeerArenas = 16, kMaxPeerRuns = 768;
struct PeerArena {
  std::string remote_key;  // gives access to the whole arena, which belongs to the object's tenant
  uint64_t base = 0, bytes = 0;
};
struct PeerRun {
  uint32_t arena = 0;
  uint64_t offset = 0, bytes = 0;
};

struct PeerObject {
  Key key;
  TensorShard shard;
};

struct PeerOpen {
  std::vector<PeerObject> objects;
  uint32_t lease_ms = 0;
};
struct PeerOpened {
  MissReason miss = MissReason::kNone;  // the other fields are valid only for kNone
  std::string header;                   // encoded; valid, and for the requested key and shard
  uint64_t bytes = 0;
  TierKind tier = TierKind::kNone;
  PeerLease lease{};
  PeerGrant grant;
  uint32_t lease_ms = 0;
  std::vector<PeerArena> arenas;
  std::vector<PeerRun> runs;  // inside the arenas, adding up to the size of the object; empty without arenas
};

struct PeerRenew {
  std::vector<PeerLease> leases;
  uint32_t lease_ms = 0;
};

// Why objects are offered. kDrain: the holder stops, and the objects may be lost. kHot: several nodes have requested
// them. kHandoff: an engine of the receiving node is about to use them.
enum class OfferKind : uint8_t { kDrain = 1, kHot = 2, kHandoff = 3 };
struct PeerOffered {
  Key key;
  uint32_t shards = 1;
  NamespaceId ns;
  ObjectKind kind = ObjectKind::kSegment;
  bool own = false;        // private to a conversation
  uint64_t bytes = 0;      // size of the largest shard
  uint32_t uses = 0;       // lookups that found it
  uint64_t idle = 0;       // lookups of the tenant since the last use
  float saves_a_byte = 0;  // FLOPs per byte; finite, not negative
  uint64_t group = 0;      // objects that are used together have the same group; 0 for none
};
struct PeerOffer {
  std::vector<PeerOffered> objects;
  OfferKind kind = OfferKind::kHot;
  uint32_t patience_ms = 0;
};

// An engine of the receiving node that offers prefill.
struct PeerWorker {
  uint64_t worker = 0;
  double tokens_per_second = 0;
  uint64_t queued_tokens = 0;
  uint32_t capacity = 0;
};

// A prompt of which a node would save something.
struct PeerProbe {
  NamespaceId ns;
  std::shared_ptr<const v1::Prompt> prompt;  // not validated, except for its length
};

// A segment that a worker should compute. After Read, the key matches the other fields.
struct PeerPrefill {
  NamespaceId ns;
  uint64_t worker = 0;
  ObjectKind kind = ObjectKind::kSegment;
  std::string tokens;  // packed int32
  Key key;
  uint32_t patience_ms = 0, lease_ms = 0;
};

void Write(const PeerHello& hello, v1::PeerGreeting* message);
// FAILED_PRECONDITION without a common version; the message has both ranges.
absl::StatusOr<PeerHello> Read(const v1::PeerGreeting& message);

void Write(const PeerOpen& open, const std::string& tenant, v1::PeerOpenRequest* message);
absl::StatusOr<PeerOpen> Read(const v1::PeerOpenRequest& message);
void Write(const std::vector<PeerOpened>& opened, v1::PeerOpenReply* message);
// `asked` is the request of this reply.
absl::StatusOr<std::vector<PeerOpened>> Read(const v1::PeerOpenReply& message, const PeerOpen& asked);

void Write(const PeerRenew& renew, v1::PeerRenewRequest* message);
absl::StatusOr<PeerRenew> Read(const v1::PeerRenewRequest& message);
void Write(const std::vector<uint32_t>& lease_ms, v1::PeerRenewReply* message);
absl::StatusOr<std::vector<uint32_t>> Read(const v1::PeerRenewReply& message, const PeerRenew& asked);

void Write(const std::vector<PeerLease>& leases, v1::PeerCloseRequest* message);
absl::StatusOr<std::vector<PeerLease>> Read(const v1::PeerCloseRequest& message);

void Write(const PeerOffer& offer, const std::string& tenant, v1::PeerOfferRequest* message);
absl::StatusOr<PeerOffer> Read(const v1::PeerOfferRequest& message);
void Write(const std::vector<TakeOutcome>& outcomes, v1::PeerOfferReply* message);
absl::StatusOr<std::vector<TakeOutcome>> Read(const v1::PeerOfferReply& message, const PeerOffer& asked);
void Write(const NamespaceId& ns, const std::string& tenant, v1::PeerWorkersRequest* message);
absl::StatusOr<NamespaceId> Read(const v1::PeerWorkersRequest& message);
void Write(const std::vector<PeerWorker>& workers, v1::PeerWorkersReply* message);
absl::StatusOr<std::vector<PeerWorker>> Read(const v1::PeerWorkersReply& message);

void Write(const PeerPrefill& prefill, const std::string& tenant, v1::PeerPrefillRequest* message);
absl::StatusOr<PeerPrefill> Read(const v1::PeerPrefillRequest& message);
void Write(const PeerOpened& opened, v1::PeerPrefillReply* message);
absl::StatusOr<PeerOpened> Read(const v1::PeerPrefillReply& message, const PeerPrefill& asked);

void Write(const PeerProbe& probe, const std::string& tenant, v1::PeerProbeRequest* message);
absl::StatusOr<PeerProbe> Read(const v1::PeerProbeRequest& message);
void Write(const v1::NodeProbe& probe, v1::PeerProbeReply* message);
absl::StatusOr<v1::NodeProbe> Read(const v1::PeerProbeReply& message);

}  // namespace ashlar::daemon
