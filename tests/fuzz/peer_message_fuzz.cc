// SPDX-License-Identifier: Apache-2.0
// Messages of the control plane between daemons, as another daemon's process wrote them: greetings, requests, and
// replies to what this node asked. An input is a byte that says which, and the message. What is read is within its
// bounds, and is read again from what this node would write.
#include <google/protobuf/stubs/logging.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "ashlar/v1/peer.pb.h"
#include "daemon/peer/control/peer_messages.h"
#include "proto/limits.h"
#include "proto/object.h"
#include "proto/prefill_limits.h"
#include "proto/tokens.h"
#include "tests/fuzz/fuzz.h"

namespace {

using namespace ashlar;
using namespace ashlar::daemon;

constexpr char kTenant[] = "acme";

bool IsLife(uint32_t millis) {
  return millis > 0 && millis <= limits::kMaxPeerLeaseMillis;
}

void Check(const PeerHello& hello) {
  FUZZ_EXPECT(!hello.node.empty() && hello.node.size() <= limits::kMaxPeerNameBytes);
  FUZZ_EXPECT(hello.transport_address.size() <= limits::kMaxPeerNameBytes);
  FUZZ_EXPECT(hello.protocol >= limits::kPeerProtocolMin && hello.protocol <= limits::kPeerProtocolMax);
}

void Check(const PeerOpen& open) {
  FUZZ_EXPECT(!open.objects.empty() && open.objects.size() <= limits::kMaxPeerKeysPerCall && IsLife(open.lease_ms));
  for (const PeerObject& object : open.objects) {
    FUZZ_EXPECT(object.shard.rank < object.shard.size && object.shard.size <= limits::kMaxTensorShards);
  }
}

void Check(const PeerOpened& opened) {
  if (opened.miss != MissReason::kNone) return;
  const absl::StatusOr<ObjectHeader> header = DecodeHeader(opened.header);
  FUZZ_EXPECT(header.ok() && header->bytes == opened.bytes && opened.bytes <= limits::kMaxObjectBytes);
  FUZZ_EXPECT(opened.tier > TierKind::kNone && opened.tier <= TierKind::kRemote);
  FUZZ_EXPECT(opened.grant.number != 0 && IsLife(opened.lease_ms));
  FUZZ_EXPECT(opened.arenas.size() <= kMaxPeerArenas && opened.runs.size() <= kMaxPeerRuns);
  for (const PeerArena& arena : opened.arenas) {
    FUZZ_EXPECT(!arena.remote_key.empty() && arena.remote_key.size() <= kMaxPeerRemoteKeyBytes);
    FUZZ_EXPECT(arena.base + arena.bytes >= arena.base);
  }
  uint64_t bytes = 0;
  for (const PeerRun& run : opened.runs) {
    FUZZ_EXPECT(run.arena < opened.arenas.size() && run.bytes > 0);
    FUZZ_EXPECT(run.offset + run.bytes > run.offset && run.offset + run.bytes <= opened.arenas[run.arena].bytes);
    bytes += run.bytes;
  }
  FUZZ_EXPECT(bytes == (opened.arenas.empty() ? 0 : opened.bytes));
}
void Check(const std::vector<PeerOpened>& opened) {
  for (const PeerOpened& one : opened) Check(one);
}

void Check(const PeerRenew& renew) {
  FUZZ_EXPECT(!renew.leases.empty() && renew.leases.size() <= limits::kMaxPeerLeasesPerCall && IsLife(renew.lease_ms));
}
void Check(const std::vector<uint32_t>& lives) {
  for (const uint32_t millis : lives) FUZZ_EXPECT(millis <= limits::kMaxPeerLeaseMillis);
}
void Check(const std::vector<PeerLease>& leases) {
  FUZZ_EXPECT(!leases.empty() && leases.size() <= limits::kMaxPeerLeasesPerCall);
}

void Check(const PeerOffer& offer) {
  uint64_t shards = 0;
  for (const PeerOffered& one : offer.objects) {
    shards += one.shards;
    FUZZ_EXPECT(one.shards > 0 && one.bytes > 0 && one.bytes <= limits::kMaxObjectBytes);
    FUZZ_EXPECT(std::isfinite(one.saves_a_byte) && one.saves_a_byte >= 0 && Name(one.kind) != "unknown");
  }
  FUZZ_EXPECT(shards > 0 && shards <= limits::kMaxPeerKeysPerCall);
  FUZZ_EXPECT(offer.patience_ms > 0 && offer.patience_ms <= limits::kMaxPeerPatienceMillis);
}
void Check(const std::vector<TakeOutcome>& outcomes) {
  for (const TakeOutcome outcome : outcomes) FUZZ_EXPECT(!Name(outcome).empty() && Name(outcome) != "unknown");
}

void Check(const NamespaceId&) {}
void Check(const std::vector<PeerWorker>& workers) {
  FUZZ_EXPECT(workers.size() <= limits::kMaxPeerWorkers);
  for (const PeerWorker& one : workers) {
    FUZZ_EXPECT(one.worker != 0 && std::isfinite(one.tokens_per_second) && one.tokens_per_second >= 0);
  }
}

void Check(const PeerPrefill& prefill) {
  const absl::StatusOr<std::vector<int32_t>> tokens = UnpackTokens(prefill.tokens);
  FUZZ_EXPECT(tokens.ok() && !tokens->empty() && tokens->size() <= limits::kMaxPrefillTokens);
  FUZZ_EXPECT(MakeKey(prefill.ns, prefill.kind, *tokens) == prefill.key && IsLife(prefill.lease_ms));
  FUZZ_EXPECT(prefill.worker != 0 && prefill.patience_ms > 0 && prefill.patience_ms <= limits::kMaxPeerPrefillMillis);
}

// A refusal names the field. For an accepted message, `write` makes an equivalent one.
template <typename Message, typename ReadIt, typename WriteIt>
void Try(const Message& message, ReadIt read, WriteIt write) {
  const auto got = read(message);
  if (!got.ok()) {
    FUZZ_EXPECT(absl::IsInvalidArgument(got.status()) || absl::IsFailedPrecondition(got.status()));
    FUZZ_EXPECT(got.status().message().find(':') != absl::string_view::npos);
    return;
  }
  Check(*got);
  Message own;
  write(*got, &own);
  const auto again = read(own);
  FUZZ_EXPECT(again.ok());
  Message twice;
  write(*again, &twice);
  FUZZ_EXPECT(own.SerializeAsString() == twice.SerializeAsString());
}

template <typename Message>
void Request(const std::string& bytes) {
  Message message;
  if (!message.ParseFromString(bytes)) return;
  const auto write = [](const auto& read, Message* out) {
    if constexpr (requires { Write(read, kTenant, out); }) {
      Write(read, kTenant, out);
    } else {
      Write(read, out);
    }
  };
  Try(
      message, [](const Message& it) { return Read(it); }, write);
}

// The objects that a reply may be about: the ones that its headers name.
PeerObject AskedFor(const v1::PeerOpened& opened) {
  const absl::StatusOr<ObjectHeader> header = DecodeHeader(opened.header());
  return header.ok() ? PeerObject{.key = header->key, .shard = header->shard} : PeerObject{};
}

// Answers `asked`, which has as many parts as the reply, or one more.
template <typename Message, typename Asked>
void Reply(const Message& message, const Asked& asked) {
  Try(
      message, [&](const Message& it) { return Read(it, asked); },
      [](const auto& read, Message* out) { Write(read, out); });
}

void TryOpenReply(const std::string& bytes, size_t more) {
  v1::PeerOpenReply message;
  if (!message.ParseFromString(bytes)) return;
  PeerOpen asked{.objects = {}, .lease_ms = 1000};
  for (const v1::PeerOpened& opened : message.objects()) asked.objects.push_back(AskedFor(opened));
  asked.objects.resize(asked.objects.size() + more);
  Reply(message, asked);
}

void TryPrefillReply(const std::string& bytes, size_t more) {
  v1::PeerPrefillReply message;
  if (!message.ParseFromString(bytes)) return;
  PeerPrefill asked;
  if (more == 0) asked.key = AskedFor(message.object()).key;
  Reply(message, asked);
}

void TryRenewReply(const std::string& bytes, size_t more) {
  v1::PeerRenewReply message;
  if (!message.ParseFromString(bytes)) return;
  Reply(message, PeerRenew{.leases = std::vector<PeerLease>(static_cast<size_t>(message.lease_ms_size()) + more)});
}

void TryOfferReply(const std::string& bytes, size_t more) {
  v1::PeerOfferReply message;
  if (!message.ParseFromString(bytes)) return;
  Reply(message, PeerOffer{.objects = std::vector<PeerOffered>(static_cast<size_t>(message.outcomes_size()) + more)});
}

void TryWorkersReply(const std::string& bytes, size_t) {
  Request<v1::PeerWorkersReply>(bytes);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  // The log of refusals takes longer than refusing.
  static const bool quiet = [] {
    google::protobuf::SetLogHandler(nullptr);
    return true;
  }();
  if (size == 0 || !quiet) return 0;
  constexpr void (*kRequests[])(const std::string&) = {Request<v1::PeerGreeting>,      Request<v1::PeerOpenRequest>,
                                                       Request<v1::PeerRenewRequest>,  Request<v1::PeerCloseRequest>,
                                                       Request<v1::PeerOfferRequest>,  Request<v1::PeerWorkersRequest>,
                                                       Request<v1::PeerPrefillRequest>};
  constexpr void (*kReplies[])(const std::string&, size_t) = {TryOpenReply, TryRenewReply, TryOfferReply,
                                                              TryWorkersReply, TryPrefillReply};
  const std::string bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
  const size_t which = data[0] & 15;
  if (which < std::size(kRequests)) {
    kRequests[which](bytes);
  } else {
    kReplies[(which - std::size(kRequests)) % std::size(kReplies)](bytes, data[0] >> 7);
  }
  return 0;
}
