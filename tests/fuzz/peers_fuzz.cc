// SPDX-License-Identifier: Apache-2.0
// A node of a cluster whose peers mean harm: requests, answers to this node's calls, messages of the data plane,
// entries of the directory, in any order, between an engine's lookups and publications. An input is a list of
// operations. Every call is answered once, with what a peer would accept; and when the peers have gone and the node
// ends, nothing is leased, granted or copied any more, and no memory is taken.
#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "daemon/peer/directory/directory_keys.h"
#include "daemon/runtime/log.h"
#include "tests/fuzz/peers_node.h"

namespace ashlar::fuzz {

void Node::Request(PeersInput& input) {
  const uint8_t method = input.Byte();
  const std::string bytes = input.Bytes();
  switch (method % 6) {
    case 0:
      Read<v1::PeerOpenRequest>(bytes, [&](const daemon::PeerOpen& open) {
        peers.Open(self, kTenant, open,
                   Answered<v1::PeerOpenReply, std::vector<daemon::PeerOpened>>(
                       [open](const auto& reply) { return daemon::Read(reply, open); }));
      });
      break;
    case 1:
      Read<v1::PeerRenewRequest>(bytes, [&](const daemon::PeerRenew& renew) {
        peers.Renew(self, renew, Answered<v1::PeerRenewReply, std::vector<uint32_t>>([renew](const auto& reply) {
                      return daemon::Read(reply, renew);
                    }));
      });
      break;
    case 2:
      Read<v1::PeerCloseRequest>(bytes,
                                 [&](const std::vector<daemon::PeerLease>& closed) { peers.Close(self, closed); });
      break;
    case 3:
      Read<v1::PeerOfferRequest>(bytes, [&](const daemon::PeerOffer& offer) {
        peers.Offer(self, kTenant, offer,
                    Answered<v1::PeerOfferReply, std::vector<TakeOutcome>>(
                        [offer](const auto& reply) { return daemon::Read(reply, offer); }));
      });
      break;
    case 4:
      Read<v1::PeerWorkersRequest>(bytes, [&](const NamespaceId& ns) {
        peers.Workers(self, kTenant, ns,
                      Answered<v1::PeerWorkersReply, std::vector<daemon::PeerWorker>>(
                          [](const auto& reply) { return daemon::Read(reply); }));
      });
      break;
    default:
      Read<v1::PeerPrefillRequest>(bytes, [&](const daemon::PeerPrefill& prefill) {
        peers.Prefill(self, kTenant, prefill,
                      Answered<v1::PeerPrefillReply, daemon::PeerOpened>(
                          [prefill](const auto& reply) { return daemon::Read(reply, prefill); }));
      });
  }
  Run();
}

// A message of the data plane: a kind, known or unknown grants and tickets, a place, and a payload of one byte.
void Node::Say(PeersInput& input) {
  const uint8_t what = input.Byte(), link = input.Byte(), which = input.Byte(), flags = input.Byte();
  if (what >= 0xf8) {
    (what & 1) != 0 ? ucx->Connects() : ucx->Breaks(link);
    return Run();
  }
  daemon::Message message{.kind = static_cast<daemon::MessageKind>(what % 12),
                          .code = static_cast<uint8_t>(flags >> 4)};
  if (message.kind == daemon::MessageKind::kFetch) {
    if (!grants.empty()) message.to = grants[which % grants.size()];
    message.from = {.number = uint64_t{1} + (flags >> 4), .secret = {}};
    message.patience = input.Number();
  } else if (message.kind == daemon::MessageKind::kCancel) {
    message.from = {.number = uint64_t{1} + which, .secret = {}};
  } else if (!ucx->said().empty()) {
    message.to = ucx->said()[which % ucx->said().size()].from;
  }
  if ((flags & 1) != 0) message.to.secret[0] ^= 1;
  message.offset = input.Number();
  const uint64_t length = input.Number();
  std::string payload;
  if (message.kind == daemon::MessageKind::kData || message.kind == daemon::MessageKind::kFailed) {
    payload.assign(std::min<uint64_t>(length, limits::kExtentBytes), static_cast<char>(flags));
  } else {
    message.length = length;
  }
  ucx->Says(link, message, std::move(payload));
  Run();
}

// An engine's lookup of up to two texts. Lands what it finds.
void Node::LookUp(uint8_t texts) {
  std::vector<storage::Query> queries;
  for (const size_t text : {texts & 7, texts >> 3 & 7}) {
    const ObjectHeader& plan = PlanOf(text);
    queries.push_back({.kind = plan.kind, .key = plan.key, .shard = plan.shard, .ns = plan.ns, .tokens = plan.tokens});
  }
  const auto kept = std::make_shared<const std::vector<storage::Query>>(std::move(queries));
  const daemon::RemoteQuestion question{*kept, nullptr};
  ++lookups;
  peers.lookup().Find(kTenant, {&question, 1}, [this, kept](const daemon::RemoteLookup::Adopted& adopted) {
    loop.PostCompletion(kTenant, [this, kept, adopted] {
      ++found_out;
      const storage::Match match = cache->Lookup(kEngine, *kept);
      FUZZ_EXPECT(match.found.size() == kept->size());
      std::vector<size_t> found;
      for (size_t i = 0; i < match.found.size(); ++i) {
        if (match.found[i].reason != MissReason::kNone) continue;
        FUZZ_EXPECT(match.found[i].header->key == (*kept)[i].key && match.found[i].header->ns == (*kept)[i].ns);
        found.push_back(i);
      }
      if (!found.empty()) Land(match, found);
    });
  });
  Run();
}

void Node::Land(const storage::Match& match, const std::vector<size_t>& found) {
  std::vector<storage::LandTarget::Segment> segments;
  for (const size_t i : found) segments.push_back({static_cast<uint32_t>(i), i * kTokens});
  const auto pages = std::make_shared<storage::TestPages>(storage::TestPages::Holding(2 * kTokens));
  cache->Land(kEngine, ++landings, match.lease, storage::TestTarget(*pages, std::move(segments)),
              {.progress = [](uint32_t) {},
               .done =
                   [this, pages, lease = match.lease, count = found.size()](const std::vector<MissReason>& verdict) {
                     FUZZ_EXPECT(verdict.size() == count);
                     loop.PostCompletion(kTenant, [this, lease] { cache->Release(kEngine, lease); });
                   }});
}

void Node::Engine(uint8_t what) {
  const ObjectHeader& plan = PlanOf(what >> 3);
  switch (what & 7) {
    case 0:
    case 1:
    case 2: {
      const auto reservation = cache->Reserve(kEngine, plan, {}, storage::PoolKind::kPublic, 0, 1e9);
      if (reservation.outcome == ReserveOutcome::kGranted) {
        cache->Publish(kEngine, reservation.id, storage::TestSource(plan, what >> 3), [](PublishOutcome) {});
      }
      break;
    }
    case 3:
      cache->retention().Evict(kTenant, plan.key);
      break;
    case 4:
      draining = !draining;
      draining ? cache->offers().StartDrain() : cache->offers().EndDrain();
      peers.SetDraining(draining);
      break;
    case 5:
      peers.Lost(*directory.members[1 + (what >> 3) % 2]);
      break;
    default:
      loop.PostCompletion(storage::kNoTenant, [this] { peers.AnnounceAgain(); });
  }
  Run();
}

// An entry of the directory about the other nodes, or an erasure, given by the bytes.
void Node::ReportEntry(PeersInput& input) {
  const uint8_t text = input.Byte();
  const std::string value = input.Bytes();
  if (const auto erasure = daemon::DecodeErasure(value); (text & 0x80) != 0) {
    if (directory.erasures.size() < 4 && erasure.has_value()) directory.erasures.push_back(*erasure);
    if (value.empty()) directory.erasures.clear();
    return;
  }
  const ObjectHeader& plan = PlanOf(text);
  const daemon::EntryId id{.ns = daemon::Shorten(plan.ns), .key = daemon::Shorten(plan.key)};
  const std::optional<daemon::Holding> holding = daemon::DecodeHolding(value, id);
  if (holding.has_value()) {
    directory.claims[plan.key] = *holding;
  } else {
    directory.claims.erase(plan.key);
  }
}

// The engines that offer or request prefill.
void Node::Prefill(uint8_t what) {
  if ((what & 1) != 0) {
    std::vector<daemon::PrefillWorkers::Result> results;
    if (assignment != 0) results.push_back({.assignment = std::exchange(assignment, 0), .published = (what & 2) != 0});
    router->workers().Serve(
        {.session = kWorker, .model = 1, .tenant = kTenant, .ns = PlanOf(0).ns, .tokens_per_second = 100}, results,
        kSecond, [this](const absl::StatusOr<daemon::PrefillWorkers::Given>& given) {
          if (given.ok()) assignment = given->assignment;
        });
    return Run();
  }
  for (const uint64_t plan : std::exchange(open_plans, {})) router->End(kEngine, plan);
  std::vector<daemon::ColdSegment> cold;
  for (size_t text = 0; text < kTexts; ++text) {
    if ((what >> (1 + text) & 1) == 0) continue;
    const ObjectHeader& plan = PlanOf(text);
    cold.push_back({.work = {.tenant = kTenant,
                             .ns = plan.ns,
                             .key = plan.key,
                             .kind = plan.kind,
                             .tokens = plan.tokens,
                             .packed = std::make_shared<const std::string>(TokensOf(text))},
                    .shard = plan.shard,
                    .bytes = plan.bytes});
  }
  if (cold.empty()) return;
  ++plans;
  router->Plan({.session = kEngine, .tenant = kTenant, .tokens_per_second = 10}, std::move(cold),
               [this](const absl::StatusOr<daemon::Router::Planned>& made) {
                 ++planned;
                 if (made.ok() && made->plan != 0) open_plans.push_back(made->plan);
               });
  Run();
}

// Leaves the cluster like a daemon.
void Node::End() {
  peers.PeerGone("peer");
  asker.End();
  for (int i = 0; i < 4; ++i) Pass(kSecond);
  FUZZ_EXPECT(found_out == lookups && planned == plans);
  for (const uint64_t plan : open_plans) router->End(kEngine, plan);
  router->Stop();
  Run();
  peers.EndOffers();
  for (int rounds = 0; !peers.Stop(); ++rounds) {
    FUZZ_EXPECT(rounds < 100);
    Pass(10 * kSecond);
  }
  for (const storage::SessionId session : {kEngine, kWorker}) cache->CloseSession(session, [] {});
  Run();
  transport = nullptr;
  Run();
  cache->Tick();
  Run();
  FUZZ_EXPECT(answered == asked);
  const daemon::PeersStats stats = peers.stats();
  FUZZ_EXPECT(stats.holder.leases == 0 && stats.holder.nodes == 0 && stats.objects.reading == 0);
  const auto erasure = cache->upkeep().Erase(kTenant, "tenant", std::nullopt);
  FUZZ_EXPECT(erasure.ok());
  storage::Slice whole;
  FUZZ_EXPECT((*erasure)->Run(whole));
  Run();
  const storage::Cache::Stats left = cache->stats();
  FUZZ_EXPECT(left.leases == 0 && left.reservations == 0 && left.landings == 0 && left.copies_under_way == 0);
  FUZZ_EXPECT(left.objects == 0 && Memory().Usage(kTenant).used_bytes == 0);
}

}  // namespace ashlar::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  constexpr size_t kMostOperations = 200;
  static const bool quiet = [] {
    ashlar::daemon::ConfigureLog("error", "text");
    return true;
  }();
  FUZZ_EXPECT(quiet);
  ashlar::fuzz::PeersInput input(data, size);
  ashlar::fuzz::Node node;
  for (size_t done = 0; !input.empty() && done < kMostOperations; ++done) node.Do(input);
  return 0;
}
