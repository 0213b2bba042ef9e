// SPDX-License-Identifier: Apache-2.0
#include "daemon/peer/control/peer_messages.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ashlar/v1/peer.pb.h"
#include "proto/limits.h"
#include "proto/testing/sample_layouts.h"
#include "proto/tokens.h"

namespace ashlar::daemon {
namespace {

std::string Error(const absl::Status& status) {
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  return std::string(status.message());
}

Key SomeKey() {
  Key key;
  key.bytes.fill(7);
  return key;
}
std::string Header() {
  return EncodeHeader(*PlanObject(ExampleLayout(), NamespaceId{}, SomeKey(), ObjectKind::kSegment, 600));
}
PeerOpened Opened() {
  PeerOpened opened{.header = Header(), .tier = TierKind::kDram, .grant = {.number = 9}, .lease_ms = 5};
  opened.bytes = DecodeHeader(opened.header)->bytes;
  opened.lease.fill(1);
  opened.grant.secret.fill(2);
  return opened;
}
PeerOpen AskedForIt() {
  return {.objects = {{.key = SomeKey()}}, .lease_ms = 1000};
}

TEST(PeerMessages, MessagesRoundTrip) {
  v1::PeerOpenRequest open;
  Write(AskedForIt(), "acme", &open);
  const auto asked = Read(open);
  ASSERT_TRUE(asked.ok()) << asked.status();
  EXPECT_EQ(asked->objects.at(0).key, SomeKey());
  EXPECT_EQ(asked->lease_ms, 1000u);
  EXPECT_EQ(open.tenant(), "acme");

  v1::PeerOpenReply reply;
  Write(std::vector<PeerOpened>{Opened()}, &reply);
  const auto opened = Read(reply, *asked);
  ASSERT_TRUE(opened.ok()) << opened.status();
  EXPECT_EQ(opened->at(0).header, Header());
  EXPECT_EQ(opened->at(0).lease, Opened().lease);
  EXPECT_EQ(opened->at(0).grant.secret, Opened().grant.secret);
}

TEST(PeerMessages, AGreetingOfAnotherVersionReportsBothRanges) {
  for (const uint32_t version : {limits::kPeerProtocolMin - 1, limits::kPeerProtocolMax + 1}) {
    v1::PeerGreeting greeting;
    greeting.set_protocol_min(version);
    greeting.set_protocol_max(version);  // the rest need not be understood
    const auto hello = Read(greeting);
    EXPECT_EQ(hello.status().code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_EQ(hello.status().message(),
              absl::StrCat("protocol: no common version; the peer speaks ", version, " to ", version,
                           "; this node speaks ", limits::kPeerProtocolMin, " to ", limits::kPeerProtocolMax));
  }
}

TEST(PeerMessages, AGreetingsFieldsAreChecked) {
  v1::PeerGreeting good;
  Write(PeerHello{.node = "a", .transport_address = "a:1"}, &good);
  ASSERT_TRUE(Read(good).ok());
  v1::PeerGreeting bad = good;
  bad.set_node("a b");
  EXPECT_EQ(Error(Read(bad).status()), "node: not a valid node name");
  bad = good;
  bad.set_incarnation("x");
  EXPECT_EQ(Error(Read(bad).status()), "incarnation: wrong length; expected 16 bytes");
  bad = good;
  bad.set_transport_address(std::string(254, 'x'));
  EXPECT_EQ(Error(Read(bad).status()), "transport_address: too long; expected at most 253 bytes");
}

TEST(PeerMessages, ARequestsFieldsAreChecked) {
  v1::PeerOpenRequest good, bad;
  Write(AskedForIt(), "acme", &good);
  const auto open = [&](auto change) {
    bad = good;
    change(bad);
    return Error(Read(bad).status());
  };
  EXPECT_EQ(open([](auto& m) { m.clear_keys(); }), "keys: empty");
  EXPECT_EQ(open([](auto& m) {
              for (int i = 0; i < 64; ++i) *m.add_keys() = m.keys(0);
            }),
            "keys: too many; expected at most 64");
  EXPECT_EQ(open([](auto& m) { m.mutable_keys(0)->set_key("x"); }), "keys[0].key: wrong length; expected 32 bytes");
  EXPECT_EQ(open([](auto& m) { m.mutable_keys(0)->set_shard_size(257); }),
            "keys[0].shard_size: too large; expected at most 256");
  EXPECT_EQ(open([](auto& m) { m.mutable_keys(0)->set_shard_rank(1); }),
            "keys[0].shard_rank: must be less than shard_size");
  EXPECT_EQ(open([](auto& m) { m.set_lease_ms(0); }), "lease_ms: out of range; expected 1 to 600000");
  EXPECT_EQ(open([](auto& m) { m.set_lease_ms(600001); }), "lease_ms: out of range; expected 1 to 600000");

  v1::PeerRenewRequest renew;
  EXPECT_EQ(Error(Read(renew).status()), "leases: empty");
  renew.add_leases("x");
  EXPECT_EQ(Error(Read(renew).status()), "leases[0]: wrong length; expected 16 bytes");
  v1::PeerCloseRequest close;
  for (int i = 0; i < 1025; ++i) close.add_leases(std::string(16, 'x'));
  EXPECT_EQ(Error(Read(close).status()), "leases: too many; expected at most 1024");
}

TEST(PeerMessages, AReplysFieldsAreChecked) {
  v1::PeerOpenReply good, bad;
  Write(std::vector<PeerOpened>{Opened()}, &good);
  const auto read = [&](auto change) {
    bad = good;
    change(*bad.mutable_objects(0));
    return Error(Read(bad, AskedForIt()).status());
  };
  PeerOpen other = AskedForIt();
  other.objects[0].key.bytes[0] = 0;
  EXPECT_EQ(Error(Read(good, other).status()), "objects[0].header: describes another object");
  other = AskedForIt();
  other.objects[0].shard = {.rank = 0, .size = 2};
  EXPECT_EQ(Error(Read(good, other).status()), "objects[0].header: describes another object");
  EXPECT_EQ(Error(Read(v1::PeerOpenReply(), AskedForIt()).status()), "objects: 0 for 1 keys");
  EXPECT_EQ(read([](auto& m) { m.clear_header(); }), "objects[0].header: required");
  EXPECT_EQ(read([](auto& m) { m.set_bytes(1); }), "objects[0].bytes: does not match the header");
  EXPECT_EQ(read([](auto& m) { m.set_tier(0); }), "objects[0].tier: 0 is unknown; expected 1 to 4");
  EXPECT_EQ(read([](auto& m) { m.set_tier(5); }), "objects[0].tier: 5 is unknown; expected 1 to 4");
  EXPECT_EQ(read([](auto& m) { m.set_lease(""); }), "objects[0].lease: wrong length; expected 16 bytes");
  EXPECT_EQ(read([](auto& m) { m.clear_grant(); }), "objects[0].grant.number: required");
  EXPECT_EQ(read([](auto& m) { m.mutable_grant()->set_secret(""); }),
            "objects[0].grant.secret: wrong length; expected 16 bytes");
  EXPECT_EQ(read([](auto& m) { m.set_lease_ms(0); }), "objects[0].lease_ms: out of range; expected 1 to 600000");
  // A reason unknown to this version is a miss.
  bad = good;
  bad.mutable_objects(0)->set_miss_reason(200);
  EXPECT_EQ(Read(bad, AskedForIt())->at(0).miss, MissReason::kNeverSeen);

  EXPECT_EQ(Error(Read(v1::PeerRenewReply(), PeerRenew{.leases = {{}}}).status()), "lease_ms: 0 for 1 leases");
}

TEST(PeerMessages, AnObjectsLocationIsReadAndChecked) {
  PeerOpened placed = Opened();
  placed.arenas = {{.remote_key = "first", .base = 4096, .bytes = placed.bytes}, {"second", UINT64_MAX - 100, 100}};
  placed.runs = {{0, 10, placed.bytes - 10}, {1, 90, 10}};
  v1::PeerOpenReply good, bad;
  Write(std::vector<PeerOpened>{placed}, &good);
  const auto read = Read(good, AskedForIt());
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->at(0).arenas.at(0).remote_key, "first");
  EXPECT_EQ(read->at(0).arenas.at(1).base, UINT64_MAX - 100);
  EXPECT_EQ(read->at(0).arenas.at(1).bytes, 100u);
  EXPECT_EQ(read->at(0).runs.at(1).arena, 1u);
  EXPECT_EQ(read->at(0).runs.at(1).offset, 90u);
  EXPECT_EQ(read->at(0).runs.at(0).bytes, placed.bytes - 10);

  using Spoil = std::function<void(v1::PeerOpened&)>;
  const std::pair<Spoil, std::string> cases[] = {
      {[](auto& m) { m.clear_arenas(); }, "objects[0].arenas: empty"},
      {[](auto& m) { m.clear_runs(); }, "objects[0].runs: empty"},
      {[](auto& m) {
         for (int i = 0; i < 15; ++i) *m.add_arenas() = m.arenas(0);
       },
       "objects[0].arenas: too many; expected at most 16"},
      {[](auto& m) {
         for (int i = 0; i < 767; ++i) *m.add_runs() = m.runs(0);
       },
       "objects[0].runs: too many; expected at most 768"},
      {[](auto& m) { m.mutable_arenas(1)->clear_remote_key(); },
       "objects[0].arenas[1].remote_key: wrong length; expected 1 to 512 bytes"},
      {[](auto& m) { m.mutable_arenas(0)->set_remote_key(std::string(513, 'k')); },
       "objects[0].arenas[0].remote_key: wrong length; expected 1 to 512 bytes"},
      {[](auto& m) { m.mutable_arenas(1)->set_bytes(101); }, "objects[0].arenas[1]: base + bytes overflows"},
      {[](auto& m) { m.mutable_runs(1)->set_arena(2); },
       "objects[0].runs[1].arena: out of range; the message has 2 arenas"},
      {[](auto& m) { m.mutable_runs(0)->set_offset(11); }, "objects[0].runs[0]: exceeds its arena"},
      {[](auto& m) { m.mutable_runs(0)->set_offset(UINT64_MAX); }, "objects[0].runs[0]: exceeds its arena"},
      {[](auto& m) { m.mutable_runs(1)->set_bytes(0); },
       "objects[0].runs[1].bytes: 0; expected at least 1, and at most the object's remaining 10 bytes"},
      {[](auto& m) { *m.add_runs() = m.runs(1); },
       "objects[0].runs[2].bytes: 10; expected at least 1, and at most the object's remaining 0 bytes"},
      {[](auto& m) { m.mutable_runs(1)->set_bytes(9); }, "objects[0].runs: 1 bytes of the object are missing"},
  };
  for (const auto& [spoil, error] : cases) {
    bad = good;
    spoil(*bad.mutable_objects(0));
    EXPECT_EQ(Error(Read(bad, AskedForIt()).status()), error);
  }
}

PeerOffer SomeOffer() {
  return {.objects = {{.key = SomeKey(),
                       .shards = 2,
                       .kind = ObjectKind::kCheckpoint,
                       .own = true,
                       .bytes = 1000,
                       .uses = 3,
                       .idle = 4,
                       .saves_a_byte = 5}},
          .kind = OfferKind::kDrain,
          .patience_ms = 600};
}

TEST(PeerMessages, OffersRoundTrip) {
  v1::PeerOfferRequest message;
  Write(SomeOffer(), "acme", &message);
  EXPECT_EQ(message.tenant(), "acme");
  const auto offer = Read(message);
  ASSERT_TRUE(offer.ok()) << offer.status();
  const PeerOffered& offered = offer->objects.at(0);
  EXPECT_EQ(offered.key, SomeKey());
  EXPECT_EQ(offered.shards, 2u);
  EXPECT_EQ(offered.kind, ObjectKind::kCheckpoint);
  EXPECT_TRUE(offered.own);
  EXPECT_EQ(offered.bytes, 1000u);
  EXPECT_EQ(offered.uses, 3u);
  EXPECT_EQ(offered.idle, 4u);
  EXPECT_EQ(offered.saves_a_byte, 5);
  EXPECT_EQ(offer->kind, OfferKind::kDrain);
  EXPECT_EQ(offer->patience_ms, 600u);

  v1::PeerOfferReply reply;
  Write(std::vector<TakeOutcome>{TakeOutcome::kNoSpace}, &reply);
  EXPECT_EQ(Read(reply, *offer)->at(0), TakeOutcome::kNoSpace);
  reply.set_outcomes(0, 200);
  EXPECT_EQ(Read(reply, *offer)->at(0), TakeOutcome::kNoSpace) << "of a later version";
  reply.set_outcomes(0, 0);
  EXPECT_EQ(Error(Read(reply, *offer).status()), "outcomes[0]: 0 is unknown; expected 1 to 8");
  reply.add_outcomes(1);
  EXPECT_EQ(Error(Read(reply, *offer).status()), "outcomes: 2 for 1 objects");
}

TEST(PeerMessages, WrongOffersNameTheField) {
  const struct {
    std::function<void(v1::PeerOfferRequest&)> spoil;
    const char* error;
  } cases[] = {
      {[](auto& m) { m.clear_objects(); }, "objects: empty; expected at least one"},
      {[](auto& m) { m.set_kind(9); }, "kind: 9 is unknown; expected 1 to 3"},
      {[](auto& m) { m.set_patience_ms(0); }, "patience_ms: out of range; expected 1 to 60000"},
      {[](auto& m) { m.set_patience_ms(60001); }, "patience_ms: out of range; expected 1 to 60000"},
      {[](auto& m) { m.mutable_objects(0)->set_key("short"); }, "objects[0].key: wrong length; expected 32 bytes"},
      {[](auto& m) { m.mutable_objects(0)->set_namespace_("short"); },
       "objects[0].namespace: wrong length; expected 32 bytes"},
      {[](auto& m) { m.mutable_objects(0)->set_shards(257); }, "objects[0].shards: too many; expected at most 256"},
      {[](auto& m) { m.mutable_objects(0)->set_shards(65); }, "objects: too many; expected at most 64 shards"},
      {[](auto& m) { m.mutable_objects(0)->set_kind(0); }, "objects[0].kind: 0 is unknown; expected 1 to 4"},
      {[](auto& m) { m.mutable_objects(0)->set_kind(99); }, "objects[0].kind: 99 is unknown; expected 1 to 4"},
      {[](auto& m) { m.mutable_objects(0)->set_kind(258); }, "objects[0].kind: 258 is unknown; expected 1 to 4"},
      {[](auto& m) { m.mutable_objects(0)->set_pool(2); }, "objects[0].pool: 2 is unknown; expected 0 or 1"},
      {[](auto& m) { m.mutable_objects(0)->set_bytes(0); },
       "objects[0].bytes: out of range; expected at most 1099511627776"},
      {[](auto& m) { m.mutable_objects(0)->set_saves_a_byte(-1); },
       "objects[0].saves_a_byte: must be a number of at least 0"},
      {[](auto& m) { m.mutable_objects(0)->set_saves_a_byte(std::numeric_limits<float>::quiet_NaN()); },
       "objects[0].saves_a_byte: must be a number of at least 0"},
  };
  for (const auto& [spoil, error] : cases) {
    v1::PeerOfferRequest message;
    Write(SomeOffer(), "acme", &message);
    spoil(message);
    EXPECT_EQ(Error(Read(message).status()), error);
  }
}

TEST(PeerMessages, PrefillIsReadAsItWasWritten) {
  const std::string tokens = PackTokens(std::vector<int32_t>{5, 6, 7});
  const PeerPrefill prefill{.ns = {},
                            .worker = 9,
                            .kind = ObjectKind::kCheckpoint,
                            .tokens = tokens,
                            .key = MakeKey({}, ObjectKind::kCheckpoint, std::vector<int32_t>{5, 6, 7}),
                            .patience_ms = 1000,
                            .lease_ms = 60000};
  v1::PeerPrefillRequest good, bad;
  Write(prefill, "tenant", &good);
  EXPECT_EQ(good.tenant(), "tenant");
  const absl::StatusOr<PeerPrefill> read = Read(good);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->worker, 9u);
  EXPECT_EQ(read->kind, ObjectKind::kCheckpoint);
  EXPECT_EQ(read->tokens, tokens);
  EXPECT_EQ(read->key, prefill.key);
  EXPECT_EQ(read->patience_ms, 1000u);
  const auto spoilt = [&](auto change) {
    bad = good;
    change(bad);
    return Error(Read(bad).status());
  };
  EXPECT_EQ(spoilt([](auto& m) { m.set_ns("x"); }), "ns: wrong length; expected 32 bytes");
  EXPECT_EQ(spoilt([](auto& m) { m.set_key("x"); }), "key: wrong length; expected 32 bytes");
  EXPECT_EQ(spoilt([](auto& m) { m.set_worker(0); }), "worker: required");
  EXPECT_EQ(spoilt([](auto& m) { m.set_kind(7); }), "kind: expected segment or checkpoint");
  EXPECT_EQ(spoilt([](auto& m) { m.clear_tokens(); }), "tokens: empty");
  EXPECT_EQ(spoilt([](auto& m) { m.set_tokens("odd"); }), "tokens: length is not a multiple of 4 bytes (int32)");
  EXPECT_EQ(spoilt([](auto& m) { m.set_tokens(std::string(4 * 128 * 1024 + 4, 'x')); }),
            "tokens: too many; expected at most 131072");
  EXPECT_EQ(spoilt([](auto& m) { m.set_tokens("four"); }), "key: does not match the text");
  EXPECT_EQ(spoilt([](auto& m) { m.set_kind(1); }), "key: does not match the text");
  EXPECT_EQ(spoilt([](auto& m) { m.set_patience_ms(0); }), "patience_ms: out of range; expected 1 to 3600000");
  EXPECT_EQ(spoilt([](auto& m) { m.set_lease_ms(0); }), "lease_ms: out of range; expected 1 to 600000");

