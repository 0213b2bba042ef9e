// SPDX-License-Identifier: Apache-2.0
#include "daemon/peer/control/peer_messages.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "ashlar/v1/peer.pb.h"
#include "daemon/security/certificate.h"
#include "proto/invalid.h"
#include "proto/limits.h"
#include "proto/prefill_limits.h"
#include "proto/tokens.h"

namespace ashlar::daemon {
namespace {

constexpr uint64_t kMostQueuedTokens = uint64_t{1} << 40;  // per worker; larger numbers would overflow times
constexpr size_t kMostTiers = 16;                          // limit for one reply to a probe

template <size_t kSize>
std::string Bytes(const std::array<uint8_t, kSize>& bytes) {
  return {bytes.begin(), bytes.end()};
}

template <size_t kSize>
absl::Status ReadBytes(absl::string_view field, const std::string& bytes, std::array<uint8_t, kSize>* read) {
  if (bytes.size() != kSize) return Invalid(field, ": wrong length; expected ", kSize, " bytes");
  std::ranges::copy(bytes, read->begin());
  return absl::OkStatus();
}

absl::Status CheckMillis(absl::string_view field, uint32_t millis) {
  if (millis > 0 && millis <= limits::kMaxPeerLeaseMillis) return absl::OkStatus();
  return Invalid(field, ": out of range; expected 1 to ", limits::kMaxPeerLeaseMillis);
}

absl::Status CheckCount(absl::string_view field, int count, uint64_t most) {
  if (count == 0) return Invalid(field, ": empty");
  return static_cast<uint64_t>(count) > most ? Invalid(field, ": too many; expected at most ", most) : absl::OkStatus();
}

absl::StatusOr<ObjectHeader> ReadHeader(absl::string_view field, const std::string& bytes) {
  if (bytes.empty()) return Invalid(field, ": required");
  if (bytes.size() > limits::kMaxPeerHeaderBytes) {
    return Invalid(field, ": too long; expected at most ", limits::kMaxPeerHeaderBytes, " bytes");
  }
  absl::StatusOr<ObjectHeader> header = DecodeHeader(bytes);
  if (!header.ok()) return Invalid(field, ": ", header.status().message());
  if (EncodedHeaderBytes(header->parts.size()) != bytes.size()) return Invalid(field, ": has bytes after the header");
  return header;
}

absl::Status ReadGrant(absl::string_view field, const v1::PeerGrant& message, PeerGrant* grant) {
  if (message.number() == 0) return Invalid(field, ".number: required");
  grant->number = message.number();
  return ReadBytes(absl::StrCat(field, ".secret"), message.secret(), &grant->secret);
}

void WriteGrant(const PeerGrant& grant, v1::PeerGrant* message) {
  message->set_number(grant.number);
  message->set_secret(Bytes(grant.secret));
}

template <typename Message>
absl::StatusOr<std::vector<PeerLease>> ReadLeases(const Message& message) {
  absl::Status status = CheckCount("leases", message.leases_size(), limits::kMaxPeerLeasesPerCall);
  std::vector<PeerLease> leases;
  for (int i = 0; status.ok() && i < message.leases_size(); ++i) {
    status = ReadBytes(absl::StrCat("leases[", i, "]"), message.leases(i), &leases.emplace_back());
  }
  if (!status.ok()) return status;
  return leases;
}

absl::Status ReadPlace(const std::string& field, const v1::PeerOpened& message, PeerOpened* opened) {
  if (message.arenas_size() == 0 && message.runs_size() == 0) return absl::OkStatus();
  absl::Status status = CheckCount(field + ".arenas", message.arenas_size(), kMaxPeerArenas);
  if (status.ok()) status = CheckCount(field + ".runs", message.runs_size(), kMaxPeerRuns);
  if (!status.ok()) return status;
  for (int i = 0; i < message.arenas_size(); ++i) {
    const v1::PeerArena& arena = message.arenas(i);
    const std::string of = absl::StrCat(field, ".arenas[", i, "]");
    if (arena.remote_key().empty() || arena.remote_key().size() > kMaxPeerRemoteKeyBytes) {
      return Invalid(of, ".remote_key: wrong length; expected 1 to ", kMaxPeerRemoteKeyBytes, " bytes");
    }
    if (arena.bytes() > UINT64_MAX - arena.base()) return Invalid(of, ": base + bytes overflows");
    opened->arenas.push_back({arena.remote_key(), arena.base(), arena.bytes()});
  }
  uint64_t left = opened->bytes;
  for (int i = 0; i < message.runs_size(); ++i) {
    const v1::PeerRun& run = message.runs(i);
    const std::string of = absl::StrCat(field, ".runs[", i, "]");
    if (run.arena() >= opened->arenas.size())
      return Invalid(of, ".arena: out of range; the message has ", opened->arenas.size(), " arenas");
    const uint64_t most = opened->arenas[run.arena()].bytes;
    if (run.offset() > most || run.bytes() > most - run.offset()) return Invalid(of, ": exceeds its arena");
    if (run.bytes() == 0 || run.bytes() > left)
      return Invalid(of, ".bytes: ", run.bytes(), "; expected at least 1, and at most the object's remaining ", left,
                     " bytes");
    left -= run.bytes();
    opened->runs.push_back({run.arena(), run.offset(), run.bytes()});
  }
  return left == 0 ? absl::OkStatus() : Invalid(field, ".runs: ", left, " bytes of the object are missing");
}

absl::Status ReadOpened(const std::string& field, const v1::PeerOpened& message, const PeerObject& asked,
                        PeerOpened* opened) {
  if (message.miss_reason() > static_cast<uint32_t>(MissReason::kCovered)) {
    // A later version may report other reasons; any of them is a miss.
    opened->miss = MissReason::kNeverSeen;
    return absl::OkStatus();
  }
  opened->miss = static_cast<MissReason>(message.miss_reason());
  if (opened->miss != MissReason::kNone) return absl::OkStatus();
  absl::StatusOr<ObjectHeader> header = ReadHeader(field + ".header", message.header());
  if (!header.ok()) return header.status();
  if (header->key != asked.key || header->shard != asked.shard)
    return Invalid(field, ".header: describes another object");
  if (message.bytes() != header->bytes) return Invalid(field, ".bytes: does not match the header");
  if (message.tier() == 0 || message.tier() > static_cast<uint32_t>(TierKind::kRemote)) {
    return Invalid(field, ".tier: ", message.tier(), " is unknown; expected 1 to 4");
  }
  if (absl::Status status = ReadBytes(field + ".lease", message.lease(), &opened->lease); !status.ok()) return status;
  if (absl::Status status = ReadGrant(field + ".grant", message.grant(), &opened->grant); !status.ok()) return status;
  if (absl::Status status = CheckMillis(field + ".lease_ms", message.lease_ms()); !status.ok()) return status;
  opened->header = message.header();
  opened->bytes = message.bytes();
  opened->tier = static_cast<TierKind>(message.tier());
  opened->lease_ms = message.lease_ms();
  return ReadPlace(field, message, opened);
}

void WriteOpened(const PeerOpened& one, v1::PeerOpened* object) {
  object->set_miss_reason(static_cast<uint32_t>(one.miss));
  if (one.miss != MissReason::kNone) return;
  object->set_header(one.header);
  object->set_bytes(one.bytes);
  object->set_tier(static_cast<uint32_t>(one.tier));
  object->set_lease(Bytes(one.lease));
  WriteGrant(one.grant, object->mutable_grant());
  object->set_lease_ms(one.lease_ms);
  for (const PeerArena& each : one.arenas) {
    v1::PeerArena* arena = object->add_arenas();
    arena->set_remote_key(each.remote_key);
    arena->set_base(each.base);
    arena->set_bytes(each.bytes);
  }
  for (const PeerRun& each : one.runs) {
    v1::PeerRun* run = object->add_runs();
    run->set_arena(each.arena);
    run->set_offset(each.offset);
    run->set_bytes(each.bytes);
  }
}

}  // namespace

// Fields beside the header: a run takes up to 32 bytes, an arena 32 besides its key.
static_assert(limits::kMaxPeerKeysPerCall * (limits::kMaxPeerHeaderBytes + 256 + kMaxPeerRuns * 32 +
                                             kMaxPeerArenas * (kMaxPeerRemoteKeyBytes + 32)) +
                      (1 << 20) <
                  limits::kMaxPeerReplyBytes,
              "a reply has space for the objects of an Open and their places");

void Write(const PeerHello& hello, v1::PeerGreeting* message) {
  message->set_protocol_min(limits::kPeerProtocolMin);
  message->set_protocol_max(limits::kPeerProtocolMax);
  message->set_node(hello.node);
  message->set_incarnation(Bytes(hello.incarnation));
  message->set_transport_address(hello.transport_address);
}

absl::StatusOr<PeerHello> Read(const v1::PeerGreeting& message) {
  const uint32_t low = std::max(message.protocol_min(), limits::kPeerProtocolMin);
  const uint32_t high = std::min(message.protocol_max(), limits::kPeerProtocolMax);
  if (low > high) {
    return absl::FailedPreconditionError(absl::StrCat(
        "protocol: no common version; the peer speaks ", message.protocol_min(), " to ", message.protocol_max(),
        "; this node speaks ", limits::kPeerProtocolMin, " to ", limits::kPeerProtocolMax));
  }
  if (!IsNodeName(message.node())) return Invalid("node: not a valid node name");
  if (message.transport_address().size() > limits::kMaxPeerNameBytes) {
    return Invalid("transport_address: too long; expected at most ", limits::kMaxPeerNameBytes, " bytes");
  }
  PeerHello hello{.node = message.node(), .transport_address = message.transport_address(), .protocol = high};
  if (absl::Status status = ReadBytes("incarnation", message.incarnation(), &hello.incarnation); !status.ok()) {
    return status;
  }
  return hello;
}

void Write(const PeerOpen& open, const std::string& tenant, v1::PeerOpenRequest* message) {
  message->set_tenant(tenant);
  message->set_lease_ms(open.lease_ms);
  for (const PeerObject& object : open.objects) {
    v1::PeerKey* key = message->add_keys();
    key->set_key(Bytes(object.key.bytes));
    key->set_shard_rank(object.shard.rank);
    key->set_shard_size(object.shard.size);
  }
}

absl::StatusOr<PeerOpen> Read(const v1::PeerOpenRequest& message) {
  if (absl::Status status = CheckCount("keys", message.keys_size(), limits::kMaxPeerKeysPerCall); !status.ok()) {
    return status;
  }
  if (absl::Status status = CheckMillis("lease_ms", message.lease_ms()); !status.ok()) return status;
  PeerOpen open{.lease_ms = message.lease_ms()};
  for (int i = 0; i < message.keys_size(); ++i) {
    const v1::PeerKey& key = message.keys(i);
    const std::string field = absl::StrCat("keys[", i, "]");
    PeerObject& object = open.objects.emplace_back();
    if (absl::Status status = ReadBytes(field + ".key", key.key(), &object.key.bytes); !status.ok()) return status;
    object.shard = {.rank = key.shard_rank(), .size = std::max(1u, key.shard_size())};
    if (object.shard.size > limits::kMaxTensorShards) {
      return Invalid(field, ".shard_size: too large; expected at most ", limits::kMaxTensorShards);
    }
    if (object.shard.rank >= object.shard.size) return Invalid(field, ".shard_rank: must be less than shard_size");
  }
  return open;
}

void Write(const std::vector<PeerOpened>& opened, v1::PeerOpenReply* message) {
  for (const PeerOpened& one : opened) WriteOpened(one, message->add_objects());
}

absl::StatusOr<std::vector<PeerOpened>> Read(const v1::PeerOpenReply& message, const PeerOpen& asked) {
  if (static_cast<size_t>(message.objects_size()) != asked.objects.size()) {
    return Invalid("objects: ", message.objects_size(), " for ", asked.objects.size(), " keys");
  }
  std::vector<PeerOpened> opened(asked.objects.size());
  for (int i = 0; i < message.objects_size(); ++i) {
    absl::Status status =
        ReadOpened(absl::StrCat("objects[", i, "]"), message.objects(i), asked.objects[i], &opened[i]);
    if (!status.ok()) return status;
  }
  return opened;
}

void Write(const PeerRenew& renew, v1::PeerRenewRequest* message) {
  for (const PeerLease& lease : renew.leases) message->add_leases(Bytes(lease));
  message->set_lease_ms(renew.lease_ms);
}

absl::StatusOr<PeerRenew> Read(const v1::PeerRenewRequest& message) {
  absl::StatusOr<std::vector<PeerLease>> leases = ReadLeases(message);
  if (!leases.ok()) return leases.status();
  if (absl::Status status = CheckMillis("lease_ms", message.lease_ms()); !status.ok()) return status;
  return PeerRenew{.leases = *std::move(leases), .lease_ms = message.lease_ms()};
}

void Write(const std::vector<uint32_t>& lease_ms, v1::PeerRenewReply* message) {
  message->mutable_lease_ms()->Assign(lease_ms.begin(), lease_ms.end());
}

absl::StatusOr<std::vector<uint32_t>> Read(const v1::PeerRenewReply& message, const PeerRenew& asked) {
  if (static_cast<size_t>(message.lease_ms_size()) != asked.leases.size()) {
    return Invalid("lease_ms: ", message.lease_ms_size(), " for ", asked.leases.size(), " leases");
  }
  for (int i = 0; i < message.lease_ms_size(); ++i) {
    if (message.lease_ms(i) > limits::kMaxPeerLeaseMillis)
      return Invalid("lease_ms[", i, "]: out of range; expected at most ", limits::kMaxPeerLeaseMillis);
  }
  return std::vector<uint32_t>(message.lease_ms().begin(), message.lease_ms().end());
}

void Write(const std::vector<PeerLease>& leases, v1::PeerCloseRequest* message) {
  for (const PeerLease& lease : leases) message->add_leases(Bytes(lease));
}

absl::StatusOr<std::vector<PeerLease>> Read(const v1::PeerCloseRequest& message) {
  return ReadLeases(message);
}

void Write(const NamespaceId& ns, const std::string& tenant, v1::PeerWorkersRequest* message) {
  message->set_tenant(tenant);
  message->set_ns(Bytes(ns.bytes));
}

absl::StatusOr<NamespaceId> Read(const v1::PeerWorkersRequest& message) {
  NamespaceId ns;
  if (absl::Status status = ReadBytes("ns", message.ns(), &ns.bytes); !status.ok()) return status;
  return ns;
}

void Write(const std::vector<PeerWorker>& workers, v1::PeerWorkersReply* message) {
  for (const PeerWorker& worker : workers) {
    v1::PeerWorker* one = message->add_workers();
    one->set_worker(worker.worker);
    one->set_tokens_per_second(worker.tokens_per_second);
    one->set_queued_tokens(worker.queued_tokens);
    one->set_capacity(worker.capacity);
  }
}

absl::StatusOr<std::vector<PeerWorker>> Read(const v1::PeerWorkersReply& message) {
  if (static_cast<uint64_t>(message.workers_size()) > limits::kMaxPeerWorkers) {
    return Invalid("workers: too many; expected at most ", limits::kMaxPeerWorkers);
  }
  std::vector<PeerWorker> workers;
  for (int i = 0; i < message.workers_size(); ++i) {
    const v1::PeerWorker& one = message.workers(i);
    if (one.worker() == 0) return Invalid("workers[", i, "].worker: required");
    if (!std::isfinite(one.tokens_per_second()) || one.tokens_per_second() < 0) {
      return Invalid("workers[", i, "].tokens_per_second: ", one.tokens_per_second(),
                     "; expected a finite number, 0 or more");
    }
    workers.push_back({.worker = one.worker(),
                       .tokens_per_second = one.tokens_per_second(),
                       .queued_tokens = std::min(one.queued_tokens(), kMostQueuedTokens),
                       .capacity = one.capacity()});
  }
  return workers;
}

void Write(const PeerPrefill& prefill, const std::string& tenant, v1::PeerPrefillRequest* message) {
  message->set_tenant(tenant);
  message->set_ns(Bytes(prefill.ns.bytes));
  message->set_worker(prefill.worker);
  message->set_kind(static_cast<uint32_t>(prefill.kind));
  message->set_tokens(prefill.tokens);
  message->set_key(Bytes(prefill.key.bytes));
  message->set_patience_ms(prefill.patience_ms);
  message->set_lease_ms(prefill.lease_ms);
}

absl::StatusOr<PeerPrefill> Read(const v1::PeerPrefillRequest& message) {
  PeerPrefill prefill{.worker = message.worker(), .patience_ms = message.patience_ms(), .lease_ms = message.lease_ms()};
  if (absl::Status status = ReadBytes("ns", message.ns(), &prefill.ns.bytes); !status.ok()) return status;
  if (absl::Status status = ReadBytes("key", message.key(), &prefill.key.bytes); !status.ok()) return status;
  if (prefill.worker == 0) return Invalid("worker: required");
  prefill.kind = static_cast<ObjectKind>(message.kind());
  if (prefill.kind != ObjectKind::kSegment && prefill.kind != ObjectKind::kCheckpoint) {
    return Invalid("kind: expected segment or checkpoint");
  }
  if (message.tokens().empty()) return Invalid("tokens: empty");
  if (message.tokens().size() > limits::kMaxPrefillTokens * sizeof(int32_t)) {
    return Invalid("tokens: too many; expected at most ", limits::kMaxPrefillTokens);
  }
  const absl::StatusOr<std::vector<int32_t>> tokens = UnpackTokens(message.tokens());
  if (!tokens.ok()) return tokens.status();
  if (MakeKey(prefill.ns, prefill.kind, *tokens) != prefill.key) return Invalid("key: does not match the text");
  if (prefill.patience_ms == 0 || prefill.patience_ms > limits::kMaxPeerPrefillMillis) {
    return Invalid("patience_ms: out of range; expected 1 to ", limits::kMaxPeerPrefillMillis);
  }
  if (absl::Status status = CheckMillis("lease_ms", message.lease_ms()); !status.ok()) return status;
  prefill.tokens = message.tokens();
  return prefill;
}

void Write(const PeerOpened& opened, v1::PeerPrefillReply* message) {
  WriteOpened(opened, message->mutable_object());
}

absl::StatusOr<PeerOpened> Read(const v1::PeerPrefillReply& message, const PeerPrefill& asked) {
  PeerOpened opened;
  if (absl::Status status = ReadOpened("object", message.object(), {.key = asked.key, .shard = {}}, &opened);
      !status.ok()) {
    return status;
  }
  return opened;
}

void Write(const PeerProbe& probe, const std::string& tenant, v1::PeerProbeRequest* message) {
  message->set_tenant(tenant);
  message->set_ns(Bytes(probe.ns.bytes));
  *message->mutable_prompt() = *probe.prompt;
}

absl::StatusOr<PeerProbe> Read(const v1::PeerProbeRequest& message) {
  PeerProbe probe;
  if (absl::Status status = ReadBytes("ns", message.ns(), &probe.ns.bytes); !status.ok()) return status;
  if (message.prompt().tokens().size() > limits::kMaxPrefillTokens * sizeof(int32_t)) {
    return Invalid("prompt.tokens: too many; expected at most ", limits::kMaxPrefillTokens);
  }
  probe.prompt = std::make_shared<const v1::Prompt>(message.prompt());
  return probe;
}

void Write(const v1::NodeProbe& probe, v1::PeerProbeReply* message) {
  *message->mutable_probe() = probe;
}

absl::StatusOr<v1::NodeProbe> Read(const v1::PeerProbeReply& message) {
  v1::NodeProbe probe = message.probe();
  constexpr uint64_t kMost = limits::kMaxPromptTokens;
  if (probe.prompt_tokens() > kMost || probe.prefix_tokens() > kMost || probe.segment_tokens() > kMost) {
    return Invalid("probe: too many tokens; expected at most ", kMost);
  }
  if (probe.fetch_ns() < 0 || probe.compute_ns() < 0 || probe.wait_ns() < 0)
    return Invalid("probe: fetch_ns, compute_ns or wait_ns is negative; expected 0 or more");
  if (!std::isfinite(probe.tokens_per_second()) || probe.tokens_per_second() < 0) {
    return Invalid("probe.tokens_per_second: ", probe.tokens_per_second(), "; expected a finite number, 0 or more");
  }
  if (static_cast<size_t>(probe.tiers_size()) > kMostTiers) {
    return Invalid("probe.tiers: too many; expected at most ", kMostTiers);
  }
  probe.set_queued_tokens(std::min(probe.queued_tokens(), kMostQueuedTokens));
  return probe;
}

}  // namespace ashlar::daemon