  v1::PeerPrefillReply reply;
  Write(Opened(), &reply);
  const PeerPrefill asked{.key = AskedForIt().objects[0].key};
  const bool whole = AskedForIt().objects[0].shard == TensorShard{};
  EXPECT_EQ(Read(reply, asked).ok(), whole);
  EXPECT_EQ(Error(Read(reply, prefill).status()), "object.header: describes another object");
  EXPECT_EQ(Error(Read(v1::PeerPrefillReply(), asked).status()), "object.header: required");
}

TEST(PeerMessages, WorkersAreChecked) {
  v1::PeerWorkersRequest request;
  Write(NamespaceId{}, "tenant", &request);
  EXPECT_EQ(*Read(request), NamespaceId{});
  request.set_ns("x");
  EXPECT_EQ(Error(Read(request).status()), "ns: wrong length; expected 32 bytes");
  v1::PeerWorkersReply reply;
  Write(std::vector<PeerWorker>{{.worker = 3, .tokens_per_second = 1.5, .queued_tokens = 7, .capacity = 2}}, &reply);
  const auto workers = Read(reply);
  ASSERT_TRUE(workers.ok());
  EXPECT_EQ(workers->at(0).worker, 3u);
  EXPECT_EQ(workers->at(0).tokens_per_second, 1.5);
  EXPECT_EQ(workers->at(0).queued_tokens, 7u);
  EXPECT_EQ(workers->at(0).capacity, 2u);
  reply.mutable_workers(0)->set_tokens_per_second(std::numeric_limits<double>::quiet_NaN());
  EXPECT_EQ(Error(Read(reply).status()), "workers[0].tokens_per_second: nan; expected a finite number, 0 or more");
  reply.mutable_workers(0)->set_tokens_per_second(-1);
  EXPECT_EQ(Error(Read(reply).status()), "workers[0].tokens_per_second: -1; expected a finite number, 0 or more");
  reply.mutable_workers(0)->set_worker(0);
  EXPECT_EQ(Error(Read(reply).status()), "workers[0].worker: required");
  for (int i = 0; i < 256; ++i) reply.add_workers();
  EXPECT_EQ(Error(Read(reply).status()), "workers: too many; expected at most 256");
}

}  // namespace
}  // namespace ashlar::daemon
